"""GPT-OSS's form of SwiGLU (swiglu.py)."""

from functools import partial

from megalite.kernels.activation import Activation
from megalite.kernels.activations import swiglu

ACTIVATION = Activation(partial(swiglu.forward, clamped=True), partial(swiglu.backward, clamped=True), width=2)
