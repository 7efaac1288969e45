"""NCCL's rules without NCCL: a process group that carries tensors over gloo and notes what NCCL would be told.

    process_group(ranks, device=..., backend=use(recorder))     megalite/launch/process_group.py

Input is read when an operation is issued, the result is written when it is waited for: the earliest and the latest
that a card can do it, so a result that is used too early is stale on every run. Nothing blocks the host but `wait`.

What is modelled is ProcessGroupNCCL as in torch 2.11 and 2.13, after their headers, messages and Python:
  - a collective with async_op=False runs on the caller's own stream; written as Comm, then CommWait of that stream
  - unbatched send and recv: a communicator and a stream for each pair of ranks of the group, both directions on it,
    made at its first use while the hosts of both ranks wait.
  - `wait` of a Work makes the current stream wait and returns; that of a barrier holds the host
  - BAND, BOR, BXOR, tags, receiving from anybody, tensors of the host, strided tensors: not there, refused here
    (torch itself drops a tag without a word, and of strided tensors point to point it only warns)
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

from simulated_gpu.simulator.communicator import Carrier, Communicator, Operation, Place, copy_of
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


class Plain:
    """Where the facts go, and what only a simulated card knows (device.py). No card: tensors of the CPU stand for a
    card's, and there is one stream; what is done `aside` is not on the card."""

    def __init__(self) -> None:
        self.facts: list[Fact] = []

    def write(self, fact: Fact) -> None:
        self.facts.append(fact)

    def stream(self) -> Stream:
        return DEFAULT

    def span(self, x: Tensor) -> Span:
        start = x.storage_offset() * x.element_size()
        return Span(x.untyped_storage().data_ptr(), start, start + x.numel() * x.element_size())

    def on_card(self, x: Tensor) -> bool:
        return True

    def aside(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()


_recorder: Any = Plain()  # or a Card
_number = 0


def join() -> str:
    """For `run_ranks(..., backend=join)`: a backend that writes to `facts()`."""
    return use(Plain())


def facts() -> list[Fact]:
    """Of this process so far; without a card."""
    return _recorder.facts


def use(recorder: Any) -> str:
    """The backend's name, registered. Groups of this process write to `recorder`."""
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
        with _recorder.aside():
            self._communicator.finish(self._operation)
        fact = self._operation.fact
        _recorder.write(CommWait(fact.number, _recorder.stream()))
        if fact.kind == "barrier":
            _recorder.write(HostWait(stream=_recorder.stream(), where=fact.where))
        return True

    def is_completed(self) -> bool:
        """A send is when its receive has begun. The host that hears it knows: what it issues next comes after."""
        if not self._operation.done.is_set():
            return False
        _recorder.write(CommDone(self._operation.fact.number))
        return True


def refuse(x: Tensor, reduced: bool = False) -> None:
    """What ProcessGroupNCCL asks of a tensor."""
    if not _recorder.on_card(x):
        raise RuntimeError(f"No backend type associated with device type {x.device.type}")
    if x.is_sparse or not x.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    if x.dtype not in DTYPES:
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {x.dtype}")
    if reduced and x.dtype not in REDUCED:
        raise TypeError("Unsupported Float8 type for NCCL reduction")


def reduction(op: Any, x: Tensor) -> str:
    """Its name, where NCCL has it for this dtype."""
    name = str(getattr(op, "op", op)).rpartition(".")[2]
    if name in ("BAND", "BOR", "BXOR"):
        raise ValueError(f"Cannot use ReduceOp.{name} with NCCL")
    if name == "AVG" and x.dtype == torch.bool:
        raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
    if name not in OPS:
        raise NotImplementedError(f"the simulated NCCL has no ReduceOp.{name}")
    return "MAX" if name == "SUM" and x.dtype == torch.bool else name


class SimulatedNccl(dist.ProcessGroup):
    """One group of ranks: a communicator for its collectives, and one for each pair."""

    def __init__(self, options: Any, _: Any = None):
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self._ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
        self._name, self._description = options.group_id, ""
        self._carrier = Carrier(options.store, rank, size, options.timeout)
        self._communicators: dict[tuple[int, ...], Communicator] = {}

    def getBackendName(self) -> str:  # noqa: N802 -- torch's
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    group_name = property(lambda self: self._name)  # torch keeps them in a group's backends: this one has none
    group_desc = property(lambda self: self._description)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        """What torch sets time limits of; a group of NCCL has none for the host."""
        if device.type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self._carrier.gloo

    def shutdown(self) -> None:
        for communicator in self._communicators.values():
            communicator.close()

    def allreduce(self, tensors: list[Tensor], opts: Any) -> SimulatedWork:
        [x] = tensors
        refuse(x, reduced=True)
        op = reduction(opts.reduceOp, x)
        moved = self._copy(x)
        return self._collective("all_reduce", x, x, x, partial(self._carrier.all_reduce, moved, op), moved, op=op)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> SimulatedWork:  # noqa: A002 -- torch's
        self._both(output, input, "output tensor size must be equal to world_size times input tensor size")
        moved, result = self._copy(input), self._copy(output)
        return self._collective(
            "all_gather", input, input, output, partial(self._carrier.all_gather, result, moved), result
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> SimulatedWork:  # noqa: A002 -- torch's
        self._both(input, output, "input tensor must be the same size as output size times world size")
        refuse(input, reduced=True)
        op = reduction(opts.reduceOp, input)
        moved = self._copy(input)
        mine, travel = moved.view(self.size(), -1)[self.rank()], partial(self._carrier.all_reduce, moved, op)
        return self._collective("reduce_scatter", output, input, output, travel, mine, op=op)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, got: list[int], given: list[int], opts: Any  # noqa: A002 -- torch's
    ) -> SimulatedWork:  # fmt: skip
        """Flat. NCCL compares nothing: ranks whose counts do not meet hang there, and are told here."""
        for x, counts in ((input, given), (output, got)):
            refuse(x)
            if sum(counts or [x.numel()]) != x.numel() or not counts and x.numel() % self.size():
                raise ValueError("Split sizes doesn't match total dim 0 size")
        even = [output.numel() // self.size()] * self.size()
        moved, result = self._copy(input), self._copy(output)
        travel = partial(self._carrier.all_to_all, result, moved, got or even, given or even)
        return self._collective("all_to_all", input[:0], input, output, travel, result)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # before torch 2.13
    alltoall_base = all_to_all_single

    def broadcast(self, tensors: list[Tensor], opts: Any) -> SimulatedWork:
        [x] = tensors
        refuse(x)
        moved, root = self._copy(x), opts.rootRank
        travel = partial(self._carrier.broadcast, moved, root)
        return self._collective("broadcast", x, x, x, travel, moved, peer=self._ranks[root])

    def barrier(self, opts: Any) -> SimulatedWork:
        one = torch.zeros(1)  # NCCL's barrier is an all-reduce of this
        return self._collective("barrier", one, None, None, lambda: self._carrier.all_reduce(one, "SUM"), one)

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
        moved, receives = self._copy(x), kind == "recv"
        low, high = sorted((peer, self.rank()))
        channel = low * self.size() + high

        def travel() -> None:
            self._carrier.meet(operation.fact, peer, 2 * channel)
            (self._carrier.receive if receives else self._carrier.send)(moved, peer, 2 * channel + 1)

        pair = (low, high)
        fact = self._fact(kind, x, None if receives else x, x if receives else None, peer=self._ranks[peer], pair=pair)
        place = Place(x)
        operation = Operation(fact, travel, lambda: place.write(moved) if receives else None)
        return self._issue(pair, operation)

    def _collective(
        self, kind: str, counted: Tensor, reads: Tensor | None, writes: Tensor | None,
        travel: Callable[[], None], result: Tensor, op: str = "", peer: int | None = None,
    ) -> SimulatedWork:  # fmt: skip
        def agree_and_travel() -> None:
            self._carrier.agree(operation.fact)
            travel()

        fact = self._fact(kind, counted, reads, writes, op=op, peer=peer)
        place = None if writes is None else Place(writes)
        operation = Operation(fact, agree_and_travel, lambda: None if place is None else place.write(result))
        return self._issue((), operation)

    def _fact(
        self, kind: str, counted: Tensor, reads: Tensor | None, writes: Tensor | None,
        *, op: str = "", peer: int | None = None, pair: tuple[int, ...] = (),
    ) -> Comm:  # fmt: skip
        global _number
        _number += 1
        ranks = tuple(self._ranks[r] for r in pair) or self._ranks
        what = (kind, str(counted.dtype).removeprefix("torch."), counted.numel(), peer, _number, _recorder.stream())
        return Comm(
            self._title(pair), ranks, *what, _spans(reads), _spans(writes), op, caller(above="megalite/parallel")
        )

    def _title(self, pair: tuple[int, ...]) -> str:
        """3 mesh_pp; of a pair: 3 mesh_pp 0-2. torch numbers groups in the order in which all ranks make them."""
        ends = "-".join(str(self._ranks[r]) for r in pair)
        return " ".join(part for part in (self._name, self._description, ends) if part)

    def _issue(self, pair: tuple[int, ...], operation: Operation) -> SimulatedWork:
        if pair not in self._communicators:
            self._communicators[pair] = Communicator(operation.fact.comm, operation.fact.ranks, _recorder.aside)
        _recorder.write(operation.fact)
        self._communicators[pair].put(operation)
        return SimulatedWork(self._communicators[pair], operation)

    def _both(self, large: Tensor, small: Tensor, text: str) -> None:
        refuse(large)
        refuse(small)
        if large.dtype != small.dtype:
            raise TypeError("input tensor must be the same type as the output tensor.")
        if large.numel() != small.numel() * self.size():
            raise ValueError(text)

    def _copy(self, x: Tensor) -> Tensor:
        with _recorder.aside():
            return copy_of(x)


def _spans(x: Tensor | None) -> tuple[Span, ...]:
    return () if x is None else (_recorder.span(x),)
