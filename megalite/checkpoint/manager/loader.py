"""Loading the newest checkpoint of a directory that is valid on all ranks, or the one before it.

Before any parameter changes, the files are known to exist, to have their sizes, and to contain what the model needs.
All mismatches are listed at once. Every block with a value for this rank is read once, and its hash is verified before
a value is used. If a block is damaged on any rank, the previous checkpoint is loaded.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from megalite.checkpoint.format.manifest import Manifest, load_complete_manifest
from megalite.checkpoint.format.reader import CheckpointReader, mismatches
from megalite.checkpoint.manager.collective import run_on_all_ranks
from megalite.checkpoint.storage.location import CheckpointError, Location, OtherRankError, parse_location
from megalite.checkpoint.storage.storage import checkpoint_dir, storage_of
from megalite.common.console import print_err
from megalite.parallel.comm import all_reduce_int, broadcast_int
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import TensorShard

T = TypeVar("T")


@dataclass(frozen=True)
class LoadPlan:
    """The shards to fill from a checkpoint.

    Attributes:
        shards: The shards.
        exact_dtype: Raise for a different stored dtype instead of converting values.
        progress_title: The title of the progress lines of the load; None logs no progress.
    """

    shards: Sequence[TensorShard]
    exact_dtype: bool = False
    progress_title: str | None = None


def load_newest(
    directory: str | Location,
    mesh: Mesh,
    make_plan: Callable[[Location, Manifest], LoadPlan],
    step: int | None = None,
    *,
    or_newer: bool = False,
    preferred: str | Location | None = None,
) -> tuple[Location, Manifest] | None:
    """Fill shards from the newest valid checkpoint of `directory`, or from the one of `step`.

    If some rank meets a wrong hash, the shards are filled from the previous checkpoint. Collective over all ranks.

    Args:
        directory: The --save directory.
        mesh: The mesh of the run.
        make_plan: Returns the shards to fill from (checkpoint directory, manifest), and may be collective. It is called
            for a checkpoint with a valid manifest and all files. If it raises, or a shard does not fit, the load ends
            before anything changes.
        step: The only step to load.
        or_newer: Also accept steps after `step`.
        preferred: Another directory, which is preferred if both have the checkpoint.

    Returns:
        (checkpoint directory, manifest), or None if there is no checkpoint at all.

    Raises:
        CheckpointError: `step` does not exist, or no checkpoint is valid. If shards were already being filled, they are
            set to NaN, so that nothing can continue with a mixture.
    """
    roots = [parse_location(path) for path in (directory, preferred) if path is not None]
    candidates = _candidates(roots, mesh, step, or_newer)
    reasons: list[str] = []
    filled: Sequence[TensorShard] = ()
    try:
        for index in range(broadcast_int(len(candidates), mesh)):
            candidate = candidates[-1 - index] if candidates else (0, 0)  # only rank 0 has candidates
            newest_step, root_index = (broadcast_int(n, mesh) for n in candidate)
            checkpoint = checkpoint_dir(roots[root_index], newest_step)
            manifest, reason = _try(mesh, checkpoint, False, partial(load_complete_manifest, checkpoint))
            if manifest is not None:
                plan = make_plan(checkpoint, manifest)
                problems = mismatches(manifest, plan.shards, plan.exact_dtype)
                if all_reduce_int(len(problems), mesh):
                    error_type = CheckpointError if problems else OtherRankError
                    problems = problems or ["the log of another rank names the problem"]
                    raise error_type(f"{checkpoint} does not fit this model:\n  " + "\n  ".join(problems))
                filled = plan.shards
                fill = partial(CheckpointReader(checkpoint, manifest).fill, plan.shards, plan.progress_title)
                _, reason = _try(mesh, checkpoint, True, fill)
                if reason is None:
                    return checkpoint, manifest
            reasons.append(reason or "")
        error_type = CheckpointError if mesh.world.is_first else OtherRankError
        if reasons:
            raise error_type(f"load={str(directory)!r}: no checkpoint in it is valid; " + "; ".join(reasons))
        if step is not None:
            raise error_type(f"load={str(directory)!r} holds no checkpoint of step {step}: choose another --ckpt-step")
        return None
    except BaseException:
        for shard in filled:
            if shard.data.is_floating_point():
                shard.data.detach().fill_(math.nan)
        raise


def _try(mesh: Mesh, checkpoint: Location, report_all: bool, action: Callable[[], T]) -> tuple[T | None, str | None]:
    """Call `action` and return (its result, None), or (None, reason) if it raises on any rank.

    Only CheckpointError and OSError are handled. With `report_all`, ranks other than the first print their reasons too.
    Collective over all ranks.
    """
    result, reason = None, None
    try:
        result = action()
    except (CheckpointError, OSError) as error:  # another run may have pruned it in the meantime
        reason = str(error)
    if not all_reduce_int(reason is not None, mesh):
        return result, None
    if mesh.world.is_first or (report_all and reason is not None):
        print_err(f"skipping {checkpoint}: {reason or 'damaged, as another rank found'}")
    return None, reason or f"{checkpoint}: damaged, as another rank found"


def _candidates(roots: Sequence[Location], mesh: Mesh, step: int | None, or_newer: bool) -> list[tuple[int, int]]:
    """Return (step, index of its root) of the checkpoints to try, ascending, on rank 0; [] on other ranks."""

    def list_checkpoints() -> list[tuple[int, int]]:
        numbered = enumerate(roots) if mesh.world.is_first else ()
        return sorted(
            (other_step, root_index) for root_index, root in numbered for other_step in storage_of(root).steps_in(root)
        )

    checkpoints = run_on_all_ranks(
        mesh, list_checkpoints, f"looking for checkpoints in {' and '.join(map(str, roots))}"
    )
    return [
        (other_step, root_index)
        for other_step, root_index in checkpoints
        if step is None or other_step == step or (or_newer and other_step > step)
    ]
