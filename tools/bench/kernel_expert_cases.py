"""The cases of tools/bench/kernels.py for matmuls of experts.

With a hidden size of 4096, experts have F 768 and D 2048, and all get the same number of rows: 4096 each if there are 8
experts, 2048 if there are 16. A single expert stands for a dense feed-forward block, compared with torch's matmul.
gated_matmul is compared with the matmul and a separate SwiGLU.
"""

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
from tools.bench.kernel_case import Candidates, Fn, KernelCase, MakeInputs, ProblemSizes, WorkModel, table_candidates

TILE_VALUES = {
    "block_m": (64, 128, 256),
    "block_n": (64, 128, 256),
    "block_k": (32, 64),
    "num_warps": (4, 8),
    "num_stages": (3, 4, 5),
}


def shape(s: ProblemSizes, gated_output: bool = False) -> tuple[int, int, int]:
    """Return M, F, D: the rows, the output columns and the input columns.

    With `gated_output`, F counts the columns after SwiGLU, which are half as many for a dense block.
    """
    N, D = s.tokens, s.hidden_size
    if s.expert_count == 1:
        return N, 7 * D // 2 if gated_output else 7 * D, D
    return 2 * N, 3 * D // 16, D // 2


def make_offsets(s: ProblemSizes) -> Tensor:
    """Return the first row of every expert, and the number of rows."""
    rows, _, _ = shape(s)
    num_experts = s.expert_count
    return torch.arange(num_experts + 1, dtype=torch.int32, device=s.device) * (rows // num_experts)


# --- grouped_matmul


def grouped_inputs(s: ProblemSizes) -> list[Tensor]:
    """Return x, w, dy, the sum of the weight gradients, and offsets."""
    (M, F, D), E = shape(s), s.expert_count
    return [s.normal(M, D), s.normal(E, F, D), s.normal(M, F), torch.zeros(E, F, D, device=s.device), make_offsets(s)]


def grouped_forward(x: Tensor, w: Tensor, dy: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    return grouped.grouped_matmul(x, w, offsets)


def grouped_backward(x: Tensor, w: Tensor, dy: Tensor, grad: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    grouped.grouped_weight_grad_(grad, dy, x, offsets, overwrite=False)
    return grouped.grouped_matmul(dy, w.mT, offsets), grad


def torch_matmul(x: Tensor, w: Tensor, offsets: Tensor, rows: Tensor | None = None) -> Tensor:
    """Multiply with torch.mm for a single expert, else with grouped_mm; `rows` selects rows of x first."""
    if len(w) == 1:
        return x @ w[0].mT
    return F.grouped_mm(x if rows is None else x[rows], w.mT, offs=offsets[1:])


def torch_grouped_forward(x: Tensor, w: Tensor, dy: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    return torch_matmul(x, w, offsets)


def torch_grouped_backward(x: Tensor, w: Tensor, dy: Tensor, grad: Tensor, offsets: Tensor) -> tuple[Tensor, Any]:
    if len(w) == 1:
        accumulate_weight_grad_(grad[0], dy, x, overwrite=False)
        return dy @ w[0], grad
    return F.grouped_mm(dy, w, offs=offsets[1:]), grad.add_(F.grouped_mm(dy.mT, x, offs=offsets[1:]))


# --- gated_matmul


def gated_inputs(s: ProblemSizes, is_up: bool) -> list[Tensor]:
    """Return the inputs of the up projection, or of the gradients of the down projection.

    The first are x, w, offsets, rows and probabilities; the second are dy, w, offsets, rows, u and probabilities. A
    single expert is a dense block: rows are in order, and probabilities are 1.
    """
    (M, F, D), E = shape(s, gated_output=True), s.expert_count
    order = torch.arange(M, device=s.device)
    if E > 1:
        order = order * 7919 % M  # coprime to M: a permutation
    probabilities = torch.rand(M, device=s.device)
    w = s.normal(E, 2 * F, D) if is_up else s.normal(E, D, F)
    u = [] if is_up else [s.normal(M, 2 * F)]
    x = s.normal(M, D)
    if E == 1:
        probabilities = torch.ones_like(probabilities)
    return [x, w, make_offsets(s), order, *u, probabilities]


def torch_up(x: Tensor, w: Tensor, offsets: Tensor, rows: Tensor, probabilities: Tensor) -> Any:
    if len(w) == 1:
        u = x @ w[0].mT
        return u, ACTIVATION.forward(u)
    return gated.up_unfused(x, w, offsets, rows, probabilities, ACTIVATION, matmul=torch_matmul)


def torch_down(dy: Tensor, w: Tensor, offsets: Tensor, rows: Tensor, u: Tensor, probabilities: Tensor) -> Any:
    if len(w) == 1:
        return ACTIVATION.backward(u, dy @ w[0])
    return gated.down_unfused(dy, w, offsets, rows, u, probabilities, ACTIVATION, matmul=torch_matmul)


# --- the cases


def matmul_work(
    formula: str, num_matmuls: int, bytes_moved: Callable[..., float], gated_output: bool = False
) -> WorkModel:
    """Return the work of matmuls of M x F x D; `bytes_moved` takes M, F, D, E and the size of an element."""

    def flops(s: ProblemSizes) -> float:
        M, F, D = shape(s, gated_output)
        return 2.0 * num_matmuls * M * F * D

    return WorkModel(formula, lambda s: bytes_moved(*shape(s, gated_output), s.expert_count, s.dtype.itemsize), flops)


GROUPED_FORWARD = matmul_work("2 M F D FLOPs; x, w, y once", 1, lambda M, F, D, E, e: (M * (F + D) + E * F * D) * e)
GROUPED_BACKWARD = matmul_work(
    "4 M F D FLOPs; x, w, dx once, dy twice, dW read and written",
    2,
    lambda M, F, D, E, e: (2 * M * (F + D) + E * F * D) * e + 8 * E * F * D,
)
GATED_FORWARD = matmul_work(
    "4 M F D FLOPs; x, w, u, a once", 2, lambda M, F, D, E, e: (M * D + 2 * E * F * D + 3 * M * F) * e, True
)
GATED_BACKWARD = matmul_work(
    "2 M F D FLOPs; dy, w, u, a, du once", 1, lambda M, F, D, E, e: (M * D + E * F * D + 5 * M * F) * e, True
)


def expert_case(
    op: str,
    direction: str,
    work: WorkModel,
    make_inputs: MakeInputs,
    megalite_fn: Fn,
    torch_fn: Fn,
    table: dict[str, Any],
) -> KernelCase:
    """Return a case whose tiles are an entry of `table` for the hardware's unit for matmuls."""

    def candidates(s: ProblemSizes) -> Candidates:
        return table_candidates(table, matmul_unit(s.normal(1)), TILE_VALUES)

    return KernelCase(
        op,
        direction,
        work,
        make_inputs,
        megalite_fn,
        torch_fn,
        candidates,
        explicit_backward="all",
        axis="expert_count",
        compiles=False,
    )


def expert_cases() -> list[KernelCase]:
    """Return the cases of grouped and gated matmuls."""
    up = partial(gated.up_matmul, activation=ACTIVATION)
    down = partial(gated.down_gradients, activation=ACTIVATION)
    up_inputs, down_inputs = partial(gated_inputs, is_up=True), partial(gated_inputs, is_up=False)
    return [
        expert_case(
            "grouped_matmul",
            "forward",
            GROUPED_FORWARD,
            grouped_inputs,
            grouped_forward,
            torch_grouped_forward,
            grouped.FORWARD,
        ),
        expert_case(
            "grouped_matmul",
            "backward",
            GROUPED_BACKWARD,
            grouped_inputs,
            grouped_backward,
            torch_grouped_backward,
            grouped.WEIGHT_GRAD,
        ),
        expert_case("gated_matmul", "forward", GATED_FORWARD, up_inputs, up, torch_up, gated.UP_TILES),
        expert_case("gated_matmul", "backward", GATED_BACKWARD, down_inputs, down, torch_down, gated.DOWN_TILES),
    ]
