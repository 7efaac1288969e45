"""A pipeline of real processes, whose parts all take equally long: a split backward makes the ranks wait less."""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from train_cases import run_from

from megalite.nn.later import Later
from megalite.pipeline.runtime import MESSAGES, Pipeline
from megalite.pipeline.schedule import Split, plan
from megalite.train.step import train_step

PP, M, PART_S = 3, 6, 0.06
FLAGS = f"""--num-layers {PP} --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1
 --global-batch-size {M} --train-iters 9 --lr 0.01 --mock-data --vocab-size 32 --make-vocab-size-divisible-by 8
 --eval-iters 0 --pipeline-model-parallel-size {PP}"""


def _lasting(call: Callable[..., Any], parts: int) -> Callable[..., Any]:
    """Sleeping needs no core, so that more ranks than cores are as fast."""

    def lasts(*args: Any) -> Any:
        result = call(*args)
        time.sleep(parts * PART_S)
        return result

    return lasts


def _timed(flags: str) -> tuple[list[str], float, float]:
    """Of the best of two steps on this rank: its actions, seconds, and seconds of them that it waited for others."""
    run = run_from(f"{FLAGS} {flags}")
    parts = 1 if run.pipeline.split else 2
    run.pipeline.split = Split() if run.pipeline.split else None  # the parts that are to be filled take equally long
    steps = []
    with (
        mock.patch.object(Pipeline, "_forward", _lasting(Pipeline._forward, 1)),
        mock.patch.object(torch.autograd, "backward", _lasting(torch.autograd.backward, parts)),
        mock.patch.object(Later, "run", _lasting(Later.run, 1)),
    ):
        for _ in range(3):
            run.pipeline.timeline = []
            dist.barrier()
            run.mesh.clock.begin(run.mesh.device)
            train_step(run)
            run.mesh.clock.end()
            waited = run.mesh.clock.read()[MESSAGES]
            timeline = run.pipeline.timeline
            steps.append((max(timed.end_s for timed in timeline), waited, [timed.action for timed in timeline]))
    took, waited, actions = min(steps[1:])
    return actions, took, waited


@pytest.mark.everything
def test_ranks_wait_less_by_what_the_plan_says() -> None:
    """1F1B idles for 3 (pp - 1) parts of a step, its twin for pp - 1. One quiet moment of the machine has to show it."""
    less, told = 2 * (PP - 1) * PART_S, []
    for _ in range(4):
        whole, split = run_ranks(PP, _timed, ""), run_ranks(PP, _timed, "--split-backward")
        for ranks, how in ((whole, None), (split, Split())):
            assert [actions for actions, *_ in ranks] == [list(map(str, row)) for row in plan("1f1b", PP, M, split=how)]
        took, took_split = (max(seconds for _, seconds, _ in ranks) for ranks in (whole, split))
        waited, waited_split = (sum(seconds for *_, seconds in ranks) / PP for ranks in (whole, split))
        assert took_split > (3 * M + PP - 1) * PART_S
        told.append((took - took_split, waited - waited_split, waited / waited_split))
        shorter, waits_less, ratio = told[-1]
        if shorter > less / 2 and waits_less > less / 3 and ratio > 1.5:  # nobody counts the wait after its last part
            return
    raise AssertionError(told)
