"""Words between ranks of one machine: a Unix socket from each rank of a group to each other one.

The kernel wakes the rank that waits for a word. A tiny collective of gloo says the same through two more threads of
each rank, which wait for a processor while both compute: 1.4 ms where a word takes 0.06 (docs/experiments.md).
"""

import contextlib
import errno
import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

MAX_POLL_S = 1e6  # the kernel counts milliseconds in 32 bits
# A process that a rank forks must not keep its sockets open: they tell the others when the rank has ended.
OPEN_SOCKETS = weakref.WeakSet[socket.socket]()
os.register_at_fork(after_in_child=lambda: [wire.close() for wire in OPEN_SOCKETS])


class NotShared(OSError):
    """The ranks of a group cannot share memory, all for the same reason: errno, EREMOTE for several machines."""


def errno_of(do: Callable[[], object]) -> int:
    """Call `do`. Returns the errno of what it raises, or 0."""
    try:
        do()
    except AttributeError:  # other systems have no such sockets, and no posix_fallocate
        return errno.EOPNOTSUPP
    except (OSError, ValueError) as error:
        return getattr(error, "errno", None) or errno.EINVAL  # a name that is too long has none
    return 0


def check_all(failed: int, group: Any) -> None:
    """Raise NotShared on all ranks of the group if `failed`, an errno, is not 0 on one of them; collective."""
    worst = torch.tensor(failed)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    if number := int(worst):
        raise NotShared(number, os.strerror(number))


class PeerSockets:
    def __init__(self, group: Any, sockets: Mapping[int, socket.socket]):
        """sockets: by rank of the group, none of which blocks. Each packet is one word."""
        self._sockets = {dist.get_global_rank(group, q): sockets[q] for q in sorted(sockets)}
        OPEN_SOCKETS.update(sockets.values())

    @classmethod
    def connect(cls, group: Any, rank: int, size: int, folder: Path) -> "PeerSockets":
        """Connect all ranks through sockets in a folder that they share; collective. Afterwards the folder is not
        needed. Ranks wait for each other only in `check_all`, which hears of a dead one. Raises NotShared on all."""
        sockets: dict[int, socket.socket] = {}
        doors: list[socket.socket] = []

        def listen() -> None:
            doors.append(until_open.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
            doors[0].bind(str(folder / str(rank)))
            doors[0].listen(size)

        def connect() -> None:
            for q in range(rank):
                wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                wire.setblocking(False)  # an open door keeps who comes until it is asked
                wire.connect(str(folder / str(q)))
                wire.send(rank.to_bytes(4, "little"))
                sockets[q] = wire

        def accept() -> None:
            for _ in range(rank + 1, size):
                other, _ = doors[0].accept()
                other.setblocking(False)  # what it says was sent before
                sockets[int.from_bytes(other.recv(4), "little")] = other

        with contextlib.ExitStack() as until_open:
            for part in (listen, connect, accept):
                check_all(errno_of(part), group)
        return cls(group, sockets)

    def send(self, words: list[bytes]) -> None:
        """One to every other rank, in the order of ranks. Raises RuntimeError where one is gone."""
        for message, (rank, wire) in zip(words, self._sockets.items(), strict=True):
            try:
                wire.send(message)
            except OSError as error:
                raise RuntimeError(f"Connection closed by rank {rank}: {error.strerror}") from None

    def receive(self, size: int, timeout: timedelta) -> list[bytes]:
        """The next word of every other rank, of `size` bytes. Raises RuntimeError where one is gone, or late."""
        limit_s = min(timeout.total_seconds(), MAX_POLL_S)
        until, words, poll = time.monotonic() + limit_s, dict[int, bytes](), select.poll()
        missing = {wire.fileno(): rank for rank, wire in self._sockets.items()}
        for number in missing:
            poll.register(number, select.POLLIN)
        while missing:
            if not (ready := poll.poll(1000 * max(0.0, until - time.monotonic()))):
                late = " and ".join(f"rank {rank}" for rank in missing.values())
                raise RuntimeError(f"Timed out waiting {1000 * limit_s:.0f}ms for {late}")
            for number, _ in ready:
                poll.unregister(number)  # its next word may come before the others' first
                rank = missing.pop(number)
                try:
                    if not (message := self._sockets[rank].recv(size)):
                        raise OSError(0, "it has ended")
                except OSError as error:
                    raise RuntimeError(f"Connection closed by rank {rank}: {error.strerror}") from None
                words[rank] = message
        return [words[rank] for rank in self._sockets]
