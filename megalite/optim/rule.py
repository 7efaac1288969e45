"""What an optimizer is here: a rule for how one flat tensor of main weights moves (optim/adamw.py, optim/sgd.py)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Update:
    """What a rule gets for what this rank owns of a bucket: flat tensors of one length, and this step's numbers.

    param  the main weights, and `state` the tensors kept beside them: both updated in place
    grad   a sum; its gradient is scale * grad. Used up
    step   counts from 1
    copy   gets the new weights in its own dtype, for the gather; None: the main weights are the weights
    """

    param: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]
    lr: float
    weight_decay: float
    step: int
    scale: float
    copy: Tensor | None = None


class Rule(Protocol):
    """`states` names the tensors that it keeps, with their dtype (None: that of the main weights)."""

    @property
    def states(self) -> Mapping[str, torch.dtype | None]: ...

    def update_(self, u: Update) -> None: ...
