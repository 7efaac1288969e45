"""AdamW as a rule for the sharded optimizer: two moments, one call per bucket."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.kernels.adamw import adamw_


@dataclass(frozen=True)
class AdamW:
    """`exp_avg_dtype`, `exp_avg_sq_dtype`: None, that of the main weights, or bf16 (kernels/adamw.py)."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    exp_avg_dtype: torch.dtype | None = None
    exp_avg_sq_dtype: torch.dtype | None = None

    @property
    def states(self) -> dict[str, torch.dtype | None]:
        return {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}

    def update_(
        self,
        param: Tensor,
        grad: Tensor,
        state: Mapping[str, Tensor],
        *,
        lr: float,
        weight_decay: float,
        step: int,
        scale: float,
        copy: Tensor | None = None,
    ) -> None:
        adamw_(
            param,
            grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            lr=lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=weight_decay,
            step=step,
            grad_scale=scale,
            copy=copy,
        )


class ApexAdamW(AdamW):
    """The same update by NVIDIA apex's multi-tensor kernel, where apex's CUDA extension is installed.

    Probed by the extension `amp_C`: a package named `apex` on the index is an unrelated web framework.
    """

    @staticmethod
    def available() -> bool:
        return importlib.util.find_spec("amp_C") is not None and torch.cuda.is_available()

    def update_(
        self,
        param: Tensor,
        grad: Tensor,
        state: Mapping[str, Tensor],
        *,
        lr: float,
        weight_decay: float,
        step: int,
        scale: float,
        copy: Tensor | None = None,
    ) -> None:
        import amp_C  # type: ignore[import-not-found]

        grad.mul_(scale)
        overflow = torch.zeros(1, dtype=torch.int32, device=param.device)
        tensors = [[grad], [param], [state["exp_avg"]], [state["exp_avg_sq"]]]
        # mode 1 is decoupled decay, bias correction on
        amp_C.multi_tensor_adam(65536, overflow, tensors, lr, *self.betas, self.eps, step, 1, 1, weight_decay)
        if copy is not None:
            copy.copy_(param)
