"""AdamW as a rule for the sharded optimizer: two moments, one call per bucket."""

import importlib.util
from dataclasses import dataclass

import torch

from megalite.config.run_options import OptimConfig
from megalite.kernels.adamw import adamw_
from megalite.optim.rule import Update


@dataclass(frozen=True)
class AdamW:
    """`exp_avg_dtype`, `exp_avg_sq_dtype`: None, that of the main weights, or bf16 (kernels/adamw.py)."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    exp_avg_dtype: torch.dtype | None = None
    exp_avg_sq_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, o: OptimConfig) -> "AdamW":
        dtypes = [torch.bfloat16 if dtype == "bf16" else None for dtype in (o.exp_avg_dtype, o.exp_avg_sq_dtype)]
        kind = ApexAdamW if o.optimizer_impl == "apex" else AdamW
        return kind((o.adam_beta1, o.adam_beta2), o.adam_eps, *dtypes)

    @property
    def states(self) -> dict[str, torch.dtype | None]:
        return {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}

    def update_(self, u: Update) -> None:
        adamw_(
            *(u.param, u.grad, u.state["exp_avg"], u.state["exp_avg_sq"]),
            lr=u.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=u.weight_decay,
            step=u.step,
            grad_scale=u.scale,
            copy=u.copy,
        )


class ApexAdamW(AdamW):
    """The same update by NVIDIA apex's multi-tensor kernel, where apex's CUDA extension is installed.

    Probed by the extension `amp_C`: a package named `apex` on the index is an unrelated web framework.
    """

    @staticmethod
    def available() -> bool:
        return importlib.util.find_spec("amp_C") is not None and torch.cuda.is_available()

    def update_(self, u: Update) -> None:
        import amp_C  # type: ignore[import-not-found]

        u.grad.mul_(u.scale)
        overflow = torch.zeros(1, dtype=torch.int32, device=u.param.device)
        tensors = [[u.grad], [u.param], [u.state["exp_avg"]], [u.state["exp_avg_sq"]]]
        # mode 1 is decoupled decay, bias correction on
        amp_C.multi_tensor_adam(65536, overflow, tensors, u.lr, *self.betas, self.eps, u.step, 1, 1, u.weight_decay)
        if u.copy is not None:
            u.copy.copy_(u.param)
