"""The real trainer, rank by rank, is in order: over the table of layouts, and with a defect planted it is not."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cover import rarely
from test_layouts import COVER, GPT, LLAMA, NAME, ROWS, Row, row

from card import runs
from card.simulator.clocks import races
from card.simulator.queues import STRICTEST, Traces, disorder, eager, hangs, unequal
from card.simulator.trace import Comm, CommWait, Fact

RAMP = "--rampup-batch-size 4 4 8"
NOT_BEHIND = "--no-overlap-grad-reduce --no-overlap-param-gather"
OPTIONS = [
    row("gpt bf16, gradients too, tp2 dp2", 4, f"{GPT} --bf16", tp=2, extra="--grad-reduce-in-bf16"),
    row("llama fp16 pp2 dp2, a growing batch", 4, f"{LLAMA} --fp16 --loss-scale 128", pp=2, extra=RAMP),
    row("gpt tp2 pp2 dp2 tied, nothing behind compute", 8, GPT, tp=2, pp=2, extra=NOT_BEHIND),
]
SEVERAL = [item for item in ROWS if item.world > 1]
FEW = ("gpt tp2 pp2 tied", "llama pp2 dp2 vpp2 ddp, dp outermost")
WHOLE = ("gpt split pp2 vpp2 tied",)  # with each commit, one of the options beside it


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
    _in_order_no_more(traces, rank=1)


def _in_order_no_more(traces: Traces, rank: int) -> None:
    """Two collectives of one rank change places: all ranks do what they should, but one that is in both communicators
    comes to them the other way round."""
    found = []
    for at, other in _swapped_waits(traces[rank]):
        if len(found) < 8:
            swapped = {**traces, rank: other}
            assert unequal(swapped) == []
            found.append(disorder(swapped))
            first, second = (fact.comm for fact in other[at : at + 3 : 2] if isinstance(fact, Comm))
            assert any(text.startswith(f"on any card: rank {rank} waits") for text in found[-1])
            assert first in " ".join(found[-1]) and second in " ".join(found[-1])
    assert found


def _swapped_waits(facts: Sequence[Fact]) -> Iterator[tuple[int, list[Fact]]]:
    """Of one rank: neighbours that both are waited for at once."""
    for i in range(len(facts) - 3):
        a, wait_a, b, wait_b = facts[i : i + 4]
        if (
            isinstance(a, Comm)
            and isinstance(b, Comm)
            and isinstance(wait_a, CommWait)
            and isinstance(wait_b, CommWait)
        ):
            both = a.comm != b.comm and len({*a.ranks} & {*b.ranks}) > 1
            at_once = (wait_a.number, wait_b.number) == (a.number, b.number)
            if both and at_once and {a.kind, b.kind} == {"all_reduce"}:
                yield i, [*facts[:i], b, wait_b, a, wait_a, *facts[i + 4 :]]


@pytest.mark.timeout(660)
@pytest.mark.parametrize("item", rarely(SEVERAL[::4] + OPTIONS, named(*WHOLE) + OPTIONS[:1], NAME))
def test_all_that_a_run_does_on_cards_is_in_order(item: Row, tmp_path: Path) -> None:
    """There gradients and activations are summed by reduce-scatters, and a checkpoint is written in the background."""
    traces = runs.traced(item.world, runs.everything, flags_of(item), str(tmp_path / "saved"), card=True, timeout=600)
    _in_order(traces)
    _without_races(traces)


@pytest.mark.timeout(660)
@pytest.mark.parametrize("item", rarely(SEVERAL, COVER, NAME))
def test_steps_on_cards_are_in_order_in_every_layout(item: Row) -> None:
    traces = runs.traced(item.world, runs.steps, flags_of(item), card=True, timeout=600)
    assert not item.has_tp or "reduce_scatter" in kinds_of(traces)
    _in_order(traces)
    _without_races(traces)
