"""Recomputes a function's activations in backward instead of storing them (arXiv:1604.06174).

No random state is kept: dropout masks are functions of coordinates, so the second run draws the same masks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def recompute(fn: Callable[..., Any], *args: Any) -> Any:
    """Return `fn(*args)` and keep only the arguments in memory until backward."""
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)


def checkpoint_without_output(produce: Callable[[], Tensor], consume: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `use(make())` without keeping make's result, which backward makes again; `use` runs once, so this costs
    one more `make`. The inputs of `make` stay, and it must give the same bits again."""
    result = produce()
    place = storage_view_id(result)

    def pack(saved: Tensor) -> Tensor | None:
        return None if storage_view_id(saved) == place else saved

    def unpack(kept: Tensor | None) -> Tensor:
        if kept is not None:
            return kept
        with torch.no_grad():
            return produce()

    with saved_tensors_hooks(pack, unpack):
        return consume(result)


def storage_view_id(x: Tensor) -> tuple[object, ...]:
    """Identify the elements of memory that x is; works on the meta device too, where a tensor has no address."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()
