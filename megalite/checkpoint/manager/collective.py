"""Actions of all ranks on the --save directory, which succeed or raise on all ranks, and saves at time intervals."""

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
    """Raise on all ranks if `error` is set on any. Collective over all ranks.

    A failed rank raises CheckpointError with its own error, and the others raise OtherRankError with the number of the
    first failed rank. An `error` of type OtherRankError reports the failure of another rank, not of this one.
    """
    size = mesh.world.size
    failed = error is not None and not isinstance(error, OtherRankError)
    # the rank, if it failed; else `size` if it only knows of another's failure, or `size + 1` without an error
    code = mesh.world.rank if failed else size + (error is None)
    first = all_reduce_int(code, mesh, dist.ReduceOp.MIN)
    if error is not None and failed:
        raise CheckpointError(f"{mesh.describe()} failed while {action}: {error_text(error)}") from error
    if first <= size:
        failed_rank = "?" if first == size else first
        reason = f" ({error})" if error else ""
        raise OtherRankError(f"rank {failed_rank} failed while {action}{reason}; the previous checkpoint is untouched")


def run_on_all_ranks(mesh: Mesh, function: Callable[[], T], action: str) -> T:
    """Return the result of `function()` on this rank, or raise on all ranks if it raises on any.

    No rank then waits for the failed one. `action` describes the function in messages ("writing to ..."). Collective
    over all ranks.
    """
    try:
        result = function()
    except Exception as error:
        raise_on_all_ranks(error, mesh, action)
        raise
    raise_on_all_ranks(None, mesh, action)
    return result


def check_shared_filesystem(directory: Location, mesh: Mesh, timeout_s: float = 10.0) -> None:
    """Raise CheckpointError if some rank does not see a file that rank 0 writes to the directory.

    Network file systems may show the file late, so the ranks look for it for up to `timeout_s` seconds. Collective over
    all ranks.
    """
    if mesh.world.size == 1:
        return
    storage = storage_of(directory)
    token = directory / f".probe-{broadcast_int(int.from_bytes(os.urandom(7), 'little'), mesh):x}"

    def write_token() -> None:
        if mesh.world.is_first:
            storage.write_text(token, "")

    def wait_for_token() -> None:
        deadline = time.monotonic() + timeout_s
        while token.name not in storage.list_files(directory):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"save={str(directory)!r} is not the same directory as on rank 0: use a shared file system"
                )
            time.sleep(0.1)

    run_on_all_ranks(mesh, write_token, f"writing to {directory}")
    try:
        run_on_all_ranks(mesh, wait_for_token, f"looking for rank 0's file in {directory}")
    finally:
        if mesh.world.is_first:
            storage.delete(token)


class SaveTimer:
    """A timer for saves every `interval_s` seconds, which expires at the same step on all ranks.

    Clocks differ between ranks, so rank 0's clock decides. An all-reduce in every step would make all ranks wait for
    the slowest, so rank 0 broadcasts a decision only at some steps, and each decision fixes the step of the next one.
    That is half way to the end of the interval at the pace so far, and at most as many steps ahead as the pace was
    measured over. This takes about 2 log2(steps per interval) broadcasts per save.
    """

    def __init__(self, interval_s: float, mesh: Mesh, step: int, now: Callable[[], float] = time.monotonic):
        self._interval_s, self._mesh, self._now = interval_s, mesh, now
        self.restart(step)

    def restart(self, step: int) -> None:
        """Start a new interval at `step`, after a checkpoint was saved."""
        self._start_step = step
        self._started = self._now()
        self._next_decision = step + 1

    def is_due(self, step: int) -> bool:
        """Return True if a save is due. Call this after every step.

        Collective over all ranks at some steps, which are the same on all ranks.
        """
        if step < self._next_decision:
            return False
        elapsed = self._now() - self._started
        steps = step - self._start_step
        remaining = self._interval_s - elapsed
        pace = elapsed / steps  # seconds per step
        if remaining <= pace / 2:
            skip = 0
        elif pace <= 0:
            skip = 1
        else:
            skip = max(1, min(int(remaining / pace / 2), steps))
        skip = broadcast_int(skip, self._mesh)
        self._next_decision = step + skip
        return skip == 0
