"""An activation: Mish (arXiv:1908.08681), a = x t with t = tanh(softplus(x)); da/dx = t + x sigmoid(x) (1 - t^2).

megalite train --plugin examples/plugins/activation.py --activation mish --preset tiny --vocab-size 300 --mock-data \
  --train-iters 20 --eval-iters 2 --micro-batch-size 2 --global-batch-size 8 --save runs/mish

Its cost needs no formula: a plan runs a layer with it on the meta device and counts the operations.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import megalite
from megalite.kernels.activation import Activation


def forward(u: Tensor) -> Tensor:
    """Return mish(u)."""
    return F.mish(u)


def backward(u: Tensor, da: Tensor) -> tuple[Tensor, Tensor]:
    """Return the activation again, and the gradient of its input."""
    t = torch.tanh(F.softplus(u))
    return u * t, da * (t + u * torch.sigmoid(u) * (1 - t * t))


megalite.register("activation", "mish", Activation(forward, backward))
