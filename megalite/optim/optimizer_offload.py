"""Main weights and states in host memory, where the host updates them (ZeRO-Offload, arXiv:2101.06840).

    gradients | 0 down | 1 down |         | 2 down |              two are on the host at most
    host               | 0 updated        | 1 updated        | 2 updated |
    weights                               | 0 up   |         | 1 up  |   | 2 up |
    card      | updates of what has stayed |

All comes after the step's one agreement: nothing is speculative or stale, and buckets may come and go. What goes up in
another dtype lies where its gradient came. Rejected: to fetch during backward, which hides the first way down, too, but
keeps every gradient on the host. A CPU does the same, and saves nothing.
"""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megalite.optim.buffer import ParamAndGradBuffer
from megalite.optim.host_memory import allocate_mapped, allocate_pinned, pinned_bytes
from megalite.optim.layout import Bucket, BufferLayout
from megalite.optim.update_rule import ParamUpdate, UpdateRule
from megalite.parallel.streams import Event, new_stream, on_side_stream, record_event, wait_event


def offloaded_buckets(layout: BufferLayout, fraction: float) -> tuple[Bucket, ...]:
    """The buckets whose state the host has: the first, as few as have `fraction` of all elements."""
    sizes = [bucket.size for bucket in layout.buckets]
    return tuple(b for b in layout.buckets if sum(sizes[: b.index]) < fraction * layout.size)


def allocation_sizes(owned: Sequence[int], state: int, gradient: int) -> list[int]:
    """Bytes: of each bucket `state` for every element that this rank owns, then of two gradients."""
    return [*(n * state for n in owned), *[max(owned) * gradient] * 2] if owned else []


class OffloadedState:
    """Of `fraction` of the elements of `buffer`. `kept`: bucket -> main weights and `states` of what this rank owns, in
    a mapped file of `folder` where one is given."""

    def __init__(
        self, buffer: ParamAndGradBuffer, states: Mapping[str, torch.dtype | None], fraction: float, folder: str
    ):
        self._device, main = buffer.mesh.device, buffer.grads.dtype
        dtypes, buckets = (
            [main, *(dtype or main for dtype in states.values())],
            offloaded_buckets(buffer.layout, fraction),
        )
        owned = [len(buffer.shardings[bucket.key].owned_range(bucket)) for bucket in buckets]
        parts = allocation_sizes(owned, sum(dtype.itemsize for dtype in dtypes), main.itemsize)
        on_disk = len(owned) if folder else 0
        self.host_bytes, self.disk = pinned_bytes(parts[on_disk:]), sum(parts[:on_disk])
        disk_bytes = allocate_mapped(parts[:on_disk], folder, self._device)
        host_tensors = itertools.chain(disk_bytes, allocate_pinned(parts[on_disk:], self._device))
        self.state: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}
        for bucket, n in zip(buckets, owned, strict=True):
            flats = next(host_tensors).split([n * dtype.itemsize for dtype in dtypes])
            weight, *rest = (flat.view(dtype) for flat, dtype in zip(flats, dtypes, strict=True))
            self.state[bucket.index] = weight.copy_(buffer.weights.owned(bucket)), dict(zip(states, rest, strict=True))
        self._grads = [flat.view(main) for flat in host_tensors]
        self._stream = new_stream(self._device) if buckets else None

    def update_(self, rule: UpdateRule, updates: Sequence[ParamUpdate]) -> None:
        """Those of `kept`, in order; their `grad` and `copy` are on the device. After this the current stream has the
        new weights, and may write the gradients again."""
        begin, last_upload, incoming = (
            record_event(self._device),
            None,
            [],
        )  # from `begin` on nobody reads the old weights
        for i, update in enumerate(updates):
            incoming += [
                self._copy_grad_to_host(n, updates[n], begin) for n in range(len(incoming), min(i + 2, len(updates)))
            ]
            (grad, copy_event), param, copy = incoming[i], update.param, update.model_param
            assert copy is not None
            if copy_event is not None:
                copy_event.synchronize()
            rule.update_(update._replace(grad=grad, model_param=None))
            source = param if copy.dtype == grad.dtype else grad.view(copy.dtype)[: len(copy)].copy_(param)
            with on_side_stream(self._stream, after=begin):
                copy.copy_(source, non_blocking=True)
                last_upload = record_event(self._device)
        wait_event(last_upload)

    def _copy_grad_to_host(self, i: int, update: ParamUpdate, begin: Event | None) -> tuple[Tensor, Event | None]:
        with on_side_stream(self._stream, after=begin):
            grad = self._grads[i % 2][: len(update.grad)].copy_(update.grad, non_blocking=True)
            return grad, record_event(self._device)
