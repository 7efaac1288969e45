"""Sizes of steps: a pure function of the samples consumed, whose sums are the counts that a resume relies on."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.plan.batch_size import BatchSizes

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
