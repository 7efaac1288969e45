"""A pipeline of real processes: split backward reduces waits, and messages are freed after their last use."""

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


def _slowed(call: Callable[..., Any], parts: int) -> Callable[..., Any]:
    """Return `call` followed by a sleep, which needs no core: more ranks than cores are as fast."""

    def slow_call(*args: Any) -> Any:
        result = call(*args)
        time.sleep(parts * PART_S)
        return result

    return slow_call


def _timed(flags: str) -> tuple[list[str], float, float]:
    """Return actions, seconds and waited seconds of the faster of two steps on this rank."""
    run = run_from(f"{FLAGS} {flags}")
    parts = 1 if run.pipeline.split_backward else 2
    # without costs all parts count as equally long
    run.pipeline.split_backward = SplitBackward() if run.pipeline.split_backward else None
    steps = []
    with (
        mock.patch.object(Pipeline, "_forward", _slowed(Pipeline._forward, 1)),
        mock.patch.object(torch.autograd, "backward", _slowed(torch.autograd.backward, parts)),
        mock.patch.object(WeightGradStore, "compute_all", _slowed(WeightGradStore.compute_all, 1)),
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
    seconds, waited, actions = min(steps[1:])
    return actions, seconds, waited


@pytest.mark.nightly
def test_split_backward_reduces_waits_as_planned() -> None:
    """1F1B idles for 3 (pp - 1) parts of a step, split backward for pp - 1. One of four attempts has to show it."""
    expected_gain, differences = 2 * (PP - 1) * PART_S, []
    for _ in range(4):
        plain, split = run_ranks(PP, _timed, ""), run_ranks(PP, _timed, "--split-backward")
        for ranks, split_backward in ((plain, None), (split, SplitBackward())):
            assert [actions for actions, *_ in ranks] == [
                list(map(str, row)) for row in build_schedule("1f1b", PP, M, split=split_backward)
            ]
        took, took_split = (max(seconds for _, seconds, _ in ranks) for ranks in (plain, split))
        waited, waited_split = (sum(seconds for *_, seconds in ranks) / PP for ranks in (plain, split))
        assert took_split > (3 * M + PP - 1) * PART_S
        differences.append((took - took_split, waited - waited_split, waited / waited_split))
        shorter, waits_less, ratio = differences[-1]
        # waits after a rank's last part are not counted
        if shorter > expected_gain / 2 and waits_less > expected_gain / 3 and ratio > 1.5:
            return
    raise AssertionError(differences)


LAYERS = 3  # of each stage


def _watch_received_gradients() -> list[tuple[int, bool]]:
    """Watch the received gradient in each backward on the first stage.

    Returns:
        (layer, whether the received gradient still has memory of its own) when a layer's input gets its gradient, from
        the last layer to the first.
    """
    sizes = f"--num-layers {2 * LAYERS} --global-batch-size 3 --pipeline-model-parallel-size 2"
    run = run_from(f"{FLAGS} {sizes} --hidden-dropout 0 --attention-dropout 0")
    wait, received, records = run.pipeline._wait_for_message, [lambda: None], list[tuple[int, bool]]()

    def wait_and_watch(message: Any, *name: Any) -> Tensor:
        tensor = wait(message, *name)
        if isinstance(name[0], Action) and name[0].op is Op.RECV_B:
            received[0] = weakref.ref(tensor.untyped_storage())  # type: ignore[call-overload]
        return tensor

    def record(number: int, grad: Tensor) -> None:
        storage: Any = received[0]()
        records.append((number, storage is not None and storage._cdata != grad.untyped_storage()._cdata))

    def watched(number: int, x_sBD: Tensor) -> None:
        x_sBD.register_hook(lambda grad: record(number, grad))

    run.pipeline._wait_for_message = wait_and_watch  # type: ignore[method-assign]
    if run.mesh.pp.is_first:
        for number, block in enumerate(run.pipeline.stages[0].blocks):  # type: ignore[arg-type]
            block.register_forward_pre_hook(lambda _, inputs, number=number: watched(number, inputs[0]))
    train_step(run)
    return records


def test_received_gradient_is_freed_after_its_last_use() -> None:
    first, last = run_ranks(2, _watch_received_gradients)
    assert first == [(number, False) for number in reversed(range(LAYERS))] * 3 and not last
