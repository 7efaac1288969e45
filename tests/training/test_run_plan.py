"""A start validates its options once and makes one plan, from which everything is built and printed.

The batch size of a step is a pure function of the consumed samples.
"""

import dataclasses
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_cases import SMALL_RUN, config_from, pretrain

import pretrain_gpt
from megalite.common.exit_codes import ExitCode
from megalite.config.validation import find_problems
from megalite.launch.rank_info import RankInfo
from megalite.pipeline.schedule import build_schedule, peak_in_flight
from megalite.pipeline.simulate import simulate, simulate_all
from megalite.planning import layer_kinds as kinds
from megalite.planning.batch_size import BatchSizeSchedule
from megalite.planning.layer_kinds import layer_kinds, layers_cost
from megalite.planning.partition import candidate_splits
from megalite.planning.run_plan import ModelStates, RunPlan, make_run_plan
from megalite.planning.run_shape import RunShape

ONCE: dict[CodeType, str] = {
    find_problems.__code__: "check",
    make_run_plan.__code__: "plan",
    RunShape.__init__.__code__: "RunShape",
    ModelStates._state_of.__code__: "stages on the meta device",
    simulate_all.__code__: "simulate",
}


@contextmanager
def count_calls() -> Iterator[Counter[str]]:
    """Yield a counter of the calls of the functions in ONCE, by label."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in ONCE:
            calls[ONCE[frame.f_code]] += 1

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("flags", ["", "--dry-run"])
def test_startup_validates_and_plans_once(tmp_path: Path, flags: str) -> None:
    argv = [*SMALL_RUN, "--train-iters", "2", "--eval-iters", "1", "--run-dir", str(tmp_path), *flags.split()]
    config = config_from(argv)
    with count_calls() as calls:
        assert pretrain(config, RankInfo()) == ExitCode.DONE
    assert calls == dict.fromkeys(ONCE.values(), 1)


def test_command_line_is_validated_before_and_after_reading_files() -> None:
    with count_calls() as calls:
        assert pretrain_gpt.main([*SMALL_RUN, "--train-iters", "2", "--dry-run"]) == ExitCode.DONE
    assert calls["check"] == 2 and calls["plan"] == 1


def test_plan_is_lazy() -> None:
    plan = make_run_plan(config_from([*SMALL_RUN, "--train-iters", "2"]), 1, 93)
    assert {"bubble", "activation_bytes", "peak_in_flight"}.isdisjoint(vars(plan.balance))
    assert plan.balance.bubble == 0.0 and "bubble" in vars(plan.balance) and "model_states" not in vars(plan)


@pytest.mark.parametrize(
    ("flags", "line", "mark"),
    [
        ("--zero-stage 3", "stage 3, optimizer, gradients, weights sharded over dp\n", "3 <- here  "),
        (
            "--zero-stage 3 --num-distributed-optimizer-instances 2",
            "stage 3, optimizer, gradients, weights sharded over dp within each of 2 replicas of 4 ranks\n",
            "3 <- here, in 2 replicas ",
        ),
        (
            "--cp 2 --num-distributed-optimizer-instances 4",
            "stage 1, optimizer sharded over dp x cp within each of 4 replicas of 2 ranks\n",
            "1 <- here, in 4 replicas ",
        ),
        (
            "--zero-stage 2 --num-distributed-optimizer-instances 4 --outer-dp-sharding-strategy optim",
            "stage 2, optimizer, gradients sharded over dp within each of 4 replicas of 2 ranks, "
            "optimizer sharded over these too\n",
            "2 <- here, in 4 replicas ",
        ),
        (
            "--num-distributed-optimizer-instances 8",
            "stage 1, optimizer sharded over dp within each of 8 replicas of 1 rank\n",
            "1 <- here, in 8 replicas ",
        ),
        ("--zero-stage 0 --num-distributed-optimizer-instances 2", "stage 0, nothing sharded over dp\n", "0 <- here  "),
    ],
)
def test_dry_run_prints_hybrid_sharding_replicas(flags: str, line: str, mark: str, capsys) -> None:
    argv = [*SMALL_RUN, "--train-iters", "2", "--global-batch-size", "16", "--nproc", "8", "--dry-run", *flags.split()]
    assert pretrain_gpt.main(argv) == ExitCode.DONE
    text = capsys.readouterr().out
    assert re.search(r"^ZeRO {2,}(.*\n)", text, re.MULTILINE)[1] == line
    assert f"\n{mark}" in text


@pytest.mark.parametrize("backward", ["", "--split-backward"])
@pytest.mark.parametrize("chunks", ["", "--num-virtual-stages-per-pipeline-rank 2"])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_stages_are_balanced_by_step_time(pp: int, chunks: str, backward: str) -> None:
    """Compare all splits: one that is more than 1 % faster needs over 10 % more memory."""

    def plan_of(layout: str) -> RunPlan:
        flags = f"--preset llama3-8b --mock-data --train-iters 1 --lr 1 --bf16 --micro-batch-size 1 --pp {pp} {backward} {layout}"
        return make_run_plan(config_from([*flags.split(), "--global-batch-size", str(4 * pp)]), pp, 128256)

    def step_time(plan: RunPlan) -> float:
        return 1 / (1 - plan.balance.bubble)

    def fullest(plan: RunPlan) -> float:
        return max(
            state.total + activations
            for state, activations in zip(plan.model_states.by_rank, plan.balance.activation_bytes, strict=True)
        )

    balanced = plan_of(chunks)
    stages = len(balanced.balance.layer_ranges)
    for split in candidate_splits(stages, [1] * 32):
        texts = ["t" * n for n in split]
        candidate = plan_of(f"--pipeline-model-parallel-layout E{'|'.join(texts)}L")
        assert [len(layers) for layers in candidate.balance.layer_ranges] == list(split)
        if step_time(balanced) > 1.0101 * step_time(candidate):
            assert fullest(candidate) > 1.1 * fullest(balanced), split


def test_interleaved_chunks_compensate_for_the_head() -> None:
    base_flags = "--preset llama3-8b --mock-data --train-iters 1 --lr 1 --bf16 --micro-batch-size 1 --pp 8 --global-batch-size 32"
    even = "--num-layers-per-virtual-pipeline-stage 2"
    for flags, bubble in (("--num-virtual-stages-per-pipeline-rank 2", 0.2122), (even, 0.3470)):
        plan = make_run_plan(config_from(f"{base_flags} {flags}"), 8, 128256)
        assert plan.balance.bubble == pytest.approx(bubble, abs=1e-4)


LONG_STEPS = "--micro-batch-size 1 --global-batch-size 2000 --split-backward --pp"
ENDS = "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1"


@pytest.mark.parametrize(
    "flags",
    [
        f"{LONG_STEPS} 2 --zero-bubble-max-pending-backward 9",
        f"{LONG_STEPS} 4 --num-layers 24 {ENDS}",
        f"{LONG_STEPS} 2 --pipeline-schedule gpipe --no-split-backward",
        f"{LONG_STEPS} 2 --pipeline-schedule breadth-first --num-virtual-stages-per-pipeline-rank 2",
        f"{LONG_STEPS} 4",
    ],
)
def test_long_step_summary_equals_the_full_step(flags: str) -> None:
    """Compare with a simulation of all micro-batches.

    The number of deferred weight gradients grows up to its limit, and in GPipe the slowest forward and the slowest
    backward of any rank count.
    """
    plan = make_run_plan(config_from([*SMALL_RUN, "--train-iters", "1", *flags.split()]), int(flags.split()[6]), 5000)
    p = plan.config.parallel
    rows = build_schedule(
        p.pipeline_schedule,
        plan.shape.pp,
        plan.shape.num_microbatches,
        plan.shape.vpp,
        None,
        plan.balance.split_backward,
    )
    assert plan.balance.schedule.actions()[0] < plan.shape.num_microbatches
    assert plan.balance.bubble == pytest.approx(simulate(rows, plan.balance.costs_of_stages).bubble, abs=0.005)
    assert plan.balance.peak_in_flight == [peak_in_flight(row) for row in rows]


def test_layer_cost_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure a layer once although 100 layers of one kind have many splits over the stages."""
    recorders: list[Any] = []
    measure = kinds.CostRecorder.measure
    monkeypatch.setattr(
        kinds.CostRecorder, "measure", lambda self, *args: [recorders.append(self), measure(self, *args)][1]
    )
    flags = f"--num-layers 100 {LONG_STEPS} 3 --train-iters 1 --ffn-hidden-size 72"
    assert len(make_run_plan(config_from([*SMALL_RUN, *flags.split()]), 3, 5000).balance.layer_ranges) == 3
    assert len(recorders) == 2  # and the head


def test_leading_window_layers_are_balanced() -> None:
    """Give more layers to the first stages, whose layers see 64 of 4,096 keys and compute less."""
    flags = "--num-layers 32 --pp 4 --seq-length 4096 --max-position-embeddings 4096 --train-iters 1 --hidden-size 64"
    flags += " --global-batch-size 64 --micro-batch-size 1 --window-size 63,0 --window-attn-skip-freq [1]*16+[0]*16"
    plan = make_run_plan(config_from([*SMALL_RUN, *flags.split()]), 4, 64)
    first, last = layer_kinds(plan.config.model)[0], layer_kinds(plan.config.model)[-1]
    narrow, wide = (layers_cost((kind,), plan.balance.stage_costs.setting).flops[0] for kind in (first, last))
    assert narrow < 0.5 * wide
    assert (
        plan.balance.layers_per_stage[0] > plan.balance.layers_per_stage[-2]
        and plan.balance.layers_per_stage[1] > plan.balance.layers_per_stage[2]
    )


# ---- batch sizes of steps
sizes_of_steps = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 50)), max_size=6, unique_by=lambda step: step[0])
any_sizes = st.one_of(
    st.builds(
        lambda start, increment, k, samples: BatchSizeSchedule.ramp(start + k * increment, start, increment, samples),
        st.integers(1, 20),
        st.integers(1, 20),
        st.integers(0, 6),
        st.integers(0, 500),
    ),
    st.builds(BatchSizeSchedule.constant, st.integers(1, 50)),
    st.builds(lambda first, more: BatchSizeSchedule(((0, first), *sorted(more))), st.integers(1, 50), sizes_of_steps),
)


@given(any_sizes, st.integers(0, 60))
def test_consumed_samples_and_steps_equal_a_walk(sizes: BatchSizeSchedule, steps: int) -> None:
    consumed = [0]
    for _ in range(steps + 1):
        consumed.append(consumed[-1] + sizes.at(consumed[-1]))
    assert sizes.samples_after(steps) == consumed[steps]
    with_last_batch = dataclasses.replace(sizes, keep_last_batch=True)
    for samples in range(max(consumed[steps] - 5, 0), consumed[steps]):
        assert with_last_batch.num_steps_for(samples) == next(i for i, n in enumerate(consumed) if n >= samples)
    for samples in range(consumed[steps], min(consumed[steps + 1], consumed[steps] + 5)):
        assert sizes.num_steps_for(samples) == steps
    assert sizes.num_steps_for(consumed[steps + 1] - 1) == steps


def test_long_run_is_counted_in_closed_form() -> None:
    sizes = BatchSizeSchedule.ramp(1024, 256, 256, 10_000)
    walk = list(itertools.takewhile(lambda s: s < 10_000, (sizes.samples_after(i) for i in range(100))))
    assert sizes.samples_after(10**12) == sizes.samples_after(len(walk)) + (10**12 - len(walk)) * 1024
    assert sizes.num_steps_for(sizes.samples_after(10**12)) == 10**12


@pytest.mark.parametrize("ramp", [(8, 0, 10), (8, 7, 10), (40, 8, 10), (0, 8, 10), (-8, 8, 10), (8, 8, -1)])
def test_batch_ramp_that_misses_the_batch_size_is_refused(ramp: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="rampup_batch_size=.*global_batch_size=32"):
        BatchSizeSchedule.ramp(32, *ramp)
