"""A start checks its options once and makes one arrangement, which everything is built from and told of; sizes of steps
are a pure function of the samples consumed."""

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
from train_cases import SMALL, config_from, pretrain

import pretrain_gpt
from megalite.config.validation import check
from megalite.launch.ranks import Ranks
from megalite.pipeline.schedule import in_flight, plan
from megalite.pipeline.simulate import simulate
from megalite.plan import kinds
from megalite.plan.arrangement import Arrangement, arrange
from megalite.plan.batch_size import BatchSizes
from megalite.plan.kinds import kinds_of, layers_bill
from megalite.plan.partition import splits
from megalite.train.tell.run_dir import Exit

ONCE: dict[CodeType, str] = {
    check.__code__: "check",
    arrange.__code__: "arrange",
    Arrangement.__init__.__code__: "Arrangement",
    Arrangement._holding.__code__: "stages on the meta device",
    simulate.__code__: "simulate",
}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often those of ONCE are called."""
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
def test_a_start_checks_and_arranges_once(tmp_path: Path, flags: str) -> None:
    words = [*SMALL, "--train-iters", "2", "--eval-iters", "1", "--run-dir", str(tmp_path), *flags.split()]
    config = config_from(words)
    with counted() as calls:
        assert pretrain(config, Ranks()) == Exit.DONE
    assert calls == dict.fromkeys(ONCE.values(), 1)


def test_a_command_line_is_checked_at_the_door_and_once_more_with_what_its_files_say() -> None:
    with counted() as calls:
        assert pretrain_gpt.main([*SMALL, "--train-iters", "2", "--dry-run"]) == Exit.DONE
    assert calls["check"] == 2 and calls["arrange"] == 1


def test_what_nobody_asks_for_is_not_computed() -> None:
    made = arrange(config_from([*SMALL, "--train-iters", "2"]), 1, 93)
    assert {"holdings", "bubble", "activations", "in_flight"}.isdisjoint(vars(made))
    assert made.bubble == 0.0 and "bubble" in vars(made) and "holdings" not in vars(made)


@pytest.mark.parametrize(
    ("words", "line", "mark"),
    [
        ("--zero-stage 3", "stage 3: dp shares out optimizer, gradients, weights\n", "3 <- here  "),
        (
            "--zero-stage 3 --num-distributed-optimizer-instances 2",
            "stage 3: dp shares out optimizer, gradients, weights within each of 2 replicas of 4 ranks\n",
            "3 <- here, in 2 replicas ",
        ),
        (
            "--cp 2 --num-distributed-optimizer-instances 4",
            "stage 1: dp x cp shares out optimizer within each of 4 replicas of 2 ranks\n",
            "1 <- here, in 4 replicas ",
        ),
        (
            "--zero-stage 2 --num-distributed-optimizer-instances 4 --outer-dp-sharding-strategy optim",
            "stage 2: dp shares out optimizer, gradients within each of 4 replicas of 2 ranks, "
            "which share out the optimizer once more\n",
            "2 <- here, in 4 replicas ",
        ),
        (
            "--num-distributed-optimizer-instances 8",
            "stage 1: dp shares out optimizer within each of 8 replicas of 1 rank\n",
            "1 <- here, in 8 replicas ",
        ),
        ("--zero-stage 0 --num-distributed-optimizer-instances 2", "stage 0: dp shares out nothing\n", "0 <- here  "),
    ],
)
def test_a_dry_run_tells_the_replicas_of_hybrid_sharding(words: str, line: str, mark: str, capsys) -> None:
    flags = [*SMALL, "--train-iters", "2", "--global-batch-size", "16", "--nproc", "8", "--dry-run", *words.split()]
    assert pretrain_gpt.main(flags) == Exit.DONE
    text = capsys.readouterr().out
    assert re.search(r"^ZeRO {2,}(.*\n)", text, re.MULTILINE)[1] == line
    assert f"\n{mark}" in text


@pytest.mark.parametrize("backward", ["", "--split-backward"])
@pytest.mark.parametrize("chunks", ["", "--num-virtual-stages-per-pipeline-rank 2"])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_stages_are_balanced_by_the_time_of_the_whole_step(pp: int, chunks: str, backward: str) -> None:
    """None of the splits is more than the hundredth faster that memory may cost, unless it takes far more of it."""

    def made(layout: str) -> Arrangement:
        words = f"--preset llama3-8b --mock-data --train-iters 1 --lr 1 --bf16 --micro-batch-size 1 --pp {pp} {backward} {layout}"
        return arrange(config_from([*words.split(), "--global-batch-size", str(4 * pp)]), pp, 128256)

    def step_time(one: Arrangement) -> float:
        return 1 / (1 - one.bubble)

    def fullest(one: Arrangement) -> float:
        return max(held.state + kept for held, kept in zip(one.holdings, one.activations, strict=True))

    balanced = made(chunks)
    stages = len(balanced.stages)
    for split in splits(stages, [1] * 32):
        texts = ["t" * n for n in split]
        given = made(f"--pipeline-model-parallel-layout E{'|'.join(texts)}L")
        assert [len(layers) for layers in given.stages] == list(split)
        if step_time(balanced) > 1.0101 * step_time(given):
            assert fullest(given) > 1.1 * fullest(balanced), split


def test_chunks_of_an_interleaved_schedule_make_up_for_the_head() -> None:
    words = "--preset llama3-8b --mock-data --train-iters 1 --lr 1 --bf16 --micro-batch-size 1 --pp 8 --global-batch-size 32"
    even = "--num-layers-per-virtual-pipeline-stage 2"
    for flags, bubble in (("--num-virtual-stages-per-pipeline-rank 2", 0.2122), (even, 0.3470)):
        made = arrange(config_from(f"{words} {flags}"), 8, 128256)
        assert made.bubble == pytest.approx(bubble, abs=1e-4)


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
def test_what_is_told_of_a_long_step_is_what_the_whole_of_it_takes(flags: str) -> None:
    """The whole of it is not simulated: what waits for its weight gradients grows until it may not, and in GPipe the
    slowest of the forwards and the slowest of the backwards count, on whatever rank."""
    made = arrange(config_from([*SMALL, "--train-iters", "1", *flags.split()]), int(flags.split()[6]), 5000)
    p = made.config.parallel
    rows = plan(p.pipeline_schedule, made.pp, made.microbatches, made.chunks, None, made.split)
    assert made.rows(made.split, made.told)[0] < made.microbatches
    assert made.bubble == pytest.approx(simulate(rows, made.costs).bubble, abs=0.005)
    assert made.in_flight == [in_flight(row) for row in rows]


def test_a_layer_is_read_once_and_not_for_every_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 layers on 9 stages there are 100 splits, and one kind of layer."""
    read: list[Any] = []
    whole = kinds.Recorder.read
    monkeypatch.setattr(kinds.Recorder, "read", lambda self, *given: [read.append(self), whole(self, *given)][1])
    words = f"--num-layers 100 {LONG_STEPS} 3 --train-iters 1 --ffn-hidden-size 72"
    assert len(arrange(config_from([*SMALL, *words.split()]), 3, 5000).stages) == 3
    assert len(read) == 2  # and the head


def test_a_window_in_front_is_balanced_and_priced() -> None:
    """The first half of the layers sees 64 of 4,096 keys, so it computes less and has more layers."""
    words = "--num-layers 32 --pp 4 --seq-length 4096 --max-position-embeddings 4096 --train-iters 1 --hidden-size 64"
    words += " --global-batch-size 64 --micro-batch-size 1 --window-size 63,0 --window-attn-skip-freq [1]*16+[0]*16"
    made = arrange(config_from([*SMALL, *words.split()]), 4, 64)
    first, last = kinds_of(made.config.model)[0], kinds_of(made.config.model)[-1]
    narrow, wide = (layers_bill((kind,), made.layers.setting).flops[0] for kind in (first, last))
    assert narrow < 0.5 * wide
    assert made.counts[0] > made.counts[-2] and made.counts[1] > made.counts[2]


# ---- sizes of steps
sizes_of_steps = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 50)), max_size=6, unique_by=lambda step: step[0])
any_sizes = st.one_of(
    st.builds(
        lambda start, increment, k, samples: BatchSizes.ramp(start + k * increment, start, increment, samples),
        st.integers(1, 20),
        st.integers(1, 20),
        st.integers(0, 6),
        st.integers(0, 500),
    ),
    st.builds(BatchSizes.constant, st.integers(1, 50)),
    st.builds(lambda first, more: BatchSizes(((0, first), *sorted(more))), st.integers(1, 50), sizes_of_steps),
)


@given(any_sizes, st.integers(0, 60))
def test_consumed_and_steps_are_the_walk_over_the_sizes(sizes: BatchSizes, steps: int) -> None:
    consumed = [0]
    for _ in range(steps + 1):
        consumed.append(consumed[-1] + sizes.at(consumed[-1]))
    assert sizes.consumed_at(steps) == consumed[steps]
    whole = dataclasses.replace(sizes, last_whole=True)
    for samples in range(max(consumed[steps] - 5, 0), consumed[steps]):
        assert whole.steps_for(samples) == next(i for i, n in enumerate(consumed) if n >= samples)
    for samples in range(consumed[steps], min(consumed[steps + 1], consumed[steps] + 5)):
        assert sizes.steps_for(samples) == steps
    assert sizes.steps_for(consumed[steps + 1] - 1) == steps


def test_a_long_run_is_counted_without_walking_it() -> None:
    sizes = BatchSizes.ramp(1024, 256, 256, 10_000)
    walk = list(itertools.takewhile(lambda s: s < 10_000, (sizes.consumed_at(i) for i in range(100))))
    assert sizes.consumed_at(10**12) == sizes.consumed_at(len(walk)) + (10**12 - len(walk)) * 1024
    assert sizes.steps_for(sizes.consumed_at(10**12)) == 10**12


@pytest.mark.parametrize("ramp", [(8, 0, 10), (8, 7, 10), (40, 8, 10), (0, 8, 10), (-8, 8, 10), (8, 8, -1)])
def test_a_ramp_that_does_not_lead_to_the_batch_size(ramp: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="rampup_batch_size=.*global_batch_size=32"):
        BatchSizes.ramp(32, *ramp)
