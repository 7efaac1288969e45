"""Cases of tools/bench/kernels.py: matmuls of experts. F 768 and D 2048 where the hidden size is 4096, and as many rows
to each: 4096 to 8 of them, 2048 to 16. One stands for the first matmul of a feed-forward, beside torch's matmul."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megalite.kernels import grouped_matmul as grouped
from megalite.kernels.dispatch import unit_of
from megalite.kernels.weight_grad import accumulate_outer_
from tools.bench.kernel_case import Case, Fn, Sizes, Swept, Work, entries

TILE = {"rows": (64, 128, 256), "columns": (64, 128, 256), "depth": (32, 64), "warps": (4, 8), "stages": (3, 4, 5)}


def shape(s: Sizes) -> tuple[int, int, int]:
    """M, F, D"""
    N, D = s.tokens, s.hidden_size
    return (N, 7 * D, D) if s.expert_count == 1 else (2 * N, 3 * D // 16, D // 2)


def inputs(s: Sizes) -> list[Tensor]:
    """x, w, dy, the sum of gradients, offsets"""
    (M, F, D), E = shape(s), s.expert_count
    offsets = torch.arange(E + 1, dtype=torch.int32, device=s.device) * (M // E)
    return [s.normal(M, D), s.normal(E, F, D), s.normal(M, F), torch.zeros(E, F, D, device=s.device), offsets]


def backward(x: Tensor, w: Tensor, dy: Tensor, grad: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    grouped.grouped_weight_grad_(grad, dy, x, offsets, begin=False)
    return grouped.grouped_matmul(dy, w.mT, offsets), grad


def plain_backward(x: Tensor, w: Tensor, dy: Tensor, grad: Tensor, offsets: Tensor) -> tuple[Tensor, Any]:
    if len(w) == 1:
        return dy @ w[0], accumulate_outer_(grad[0], dy, x, begin=False)
    return F.grouped_mm(dy, w, offs=offsets[1:]), grad.add_(F.grouped_mm(dy.mT, x, offs=offsets[1:]))


def plain_forward(x: Tensor, w: Tensor, dy: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    return x @ w[0].mT if len(w) == 1 else F.grouped_mm(x, w.mT, offs=offsets[1:])


def work(formula: str, matmuls: int, moved: Any) -> Work:
    def flops(s: Sizes) -> float:
        M, F, D = shape(s)
        return 2.0 * matmuls * M * F * D

    return Work(formula, lambda s: moved(*shape(s), s.expert_count, s.dtype.itemsize), flops)


def expert_cases() -> list[Case]:
    def case(half: str, amount: Work, ours: Fn, plain: Fn, table: dict[str, Any]) -> Case:
        tiles: Callable[[Sizes], Swept] = lambda s: entries(table, unit_of(s.normal(1)), TILE)  # noqa: E731
        how: dict[str, Any] = dict(direct="all", axis="expert_count", compiles=False)
        return Case("grouped_matmul", half, amount, inputs, ours, plain, tiles, **how)

    forward: Fn = lambda x, w, dy, grad, offsets: grouped.grouped_matmul(x, w, offsets)  # noqa: E731
    first = work("2 M F D FLOPs; x, w, y once", 1, lambda M, F, D, E, e: (M * (F + D) + E * F * D) * e)
    text = "4 M F D FLOPs; x, w, dx once, dy twice, dW read and written"
    second = work(text, 2, lambda M, F, D, E, e: (2 * M * (F + D) + E * F * D) * e + 8 * E * F * D)
    return [
        case("forward", first, forward, plain_forward, grouped.FORWARD),
        case("backward", second, backward, plain_backward, grouped.WEIGHT_GRAD),
    ]
