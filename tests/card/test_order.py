"""The real trainer, rank by rank, is in order: over the table of layouts, and with a defect planted it is not."""

from pathlib import Path

import pytest
from cover import rarely
from test_layouts import COVER, EXCHANGED, NAME, ROWS, Row, table

from card import runs
from card.simulator.clocks import races
from card.simulator.queues import Traces, eager, stuck
from card.simulator.trace import Comm

OPTIONS = table("cards")
SEVERAL = [item for item in ROWS if item.world > 1]
CONTEXT = "llama tp2 cp2, documents, a2a"  # with each commit


def flags_of(item: Row) -> str:
    """With two micro-batches for each rank, or four in a pipeline alone, where the row says nothing else."""
    return f"--global-batch-size {4 * max(2, item.sizes[2])} {item.model} {item.layout}"


def named(*names: str) -> list[Row]:
    found = [item for item in ROWS + EXCHANGED if item.name in names]
    assert len(found) == len(names)
    return found


WHOLE = named("gpt split pp2 vpp2 tied")  # with each commit, one of the options beside it


def _in_order(traces: Traces) -> None:
    assert stuck(traces) == [] == stuck(eager(traces))


def _without_races(traces: Traces) -> None:
    for rank, facts in traces.items():
        assert [str(race) for race in races(facts)] == [], f"rank {rank}"


@pytest.mark.timeout(660)
@pytest.mark.parametrize("item", rarely([*WHOLE, *SEVERAL[::4], *EXCHANGED[::8], *OPTIONS], WHOLE + OPTIONS[:1], NAME))
def test_all_that_a_run_does_on_cards_is_in_order(item: Row, tmp_path: Path) -> None:
    """There gradients and activations are summed by reduce-scatters, and a checkpoint is written in the background."""
    traces = runs.traced(item.world, runs.everything, flags_of(item), str(tmp_path / "saved"))
    _in_order(traces)
    _without_races(traces)


@pytest.mark.timeout(660)
@pytest.mark.parametrize("item", rarely(SEVERAL + EXCHANGED, COVER + named(CONTEXT), NAME))
def test_steps_on_cards_are_in_order_in_every_layout(item: Row) -> None:
    traces = runs.traced(item.world, runs.steps, flags_of(item))
    kinds = {fact.kind for facts in traces.values() for fact in facts if isinstance(fact, Comm)}
    assert not item.has_tp or "reduce_scatter" in kinds
    _in_order(traces)
    _without_races(traces)
