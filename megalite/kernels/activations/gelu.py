"""GELU in its tanh form: a = x/2 (1 + tanh(k (x + 0.044715 x^3))), k = sqrt(2/pi)."""

from megalite.kernels.bias_gelu import gelu

ACTIVATION = gelu(tanh=True)
