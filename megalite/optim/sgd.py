"""SGD with momentum as a rule for the sharded optimizer; equals torch.optim.SGD (decay is added to the gradient)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SGD:
    momentum: float = 0.9

    @property
    def states(self) -> dict[str, torch.dtype | None]:
        return {"momentum_buffer": None} if self.momentum else {}  # plain SGD keeps nothing

    @torch.no_grad()
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
        grad.mul_(scale)
        if weight_decay:
            grad.add_(param, alpha=weight_decay)
        if self.momentum:  # torch starts the buffer as the first gradient; so does 0 * momentum + gradient
            grad = state["momentum_buffer"].mul_(self.momentum).add_(grad)
        param.add_(grad, alpha=-lr)
        if copy is not None:
            copy.copy_(param)
