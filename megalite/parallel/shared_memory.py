"""All-gather and reduce-scatter between ranks of one machine, through memory that they share; gloo synchronises them.

    rank 0                                     rank 1
    copy x into a slot of its own       |      copy x into a slot of its own
    start a tiny all-reduce             |      start a tiny all-reduce          "my slot is full"
    ... compute ...                     |      ... compute ...
    wait for it; read all slots         |      wait for it; read all slots

A copy between processes runs at the speed of memory, a message through gloo's sockets at a tenth of it. Because of the
tiny all-reduce, a rank that died or hangs is an error on the others after the group's time-out. It also carries the
operation and its size, so ranks that do different things get an error instead of each other's bytes.

Each rank has SLOTS slots; what is larger than a slot goes piece by piece. A slot may be filled again when all ranks
have read it. Every rank runs the same program and counts its own puts and reads, so a rank that has seen the others'
put p knows that they are past all reads that come before p in the program. If that frees no slot, the oldest transfer
is completed early, or one more tiny all-reduce brings the ranks together.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SLOTS = 4
SLOT_BYTES = 2 << 20
FOLDER = Path("/dev/shm")


class OrderError(RuntimeError):
    """The ranks of one group do different collectives."""


class Transport(ABC):
    """Gathers and scatters flat tensors in place of an axis's group. `out` is valid after `wait` of the result."""

    group: Any

    def start_all_to_all(self, out: Tensor, x: Tensor, got: list[int], given: list[int]) -> Any:
        """Through the group: given[r] elements of x go to rank r, got[r] come from it."""
        return dist.all_to_all_single(out, x, got, given, group=self.group, async_op=True)

    @abstractmethod
    def start_all_gather(self, out: Tensor, x: Tensor) -> Any:
        """x [n], out [size * n]: the x of all ranks, in order."""

    @abstractmethod
    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> Any:
        """x [size * n], out [n]: the sum over ranks of this rank's block of their x. x must not change before `wait`;
        `out` may be that block of x."""


class SharedMemory(Transport):
    """The slots of all ranks of a group, in one mapping. Only one thread may use it."""

    def __init__(self, group: Any, rank: int, size: int, memory: Tensor, slots: int):
        """memory: uint8, shared by all ranks."""
        self.group, self.rank, self.size = group, rank, size
        self.slots = list(memory.view(size, slots, -1).unbind(1))  # each [size, bytes]
        self._now = 0  # events of this rank's program: puts, reads and meetings
        self._passed = 0  # all ranks are past this event
        self._read_at: list[int | None] = [0] * slots  # when this rank read each slot; None: not yet
        self.open_transfers: list[Transfer] = []

    @classmethod
    def open(
        cls, group: Any, rank: int, size: int, *, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES
    ) -> SharedMemory | None:
        """Map a new file on all ranks; collective over `group`, which has a CPU backend. None on all ranks if they are
        on several machines, or the machine has no room. The file has no name when this returns, so a killed process
        leaves nothing behind."""
        path, mapped = None, None
        names: list[Any] = [None]
        if rank == 0:
            path = _create(size * slots * slot_bytes)
            names = [str(path) if path else None]
        try:
            dist.broadcast_object_list(names, src=dist.get_global_rank(group, 0), group=group)
            if names[0] is not None:
                with contextlib.suppress(OSError, ValueError), open(names[0], "r+b") as file:
                    mapped = mmap.mmap(file.fileno(), size * slots * slot_bytes)
            able = torch.tensor(int(mapped is not None))
            dist.all_reduce(able, dist.ReduceOp.MIN, group=group)
        finally:
            if path is not None:
                path.unlink(missing_ok=True)
        if not able or mapped is None:
            return None
        return cls(group, rank, size, torch.frombuffer(mapped, dtype=torch.uint8), slots)

    def start_all_gather(self, out: Tensor, x: Tensor) -> Transfer:
        piece = self.slots[0].shape[1] // x.element_size()
        parts = out.view(self.size, -1)

        def put(slot: Tensor, begin: int, end: int) -> None:
            slot[self.rank].view(x.dtype)[: end - begin] = x[begin:end]
            parts[self.rank, begin:end] = x[begin:end]

        def read(slot: Tensor, begin: int, end: int) -> None:
            for q in range(self.size):
                if q != self.rank:
                    parts[q, begin:end] = slot[q].view(x.dtype)[: end - begin]

        return self._start(1, x, x.numel(), piece, put, read)

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> Transfer:
        """Half precision is summed in fp32, in the order of ranks: the same bits on whatever rank."""
        piece = self.slots[0].shape[1] // x.element_size() // self.size
        blocks = x.view(self.size, -1)

        def put(slot: Tensor, begin: int, end: int) -> None:
            target = slot[self.rank].view(x.dtype)[: self.size * piece].view(self.size, piece)
            for q in range(self.size):
                if q != self.rank:
                    target[q, : end - begin] = blocks[q, begin:end]

        def read(slot: Tensor, begin: int, end: int) -> None:
            theirs = [
                blocks[q, begin:end]
                if q == self.rank
                else slot[q].view(x.dtype)[self.rank * piece : self.rank * piece + end - begin]
                for q in range(self.size)
            ]
            if self.size == 2:
                torch.add(theirs[0], theirs[1], out=out[begin:end])
                return
            wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
            total = theirs[0].to(wide, copy=True)
            for part in theirs[1:]:
                total += part
            out[begin:end] = total

        return self._start(2, x, out.numel(), piece, put, read)

    def _start(
        self, kind: int, x: Tensor, elements: int, piece: int, put: Callable[..., None], read: Callable[..., None]
    ) -> Transfer:
        facts = torch.tensor([kind, elements, x.element_size()], dtype=torch.int64)
        spans = [(begin, min(begin + piece, elements)) for begin in range(0, elements, piece)]
        transfer = Transfer(self, facts, spans, put, read)
        if spans:
            transfer.put_next()  # this may complete the oldest open transfer
            self.open_transfers.append(transfer)
        return transfer

    # ---- for Transfer

    def take(self) -> int:
        """The number of a slot that all ranks have read, or never used."""
        while True:
            for number, at in enumerate(self._read_at):
                if at is not None and at <= self._passed:
                    self._read_at[number] = None
                    return number
            if self.has_room():
                self.meet()
            else:
                self.open_transfers[0].wait()

    def has_room(self) -> bool:
        """Whether this rank has a slot that does not wait to be read by it."""
        return any(at is not None for at in self._read_at)

    def meet(self) -> None:
        """Wait until all ranks are here, past every read that this rank has made."""
        self._now += 1
        _Arrival(torch.zeros(3, dtype=torch.int64), self.group).wait()
        self._passed = self._now

    def put_done(self) -> int:
        self._now += 1
        return self._now

    def read_done(self, slot: int, put_at: int) -> None:
        self._now += 1
        self._read_at[slot] = self._now
        self._passed = max(self._passed, put_at)


class _Arrival:
    """A tiny all-reduce, which shows that all ranks have come here with the same `facts`."""

    def __init__(self, facts: Tensor, group: Any):
        self._both = torch.cat([facts, -facts])
        self._work = dist.all_reduce(self._both, dist.ReduceOp.MAX, group=group, async_op=True)

    def wait(self) -> None:
        self._work.wait()  # type: ignore[union-attr]
        most, least = self._both.chunk(2)
        if not torch.equal(most, -least):
            raise OrderError(
                "ranks do different collectives (1: all-gather, 2: reduce-scatter; elements; bytes of each): "
                f"between {(-least).tolist()} and {most.tolist()}; the program must be the same on all ranks"
            )


class Transfer:
    """A collective that has begun. All ranks must wait for their transfers in the same order."""

    def __init__(
        self,
        memory: SharedMemory,
        facts: Tensor,
        spans: list[tuple[int, int]],
        put: Callable[..., None],
        read: Callable[..., None],
    ):
        self._memory, self._facts, self._left, self._put, self._read = memory, facts, spans, put, read
        self._coming: list[tuple[tuple[int, int], int, int, _Arrival]] = []

    def put_next(self) -> None:
        span = self._left.pop(0)
        slot = self._memory.take()
        self._put(self._memory.slots[slot], *span)
        self._coming.append((span, slot, self._memory.put_done(), _Arrival(self._facts, self._memory.group)))

    def wait(self) -> None:
        """Complete the transfer. Raises OrderError, and the errors of the group's backend."""
        if not self._coming:
            return
        while self._coming or self._left:
            if self._left and self._memory.has_room():  # the next piece travels while this one is read
                self.put_next()
            span, slot, put_at, arrival = self._coming.pop(0)
            arrival.wait()
            self._read(self._memory.slots[slot], *span)
            self._memory.read_done(slot, put_at)
        self._memory.open_transfers.remove(self)
        del self._put, self._read  # they hold the tensors


def _create(size: int) -> Path | None:
    """Make a file of `size` bytes and reserve its pages; otherwise a full file system would be a SIGBUS later."""
    try:
        number, name = tempfile.mkstemp(prefix="megalite-", dir=FOLDER)
    except OSError:
        return None
    try:
        os.posix_fallocate(number, 0, size)
    except (OSError, AttributeError):
        os.unlink(name)
        return None
    finally:
        os.close(number)
    return Path(name)
