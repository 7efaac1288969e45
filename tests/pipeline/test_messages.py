"""A message's memory goes as soon as the stage has used it, not at the end of the stage's backward."""

import weakref
from typing import Any

from ranks import run_ranks
from torch import Tensor
from train_cases import run_from

from megalite.pipeline.schedule import Action, Op
from megalite.train.step import train_step

LAYERS = 3  # of each stage
FLAGS = f"""--num-layers {2 * LAYERS} --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1
 --global-batch-size 3 --train-iters 1 --lr 0.01 --mock-data --vocab-size 32 --make-vocab-size-divisible-by 8
 --max-position-embeddings 8 --eval-iters 0 --pipeline-model-parallel-size 2 --hidden-dropout 0 --attention-dropout 0"""


def _held() -> list[tuple[int, bool]]:
    """Of each backward on the first stage: layers whose inputs have got their gradient, from the last, and whether the
    received gradient still takes memory of its own then."""
    run = run_from(FLAGS)
    wait, received, seen = run.pipeline._wait, [lambda: None], list[tuple[int, bool]]()

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

    run.pipeline._wait = waits  # type: ignore[method-assign]
    if run.mesh.pp.is_first:
        for number, block in enumerate(run.pipeline.stages[0].blocks):  # type: ignore[arg-type]
            block.register_forward_pre_hook(lambda _, given, number=number: watched(number, given[0]))
    train_step(run)
    return seen


def test_the_received_gradient_goes_once_the_last_layer_has_used_it() -> None:
    first, last = run_ranks(2, _held)
    assert first == [(number, False) for number in reversed(range(LAYERS))] * 3 and not last
