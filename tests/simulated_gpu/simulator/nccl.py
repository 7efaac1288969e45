"""NCCL's rules without NCCL: a process group that transfers tensors over gloo and records what NCCL would be given.

    process_group(ranks, device=..., backend=use(recorder))     megalite/launch/process_group.py

Input is read when an operation is issued, and the result is written when it is waited for. These are the earliest and
the latest that a GPU could do it, so a result that is used too early is always stale. Only `wait` blocks the host.

It models ProcessGroupNCCL of torch 2.11 and 2.13, after their headers, messages and Python:
  - a collective with async_op=False runs on the caller's own stream; recorded as Comm, then CommWait of that stream
  - unbatched send and recv: a communicator and a stream for each pair of ranks of the group, both directions on it,
    created at its first use while the hosts of both ranks wait
  - `wait` of a Work makes the current stream wait and returns; a barrier's also blocks the host
  - BAND, BOR, BXOR, tags, receiving from any rank, host tensors, strided tensors: unsupported, refused here
    (torch itself silently ignores a tag, and only warns about strided tensors in point to point)
  - dtypes: the table in NCCLUtils.hpp, which comes with every torch
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from simulated_gpu.simulator.communicator import Communicator, Destination, Operation, Transport, copy_of
from simulated_gpu.simulator.state import caller
from simulated_gpu.simulator.trace import DEFAULT, Comm, CommDone, CommWait, Fact, HostWait, Span, Stream

NAME = "simulated_nccl"
_FLOAT8 = {torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
REDUCED = frozenset(
    {torch.int8, torch.uint8, torch.float32, torch.float64, torch.int32, torch.int64, torch.float16}
    | {torch.bool, torch.bfloat16}
)
DTYPES = REDUCED | _FLOAT8
OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")


class CpuRecorder:
    """A recorder without a simulated GPU (device.py): CPU tensors count as the GPU's, and there is one stream."""

    def __init__(self) -> None:
        self.facts: list[Fact] = []

    def write(self, fact: Fact) -> None:
        self.facts.append(fact)

    def stream(self) -> Stream:
        return DEFAULT

    def span(self, x: Tensor) -> Span:
        start = x.storage_offset() * x.element_size()
        return Span(x.untyped_storage().data_ptr(), start, start + x.numel() * x.element_size())

    def on_gpu(self, x: Tensor) -> bool:
        return True

    def pause_simulation(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()


_recorder: Any = CpuRecorder()  # or a SimulatedGpu
_number = 0


def join() -> str:
    """Return a backend for `run_ranks(..., backend=join)` that writes to `facts()`."""
    return use(CpuRecorder())


def facts() -> list[Fact]:
    """Return the facts of this process so far; there is no simulated GPU."""
    return _recorder.facts


def use(recorder: Any) -> str:
    """Register the backend and return its name; groups of this process write to `recorder`."""
    global _recorder
    _recorder = recorder
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, SimulatedNccl, extended_api=True, devices=["cpu", "cuda"])
    return NAME


class SimulatedWork(dist.Work):
    def __init__(self, communicator: Communicator, operation: Operation):
        super().__init__()
        self._communicator, self._operation = communicator, operation

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with _recorder.pause_simulation():
            self._communicator.finish(self._operation)
        fact = self._operation.fact
        _recorder.write(CommWait(fact.number, _recorder.stream()))
        if fact.kind == "barrier":
            _recorder.write(HostWait(stream=_recorder.stream(), where=fact.where))
        return True

    def is_completed(self) -> bool:
        """Return whether it is done, after which later work of the host is ordered.

        A send is done when its receive starts.
        """
        if not self._operation.done.is_set():
            return False
        _recorder.write(CommDone(self._operation.fact.number))
        return True


def refuse(x: Tensor, reduced: bool = False) -> None:
    """Raise what ProcessGroupNCCL raises for an unsupported tensor."""
    if not _recorder.on_gpu(x):
        raise RuntimeError(f"No backend type associated with device type {x.device.type}")
    if x.is_sparse or not x.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    if x.dtype not in DTYPES:
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {x.dtype}")
    if reduced and x.dtype not in REDUCED:
        raise TypeError("Unsupported Float8 type for NCCL reduction")


def reduction(op: Any, x: Tensor) -> str:
    """Return the name of a reduction, or raise if NCCL does not support it for this dtype."""
    name = str(getattr(op, "op", op)).rpartition(".")[2]
    if name in ("BAND", "BOR", "BXOR"):
        raise ValueError(f"Cannot use ReduceOp.{name} with NCCL")
    if name == "AVG" and x.dtype == torch.bool:
        raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
    if name not in OPS:
        raise NotImplementedError(f"the simulated NCCL has no ReduceOp.{name}")
    return "MAX" if name == "SUM" and x.dtype == torch.bool else name


class SimulatedNccl(dist.ProcessGroup):
    """A group of ranks: a communicator for its collectives, and one for each pair of ranks."""

    def __init__(self, options: Any, _: Any = None):
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self._ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
        self._name, self._description = options.group_id, ""
        self._transport = Transport(options.store, rank, size, options.timeout)
        self._communicators: dict[tuple[int, ...], Communicator] = {}

    def getBackendName(self) -> str:  # noqa: N802 -- torch's
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    group_name = property(lambda self: self._name)  # torch stores them in a group's backends, which this group lacks
    group_desc = property(lambda self: self._description)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        """Return the gloo group, whose timeout torch sets; NCCL has no backend for the host."""
        if device.type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self._transport.gloo

    def shutdown(self) -> None:
        for communicator in self._communicators.values():
            communicator.close()

    def allreduce(self, tensors: list[Tensor], opts: Any) -> SimulatedWork:
        [x] = tensors
        refuse(x, reduced=True)
        op = reduction(opts.reduceOp, x)
        buffer = self._copy(x)
        return self._collective("all_reduce", x, x, x, partial(self._transport.all_reduce, buffer, op), buffer, op=op)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> SimulatedWork:  # noqa: A002 -- torch's
        self._check_sizes(output, input, "output tensor size must be equal to world_size times input tensor size")
        buffer, result = self._copy(input), self._copy(output)
        return self._collective(
            "all_gather", input, input, output, partial(self._transport.all_gather, result, buffer), result
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> SimulatedWork:  # noqa: A002 -- torch's
        self._check_sizes(input, output, "input tensor must be the same size as output size times world size")
        refuse(input, reduced=True)
        op = reduction(opts.reduceOp, input)
        buffer = self._copy(input)
        shard, transfer = buffer.view(self.size(), -1)[self.rank()], partial(self._transport.all_reduce, buffer, op)
        return self._collective("reduce_scatter", output, input, output, transfer, shard, op=op)

    def all_to_all_single(
        self, output: Tensor, input: Tensor,  # noqa: A002 -- torch's
        output_splits: list[int], input_splits: list[int], opts: Any,
    ) -> SimulatedWork:  # fmt: skip
        """Exchange flat tensors. Ranks with mismatched splits raise here; under NCCL they hang."""
        for x, splits in ((input, input_splits), (output, output_splits)):
            refuse(x)
            if sum(splits or [x.numel()]) != x.numel() or not splits and x.numel() % self.size():
                raise ValueError("Split sizes doesn't match total dim 0 size")
        even_splits = [output.numel() // self.size()] * self.size()
        buffer, result = self._copy(input), self._copy(output)
        transfer = partial(
            self._transport.all_to_all, result, buffer, output_splits or even_splits, input_splits or even_splits
        )
        return self._collective("all_to_all", input[:0], input, output, transfer, result)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # before torch 2.13
    alltoall_base = all_to_all_single

    def broadcast(self, tensors: list[Tensor], opts: Any) -> SimulatedWork:
        [x] = tensors
        refuse(x)
        buffer, root = self._copy(x), opts.rootRank
        transfer = partial(self._transport.broadcast, buffer, root)
        return self._collective("broadcast", x, x, x, transfer, buffer, peer=self._ranks[root])

    def barrier(self, opts: Any) -> SimulatedWork:
        token = torch.zeros(1)  # NCCL's barrier is an all-reduce of this
        return self._collective("barrier", token, None, None, lambda: self._transport.all_reduce(token, "SUM"), token)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> SimulatedWork:
        return self._point_to_point("send", tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> SimulatedWork:
        return self._point_to_point("recv", tensors, src, tag)

    def recv_anysource(self, *_: Any) -> SimulatedWork:
        raise RuntimeError("ProcessGroupNCCL does not support recvAnysource")

    def _point_to_point(self, kind: str, tensors: list[Tensor], peer: int, tag: int) -> SimulatedWork:
        [x] = tensors
        refuse(x)
        if tag:
            raise ValueError(f"tag={tag}: NCCL has no tags, messages arrive in the order of their sends")
        if peer == self.rank():
            raise ValueError(f"rank {self._ranks[peer]} sends to itself, which NCCL does in a batch only")
        buffer, receives = self._copy(x), kind == "recv"
        low, high = sorted((peer, self.rank()))
        channel = low * self.size() + high

        def transfer() -> None:
            self._transport.check_message(operation.fact, peer, 2 * channel)
            (self._transport.receive if receives else self._transport.send)(buffer, peer, 2 * channel + 1)

        pair = (low, high)
        fact = self._fact(kind, x, None if receives else x, x if receives else None, peer=self._ranks[peer], pair=pair)
        destination = Destination(x)
        operation = Operation(fact, transfer, lambda: destination.write(buffer) if receives else None)
        return self._issue(pair, operation)

    def _collective(
        self, kind: str, counted: Tensor, reads: Tensor | None, writes: Tensor | None,
        transfer: Callable[[], None], result: Tensor, op: str = "", peer: int | None = None,
    ) -> SimulatedWork:  # fmt: skip
        def check_and_transfer() -> None:
            self._transport.check_collective(operation.fact)
            transfer()

        fact = self._fact(kind, counted, reads, writes, op=op, peer=peer)
        destination = None if writes is None else Destination(writes)
        operation = Operation(
            fact, check_and_transfer, lambda: None if destination is None else destination.write(result)
        )
        return self._issue((), operation)

    def _fact(
        self, kind: str, counted: Tensor, reads: Tensor | None, writes: Tensor | None,
        *, op: str = "", peer: int | None = None, pair: tuple[int, ...] = (),
    ) -> Comm:  # fmt: skip
        global _number
        _number += 1
        ranks = tuple(self._ranks[r] for r in pair) or self._ranks
        fields = (kind, str(counted.dtype).removeprefix("torch."), counted.numel(), peer, _number, _recorder.stream())
        where = caller(skipped_dir="megalite/parallel")
        return Comm(self._title(pair), ranks, *fields, _spans(reads), _spans(writes), op, where)

    def _title(self, pair: tuple[int, ...]) -> str:
        """Return "3 mesh_pp", or "3 mesh_pp 0-2" for a pair; torch numbers groups in the order of creation."""
        ends = "-".join(str(self._ranks[r]) for r in pair)
        return " ".join(part for part in (self._name, self._description, ends) if part)

    def _issue(self, pair: tuple[int, ...], operation: Operation) -> SimulatedWork:
        if pair not in self._communicators:
            self._communicators[pair] = Communicator(
                operation.fact.comm, operation.fact.ranks, _recorder.pause_simulation
            )
        _recorder.write(operation.fact)
        self._communicators[pair].put(operation)
        return SimulatedWork(self._communicators[pair], operation)

    def _check_sizes(self, large: Tensor, small: Tensor, text: str) -> None:
        refuse(large)
        refuse(small)
        if large.dtype != small.dtype:
            raise TypeError("input tensor must be the same type as the output tensor.")
        if large.numel() != small.numel() * self.size():
            raise ValueError(text)

    def _copy(self, x: Tensor) -> Tensor:
        with _recorder.pause_simulation():
            return copy_of(x)


def _spans(x: Tensor | None) -> tuple[Span, ...]:
    return () if x is None else (_recorder.span(x),)
