"""The real trainer, rank by rank, is in order: over the table of layouts, and with a defect planted it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_layouts import ROWS, Row

from card import runs
from card.clocks import races
from card.queues import STRICTEST, Traces, disorder, eager, hangs
from card.trace import Comm

SEVERAL = [item for item in ROWS if item.world > 1]
FEW = ("gpt tp2 pp2 tied", "llama pp2 dp2 vpp2 ddp, dp outermost")
FEW_ON_CARDS = ("llama tp2 dp2 ddp",)


def flags_of(item: Row) -> str:
    return f"{item.model} {item.layout}"


def named(*names: str) -> list[Row]:
    found = [item for item in ROWS if item.name in names]
    assert len(found) == len(names)
    return found


def _in_order(traces: Traces) -> None:
    """Also on a card that does one thing at a time, with a host that waits for each operation."""
    assert disorder(traces) == []
    assert hangs(traces, STRICTEST) == []
    assert hangs(eager(traces), STRICTEST) == []


def _without_races(traces: Traces) -> None:
    for rank, facts in traces.items():
        assert [str(race) for race in races(facts)] == [], f"rank {rank}"


def kinds_of(traces: Traces) -> set[str]:
    return {fact.kind for facts in traces.values() for fact in facts if isinstance(fact, Comm)}


@pytest.mark.parametrize("item", named(*FEW), ids=lambda item: item.name)
def test_all_that_a_run_does_is_in_order(item: Row, tmp_path: Path) -> None:
    traces = runs.traced(item.world, runs.everything, flags_of(item), str(tmp_path / "saved"))
    assert {"all_reduce", "broadcast", "send", "recv"} <= kinds_of(traces)
    _in_order(traces)


@pytest.mark.parametrize("item", named(*FEW_ON_CARDS), ids=lambda item: item.name)
def test_steps_on_cards_are_in_order(item: Row) -> None:
    traces = runs.traced(item.world, runs.steps, flags_of(item), card=True)
    assert "reduce_scatter" in kinds_of(traces)
    _in_order(traces)
    _without_races(traces)


@pytest.mark.long
@pytest.mark.parametrize("item", SEVERAL, ids=lambda item: item.name)
def test_all_that_a_run_does_is_in_order_in_every_layout(item: Row, tmp_path: Path) -> None:
    _in_order(runs.traced(item.world, runs.everything, flags_of(item), str(tmp_path / "saved")))


@pytest.mark.long
@pytest.mark.parametrize("item", SEVERAL, ids=lambda item: item.name)
def test_all_that_a_run_does_on_cards_is_in_order_in_every_layout(item: Row, tmp_path: Path) -> None:
    """There gradients and activations are summed by reduce-scatters, and a checkpoint is written in the background."""
    traces = runs.traced(item.world, runs.everything, flags_of(item), str(tmp_path / "saved"), card=True)
    _in_order(traces)
    _without_races(traces)
