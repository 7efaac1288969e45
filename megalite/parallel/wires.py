"""Words between ranks of one machine: a Unix socket from each rank of a group to each other one.

The kernel wakes the rank that waits for a word. A tiny collective of gloo says the same through two more threads of
each rank, which wait for a processor while both compute: 1.4 ms where a word takes 0.06 (docs/experiments.md).
"""

import contextlib
import os
import select
import socket
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LONGEST_S = 1e6  # the kernel counts milliseconds in 32 bits
# A process that a rank forks must not keep its sockets open: they tell the others when the rank has ended.
OPEN = weakref.WeakSet[socket.socket]()
os.register_at_fork(after_in_child=lambda: [wire.close() for wire in OPEN])


def all_are(able: bool, group: Any) -> bool:
    """Whether every rank of the group is; collective over it."""
    answer = torch.tensor(int(able))
    dist.all_reduce(answer, dist.ReduceOp.MIN, group=group)
    return bool(answer)


class Wires:
    def __init__(self, group: Any, sockets: Mapping[int, socket.socket]):
        """sockets: by rank of the group, none of which blocks. Each packet is one word."""
        self._sockets = {dist.get_global_rank(group, q): sockets[q] for q in sorted(sockets)}
        OPEN.update(sockets.values())

    @classmethod
    def open(cls, group: Any, rank: int, size: int, folder: Path) -> "Wires | None":
        """Connect all ranks through sockets in a folder that they share; collective. None on all ranks if one cannot.
        Afterwards the folder is not needed. Ranks wait for each other only in `all_are`, which hears of a dead one."""
        found: dict[int, socket.socket] = {}
        with contextlib.ExitStack() as until_open:
            door = None
            with contextlib.suppress(OSError, AttributeError):  # other systems have no such sockets
                made = until_open.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                made.bind(str(folder / str(rank)))
                made.listen(size)
                door = made
            if not all_are(door is not None, group) or door is None:
                return None
            with contextlib.suppress(OSError):
                for q in range(rank):
                    wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    wire.setblocking(False)  # an open door keeps who comes until it is asked
                    wire.connect(str(folder / str(q)))
                    wire.send(rank.to_bytes(4, "little"))
                    found[q] = wire
            if not all_are(len(found) == rank, group):
                return None
            with contextlib.suppress(OSError):
                for _ in range(rank + 1, size):
                    other, _ = door.accept()
                    other.setblocking(False)  # what it says was sent before
                    found[int.from_bytes(other.recv(4), "little")] = other
        return cls(group, found) if all_are(len(found) == size - 1, group) else None

    def send(self, words: list[bytes]) -> None:
        """One to every other rank, in the order of ranks. Raises RuntimeError where one is gone."""
        for word, (rank, wire) in zip(words, self._sockets.items(), strict=True):
            try:
                wire.send(word)
            except OSError as error:
                raise RuntimeError(f"Connection closed by rank {rank}: {error.strerror}") from None

    def receive(self, size: int, timeout: timedelta) -> list[bytes]:
        """The next word of every other rank, of `size` bytes. Raises RuntimeError where one is gone, or late."""
        limit_s = min(timeout.total_seconds(), LONGEST_S)
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
                    if not (word := self._sockets[rank].recv(size)):
                        raise OSError(0, "it has ended")
                except OSError as error:
                    raise RuntimeError(f"Connection closed by rank {rank}: {error.strerror}") from None
                words[rank] = word
        return [words[rank] for rank in self._sockets]
