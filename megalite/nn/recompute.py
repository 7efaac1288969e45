"""Recompute a function's activations in backward instead of storing them (arXiv:1604.06174).

No random state is kept: dropout masks are functions of coordinates, so the second run draws the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def recompute(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, of which only the arguments stay in memory until backward."""
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)


def without_keeping(make: Callable[[], Tensor], use: Callable[[Tensor], Tensor]) -> Tensor:
    """`use(make())`, where of make's result nothing stays until backward, which makes it again; `use` runs once, so
    this costs as much as `make`. What `make` needs stays, and it has to give the same bits again."""
    made = make()
    which = _place(made)

    def keep(saved: Tensor) -> Tensor | None:
        return None if _place(saved) == which else saved

    def restore(kept: Tensor | None) -> Tensor:
        if kept is not None:
            return kept
        with torch.no_grad():
            return make()

    with saved_tensors_hooks(keep, restore):
        return use(made)


def _place(x: Tensor) -> tuple[object, ...]:
    """Which elements of which memory x is, also of a tensor on the meta device, which has no address."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()
