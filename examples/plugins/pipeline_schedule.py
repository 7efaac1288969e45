"""A pipeline schedule: 1F1B whose first stages run some forwards more ahead, so that a late message stops nobody.

megalite train --plugin examples/plugins/pipeline_schedule.py --pipeline-schedule eager --pp 2 --nproc 2 \
  --preset tiny --vocab-size 300 --mock-data \
  --train-iters 20 --eval-iters 2 --micro-batch-size 2 --global-batch-size 8 --save runs/eager

A schedule says what a rank computes, in order; messages, the split of backward and what ZeRO gathers are put between.
Before a run all ranks' rows are run in simulated time: what would wait for ever is refused, with the actions that do.
"""

from collections.abc import Sequence

import megalite
from megalite.pipeline.schedule import Action, Op, StagePlacement

MORE = 2  # forwards ahead of those of 1F1B


@megalite.register("pipeline_schedule", "eager")
def eager(rank: int, place: StagePlacement, groups: Sequence[int]) -> list[Action]:
    if place.vpp > 1:
        raise ValueError("pipeline_schedule=eager has one chunk per rank; drop the interleaved schedule")
    forwards, backwards = ([Action(op, rank, i) for i in range(sum(groups))] for op in (Op.F, Op.B))
    ahead = min(place.pp - rank - 1 + MORE, len(forwards))
    row = forwards[:ahead]
    for n, backward in enumerate(backwards):
        row += [*forwards[ahead + n : ahead + n + 1], backward]
    return row
