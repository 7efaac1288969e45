"""Reduction of gradients in bf16 and fp16 over dp: what it changes in a training."""

from typing import Any

import pytest
import torch
from ranks import run_ranks
from train_cases import SMALL_RUN, run_from

from megalite.training.train_step import train_step

FP16 = "--fp16 --hysteresis 1"


def _train(flags: str, steps: int) -> tuple[list[Any], bytes]:
    """Return (loss, skipped, loss scale) of each step, and the bytes of this rank's weights."""
    run = run_from([*SMALL_RUN, *f"--train-iters {steps} --lr-decay-iters {steps} {flags}".split()])
    steps_done = []
    for _ in range(steps):
        result = train_step(run)
        steps_done.append((result.loss, result.skipped, run.loss_scaler.scale))
    run.sync.wait_param_sync()
    weights = torch.cat([bucket.full for bucket in run.sync.param_buckets])
    return steps_done, weights.view(torch.uint8).numpy().tobytes()


@pytest.mark.presubmit
def test_sum_that_overflows_fp16_skips_the_step_on_all_ranks() -> None:
    """At a loss scale of 2^19 the gradients fit in fp32 and not in fp16, and at 2^18 in both."""
    flags = f"{FP16} --initial-loss-scale {2**19}"
    (exact, _), _ = run_ranks(2, _train, flags, 2)
    (one, weights), (two, weights_of_two) = run_ranks(2, _train, f"{flags} --grad-reduce-in-fp16", 2)
    assert [skipped for _, skipped, _ in exact] == [False, False]
    assert [(skipped, scale) for _, skipped, scale in one] == [(True, 2.0**18), (False, 2.0**18)]
    assert one == two and weights == weights_of_two


@pytest.mark.nightly(guards=("megalite/optim/zero/grad_bucket.py", "megalite/optim/zero/sharding.py"))
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("precision", "option"), [("--bf16", "bf16"), (f"{FP16} --initial-loss-scale 65536", "fp16")])
def test_reduction_in_half_precision_converges_as_in_fp32(precision: str, option: str) -> None:
    """The mean loss of the last 20 of 150 steps, from 4.56 to 2.58, is the same to 0.002.

    Measured differences are 7e-5 (bf16) and 3e-5 (fp16); another seed changes it by 0.015.
    """
    flags = f"{precision} --lr 3e-3 --lr-warmup-iters 10"
    means = []
    for reduction in ("", f"--grad-reduce-in-{option}"):
        (steps, weights), (_, weights_of_two) = run_ranks(2, _train, f"{flags} {reduction}", 150, timeout=500)
        assert weights == weights_of_two and not any(skipped for _, skipped, _ in steps)
        means.append(sum(loss for loss, _, _ in steps[-20:]) / 20)
    assert means[0] != means[1] and abs(means[0] - means[1]) < 0.002 and means[0] < 2.7 < 4.5 < steps[0][0]
