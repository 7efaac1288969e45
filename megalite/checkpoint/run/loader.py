"""Which checkpoint of a directory a run loads: the newest that is whole, on all ranks, or the one before it.

`load` reads every block that holds a value for this rank once, and checks its hash before the value counts; where one
is wrong, the checkpoint before it is taken. That files are there, have their size, and hold what the model needs is
known before any parameter changes, and all differences are listed at once. `newest` checks everything that a
checkpoint holds, each rank taking its share of the blocks; `fill` then reads any part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.format.blocks import check_sizes
from megalite.checkpoint.format.manifest import Manifest
from megalite.checkpoint.format.reader import differences, fill_pieces, verify
from megalite.checkpoint.progress import show
from megalite.checkpoint.run.agreement import agree
from megalite.checkpoint.storage.location import CheckpointError, ElsewhereError, Location, parse
from megalite.checkpoint.storage.protocol import folder_of, storage_of
from megalite.parallel.comm import all_reduce_, broadcast_
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import Piece

T = TypeVar("T")


def _number(value: int, mesh: Mesh) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64, device=mesh.device)


@dataclass(frozen=True)
class Wanted:
    """What to fill from a checkpoint. `exact`: dtypes must agree, and are else converted; `problems`: why it must not
    be loaded, one line each; `tell`: what a long load is called in the log."""

    pieces: Sequence[Piece]
    exact: bool = False
    problems: Sequence[str] = ()
    tell: str | None = None


def newest(
    directory: str | Location, mesh: Mesh, step: int | None = None, *, first: str | Location | None = None
) -> tuple[Location, Manifest] | None:
    """The newest valid checkpoint of `directory`, or that of `step`: (its folder, a Path or a Url; its manifest).

    Collective. None where there is none at all. The ranks look at one candidate after the other and take the first in
    which all find their share of the hashes right. Raises CheckpointError where there are checkpoints but none is
    valid, and where `step` does not exist: never a silent fresh start. `first`: another directory, whose checkpoint of
    a step is preferred.
    """

    def prepare(folder: Location, manifest: Manifest) -> Callable[[], None]:
        return lambda: verify(folder, manifest, mesh.world.rank, mesh.world.size)

    return _first_good(directory, mesh, step, first, prepare)


def load(
    directory: str | Location,
    mesh: Mesh,
    wanted: Callable[[Location, Manifest], Wanted],
    step: int | None = None,
    *,
    later: bool = False,
    first: str | Location | None = None,
) -> tuple[Location, Manifest] | None:
    """`newest`, and fill the pieces that `wanted` names from it; every byte that is used is read once, and verified.

    Collective, and `wanted` may be. It is asked about a checkpoint whose manifest is right and whose files are all
    there; what it raises, or a piece that does not fit, ends the load before anything changes. A block with a wrong
    hash is found while pieces are being filled: they are then filled from the checkpoint before it, and where there is
    none, CheckpointError is raised and they are NaN, so that nothing can go on with a mixture. `later`: those after
    `step` are welcome too.
    """
    begun: list[Piece] = []

    def prepare(folder: Location, manifest: Manifest) -> Callable[[], None]:
        want = wanted(folder, manifest)
        _refuse_differences(folder, manifest, want, mesh)

        def fill_these() -> None:
            begun[:] = want.pieces
            with storage_of(folder).reading(folder):
                fill_pieces(folder, manifest, want.pieces, want.tell)

        return fill_these

    try:
        return _first_good(directory, mesh, step, first, prepare, later)
    except BaseException:
        for piece in begun:
            if piece.data.is_floating_point():
                piece.data.detach().fill_(math.nan)
        raise


def _first_good(
    directory: str | Location,
    mesh: Mesh,
    step: int | None,
    first: str | Location | None,
    prepare: Callable[[Location, Manifest], Callable[[], None]],
    later: bool = False,
) -> tuple[Location, Manifest] | None:
    """The newest candidate whose files are there and with which what `prepare` returns is done on all ranks.
    `prepare` is collective; a CheckpointError of what it returns is damage, and the next candidate is tried."""
    roots = [parse(root) for root in (directory, first) if root is not None]
    found = _candidates(roots, mesh, step, later)
    reasons: list[str] = []
    for place in range(int(broadcast_(_number(len(found), mesh), mesh.world))):
        candidate, root = found[-1 - place] if found else (0, 0)
        candidate, root = (int(broadcast_(_number(n, mesh), mesh.world)) for n in (candidate, root))
        folder = folder_of(roots[root], candidate)
        manifest, reason = _try(mesh, folder, False, partial(_whole_on_disk, folder))
        if manifest is not None:
            _, reason = _try(mesh, folder, True, prepare(folder, manifest))
            if reason is None:
                return folder, manifest
        reasons.append(reason or "")
    kind = CheckpointError if mesh.world.is_first else ElsewhereError
    if reasons:
        raise kind(f"load={str(directory)!r}: no checkpoint in it is valid; " + "; ".join(reasons))
    if step is not None:
        raise kind(f"load={str(directory)!r} holds no checkpoint of step {step}: choose another --ckpt-step")
    return None


def _whole_on_disk(folder: Location) -> Manifest:
    manifest = manifests.load(folder)
    check_sizes(folder, manifest)
    return manifest


def _try(mesh: Mesh, folder: Location, tell: bool, do: Callable[[], T]) -> tuple[T | None, str | None]:
    """(what `do` returns, None), or (None, the reason) where it raises CheckpointError or OSError on any rank;
    collective. `tell`: whether a rank that is not the first prints its own."""
    result, reason = None, None
    try:
        result = do()
    except (CheckpointError, OSError) as error:  # another run may have pruned it meanwhile
        reason = str(error)
    if not int(all_reduce_(_number(reason is not None, mesh), mesh.world)):
        return result, None
    if mesh.world.is_first or (tell and reason is not None):
        show(f"skipping {folder}: {reason or 'damaged, says another rank'}")
    return None, reason or f"{folder}: damaged, says another rank"


def _candidates(roots: Sequence[Location], mesh: Mesh, step: int | None, later: bool) -> list[tuple[int, int]]:
    """(step, number of its root), ascending; on rank 0."""
    found: list[tuple[int, int]] = []
    error: Exception | None = None
    if mesh.world.is_first:
        try:
            found = sorted((n, number) for number, root in enumerate(roots) for n in storage_of(root).steps_in(root))
        except OSError as e:
            error = e
    agree(error, mesh, f"looking for checkpoints in {' and '.join(map(str, roots))}")
    return [(n, number) for n, number in found if step is None or n == step or (later and n > step)]


def _refuse_differences(folder: Location, manifest: Manifest, want: Wanted, mesh: Mesh) -> None:
    lines = [*want.problems, *differences(manifest, want.pieces, want.exact)]
    if int(all_reduce_(_number(len(lines), mesh), mesh.world, dist.ReduceOp.MAX)) > 0:
        kind = CheckpointError if lines else ElsewhereError
        raise kind(f"{folder} does not fit this model:\n  " + "\n  ".join(lines or ["see another rank"]))


def fill(folder: Location, manifest: Manifest, pieces: Sequence[Piece], mesh: Mesh, *, exact: bool = False) -> None:
    """Write the checkpoint's values into the pieces' data, checking every block on the way; collective. Raises
    CheckpointError: on all ranks before anything changes where they do not fit, later where a block is damaged."""
    _refuse_differences(folder, manifest, Wanted(pieces, exact), mesh)
    with storage_of(folder).reading(folder):
        fill_pieces(folder, manifest, pieces)
