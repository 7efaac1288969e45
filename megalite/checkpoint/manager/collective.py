"""Actions of all ranks on the --save directory: all succeed, or all raise; and saves by the clock, at the same step."""

import os
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megalite.checkpoint.storage.location import CheckpointError, Location, OtherRankError, error_text
from megalite.checkpoint.storage.storage import storage_of
from megalite.parallel.comm import all_reduce_int, broadcast_int
from megalite.parallel.mesh import Mesh

T = TypeVar("T")


def raise_on_all_ranks(error: Exception | None, mesh: Mesh, action: str) -> None:
    """Raise on all ranks if any failed: the failed rank with its own error, the others with its rank. An ElsewhereError
    is this rank's knowledge of another's failure."""
    size, own = mesh.world.size, error is not None and not isinstance(error, OtherRankError)
    first = all_reduce_int(mesh.world.rank if own else size + (error is None), mesh, dist.ReduceOp.MIN)
    if error is not None and own:
        raise CheckpointError(f"{mesh.describe()} failed while {action}: {error_text(error)}") from error
    if first <= size:
        who, why = "?" if first == size else first, f" ({error})" if error else ""
        raise OtherRankError(f"rank {who} failed while {action}{why}; the checkpoint before is untouched")


def run_on_all_ranks(mesh: Mesh, do: Callable[[], T], action: str) -> T:
    """`do()` on this rank; collective: if it raises on one, all raise, and none waits for that one in vain."""
    try:
        result = do()
    except Exception as error:
        raise_on_all_ranks(error, mesh, action)
        raise
    raise_on_all_ranks(None, mesh, action)
    return result


def check_shared_filesystem(directory: Location, mesh: Mesh, patience_s: float = 10.0) -> None:
    """Refuse a directory in which not all ranks see a file of rank 0; network file systems may show it late."""
    if mesh.world.size == 1:
        return
    storage = storage_of(directory)
    token = directory / f".probe-{broadcast_int(int.from_bytes(os.urandom(7), 'little'), mesh):x}"
    run_on_all_ranks(
        mesh, lambda: storage.write_text(token, "") if mesh.world.is_first else None, f"writing to {directory}"
    )

    def look() -> None:
        deadline = time.monotonic() + patience_s
        while token.name not in storage.list_files(directory):
            if time.monotonic() > deadline:
                raise CheckpointError(f"save={str(directory)!r} is not the directory that rank 0 sees: share it")
            time.sleep(0.1)

    try:
        run_on_all_ranks(mesh, look, f"looking for rank 0's file in {directory}")
    finally:
        if mesh.world.is_first:
            storage.delete(token)


class SaveTimer:
    """`due(step)` after every step: True about every `interval_s` seconds, at the same step on all ranks. Clocks differ
    between ranks, so rank 0's decides. Each of its answers fixes the step of the next question: half way to the end at
    the pace so far, and after no more steps than that pace was measured over. That is about 2 log2(steps per interval)
    broadcasts per save; an all-reduce in every step would make all ranks wait for the slowest."""

    def __init__(self, interval_s: float, mesh: Mesh, step: int, now: Callable[[], float] = time.monotonic):
        self._interval_s, self._mesh, self._now = interval_s, mesh, now
        self.restart(step)

    def restart(self, step: int) -> None:
        """A checkpoint was made: the interval starts again."""
        self._from, self._begin, self._ask = step, self._now(), step + 1

    def is_due(self, step: int) -> bool:
        """Collective at some steps, the same on all ranks."""
        if step < self._ask:
            return False
        elapsed = self._now() - self._begin
        steps, left = step - self._from, self._interval_s - elapsed
        pace = elapsed / steps
        skip = 0 if left <= pace / 2 else 1 if pace <= 0 else max(1, min(int(left / pace / 2), steps))
        skip = broadcast_int(skip, self._mesh)
        self._ask = step + skip
        return skip == 0
