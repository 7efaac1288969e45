"""Recompute a function's activations in backward instead of storing them (arXiv:1604.06174).

No random state is kept: dropout masks are functions of coordinates, so the second run draws the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def recompute(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, of which only the arguments stay in memory until backward."""
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)
