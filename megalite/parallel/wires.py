"""Words between ranks of one machine: a Unix socket from each rank of a group to each other one.

The kernel wakes the rank that waits for a word. A tiny collective of gloo says the same through two more threads of
each rank, which wait for a processor while both compute: 1.4 ms where a word takes 0.06 (docs/performance.md).
"""

import contextlib
import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LONGEST_S = 1e6  # the kernel counts milliseconds in 32 bits


def all_are(able: bool, group: Any) -> bool:
    """Whether every rank of the group is; collective over it."""
    answer = torch.tensor(int(able))
    dist.all_reduce(answer, dist.ReduceOp.MIN, group=group)
    return bool(answer)


class Wires:
    def __init__(self, group: Any, sockets: Mapping[int, socket.socket]):
        """sockets: by rank of the group. Each packet is one word."""
        self._sockets = {dist.get_global_rank(group, q): sockets[q] for q in sorted(sockets)}

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
        limit = min(timeout.total_seconds(), LONGEST_S)
        return [_next(wire, size, rank, limit) for rank, wire in self._sockets.items()]


def _next(wire: socket.socket, size: int, rank: int, limit_s: float) -> bytes:
    if wire.gettimeout() != limit_s:
        wire.settimeout(limit_s)
    why = "it has ended"
    try:
        if word := wire.recv(size):
            return word
    except TimeoutError:
        raise RuntimeError(f"Timed out waiting {1000 * limit_s:.0f}ms for rank {rank}") from None
    except OSError as error:
        why = error.strerror
    raise RuntimeError(f"Connection closed by rank {rank}: {why}")
