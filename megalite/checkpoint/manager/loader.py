"""Loads the newest checkpoint of a directory that is whole on all ranks, or the one before it.

Before any parameter changes, it is known that the files exist, have their size and hold what the model needs; all
differences are listed at once. Every block with a value for this rank is read once, and its hash is checked before the
value counts; where one is wrong, the checkpoint before it is loaded.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from megalite.checkpoint.format.manifest import Manifest, load_complete_manifest
from megalite.checkpoint.format.reader import CheckpointReader, mismatches
from megalite.checkpoint.manager.collective import run_on_all_ranks
from megalite.checkpoint.storage.location import CheckpointError, Location, OtherRankError, parse_location
from megalite.checkpoint.storage.storage import checkpoint_dir, storage_of
from megalite.config.console import print_err
from megalite.parallel.comm import all_reduce_int, broadcast_int
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import TensorShard

T = TypeVar("T")


class LoadPlan(NamedTuple):
    """The pieces to fill from a checkpoint. `exact`: dtypes are not converted; `tell`: title of a load in the log."""

    pieces: Sequence[TensorShard]
    exact_dtype: bool = False
    tell: str | None = None


def load_newest(
    directory: str | Location,
    mesh: Mesh,
    wanted: Callable[[Location, Manifest], LoadPlan],
    step: int | None = None,
    *,
    later: bool = False,
    first: str | Location | None = None,
) -> tuple[Location, Manifest] | None:
    """Fill pieces from the newest valid checkpoint of `directory`, or that of `step`: (its folder, its manifest), None
    where there is none at all. Collective, and so may be `wanted`, which is called for a checkpoint with a valid
    manifest and all files; an error of it, or a piece that does not fit, ends the load before anything changes. When
    some rank meets a wrong hash, the pieces are filled from the checkpoint before; where there is none, CheckpointError
    is raised and they are NaN, so that nothing can continue with a mixture. It is raised too where `step` does not
    exist. `later`: steps after `step` will do as well. `first`: another directory, preferred if both hold it."""
    roots = [parse_location(root) for root in (directory, first) if root is not None]
    candidates = _candidates(roots, mesh, step, later)
    reasons: list[str] = []
    begun: Sequence[TensorShard] = ()
    try:
        for place in range(broadcast_int(len(candidates), mesh)):
            newest, root = (broadcast_int(n, mesh) for n in (candidates[-1 - place] if candidates else (0, 0)))
            folder = checkpoint_dir(roots[root], newest)
            manifest, reason = _try(mesh, folder, False, partial(load_complete_manifest, folder))
            if manifest is not None:
                want = wanted(folder, manifest)
                lines = mismatches(manifest, want.pieces, want.exact_dtype)
                if all_reduce_int(len(lines), mesh):
                    kind, lines = (CheckpointError, lines) if lines else (OtherRankError, ["see another rank"])
                    raise kind(f"{folder} does not fit this model:\n  " + "\n  ".join(lines))
                begun = want.pieces
                _, reason = _try(
                    mesh, folder, True, partial(CheckpointReader(folder, manifest).fill, want.pieces, want.tell)
                )
                if reason is None:
                    return folder, manifest
            reasons.append(reason or "")
        kind = CheckpointError if mesh.world.is_first else OtherRankError
        if reasons:
            raise kind(f"load={str(directory)!r}: no checkpoint in it is valid; " + "; ".join(reasons))
        if step is not None:
            raise kind(f"load={str(directory)!r} holds no checkpoint of step {step}: choose another --ckpt-step")
        return None
    except BaseException:
        for piece in begun:
            if piece.data.is_floating_point():
                piece.data.detach().fill_(math.nan)
        raise


def _try(mesh: Mesh, folder: Location, tell: bool, do: Callable[[], T]) -> tuple[T | None, str | None]:
    """(result of `do`, None), or (None, reason) where it raises CheckpointError or OSError on any rank; collective.
    `tell`: ranks other than the first print their reasons too."""
    result, reason = None, None
    try:
        result = do()
    except (CheckpointError, OSError) as error:  # another run may have pruned it meanwhile
        reason = str(error)
    if not all_reduce_int(reason is not None, mesh):
        return result, None
    if mesh.world.is_first or (tell and reason is not None):
        print_err(f"skipping {folder}: {reason or 'damaged, as another rank found'}")
    return None, reason or f"{folder}: damaged, as another rank found"


def _candidates(roots: Sequence[Location], mesh: Mesh, step: int | None, later: bool) -> list[tuple[int, int]]:
    """(step, number of its root), ascending; on rank 0."""

    def look() -> list[tuple[int, int]]:
        numbered = enumerate(roots) if mesh.world.is_first else ()
        return sorted((n, number) for number, root in numbered for n in storage_of(root).steps_in(root))

    every = run_on_all_ranks(mesh, look, f"looking for checkpoints in {' and '.join(map(str, roots))}")
    return [(n, number) for n, number in every if step is None or n == step or (later and n > step)]
