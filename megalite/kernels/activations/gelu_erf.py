"""GELU exactly, not in its tanh form: a = x/2 (1 + erf(x / sqrt(2)))."""

import functools

from megalite.kernels.activation import Activation
from megalite.kernels.bias_gelu import bias_gelu_backward, bias_gelu_forward

ACTIVATION = Activation(
    functools.partial(bias_gelu_forward, tanh=False),
    functools.partial(bias_gelu_backward, tanh=False),
    takes_bias=True,
)
