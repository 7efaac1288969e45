"""Control messages between ranks of one machine: a Unix socket between every two ranks of a group.

The kernel wakes the rank that waits for a message. A tiny gloo collective would need two more threads on each rank,
which wait for a core while both ranks compute: 1.4 ms, compared with 0.06 ms for a message (docs/experiments.md).
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
# A process forked by a rank must not keep the sockets open: their end shows the other ranks that the rank has ended.
OPEN_SOCKETS = weakref.WeakSet[socket.socket]()
os.register_at_fork(after_in_child=lambda: [open_socket.close() for open_socket in OPEN_SOCKETS])


class SharedMemoryError(OSError):
    """Error: the ranks of a group cannot share memory, all with the same errno (EREMOTE: on several machines)."""


def errno_of(function: Callable[[], object]) -> int:
    """Call `function` and return the errno of the error that it raises, or 0."""
    try:
        function()
    except AttributeError:  # other systems have no such sockets, and no posix_fallocate
        return errno.EOPNOTSUPP
    except (OSError, ValueError) as error:
        return getattr(error, "errno", None) or errno.EINVAL  # the error of a name that is too long has no errno
    return 0


def check_all(failed: int, group: Any) -> None:
    """Raise SharedMemoryError on all ranks of the group if `failed`, an errno, is not 0 on one of them. Collective."""
    worst = torch.tensor(failed)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    if code := int(worst):
        raise SharedMemoryError(code, os.strerror(code))


class PeerSockets:
    """Sockets to all other ranks of a group. Each packet is one message."""

    def __init__(self, group: Any, sockets: Mapping[int, socket.socket]):
        """Take connected non-blocking sockets, by rank within the group."""
        self._sockets = {dist.get_global_rank(group, peer): sockets[peer] for peer in sorted(sockets)}
        OPEN_SOCKETS.update(sockets.values())

    @classmethod
    def connect(cls, group: Any, rank: int, size: int, directory: Path) -> "PeerSockets":
        """Connect all ranks through sockets in a directory that they share, which is not needed afterwards. Collective.

        Ranks wait for each other only in `check_all`, which fails if a rank has died. Raises SharedMemoryError on all
        ranks.
        """
        sockets: dict[int, socket.socket] = {}
        listeners: list[socket.socket] = []

        def listen() -> None:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listeners.append(listener)
            listener.bind(str(directory / str(rank)))
            listener.listen(size)

        def connect() -> None:
            for peer in range(rank):
                peer_socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                peer_socket.setblocking(False)  # connecting doesn't block: a listening socket queues connections
                peer_socket.connect(str(directory / str(peer)))
                peer_socket.send(rank.to_bytes(4, "little"))
                sockets[peer] = peer_socket

        def accept() -> None:
            for _ in range(rank + 1, size):
                peer_socket, _ = listeners[0].accept()
                peer_socket.setblocking(False)  # receiving doesn't block: the peer sent its rank in `connect`
                sockets[int.from_bytes(peer_socket.recv(4), "little")] = peer_socket

        with contextlib.ExitStack() as stack:  # closes the listener
            for phase in (listen, connect, accept):
                check_all(errno_of(phase), group)
        return cls(group, sockets)

    def send(self, messages: list[bytes]) -> None:
        """Send one message to every other rank, in the order of ranks. Raises RuntimeError if a rank has ended."""
        for message, (rank, peer_socket) in zip(messages, self._sockets.items(), strict=True):
            try:
                peer_socket.send(message)
            except OSError as error:
                raise RuntimeError(f"Connection closed by rank {rank}: {error.strerror}") from None

    def receive(self, size: int, timeout: timedelta) -> list[bytes]:
        """Return the next message, of `size` bytes, of every other rank, in the order of ranks.

        Raises RuntimeError if a rank has ended, or sends nothing within `timeout`.
        """
        limit_s = min(timeout.total_seconds(), MAX_POLL_S)
        deadline = time.monotonic() + limit_s
        messages: dict[int, bytes] = {}
        poll = select.poll()
        missing = {peer_socket.fileno(): rank for rank, peer_socket in self._sockets.items()}
        for fd in missing:
            poll.register(fd, select.POLLIN)
        while missing:
            ready = poll.poll(1000 * max(0.0, deadline - time.monotonic()))
            if not ready:
                late = " and ".join(f"rank {rank}" for rank in missing.values())
                raise RuntimeError(f"Timed out waiting {1000 * limit_s:.0f}ms for {late}")
            for fd, _ in ready:
                poll.unregister(fd)  # this rank's next message may arrive before the first message of the others
                rank = missing.pop(fd)
                try:
                    message = self._sockets[rank].recv(size)
                    if not message:
                        raise OSError(0, "it has ended")
                except OSError as error:
                    raise RuntimeError(f"Connection closed by rank {rank}: {error.strerror}") from None
                messages[rank] = message
        return [messages[rank] for rank in self._sockets]
