"""torch.compile of the operations between a block's matmuls: norms, rotation, activation, dropout.

    norm | matmul | rotation | attention | matmul | add, norm | matmul | (activation, its backward) | matmul | add
    ----          ----------                        ---------             --------------------------

Each is a pure function of tensors, compiled once and shared by all layers, with `fullgraph` so that no part of it
silently falls back to eager mode. Matmuls are not compiled: they keep their collectives, their overlap and their sums
into the main gradients (nn/linear.py). Neither is attention. Tensor and pipeline parallelism, recompute and the hooks
of optim/zero/sync.py therefore work as they do without it.

Rejected: a graph per block. It fuses no more, because a matmul ends a fusion. With tp 2 it breaks into 10 graphs (at
every collective and wait), with dp 2 into 3 (at the hooks that wait for weights), and layer and step, which are
coordinates of dropout, become its constants, so each needs a new graph. Dropout and activation are compiled as two
functions, forward and backward, because the compiler would keep the mask of a function that it differentiates.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.activation import Activation
from megalite.kernels.dropout import dropout, dropout_reference
from megalite.models.gpt import Stage
from megalite.nn.attention import rotate_qk
from megalite.nn.norm import normalize

Backend = str | Callable[..., Any]
# shown in the plan
COMPILE_SUMMARY = (
    "inductor, in blocks: norms, rotary positions, activation, dropout; matmuls and collectives are not compiled"
)


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

    units = [unit for stage in stages for unit in (*stage.blocks, *stage.mtp_layers)]
    modules: list[Any] = [module for unit in units for module in unit.modules()]
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
