"""A metric of each layer: the fraction of an activation's outputs that are almost zero.

megalite train --plugin examples/plugins/metric.py --activation watched_gelu \
  --preset tiny --vocab-size 300 --mock-data \
  --train-iters 20 --eval-iters 2 --micro-batch-size 2 --global-batch-size 8 --save runs/quiet

The metric goes to metrics.jsonl (metric/quiet, and metric/quiet/layers with a number for each layer), to TensorBoard
and W&B. It is a mean over elements, micro-batches and ranks.
"""

from torch import Tensor

import megalite
from megalite.kernels.activation import Activation, get_activation

GELU = get_activation("gelu_erf")

megalite.register("metric", "quiet", "layer")


def forward(u: Tensor) -> Tensor:
    """Return gelu(u), and log the fraction of its elements below 0.01."""
    a = GELU.forward(u)
    megalite.log("quiet", (a.abs() < 0.01).float())  # each element counts 1
    return a


megalite.register("activation", "watched_gelu", Activation(forward, GELU.backward))
