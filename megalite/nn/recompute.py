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


def without_keeping(make: Callable[[], Tensor], use: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `use(make())` without keeping make's result, which backward makes again; `use` runs once, so this costs
    one more `make`. The inputs of `make` stay, and it must give the same bits again."""
    result = make()
    place = _place(result)

    def keep(saved: Tensor) -> Tensor | None:
        return None if _place(saved) == place else saved

    def restore(kept: Tensor | None) -> Tensor:
        if kept is not None:
            return kept
        with torch.no_grad():
            return make()

    with saved_tensors_hooks(keep, restore):
        return use(result)


def _place(x: Tensor) -> tuple[object, ...]:
    """Identify the elements of memory that x is; works on the meta device too, where a tensor has no address."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()
