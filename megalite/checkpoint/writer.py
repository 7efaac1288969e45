"""Save: every rank writes the rectangles it owns into one file of its own; then the whole becomes visible at once.

    .iter_0000500.part/ rank-00000.safetensors + its list   each rank, synced, hashed while it is written
    all ranks agree that every file is there                one all-reduce; else the folder is removed, all raise
    manifest.json, then COMPLETE (the manifest's sha256)    rank 0, synced
    rename to iter_0000500/, sync the parent                rank 0: from here on it exists
    latest_checkpointed_iteration.txt                       rank 0, replaced atomically

Killed anywhere, the checkpoint before stays the newest. The directory must be shared by all ranks. A save needs no
memory beside the state: files are streamed (tensor_file.py).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint import tensor_file
from megalite.checkpoint.hashing import Stamp
from megalite.checkpoint.manifest import CheckpointError, ElsewhereError, Manifest, Stored, Whole, dump, sha256_of
from megalite.checkpoint.storage import TRACKER, folder_of, part_of, sync, write_durably
from megalite.checkpoint.tensor_file import Row
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


def save(directory: str | Path, step: int, pieces: Sequence[Piece], state: dict[str, Any], mesh: Mesh) -> Path:
    """Write the pieces that this rank owns; collective. Returns the folder of the checkpoint."""
    final = folder_of(directory, step)
    part = part_of(final)
    begin_part(part, mesh)
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
            shutil.rmtree(part, ignore_errors=True)
        raise
    if mesh.world.is_first:
        try:
            commit(part, final, state, step, mesh.world.size)
        except Exception as e:
            shutil.rmtree(part, ignore_errors=True)
            error = e
    agree(error, mesh, f"committing {final}")
    return final


def begin_part(part: Path, mesh: Mesh) -> None:
    """An empty folder to build a checkpoint in; collective."""
    error: Exception | None = None
    if mesh.world.is_first:
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        except OSError as e:
            error = e
    agree(error, mesh, f"making {part}")


def list_of(part: Path, rank: int) -> Path:
    """What a rank has written, for rank 0; there only when all of it is on disk."""
    return part / f"rank-{rank:05d}.json"


def write_rank(part: Path, rank: int, header: bytes, rows: Sequence[Row], data: Iterable[Tensor]) -> None:
    """This rank's file, then its list. `header`, `rows`, and the order of `data`: of tensor_file.plan."""
    name = f"rank-{rank:05d}.safetensors"
    stamp = tensor_file.write(part / name, header, data)
    listing = {
        "file": name,
        "stamp": [stamp.size, stamp.name, stamp.block, stamp.digests],
        "rows": [[r.name, r.shape, r.dtype, r.key, r.box.start, r.box.stop] for r in rows],
    }
    temporary = part / f".rank-{rank:05d}.json"
    temporary.write_text(json.dumps(listing), encoding="utf-8")
    os.replace(temporary, list_of(part, rank))


def commit(part: Path, final: Path, state: dict[str, Any], step: int, world: int) -> None:
    """Make one checkpoint of what `world` ranks have written; then it exists."""
    files: dict[str, Stamp] = {}
    found: dict[str, tuple[tuple[int, ...], str, list[Stored]]] = {}
    for rank in range(world):
        listing = json.loads(list_of(part, rank).read_text(encoding="utf-8"))
        size, name, block, digests = listing["stamp"]
        files[listing["file"]] = Stamp(size, name, block, tuple(digests))
        for name, shape, dtype, key, start, stop in listing["rows"]:
            _, _, parts = found.setdefault(name, (tuple(shape), dtype, []))
            parts.append(Stored(listing["file"], key, Box(tuple(start), tuple(stop))))
        list_of(part, rank).unlink()
    tensors = {name: Whole(shape, dtype, tuple(parts)) for name, (shape, dtype, parts) in found.items()}
    manifest = part / "manifest.json"
    manifest.write_text(dump(Manifest(tensors, files, state)), encoding="utf-8")
    sync(manifest)
    (part / "COMPLETE").write_text(sha256_of(manifest) + "\n", encoding="utf-8")
    sync(part / "COMPLETE")
    sync(part)
    if final.exists():  # the same step again, after a rollback: out of the way, then gone
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(final, old)
        os.replace(part, final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(part, final)
    sync(final.parent)
    write_durably(final.parent / TRACKER, f"{step}\n")
