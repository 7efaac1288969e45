"""torch.compile of the operations between a block's matmuls: norms, rotation, activation, dropout.

    norm | matmul | rotation | attention | matmul | add, norm | matmul | (activation, its backward) | matmul | add
    ----          ----------                        ---------             --------------------------

Each is a pure function of tensors, compiled once and shared by all layers, with `fullgraph` so that no part of it
silently falls back to eager mode. Matmuls are not compiled: they keep their collectives, their overlap and their sums
into the gradient buffer (nn/linear.py). Neither is attention. Tensor and pipeline parallelism, recompute and the hooks
of optim/buffer.py therefore work as they do without it.

Rejected: a graph per block. It fuses no more, because a matmul ends a fusion. With tp 2 it breaks into 10 graphs (at
every collective and wait), with dp 2 into 3 (at the hooks that wait for weights), and layer and step, which are
coordinates of dropout, become its constants, so each needs a new graph. Dropout and activation are compiled as two
functions, forward and backward, because the compiler would keep the mask of a function that it differentiates.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalite.common.environment import getenv
from megalite.common.optional_packages import MissingPackageError, missing_package_message
from megalite.kernels.activation import Activation
from megalite.kernels.dispatch import describe_option, kernel_option, triton_installed
from megalite.kernels.dropout import dropout, dropout_reference
from megalite.models.gpt import Stage
from megalite.nn.attention import rotate_qk
from megalite.nn.norm import normalize

Backend = str | Callable[..., Any]
# shown in the plan
COMPILE_SUMMARY = (
    "inductor, in blocks: norms, rotary positions, activation, dropout; matmuls and collectives are not compiled"
)


class CompileError(Exception):
    """torch.compile cannot run on this machine; the text says what to set or install."""


def check_compile(device_type: str) -> None:
    """Check that inductor can run: it generates C++ for a CPU and Triton kernels for a GPU.

    Raises CompileError or MissingPackageError.
    """
    if kernel_option("kernels") == "triton":
        raise CompileError(f"compile=True compiles the torch kernels, but {describe_option()}; use auto or torch")
    if device_type == "cuda" and not triton_installed():
        raise MissingPackageError(missing_package_message("compile=True on cuda", "triton"))
    name = getenv("CXX", "clang++" if sys.platform == "darwin" else "g++")  # the only compiler that inductor calls
    remedy = "install one or set CXX to the name of one, without options"
    if shutil.which(name) is None:
        problem = f"{name} is not installed" if name else "CXX is empty"
        raise CompileError(f"compile=True needs a C++ compiler, and {problem}; {remedy}")
    try:
        command = [name, "-x", "c++", "-shared", "-fPIC", "-o", os.devnull, "-"]
        subprocess.run(command, input=b"#include <cmath>\n", capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().partition("\n")[0] or error
        raise CompileError(f"compile=True needs a C++ compiler and {name} does not work ({reason}); {remedy}") from None


def compile_blocks(stages: Iterable[Stage], backend: Backend = "inductor") -> None:
    """Make the blocks of `stages` use compiled functions, which are compiled when first used (job/startup.py).

    A compiled function replaces the one that a module has as an attribute; other attributes of that name stay.
    """

    def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)

    norm, rotation, drop = compiled(normalize), compiled(rotate_qk), compiled(dropout_reference)

    def compiled_dropout(x: Tensor, p: float, key: int, *coordinates: Any) -> Tensor:
        key_tensor = torch.full((), key, dtype=torch.int64, device=x.device)  # an int would be a constant of the graph
        return dropout(x, p, key_tensor, *coordinates, impl=drop)

    modules: list[Any] = [module for stage in stages for block in stage.blocks for module in block.modules()]
    activations = [a for module in modules if isinstance(a := getattr(module, "activation", None), Activation)]
    replacements = [
        ("normalize", normalize, norm),
        ("rotate_qk", rotate_qk, rotation),
        ("dropout", dropout, compiled_dropout),
    ]
    if activations:
        eager = activations[0]
        activation = replace(
            eager, forward=compiled(eager.forward), backward=compiled(eager.backward), swiglu_constants=None
        )
        replacements.append(("activation", eager, activation))
    for module in modules:
        for name, function, compiled_function in replacements:
            if getattr(module, name, None) is function:
                setattr(module, name, compiled_function)
