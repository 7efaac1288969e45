"""A callback that prints the number of updates at the end of a run, and a metric that it logs at each step.

megalite train --plugin examples/plugins/callback.py --preset tiny --vocab-size 300 --mock-data \
  --train-iters 20 --eval-iters 2 --micro-batch-size 2 --global-batch-size 8 --save runs/counted

Its methods are events of a run, called on every rank: on_train_start, on_train_step_start, on_train_step_end, on_log,
on_eval_end, on_save_checkpoint and on_train_end; it defines those that it needs. An error in one ends the run. The
metric is metric/updates in metrics.jsonl, TensorBoard and W&B.
"""

from typing import Any

import megalite

megalite.register("metric", "updates", "step")


@megalite.register("callback", "counting")
class Counting:
    def on_train_step_end(self, run: Any, result: Any) -> None:
        megalite.log("updates", float(run.optimizer.num_updates))

    def on_train_end(self, run: Any, outcome: str) -> None:
        if run.mesh.world.is_first:
            print(f"counting: {outcome} after {run.optimizer.num_updates} updates")
