"""The gradient noise scale: the batch size at which the noise of a gradient is as large as the gradient.

    s_i   the sum of the gradients of the n_i labels of data-parallel rank i, before the reduction
    s     their sum over all ranks, with N labels
    G     the expected gradient of a label, tr the trace of the covariance of the labels' gradients

    E |s_i|^2 = n_i tr + n_i^2 |G|^2        E |s|^2 = N tr + N^2 |G|^2

Solved for the two unknowns, with sums over the ranks (arXiv:1812.06162, appendix A.1, has ranks of equal size):

    |G|^2 = (|s|^2 - sum |s_i|^2) / (N^2 - sum n_i^2)        tr = (sum |s_i|^2 - |G|^2 sum n_i^2) / N

Both are unbiased, and their ratio tr / |G|^2 is the noise scale, in labels. A step's estimates are noisy, so each has a
moving mean. The batch of a rank is made of complete samples: a correlation of the labels in a sample raises tr.

Only weights count whose gradient a rank has for all of its labels: not experts, nor norms, biases and projections that
each tp rank computes for its part of the sequence, nor weights that two pipeline stages share.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.kernels.grad_norm import sum_of_squares
from megalite.optim.distributed_optimizer import DistributedOptimizer
from megalite.optim.zero.grad_bucket import GradBucket
from megalite.optim.zero.layout import BucketKey

MEAN_DECAY = 0.95  # of the moving means: about the last 20 steps


@dataclass(frozen=True)
class NoiseSums:
    """The sums of a step over all ranks."""

    local_norm_sq: float  # sum |s_i|^2
    norm_sq: float  # |s|^2
    labels: float  # N
    labels_sq: float  # sum n_i^2

    def estimate(self) -> tuple[float, float] | None:
        """Return (|G|^2, tr), or None if less than two ranks have labels."""
        pairs = self.labels**2 - self.labels_sq
        if pairs <= 0:
            return None
        grad_sq = (self.norm_sq - self.local_norm_sq) / pairs
        return grad_sq, (self.local_norm_sq - grad_sq * self.labels_sq) / self.labels


class NoiseScale:
    """The noise scale of a run.

    Attributes:
        mean_grad_sq, mean_trace: The moving means of the estimates of the steps.
    """

    def __init__(self, optimizer: DistributedOptimizer):
        self._buckets = [bucket for bucket in optimizer.buckets if _has_all_labels(bucket.layout.key)]
        self._local_norm_sq = torch.zeros((), dtype=torch.float64, device=optimizer.sync.mesh.device)
        self.mean_grad_sq = 0.0
        self.mean_trace = 0.0

    def start_step(self) -> None:
        """Forget the gradients of the step before."""
        self._local_norm_sq.zero_()

    def add_local_gradients(self, bucket: GradBucket) -> None:
        """Add the gradients of a bucket that contain the sum of this rank (BucketSync.pre_reduce_hook)."""
        if _has_all_labels(bucket.layout.key):
            self._local_norm_sq += sum_of_squares(bucket.full) / bucket.layout.key.replicas

    def local_sums(self) -> Tensor:
        """Return this rank's summands of `local_norm_sq` and `norm_sq`, after the reduction of the gradients."""
        norm_sq = torch.zeros_like(self._local_norm_sq)
        for bucket in self._buckets:
            norm_sq += sum_of_squares(bucket.grads.owned_sums) / bucket.sharding.num_owners
        return torch.stack((self._local_norm_sq, norm_sq))

    def update(self, sums: NoiseSums, grad_scale: float) -> None:
        """Add a step to the moving means.

        Args:
            sums: The sums of the step.
            grad_scale: The factor of the gradients in the sums, which may differ between steps.
        """
        estimate = sums.estimate()
        if estimate is None:
            return
        grad_sq, trace = (value / grad_scale**2 for value in estimate)
        self.mean_grad_sq += (1 - MEAN_DECAY) * (grad_sq - self.mean_grad_sq)
        self.mean_trace += (1 - MEAN_DECAY) * (trace - self.mean_trace)

    @property
    def labels(self) -> float | None:
        """The noise scale, in labels; None while the noise hides the gradient or the gradient the noise."""
        if self.mean_grad_sq <= 0 or self.mean_trace <= 0:
            return None
        return self.mean_trace / self.mean_grad_sq


def _has_all_labels(key: BucketKey) -> bool:
    """Return True if a rank has the gradient of these weights for all of its labels."""
    return key.mesh_view == "dense" and not key.partial_grad_axes and not key.tied
