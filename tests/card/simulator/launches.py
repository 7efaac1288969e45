"""Triton's kernels on the simulated card: interpreted on the CPU, written down as one Launch each. What one writes is
what has changed; all arguments may be read."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megalite.kernels.dispatch import Kernel


def noted(card: Any) -> AbstractContextManager[object]:
    plain = Kernel.__getitem__

    def at(kernel: Kernel, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
            if any(x.is_meta for x in tensors):  # of a plan
                return plain(kernel, grid)(*args, **options)
            name = kernel.fn.__name__
            if not all(card.on_card(x) for x in tensors):
                card.mix(f"{name}({', '.join(card.memory.side(x) for x in tensors)})")
            with card.aside():
                before = [x.clone() for x in tensors]
                plain(kernel, grid)(*args, **options)
                written = [x for x, old in zip(tensors, before, strict=True) if not torch.equal(x, old)]
            card.launch(name, tensors, written)

        return launch

    return mock.patch.object(Kernel, "__getitem__", at)
