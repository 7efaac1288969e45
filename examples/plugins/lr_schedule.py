"""A learning-rate schedule: 1 - r^p from the peak to the minimum, where r runs from 0 to 1 during the decay.

With p = 2 the decay is slow at first. p = 1/2 is the last phase of arXiv:2405.18392.

megalite train --plugin examples/plugins/lr_schedule.py --lr-decay-style power \
  --preset tiny --vocab-size 300 --mock-data \
  --train-iters 20 --eval-iters 2 --micro-batch-size 2 --global-batch-size 8 --save runs/power

`lr` has peak, minimum, warm_up and decay. `n`, warm_up and decay are counted in samples. The function is called during
the decay only: warmup and the rate after the decay are the same for all schedules.
"""

import megalite
from megalite.optim.lr import LrSchedule

POWER = 2.0


@megalite.register("lr_decay_style", "power")
def power(lr: LrSchedule, n: float) -> float:
    """Return the learning rate after n samples."""
    return lr.interpolate(1.0 - lr.decay_progress(n) ** POWER)
