"""A pipeline of real processes. Where its parts all take equally long, a split backward makes the ranks wait less. And a
message's memory goes as soon as the stage has used it, not at the end of the stage's backward."""

import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from train_cases import run_from

from megalite.nn.wgrad_store import WeightGradStore
from megalite.pipeline.runtime import P2P_PHASE, Pipeline
from megalite.pipeline.schedule import Action, Op, SplitBackward, build_schedule
from megalite.training.train_step import train_step

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
    parts = 1 if run.pipeline.split_backward else 2
    run.pipeline.split_backward = (
        SplitBackward() if run.pipeline.split_backward else None
    )  # the parts that are to be filled take equally long
    steps = []
    with (
        mock.patch.object(Pipeline, "_forward", _lasting(Pipeline._forward, 1)),
        mock.patch.object(torch.autograd, "backward", _lasting(torch.autograd.backward, parts)),
        mock.patch.object(WeightGradStore, "compute_all", _lasting(WeightGradStore.compute_all, 1)),
    ):
        for _ in range(3):
            run.pipeline.timeline = []
            dist.barrier()
            run.mesh.phase_timer.start_step(run.mesh.device)
            train_step(run)
            run.mesh.phase_timer.end_step()
            waited = run.mesh.phase_timer.phase_seconds()[P2P_PHASE]
            timeline = run.pipeline.timeline
            steps.append((max(timed.end_s for timed in timeline), waited, [timed.action for timed in timeline]))
    took, waited, actions = min(steps[1:])
    return actions, took, waited


@pytest.mark.nightly
def test_split_backward_reduces_waits_as_planned() -> None:
    """1F1B idles for 3 (pp - 1) parts of a step, its twin for pp - 1. One quiet moment of the machine has to show it."""
    less, told = 2 * (PP - 1) * PART_S, []
    for _ in range(4):
        whole, split = run_ranks(PP, _timed, ""), run_ranks(PP, _timed, "--split-backward")
        for ranks, how in ((whole, None), (split, SplitBackward())):
            assert [actions for actions, *_ in ranks] == [
                list(map(str, row)) for row in build_schedule("1f1b", PP, M, split=how)
            ]
        took, took_split = (max(seconds for _, seconds, _ in ranks) for ranks in (whole, split))
        waited, waited_split = (sum(seconds for *_, seconds in ranks) / PP for ranks in (whole, split))
        assert took_split > (3 * M + PP - 1) * PART_S
        told.append((took - took_split, waited - waited_split, waited / waited_split))
        shorter, waits_less, ratio = told[-1]
        if shorter > less / 2 and waits_less > less / 3 and ratio > 1.5:  # nobody counts the wait after its last part
            return
    raise AssertionError(told)


LAYERS = 3  # of each stage


def _held() -> list[tuple[int, bool]]:
    """Of each backward on the first stage: layers whose inputs have got their gradient, from the last, and whether the
    received gradient still takes memory of its own then."""
    sizes = f"--num-layers {2 * LAYERS} --global-batch-size 3 --pipeline-model-parallel-size 2"
    run = run_from(f"{FLAGS} {sizes} --hidden-dropout 0 --attention-dropout 0")
    wait, received, seen = run.pipeline._wait_for_message, [lambda: None], list[tuple[int, bool]]()

    def waits(message: Any, *name: Any) -> Tensor:
        tensor = wait(message, *name)
        if isinstance(name[0], Action) and name[0].op is Op.RECV_B:
            received[0] = weakref.ref(tensor.untyped_storage())  # type: ignore[call-overload]
        return tensor

    def look(number: int, grad: Tensor) -> None:
        storage: Any = received[0]()
        seen.append((number, storage is not None and storage._cdata != grad.untyped_storage()._cdata))

    def watched(number: int, x_sBD: Tensor) -> None:
        x_sBD.register_hook(lambda grad: look(number, grad))

    run.pipeline._wait_for_message = waits  # type: ignore[method-assign]
    if run.mesh.pp.is_first:
        for number, block in enumerate(run.pipeline.stages[0].blocks):  # type: ignore[arg-type]
            block.register_forward_pre_hook(lambda _, given, number=number: watched(number, given[0]))
    train_step(run)
    return seen


def test_received_gradient_is_freed_after_its_last_use() -> None:
    first, last = run_ranks(2, _held)
    assert first == [(number, False) for number in reversed(range(LAYERS))] * 3 and not last
