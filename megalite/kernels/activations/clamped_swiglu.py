"""GPT-OSS's form of SwiGLU (swiglu.py)."""

from functools import partial

from megalite.kernels.activation import Activation
from megalite.kernels.activations import swiglu

forward, backward = partial(swiglu.forward, clamped=True), partial(swiglu.backward, clamped=True)
ACTIVATION = Activation(forward, backward, width=2, swiglu_constants=swiglu.CLAMPED)
