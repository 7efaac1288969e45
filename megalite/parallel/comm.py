"""Collectives over one axis: asynchronous ones (`start_*`), in-place ones (`*_`), and a differentiable one.

    start_all_gather          [n, ...] -> [n * size, ...]
    start_reduce_scatter      [n * size, ...] -> [n, ...]
    reduce_scatter_sequence   forward reduce-scatter, backward all-gather       arXiv:2205.05198

The sequence is dim 0, so an all-gather concatenates contiguous blocks: x_sBD of tp rank r holds positions
r*s .. (r+1)*s of x_SBD. On an axis of size 1 each collective is the identity. The other differentiable collectives are
inside the matmuls that they overlap with (nn/linear.py).

On CPU, ranks of one machine exchange data through shared memory (cpu/shared_memory.py), other ranks through gloo.
gloo's reduce_scatter is several times slower than its all_reduce, so a reduce-scatter over gloo is an all-reduce whose
other parts are discarded.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megalite.parallel.mesh import SEND, Axis, CommRecord, Mesh

# renamed in torch 2.13; the old and the new functions do the same
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def has_native_reduce_scatter(device: torch.device) -> bool:
    """Return True if process groups of this device use `reduce_scatter_tensor`; otherwise they use an all-reduce."""
    return device.type != "cpu"


class Pending:
    """A collective that has been started. Its result is valid only after `wait()`.

    Attributes:
        clone_result: True if `wait` returns a copy of the result, so that the buffer that contains it can be freed.
    """

    def __init__(
        self, result: Tensor, work: Any = None, input_tensor: Tensor | None = None, record: CommRecord | None = None
    ):
        """Wrap `work`, which writes `result`.

        Args:
            result: the tensor that `wait` returns.
            work: torch's work object, or one with `wait` and `is_completed`; None: the result is valid already.
            input_tensor: the input of `work`, kept alive until `wait`.
            record: the record of the call; needed if there is `work`.
        """
        self._result = result
        self._work = work
        self._input = input_tensor
        self._record = record
        self.clone_result = False

    def is_completed(self) -> bool:
        """Return True if `wait` would not block."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> Tensor:
        """Wait for the collective and return its result."""
        if self._work is not None:
            assert self._record is not None
            timeout = self._record.axis.comm_log.p2p_timeout if self._record.peer >= 0 else None
            with self._record:
                if timeout is None:
                    self._work.wait()
                else:
                    self._work.wait(timeout)
            self._work = self._input = None
            if self.clone_result:
                self._result = self._result.clone()
        return self._result


def start_all_gather(x: Tensor, axis: Axis) -> Pending:
    """Start an all-gather: [n, ...] on each rank -> [n * size, ...], concatenated along dim 0 in axis order."""
    if axis.group is None:
        return Pending(x)
    x = x.contiguous()
    return _all_gather(x.new_empty(x.shape[0] * axis.size, *x.shape[1:]), x, axis)


def _all_gather(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    with axis.record("all-gather", x) as record:
        if axis.custom_backend is not None:
            work: Any = axis.custom_backend.start_all_gather(out.view(-1), x.view(-1))
        else:
            work = all_gather_into_tensor(out, x, group=axis.group, async_op=True)
    return Pending(out, work, x, record)


def start_reduce_scatter(x: Tensor, axis: Axis) -> Pending:
    """Start a reduce-scatter: [n * size, ...] on each rank -> this rank's block of the sum over ranks, [n, ...].

    `x` may be overwritten. Raises ValueError if dim 0 is not a multiple of the size of the axis.
    """
    if axis.group is None:
        return Pending(x)
    if x.shape[0] % axis.size:
        raise ValueError(f"dim 0 of {tuple(x.shape)} does not split over {axis.name}={axis.size}")
    x = x.contiguous()
    n = x.shape[0] // axis.size
    in_place = axis.custom_backend is None and not has_native_reduce_scatter(x.device)
    out = x.narrow(0, axis.rank * n, n) if in_place else x.new_empty(n, *x.shape[1:])
    pending = start_reduce_scatter_into(out, x, axis)
    pending.clone_result = in_place  # so that the other blocks are freed
    return pending


def start_all_gather_into(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Start an all-gather of flat tensors: x [n] into out [n * size]. `x` may be this rank's part of `out`."""
    if axis.custom_backend is None and x.device.type == "cpu":
        x = x.clone()  # gloo's input must not alias its output
    return _all_gather(out, x, axis)


def start_reduce_scatter_into(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Start a reduce-scatter: sum x [n * size, ...] over ranks and write this rank's block of it to out [n, ...].

    `out` may be this rank's block of `x`. It must be if the axis has no custom backend and the device no native
    reduce-scatter, since `x` is all-reduced then. The other blocks of `x` may be overwritten.
    """
    with axis.record("reduce-scatter", x) as record:
        if axis.custom_backend is not None:
            work: Any = axis.custom_backend.start_reduce_scatter(out.view(-1), x.view(-1))
        elif has_native_reduce_scatter(x.device):
            work = reduce_scatter_tensor(out, x, group=axis.group, async_op=True)
        else:
            work = dist.all_reduce(x, group=axis.group, async_op=True)
    return Pending(out, work, x, record)


def start_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Start to sum `x` over the axis, in place."""
    with axis.record("all-reduce", x) as record:
        return Pending(x, dist.all_reduce(x, group=axis.group, async_op=True), None, record)


def start_all_to_all(x: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], axis: Axis) -> Pending:
    """Start an all-to-all of a flat tensor.

    Args:
        x: the elements for the first rank of the axis, followed by those for the second rank, and so on.
        input_splits: number of elements to send to each rank.
        output_splits: number of elements to receive from each rank. The result has them in axis order.
        axis: the axis. If its size is 1, the result is `x`.
    """
    if axis.group is None:
        return Pending(x)
    out = x.new_empty(sum(output_splits))
    with axis.record("all-to-all", x) as record:
        if axis.custom_backend is not None:
            work = axis.custom_backend.start_all_to_all(out, x, list(output_splits), list(input_splits))
        else:
            work = dist.all_to_all_single(
                out, x, list(output_splits), list(input_splits), group=axis.group, async_op=True
            )
    return Pending(out, work, x, record)


def start_p2p(x: Tensor, axis: Axis, peer_index: int, op: str, tag_seed: int = 0) -> Pending:
    """Start to send `x`, or to receive it.

    Args:
        x: the message. It must not be changed (SEND) or read (RECEIVE) before `wait`.
        axis: the axis.
        peer_index: index along the axis of the other rank.
        op: SEND or RECEIVE.
        tag_seed: a number that is the same at both ends. gloo pairs only messages that agree in it, in size and dtype.
    """
    peer = axis.ranks[peer_index]
    with axis.record(op, x, peer) as record:
        tag = 0
        if dist.get_backend(axis.group) == "gloo":
            # gloo accepts a message into any buffer that is large enough, but it pairs only equal tags
            tag = zlib.crc32(f"{tag_seed} {record.num_bytes} {x.dtype}".encode()) & 0x7FFFFFFF
        start = dist.isend if op == SEND else dist.irecv
        return Pending(x, start(x, peer, group=axis.group, tag=tag), None, record)


def all_reduce_(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `x` in place over the axis and return it."""
    if axis.group is not None:
        with axis.record("all-reduce", x):
            dist.all_reduce(x, op=op, group=axis.group)
    return x


def broadcast_(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Overwrite `x` with the one of the rank at index `source` of the axis, and return it."""
    if axis.group is not None:
        with axis.record("broadcast", x):
            dist.broadcast(x, src=axis.ranks[source], group=axis.group)
    return x


def all_reduce_int(value: int, mesh: Mesh, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> int:
    """Reduce an integer over all ranks of the run and return the result on every rank."""
    return int(all_reduce_(torch.tensor(value, dtype=torch.int64, device=mesh.device), mesh.world, op))


def broadcast_int(value: int, mesh: Mesh) -> int:
    """Return the first rank's `value` on every rank."""
    return int(broadcast_(torch.tensor(value, dtype=torch.int64, device=mesh.device), mesh.world))


def all_gather_strings(text: str, axis: Axis, device: torch.device, max_bytes: int = 1 << 14) -> list[str]:
    """Return the strings of all ranks in axis order, on every rank; each is truncated to `max_bytes` bytes."""
    data = text.encode()[:max_bytes].ljust(max_bytes, b"\0")
    row = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    rows = start_all_gather(row[None], axis).wait().cpu()
    return [row.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]


class _ReduceScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        if x.device.type == "cpu":  # the all-reduce on CPU overwrites its input
            x = x.clone(memory_format=torch.contiguous_format)
        return start_reduce_scatter(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return start_all_gather(dy, ctx.axis).wait(), None


def reduce_scatter_sequence(x_SBD: Tensor, axis: Axis) -> Tensor:
    """Sum x_SBD over the axis and return this rank's positions of the sum, x_sBD. The backward is an all-gather."""
    if axis.group is None:
        return x_SBD
    return _ReduceScatterSequence.apply(x_SBD, axis)  # type: ignore[return-value]
