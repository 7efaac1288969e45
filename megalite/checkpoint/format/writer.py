"""Save: every rank writes the rectangles it owns into one file of its own; then the whole becomes visible at once.

    .iter_0000500.part/ rank-00000.safetensors + its list   each rank; the file synced, hashed while it is written
    all ranks agree that every file is there                one all-reduce; else the folder is removed, all raise
    manifest.json, then COMPLETE (the manifest's sha256)    rank 0; both synced, then the folder
    rename to iter_0000500/, sync the parent                rank 0: from here on it exists
    latest_checkpointed_iteration.txt                       rank 0, replaced atomically

Behind a URL nothing can be renamed: the files are written to iter_0000500/ itself, and COMPLETE makes it exist.
Killed anywhere, the checkpoint before stays the newest. The directory must be shared by all ranks. A save needs no
memory beside the state: files are streamed (tensor_file.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint.format import tensor_file
from megalite.checkpoint.format.hashing import Stamp
from megalite.checkpoint.format.manifest import Manifest, Stored, Whole, dump
from megalite.checkpoint.format.tensor_file import Row
from megalite.checkpoint.storage.location import CheckpointError, ElsewhereError, Location
from megalite.checkpoint.storage.protocol import TRACKER, folder_of, storage_of
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import Box, Piece


def agree(error: Exception | None, mesh: Mesh, doing: str) -> None:
    """Raise on all ranks if any failed: the culprit with its own error, the others with its rank."""
    failed = torch.full((), mesh.world.rank if error else mesh.world.size, dtype=torch.int64, device=mesh.device)
    first = int(all_reduce_(failed, mesh.world, dist.ReduceOp.MIN))
    if error is not None:
        raise CheckpointError(f"{mesh.describe()} failed while {doing}: {error}") from error
    if first < mesh.world.size:
        raise ElsewhereError(f"rank {first} failed while {doing}; the checkpoint before is untouched")


def save(
    directory: str | Location,
    step: int,
    pieces: Sequence[Piece],
    state: dict[str, Any],
    mesh: Mesh,
    confirm: Callable[[], None] = lambda: None,
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Any:
    """Write the pieces that this rank owns; collective. Returns the folder of the checkpoint, a Path or a Url.

    `confirm`: called on rank 0 before anything is changed and before it is committed; what it raises ends the save.
    `around`: on rank 0, what must be so only if there is a commit.
    """
    final = folder_of(directory, step)
    part = storage_of(final).part_of(final)
    begin_part(part, mesh, confirm)
    error: Exception | None = None
    try:
        header, rows, ordered = tensor_file.plan(pieces)
        write_rank(part, mesh.world.rank, header, rows, (p.data for p in ordered))
    except Exception as e:  # whatever it is, the other ranks must hear of it
        error = e
    try:
        agree(error, mesh, f"writing to {part}")
    except CheckpointError:
        if mesh.world.is_first:
            abandon(part)
        raise
    if mesh.world.is_first:
        try:
            confirm()
            with around():
                commit(part, final, state, step, mesh.world.size)
        except Exception as e:
            abandon(part)
            error = e
    agree(error, mesh, f"committing {final}")
    return final


def begin_part(part: Location, mesh: Mesh, confirm: Callable[[], None] = lambda: None) -> None:
    """An empty folder to build a checkpoint in; collective."""
    error: Exception | None = None
    if mesh.world.is_first:
        try:
            confirm()
            storage_of(part).begin(part)
        except (OSError, CheckpointError) as e:
            error = e
    agree(error, mesh, f"making {part}")


def abandon(part: Location) -> None:
    """Delete what a failed save has left, where that works: the error that made it fail is the one to tell."""
    with contextlib.suppress(OSError):
        storage_of(part).discard(part)


def list_of(rank: int) -> str:
    """What a rank has written, for rank 0; there only when all of it is on disk."""
    return f"rank-{rank:05d}.json"


def write_rank(part: Location, rank: int, header: bytes, rows: Sequence[Row], data: Iterable[Tensor]) -> None:
    """This rank's file, then its list. `header`, `rows`, and the order of `data`: of tensor_file.plan."""
    name = f"rank-{rank:05d}.safetensors"
    stamp = tensor_file.write(part / name, header, data)
    listing = {
        "file": name,
        "stamp": [stamp.size, stamp.name, stamp.block, stamp.digests],
        "rows": [[r.name, r.shape, r.dtype, r.key, r.box.start, r.box.stop] for r in rows],
    }
    storage_of(part).put(part / list_of(rank), json.dumps(listing), sync=False)  # after a power cut it is swept


def commit(part: Location, final: Location, state: dict[str, Any], step: int, world: int) -> None:
    """Make one checkpoint of what `world` ranks have written; then it exists."""
    storage = storage_of(part)
    files: dict[str, Stamp] = {}
    found: dict[str, tuple[tuple[int, ...], str, list[Stored]]] = {}
    for rank in range(world):
        listing = json.loads(storage.read(part / list_of(rank)))
        size, name, block, digests = listing["stamp"]
        files[listing["file"]] = Stamp(size, name, block, tuple(digests))
        for name, shape, dtype, key, start, stop in listing["rows"]:
            _, _, parts = found.setdefault(name, (tuple(shape), dtype, []))
            parts.append(Stored(listing["file"], key, Box(tuple(start), tuple(stop))))
        storage.delete(part / list_of(rank))
    there = storage.entries(part)
    for name, stamp in files.items():
        if there.get(name) != stamp.size:
            raise CheckpointError(f"{part / name}: {stamp.size} bytes were written, {there.get(name, 0)} are there")
    tensors = {name: Whole(shape, dtype, tuple(parts)) for name, (shape, dtype, parts) in found.items()}
    text = dump(Manifest(tensors, files, state))
    storage.put(part / "manifest.json", text, sync=False)
    storage.put(part / "COMPLETE", hashlib.sha256(text.encode()).hexdigest() + "\n", sync=False)
    storage.publish(part, final)
    storage.put(final.parent / TRACKER, f"{step}\n", sync=False)
