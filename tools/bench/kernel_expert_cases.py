"""Cases of tools/bench/kernels.py: matmuls of experts. F 768 and D 2048 where the hidden size is 4096, and as many rows
to each: 4096 to 8 of them, 2048 to 16. One stands for a dense feed-forward, beside torch's matmul. gated_matmul is
beside the matmul and SwiGLU after it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megalite.kernels import gated_matmul as gated
from megalite.kernels import grouped_matmul as grouped
from megalite.kernels.activations.swiglu import ACTIVATION
from megalite.kernels.dispatch import matmul_unit
from megalite.kernels.weight_grad import accumulate_weight_grad_
from tools.bench.kernel_case import Case, Fn, Make, Sizes, Swept, Work, entries

TILE = {"rows": (64, 128, 256), "columns": (64, 128, 256), "depth": (32, 64), "warps": (4, 8), "stages": (3, 4, 5)}


def shape(s: Sizes, halved: bool = False) -> tuple[int, int, int]:
    """M, F, D; `halved`: F is that of what SwiGLU gives"""
    N, D = s.tokens, s.hidden_size
    return (N, 7 * D // (1 + halved), D) if s.expert_count == 1 else (2 * N, 3 * D // 16, D // 2)


def inputs(s: Sizes) -> list[Tensor]:
    """x, w, dy, the sum of gradients, offsets"""
    (M, F, D), E = shape(s), s.expert_count
    offsets = torch.arange(E + 1, dtype=torch.int32, device=s.device) * (M // E)
    return [s.normal(M, D), s.normal(E, F, D), s.normal(M, F), torch.zeros(E, F, D, device=s.device), offsets]


def backward(x: Tensor, w: Tensor, dy: Tensor, grad: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    grouped.grouped_weight_grad_(grad, dy, x, offsets, overwrite=False)
    return grouped.grouped_matmul(dy, w.mT, offsets), grad


def plain_backward(x: Tensor, w: Tensor, dy: Tensor, grad: Tensor, offsets: Tensor) -> tuple[Tensor, Any]:
    if len(w) == 1:
        return dy @ w[0], accumulate_weight_grad_(grad[0], dy, x, overwrite=False)
    return F.grouped_mm(dy, w, offs=offsets[1:]), grad.add_(F.grouped_mm(dy.mT, x, offs=offsets[1:]))


def plain_matmul(x: Tensor, w: Tensor, offsets: Tensor, rows: Tensor | None = None) -> Tensor:
    return x @ w[0].mT if len(w) == 1 else F.grouped_mm(x if rows is None else x[rows], w.mT, offs=offsets[1:])


def gated_inputs(s: Sizes, up: bool) -> list[Tensor]:
    """x, w, offsets, rows, probabilities of up; dy, w, offsets, rows, u, probabilities of down. One expert is a dense
    block: its rows in their order, with probabilities of 1."""
    (M, F, D), E = shape(s, halved=True), s.expert_count
    order, p = torch.arange(M, device=s.device) * (1 if E == 1 else 7919) % M, torch.rand(M, device=s.device)
    w, u = s.normal(E, 2 * F, D) if up else s.normal(E, D, F), [] if up else [s.normal(M, 2 * F)]
    return [s.normal(M, D), w, inputs(s)[-1], order, *u, torch.ones_like(p) if E == 1 else p]


def plain_up(x: Tensor, w: Tensor, offsets: Tensor, rows: Tensor, p: Tensor) -> Any:
    if len(w) == 1:
        return ACTIVATION.forward(x @ w[0].mT)
    return gated.up_unfused(x, w, offsets, rows, p, ACTIVATION, matmul=plain_matmul)


def plain_down(dy: Tensor, w: Tensor, offsets: Tensor, rows: Tensor, u: Tensor, p: Tensor) -> Any:
    if len(w) == 1:
        return ACTIVATION.backward(u, dy @ w[0])
    return gated.down_unfused(dy, w, offsets, rows, u, p, ACTIVATION, matmul=plain_matmul)


def work(formula: str, matmuls: int, moved: Any, halved: bool = False) -> Work:
    def flops(s: Sizes) -> float:
        M, F, D = shape(s, halved)
        return 2.0 * matmuls * M * F * D

    return Work(formula, lambda s: moved(*shape(s, halved), s.expert_count, s.dtype.itemsize), flops)


def expert_cases() -> list[Case]:
    def case(op: str, half: str, amount: Work, make: Make, ours: Fn, plain: Fn, table: dict[str, Any]) -> Case:
        tiles: Callable[[Sizes], Swept] = lambda s: entries(table, matmul_unit(s.normal(1)), TILE)  # noqa: E731
        how: dict[str, Any] = dict(direct="all", axis="expert_count", compiles=False)
        return Case(op, half, amount, make, ours, plain, tiles, **how)

    forward: Fn = lambda x, w, dy, grad, offsets: grouped.grouped_matmul(x, w, offsets)  # noqa: E731
    plain_forward: Fn = lambda x, w, dy, grad, offsets: plain_matmul(x, w, offsets)  # noqa: E731
    first = work("2 M F D FLOPs; x, w, y once", 1, lambda M, F, D, E, e: (M * (F + D) + E * F * D) * e)
    text = "4 M F D FLOPs; x, w, dx once, dy twice, dW read and written"
    second = work(text, 2, lambda M, F, D, E, e: (2 * M * (F + D) + E * F * D) * e + 8 * E * F * D)
    up, down = (partial(fn, activation=ACTIVATION) for fn in (gated.up_matmul, gated.down_gradients))
    text = "4 M F D FLOPs; x, w, u, a once"
    third = work(text, 2, lambda M, F, D, E, e: (M * D + 2 * E * F * D + 3 * M * F) * e, True)
    text = "2 M F D FLOPs; dy, w, u, a, du once"
    fourth = work(text, 1, lambda M, F, D, E, e: (M * D + E * F * D + 5 * M * F) * e, True)
    return [
        case("grouped_matmul", "forward", first, inputs, forward, plain_forward, grouped.FORWARD),
        case("grouped_matmul", "backward", second, inputs, backward, plain_backward, grouped.WEIGHT_GRAD),
        case("gated_matmul", "forward", third, partial(gated_inputs, up=True), up, plain_up, gated.UP_TILES),
        case("gated_matmul", "backward", fourth, partial(gated_inputs, up=False), down, plain_down, gated.DOWN_TILES),
    ]
