"""A save that training waits for: every rank writes the rectangles it owns into one file, then rank 0 commits.

All ranks agree that every file is there before that (one all-reduce); else the folder is removed, and all raise. The
directory must be shared by all ranks. What is written, in which order, is in format/writer.py.
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
    """Write the pieces that this rank owns; collective. Returns the folder of the checkpoint, a Path or a Url.

    `confirm`: called on rank 0 before anything is changed and before it is committed; what it raises ends the save.
    `around`: on rank 0, what must be so only if there is a commit.
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
    """An empty folder to build a checkpoint in; collective."""

    def begin() -> None:
        if mesh.world.is_first:
            confirm()
            storage_of(part).begin(part)

    together(mesh, begin, f"making {part}")
