"""A metric of each layer, how much of an activation's output is as good as nothing; and a callback with one of a step.

megalite train --plugin examples/plugins/metric.py --activation watched_gelu ...

The metric goes to metrics.jsonl (metric/quiet, and metric/quiet/layers with a number for each layer), to TensorBoard
and W&B. It is a mean over elements, micro-batches and ranks. The callback's methods are moments of a run, on every
rank.
"""

from typing import Any

from torch import Tensor

import megalite
from megalite.kernels.activation import Activation, activation_named

GELU = activation_named("gelu_erf")

megalite.register("metric", "quiet", "layer")


def forward(u: Tensor) -> Tensor:
    a = GELU.forward(u)
    megalite.log("quiet", (a.abs() < 0.01).float())  # each element counts 1
    return a


megalite.register("activation", "watched_gelu", Activation(forward, GELU.backward))
megalite.register("metric", "updates", "step")


@megalite.register("callback", "counting")
class Counting:
    def step(self, run: Any, result: Any) -> None:
        megalite.log("updates", float(run.optimizer.updates))

    def end(self, run: Any, outcome: str) -> None:
        if run.mesh.world.is_first:
            print(f"counting: {outcome} after {run.optimizer.updates} updates")
