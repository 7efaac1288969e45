"""A pipeline schedule: 1F1B whose stages run two more forwards ahead, so that a late message delays nobody.

megalite train --plugin examples/plugins/pipeline_schedule.py --pipeline-schedule eager --pp 2 --nproc 2 \
  --preset tiny --vocab-size 300 --mock-data \
  --train-iters 20 --eval-iters 2 --micro-batch-size 2 --global-batch-size 8 --save runs/eager

A schedule returns the computations of a rank in order. Messages, split backwards and the collectives of ZeRO are
inserted. Before a run, all ranks are simulated; a deadlock is refused, with the actions that wait for each other.
"""

from collections.abc import Sequence

import megalite
from megalite.pipeline.schedule import Action, Op, StagePlacement

EXTRA_FORWARDS = 2  # more than 1F1B runs ahead


@megalite.register("pipeline_schedule", "eager")
def eager(rank: int, placement: StagePlacement, groups: Sequence[int]) -> list[Action]:
    """Return the forwards and backwards of a pipeline rank."""
    if placement.vpp > 1:
        raise ValueError("pipeline_schedule=eager has one chunk per rank; drop the interleaved schedule")
    forwards, backwards = ([Action(op, rank, i) for i in range(sum(groups))] for op in (Op.F, Op.B))
    ahead = min(placement.pp - rank - 1 + EXTRA_FORWARDS, len(forwards))
    row = forwards[:ahead]
    for n, backward in enumerate(backwards):
        row += [*forwards[ahead + n : ahead + n + 1], backward]
    return row
