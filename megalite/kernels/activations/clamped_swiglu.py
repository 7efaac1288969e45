"""The clamped SwiGLU of GPT-OSS (swiglu.py)."""

from functools import partial

from megalite.kernels.activation import Activation
from megalite.kernels.activations import swiglu

forward = partial(swiglu.forward, clamped=True)
backward = partial(swiglu.backward, clamped=True)
ACTIVATION = Activation(forward, backward, width=2, swiglu_constants=swiglu.CLAMPED)
