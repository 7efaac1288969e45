"""Activation recomputation in backward (arXiv:1604.06174).

No random state is saved: dropout masks are functions of coordinates, so the second forward draws the same masks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megalite.nn.saved_tensors import current_hooks, nested_hooks
from megalite.nn.storage_identity import storage_id

Outputs = Tensor | tuple[Tensor, ...]


def recompute(fn: Callable[..., Any], *args: Any) -> Any:
    """Return `fn(*args)` and keep only the arguments in memory until backward."""
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)


def checkpoint_without_output(produce: Callable[[], Outputs], consume: Callable[..., Any]) -> Any:
    """Return `consume(*produce())` without saving the outputs of `produce`, which backward recomputes.

    `consume` runs once, so this costs one more `produce`. The inputs of `produce` stay in memory, and it must return
    the same bits again, as views of storages with the same layouts.
    """
    dropped = _DroppedOutputs(produce)
    outputs = dropped.run()
    dropped.storages = [storage_id(x) for x in outputs]
    with nested_hooks(dropped.pack, dropped.unpack):
        return consume(*outputs)


class _DroppedOutputs:
    """The outputs of `produce`, and the hooks for tensors that are saved: views of the outputs are recomputed."""

    def __init__(self, produce: Callable[[], Outputs]):
        self.produce = produce
        self.outer_pack, self.outer_unpack = current_hooks()
        self.storages: list[int] = []
        self.recomputed: tuple[Tensor, ...] | None = None
        self.num_saved = 0  # views that were saved
        self.num_read = 0  # of these since the last recomputation

    def run(self) -> tuple[Tensor, ...]:
        outputs = self.produce()
        return (outputs,) if isinstance(outputs, Tensor) else outputs

    def pack(self, x: Tensor) -> Any:
        if (storage := storage_id(x)) not in self.storages:
            return self.outer_pack(x), None
        self.num_saved += 1
        return self.storages.index(storage), (x.shape, x.stride(), x.storage_offset())

    def unpack(self, entry: Any) -> Tensor:
        saved, view = entry
        if view is None:
            return self.outer_unpack(saved)
        if self.recomputed is None:
            with torch.no_grad():
                self.recomputed = self.run()
        x = self.recomputed[saved].as_strided(*view)
        self.num_read += 1
        if self.num_read == self.num_saved:  # the last one
            self.recomputed, self.num_read = None, 0
        return x
