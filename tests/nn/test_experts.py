"""Experts against their definition, token by token, in fp64: outputs, all gradients, counts and auxiliary losses."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.nn.attention import Coordinates
from megalite.nn.experts import Experts, ExpertsShape
from megalite.nn.later import Later
from megalite.nn.parameter import Maker
from megalite.nn.router import Routing
from megalite.parallel.mesh import Mesh

S, B, D, F, WEIGHT = 6, 2, 8, 5, 0.25
CASES: dict[str, tuple[Routing, dict[str, Any]]] = {
    "mixtral": (Routing(8, 2, coefficients=(0.1, 0.0, 0.0)), {}),
    "qwen": (Routing(8, 3, pre_softmax=True, coefficients=(0.1, 0.2, 0.3)), dict(shared_size=6, shared_gate=True)),
    "one of pre-softmax": (Routing(4, 1, pre_softmax=True, scaling=2.0, coefficients=(0.0, 0.2, 0.0)), {}),
    "deepseek": (
        Routing(8, 4, "sigmoid", scaling=2.5, groups=4, group_topk=2, bias=True, coefficients=(0.0, 0.5, 0.1)),
        dict(shared_size=6),
    ),
    "one of sigmoid, ungated": (Routing(8, 1, "sigmoid", coefficients=(0.3, 0, 0)), dict(activation="gelu")),
    "all experts": (Routing(4, 4, coefficients=(0.1, 0.1, 0.1)), {}),
    "never the last three": (Routing(8, 2, bias=True), {}),
}


def make(name: str) -> tuple[Experts, Routing]:
    routing, more = CASES[name]
    shape = replace(ExpertsShape(D, F, None, False, "swiglu", 1.0, 1.0), **more)
    experts = Experts(Maker(Mesh.alone(), torch.float64, seed=3), "e", 0, routing, shape, False)
    if routing.bias:
        experts.router.bias = torch.linspace(-0.1, 0.1, routing.experts)
        experts.router.bias[-3:] -= 100.0 * name.startswith("never")
    return experts, routing


def where(later: Later | None = None, step: int = 0) -> Coordinates:
    return Coordinates(None, torch.arange(B), step, later=later, loss_weight=WEIGHT)


def chosen(logits: Tensor, r: Routing, bias: Tensor | None) -> tuple[list[int], Tensor]:
    """One token's experts and their probabilities."""
    scores = logits.sigmoid() if r.score_function == "sigmoid" else logits.softmax(0) if r.pre_softmax else logits
    by = (scores if bias is None else scores + bias).tolist()
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


def definition(x_SBD: Tensor, experts: Experts, r: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """(output, counts, the auxiliary losses' sums over tokens, times their coefficients)"""

    def feed(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        if experts.activation.width == 1:
            return down @ torch.nn.functional.gelu(up @ x, approximate="tanh")
        return down @ (torch.nn.functional.silu(up[0] @ x) * (up[1] @ x))

    out, counts = torch.zeros_like(x_SBD), torch.zeros(B, r.experts, dtype=torch.int64)
    logits_SBE = x_SBD @ experts.router.weight.T
    for s in range(len(x_SBD)):
        for b in range(B):
            ids, probs = chosen(logits_SBE[s, b], r, experts.router.bias)
            counts[b, ids] += 1
            parts = [p * feed(x_SBD[s, b], experts.up[e], experts.down[e]) for e, p in zip(ids, probs, strict=True)]
            if experts.shared is not None:
                gate = 1.0 if experts.shared_gate is None else (x_SBD[s, b] @ experts.shared_gate).sigmoid()
                parts.append(gate * feed(x_SBD[s, b], experts.shared.up, experts.shared.down))
            out[s, b] = torch.stack(parts).sum(0)
    P_SBE = logits_SBE.softmax(-1)
    if r.score_function == "sigmoid":
        P_SBE = logits_SBE.sigmoid() / logits_SBE.sigmoid().sum(-1, keepdim=True)
    n, length, share = len(x_SBD) * B, len(x_SBD), counts.double() / r.topk
    aux = n * r.experts * (share.sum(0) / n * P_SBE.mean((0, 1))).sum()
    seq = sum(length * r.experts * (share[b] / length * P_SBE[:, b].mean(0)).sum() for b in range(B))
    losses = torch.stack([aux, torch.as_tensor(seq), logits_SBE.logsumexp(-1).square().sum()])
    return out, counts.sum(0), losses * torch.tensor(r.coefficients, dtype=torch.float64)


def close(a: Tensor, b: Tensor, what: str = "") -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("length", [S, 1])
@pytest.mark.parametrize("name", CASES)
def test_experts_are_what_they_are_defined_as(name: str, length: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, length, B, D, dtype=torch.float64, generator=generator)
    experts, routing = make(name)
    parameters = list(experts.parameters())
    y = experts(x.requires_grad_(), where())
    assert not experts.router.counts.any(), "only backward counts"
    grads = torch.autograd.grad(y, [x, *parameters], dy)
    want, counts, losses = definition(x, experts, routing)
    close(y, want)
    assert torch.equal(experts.router.counts, counts)
    if any(routing.coefficients):
        close(experts.router.losses * torch.tensor(routing.coefficients, dtype=torch.float64), losses)
    total = (want * dy).sum() + WEIGHT * losses.sum()
    wanted = torch.autograd.grad(total, [x, *parameters], allow_unused=True)
    for p, grad, right in zip(["x", *parameters], grads, wanted, strict=True):
        close(grad, torch.zeros_like(grad) if right is None else right, getattr(getattr(p, "spec", None), "name", "x"))
    if name.startswith("never"):
        assert not counts[-3:].any() and not grads[2][-3:].any()
