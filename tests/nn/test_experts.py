"""The MoE layer against its definition, token by token, in fp64: outputs, gradients, counts and auxiliary losses."""

import datetime
from collections import namedtuple
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megalite.config.layer_spec import ROUTER_LOSSES
from megalite.config.options import ModelConfig
from megalite.nn.loss_sums import LossSums
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.moe import MoELayer
from megalite.nn.parameter import ParamFactory, params_with_specs
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh, build_mesh

S, B, D, F, WEIGHT = 6, 2, 8, 5, 0.25
NAMES = "experts topk score_function pre_softmax scaling groups group_topk bias coefficients sinkhorn"


class Routing(namedtuple("Routing", NAMES, defaults=("softmax", False, 1.0, None, None, False, {}, False))):
    def model(
        self, hidden_size: int = D, expert_size: int = F, activation: str = "swiglu", **options: Any
    ) -> ModelConfig:
        kinds = {"sinkhorn": 0.0} if self.sinkhorn else {k: c for k, c in self.coefficients.items() if k != "z_loss"}
        names = ("topk", "score_function", "pre_softmax", "topk_scaling_factor", "num_groups", "group_topk")
        router_options = dict(zip((f"moe_router_{name}" for name in names), self[1:7], strict=True))
        router_options |= dict(moe_router_load_balancing_type=(*kinds,), moe_aux_loss_coeff=(*kinds.values(),))
        options = (
            dict(add_bias_linear=False, moe_z_loss_coeff=self.coefficients.get("z_loss", 0.0), **router_options)
            | options
        )
        options |= dict(
            moe_router_enable_expert_bias=self.bias, num_experts=self.experts, moe_ffn_hidden_size=expert_size
        )
        return ModelConfig(1, hidden_size, activation=activation, init_method_std=1.0, **options)


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
    "all experts": (Routing(4, 4, coefficients=dict.fromkeys(ROUTER_LOSSES, 0.1)), {}),
    "sinkhorn of one": (Routing(4, 1, "sigmoid", sinkhorn=True, coefficients={"z_loss": 0.1}), {}),
    "sinkhorn of two": (Routing(8, 2, pre_softmax=True, sinkhorn=True), {}),
    "gpt-oss": (Routing(8, 3, coefficients={"aux_loss": 0.1}), dict(add_bias_linear=True, activation="clamped_swiglu")),
    "one with biases, ungated": (Routing(4, 1, "sigmoid"), dict(add_bias_linear=True, activation="gelu")),
    "never the last three": (Routing(8, 2, bias=True), {}),
}


def make(name: str) -> tuple[MoELayer, Routing]:
    routing, options = CASES[name]
    layer = MoELayer(
        ParamFactory(Mesh.single_process(), torch.float64, seed=3), "e", routing.model(**options), 0, False
    )
    for bias in (*layer.biases, layer.router.logit_bias):
        if bias is not None:
            torch.nn.init.normal_(bias, generator=torch.Generator().manual_seed(bias.numel()))
    if routing.bias:
        layer.router.expert_bias = torch.linspace(-0.1, 0.1, routing.experts)
        if name.startswith("never"):
            layer.router.expert_bias[-3:] -= 100.0
    return layer, routing


CONTEXT = ForwardContext(loss_grad=WEIGHT)


def context_with_sums(routing: Routing) -> ForwardContext:
    losses = [(ROUTER_LOSSES[kind], 0) for kind in ROUTER_LOSSES if kind in routing.coefficients]
    return replace(CONTEXT, loss_sums=LossSums((), losses, torch.device("cpu")))


def summed_losses(ctx: ForwardContext) -> Tensor:
    """Return the sums of the losses of ROUTER_LOSSES, [4]; 0 for inactive losses."""
    assert ctx.loss_sums is not None
    sums = {name: total for (name, _), total in zip(ctx.loss_sums.layer_losses, ctx.loss_sums.values, strict=True)}
    return torch.stack([sums.get(name, torch.zeros((), dtype=torch.float64)) for name in ROUTER_LOSSES.values()])


def make_batch(padding_SB: Tensor | None = None) -> Batch:
    return Batch(torch.zeros(0), None, None, torch.arange(B), padding_SB=padding_SB)


def balanced(logits_NE: Tensor) -> Tensor:
    """Return the matrix diag(a) exp(logits) diag(b) whose rows sum to 1/N and columns to 1/E."""
    matrix = logits_NE.detach().exp()
    for _ in range(5000):
        matrix = matrix / matrix.sum(1, keepdim=True) / len(matrix)
        matrix = matrix / matrix.sum(0) / matrix.shape[1]
    return matrix


def route(logits: Tensor, r: Routing, bias: Tensor | None, ranking: Tensor | None) -> tuple[list[int], Tensor]:
    """Return one token's experts and their probabilities.

    Args:
        logits: The router's logits of the token, [E].
        r: The routing.
        bias: The expert bias, [E].
        ranking: The values that experts are chosen by, if not by their scores.
    """
    scores = logits.sigmoid() if r.score_function == "sigmoid" else logits.softmax(0) if r.pre_softmax else logits
    ranking = (ranking if ranking is not None else scores if bias is None else scores + bias).tolist()
    allowed = set(range(r.experts))
    if r.groups and r.group_topk:
        size = r.experts // r.groups
        group_scores = [
            sum(sorted(ranking[g * size : (g + 1) * size])[-(r.topk // r.group_topk) :]) for g in range(r.groups)
        ]
        groups = sorted(range(r.groups), key=lambda g: -group_scores[g])[: r.group_topk]
        allowed = {g * size + i for g in groups for i in range(size)}
    ids = sorted(allowed, key=lambda e: (-ranking[e], e))[: r.topk]
    probs = scores[ids]
    if r.score_function == "sigmoid":
        probs = probs / probs.sum() if r.topk > 1 else probs
    elif not r.pre_softmax:
        probs = probs.softmax(0)
    return ids, probs * r.scaling


def loss_coefficients(r: Routing) -> Tensor:
    return torch.tensor([r.coefficients.get(kind, 0.0) for kind in ROUTER_LOSSES], dtype=torch.float64)


def reference(x_SBD: Tensor, layer: MoELayer, r: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """Return (output, counts, sums over tokens of the auxiliary losses times their coefficients)."""

    def expert_mlp(x: Tensor, up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        u, b = up @ x + (biases[0] if biases else 0), biases[1] if biases else 0
        if layer.activation.width == 1:
            return down @ torch.nn.functional.gelu(u, approximate="tanh") + b
        if biases:
            gate = u[0].clamp(max=7)
            return down @ (gate * (1.702 * gate).sigmoid() * (u[1].clamp(-7, 7) + 1)) + b
        return down @ (torch.nn.functional.silu(u[0]) * u[1])

    out, counts = torch.zeros_like(x_SBD), torch.zeros(B, r.experts, dtype=torch.int64)
    logits_SBE = x_SBD @ layer.router.weight.T
    if layer.router.logit_bias is not None:
        logits_SBE = logits_SBE + layer.router.logit_bias
    ranking_SBE = balanced(logits_SBE.flatten(0, 1)).view_as(logits_SBE) if r.sinkhorn else None
    for s in range(len(x_SBD)):
        for b in range(B):
            ids, probs = route(
                logits_SBE[s, b], r, layer.router.expert_bias, None if ranking_SBE is None else ranking_SBE[s, b]
            )
            counts[b, ids] += 1
            expert_weights = [layer.up, layer.down, *layer.biases]
            parts = [
                p * expert_mlp(x_SBD[s, b], *(w[e] for w in expert_weights)) for e, p in zip(ids, probs, strict=True)
            ]
            if layer.shared_expert is not None:
                gate = 1.0 if layer.shared_gate is None else (x_SBD[s, b] @ layer.shared_gate).sigmoid()
                parts.append(gate * expert_mlp(x_SBD[s, b], layer.shared_expert.up, layer.shared_expert.down))
            out[s, b] = torch.stack(parts).sum(0)
    P_SBE = logits_SBE.softmax(-1)
    if r.score_function == "sigmoid":
        P_SBE = logits_SBE.sigmoid() / logits_SBE.sigmoid().sum(-1, keepdim=True)
    n, length, token_shares = len(x_SBD) * B, len(x_SBD), counts.double() / r.topk
    aux = n * r.experts * (token_shares.sum(0) / n * P_SBE.mean((0, 1))).sum()
    seq_aux = sum(length * r.experts * (token_shares[b] / length * P_SBE[:, b].mean(0)).sum() for b in range(B))
    losses = [
        aux,
        torch.as_tensor(seq_aux),
        aux,
        logits_SBE.logsumexp(-1).square().sum(),
    ]  # global_aux_loss of one micro-batch is aux_loss
    return out, counts.sum(0), torch.stack(losses) * loss_coefficients(r)


def assert_close(a: Tensor, b: Tensor, name: str = "") -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("name", CASES)
def test_full_tensor_hooks_are_called_by_the_owner(name: str) -> None:
    """Only the forward pre-hook of a module waits for the all-gather of its weights (optim/zero/sync.py)."""
    (layer, _), called = make(name), set[torch.nn.Module]()
    for module in layer.modules():
        module.register_forward_pre_hook(lambda module, _: called.add(module))
    layer(torch.randn(6, B, D, dtype=torch.float64), make_batch(), CONTEXT)
    assert {module for module in layer.modules() if [*module.parameters(recurse=False)]} <= called


@pytest.mark.parametrize("length", [S, 1])
@pytest.mark.parametrize("name", CASES)
def test_experts_equal_the_definition(name: str, length: int) -> None:
    x, dy = torch.randn(2, length, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layer, routing = make(name)
    parameters = list(layer.parameters())
    ctx = context_with_sums(routing)
    y = layer(x.requires_grad_(), make_batch(), ctx)
    assert not layer.router.expert_counts.any(), "only backward counts"
    grads = torch.autograd.grad(y, [x, *parameters], dy)
    expected_y, counts, losses = reference(x, layer, routing)
    assert_close(y, expected_y)
    assert torch.equal(layer.router.expert_counts, counts)
    if routing.coefficients:
        assert_close(summed_losses(ctx) * loss_coefficients(routing), losses)
    total = (expected_y * dy).sum() + WEIGHT * losses.sum()
    expected_grads = torch.autograd.grad(total, [x, *parameters], allow_unused=True)
    for p, grad, expected in zip(["x", *parameters], grads, expected_grads, strict=True):
        assert_close(
            grad,
            torch.zeros_like(grad) if expected is None else expected,
            getattr(getattr(p, "spec", None), "name", "x"),
        )
    if name.startswith("never"):
        assert not counts[-3:].any() and not grads[2][-3:].any()


# ---- several ranks
NEVER_CHOSEN = -100.0  # the bias of an expert that no token chooses
Case = tuple[dict[str, int], Routing, tuple[float, ...], int, int]  # sizes, routing, biases, length, micro-batch


def _check_sharded_experts(
    sizes: dict[str, int], routing: Routing, biases: tuple[float, ...], length: int, micro: int
) -> None:
    """Compare this rank's experts on its tokens with the experts of one process on all tokens.

    Outputs and gradients of this rank's tokens are equal, as are gradients of weights, counts and losses summed over
    the ranks. The ranks of ep exchange what the routing says.
    """
    mesh = build_mesh(device=torch.device("cpu"), timeout=datetime.timedelta(seconds=30), **sizes)
    dp, cp, tp = mesh.dp, mesh.cp, mesh.tp
    inputs = torch.randn(2, length, 4 * micro, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run_layer(mesh: Mesh, inputs: Tensor) -> tuple[MoELayer, Tensor, list[Tensor]]:
        experts = MoELayer(ParamFactory(mesh, torch.float64, seed=3), "e", routing.model(expert_size=F + 1), 0, False)
        experts.router.expert_bias = torch.tensor(biases) if biases else None
        ctx = context_with_sums(routing)
        results = []
        for x, dy in inputs.split(micro, 2):
            y = experts(x := x.contiguous().requires_grad_(), make_batch(), ctx)
            y.backward(dy)
            results += [y.detach(), x.grad]
        return experts, summed_losses(ctx), results

    single_process, expected_losses, expected = run_layer(Mesh.single_process(), inputs.clone())
    rows = inputs.view(2, cp.size, tp.size, -1, 4 * micro, D)[:, cp.rank, tp.rank]
    layer, losses, actual = run_layer(mesh, rows[:, :, dp.shard_slice(4 * micro // dp.size)].clone())
    calls = [(call.op, call.num_bytes) for call in mesh.ep_etp.comm_log.recent]
    first = len(actual) * dp.rank
    for result, expected_result in zip(actual, expected[first : first + len(actual)], strict=True):
        assert_close(result, expected_result.view(cp.size, tp.size, -1, *expected_result.shape[1:])[cp.rank, tp.rank])
    for (spec, p), expected_result in zip(params_with_specs(layer), single_process.parameters(), strict=True):
        full_grad, box = torch.zeros(spec.shape, dtype=torch.float64), spec.box(mesh.sizes, mesh.coordinates)
        full_grad[tuple(map(slice, box.start, box.stop))] = p.grad
        assert_close(all_reduce_(full_grad, mesh.world), expected_result.grad, spec.name)
    assert torch.equal(all_reduce_(layer.router.expert_counts, mesh.world), single_process.router.expert_counts)
    assert_close(all_reduce_(losses, mesh.world), expected_losses)
    assert bool(losses.any()) == bool(routing.coefficients)
    if dp.size == mesh.world.size == mesh.ep.size:
        K, rank = routing.topk, mesh.ep.rank
        expert_ranks_NK = single_process.router(inputs[0], make_batch(), CONTEXT)[1] // layer.num_local_experts
        expert_ranks = expert_ranks_NK.view(length, dp.size, micro, K)
        sent = torch.stack([(expert_ranks == peer).any(-1).sum((0, 2)) for peer in range(dp.size)], 1).tolist()
        S, R = sum(sent[rank]), sum(row[rank] for row in sent)
        elements = [S * (D + 2 * K), R * D, S * D, R * (D + K)]  # dispatch, combine, and their gradients
        assert calls == [("all-gather", 16 * dp.size), *(("all-to-all", 8 * n) for n in elements)]


def _check_all_sharded_experts(cases: list[Case]) -> None:
    for case in cases:
        _check_sharded_experts(*case)


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss"])
@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_padded_auxiliary_losses_equal_transformers(kind: str, function: str) -> None:
    """Losses and gradients equal those of transformers with an attention_mask: sums over tokens that are not padding.

    transformers has no such loss of sigmoids. Its function gets their logarithms, whose softmax is the sigmoids' share.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    E, K, labels_per_token = 8, 2, 0.3
    routing = Routing(E, K, function, coefficients={kind: 0.1})
    layer = MoELayer(ParamFactory(Mesh.single_process(), torch.float64, seed=3), "e", routing.model(), 0, False)
    x_SBD = torch.randn(S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask_BS = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    batch = make_batch(padding_SB=mask_BS.T == 0)
    ctx = replace(context_with_sums(routing), token_weight=labels_per_token)
    y_SBD = layer(x_SBD, batch, ctx)
    y_SBD.backward(torch.zeros_like(y_SBD))

    weight = layer.router.weight.detach().clone().requires_grad_()
    logits_BSE = x_SBD.transpose(0, 1) @ weight.T
    shares_BSE = logits_BSE.sigmoid().log() if function == "sigmoid" else logits_BSE
    tokens = int(mask_BS.sum())

    def balancing_loss(shares: Tensor, mask: Tensor) -> Tensor:
        return load_balancing_loss_func((shares.flatten(0, 1),), E, K, mask) / K * mask.sum()

    if kind == "z_loss":
        expected = (logits_BSE.logsumexp(-1).square() * mask_BS).sum()
    elif kind == "seq_aux_loss":
        expected = sum(balancing_loss(shares_BSE[b : b + 1], mask_BS[b : b + 1]) for b in range(B))
    else:
        expected = balancing_loss(shares_BSE, mask_BS)
    tolerance = 1e-11 if kind == "z_loss" else 1e-6  # transformers computes in fp32
    assert float(summed_losses(ctx).sum()) == pytest.approx(float(expected.detach()), rel=tolerance)
    (grad,) = torch.autograd.grad(0.1 * WEIGHT * labels_per_token * expected, weight)
    torch.testing.assert_close(layer.router.weight.grad, grad, rtol=0, atol=tolerance * float(grad.abs().max()))
    ids_BSK = shares_BSE.topk(K, -1).indices
    chosen_E = torch.bincount(ids_BSK[mask_BS == 1].flatten(), minlength=E)
    assert layer.router.expert_counts.tolist() == chosen_E.tolist() and int(chosen_E.sum()) == tokens * K


@pytest.mark.parametrize("name", ["sinkhorn of one", "sinkhorn of two"])
def test_sinkhorn_ignores_padding(name: str) -> None:
    layer, _ = make(name)
    x_SBD = torch.randn(S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    padding_SB = torch.tensor([[False, False]] * 4 + [[True, True]] * 2)
    _, ids_NK = layer.router(x_SBD, make_batch(padding_SB), CONTEXT)
    _, unpadded_NK = layer.router(x_SBD[:4].contiguous(), make_batch(), CONTEXT)
    assert ids_NK[: 4 * B].tolist() == unpadded_NK.tolist()
    assert (
        layer.router(x_SBD, make_batch(), CONTEXT)[1][: 4 * B].tolist() != unpadded_NK.tolist()
    )  # padding would change it


def test_dispatch_moves_the_routed_tokens() -> None:
    """No rank waits for a token that does not come, whatever the routing is.

    A layer exchanges counts once, and rows twice in each direction.
    """
    top2, biased_top2 = Routing(8, 2), Routing(8, 2, bias=True)
    sizes = dict(tp=1, pp=1, ep=4)
    cases: list[Case] = [
        (sizes, top2, (), S, 2),
        (sizes, biased_top2, (0.0,) * 7 + (NEVER_CHOSEN,), S, 2),  # an expert that never gets a token
        (sizes, biased_top2, (0.0,) * 2 + (NEVER_CHOSEN,) * 6, S, 2),  # all go to one rank
        (sizes, Routing(8, 8, "sigmoid"), (), S, 1),  # k = E
        (sizes, top2, (), 1, 1),  # one token per rank
    ]
    run_ranks(4, _check_all_sharded_experts, cases)


def test_auxiliary_losses_are_independent_of_the_layout() -> None:
    """The layouts are those of Megatron-LM's test_aux_loss.py.

    Gradients under ep are covered because they were twice as large elsewhere (pytorch/pytorch#160285).
    """
    losses = [Routing(8, 2, coefficients={kind: 0.1}) for kind in ROUTER_LOSSES if kind != "global_aux_loss"]
    shapes = [(8, 1, 1), (4, 2, 1), (1, 1, 8), (2, 1, 4), (2, 2, 2)]  # tp, ep, cp
    sizes = [dict(tp=tp, pp=1, ep=ep, cp=cp) for tp, ep, cp in shapes]
    run_ranks(8, _check_all_sharded_experts, [(size, routing, (), 16, 2) for size in sizes for routing in losses])


def _check_global_aux_loss(sizes: dict[str, int]) -> None:
    """Compare with Megatron-LM's definition: f counts the tokens of all ranks' micro-batches up to this one."""
    routing = Routing(8, 2, coefficients={"global_aux_loss": 0.1})
    mesh = build_mesh(device=torch.device("cpu"), timeout=datetime.timedelta(seconds=30), **sizes)
    layer = MoELayer(ParamFactory(mesh, torch.float64, seed=3), "e", routing.model(expert_size=F + 1), 0, False)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x_MRSBD = torch.randn(3, mesh.dp.size, 8, B, D, dtype=torch.float64, generator=generator)
        weight = layer.router.weight.detach().clone().requires_grad_()
        logits = x_MRSBD @ weight.T
        chosen = torch.zeros_like(logits).scatter(-1, logits.topk(2, -1).indices, 1.0)
        F_ME = chosen.sum((1, 2, 3)).cumsum(0)  # over ranks and micro-batches so far
        loss = 8 / 2 * (logits.softmax(-1).sum((1, 2, 3)) * F_ME / F_ME.sum(1, keepdim=True) * 2).sum()
        layer.router.global_counts.zero_()
        ctx = context_with_sums(routing)
        layer.router.weight.grad = None
        for x_RSBD in x_MRSBD:
            local_x = x_RSBD[mesh.dp.rank].unflatten(0, (mesh.tp.size, -1))[mesh.tp.rank]
            y = layer(local_x.contiguous(), make_batch(), ctx)
            y.backward(torch.zeros_like(y))
        assert_close(all_reduce_(summed_losses(ctx), mesh.world), loss.new_tensor([0, 0, 1, 0]) * loss.detach())
        (expected,) = torch.autograd.grad(0.1 * WEIGHT * loss, weight)
        assert_close(all_reduce_(layer.router.weight.grad, mesh.world), expected)


@pytest.mark.parametrize("sizes", [dict(tp=2, pp=1, ep=2), dict(tp=1, pp=1, ep=4)], ids=str)
def test_global_loss_uses_the_tokens_of_the_step(sizes: dict[str, int]) -> None:
    run_ranks(4, _check_global_aux_loss, sizes)


@pytest.mark.parametrize("topk", [1, 2, 8])
def test_moe_layer_saves_only_the_first_matmuls_rows(topk: int) -> None:
    """Bytes per token in bf16: x 2 D; per assignment two products 4 F, probability 4, expert and position 8 each."""
    hidden_size, expert_size, tokens = 64, 96, 128
    layer = MoELayer(
        ParamFactory(Mesh.single_process(), torch.bfloat16, seed=3),
        "e",
        Routing(8, topk).model(hidden_size, expert_size),
        0,
        False,
    )
    weight_storages = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    saved = dict[int, int]()

    def record_storage(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in weight_storages:
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    with saved_tensors_hooks(record_storage, lambda t: t):
        y = layer(
            torch.randn(tokens // 2, 2, hidden_size, dtype=torch.bfloat16, requires_grad=True), make_batch(), CONTEXT
        )
    assert y.requires_grad and sum(saved.values()) <= tokens * (2 * hidden_size + topk * (4 * expert_size + 20)) + 64
