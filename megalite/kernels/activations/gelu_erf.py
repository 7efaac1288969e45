"""Exact GELU, not its tanh form: a = x/2 (1 + erf(x / sqrt(2)))."""

from megalite.kernels.bias_gelu import gelu

ACTIVATION = gelu(tanh=False)
