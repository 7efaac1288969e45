"""An optimizer: Lion (arXiv:2302.06675), w -= lr (sign(b1 m + (1 - b1) g) + decay w), then m = b2 m + (1 - b2) g.

megalite train --plugin examples/plugins/optimizer.py --optimizer lion --adam-beta1 0.9 --adam-beta2 0.99 --lr 1e-4 \
  --preset tiny --vocab-size 300 --mock-data \
  --train-iters 20 --eval-iters 2 --micro-batch-size 2 --global-batch-size 8 --save runs/lion

A rule updates flat tensors, the shard of a bucket that a rank owns, so it must be elementwise. Sharding by every ZeRO
stage and checkpoints need nothing else. `state_dtypes` names the state tensors, which the planner counts.
"""

from dataclasses import dataclass

import torch

import megalite
from megalite.config.run_options import OptimConfig
from megalite.optim.update_rule import ParamUpdate


@megalite.register("optimizer", "lion")
@dataclass(frozen=True)
class Lion:
    betas: tuple[float, float]

    @classmethod
    def from_config(cls, config: OptimConfig) -> "Lion":
        return cls((config.adam_beta1, config.adam_beta2))

    @property
    def state_dtypes(self) -> dict[str, torch.dtype | None]:
        return {"exp_avg": None}  # None: in the dtype of the main weights

    @torch.no_grad()
    def update_(self, update: ParamUpdate) -> None:
        beta1, beta2 = self.betas
        exp_avg = update.state["exp_avg"]
        grad = update.grad.mul_(update.scale)
        step = exp_avg.lerp(grad, 1 - beta1).sign_().add_(update.param, alpha=update.weight_decay)
        exp_avg.lerp_(grad, 1 - beta2)
        update.param.add_(step, alpha=-update.lr)
        if update.model_param is not None:  # the weights in the model's dtype are separate tensors
            update.model_param.copy_(update.param)
