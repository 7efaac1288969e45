"""One rank of the real trainer does something else: the ranks are told at once, and the proof of order names it."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_layouts import GPT, LLAMA

from card import runs
from card.simulator.queues import stuck
from megalite.optim.param_gather import ParamGather
from megalite.pipeline import runtime
from megalite.pipeline.schedule import Action, Op
from megalite.train import step

DP2 = f"{LLAMA} --ddp-bucket-size 500"
VPP2 = f"{GPT} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"


Planted = contextlib.AbstractContextManager[None]


def _gathers_swapped() -> Planted:
    def start_next(original: Callable[..., None], self: ParamGather) -> None:
        if len(self._to_gather) == len(self.weights.layout.buckets):
            self._to_gather.insert(0, self._to_gather.pop(1))
        original(self)

    return runs.on_rank(1, ParamGather, "_start_next", start_next)


def _agreement_in(dtype: torch.dtype) -> Planted:
    return runs.on_rank(1, step, "all_reduce_", lambda original, x, axis: original(x.to(dtype), axis))


def _messages_swapped() -> Planted:
    """On rank 1 the first send and the receive beside it change places."""

    def plan(original: Callable[..., Any], *args: Any) -> list[list[Action]]:
        rows = [list(row) for row in original(*args)]
        row, messages = rows[1], (Op.SEND_F, Op.RECV_F)
        at = next(i for i in range(len(row)) if {row[i].op, row[i + 1].op} == set(messages))
        row[at : at + 2] = row[at + 1], row[at]
        return [tuple(row) for row in rows]

    return runs.on_rank(1, runtime, "plan", plan)


PLANTED: dict[str, tuple[str, Callable[[], Planted], list[str]]] = {
    "two gathers swapped": (DP2, _gathers_swapped, ["all_gather of", "megalite/optim/param_gather.py:"]),
    "another dtype": (DP2, lambda: _agreement_in(torch.float32), ["of 5 float64", "of 5 float32", "train/step.py:"]),
    "messages swapped": (VPP2, _messages_swapped, ["send of", "to 1", "megalite/pipeline/runtime.py:"]),
}  # fmt: skip


def _steps(here: torch.device, name: str) -> None:
    flags, plant, _ = PLANTED[name]
    with plant():
        runs.steps(here, f"{flags} --distributed-timeout-minutes 0.05")
        dist.barrier()  # what was never waited for is heard of here


@pytest.mark.parametrize("name", PLANTED)
def test_what_one_rank_does_otherwise_is_named(name: str) -> None:
    traces, deaths = runs.broken(2, _steps, name)
    assert deaths[0].startswith("Disorder: ")
    for told in (deaths[0], " ".join(stuck(traces))):
        assert all(word in told for word in PLANTED[name][2]), told
