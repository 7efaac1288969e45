"""The loss scale equals an independent account of its rules for any history of overflows, and across a resume."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.optim.loss_scale import LossScaleExhausted, LossScaler


def scaler() -> LossScaler:
    return LossScaler(scale=2.0**60, dynamic=True, minimum=1.0, growth_interval=3, hysteresis=2)


def account(history: list[bool], window: int, hysteresis: int) -> int:
    """Return log2 of the scale's change, from the history alone: no counters are carried from step to step."""
    change, doubled, last_overflow = 0, 0, 0  # positions one past the last doubling and the last overflow
    for i, overflow in enumerate(history, 1):
        if overflow:
            last_overflow = i
            change -= sum(history[doubled:i]) >= hysteresis
        elif (i - max(doubled, last_overflow)) == window:
            doubled, change = i, change + 1
    return change


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_loss_scale_after_any_overflows(history: list[bool], window: int, hysteresis: int, dynamic: bool) -> None:
    s = LossScaler(scale=2.0**60, dynamic=dynamic, growth_interval=window, hysteresis=hysteresis)
    for overflow in history:
        s.update(overflow)
    assert s.scale == 2.0 ** (60 + dynamic * account(history, window, hysteresis))


@given(st.lists(st.booleans(), max_size=20), st.lists(st.booleans(), max_size=20))
def test_loss_scale_survives_a_resume(before: list[bool], after: list[bool]) -> None:
    straight, first, second = scaler(), scaler(), scaler()
    for overflow in before:
        first.update(overflow)
    second.from_json(json.loads(json.dumps(first.to_json())))
    for overflow in before + after:
        straight.update(overflow)
    for overflow in after:
        second.update(overflow)
    assert second == straight


def test_loss_scale_reaches_its_minimum_before_it_is_an_error() -> None:
    s = LossScaler(scale=6.0, dynamic=True, minimum=4.0, hysteresis=1)
    s.update(True)
    assert s.scale == 4.0  # not 3
    with pytest.raises(LossScaleExhausted, match=r"min_loss_scale=4 .*--bf16"):
        s.update(True)


def test_resume_uses_the_new_loss_scale_settings() -> None:
    old = scaler()
    for overflow in (True, False, False):
        old.update(overflow)
    new = LossScaler(scale=1.0, dynamic=True, minimum=2.0**61, growth_interval=2, hysteresis=1)
    new.from_json(old.to_json())
    assert new.scale == 2.0**61  # not under the new floor
    new.update(False)
    assert new.scale == 2.0**62  # it has had two clean steps, and the new window is 2
    constant = LossScaler(scale=8.0)
    constant.from_json(old.to_json())
    assert constant.scale == 8.0
    fresh = scaler()
    fresh.from_json(LossScaler(scale=8.0).to_json())  # the old run was constant
    assert fresh == scaler()
