"""Experts against their definition, token by token, in fp64: outputs, all gradients, counts and auxiliary losses."""

import datetime
from collections import namedtuple
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megalite.config.options import ModelConfig
from megalite.nn.micro_batch import Batch
from megalite.nn.moe import MoELayer
from megalite.nn.parameter import ParamFactory, params_with_specs
from megalite.nn.router import AUX_LOSSES
from megalite.nn.wgrad_store import WeightGradStore
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh, build_mesh

S, B, D, F, WEIGHT = 6, 2, 8, 5, 0.25
NAMES = "experts topk score_function pre_softmax scaling groups group_topk bias coefficients sinkhorn"


class Routing(namedtuple("Routing", NAMES, defaults=("softmax", False, 1.0, None, None, False, {}, False))):
    def model(self, width: int = D, wide: int = F, activation: str = "swiglu", **more: Any) -> ModelConfig:
        kinds = {"sinkhorn": 0.0} if self.sinkhorn else {k: c for k, c in self.coefficients.items() if k != "z_loss"}
        names = ("topk", "score_function", "pre_softmax", "topk_scaling_factor", "num_groups", "group_topk")
        of_router = dict(zip((f"moe_router_{name}" for name in names), self[1:7], strict=True))
        of_router |= dict(moe_router_load_balancing_type=(*kinds,), moe_aux_loss_coeff=(*kinds.values(),))
        more = dict(add_bias_linear=False, moe_z_loss_coeff=self.coefficients.get("z_loss", 0.0), **of_router) | more
        more |= dict(moe_router_enable_expert_bias=self.bias, num_experts=self.experts, moe_ffn_hidden_size=wide)
        return ModelConfig(1, width, activation=activation, init_method_std=1.0, **more)


IN_GROUPS: dict[str, Any] = dict(scaling=2.5, groups=4, group_topk=2, bias=True)
CASES: dict[str, tuple[Routing, dict[str, Any]]] = {
    "mixtral": (Routing(8, 2, coefficients={"aux_loss": 0.1}), {}),
    "qwen": (
        Routing(8, 3, pre_softmax=True, coefficients={"aux_loss": 0.1, "seq_aux_loss": 0.2, "z_loss": 0.3}),
        dict(moe_shared_expert_intermediate_size=6, moe_shared_expert_gate=True),
    ),
    "one of pre-softmax": (Routing(4, 1, pre_softmax=True, scaling=2.0, coefficients={"seq_aux_loss": 0.2}), {}),
    "deepseek": (
        Routing(8, 4, "sigmoid", coefficients={"seq_aux_loss": 0.5, "z_loss": 0.1}, **IN_GROUPS),
        dict(moe_shared_expert_intermediate_size=6),
    ),
    "one of sigmoid, ungated": (Routing(8, 1, "sigmoid", coefficients={"aux_loss": 0.3}), dict(activation="gelu")),
    "all experts": (Routing(4, 4, coefficients=dict.fromkeys(AUX_LOSSES, 0.1)), {}),
    "sinkhorn of one": (Routing(4, 1, "sigmoid", sinkhorn=True, coefficients={"z_loss": 0.1}), {}),
    "sinkhorn of two": (Routing(8, 2, pre_softmax=True, sinkhorn=True), {}),
    "gpt-oss": (Routing(8, 3, coefficients={"aux_loss": 0.1}), dict(add_bias_linear=True, activation="clamped_swiglu")),
    "one with biases, ungated": (Routing(4, 1, "sigmoid"), dict(add_bias_linear=True, activation="gelu")),
    "never the last three": (Routing(8, 2, bias=True), {}),
}


def make(name: str) -> tuple[MoELayer, Routing]:
    routing, more = CASES[name]
    experts = MoELayer(ParamFactory(Mesh.single_process(), torch.float64, seed=3), "e", routing.model(**more), 0, False)
    for bias in (*experts.biases, experts.router.logit_bias):
        if bias is not None:
            torch.nn.init.normal_(bias, generator=torch.Generator().manual_seed(bias.numel()))
    if routing.bias:
        experts.router.expert_bias = torch.linspace(-0.1, 0.1, routing.experts)
        experts.router.expert_bias[-3:] -= 100.0 * name.startswith("never")
    return experts, routing


def where(later: WeightGradStore | None = None, step: int = 0) -> Batch:
    return Batch(torch.zeros(0), None, None, torch.arange(B), step, wgrad_store=later, loss_grad=WEIGHT)


def balanced(logits_NE: Tensor) -> Tensor:
    """The matrix diag(a) exp(logits) diag(b) whose rows sum to 1/N and columns to 1/E."""
    matrix = logits_NE.detach().exp()
    for _ in range(5000):
        matrix = matrix / matrix.sum(1, keepdim=True) / len(matrix)
        matrix = matrix / matrix.sum(0) / matrix.shape[1]
    return matrix


def chosen(logits: Tensor, r: Routing, bias: Tensor | None, by: Tensor | None) -> tuple[list[int], Tensor]:
    """One token's experts and their probabilities. `by`: what choices are made by, if not by scores."""
    scores = logits.sigmoid() if r.score_function == "sigmoid" else logits.softmax(0) if r.pre_softmax else logits
    by = (by if by is not None else scores if bias is None else scores + bias).tolist()
    allowed = set(range(r.experts))
    if r.groups and r.group_topk:
        size = r.experts // r.groups
        worth = [sum(sorted(by[g * size : (g + 1) * size])[-(r.topk // r.group_topk) :]) for g in range(r.groups)]
        best = sorted(range(r.groups), key=lambda g: -worth[g])[: r.group_topk]
        allowed = {g * size + i for g in best for i in range(size)}
    ids = sorted(allowed, key=lambda e: (-by[e], e))[: r.topk]
    probs = scores[ids]
    if r.score_function == "sigmoid":
        probs = probs / probs.sum() if r.topk > 1 else probs
    elif not r.pre_softmax:
        probs = probs.softmax(0)
    return ids, probs * r.scaling


def weights(r: Routing) -> Tensor:
    return torch.tensor([r.coefficients.get(kind, 0.0) for kind in AUX_LOSSES], dtype=torch.float64)


def definition(x_SBD: Tensor, experts: MoELayer, r: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """(output, counts, the auxiliary losses' sums over tokens, times their coefficients)"""

    def feed(x: Tensor, up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        u, b = up @ x + (biases[0] if biases else 0), biases[1] if biases else 0
        if experts.activation.width == 1:
            return down @ torch.nn.functional.gelu(u, approximate="tanh") + b
        if biases:
            gate = u[0].clamp(max=7)
            return down @ (gate * (1.702 * gate).sigmoid() * (u[1].clamp(-7, 7) + 1)) + b
        return down @ (torch.nn.functional.silu(u[0]) * u[1])

    out, counts = torch.zeros_like(x_SBD), torch.zeros(B, r.experts, dtype=torch.int64)
    logits_SBE = x_SBD @ experts.router.weight.T
    if experts.router.logit_bias is not None:
        logits_SBE = logits_SBE + experts.router.logit_bias
    by_SBE = balanced(logits_SBE.flatten(0, 1)).view_as(logits_SBE) if r.sinkhorn else None
    for s in range(len(x_SBD)):
        for b in range(B):
            ids, probs = chosen(
                logits_SBE[s, b], r, experts.router.expert_bias, None if by_SBE is None else by_SBE[s, b]
            )
            counts[b, ids] += 1
            of = [experts.up, experts.down, *experts.biases]
            parts = [p * feed(x_SBD[s, b], *(w[e] for w in of)) for e, p in zip(ids, probs, strict=True)]
            if experts.shared_expert is not None:
                gate = 1.0 if experts.shared_gate is None else (x_SBD[s, b] @ experts.shared_gate).sigmoid()
                parts.append(gate * feed(x_SBD[s, b], experts.shared_expert.up, experts.shared_expert.down))
            out[s, b] = torch.stack(parts).sum(0)
    P_SBE = logits_SBE.softmax(-1)
    if r.score_function == "sigmoid":
        P_SBE = logits_SBE.sigmoid() / logits_SBE.sigmoid().sum(-1, keepdim=True)
    n, length, share = len(x_SBD) * B, len(x_SBD), counts.double() / r.topk
    aux = n * r.experts * (share.sum(0) / n * P_SBE.mean((0, 1))).sum()
    seq = sum(length * r.experts * (share[b] / length * P_SBE[:, b].mean(0)).sum() for b in range(B))
    losses = [aux, torch.as_tensor(seq), aux, logits_SBE.logsumexp(-1).square().sum()]  # of one micro-batch
    return out, counts.sum(0), torch.stack(losses) * weights(r)


def close(a: Tensor, b: Tensor, what: str = "") -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("name", CASES)
def test_full_tensor_hooks_are_called_by_the_owner(name: str) -> None:
    """That call waits for the gather of its weights (optim/param_gather.py), which nobody else does."""
    (experts, _), called = make(name), set[torch.nn.Module]()
    for module in experts.modules():
        module.register_forward_pre_hook(lambda module, _: called.add(module))
    experts(torch.randn(6, B, D, dtype=torch.float64), where())
    assert {module for module in experts.modules() if [*module.parameters(recurse=False)]} <= called


@pytest.mark.parametrize("length", [S, 1])
@pytest.mark.parametrize("name", CASES)
def test_experts_equal_the_definition(name: str, length: int) -> None:
    x, dy = torch.randn(2, length, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    experts, routing = make(name)
    parameters = list(experts.parameters())
    y = experts(x.requires_grad_(), where())
    assert not experts.router.expert_counts.any(), "only backward counts"
    grads = torch.autograd.grad(y, [x, *parameters], dy)
    want, counts, losses = definition(x, experts, routing)
    close(y, want)
    assert torch.equal(experts.router.expert_counts, counts)
    if routing.coefficients:
        close(experts.router.loss_sums * weights(routing), losses)
    total = (want * dy).sum() + WEIGHT * losses.sum()
    wanted = torch.autograd.grad(total, [x, *parameters], allow_unused=True)
    for p, grad, right in zip(["x", *parameters], grads, wanted, strict=True):
        close(grad, torch.zeros_like(grad) if right is None else right, getattr(getattr(p, "spec", None), "name", "x"))
    if name.startswith("never"):
        assert not counts[-3:].any() and not grads[2][-3:].any()


# ---- on several ranks
AWAY = -100.0  # a bias with which an expert is never chosen
Case = tuple[dict[str, int], Routing, tuple[float, ...], int, int]  # sizes, routing, biases, length, micro-batch


def _as_one(sizes: dict[str, int], routing: Routing, biases: tuple[float, ...], length: int, micro: int) -> None:
    """On one rank: all tokens through one process's experts, and its part of them through its own; then outputs and
    gradients of the part are equal, gradients of weights, counts and losses summed over the ranks, and what the ranks
    of ep exchanged is what the routing says."""
    mesh = build_mesh(device=torch.device("cpu"), timeout=datetime.timedelta(seconds=30), **sizes)
    dp, cp, tp = mesh.dp, mesh.cp, mesh.tp
    given = torch.randn(2, length, 4 * micro, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def through(mesh: Mesh, given: Tensor) -> tuple[MoELayer, list[Tensor]]:
        experts = MoELayer(ParamFactory(mesh, torch.float64, seed=3), "e", routing.model(wide=F + 1), 0, False)
        experts.router.expert_bias = torch.tensor(biases) if biases else None
        results = []
        for x, dy in given.split(micro, 2):
            y = experts(x := x.contiguous().requires_grad_(), where())
            y.backward(dy)
            results += [y.detach(), x.grad]
        return experts, results

    alone, want = through(Mesh.single_process(), given.clone())
    rows = given.view(2, cp.size, tp.size, -1, 4 * micro, D)[:, cp.rank, tp.rank]
    mine, got = through(mesh, rows[:, :, dp.shard_slice(4 * micro // dp.size)].clone())
    calls = [(call.op, call.num_bytes) for call in mesh.ep_etp.comm_log.recent]
    number = len(got) // 2 * dp.rank
    for result, right in zip(got, want[2 * number : 2 * number + len(got)], strict=True):
        close(result, right.view(cp.size, tp.size, -1, *right.shape[1:])[cp.rank, tp.rank])
    for (spec, p), right in zip(params_with_specs(mine), alone.parameters(), strict=True):
        whole, box = torch.zeros(spec.shape, dtype=torch.float64), spec.box(mesh.sizes, mesh.coordinates)
        whole[tuple(map(slice, box.start, box.stop))] = p.grad
        close(all_reduce_(whole, mesh.world), right.grad, spec.name)
    assert torch.equal(all_reduce_(mine.router.expert_counts, mesh.world), alone.router.expert_counts)
    close(all_reduce_(mine.router.loss_sums, mesh.world), alone.router.loss_sums)
    assert bool(mine.router.loss_sums.any()) == bool(routing.coefficients)
    if dp.size == mesh.world.size == mesh.ep.size:
        K, rank, of_rank_NK = routing.topk, mesh.ep.rank, alone.router(given[0], where())[1] // mine.num_local_experts
        of_rank = of_rank_NK.view(length, dp.size, micro, K)
        going = torch.stack([(of_rank == peer).any(-1).sum((0, 2)) for peer in range(dp.size)], 1).tolist()
        S, R = sum(going[rank]), sum(row[rank] for row in going)
        rows_given = [S * (D + 2 * K), R * D, S * D, R * (D + K)]  # there, back, and the gradients
        assert calls == [("all-gather", 16 * dp.size), *(("all-to-all", 8 * n) for n in rows_given)]


def _all_as_one(cases: list[Case]) -> None:
    for case in cases:
        _as_one(*case)


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss"])
@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_padded_auxiliary_losses_equal_transformers(kind: str, function: str) -> None:
    """With its attention_mask, and with autograd's gradients: sums over tokens that are not padding. For sigmoids,
    which transformers has no such loss of, its function is given their logarithms, whose softmax is their share."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    E, K, labels_per_token = 8, 2, 0.3
    routing = Routing(E, K, function, coefficients={kind: 0.1})
    experts = MoELayer(ParamFactory(Mesh.single_process(), torch.float64, seed=3), "e", routing.model(), 0, False)
    x_SBD = torch.randn(S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask_BS = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    batch = replace(where(), padding_SB=mask_BS.T == 0, token_weight=labels_per_token)
    y_SBD = experts(x_SBD, batch)
    y_SBD.backward(torch.zeros_like(y_SBD))

    weight = experts.router.weight.detach().clone().requires_grad_()
    logits_BSE = x_SBD.transpose(0, 1) @ weight.T
    shares_BSE = logits_BSE.sigmoid().log() if function == "sigmoid" else logits_BSE
    tokens = int(mask_BS.sum())

    def balancing(shares: Tensor, mask: Tensor) -> Tensor:
        return load_balancing_loss_func((shares.flatten(0, 1),), E, K, mask) / K * mask.sum()

    if kind == "z_loss":
        want = (logits_BSE.logsumexp(-1).square() * mask_BS).sum()
    elif kind == "seq_aux_loss":
        want = sum(balancing(shares_BSE[b : b + 1], mask_BS[b : b + 1]) for b in range(B))
    else:
        want = balancing(shares_BSE, mask_BS)
    bound = 1e-11 if kind == "z_loss" else 1e-6  # transformers counts in fp32
    assert float(experts.router.loss_sums[AUX_LOSSES.index(kind)]) == pytest.approx(float(want.detach()), rel=bound)
    (grad,) = torch.autograd.grad(0.1 * WEIGHT * labels_per_token * want, weight)
    torch.testing.assert_close(experts.router.weight.grad, grad, rtol=0, atol=bound * float(grad.abs().max()))
    ids_BSK = shares_BSE.topk(K, -1).indices
    chosen_E = torch.bincount(ids_BSK[mask_BS == 1].flatten(), minlength=E)
    assert experts.router.expert_counts.tolist() == chosen_E.tolist() and int(chosen_E.sum()) == tokens * K


@pytest.mark.parametrize("name", ["sinkhorn of one", "sinkhorn of two"])
def test_sinkhorn_ignores_padding(name: str) -> None:
    experts, _ = make(name)
    x_SBD = torch.randn(S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    padding_SB = torch.tensor([[False, False]] * 4 + [[True, True]] * 2)
    _, ids_NK = experts.router(x_SBD, replace(where(), padding_SB=padding_SB))
    _, alone_NK = experts.router(x_SBD[:4].contiguous(), where())
    assert ids_NK[: 4 * B].tolist() == alone_NK.tolist()
    assert experts.router(x_SBD, where())[1][: 4 * B].tolist() != alone_NK.tolist()  # which padding would change


def test_dispatch_moves_the_routed_tokens() -> None:
    """Whatever it is: no rank waits for a token that does not come. Of a layer there is one exchange of counts, and two
    of rows in each direction."""
    two, biased = Routing(8, 2), Routing(8, 2, bias=True)
    sizes = dict(tp=1, pp=1, ep=4)
    cases: list[Case] = [
        (sizes, two, (), S, 2),
        (sizes, biased, (0.0,) * 7 + (AWAY,), S, 2),  # an expert that never gets a token
        (sizes, biased, (0.0,) * 2 + (AWAY,) * 6, S, 2),  # all go to one rank
        (sizes, Routing(8, 8, "sigmoid"), (), S, 1),  # k = E
        (sizes, two, (), 1, 1),  # one token per rank
    ]
    run_ranks(4, _all_as_one, cases)


def test_auxiliary_losses_are_independent_of_the_layout() -> None:
    """The layouts of Megatron-LM's test_aux_loss.py, and gradients under ep, which were twice as large elsewhere
    (pytorch/pytorch#160285)."""
    losses = [
        Routing(8, 2, coefficients=of) for of in ({kind: 0.1} for kind in AUX_LOSSES if kind != "global_aux_loss")
    ]
    shapes = [(8, 1, 1), (4, 2, 1), (1, 1, 8), (2, 1, 4), (2, 2, 2)]  # tp, ep, cp
    sizes = [dict(tp=tp, pp=1, ep=ep, cp=cp) for tp, ep, cp in shapes]
    run_ranks(8, _all_as_one, [(size, routing, (), 16, 2) for size in sizes for routing in losses])


def _of_a_step_so_far(sizes: dict[str, int]) -> None:
    """global_aux_loss as Megatron-LM defines it: f of the choices of all ranks' micro-batches up to this one."""
    routing = Routing(8, 2, coefficients={"global_aux_loss": 0.1})
    mesh = build_mesh(device=torch.device("cpu"), timeout=datetime.timedelta(seconds=30), **sizes)
    experts = MoELayer(ParamFactory(mesh, torch.float64, seed=3), "e", routing.model(wide=F + 1), 0, False)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x_MRSBD = torch.randn(3, mesh.dp.size, 8, B, D, dtype=torch.float64, generator=generator)
        weight = experts.router.weight.detach().clone().requires_grad_()
        logits = x_MRSBD @ weight.T
        taken = torch.zeros_like(logits).scatter(-1, logits.topk(2, -1).indices, 1.0)
        F_ME = taken.sum((1, 2, 3)).cumsum(0)  # over ranks and micro-batches so far
        loss = 8 / 2 * (logits.softmax(-1).sum((1, 2, 3)) * F_ME / F_ME.sum(1, keepdim=True) * 2).sum()
        for counted in (experts.router.global_counts, experts.router.loss_sums):
            counted.zero_()
        experts.router.weight.grad = None
        for x_RSBD in x_MRSBD:
            mine = x_RSBD[mesh.dp.rank].unflatten(0, (mesh.tp.size, -1))[mesh.tp.rank]
            y = experts(mine.contiguous(), where())
            y.backward(torch.zeros_like(y))
        close(all_reduce_(experts.router.loss_sums, mesh.world), loss.new_tensor([0, 0, 1, 0]) * loss.detach())
        (want,) = torch.autograd.grad(0.1 * WEIGHT * loss, weight)
        close(all_reduce_(experts.router.weight.grad, mesh.world), want)


@pytest.mark.parametrize("sizes", [dict(tp=2, pp=1, ep=2), dict(tp=1, pp=1, ep=4)], ids=str)
def test_global_loss_uses_the_tokens_of_the_step(sizes: dict[str, int]) -> None:
    run_ranks(4, _of_a_step_so_far, sizes)


@pytest.mark.parametrize("topk", [1, 2, 8])
def test_moe_layer_saves_only_the_first_matmuls_rows(topk: int) -> None:
    """Bytes per token, in bf16: x 2 D; for each choice its two products 4 F, probability 4, expert and place 8 each."""
    width, wide, tokens = 64, 96, 128
    experts = MoELayer(
        ParamFactory(Mesh.single_process(), torch.bfloat16, seed=3), "e", Routing(8, topk).model(width, wide), 0, False
    )
    known, kept = {p.untyped_storage().data_ptr() for p in experts.parameters()}, dict[int, int]()

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with saved_tensors_hooks(keep, lambda t: t):
        y = experts(torch.randn(tokens // 2, 2, width, dtype=torch.bfloat16, requires_grad=True), where())
    assert y.requires_grad and sum(kept.values()) <= tokens * (2 * width + topk * (4 * wide + 20)) + 64
