"""Activation recomputation in backward (arXiv:1604.06174).

No random state is saved: dropout masks are functions of coordinates, so the second forward draws the same masks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megalite.nn.storage_identity import storage_id


def recompute(fn: Callable[..., Any], *args: Any) -> Any:
    """Return `fn(*args)` and keep only the arguments in memory until backward."""
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)


def checkpoint_without_output(produce: Callable[[], Tensor], consume: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `consume(produce())` without saving the output of `produce`, which backward recomputes.

    `consume` runs once, so this costs one more `produce`. The inputs of `produce` stay in memory, and it must return
    the same bits again.
    """
    result = produce()
    view_id = storage_view_id(result)

    def pack(x: Tensor) -> Tensor | None:
        return None if storage_view_id(x) == view_id else x

    def unpack(saved: Tensor | None) -> Tensor:
        if saved is not None:
            return saved
        with torch.no_grad():
            return produce()

    with saved_tensors_hooks(pack, unpack):
        return consume(result)


def storage_view_id(x: Tensor) -> tuple[object, ...]:
    """Return an identity of the memory of x."""
    return storage_id(x), x.storage_offset(), x.shape, x.stride()
