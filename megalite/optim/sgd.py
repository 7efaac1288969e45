"""SGD with momentum as a rule for the sharded optimizer; equals torch.optim.SGD (decay is added to the gradient)."""

from dataclasses import dataclass

import torch

from megalite.config.run_options import OptimConfig
from megalite.optim.update_rule import ParamUpdate


@dataclass(frozen=True)
class SGD:
    momentum: float = 0.9

    @classmethod
    def from_config(cls, o: OptimConfig) -> "SGD":
        return cls(o.sgd_momentum)

    @property
    def state_dtypes(self) -> dict[str, torch.dtype | None]:
        return {"momentum_buffer": None} if self.momentum else {}  # plain SGD keeps nothing

    @torch.no_grad()
    def update_(self, update: ParamUpdate) -> None:
        grad = update.grad.mul_(update.scale)
        if update.weight_decay:
            grad.add_(update.param, alpha=update.weight_decay)
        if self.momentum:  # torch starts the buffer as the first gradient; so does 0 * momentum + gradient
            grad = update.state["momentum_buffer"].mul_(self.momentum).add_(grad)
        update.param.add_(grad, alpha=-update.lr)
        if update.model_param is not None:
            update.model_param.copy_(update.param)
