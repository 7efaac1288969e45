"""One communicator of the simulated NCCL: a thread that takes its operations one at a time, in the order of issue.
Before one moves anything all its ranks tell each other what they are about to do, and where they differ `Disorder` is
raised. The result is written into the caller's tensor when the host waits: the latest that a card could do it."""

import ctypes
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from simulated_gpu.simulator.trace import Comm

SAID = 160  # bytes in which a rank says what it is about to do
_STEP_S = 0.05


class Disorder(RuntimeError):
    """Ranks of one communicator do different things at the same place of its order."""


def describe(fact: Comm) -> str:
    """all_reduce(SUM) of 5 float64; send of 512 bfloat16 to 3."""
    op = f"({fact.op})" if fact.op else ""
    towards = {"send": "to", "recv": "from"}.get(fact.kind, "root")
    return f"{fact.kind}{op} of {fact.count} {fact.dtype}" + ("" if fact.peer is None else f" {towards} {fact.peer}")


class Operation:
    """What a thread carries out. `travel` moves bytes between ranks, `write` puts the result where it belongs."""

    def __init__(self, fact: Comm, travel: Callable[[], None], write: Callable[[], None]):
        self.fact, self.travel, self.write = fact, travel, write
        self.done, self.written = threading.Event(), False
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with torch.no_grad():
                self.travel()
        except BaseException as error:  # noqa: BLE001 -- raised where the host waits
            self.error = error
        self.done.set()


class Communicator:
    """`ranks`: global ones, in the order of the group. `aside`: what is done within it is not on the card: all that the
    thread does, which would else be seen operation by operation."""

    def __init__(self, name: str, ranks: tuple[int, ...], aside: Callable[[], AbstractContextManager[object]]):
        self.name, self.ranks, self._aside = name, ranks, aside
        self._orders: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._unwritten: list[Operation] = []
        self._thread = threading.Thread(target=self._serve, name=f"communicator {name}", daemon=True)
        self._thread.start()

    def put(self, operation: Operation) -> None:
        self._unwritten.append(operation)
        self._orders.put(operation)

    def close(self) -> None:
        self._orders.put(None)

    def finish(self, last: Operation) -> None:
        """Write the results up to `last`: on the card those before it are there, too. Raises what went wrong."""
        while not last.written:
            operation = self._unwritten[0]
            while not operation.done.wait(_STEP_S):
                if not self._thread.is_alive() and not operation.done.is_set():
                    raise Disorder(f"{self.name} broke before {describe(operation.fact)}")
            if operation.error is not None:
                raise operation.error
            operation.write()
            operation.written = True
            self._unwritten.pop(0)

    def _serve(self) -> None:
        with self._aside():
            while (operation := self._orders.get()) is not None:
                operation.run()
                if operation.error is not None:  # nothing behind it can be in order
                    return


def bytes_of(x: Tensor) -> Tensor:
    """Its memory as uint8, flat; `x` is contiguous. Past autograd, whose version counters a card does not touch."""
    return x.detach().reshape(-1).view(torch.uint8)


def copy_of(x: Tensor) -> Tensor:
    """Its elements, flat, in memory of the host's own; bool as uint8, as NCCL has it. Past NumPy, which would have the
    storage never be resized again."""
    raw = bytes_of(x)
    held = bytearray(ctypes.string_at(raw.data_ptr(), raw.numel()))
    copied = torch.frombuffer(held, dtype=torch.uint8) if held else torch.empty(0, dtype=torch.uint8)
    return copied if x.dtype == torch.bool else copied.view(x.dtype)


class Place:
    """Where a result goes: bytes of a tensor's memory, which this does not keep. It keeps nothing of the caller's alive,
    which is less than any torch does: whoever lets go of a tensor too early is to be found."""

    def __init__(self, x: Tensor):
        self._storage = weakref.ref(x.untyped_storage())
        self._start, self._bytes = x.storage_offset() * x.itemsize, x.numel() * x.itemsize

    def write(self, result: Tensor) -> None:
        storage = self._storage()
        if storage is not None and storage.nbytes():  # which may have given its memory back
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]
            whole[self._start :][: self._bytes] = bytes_of(result)


class Carrier:
    """A gloo group, used by one thread for collectives and by one for each pair of ranks."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
        self.rank, self.size = rank, size
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def agree(self, fact: Comm) -> None:
        """All ranks do the same now, or Disorder."""
        said = [torch.empty(SAID, dtype=torch.uint8) for _ in range(self.size)]
        self.gloo.allgather([said], [_said(describe(fact), fact.where)]).wait()
        texts = [_heard(x) for x in said]
        if len({what for what, _ in texts}) > 1:
            told = "; ".join(f"rank {r}: {what} ({at})" for r, (what, at) in zip(fact.ranks, texts, strict=True))
            raise Disorder(f"{fact.comm}: ranks do different things: {told}")

    def meet(self, fact: Comm, peer: int, tag: int) -> None:
        """The rank `peer` (of the group) does the other end of it now, or Disorder."""
        theirs = torch.empty(SAID, dtype=torch.uint8)
        works = [self.gloo.send([_said(describe(fact), fact.where)], peer, tag), self.gloo.recv([theirs], peer, tag)]
        for work in works:
            work.wait()
        what, at = _heard(theirs)
        other = {"send": "recv", "recv": "send"}[fact.kind]
        if what.rpartition(" of ")[2].split()[:2] != [str(fact.count), fact.dtype] or not what.startswith(other):
            raise Disorder(f"{fact.comm}: {describe(fact)} ({fact.where}) meets {what} ({at})")

    def all_reduce(self, x: Tensor, op: str) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, "SUM" if op == "AVG" else op)
        self.gloo.allreduce([x], options).wait()
        if op == "AVG":
            x.div_(self.size, rounding_mode=None if x.is_floating_point() else "trunc")

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Flat: x [n], out [size * n]."""
        self.gloo.allgather([list(bytes_of(out).view(self.size, -1).unbind())], [bytes_of(x)]).wait()

    def all_to_all(self, out: Tensor, x: Tensor, got: Sequence[int], given: Sequence[int]) -> None:
        """Flat: given[r] elements of x to rank r, got[r] of out from it."""
        counts = torch.empty(self.size, self.size, dtype=torch.int64)
        self.all_gather(counts, torch.tensor(given))
        if counts[:, self.rank].tolist() != list(got):
            raise Disorder(f"rank {self.rank} expects {list(got)} and is given {counts[:, self.rank].tolist()}")
        bytes_given, bytes_got = ([n * x.itemsize for n in some] for some in (given, got))
        self.gloo.alltoall_base(bytes_of(out), bytes_of(x), bytes_got, bytes_given, dist.AllToAllOptions()).wait()

    def broadcast(self, x: Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.gloo.broadcast([bytes_of(x)], options).wait()

    def send(self, x: Tensor, peer: int, tag: int) -> None:
        self.gloo.send([bytes_of(x)], peer, tag).wait()

    def receive(self, x: Tensor, peer: int, tag: int) -> None:
        self.gloo.recv([bytes_of(x)], peer, tag).wait()


def _said(what: str, where: str) -> Tensor:
    text = f"{what}\n{where}".encode()[:SAID].ljust(SAID, b"\0")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _heard(said: Tensor) -> Sequence[str]:
    what, _, where = said.numpy().tobytes().rstrip(b"\0").decode(errors="replace").partition("\n")
    return what, where
