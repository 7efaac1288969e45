"""Load: find the newest valid checkpoint, verify it, and fill this rank's pieces under any layout.

The hashes of all files are checked before anything is read into the model, each rank taking its share of the blocks.
A target rectangle is filled from every stored box that meets it; nothing else is read. All differences between model
and checkpoint are listed at once, before any parameter changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megalite.checkpoint import hashing
from megalite.checkpoint import manifest as manifests
from megalite.checkpoint.location import CheckpointError, ElsewhereError, Location, parse
from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.pieces import intersect, rectangles
from megalite.checkpoint.storage import OpenFile, folder_of, storage_of
from megalite.checkpoint.tensor_file import TensorFile, places
from megalite.checkpoint.writer import agree
from megalite.parallel.comm import all_reduce_, broadcast_
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import Piece

_READ = 1 << 22  # bytes at once while hashing
_RUN = 8  # blocks that a thread reads in a row


def _number(value: int, mesh: Mesh) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64, device=mesh.device)


def newest(
    directory: str | Location, mesh: Mesh, step: int | None = None, *, first: str | Location | None = None
) -> tuple[Any, Manifest] | None:
    """The newest valid checkpoint of `directory`, or that of `step`: (its folder, a Path or a Url; its manifest).

    Collective. None where there is none at all. The ranks look at one candidate after the other and take the first in
    which all find their share of the hashes right. Raises CheckpointError where there are checkpoints but none is
    valid, and where `step` is not there: never a silent fresh start. `first`: another directory, whose checkpoint of
    a step is preferred.
    """
    roots = [parse(root) for root in (directory, first) if root is not None]
    found = _candidates(roots, mesh, step)
    reasons: list[str] = []
    for place in range(int(broadcast_(_number(len(found), mesh), mesh.world))):
        candidate, root = found[-1 - place] if found else (0, 0)
        candidate, root = (int(broadcast_(_number(n, mesh), mesh.world)) for n in (candidate, root))
        folder = folder_of(roots[root], candidate)
        manifest = None
        try:
            manifest = manifests.load(folder)
            verify(folder, manifest, mesh.world.rank, mesh.world.size)
        except CheckpointError as error:
            reasons.append(str(error))
            if manifest is not None or mesh.world.is_first:  # all ranks find the same wrong with a manifest
                print(f"skipping {folder}: {error}", flush=True)
        bad = int(all_reduce_(_number(len(reasons) > place, mesh), mesh.world))
        if not bad and manifest is not None:
            return folder, manifest
        if len(reasons) == place:
            reasons.append(f"{folder}: damaged, says another rank")
    if reasons:
        kind = CheckpointError if mesh.world.is_first else ElsewhereError
        raise kind(f"load={str(directory)!r}: no checkpoint in it is valid; " + "; ".join(reasons))
    if step is not None:
        kind = CheckpointError if mesh.world.is_first else ElsewhereError
        raise kind(f"load={str(directory)!r} holds no checkpoint of step {step}: choose another --ckpt-step")
    return None


def _candidates(roots: Sequence[Location], mesh: Mesh, step: int | None) -> list[tuple[int, int]]:
    """(step, number of its root), ascending; on rank 0."""
    found: list[tuple[int, int]] = []
    error: Exception | None = None
    if mesh.world.is_first:
        try:
            found = sorted((n, number) for number, root in enumerate(roots) for n in storage_of(root).steps_in(root))
        except OSError as e:
            error = e
    agree(error, mesh, f"looking for checkpoints in {' and '.join(map(str, roots))}")
    return [(n, number) for n, number in found if step in (None, n)]


def verify(folder: Location, manifest: Manifest, rank: int = 0, ranks: int = 1) -> None:
    """Every file has its size, and every block of this rank's share its hash; the shares are alike in bytes.

    Raises CheckpointError that names the first file, and the tensors in the block, that are damaged.
    """
    try:
        sizes = storage_of(folder).entries(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error})") from None
    for name, stamp in manifest.files.items():
        if name not in sizes:
            raise CheckpointError(f"{folder / name}: missing, or not a plain file")
        if sizes[name] != stamp.size:
            raise CheckpointError(f"{folder / name}: {sizes[name]} bytes, not {stamp.size}")
    blocks = [(name, i) for name, stamp in sorted(manifest.files.items()) for i in range(len(stamp.digests))]
    mine = blocks[len(blocks) * rank // ranks : len(blocks) * (rank + 1) // ranks]
    runs: list[tuple[str, list[int]]] = []  # of consecutive blocks of one file
    for name, i in mine:
        if runs and runs[-1][0] == name and len(runs[-1][1]) < _RUN:
            runs[-1][1].append(i)
        else:
            runs.append((name, [i]))
    with ThreadPoolExecutor(storage_of(folder).readers, thread_name_prefix="megalite-verify") as pool:
        for _ in pool.map(lambda run: _verify_blocks(folder / run[0], manifest, run[1]), runs):
            pass  # raises what a thread has raised, in the order of the files


def _verify_blocks(path: Location, manifest: Manifest, blocks: Sequence[int]) -> None:
    """`blocks`: consecutive."""
    stamp = manifest.files[path.name]
    buffer = memoryview(bytearray(min(_READ, stamp.block)))
    try:
        make = hashing.maker(stamp.name)
        file = storage_of(path).open(path)
        try:
            for i in blocks:
                begin, end = i * stamp.block, min(stamp.size, (i + 1) * stamp.block)
                if _digest(file, begin, end, make(), buffer) != stamp.digests[i]:
                    held = ", ".join(_tensors_at(path, manifest, begin, end))
                    raise CheckpointError(
                        f"{path}: its content changed after it was written ({stamp.name}), at bytes {begin} to {end}: "
                        + held
                    )
        finally:
            file.close()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be verified ({error})") from None


def _digest(file: OpenFile, begin: int, end: int, digest: Any, buffer: memoryview) -> str:
    """The hash of these bytes of a file."""
    for at in range(begin, end, len(buffer)):
        part = buffer[: min(len(buffer), end - at)]
        file.pread(part, at)
        digest.update(part)
    return digest.hexdigest()


def _tensors_at(path: Location, manifest: Manifest, begin: int, end: int, most: int = 3) -> list[str]:
    """Names of the tensors in these bytes, for people."""
    try:
        where = places(path)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return ["the header"]
    names = [
        name
        for name, whole in manifest.tensors.items()
        for part in whole.parts
        if part.file == path.name and part.key in where and where[part.key].begin < end and where[part.key].end > begin
    ]
    names = list(dict.fromkeys(names))
    return names[:most] + ([f"and {len(names) - most} more"] if len(names) > most else []) or ["the header"]


def differences(manifest: Manifest, pieces: Sequence[Piece], exact: bool = False) -> list[str]:
    """What keeps `pieces` from being filled, one line each; `exact`: another dtype too, which is else converted."""
    lines = []
    for piece in {p.name: p for p in pieces}.values():
        stored, dtype = manifest.tensors.get(piece.name), str(piece.data.dtype)[6:]
        if stored is None:
            lines.append(f"{piece.name}: shape {piece.shape} here, not in the checkpoint")
        elif stored.shape != piece.shape:
            lines.append(f"{piece.name}: shape {piece.shape} here, {stored.shape} in the checkpoint")
        elif exact and stored.dtype != dtype:
            lines.append(f"{piece.name}: {dtype} here, {stored.dtype} in the checkpoint")
    return lines


def unused(manifest: Manifest, pieces: Sequence[Piece], mesh: Mesh, kinds: Collection[str] | None = None) -> list[str]:
    """Tensors of the checkpoint that no rank has a piece of; collective, one line each. `kinds`: of names KIND/NAME
    that matter; None: all."""
    names = sorted(name for name in manifest.tensors if kinds is None or name.partition("/")[0] in kinds)
    here = {piece.name for piece in pieces}
    known = torch.tensor([name in here for name in names], dtype=torch.int32, device=mesh.device)
    if names:
        all_reduce_(known, mesh.world, dist.ReduceOp.MAX)
    return [
        f"{name}: not here, shape {manifest.tensors[name].shape} in the checkpoint"
        for name, count in zip(names, known.tolist(), strict=True)
        if not count
    ]


def fill(
    folder: Location,
    manifest: Manifest,
    pieces: Sequence[Piece],
    mesh: Mesh,
    *,
    exact: bool = False,
    problems: Sequence[str] = (),
) -> None:
    """Write the checkpoint's values into the pieces' data; collective. Raises CheckpointError on all ranks: before
    anything changes where they do not fit, or there are other `problems` already."""
    lines = [*problems, *differences(manifest, pieces, exact)]
    if int(all_reduce_(_number(len(lines), mesh), mesh.world, dist.ReduceOp.MAX)) > 0:
        kind = CheckpointError if lines else ElsewhereError
        raise kind(f"{folder} does not fit this model:\n  " + "\n  ".join(lines or ["see another rank"]))
    files: dict[str, TensorFile] = {}
    copies: list[Callable[[], None]] = []
    try:
        storage = storage_of(folder)
        with storage.reading(folder), ThreadPoolExecutor(storage.readers, thread_name_prefix="megalite-load") as pool:
            for piece in pieces:
                for box, span in rectangles(piece.box, piece.span):
                    target = piece.data[span.start : span.stop].view(box.shape)
                    for stored in manifest.tensors[piece.name].parts:
                        both = intersect(box, stored.box)
                        if both is not None:
                            if stored.file not in files:
                                files[stored.file] = TensorFile(folder / stored.file)
                            file = files[stored.file]
                            copies.append(partial(file.copy, stored.key, stored.box, both, target, box))
            for _ in pool.map(lambda copy: copy(), copies):
                pass
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: cannot be read ({error}); use another checkpoint") from error
    finally:
        for file in files.values():
            file.close()
