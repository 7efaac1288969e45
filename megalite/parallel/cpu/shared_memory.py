"""All-gather, reduce-scatter and all-to-all between ranks of one machine, through memory that they share.

    rank 0                                     rank 1
    copy piece k of x into slot k % 3   |      copy piece k of x into slot k % 3
    send a word to all others           |      send a word to all others        "piece k is there"
    ... compute ...                     |      ... compute ...
    wait for theirs; read their slots   |      wait for theirs; read their slots

A copy between processes runs at the speed of memory, a message through gloo's sockets at a tenth of it. A rank that
died is an error on the others at once, one that hangs after the time-out (wires.py). A word has the operation and its
size, so ranks that do different things get an error instead of each other's bytes.

A transfer begins when the one before it is complete, and piece k is put when piece k - 1 has come, perhaps before that
is read. So a rank that sees piece k of the others knows that they have read piece k - 2, whose slot is the next.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import stat
import struct
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from megalite.parallel.cpu.peer_sockets import NotShared, PeerSockets, check_all, errno_of

SLOTS = 3
SLOT_BYTES = 2 << 20  # of one rank
SHM_DIR = Path("/dev/shm")
PREFIX, YOUNG_S = "megalite-", 60.0
MESSAGE_BYTES = 64
# kind of a collective, elements from the sender to the receiver, bytes of each; and elements of its longest part
HEADER = struct.Struct("4q")
CopyFn = Callable[[Tensor, int], None]  # between a slot and a tensor, of whose parts it has a piece that begins there


def sweep() -> None:
    """Remove what ranks have left in FOLDER that were killed while they opened it: folders of this user, with the mode
    of mkdtemp, and with nothing but what `SharedMemory.open` makes, "slots" first. Rank 0 of a group locks its folder
    as long as it has a name, and before it puts a file into it. So one that is not locked and not empty is of the dead;
    an empty one may not be locked yet."""
    for path in SHM_DIR.glob(f"{PREFIX}????????"):
        with contextlib.suppress(OSError):
            number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                facts, names = os.fstat(number), sorted(os.listdir(number))
                made_here = facts.st_uid == os.getuid() and stat.S_IMODE(facts.st_mode) == 0o700
                known = names[-1:] in ([], ["slots"]) and all(name.isdecimal() for name in names[:-1])
                if made_here and known and (names or time.time() > facts.st_mtime + YOUNG_S):
                    for name in names:  # "slots" last
                        os.unlink(name, dir_fd=number)
                    os.rmdir(path)
            finally:
                os.close(number)


class CollectiveMismatchError(RuntimeError):
    """The ranks of one group do different collectives."""


class CollectiveBackend(ABC):
    """Gathers and scatters flat tensors in place of an axis's group. `out` is valid after `wait` of the result."""

    group: Any
    timeout = default_pg_timeout  # of a wait for another rank; torch's, as that of a group that is given none

    @abstractmethod
    def start_all_gather(self, out: Tensor, x: Tensor) -> Any:
        """x [n], out [size * n]: the x of all ranks, in order."""

    @abstractmethod
    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> Any:
        """x [size * n], out [n], which may be this rank's part of x: the sum of these parts. x stays until `wait`."""

    @abstractmethod
    def start_all_to_all(self, out: Tensor, x: Tensor, got: list[int], given: list[int]) -> Any:
        """given[r] elements of x go to rank r, got[r] come from it to out, both in order. x stays until `wait`."""


class PendingTransfer:
    """A collective that has begun: `steps` wait for its pieces and read them."""

    def __init__(self, steps: Iterator[None]):
        self._steps = steps
        next(steps, None)

    def wait(self) -> None:
        """Complete the transfer. Raises OrderError, and RuntimeError where a rank is gone or late."""
        for _ in self._steps:
            pass


class SharedMemoryBackend(CollectiveBackend):
    """The slots of all ranks of a group, in one mapping. Only one thread may use it."""

    def __init__(self, group: Any, rank: int, size: int, memory: Tensor, sockets: PeerSockets):
        """memory: uint8, shared by all ranks."""
        self.group, self.rank, self.size, self.wires = group, rank, size, sockets
        self.peer_ranks = [q for q in range(size) if q != rank]
        self._slots = itertools.cycle(memory.view(SLOTS, size, -1))  # each [size, bytes]
        self._slot_bytes = len(memory) // SLOTS // size
        self._last = PendingTransfer(iter(()))

    @classmethod
    def open(cls, group: Any, rank: int, size: int, slot_bytes: int = SLOT_BYTES) -> SharedMemoryBackend:
        """Map a new file on all ranks and connect them; collective over `group`, which has a CPU backend. What was
        opened then has no name: a process that is killed later leaves nothing behind. Raises NotShared on all ranks if
        they are on several machines, or one of them has no room, no right or no file left."""
        total, names, maps = SLOTS * size * slot_bytes, list[str](), list[mmap.mmap]()

        def make() -> None:
            sweep()
            folder = tempfile.mkdtemp(prefix=PREFIX, dir=SHM_DIR)
            until_open.callback(os.rmdir, folder)
            until_open.callback(os.close, number := os.open(folder, os.O_RDONLY))
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(number, fcntl.LOCK_EX)  # before there is a file in it: see `sweep`
            for name in ("slots", *map(str, range(size))):  # rmtree would need an open file, and may get none
                until_open.callback(Path(folder, name).unlink, missing_ok=True)
            with open(Path(folder, "slots"), "xb") as made:
                os.posix_fallocate(made.fileno(), 0, total)  # else a full file system would be a SIGBUS later
            names.append(os.path.basename(folder))

        def map_slots() -> None:
            try:
                with open(folder / "slots", "r+b") as file:
                    maps.append(mmap.mmap(file.fileno(), total))
            except FileNotFoundError as error:
                raise OSError(errno.EREMOTE, "another machine") from error

        with contextlib.ExitStack() as until_open:
            failed = errno_of(make) if rank == 0 else 0
            message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)  # an errno, and the folder's name
            message[0] = failed
            for name in names:
                message[1 : 1 + len(name)] = torch.tensor([*name.encode()])
            dist.broadcast(message, src=dist.get_global_rank(group, 0), group=group)
            failed, *encoded = message.tolist()
            if failed:
                raise NotShared(failed, os.strerror(failed))
            folder = SHM_DIR / bytes(encoded).rstrip(b"\0").decode()
            check_all(errno_of(map_slots), group)
            sockets = PeerSockets.connect(group, rank, size, folder)
        return cls(group, rank, size, torch.frombuffer(maps[0], dtype=torch.uint8), sockets)

    def start_all_gather(self, out: Tensor, x: Tensor) -> PendingTransfer:
        parts, n, chunk_elements = out.view(self.size, -1), x.numel(), self._slot_bytes // x.element_size()

        def write_slot(slot: Tensor, a: int) -> None:
            b = min(a + chunk_elements, n)
            slot[self.rank].view(x.dtype)[: b - a] = parts[self.rank, a:b] = x[a:b]

        def read_slot(slot: Tensor, a: int) -> None:
            b = min(a + chunk_elements, n)
            for q in self.peer_ranks:
                parts[q, a:b] = slot[q].view(x.dtype)[: b - a]

        return self._start(1, x, [n] * self.size, [n] * self.size, chunk_elements, write_slot, read_slot)

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> PendingTransfer:
        """Half precision is summed in fp32, in the order of ranks: the same bits on whatever rank."""
        blocks, n, chunk_elements = (
            x.view(self.size, -1),
            out.numel(),
            self._slot_bytes // x.element_size() // self.size,
        )

        def write_slot(slot: Tensor, a: int) -> None:
            b = min(a + chunk_elements, n)
            for q in self.peer_ranks:
                slot[self.rank].view(x.dtype)[q * chunk_elements :][: b - a] = blocks[q, a:b]

        def read_slot(slot: Tensor, a: int) -> None:
            b = min(a + chunk_elements, n)
            peer_headers = [slot[q].view(x.dtype)[self.rank * chunk_elements :][: b - a] for q in range(self.size)]
            peer_headers[self.rank] = blocks[self.rank, a:b]
            if self.size == 2:
                torch.add(*peer_headers, out=out[a:b])
                return
            wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
            total = peer_headers[0].to(wide, copy=True)
            for part in peer_headers[1:]:
                total += part
            out[a:b] = total

        return self._start(2, x, [n] * self.size, [n] * self.size, chunk_elements, write_slot, read_slot)

    def start_all_to_all(self, out: Tensor, x: Tensor, got: list[int], given: list[int]) -> PendingTransfer:
        chunk_elements, peer_headers, ours = (
            self._slot_bytes // x.element_size() // self.size,
            out.split(got),
            x.split(given),
        )
        peer_headers[self.rank].copy_(ours[self.rank])

        def write_slot(slot: Tensor, a: int) -> None:
            for q in self.peer_ranks:
                part = ours[q][a : a + chunk_elements]
                slot[self.rank].view(x.dtype)[q * chunk_elements :][: len(part)] = part

        def read_slot(slot: Tensor, a: int) -> None:
            for q in self.peer_ranks:
                part = peer_headers[q][a : a + chunk_elements]
                part.copy_(slot[q].view(x.dtype)[self.rank * chunk_elements :][: len(part)])

        return self._start(3, x, got, given, chunk_elements, write_slot, read_slot)

    def _start(
        self,
        kind: int,
        x: Tensor,
        got: list[int],
        given: list[int],
        chunk_elements: int,
        write_slot: CopyFn,
        read_slot: CopyFn,
    ) -> PendingTransfer:
        self._last.wait()
        longest = max(given[q] for q in self.peer_ranks)
        headers = [(kind, given[q], x.element_size(), longest) for q in self.peer_ranks]
        peer_headers = [(kind, got[q], x.element_size()) for q in self.peer_ranks]
        self._last = PendingTransfer(self._steps(headers, peer_headers, chunk_elements, write_slot, read_slot))
        return self._last

    def _steps(
        self, headers: list[Any], peer_headers: list[Any], chunk_elements: int, write_slot: CopyFn, read_slot: CopyFn
    ) -> Iterator[None]:
        """Put the first piece; behind the `yield` read all, and put each next one while this one is read. `words`: to
        each other rank; `theirs`: what its word must begin with. All have as many pieces as the longest part of any."""

        def begin(at: int) -> Tensor:
            slot = next(self._slots)
            write_slot(slot, at)
            self.wires.send([HEADER.pack(*word) for word in headers])
            return slot

        slot, at, longest = begin(0), 0, 1
        yield
        while at < longest:
            said = [*map(HEADER.unpack, self.wires.receive(HEADER.size, self.timeout))]
            begun = [word[:3] for word in said]
            if begun != peer_headers:
                least, most = (list(map(of, zip(*peer_headers, *begun, strict=True))) for of in (min, max))
                raise CollectiveMismatchError(
                    "ranks do different collectives (1: all-gather, 2: reduce-scatter, 3: all-to-all; elements; bytes "
                    f"of each): between {least} and {most}; the program must be the same on all ranks"
                )
            longest, here, start, at = max(word[3] for word in [*headers, *said]), slot, at, at + chunk_elements
            if at < longest:
                slot = begin(at)
            read_slot(here, start)
