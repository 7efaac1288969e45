"""What the ranks of a run do together with its --save directory: all succeed, or all raise."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from megalite.checkpoint.location import CheckpointError, Location
from megalite.checkpoint.storage import storage_of
from megalite.checkpoint.writer import agree
from megalite.parallel.comm import broadcast_
from megalite.parallel.mesh import Mesh


def together(mesh: Mesh, do: Callable[[], Any], doing: str) -> Any:
    """`do()` on this rank; raises on all ranks when it raises on one."""
    error, result = None, None
    try:
        result = do()
    except Exception as e:
        error = e
    agree(error, mesh, doing)
    return result


def check_shared(directory: Location, mesh: Mesh, patience_s: float = 10.0) -> None:
    """All ranks must see the file that rank 0 writes. Network file systems may show it late."""
    if mesh.world.size == 1:
        return
    number = torch.tensor(int.from_bytes(os.urandom(7), "little"), dtype=torch.int64, device=mesh.device)
    storage = storage_of(directory)
    token = directory / f".probe-{int(broadcast_(number, mesh.world)):x}"
    if mesh.world.is_first:
        together(mesh, lambda: storage.put(token, ""), f"writing to {directory}")
    else:
        agree(None, mesh, f"writing to {directory}")

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
