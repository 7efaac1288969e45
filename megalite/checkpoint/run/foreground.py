"""A save that training waits for: every rank writes its rectangles into one file, all agree that every file is there
(one all-reduce), and rank 0 commits. The directory must be shared by all ranks. The order of writes: format/writer.py.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from megalite.checkpoint.format import tensor_file, writer
from megalite.checkpoint.run.agreement import together
from megalite.checkpoint.storage.location import CheckpointError, Location
from megalite.checkpoint.storage.protocol import folder_of, storage_of
from megalite.config.faults import fault
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import Piece


def save(
    directory: str | Location,
    step: int,
    pieces: Sequence[Piece],
    state: dict[str, Any],
    mesh: Mesh,
    confirm: Callable[[], None] = lambda: None,
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Location:
    """Write the pieces that this rank owns; collective. Returns the folder of the checkpoint.

    `confirm`: called on rank 0 before anything changes and before the commit; its errors end the save. `around`:
    context of the commit on rank 0. Raises CheckpointError on all ranks, and removes the folder.
    """
    final = folder_of(directory, step)
    part = storage_of(final).part_of(final)
    begin_part(part, mesh, confirm)

    def write() -> None:
        rows, ordered = tensor_file.plan(pieces)
        writer.write_rank(part, mesh.world.rank, rows, (p.data for p in ordered))
        fault("ckpt.shard_written", mesh.world.rank, step)

    def commit() -> None:
        if mesh.world.is_first:
            confirm()
            with around():
                writer.commit(part, final, state, step, mesh.world.size)

    try:
        together(mesh, write, f"writing to {part}")
        together(mesh, commit, f"committing {final}")
    except CheckpointError:
        if mesh.world.is_first:
            writer.abandon(part)
        raise
    return final


def begin_part(part: Location, mesh: Mesh, confirm: Callable[[], None] = lambda: None) -> None:
    """Make an empty folder to build a checkpoint in; collective."""

    def begin() -> None:
        if mesh.world.is_first:
            confirm()
            storage_of(part).begin(part)

    together(mesh, begin, f"making {part}")
