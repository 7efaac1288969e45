"""Save: every rank writes the rectangles it owns into one file of its own; then the whole becomes visible at once.

    .iter_0000500.part/ rank-00000.safetensors + its list   each rank, synced, hashed
    all ranks agree that every file is there                one all-reduce; else the folder is removed, all raise
    manifest.json, then COMPLETE (the manifest's sha256)    rank 0, synced
    rename to iter_0000500/, sync the parent                rank 0: from here on it exists
    latest_checkpointed_iteration.txt                       rank 0, replaced atomically

Killed anywhere, the checkpoint before stays the newest. The directory must be shared by all ranks.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megalite.checkpoint.manifest import CheckpointError, Manifest, Stored, Whole, dump, sha256_of
from megalite.checkpoint.pieces import rectangles
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import Box, Piece

TRACKER = "latest_checkpointed_iteration.txt"


def folder_of(directory: str | Path, step: int) -> Path:
    return Path(directory) / f"iter_{step:07d}"


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _agree(error: Exception | None, mesh: Mesh, doing: str) -> None:
    """Raise on all ranks if any failed: the culprit with its own error, the others with its rank."""
    failed = torch.full((), mesh.world.rank if error else mesh.world.size, dtype=torch.int64, device=mesh.device)
    first = int(all_reduce_(failed, mesh.world, dist.ReduceOp.MIN))
    if error is not None:
        raise CheckpointError(f"{mesh.describe()} failed while {doing}: {error}") from error
    if first < mesh.world.size:
        raise CheckpointError(f"rank {first} failed while {doing}; the checkpoint before is untouched")


def save(directory: str | Path, step: int, pieces: Sequence[Piece], state: dict[str, Any], mesh: Mesh) -> Path:
    """Write the pieces that this rank owns; collective. Returns the folder of the checkpoint."""
    final = folder_of(directory, step)
    part = final.with_name(f".{final.name}.part")
    error: Exception | None = None
    if mesh.world.is_first:
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        except OSError as e:
            error = e
    _agree(error, mesh, f"making {part}")
    try:
        _write_rank(part, pieces, mesh.world.rank)
    except Exception as e:  # whatever it is, the other ranks must hear of it
        error = e
    try:
        _agree(error, mesh, f"writing to {part}")
    except CheckpointError:
        if mesh.world.is_first:
            shutil.rmtree(part, ignore_errors=True)
        raise
    if mesh.world.is_first:
        try:
            _commit(Path(directory), part, final, state, step, mesh.world.size)
        except Exception as e:
            shutil.rmtree(part, ignore_errors=True)
            error = e
    _agree(error, mesh, f"committing {final}")
    return final


def _write_rank(part: Path, pieces: Sequence[Piece], rank: int) -> None:
    name = f"rank-{rank:05d}.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    rows = []
    for piece in pieces:
        for box, span in rectangles(piece.box, piece.span):
            key = f"{len(tensors):06d}"
            values = piece.data[span.start : span.stop].detach()
            tensors[key] = values.to("cpu", copy=True).view(box.shape)
            rows.append([piece.name, piece.shape, str(piece.data.dtype)[6:], key, box.start, box.stop])
    save_file(tensors, part / name)
    _sync(part / name)
    listing = {"file": name, "size": (part / name).stat().st_size, "sha256": sha256_of(part / name), "rows": rows}
    (part / f"rank-{rank:05d}.json").write_text(json.dumps(listing), encoding="utf-8")


def _commit(directory: Path, part: Path, final: Path, state: dict[str, Any], step: int, world: int) -> None:
    files: dict[str, tuple[int, str]] = {}
    found: dict[str, tuple[tuple[int, ...], str, list[Stored]]] = {}
    for rank in range(world):
        path = part / f"rank-{rank:05d}.json"
        listing = json.loads(path.read_text(encoding="utf-8"))
        files[listing["file"]] = (listing["size"], listing["sha256"])
        for name, shape, dtype, key, start, stop in listing["rows"]:
            _, _, parts = found.setdefault(name, (tuple(shape), dtype, []))
            parts.append(Stored(listing["file"], key, Box(tuple(start), tuple(stop))))
        path.unlink()
    tensors = {name: Whole(shape, dtype, tuple(parts)) for name, (shape, dtype, parts) in found.items()}
    manifest = part / "manifest.json"
    manifest.write_text(dump(Manifest(tensors, files, state)), encoding="utf-8")
    _sync(manifest)
    (part / "COMPLETE").write_text(sha256_of(manifest) + "\n", encoding="utf-8")
    _sync(part / "COMPLETE")
    _sync(part)
    if final.exists():  # the same step again, after a rollback: out of the way, then gone
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(final, old)
        os.replace(part, final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(part, final)
    _sync(directory)
    tracker = directory / TRACKER
    temporary = directory / f".{TRACKER}.part"
    temporary.write_text(f"{step}\n", encoding="utf-8")
    _sync(temporary)
    os.replace(temporary, tracker)
    _sync(directory)


def prune(directory: str | Path, keep: int, mesh: Mesh) -> None:
    """Rank 0 removes all but the newest `keep` complete checkpoints; strangers and incomplete ones stay."""
    if not mesh.world.is_first:
        return
    complete = sorted(p for p in Path(directory).glob("iter_*") if p.name[5:].isdigit() and (p / "COMPLETE").is_file())
    for folder in complete[:-keep]:
        (folder / "COMPLETE").unlink()  # first, so that an interrupted deletion is no checkpoint
        shutil.rmtree(folder, ignore_errors=True)
