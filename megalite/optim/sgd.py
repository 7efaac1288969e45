"""SGD with momentum as a rule for the sharded optimizer; equals torch.optim.SGD (decay is added to the gradient)."""

from dataclasses import dataclass

import torch

from megalite.config.run_options import OptimConfig
from megalite.optim.rule import Update


@dataclass(frozen=True)
class SGD:
    momentum: float = 0.9

    @classmethod
    def of(cls, o: OptimConfig) -> "SGD":
        return cls(o.sgd_momentum)

    @property
    def states(self) -> dict[str, torch.dtype | None]:
        return {"momentum_buffer": None} if self.momentum else {}  # plain SGD keeps nothing

    @torch.no_grad()
    def update_(self, u: Update) -> None:
        grad = u.grad.mul_(u.scale)
        if u.weight_decay:
            grad.add_(u.param, alpha=u.weight_decay)
        if self.momentum:  # torch starts the buffer as the first gradient; so does 0 * momentum + gradient
            grad = u.state["momentum_buffer"].mul_(self.momentum).add_(grad)
        u.param.add_(grad, alpha=-u.lr)
        if u.copy is not None:
            u.copy.copy_(u.param)
