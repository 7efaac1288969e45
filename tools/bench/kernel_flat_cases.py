"""Cases of tools/bench/kernels.py: the update of the weights and the gradient norm, over flat tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megalite.kernels import adamw, grad_norm
from tools.bench.kernel_case import Case, Fn, Sizes, Tile, Work, constants

HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 10}
TILE = {"ELEMENTS": (512, 1024, 2048, 4096), "WARPS": (2, 4, 8)}
NORM_TILE = {"ELEMENTS": (2048, 4096, 8192), "WARPS": (4, 8, 16), "PROGRAMS": (2, 4, 8)}


def weights(moments: torch.dtype) -> Any:
    """Weight, gradient, moments and the bf16 copy."""

    def make(s: Sizes) -> list[Tensor]:
        w, g, m, v = (torch.randn(s.numel, device=s.device) for _ in range(4))
        return [w, g.mul_(0.1), m.mul_(0.1).to(moments), v.square_().mul_(0.01).to(moments), w.bfloat16()]

    return make


def ours(w: Tensor, g: Tensor, m: Tensor, v: Tensor, copy: Tensor) -> Tensor:
    adamw.adamw_(w, g, m, v, **HYPER, copy=copy)
    return copy


def plain(w: Tensor, g: Tensor, m: Tensor, v: Tensor, copy: Tensor) -> Tensor:
    """torch.optim.AdamW(fused=True), and the copy."""
    torch.ops.aten._fused_adamw_(
        *([w], [g], [m], [v], [], [torch.full((), 10.0, device=w.device)]),
        **{"lr": HYPER["lr"], "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8},
        amsgrad=False,
        maximize=False,
    )
    return copy.copy_(w)


def update(name: str, moments: torch.dtype, per_weight: int, torchs: Fn | None) -> Case:
    make = weights(moments)

    def tiles(s: Sizes) -> Iterator[tuple[Tile, Any]]:
        inputs = make(s)
        return constants(adamw, TILE, lambda: ours(*inputs))

    work = Work(f"{per_weight} bytes per weight", lambda s: per_weight * s.numel)
    return Case(name, "forward", work, make, ours, torchs, tiles, axis="numel", compiles=False)


def flat_cases() -> list[Case]:
    def gradient(s: Sizes) -> list[Tensor]:
        return [torch.randn(s.numel, device=s.device)]

    def tiles(s: Sizes) -> Iterator[tuple[Tile, Any]]:
        (flat,) = gradient(s)
        return constants(grad_norm, NORM_TILE, lambda: grad_norm.sum_of_squares(flat))

    work = Work("4 bytes per element", lambda s: 4 * s.numel)
    return [
        update("adamw", torch.float32, 30, plain),
        update("adamw bf16 moments", torch.bfloat16, 22, None),  # torch has none
        Case(
            *("grad_norm", "forward", work, gradient, grad_norm.sum_of_squares),
            *(lambda flat: torch.linalg.vector_norm(flat).square(), tiles),
            axis="numel",
            compiles=False,
        ),
    ]
