"""SGD with momentum as an update rule; equals torch.optim.SGD (weight decay is added to the gradient)."""

from dataclasses import dataclass

import torch

from megalite.config.run_options import OptimConfig
from megalite.optim.update_rule import ParamUpdate


@dataclass(frozen=True)
class SGD:
    """SGD; without momentum it has no state."""

    momentum: float = 0.9

    @classmethod
    def from_config(cls, config: OptimConfig) -> "SGD":
        """Return the rule with the options of a run."""
        return cls(config.sgd_momentum)

    @property
    def state_dtypes(self) -> dict[str, torch.dtype | None]:
        """The dtype of the momentum."""
        return {"momentum_buffer": None} if self.momentum else {}

    @torch.no_grad()
    def update_(self, update: ParamUpdate) -> None:
        """Update the weights and the momentum."""
        grad = update.grad.mul_(update.scale)
        if update.weight_decay:
            grad.add_(update.param, alpha=update.weight_decay)
        if self.momentum:  # torch initializes the buffer with the first gradient, which is 0 * momentum + gradient
            grad = update.state["momentum_buffer"].mul_(self.momentum).add_(grad)
        update.param.add_(grad, alpha=-update.lr)
        if update.model_param is not None:
            update.model_param.copy_(update.param)
