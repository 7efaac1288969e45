"""A learning-rate schedule: 1 - r^p from peak to minimum, r being the part of the decay that is over. With p = 2
it is slow at first; p = 1/2 is the last phase of arXiv:2405.18392.

megalite train --plugin examples/plugins/lr_schedule.py --lr-decay-style power \
  --preset tiny --vocab-size 300 --mock-data \
  --train-iters 20 --eval-iters 2 --micro-batch-size 2 --global-batch-size 8 --save runs/power

`lr` has peak, minimum, warm_up, decay, counted in samples as `n` is. Warm-up, and what follows the decay, are not asked
for here: they are the same for all schedules.
"""

import megalite
from megalite.optim.lr import LrSchedule

POWER = 2.0


@megalite.register("lr_decay_style", "power")
def power(lr: LrSchedule, n: float) -> float:
    return lr.interpolate(1.0 - lr.decay_progress(n) ** POWER)
