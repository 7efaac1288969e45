"""One training step: the scale of the loss changes no result, and a step that is skipped changes nothing."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from train_cases import copy_state, is_equal, run_from

from megalite.common import fault_injection as faults
from megalite.data.datasets.batches import Batches, MicroBatch
from megalite.training.state import Run, StepResult
from megalite.training.train_step import train_step

BATCH, LR, WARM_UP = 4, 0.01, 8
SMALL = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2
 --global-batch-size {BATCH} --train-iters 100 --lr {LR} --lr-warmup-iters {WARM_UP} --mock-data --vocab-size 40
 --make-vocab-size-divisible-by 8 --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.2 --eval-iters 0"""


def build(flags: str) -> Run:
    return run_from(f"{SMALL} {flags}")


def updates_of(flags: str, steps: int) -> tuple[list[StepResult], Tensor]:
    """Return the results of the steps, and the change of the main weights."""
    run = build(flags)
    before = torch.cat([bucket.main for bucket in run.optimizer.buckets])  # a copy
    results = [train_step(run) for _ in range(steps)]
    return results, torch.cat([bucket.main for bucket in run.optimizer.buckets]) - before


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("scale", [1, 1024])
def test_fp16_equals_fp32_at_any_scale(scale: int, clip: float) -> None:
    """Use SGD, whose update shows the size of the gradient. Measured: loss 1.4e-4, norm 2.6e-4, weights 2.8e-3."""
    flags = f"--optimizer sgd --lr 0.05 --lr-warmup-iters 0 --clip-grad {clip}"
    expected, moved = updates_of(flags, 3)
    actual, moved_16 = updates_of(f"{flags} --fp16 --loss-scale {scale}", 3)
    assert all(result.grad_norm > 1.5 for result in expected)  # clipping to 1 bites
    for a, b in zip(actual, expected, strict=True):
        assert (a.loss, a.grad_norm) == pytest.approx((b.loss, b.grad_norm), rel=2e-3)
        assert a.lr == b.lr and not a.skipped
    assert (moved_16 - moved).abs().max() < 0.02 * moved.abs().max()


def test_overflow_steps_change_nothing_until_the_scale_fits() -> None:
    run = build("--fp16 --initial-loss-scale 67108864 --hysteresis 1")
    initial, skipped = copy_state(run), 0
    while (result := train_step(run)).skipped:
        skipped += 1
        assert is_equal(copy_state(run), initial)
        assert run.loss_scaler.scale == 2.0 ** (26 - skipped)
        assert run.progress.skipped_steps == skipped and run.progress.consumed_samples == skipped * BATCH
        assert result.lr == 0.0  # the rate of the first update, which is still to come
    assert 2 <= skipped <= 20
    assert result.lr == LR / WARM_UP and run.optimizer.num_updates == 1 and math.isfinite(result.grad_norm)
    assert run.progress.skipped_samples == skipped * BATCH and run.progress.consumed_samples == (skipped + 1) * BATCH

    twin = build(f"--fp16 --loss-scale {run.loss_scaler.scale}")  # from the start with the scale that fits
    for _ in range(skipped):
        twin.progress.advance(BATCH, tokens=0, skipped=True)
    assert train_step(twin).loss == result.loss
    assert is_equal(copy_state(run), copy_state(twin))


def _overflows_on_the_way(layout: str) -> None:
    run, twin = (build(f"--fp16 --initial-loss-scale 1024 --hysteresis 2 {layout}") for _ in range(2))
    for _ in range(2):
        train_step(run)
        train_step(twin)
    before = copy_state(run)
    run.loss_scaler.scale = 2.0**60
    assert train_step(run).skipped
    assert is_equal(copy_state(run), before) and run.loss_scaler.scale == 2.0**60  # the first of two lives
    run.loss_scaler.scale = 1024.0
    twin.progress.advance(BATCH, tokens=0, skipped=True)
    for _ in range(2):
        a, b = train_step(run), train_step(twin)
        assert (a.loss, a.grad_norm, a.lr) == (b.loss, b.grad_norm, b.lr)
    assert a.lr == LR * 4 / WARM_UP
    assert is_equal(copy_state(run), copy_state(twin))


def test_overflow_step_is_equal_to_skipping_its_samples() -> None:
    _overflows_on_the_way("")
    run_ranks(2, _overflows_on_the_way, "--pipeline-model-parallel-size 2 --split-backward")


def test_loss_scale_growth_changes_no_result() -> None:
    flags = "--fp16 --adam-eps 1e-3"
    run = build(f"{flags} --initial-loss-scale 256 --loss-scale-window 2")
    scales, results = [], []
    for _ in range(5):
        results.append(train_step(run))
        scales.append(run.loss_scaler.scale)
    assert scales == [256, 512, 512, 1024, 1024]
    constant, _ = updates_of(f"{flags} --loss-scale 256", 5)
    for a, b in zip(results, constant, strict=True):
        assert (a.loss, a.grad_norm) == pytest.approx((b.loss, b.grad_norm), rel=1e-4)


def _one_rank_overflows(flags: str) -> list[Any]:
    """Train three steps; in the second the gradients of the last rank alone become infinite."""
    run, steps = build(flags), []
    finish = run.sync.finish_grad_sync

    def finish_and_overflow() -> None:
        finish()
        if run.progress.step == 1 and run.mesh.world.is_last:
            run.sync.grad_buckets[0].owned[0] = math.inf

    run.sync.finish_grad_sync = finish_and_overflow  # type: ignore[method-assign]
    for step in range(3):
        run.sync.wait_param_sync()
        before = copy_state(run)
        result = train_step(run, want_stop=step == 2 and run.mesh.world.is_last)
        run.sync.wait_param_sync()
        steps.append((result.loss, result.lr, result.skipped, result.stop, is_equal(copy_state(run), before)))
    return steps


@pytest.mark.parametrize("flags", ["--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2", ""])
def test_all_ranks_decide_equally(flags: str) -> None:
    """Let a single rank overflow, and a single rank ask for the stop."""
    flags += " --fp16 --loss-scale 64 --no-check-for-nan-in-loss-and-grad"
    one, other = run_ranks(2, _one_rank_overflows, flags)
    assert one == other
    assert [step[2:] for step in one] == [(False, False, False), (True, False, True), (False, True, False)]
    assert [lr for _, lr, *_ in one] == [LR * step / WARM_UP for step in (1, 1, 2)]  # rates of the next update


StepOutcome = tuple[bool, bool, float, int]  # (skipped, nothing changed, next learning rate, consumed samples)


def inject_from_now_on(rank: int | None, kind: str) -> None:
    """Inject `kind` into the reduced gradients of `rank` from now on, also when a step is recomputed."""
    variables = {} if rank is None else {faults.FAULT_VARIABLE: f"step.after_reduce:{rank}:*:{kind}"}
    faults.inject_fault.__init__(variables)  # type: ignore[misc]


def _each_rank_in_turn(flags: str) -> list[StepOutcome]:
    """Put one NaN or infinity into the reduced gradients of each rank in turn: of rank r in step r + 2.

    The first and the last step are finite.
    """
    world, outcomes = dist.get_world_size(), list[StepOutcome]()
    kinds = ("nan", "inf")
    run = build(f"{flags} --no-check-for-nan-in-loss-and-grad")
    for step in range(1, world + 3):
        inject_from_now_on(step - 2 if 1 < step < world + 2 else None, kinds[step % 2])
        run.sync.wait_param_sync()
        before = copy_state(run)
        result = train_step(run)
        run.sync.wait_param_sync()
        outcomes.append((result.skipped, is_equal(copy_state(run), before), result.lr, run.progress.consumed_samples))
    return outcomes


@pytest.mark.parametrize(
    "flags",
    ["--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", "--global-batch-size 8"],
    ids=["tp2 pp2", "dp4"],
)
def test_all_ranks_skip_a_non_finite_step(flags: str) -> None:
    first, *others = run_ranks(4, _each_rank_in_turn, flags)
    assert all(other == first for other in others)
    assert [outcome[:2] for outcome in first] == [(False, False), *[(True, True)] * 4, (False, False)]
    # the warmup does not count skipped steps
    assert [lr for *_, lr, _ in first] == [first[0][2]] * 5 + [2 * first[0][2]]
    size = first[0][3]
    assert [samples for *_, samples in first] == [size * (i + 1) for i in range(6)]  # skipped samples are not repeated


class MaskedBatches(Batches):
    """Batches in which no label of the samples in `hides` counts."""

    hides: set[int]

    def at(self, consumed: int, global_batch_size: int) -> list[MicroBatch]:
        micros = super().at(consumed, global_batch_size)
        masks = [np.repeat([[i not in self.hides] for i in m.sample_ids], self.dataset.seq_length, 1) for m in micros]
        return [replace(m, loss_mask=mask.astype(np.float32)) for m, mask in zip(micros, masks, strict=True)]


def _steps_without_labels(flags: str, hides: set[int]) -> tuple[list[Any], bool]:
    """Train four steps in which the samples in `hides` have no labels.

    Returns: (skipped, labels, loss, gradient norm) of each step; whether exactly the steps without labels changed nothing.
    """
    run = build(flags)
    run.train_loader.batches.__class__, run.train_loader.batches.hides = MaskedBatches, hides  # type: ignore[attr-defined]
    results: list[Any] = []
    unchanged = True
    for _ in range(4):
        before = copy_state(run)
        result = train_step(run)
        results.append((result.skipped, result.labels, result.loss, result.grad_norm))
        unchanged &= is_equal(copy_state(run), before) if result.labels == 0 else not is_equal(copy_state(run), before)
    return results, unchanged


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, "--micro-batch-size 1"),
        (2, "--pipeline-model-parallel-size 2 --micro-batch-size 1"),
        (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 2"),
        (2, "--context-parallel-size 2"),
        (2, "--num-experts 4 --moe-aux-loss-coeff 0.1 --ep 2 --swiglu --disable-bias-linear --micro-batch-size 1"),
    ],
    ids=["dp2", "pp2", "tp2 pp2", "cp2", "dp2 ep2"],
)
def test_step_without_labels_updates_nothing(world: int, flags: str) -> None:
    """Hide samples 0 and 2, those of a dp rank; 4 to 7, a full step; 8 to 10, all micro-batches except the last."""
    hides = {0, 2, 4, 5, 6, 7, 8, 9, 10}
    single_flags = flags.replace("--ep 2", "") if "experts" in flags else "--micro-batch-size 1"
    expected, unchanged = _steps_without_labels(single_flags, hides)
    assert unchanged and [(skipped, labels) for skipped, labels, *_ in expected] == [
        (False, 32), (True, 0), (False, 16), (False, 64)
    ]  # fmt: skip
    for actual, unchanged in run_ranks(world, _steps_without_labels, flags, hides):
        assert unchanged
        for (skipped, labels, *rest), (twin_skipped, twin_labels, *twin_rest) in zip(actual, expected, strict=True):
            assert (skipped, labels) == (twin_skipped, twin_labels)
            assert rest == pytest.approx(twin_rest, rel=1e-4)
