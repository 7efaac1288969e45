"""AdamW as an update rule: two moments, one call per bucket."""

import importlib.util
from dataclasses import dataclass

import torch

from megalite.config.run_options import OptimConfig
from megalite.kernels.adamw import adamw_
from megalite.optim.update_rule import ParamUpdate


@dataclass(frozen=True)
class AdamW:
    """AdamW (kernels/adamw.py).

    Attributes:
        betas: decay rates of the two moments.
        eps: added to the denominator.
        exp_avg_dtype, exp_avg_sq_dtype: dtypes of the moments, bf16 or None for the dtype of the main weights.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    exp_avg_dtype: torch.dtype | None = None
    exp_avg_sq_dtype: torch.dtype | None = None

    @classmethod
    def from_config(cls, config: OptimConfig) -> "AdamW":
        """Return the rule with the options of a run; an ApexAdamW if optimizer_impl is "apex"."""
        rule_class = ApexAdamW if config.optimizer_impl == "apex" else AdamW
        return rule_class(
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            exp_avg_dtype=torch.bfloat16 if config.exp_avg_dtype == "bf16" else None,
            exp_avg_sq_dtype=torch.bfloat16 if config.exp_avg_sq_dtype == "bf16" else None,
        )

    @property
    def state_dtypes(self) -> dict[str, torch.dtype | None]:
        """The dtypes of the moments."""
        return {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}

    def update_(self, update: ParamUpdate) -> None:
        """Update the weights and the moments."""
        adamw_(
            update.param,
            update.grad,
            update.state["exp_avg"],
            update.state["exp_avg_sq"],
            lr=update.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=update.weight_decay,
            step=update.step,
            grad_scale=update.scale,
            model_param=update.model_param,
        )


class ApexAdamW(AdamW):
    """AdamW with the multi-tensor kernel of NVIDIA apex, if apex's CUDA extension is installed.

    The check is for the extension `amp_C`, because the package named `apex` on PyPI is an unrelated web framework.
    """

    @staticmethod
    def available() -> bool:
        """Return True if the extension is installed and there is a GPU."""
        return importlib.util.find_spec("amp_C") is not None and torch.cuda.is_available()

    def update_(self, update: ParamUpdate) -> None:
        """Update the weights and the moments."""
        import amp_C  # type: ignore[import-not-found]

        update.grad.mul_(update.scale)
        overflow = torch.zeros(1, dtype=torch.int32, device=update.param.device)
        tensors = [[update.grad], [update.param], [update.state["exp_avg"]], [update.state["exp_avg_sq"]]]
        # the two ones: mode 1 (decoupled weight decay), and bias correction
        amp_C.multi_tensor_adam(
            65536, overflow, tensors, update.lr, *self.betas, self.eps, update.step, 1, 1, update.weight_decay
        )
        if update.model_param is not None:
            update.model_param.copy_(update.param)
