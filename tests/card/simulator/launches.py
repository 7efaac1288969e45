"""Triton's kernels on the simulated card: interpreted on the CPU, written down as one Launch each. What one writes is
what has changed; all arguments may be read."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megalite.kernels.dispatch import Kernel


def _launcher(card: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def at(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            name = kernel.fn.__name__
            if not all(card.on_card(x) for x in tensors):
                card.mix(f"{name}({', '.join(card.memory.side(x) for x in tensors)})")
            with card.aside():
                before = [x.clone() for x in tensors]
                original(kernel, grid)(*args, **kwargs)
                written = [x for x, old in zip(tensors, before, strict=True) if not torch.equal(x, old)]
            card.launch(name, tensors, written)

        return launch

    return at


@contextlib.contextmanager
def noted(card: Any) -> Iterator[None]:
    """Triton is imported when megalite launches its first kernel, not sooner."""
    with contextlib.ExitStack() as stack:
        compiled, hooked = Kernel.compiled, False

        def hook() -> None:
            nonlocal hooked
            if not hooked:
                from triton.runtime.jit import KernelInterface

                made = _launcher(card, KernelInterface.__getitem__)
                stack.enter_context(mock.patch.object(KernelInterface, "__getitem__", made))
                hooked = True

        def compiled_and_hooked(kernel: Kernel) -> Any:
            made = compiled(kernel)
            hook()
            return made

        if "triton.runtime.jit" in sys.modules:
            hook()
        stack.enter_context(mock.patch.object(Kernel, "compiled", compiled_and_hooked))
        yield
