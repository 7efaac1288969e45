"""Actions of all ranks on the --save directory: all succeed, or all raise."""

import os
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megalite.checkpoint.storage.location import CheckpointError, ElsewhereError, Location, reason_of
from megalite.checkpoint.storage.protocol import storage_of
from megalite.parallel.comm import first_says, reduce_number
from megalite.parallel.mesh import Mesh

T = TypeVar("T")


def agree(error: Exception | None, mesh: Mesh, doing: str) -> None:
    """Raise on all ranks if any failed: the failed rank with its own error, the others with its rank. An ElsewhereError
    is this rank's knowledge of another's failure."""
    size, own = mesh.world.size, error is not None and not isinstance(error, ElsewhereError)
    first = reduce_number(mesh.world.rank if own else size + (error is None), mesh, dist.ReduceOp.MIN)
    if error is not None and own:
        raise CheckpointError(f"{mesh.describe()} failed while {doing}: {reason_of(error)}") from error
    if first <= size:
        who, why = "?" if first == size else first, f" ({error})" if error else ""
        raise ElsewhereError(f"rank {who} failed while {doing}{why}; the checkpoint before is untouched")


def together(mesh: Mesh, do: Callable[[], T], doing: str) -> T:
    """`do()` on this rank; collective. If it raises on one rank, all raise: the others would wait for that one in their
    next collective until the time-out."""
    try:
        result = do()
    except Exception as error:
        agree(error, mesh, doing)
        raise
    agree(None, mesh, doing)
    return result


def check_shared(directory: Location, mesh: Mesh, patience_s: float = 10.0) -> None:
    """Refuse a directory in which not all ranks see a file of rank 0; network file systems may show it late."""
    if mesh.world.size == 1:
        return
    storage = storage_of(directory)
    token = directory / f".probe-{first_says(int.from_bytes(os.urandom(7), 'little'), mesh):x}"
    together(mesh, lambda: storage.put(token, "") if mesh.world.is_first else None, f"writing to {directory}")

    def look() -> None:
        deadline = time.monotonic() + patience_s
        while token.name not in storage.entries(directory):
            if time.monotonic() > deadline:
                raise CheckpointError(f"save={str(directory)!r} is not the directory that rank 0 sees: share it")
            time.sleep(0.1)

    try:
        together(mesh, look, f"looking for rank 0's file in {directory}")
    finally:
        if mesh.world.is_first:
            storage.delete(token)
