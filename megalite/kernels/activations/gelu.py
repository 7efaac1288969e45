"""GELU in its tanh form: a = x/2 (1 + tanh(k (x + 0.044715 x^3))), k = sqrt(2/pi)."""

import functools

from megalite.kernels.activation import Activation
from megalite.kernels.bias_gelu import bias_gelu_backward, bias_gelu_forward

ACTIVATION = Activation(
    functools.partial(bias_gelu_forward, tanh=True),
    functools.partial(bias_gelu_backward, tanh=True),
    takes_bias=True,
)
