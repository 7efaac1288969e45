"""Load: find the newest complete checkpoint, verify it, and fill this rank's pieces under any layout.

A target rectangle is filled from every stored box that meets it; nothing else is read. All differences between model
and checkpoint are listed at once, before any parameter changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from megalite.checkpoint import manifest as manifests
from megalite.checkpoint.manifest import CheckpointError, Manifest
from megalite.checkpoint.pieces import inside, intersect, rectangles
from megalite.parallel.comm import all_reduce_, broadcast_
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import Piece


def newest(directory: str | Path, mesh: Mesh) -> tuple[Path, Manifest] | None:
    """The newest complete checkpoint of `directory`, agreed across ranks; None where there is none at all.

    Raises CheckpointError where there are checkpoints but none is valid: never a silent fresh start.
    """
    folder = Path(directory)
    step, reasons = -1, []
    if mesh.world.is_first and folder.is_dir():
        found = [p for p in folder.glob("iter_*") if p.name[5:].isdigit() and p.is_dir()]
        for candidate in sorted(found, key=lambda p: int(p.name[5:]), reverse=True):
            try:
                verify(candidate, manifests.load(candidate))
                step = int(candidate.name[5:])
                break
            except CheckpointError as error:
                reasons.append(str(error))
                print(f"skipping {candidate}: {error}", flush=True)
        if step < 0 and found:
            step = -2
    agreed = broadcast_(torch.tensor(step, dtype=torch.int64, device=mesh.device), mesh.world)
    if int(agreed) == -2:
        raise CheckpointError(f"load={str(directory)!r}: no checkpoint in it is valid; " + "; ".join(reasons))
    if int(agreed) < 0:
        return None
    chosen = folder / f"iter_{int(agreed):07d}"
    return chosen, manifests.load(chosen)


def verify(folder: Path, manifest: Manifest) -> None:
    """Every file has its size and sha256. Raises CheckpointError naming the first that does not."""
    for name, (size, digest) in manifest.files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path}: missing, or not a plain file")
        if path.stat().st_size != size:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes, not {size}")
        if manifests.sha256_of(path) != digest:
            raise CheckpointError(f"{path}: its content changed after it was written (sha256)")


def differences(manifest: Manifest, pieces: Sequence[Piece]) -> list[str]:
    """What keeps `pieces` from being filled, one line each."""
    lines = []
    for piece in {p.name: p for p in pieces}.values():
        stored = manifest.tensors.get(piece.name)
        if stored is None:
            lines.append(f"{piece.name}: shape {piece.shape} here, not in the checkpoint")
        elif stored.shape != piece.shape:
            lines.append(f"{piece.name}: shape {piece.shape} here, {stored.shape} in the checkpoint")
    return lines


def fill(folder: Path, manifest: Manifest, pieces: Sequence[Piece], mesh: Mesh) -> None:
    """Write the checkpoint's values into the pieces' data; collective. Raises CheckpointError on all ranks."""
    problems = differences(manifest, pieces)
    worst = torch.tensor(len(problems), dtype=torch.int64, device=mesh.device)
    if int(all_reduce_(worst, mesh.world, dist.ReduceOp.MAX)) > 0:
        raise CheckpointError(f"{folder} does not fit this model:\n  " + "\n  ".join(problems or ["see another rank"]))
    files = {}
    try:
        for name in manifest.files:
            files[name] = safe_open(folder / name, framework="pt")  # maps the file; reads nothing yet
        for piece in pieces:
            for box, span in rectangles(piece.box, piece.span):
                target = piece.data[span.start : span.stop].view(box.shape)
                for stored in manifest.tensors[piece.name].parts:
                    both = intersect(box, stored.box)
                    if both is not None:
                        values = files[stored.file].get_slice(stored.key)[inside(both, stored.box)]
                        target[inside(both, box)].copy_(values)
    except (SafetensorError, OSError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: cannot be read ({error}); use another checkpoint") from error
