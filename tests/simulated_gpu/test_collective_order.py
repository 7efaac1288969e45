"""The order of collectives in the real trainer, over the table of layouts.

If one rank issues another operation, all ranks raise at once, and the deadlock detector names it.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layout_cases import COVERING_ROWS, CP_ROWS, GPT, LLAMA, ROWS, Row, read_rows, row_name
from pairwise import nightly_except

from megalite.optim.zero.sync import BucketSync
from megalite.pipeline import runtime
from megalite.pipeline.schedule import Action, Op
from megalite.training import train_step as step
from simulated_gpu import runs
from simulated_gpu.simulator.clocks import races
from simulated_gpu.simulator.queues import Traces, eager, stuck
from simulated_gpu.simulator.trace import Comm

OPTION_ROWS = read_rows("simulated_gpus")
SEVERAL = [item for item in ROWS if item.world > 1]
CONTEXT = "llama tp2 cp2, documents, a2a"  # with each commit


def flags_of(item: Row) -> str:
    """Return the flags of a row; by default each rank has two micro-batches, or four in a pipeline without dp."""
    return f"--global-batch-size {4 * max(2, item.sizes[2])} {item.model} {item.layout}"


def rows_named(*names: str) -> list[Row]:
    rows = [item for item in ROWS + CP_ROWS if item.name in names]
    assert len(rows) == len(names)
    return rows


COMPLETE = rows_named("gpt split pp2 vpp2 tied")  # with each commit, together with one row of options


def _assert_in_order(traces: Traces) -> None:
    assert stuck(traces) == [] == stuck(eager(traces))


def _assert_no_races(traces: Traces) -> None:
    for rank, facts in traces.items():
        assert [str(race) for race in races(facts)] == [], f"rank {rank}"


@pytest.mark.timeout(660)
@pytest.mark.parametrize(
    "item",
    nightly_except([*COMPLETE, *SEVERAL[::4], *CP_ROWS[::8], *OPTION_ROWS], COMPLETE + OPTION_ROWS[:1], row_name),
)
def test_run_on_gpus_is_in_order(item: Row, tmp_path: Path) -> None:
    """GPU runs reduce-scatter gradients and activations, and write checkpoints in the background."""
    traces = runs.traced(item.world, runs.everything, flags_of(item), str(tmp_path / "saved"))
    _assert_in_order(traces)
    _assert_no_races(traces)


@pytest.mark.timeout(660)
@pytest.mark.parametrize("item", nightly_except(SEVERAL + CP_ROWS, COVERING_ROWS + rows_named(CONTEXT), row_name))
def test_steps_on_gpus_are_in_order_in_every_layout(item: Row) -> None:
    traces = runs.traced(item.world, runs.steps, flags_of(item))
    kinds = {fact.kind for facts in traces.values() for fact in facts if isinstance(fact, Comm)}
    assert not item.has_tp or "reduce_scatter" in kinds
    _assert_in_order(traces)
    _assert_no_races(traces)


DP2 = f"{LLAMA} --ddp-bucket-size 500"
VPP2 = f"{GPT} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
Planted = contextlib.AbstractContextManager[None]


def _gathers_swapped() -> Planted:
    def start_next_gather(original: Callable[..., None], self: BucketSync) -> None:
        if len(self._queue) == len(self.layout.buckets):
            self._queue.insert(0, self._queue.pop(1))
        original(self)

    return runs.on_rank(1, BucketSync, "_start_next_gather", start_next_gather)


def _agreement_in(dtype: torch.dtype) -> Planted:
    return runs.on_rank(1, step, "all_reduce_", lambda original, x, axis: original(x.to(dtype), axis))


def _messages_swapped() -> Planted:
    """Swap the first send and the adjacent receive on rank 1."""

    def build_schedule(original: Callable[..., Any], *args: Any) -> list[list[Action]]:
        rows = [list(row) for row in original(*args)]
        row, messages = rows[1], (Op.SEND_F, Op.RECV_F)
        first = next(i for i in range(len(row)) if {row[i].op, row[i + 1].op} == set(messages))
        row[first : first + 2] = row[first + 1], row[first]
        return [tuple(row) for row in rows]

    return runs.on_rank(1, runtime, "build_schedule", build_schedule)


PLANTED: dict[str, tuple[str, Callable[[], Planted], list[str]]] = {
    "two gathers swapped": (DP2, _gathers_swapped, ["all_gather of", "megalite/optim/zero/param_bucket.py:"]),
    "another dtype": (DP2, lambda: _agreement_in(torch.float32), ["of 5 float64", "of 5 float32", "training/train_step.py:"]),
    "messages swapped": (VPP2, _messages_swapped, ["send of", "to 1", "megalite/pipeline/runtime.py:"]),
}  # fmt: skip


def _steps(device: torch.device, name: str) -> None:
    flags, plant, _ = PLANTED[name]
    with plant():
        runs.steps(device, f"{flags} --distributed-timeout-minutes 0.05")
        dist.barrier()  # an operation that was never waited for raises here


@pytest.mark.parametrize("name", PLANTED)
def test_diverging_rank_is_named(name: str) -> None:
    traces, errors = runs.broken(2, _steps, name)
    assert errors[0].startswith("Disorder: ")
    for message in (errors[0], " ".join(stuck(traces))):
        assert all(part in message for part in PLANTED[name][2]), message
