"""The real trainer, rank by rank, is in order: over the table of layouts. Where one rank does something else, the ranks
are told at once, and the proof of order names it."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layout_cases import COVER, EXCHANGED, GPT, LLAMA, NAME, ROWS, Row, table
from pairwise import rarely

from megalite.optim.param_gather import ParamGatherer
from megalite.pipeline import runtime
from megalite.pipeline.schedule import Action, Op
from megalite.training import train_step as step
from simulated_gpu import runs
from simulated_gpu.simulator.clocks import races
from simulated_gpu.simulator.queues import Traces, eager, stuck
from simulated_gpu.simulator.trace import Comm

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
def test_run_on_gpus_is_in_order(item: Row, tmp_path: Path) -> None:
    """There gradients and activations are summed by reduce-scatters, and a checkpoint is written in the background."""
    traces = runs.traced(item.world, runs.everything, flags_of(item), str(tmp_path / "saved"))
    _in_order(traces)
    _without_races(traces)


@pytest.mark.timeout(660)
@pytest.mark.parametrize("item", rarely(SEVERAL + EXCHANGED, COVER + named(CONTEXT), NAME))
def test_steps_on_gpus_are_in_order_in_every_layout(item: Row) -> None:
    traces = runs.traced(item.world, runs.steps, flags_of(item))
    kinds = {fact.kind for facts in traces.values() for fact in facts if isinstance(fact, Comm)}
    assert not item.has_tp or "reduce_scatter" in kinds
    _in_order(traces)
    _without_races(traces)


DP2 = f"{LLAMA} --ddp-bucket-size 500"
VPP2 = f"{GPT} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
Planted = contextlib.AbstractContextManager[None]


def _gathers_swapped() -> Planted:
    def start_next_gather(original: Callable[..., None], self: ParamGatherer) -> None:
        if len(self._queue) == len(self.weights.layout.buckets):
            self._queue.insert(0, self._queue.pop(1))
        original(self)

    return runs.on_rank(1, ParamGatherer, "_start_next_gather", start_next_gather)


def _agreement_in(dtype: torch.dtype) -> Planted:
    return runs.on_rank(1, step, "all_reduce_", lambda original, x, axis: original(x.to(dtype), axis))


def _messages_swapped() -> Planted:
    """On rank 1 the first send and the receive beside it change places."""

    def build_schedule(original: Callable[..., Any], *args: Any) -> list[list[Action]]:
        rows = [list(row) for row in original(*args)]
        row, messages = rows[1], (Op.SEND_F, Op.RECV_F)
        at = next(i for i in range(len(row)) if {row[i].op, row[i + 1].op} == set(messages))
        row[at : at + 2] = row[at + 1], row[at]
        return [tuple(row) for row in rows]

    return runs.on_rank(1, runtime, "build_schedule", build_schedule)


PLANTED: dict[str, tuple[str, Callable[[], Planted], list[str]]] = {
    "two gathers swapped": (DP2, _gathers_swapped, ["all_gather of", "megalite/optim/param_gather.py:"]),
    "another dtype": (DP2, lambda: _agreement_in(torch.float32), ["of 6 float64", "of 6 float32", "training/train_step.py:"]),
    "messages swapped": (VPP2, _messages_swapped, ["send of", "to 1", "megalite/pipeline/runtime.py:"]),
}  # fmt: skip


def _steps(here: torch.device, name: str) -> None:
    flags, plant, _ = PLANTED[name]
    with plant():
        runs.steps(here, f"{flags} --distributed-timeout-minutes 0.05")
        dist.barrier()  # what was never waited for is heard of here


@pytest.mark.parametrize("name", PLANTED)
def test_diverging_rank_is_named(name: str) -> None:
    traces, deaths = runs.broken(2, _steps, name)
    assert deaths[0].startswith("Disorder: ")
    for told in (deaths[0], " ".join(stuck(traces))):
        assert all(word in told for word in PLANTED[name][2]), told
