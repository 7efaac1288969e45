"""The curves against their closed forms, and the properties that make iterations and samples the same thing."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.optim.lr import LrSchedule

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
# warm up over 100 samples, decay until 1000, the last 300 of them are WSD's: (style, wsd style, n, rate)
POINTS = [
    ("linear", "", 325, 0.1 + 0.9 * 0.75),
    ("linear", "", 1000, 0.1),
    ("cosine", "", 325, 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2),
    ("cosine", "", 550, 0.55),
    ("constant", "", 999_999, 1.0),
    ("inverse-square-root", "", 400, 0.5),
    ("inverse-square-root", "", 1000, math.sqrt(0.1)),
    ("WSD", "linear", 700, 1.0),
    ("WSD", "linear", 850, 0.55),
    ("WSD", "cosine", 775, 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2),
    ("WSD", "exponential", 850, 0.1 + 0.9 * (math.sqrt(2) - 1)),
    ("WSD", "minus_sqrt", 775, 0.55),
    *[("WSD", style, 1000, 0.1) for style in WSD_STYLES],
    *[(style, "linear", 1001, 0.1) for style in STYLES if style != "constant"],
]


def make(style: str, wsd_style: str = "linear", scale: float = 1.0, warm_up: float = 100.0) -> LrSchedule:
    return LrSchedule(
        peak=1.0,
        minimum=0.1,
        style=style,
        warm_up=warm_up * scale,
        decay=1000.0 * scale,
        warm_up_init=0.02,
        wsd=300.0 * scale,
        wsd_style=wsd_style,
    )


@pytest.mark.parametrize(("style", "wsd_style", "n", "rate"), POINTS)
def test_points_of_the_closed_forms(style: str, wsd_style: str, n: int, rate: float) -> None:
    assert make(style, wsd_style).at(n) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize("style", STYLES)
def test_warm_up_is_a_line_from_its_initial_rate_to_the_peak(style: str) -> None:
    lr = make(style)
    assert [lr.at(n) for n in (0, 25, 50, 100)] == pytest.approx([0.02, 0.02 + 0.98 / 4, 0.51, 1.0])
    cold = make(style, warm_up=0.0)  # no warm-up: the initial rate has no part in it
    assert cold.at(1) == pytest.approx(1.0, abs=2e-3)


@given(st.sampled_from(STYLES), st.sampled_from(WSD_STYLES), st.integers(100, 1200), st.integers(1, 200))
def test_after_the_warm_up_it_never_rises_and_stays_in_its_bounds(
    style: str, wsd_style: str, n: int, later: int
) -> None:
    lr = make(style, wsd_style)
    assert 1.0 >= lr.at(n) >= lr.at(n + later) - 1e-12 >= 0.1 - 2e-12


@given(st.sampled_from(STYLES), st.sampled_from(WSD_STYLES), st.integers(1, 1200), st.sampled_from([2, 7, 4096]))
def test_counting_in_iterations_times_the_batch_is_counting_in_samples(
    style: str, wsd_style: str, n: int, batch: int
) -> None:
    assert make(style, wsd_style, scale=batch).at(n * batch) == pytest.approx(make(style, wsd_style).at(n), rel=1e-9)


def test_a_warm_up_as_long_as_the_decay_divides_by_nothing() -> None:
    lr = LrSchedule(peak=1.0, minimum=0.1, style="cosine", warm_up=10.0, decay=10.0)
    assert [lr.at(n) for n in (5, 10, 11)] == pytest.approx([0.5, 1.0, 0.1])
    no_last_phase = LrSchedule(peak=1.0, minimum=0.1, style="WSD", warm_up=0.0, decay=10.0, wsd=0.0)
    assert [no_last_phase.at(n) for n in (1, 10, 11)] == [1.0, 1.0, 0.1]
