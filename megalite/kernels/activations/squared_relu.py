"""Squared ReLU (arXiv:2109.08668): a = max(x, 0)^2, dx = 2 max(x, 0) da."""

import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.activation import Activation


def forward(u: Tensor) -> Tensor:
    return F.relu(u).square()


def backward(u: Tensor, da: Tensor) -> tuple[Tensor, Tensor]:
    r = F.relu(u)
    return r.square(), 2 * r * da


ACTIVATION = Activation(forward, backward)
