"""A communicator of the simulated NCCL: a thread that runs its operations one at a time, in the order of issue.

Before any data moves, the ranks exchange descriptions of the operation, and `Disorder` is raised if they differ. The
result is written to the caller's tensor when the host waits, which is the latest that a GPU could write it.
"""

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

DESCRIPTION_BYTES = 160  # size of a rank's description of its next operation
_STEP_S = 0.05


class Disorder(RuntimeError):
    """The error of ranks that issue different operations at the same position of a communicator."""


def describe(fact: Comm) -> str:
    """Describe an operation: "all_reduce(SUM) of 5 float64", "send of 512 bfloat16 to 3"."""
    op = f"({fact.op})" if fact.op else ""
    preposition = {"send": "to", "recv": "from"}.get(fact.kind, "root")
    return f"{fact.kind}{op} of {fact.count} {fact.dtype}" + (
        "" if fact.peer is None else f" {preposition} {fact.peer}"
    )


class Operation:
    """An operation of a thread: `transfer` moves bytes between ranks, `write` stores the result in its tensor."""

    def __init__(self, fact: Comm, transfer: Callable[[], None], write: Callable[[], None]):
        self.fact, self.transfer, self.write = fact, transfer, write
        self.done, self.written = threading.Event(), False
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with torch.no_grad():
                self.transfer()
        except BaseException as error:  # noqa: BLE001 -- raised where the host waits
            self.error = error
        self.done.set()


class Communicator:
    """A communicator of `ranks` (global, in the order of the group).

    Its thread runs inside `pause_simulation`; otherwise each of its operations would be recorded as the GPU's.
    """

    def __init__(
        self, name: str, ranks: tuple[int, ...], pause_simulation: Callable[[], AbstractContextManager[object]]
    ):
        self.name, self.ranks, self._pause_simulation = name, ranks, pause_simulation
        self._queue: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._pending: list[Operation] = []
        self._thread = threading.Thread(target=self._serve, name=f"communicator {name}", daemon=True)
        self._thread.start()

    def put(self, operation: Operation) -> None:
        self._pending.append(operation)
        self._queue.put(operation)

    def close(self) -> None:
        self._queue.put(None)

    def finish(self, last: Operation) -> None:
        """Write the results up to and including `last`, as a GPU would. Raise the error of a failed operation."""
        while not last.written:
            operation = self._pending[0]
            while not operation.done.wait(_STEP_S):
                if not self._thread.is_alive() and not operation.done.is_set():
                    raise Disorder(f"{self.name} broke before {describe(operation.fact)}")
            if operation.error is not None:
                raise operation.error
            operation.write()
            operation.written = True
            self._pending.pop(0)

    def _serve(self) -> None:
        with self._pause_simulation():
            while (operation := self._queue.get()) is not None:
                operation.run()
                if operation.error is not None:  # later operations cannot match any more
                    return


def bytes_of(x: Tensor) -> Tensor:
    """View a contiguous tensor as flat uint8, without autograd: NCCL does not change version counters either."""
    return x.detach().reshape(-1).view(torch.uint8)


def copy_of(x: Tensor) -> Tensor:
    """Copy the elements of a tensor to flat host memory; bool becomes uint8, as in NCCL.

    It avoids NumPy, after which the storage could not be resized.
    """
    raw = bytes_of(x)
    buffer = bytearray(ctypes.string_at(raw.data_ptr(), raw.numel()))
    copied = torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8)
    return copied if x.dtype == torch.bool else copied.view(x.dtype)


class Destination:
    """The bytes of a tensor that receive a result.

    The tensor is not kept alive, unlike in any version of torch, so that a release that is too early is found.
    """

    def __init__(self, x: Tensor):
        self._storage = weakref.ref(x.untyped_storage())
        self._start, self._bytes = x.storage_offset() * x.itemsize, x.numel() * x.itemsize

    def write(self, result: Tensor) -> None:
        storage = self._storage()
        if storage is not None and storage.nbytes():  # it may have released its memory
            storage_bytes = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]
            storage_bytes[self._start :][: self._bytes] = bytes_of(result)


class Transport:
    """A gloo group, used by one thread for collectives and by one thread for each pair of ranks."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
        self.rank, self.size = rank, size
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def check_collective(self, fact: Comm) -> None:
        """Raise Disorder unless all ranks issue the same operation."""
        received = [torch.empty(DESCRIPTION_BYTES, dtype=torch.uint8) for _ in range(self.size)]
        self.gloo.allgather([received], [_encode(describe(fact), fact.where)]).wait()
        descriptions = [_decode(x) for x in received]
        if len({description for description, _ in descriptions}) > 1:
            differences = "; ".join(
                f"rank {r}: {description} ({where})"
                for r, (description, where) in zip(fact.ranks, descriptions, strict=True)
            )
            raise Disorder(f"{fact.comm}: ranks do different things: {differences}")

    def check_message(self, fact: Comm, peer: int, tag: int) -> None:
        """Raise Disorder unless the rank `peer` (of the group) issues the other end of a message."""
        received = torch.empty(DESCRIPTION_BYTES, dtype=torch.uint8)
        works = [
            self.gloo.send([_encode(describe(fact), fact.where)], peer, tag),
            self.gloo.recv([received], peer, tag),
        ]
        for work in works:
            work.wait()
        description, where = _decode(received)
        expected_kind = {"send": "recv", "recv": "send"}[fact.kind]
        if description.rpartition(" of ")[2].split()[:2] != [str(fact.count), fact.dtype] or not description.startswith(
            expected_kind
        ):
            raise Disorder(f"{fact.comm}: {describe(fact)} ({fact.where}) meets {description} ({where})")

    def all_reduce(self, x: Tensor, op: str) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, "SUM" if op == "AVG" else op)
        self.gloo.allreduce([x], options).wait()
        if op == "AVG":
            x.div_(self.size, rounding_mode=None if x.is_floating_point() else "trunc")

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Gather flat tensors: x [n] of each rank into out [size * n]."""
        self.gloo.allgather([list(bytes_of(out).view(self.size, -1).unbind())], [bytes_of(x)]).wait()

    def all_to_all(self, out: Tensor, x: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]) -> None:
        """Send input_splits[r] elements of flat x to rank r, and receive output_splits[r] of flat out from it."""
        counts = torch.empty(self.size, self.size, dtype=torch.int64)
        self.all_gather(counts, torch.tensor(input_splits))
        if counts[:, self.rank].tolist() != list(output_splits):
            raise Disorder(
                f"rank {self.rank} expects {list(output_splits)} and is given {counts[:, self.rank].tolist()}"
            )
        input_bytes, output_bytes = ([n * x.itemsize for n in splits] for splits in (input_splits, output_splits))
        self.gloo.alltoall_base(bytes_of(out), bytes_of(x), output_bytes, input_bytes, dist.AllToAllOptions()).wait()

    def broadcast(self, x: Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.gloo.broadcast([bytes_of(x)], options).wait()

    def send(self, x: Tensor, peer: int, tag: int) -> None:
        self.gloo.send([bytes_of(x)], peer, tag).wait()

    def receive(self, x: Tensor, peer: int, tag: int) -> None:
        self.gloo.recv([bytes_of(x)], peer, tag).wait()


def _encode(description: str, where: str) -> Tensor:
    text = f"{description}\n{where}".encode()[:DESCRIPTION_BYTES].ljust(DESCRIPTION_BYTES, b"\0")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _decode(message: Tensor) -> Sequence[str]:
    description, _, where = message.numpy().tobytes().rstrip(b"\0").decode(errors="replace").partition("\n")
    return description, where
