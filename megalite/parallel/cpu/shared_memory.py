"""All-gather, reduce-scatter and all-to-all between ranks of one machine, through shared memory.

    rank 0                                        rank 1
    copy chunk k of x into slot k % 3      |      copy chunk k of x into slot k % 3
    send a header to all other ranks       |      send a header to all other ranks     "chunk k is complete"
    ... compute ...                        |      ... compute ...
    wait for headers; read peers' slots    |      wait for headers; read peers' slots

A copy between processes runs at the speed of memory, a message through gloo's sockets at a tenth of it. A rank that
died is an error on the other ranks at once, a rank that hangs is an error after the timeout (peer_sockets.py). A header
has the operation and its size, so ranks that call different collectives get an error instead of each other's bytes.

A transfer starts when the one before it is complete, and chunk k is written when chunk k - 1 of the others is complete,
perhaps before that is read. So a rank that gets the headers of chunk k knows that the peers have read chunk k - 2,
whose slot is the next one to be written.
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

from megalite.parallel.cpu.peer_sockets import PeerSockets, SharedMemoryError, check_all, errno_of

SLOTS = 3
SLOT_BYTES = 2 << 20  # per rank
SHM_DIR = Path("/dev/shm")
PREFIX, YOUNG_S = "megalite-", 60.0
MESSAGE_BYTES = 64
# operation, elements from the sender to the receiver, bytes per element, elements of the sender's longest split
HEADER = struct.Struct("4q")
CopyFn = Callable[[Tensor, int], None]  # copies a chunk of every split between a slot and a tensor; int: its start


def sweep() -> None:
    """Remove directories in SHM_DIR of ranks that were killed while they opened a backend.

    These belong to this user, have the mode of mkdtemp, and contain nothing but files that `SharedMemoryBackend.open`
    creates, "slots" first. Rank 0 of a group locks its directory before it creates a file in it and as long as the
    directory has a name. So a directory that is neither locked nor empty is left over from a dead process; an empty one
    may be new and not locked yet.
    """
    for path in SHM_DIR.glob(f"{PREFIX}????????"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(fd)
                names = sorted(os.listdir(fd))
                is_own = status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700
                is_known = names[-1:] in ([], ["slots"]) and all(name.isdecimal() for name in names[:-1])
                if is_own and is_known and (names or time.time() > status.st_mtime + YOUNG_S):
                    for name in names:  # "slots" last
                        os.unlink(name, dir_fd=fd)
                    os.rmdir(path)
            finally:
                os.close(fd)


class CollectiveMismatchError(RuntimeError):
    """Error: the ranks of one group called different collectives."""


class CollectiveBackend(ABC):
    """A replacement for the group of an axis in collectives of flat tensors.

    The methods return an object with `wait`. `out` is valid after `wait`, and `x` must not change before.
    """

    group: Any
    timeout = default_pg_timeout  # limit of a wait for another rank; the default is torch's for a group

    @abstractmethod
    def start_all_gather(self, out: Tensor, x: Tensor) -> Any:
        """Start to gather the x [n] of all ranks, in order, into out [size * n]."""

    @abstractmethod
    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> Any:
        """Start to sum this rank's block of x [size * n] over all ranks into out [n], which may be that block of x."""

    @abstractmethod
    def start_all_to_all(self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> Any:
        """Start to send input_splits[r] elements of x to rank r and to receive output_splits[r] from it, in order."""


class PendingTransfer:
    """A collective that has been started."""

    def __init__(self, steps: Iterator[None]):
        """Run the first of `steps`; the others wait for the chunks and read them."""
        self._steps = steps
        next(steps, None)

    def wait(self) -> None:
        """Complete the transfer.

        Raises:
            CollectiveMismatchError: another rank called a different collective.
            RuntimeError: another rank has ended, or exceeds the timeout.
        """
        for _ in self._steps:
            pass


class SharedMemoryBackend(CollectiveBackend):
    """Collectives through slots of all ranks of a group, in one mapping. Only one thread may use it."""

    def __init__(self, group: Any, rank: int, size: int, memory: Tensor, sockets: PeerSockets):
        """Use `memory`, a uint8 tensor that all ranks share."""
        self.group = group
        self.rank = rank
        self.size = size
        self.sockets = sockets
        self.peer_ranks = [peer for peer in range(size) if peer != rank]
        self._slots = itertools.cycle(memory.view(SLOTS, size, -1))  # each [size, bytes]
        self._slot_bytes = len(memory) // SLOTS // size
        self._last = PendingTransfer(iter(()))

    @classmethod
    def open(cls, group: Any, rank: int, size: int, slot_bytes: int = SLOT_BYTES) -> SharedMemoryBackend:
        """Map a new file on all ranks and connect them. Collective over `group`, which has a CPU backend.

        Afterwards, the file and the sockets have no name: a process that is killed later leaves nothing behind. Raises
        SharedMemoryError on all ranks if they are on several machines, or if one of them lacks the memory, the
        permission or a free file descriptor.
        """
        total_bytes = SLOTS * size * slot_bytes
        names: list[str] = []
        maps: list[mmap.mmap] = []

        def create() -> None:
            sweep()
            new_directory = tempfile.mkdtemp(prefix=PREFIX, dir=SHM_DIR)
            stack.callback(os.rmdir, new_directory)
            fd = os.open(new_directory, os.O_RDONLY)
            stack.callback(os.close, fd)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX)  # before the directory has a file: see `sweep`
            for name in ("slots", *map(str, range(size))):  # not rmtree: it needs a file descriptor, and may get none
                stack.callback(Path(new_directory, name).unlink, missing_ok=True)
            with open(Path(new_directory, "slots"), "xb") as file:
                os.posix_fallocate(file.fileno(), 0, total_bytes)  # else a full file system would be a SIGBUS later
            names.append(os.path.basename(new_directory))

        def map_slots() -> None:
            try:
                with open(directory / "slots", "r+b") as file:
                    maps.append(mmap.mmap(file.fileno(), total_bytes))
            except FileNotFoundError as error:
                raise OSError(errno.EREMOTE, "another machine") from error

        with contextlib.ExitStack() as stack:  # removes the directory and its files
            failed = errno_of(create) if rank == 0 else 0
            message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)  # an errno, and the name of the directory
            message[0] = failed
            for name in names:
                message[1 : 1 + len(name)] = torch.tensor([*name.encode()])
            dist.broadcast(message, src=dist.get_global_rank(group, 0), group=group)
            failed, *encoded = message.tolist()
            if failed:
                raise SharedMemoryError(failed, os.strerror(failed))
            directory = SHM_DIR / bytes(encoded).rstrip(b"\0").decode()
            check_all(errno_of(map_slots), group)
            sockets = PeerSockets.connect(group, rank, size, directory)
        return cls(group, rank, size, torch.frombuffer(maps[0], dtype=torch.uint8), sockets)

    def start_all_gather(self, out: Tensor, x: Tensor) -> PendingTransfer:
        blocks = out.view(self.size, -1)
        n = x.numel()
        chunk_elements = self._slot_bytes // x.element_size()

        def write_slot(slot: Tensor, start: int) -> None:
            stop = min(start + chunk_elements, n)
            slot[self.rank].view(x.dtype)[: stop - start] = x[start:stop]
            blocks[self.rank, start:stop] = x[start:stop]

        def read_slot(slot: Tensor, start: int) -> None:
            stop = min(start + chunk_elements, n)
            for peer in self.peer_ranks:
                blocks[peer, start:stop] = slot[peer].view(x.dtype)[: stop - start]

        return self._start(1, x, [n] * self.size, [n] * self.size, chunk_elements, write_slot, read_slot)

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> PendingTransfer:
        """Start a reduce-scatter. Half precision is summed in fp32, in rank order: every rank gets the same bits."""
        blocks = x.view(self.size, -1)
        n = out.numel()
        chunk_elements = self._slot_bytes // x.element_size() // self.size

        def write_slot(slot: Tensor, start: int) -> None:
            stop = min(start + chunk_elements, n)
            for peer in self.peer_ranks:
                slot[self.rank].view(x.dtype)[peer * chunk_elements :][: stop - start] = blocks[peer, start:stop]

        def read_slot(slot: Tensor, start: int) -> None:
            stop = min(start + chunk_elements, n)
            offset = self.rank * chunk_elements
            summands = [slot[rank].view(x.dtype)[offset:][: stop - start] for rank in range(self.size)]
            summands[self.rank] = blocks[self.rank, start:stop]
            if self.size == 2:
                torch.add(*summands, out=out[start:stop])
                return
            sum_dtype = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
            total = summands[0].to(sum_dtype, copy=True)
            for summand in summands[1:]:
                total += summand
            out[start:stop] = total

        return self._start(2, x, [n] * self.size, [n] * self.size, chunk_elements, write_slot, read_slot)

    def start_all_to_all(
        self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> PendingTransfer:
        chunk_elements = self._slot_bytes // x.element_size() // self.size
        outputs = out.split(output_splits)
        inputs = x.split(input_splits)
        outputs[self.rank].copy_(inputs[self.rank])

        def write_slot(slot: Tensor, start: int) -> None:
            for peer in self.peer_ranks:
                chunk = inputs[peer][start : start + chunk_elements]
                slot[self.rank].view(x.dtype)[peer * chunk_elements :][: len(chunk)] = chunk

        def read_slot(slot: Tensor, start: int) -> None:
            for peer in self.peer_ranks:
                chunk = outputs[peer][start : start + chunk_elements]
                chunk.copy_(slot[peer].view(x.dtype)[self.rank * chunk_elements :][: len(chunk)])

        return self._start(3, x, output_splits, input_splits, chunk_elements, write_slot, read_slot)

    def _start(
        self,
        op: int,
        x: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        chunk_elements: int,
        write_slot: CopyFn,
        read_slot: CopyFn,
    ) -> PendingTransfer:
        """Complete the last transfer and start the next; `op` is the number of the operation in the header."""
        self._last.wait()
        longest = max(input_splits[peer] for peer in self.peer_ranks)
        headers = [(op, input_splits[peer], x.element_size(), longest) for peer in self.peer_ranks]
        expected = [(op, output_splits[peer], x.element_size()) for peer in self.peer_ranks]
        self._last = PendingTransfer(self._steps(headers, expected, chunk_elements, write_slot, read_slot))
        return self._last

    def _steps(
        self, headers: list[Any], expected: list[Any], chunk_elements: int, write_slot: CopyFn, read_slot: CopyFn
    ) -> Iterator[None]:
        """Write the first chunk, yield, then read all chunks, writing each next chunk before the current one is read.

        All ranks transfer the same number of chunks, which the longest split of any rank determines.

        Args:
            headers: the header for each peer.
            expected: the first three fields of the header that each peer must send.
            chunk_elements: elements of a chunk of one split.
            write_slot: copies a chunk of the input into a slot.
            read_slot: copies a chunk from a slot to the output.
        """

        def write_next(start: int) -> Tensor:
            slot = next(self._slots)
            write_slot(slot, start)
            self.sockets.send([HEADER.pack(*header) for header in headers])
            return slot

        slot = write_next(0)
        start = 0
        longest = 1
        yield
        while start < longest:
            peer_headers = [*map(HEADER.unpack, self.sockets.receive(HEADER.size, self.timeout))]
            received = [header[:3] for header in peer_headers]
            if received != expected:
                smallest = [min(values) for values in zip(*expected, *received, strict=True)]
                largest = [max(values) for values in zip(*expected, *received, strict=True)]
                raise CollectiveMismatchError(
                    "ranks called different collectives (1: all-gather, 2: reduce-scatter, 3: all-to-all; elements; "
                    f"bytes of each): between {smallest} and {largest}; all ranks must run the same program"
                )
            longest = max(header[3] for header in [*headers, *peer_headers])
            current_slot, current_start = slot, start
            start += chunk_elements
            if start < longest:
                slot = write_next(start)
            read_slot(current_slot, current_start)
