"""Main weights and optimizer state in host memory, updated by the host (ZeRO-Offload, arXiv:2101.06840).

    D2H copies  | grad 0 | grad 1 |         | grad 2 |              at most two gradients are on the host
    host                 | update 0         | update 1         | update 2 |
    H2D copies                              | weight 0 |       | weight 1 |  | weight 2 |
    GPU         | updates of buckets that are not offloaded |

All of this is after the step's all-reduce of the norm: nothing is speculative or stale, and buckets may be resharded.
Weights in another dtype are uploaded from the memory of their gradient. On a CPU the same code runs, and saves no
memory.

Rejected: copying gradients during the backward. This also hides the first copy, but keeps every gradient on the host.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megalite.optim.host_memory import allocate_mapped, allocate_pinned, pinned_bytes
from megalite.optim.update_rule import ParamUpdate, UpdateRule
from megalite.optim.zero.layout import BucketLayout, BufferLayout
from megalite.optim.zero.param_bucket import ParamBucket
from megalite.parallel.streams import Event, new_stream, on_side_stream, record_event, wait_event


def offloaded_buckets(layout: BufferLayout, fraction: float) -> tuple[BucketLayout, ...]:
    """Return the buckets whose state is offloaded: the first ones, as few as have `fraction` of all elements."""
    sizes = [bucket.size for bucket in layout.buckets]
    return tuple(b for b in layout.buckets if sum(sizes[: b.index]) < fraction * layout.size)


def allocation_sizes(owned_numels: Sequence[int], state_bytes: int, grad_bytes: int) -> list[int]:
    """Return the sizes in bytes of the allocations on the host: the state of each bucket, then two gradients.

    Args:
        owned_numels: number of elements that this rank owns of each offloaded bucket.
        state_bytes: bytes per element of main weight and optimizer state.
        grad_bytes: bytes per element of a gradient.
    """
    if not owned_numels:
        return []
    grad_size = max(owned_numels) * grad_bytes
    return [*(numel * state_bytes for numel in owned_numels), grad_size, grad_size]


class HostUpdater:
    """The host memory of offloaded buckets, and their update by the host.

    Attributes:
        allocations: (main weights, optimizer state by name) of each bucket: the part that this rank owns.
        grads: the host memory of two gradients.
        host_bytes: pinned memory in bytes.
        disk_bytes: size of the mapped file in bytes.
    """

    def __init__(
        self,
        buckets: Sequence[ParamBucket],
        main_dtype: torch.dtype,
        state_dtypes: Mapping[str, torch.dtype | None],
        device: torch.device,
        directory: str,
    ):
        """Allocate the memory and copy the weights to it.

        Args:
            buckets: the weights of the offloaded buckets.
            main_dtype: dtype of main weights and gradients.
            state_dtypes: names and dtypes of the optimizer state (UpdateRule.state_dtypes).
            device: device of the weights.
            directory: a directory for a mapped file with main weights and state; "": they are in memory.
        """
        self._device = device
        dtypes = [main_dtype, *(dtype or main_dtype for dtype in state_dtypes.values())]
        owned_numels = [len(bucket.owned) for bucket in buckets]
        sizes = allocation_sizes(owned_numels, sum(dtype.itemsize for dtype in dtypes), main_dtype.itemsize)
        num_on_disk = len(owned_numels) if directory else 0
        self.host_bytes = pinned_bytes(sizes[num_on_disk:])
        self.disk_bytes = sum(sizes[:num_on_disk])
        host_tensors = itertools.chain(
            allocate_mapped(sizes[:num_on_disk], directory, device), allocate_pinned(sizes[num_on_disk:], device)
        )
        self.allocations: list[tuple[Tensor, dict[str, Tensor]]] = []
        for bucket, numel in zip(buckets, owned_numels, strict=True):
            flats = next(host_tensors).split([numel * dtype.itemsize for dtype in dtypes])
            main, *state = (flat.view(dtype) for flat, dtype in zip(flats, dtypes, strict=True))
            main.copy_(bucket.owned)
            self.allocations.append((main, dict(zip(state_dtypes, state, strict=True))))
        self.grads = [flat.view(main_dtype) for flat in host_tensors]  # the last two allocations
        self._stream = new_stream(device) if buckets else None

    def update_(self, rule: UpdateRule, updates: Sequence[ParamUpdate]) -> None:
        """Update the offloaded buckets, in order; `grad` and `model_param` of their updates are on the device.

        Afterwards the current stream has the new weights, and may overwrite the gradients.
        """
        start_event = record_event(self._device)  # no later work reads the old weights
        last_upload = None
        host_grads: list[tuple[Tensor, Event | None]] = []
        for i, update in enumerate(updates):
            for n in range(len(host_grads), min(i + 2, len(updates))):
                host_grads.append(self._copy_grad_to_host(n, updates[n], start_event))
            grad, copy_event = host_grads[i]
            main, weight = update.param, update.model_param
            assert weight is not None
            if copy_event is not None:
                copy_event.synchronize()
            rule.update_(replace(update, grad=grad, model_param=None))
            # the gradient is no longer needed, so its memory takes the weight in its own dtype
            source = main if weight.dtype == grad.dtype else grad.view(weight.dtype)[: len(weight)].copy_(main)
            with on_side_stream(self._stream, after=start_event):
                weight.copy_(source, non_blocking=True)
                last_upload = record_event(self._device)
        wait_event(last_upload)

    def _copy_grad_to_host(self, i: int, update: ParamUpdate, start_event: Event | None) -> tuple[Tensor, Event | None]:
        """Start to copy the gradient of the i-th update; return it with the event of its completion."""
        with on_side_stream(self._stream, after=start_event):
            grad = self.grads[i % 2][: len(update.grad)].copy_(update.grad, non_blocking=True)
            return grad, record_event(self._device)
