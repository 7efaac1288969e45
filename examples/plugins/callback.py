"""A callback: says at the end of a run how many updates there were; and a metric of each step.

megalite train --plugin examples/plugins/callback.py --preset tiny --vocab-size 300 --mock-data \
  --train-iters 20 --eval-iters 2 --micro-batch-size 2 --global-batch-size 8 --save runs/counted

Its methods are moments of a run, called on every rank; it has those that it wants of begin, step, evaluated, saved and
end. An error in one ends the run. The metric is metric/updates in metrics.jsonl, TensorBoard and W&B.
"""

from typing import Any

import megalite

megalite.register("metric", "updates", "step")


@megalite.register("callback", "counting")
class Counting:
    def step(self, run: Any, result: Any) -> None:
        megalite.log("updates", float(run.optimizer.updates))

    def end(self, run: Any, outcome: str) -> None:
        if run.mesh.world.is_first:
            print(f"counting: {outcome} after {run.optimizer.updates} updates")
