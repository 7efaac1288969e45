"""AdamW as a rule for the sharded optimizer: two moments, one call per bucket."""

import importlib.util
from dataclasses import dataclass

import torch

from megalite.config.run_options import OptimConfig
from megalite.kernels.adamw import adamw_
from megalite.optim.update_rule import ParamUpdate


@dataclass(frozen=True)
class AdamW:
    """`exp_avg_dtype`, `exp_avg_sq_dtype`: None, that of the main weights, or bf16 (kernels/adamw.py)."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    exp_avg_dtype: torch.dtype | None = None
    exp_avg_sq_dtype: torch.dtype | None = None

    @classmethod
    def from_config(cls, o: OptimConfig) -> "AdamW":
        dtypes = [torch.bfloat16 if dtype == "bf16" else None for dtype in (o.exp_avg_dtype, o.exp_avg_sq_dtype)]
        kind = ApexAdamW if o.optimizer_impl == "apex" else AdamW
        return kind((o.adam_beta1, o.adam_beta2), o.adam_eps, *dtypes)

    @property
    def state_dtypes(self) -> dict[str, torch.dtype | None]:
        return {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}

    def update_(self, update: ParamUpdate) -> None:
        adamw_(
            *(update.param, update.grad, update.state["exp_avg"], update.state["exp_avg_sq"]),
            lr=update.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=update.weight_decay,
            step=update.step,
            grad_scale=update.scale,
            model_param=update.model_param,
        )


class ApexAdamW(AdamW):
    """The same update by NVIDIA apex's multi-tensor kernel, where apex's CUDA extension is installed.

    Probed by the extension `amp_C`: a package named `apex` on the index is an unrelated web framework.
    """

    @staticmethod
    def available() -> bool:
        return importlib.util.find_spec("amp_C") is not None and torch.cuda.is_available()

    def update_(self, update: ParamUpdate) -> None:
        import amp_C  # type: ignore[import-not-found]

        update.grad.mul_(update.scale)
        overflow = torch.zeros(1, dtype=torch.int32, device=update.param.device)
        tensors = [[update.grad], [update.param], [update.state["exp_avg"]], [update.state["exp_avg_sq"]]]
        # mode 1 is decoupled decay, bias correction on
        amp_C.multi_tensor_adam(
            65536, overflow, tensors, update.lr, *self.betas, self.eps, update.step, 1, 1, update.weight_decay
        )
        if update.model_param is not None:
            update.model_param.copy_(update.param)
