"""Learning rates, weight decay and batch sizes equal Megatron-LM's, also when they are counted in samples.

They are compared with a second implementation of the curves, and with numbers that Megatron-LM's own classes returned
(at d98e8a64 of August 2026; batch ramps, which it no longer has, at the commit before their removal).
"""

import math
from typing import Any

import pytest
import toml_tables
from hypothesis import given, settings
from hypothesis import strategies as st
from train_cases import config_from

from megalite.config.option_parsers import parse_batch_schedule
from megalite.config.options import Config, ConfigError
from megalite.config.validation import find_ineffective, find_problems
from megalite.optim.lr import LrSchedule, OptimSchedules, WeightDecaySchedule
from megalite.planning.batch_size import BatchSizeSchedule
from megalite.planning.run_plan import make_run_plan
from megalite.training.setup import build_schedules

EXPECTED = toml_tables.read_table("training/megatron_schedules")
expand = toml_tables.expander(EXPECTED["abbreviations"])
MODEL = """--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 16 --micro-batch-size 4 --mock-data
 --vocab-size 20"""


def parse(flags: str) -> Config:
    return config_from(f"{MODEL} {flags}")


def parse_schedule(text: str, flags: str) -> Config:
    argv = f"{MODEL} --lr 1e-3 {flags}".split()
    return config_from([*argv, "--step-batch-size-schedule", text])


def rates_of(config: Config, dp: int = 1) -> OptimSchedules:
    return build_schedules(make_run_plan(config, dp, 20))


def rate(s: LrSchedule, num_samples: float) -> float:
    """Return the rate of an update that follows updates of `num_samples` samples."""
    if num_samples <= s.warm_up and s.warm_up > 0:
        fraction = num_samples / s.warm_up
        return (1 - fraction) * s.warm_up_init + fraction * s.peak
    if s.style == "constant":
        return s.peak
    if num_samples > s.decay:
        return s.minimum
    if s.style == "inverse-square-root":
        return max(s.minimum, s.peak / math.sqrt(max(num_samples, 1) / max(s.warm_up, 1)))
    start = s.decay - s.wsd if s.style == "WSD" else s.warm_up
    progress = 0.0 if num_samples <= start else (num_samples - start) / (s.decay - start)
    remaining = {
        "linear": 1 - progress,
        "cosine": math.cos(progress * math.pi / 2) ** 2,
        "exponential": 2 ** (1 - progress) - 1,
        "minus_sqrt": 1 - progress**0.5,
    }[s.wsd_style if s.style == "WSD" else s.style]
    return remaining * s.peak + (1 - remaining) * s.minimum


def weight_decay(d: WeightDecaySchedule, num_samples: float) -> float:
    progress = 1.0 if d.style == "constant" else min(num_samples / d.samples, 1.0)
    growth = math.sin(progress * math.pi / 2) ** 2 if d.style == "cosine" else progress
    return (1 - growth) * d.start + growth * d.end


@settings(max_examples=300)
@given(
    st.sampled_from(["constant", "linear", "cosine", "inverse-square-root", "WSD"]),
    st.sampled_from(["exponential", "linear", "cosine", "minus_sqrt"]),
    st.sampled_from(["constant", "linear", "cosine"]),
    st.tuples(st.integers(0, 40) | st.floats(0, 40), st.integers(41, 200), st.integers(0, 40), st.integers(1, 200)),
    st.lists(st.tuples(st.integers(1, 16), st.booleans()), min_size=20, max_size=40),
)
def test_curves_use_the_samples_before_an_update(
    style: str, wsd_style: str, growth: str, samples: tuple[float, int, int, int], steps: list[tuple[int, bool]]
) -> None:
    """Draw steps of any size; skipped steps do not advance the curves."""
    warm_up, decay, wsd, growth_samples = samples
    wsd = min(wsd, int(decay - warm_up))
    lr = LrSchedule(3e-4, 3e-5, style, warm_up, decay, 1e-5, wsd, wsd_style)
    wd = WeightDecaySchedule(0.1 if growth == "constant" else 0.01, 0.1, growth, growth_samples)
    consumed, skipped = 0, 0
    for size, updates in steps:
        num_samples = consumed - skipped
        assert lr.at(num_samples) == pytest.approx(rate(lr, num_samples), rel=1e-11)
        assert wd.at(num_samples) == pytest.approx(weight_decay(wd, num_samples), rel=1e-11)
        consumed += size
        skipped += 0 if updates else size


def test_warmup_as_long_as_the_decay() -> None:
    lr = LrSchedule(peak=1.0, minimum=0.1, style="cosine", warm_up=10.0, decay=10.0)
    assert [lr.at(n) for n in (5, 10, 11)] == pytest.approx([0.5, 1.0, 0.1])
    no_last_phase = LrSchedule(peak=1.0, minimum=0.1, style="WSD", warm_up=0.0, decay=10.0, wsd=0.0)
    assert [no_last_phase.at(n) for n in (1, 10, 11)] == [1.0, 1.0, 0.1]


RUN = expand("RUN")
# indices of updates, from 0; the run has 20 steps, and may be resumed beyond them
UPDATES = (0, 1, 4, 7, 13, 17, 20, 23)


@pytest.mark.parametrize("expected", EXPECTED["rates"].values(), ids=EXPECTED["rates"])
def test_learning_rates_equal_megatrons(expected: dict[str, Any]) -> None:
    lr = rates_of(parse(expand(expected["flags"]))).lr
    samples_before = lambda step: 8 * (step - sum(s < step for s in expected.get("skipped", ())))  # noqa: E731
    for steps, name in ((UPDATES, "updates"), ((1, 5, 20), "logged")):
        assert [lr.at(samples_before(step)) for step in steps] == pytest.approx(expected[name], rel=1e-12)


def test_weight_decay_equals_megatrons() -> None:
    flags = f"{RUN.replace('20', '24')} --end-weight-decay 0.1"
    linear = rates_of(parse(f"{flags} --start-weight-decay 0.01 --weight-decay-incr-style linear")).weight_decay
    expected = EXPECTED["weight_decay"]["linear"]
    assert [linear.at(8 * step) for step in UPDATES] == pytest.approx(expected, rel=1e-12)
    cosine = rates_of(parse(f"{flags} --start-weight-decay 0 --weight-decay-incr-style cosine")).weight_decay
    expected = EXPECTED["weight_decay"]["cosine"]
    assert [cosine.at(8 * step) for step in (0, 3, 5, 11, 15)] == pytest.approx(expected, rel=1e-12)
    assert rates_of(parse(RUN)).weight_decay.at(5) == linear.at(8 * 25) == cosine.at(10**9) == 0.1


def test_decoupled_rates_equal_megatrons() -> None:
    cosine = rates_of(parse(f"{RUN} --lr-decay-style cosine --lr-warmup-iters 4 --decoupled-lr 5e-4")).decoupled
    expected = EXPECTED["decoupled"]
    assert [cosine.at(8 * step) for step in UPDATES] == pytest.approx(expected, rel=1e-12)
    with_minimum = rates_of(parse(f"{RUN} --decoupled-lr 5e-4 --decoupled-min-lr 1e-4")).decoupled
    assert with_minimum is not None and with_minimum.at(160) == with_minimum.at(161) == 1e-4


def walk(sizes: BatchSizeSchedule, steps: int) -> list[int]:
    consumed, result = 0, []
    for _ in range(steps):
        result.append(sizes.at(consumed))
        consumed += result[-1]
    assert sizes.samples_after(steps) == consumed
    return result


@pytest.mark.parametrize("final,ramp,expected", EXPECTED["ramps"])
def test_batch_ramps_equal_megatrons(final: int, ramp: list[int], expected: list[list[int]]) -> None:
    """Compare with `expected`: (batch size, number of steps) in order."""
    assert walk(BatchSizeSchedule.ramp(final, *ramp), 24) == [size for size, steps in expected for _ in range(steps)]


def test_batch_ramp_that_megatron_rounds() -> None:
    """Reach 30 of 54 increments over 477 samples at sample 265: 265 / (477 / 54) is 29.999999999999996."""
    sizes = BatchSizeSchedule.ramp(55, 1, 1, 477)
    assert [sizes.at(n) for n in (264, 265, 266, 477, 478)] == [30, 30, 31, 54, 55]


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 60), st.integers(1, 5000), st.data())
def test_batch_ramp_divides_samples_by_increments(
    start: int, increment: int, count: int, samples: int, data: st.DataObject
) -> None:
    sizes = BatchSizeSchedule.ramp(start + count * increment, start, increment, samples)
    n = data.draw(st.integers(0, 2 * samples))
    passed = count if n > samples else math.floor(n / (samples / count))
    assert sizes.at(n) == start + passed * increment


def test_batch_schedules_equal_megatrons() -> None:
    text = "0:4 1.5K:8 4k:16"
    config = parse_schedule(text, "--train-samples 1001")
    plan = make_run_plan(config, 1, 20)
    sizes = plan.shape.batch_sizes
    assert sizes.milestones == ((0, 4), (93, 8), (250, 16))
    assert walk(sizes, 36) == [4] * 24 + [8] * 12
    assert plan.shape.num_steps == 91 and plan.shape.total_samples == 1008
    assert [sizes.num_steps_for(n) for n in (100, 1001, 19_531_250)] == [25, 91, 1_220_732]
    published = parse_batch_schedule("0:384 200B:768 400B:1152", 4096)
    assert published == ((0, 384), (48_828_125, 768), (97_656_250, 1152))
    assert BatchSizeSchedule(published, keep_last_batch=True).num_steps_for(19_531_250) == 50_863


def test_iterations_with_a_batch_schedule_count_micro_batches() -> None:
    """Count micro_batch_size x dp samples per iteration, as Megatron-LM does, and suggest --train-samples in a note."""
    config = parse_schedule("0:8 1K:16", "--train-iters 100 --lr-warmup-iters 10")
    lr = rates_of(config, dp=2).lr
    assert (lr.warm_up, lr.decay) == (10 * 4 * 2, 100 * 4 * 2)
    assert make_run_plan(config, 2, 20).shape.eval_batch_size == 8
    assert any("--train-samples" in note for note in find_ineffective(config))
    by_samples = parse_schedule("0:8 1K:16", "--train-samples 900 --lr-warmup-samples 50")
    assert (rates_of(by_samples).lr.warm_up, rates_of(by_samples).lr.decay) == (50, 900)
    assert find_ineffective(by_samples) == []


@pytest.mark.parametrize("text,flags,problem", EXPECTED["no_schedules"])
def test_invalid_batch_schedule_is_refused(text: str, flags: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_schedule(text, f"--train-samples 100 {flags}")
    assert any(problem in line for line in error.value.problems), error.value.problems


def test_batch_schedule_sizes_are_multiples_of_micro_batches() -> None:
    config = parse_schedule("0:8 1K:10", "--train-samples 100")
    expected = (
        "step_batch_size_schedule size=10 is not a multiple of micro_batch_size 4 x data parallel 1 = 4: use 8 or 12"
    )
    assert find_problems(config, 1) == [expected]


def test_samples_to_iterations() -> None:
    """Drop a partial last batch, with a constant batch size and after a ramp."""
    for ramp, final, samples, steps in EXPECTED["samples"]:
        config = parse(f"--lr 1e-3 --global-batch-size {final} --train-samples {samples} {ramp}")
        assert make_run_plan(config, 1, 20).shape.num_steps == steps
        assert rates_of(config).lr.decay == samples
