"""Collectives over one axis: some that are waited for later, some in place, and one that is differentiable.

    start_all_gather       [n, ...] -> [n * size, ...]
    start_reduce_scatter   [n * size, ...] -> [n, ...]
    scatter_seq            forward reduce-scatter, backward all-gather       arXiv:2205.05198

The sequence is dim 0, so a gather is a concatenation of contiguous blocks: x_sBD of tp rank r holds positions
r*s .. (r+1)*s of x_SBD. On an axis of size 1 each of them is the identity. The other differentiable collectives are
inside the matmuls that they overlap with (nn/linear.py).

On CPU, ranks of one machine exchange data through shared memory (shared_memory.py), others through gloo, whose
reduce_scatter is several times slower than its all_reduce, of which one part is kept instead.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megalite.parallel.mesh import SEND, Axis, CommRecord, Mesh

# torch 2.13 renamed them; both names do the same
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def has_native_reduce_scatter(device: torch.device) -> bool:
    """Whether this device sums and splits with `reduce_scatter_flat`; otherwise it uses an all-reduce."""
    return device.type != "cpu"


class Pending:
    """A collective that has begun. `wait()` returns its result, which is not valid before."""

    def __init__(self, result: Tensor, work: Any = None, keep: Tensor | None = None, call: CommRecord | None = None):
        """keep: the input of `work`. call: its record. With `copies` set, `wait` returns a copy and keeps nothing."""
        self._result, self._work, self._keep, self._call = result, work, keep, call
        self.copies = False

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> Tensor:
        if self._work is not None:
            assert self._call is not None
            limit = self._call.axis.comm_log.p2p_timeout if self._call.peer >= 0 else None
            with self._call:
                self._work.wait() if limit is None else self._work.wait(limit)
            self._work = self._keep = None
            if self.copies:
                self._result = self._result.clone()
        return self._result


def start_all_gather(x: Tensor, axis: Axis) -> Pending:
    """[n, ...] on each rank -> [n * size, ...] on all, concatenated along dim 0 in axis order."""
    if axis.group is None:
        return Pending(x)
    x = x.contiguous()
    return _all_gather(x.new_empty(x.shape[0] * axis.size, *x.shape[1:]), x, axis)


def _all_gather(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    with axis.record("all-gather", x) as call:
        if axis.custom_backend is not None:
            work: Any = axis.custom_backend.start_all_gather(out.view(-1), x.view(-1))
        else:
            work = all_gather_into_tensor(out, x, group=axis.group, async_op=True)
    return Pending(out, work, x, call)


def start_reduce_scatter(x: Tensor, axis: Axis) -> Pending:
    """[n * size, ...] on each rank -> the sum over ranks of this rank's block, [n, ...]. `x` may be overwritten."""
    if axis.group is None:
        return Pending(x)
    if x.shape[0] % axis.size:
        raise ValueError(f"dim 0 of {tuple(x.shape)} does not split over {axis.name}={axis.size}")
    x = x.contiguous()
    n = x.shape[0] // axis.size
    in_place = axis.custom_backend is None and not has_native_reduce_scatter(x.device)
    out = x.narrow(0, axis.rank * n, n) if in_place else x.new_empty(n, *x.shape[1:])
    pending = start_reduce_scatter_into(out, x, axis)
    pending.copies = in_place  # which lets go of the other blocks' memory
    return pending


def start_all_gather_into(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Gather flat tensors: x [n] into out [n * size]. `x` may be this rank's part of `out`."""
    if axis.custom_backend is None and x.device.type == "cpu":
        x = x.clone()  # gloo's input must not alias its output
    return _all_gather(out, x, axis)


def start_reduce_scatter_into(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Sum x [n * size, ...] over ranks into out [n, ...], this rank's block. `out` may be that part of `x`, and must be
    where an all-reduce does the work; the other parts of `x` may be overwritten."""
    with axis.record("reduce-scatter", x) as call:
        if axis.custom_backend is not None:
            work: Any = axis.custom_backend.start_reduce_scatter(out.view(-1), x.view(-1))
        elif has_native_reduce_scatter(x.device):
            work = reduce_scatter_tensor(out, x, group=axis.group, async_op=True)
        else:
            work = dist.all_reduce(x, group=axis.group, async_op=True)
    return Pending(out, work, x, call)


def start_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Sum `x` over the axis, in place."""
    with axis.record("all-reduce", x) as call:
        return Pending(x, dist.all_reduce(x, group=axis.group, async_op=True), None, call)


def start_all_to_all(x: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], axis: Axis) -> Pending:
    """Flat: the first `given[0]` elements go to the first rank, and so on; `got[r]` come from rank r, in axis order."""
    if axis.group is None:
        return Pending(x)
    out = x.new_empty(sum(output_splits))
    with axis.record("all-to-all", x) as call:
        if axis.custom_backend is not None:
            work = axis.custom_backend.start_all_to_all(out, x, list(output_splits), list(input_splits))
        else:
            work = dist.all_to_all_single(
                out, x, list(output_splits), list(input_splits), group=axis.group, async_op=True
            )
    return Pending(out, work, x, call)


def start_p2p(x: Tensor, axis: Axis, peer_index: int, op: str, tag_seed: int = 0) -> Pending:
    """Send `x` to position `at` of the axis (`op` SEND), or receive it from there (RECEIVE). `x` must not be changed,
    or read, before `wait`. `mark`: a number that is the same at both ends."""
    peer = axis.ranks[peer_index]
    with axis.record(op, x, peer) as call:
        tag = 0
        if dist.get_backend(axis.group) == "gloo":
            # gloo accepts a message into any buffer that is large enough, but it pairs only equal tags
            tag = zlib.crc32(f"{tag_seed} {call.num_bytes} {x.dtype}".encode()) & 0x7FFFFFFF
        return Pending(x, (dist.isend if op == SEND else dist.irecv)(x, peer, group=axis.group, tag=tag), None, call)


def all_reduce_(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce in place over the axis; returns `x`."""
    if axis.group is not None:
        with axis.record("all-reduce", x):
            dist.all_reduce(x, op=op, group=axis.group)
    return x


def broadcast_(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Overwrite `x` with that of axis position `source`; returns `x`."""
    if axis.group is not None:
        with axis.record("broadcast", x):
            dist.broadcast(x, src=axis.ranks[source], group=axis.group)
    return x


def all_reduce_int(number: int, mesh: Mesh, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> int:
    """Reduce an integer over all ranks of the run; every rank gets the result."""
    return int(all_reduce_(torch.tensor(number, dtype=torch.int64, device=mesh.device), mesh.world, op))


def broadcast_int(number: int, mesh: Mesh) -> int:
    """The integer of the run's first rank, on every rank."""
    return int(broadcast_(torch.tensor(number, dtype=torch.int64, device=mesh.device), mesh.world))


def all_gather_strings(text: str, axis: Axis, device: torch.device, max_bytes: int = 1 << 14) -> list[str]:
    """The texts of all ranks in axis order, on every rank; each is cut after `room` bytes."""
    data = text.encode()[:max_bytes].ljust(max_bytes, b"\0")
    row = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    rows = start_all_gather(row[None], axis).wait().cpu()
    return [row.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]


class _ReduceScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        if x.device.type == "cpu":  # there the input is overwritten
            x = x.clone(memory_format=torch.contiguous_format)
        return start_reduce_scatter(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return start_all_gather(dy, ctx.axis).wait(), None


def reduce_scatter_sequence(x_SBD: Tensor, axis: Axis) -> Tensor:
    """Summands x_SBD on each rank -> their sum, split along the sequence: x_sBD; backward is an all-gather."""
    return x_SBD if axis.group is None else _ReduceScatterSequence.apply(x_SBD, axis)  # type: ignore[return-value]
