"""Hooks for the tensors that autograd saves, one inside another.

Autograd calls only the innermost hooks. Code with hooks of its own passes what it does not handle to those around it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
_current: ContextVar[Hooks] = ContextVar("hooks", default=(lambda x: x, lambda x: x))


def current_hooks() -> Hooks:
    """Return the pack and unpack hooks around this code; without any, they return their argument."""
    return _current.get()


@contextmanager
def nested_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    """Use these hooks for the tensors that are saved within a with block."""
    token = _current.set((pack, unpack))
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _current.reset(token)
