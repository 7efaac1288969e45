"""The trainer on the simulated card: nothing of host and card meets, a step waits once, the numbers are those of a CPU.
What a card would suffer from is planted, one at a time, and found with its line."""

import functools
import os
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pairwise import rarely
from ranks import run_ranks
from torch import Tensor
from train_cases import run_from

from megalite.kernels.adamw import adamw_
from megalite.models import gpt
from megalite.nn import wgrad_store
from megalite.nn.mlp import MLP
from megalite.training import setup
from megalite.training import train_step as step
from megalite.training import trainer as loop
from megalite.training.state import Run
from megalite.training.train_step import parameter_norm
from simulated_gpu import runs
from simulated_gpu.simulator import nccl
from simulated_gpu.simulator.device import Card, simulated
from simulated_gpu.simulator.trace import Launch, waits_of

COMMON = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2
 --global-batch-size 4 --train-iters 9 --lr 0.01 --seed 7 --mock-data --tokenizer-type NullTokenizer --vocab-size 94
 --make-vocab-size-divisible-by 8 --eval-iters 1 --kernels torch --attention-kernel torch"""
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
 --untie-embeddings-and-output-weights --ffn-hidden-size 48"""
STEPS = 2
SUMMED = "--check-weight-hash-across-dp-replicas-interval 9"  # the bits of the weights, at every step
ONCE = ["tolist megalite/training/train_step.py"]  # the agreement
WORDS = {"LLAMA": LLAMA, "SUMMED": SUMMED}
WORDS |= {f"{kind[0].upper()}P2": f"--{kind}-model-parallel-size 2" for kind in ("tensor", "pipeline")}
TABLES = tomllib.loads(Path(__file__).with_name("trainer.toml").read_text("utf-8"))
ALONE, (OFTEN, RARELY) = TABLES["alone"], TABLES["together"].values()


def steps_of(run: Run) -> list[tuple[float, ...]]:
    """(loss, norm of the gradient) of each step; then an evaluation's loss and the norm of the weights."""
    try:
        found: list[tuple[float, ...]] = []
        for _ in range(STEPS):
            result = step.train_step(run)
            found.append((result.loss, result.grad_norm))
        run.buffer.wait_param_sync()
        loop.check_replicas(run, STEPS)
        return [*found, (loop.evaluate(run, run.valid_loaders[0].data, 1), parameter_norm(run))]
    finally:
        run.close()


@pytest.mark.parametrize("name", ALONE)
def test_gpu_step_synchronizes_once_and_equals_a_cpu(name: str) -> None:
    flags, almost = ALONE[name]
    flags = f"--hidden-dropout 0 --attention-dropout 0 {flags.format_map(WORDS)}"
    with simulated() as card:
        here = steps_of(run_from(f"{COMMON} {flags}", device=card.device))
    assert not card.mixed
    assert [str(wait) for wait in waits_of(card.trace) if "step" in wait.within] == ONCE * STEPS
    there = steps_of(run_from(f"{COMMON} {flags}"))
    assert here == [pytest.approx(pair, rel=almost, abs=0) for pair in there]


def on_a_card(flags: str) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]], list[str], list[str]]:
    """Of this rank: the numbers there and on a CPU, what was mixed, for what the host waited in steps."""
    there = steps_of(run_from(f"{COMMON} {flags} --no-shared-memory"))
    with runs.on_card(dist.get_rank()) as card:
        here = steps_of(run_from(f"{COMMON} {flags}", device=card.device))
    waits = [str(wait) for wait in waits_of(card.trace) if "step" in wait.within]
    return here, there, [str(mixed) for mixed in card.mixed], waits


@pytest.mark.parametrize("name", rarely([*OFTEN, *RARELY], [*OFTEN], str))
def test_each_rank_synchronizes_once_per_step_under_every_layout(name: str) -> None:
    world, flags = (OFTEN | RARELY)[name]
    for here, there, mixed, waits in run_ranks(world, on_a_card, flags.format_map(WORDS), backend=nccl.join):
        assert here == there and not mixed and waits == ONCE * STEPS


def interpreted(flags: str) -> tuple[list[tuple[float, ...]], list[str], list[str], Counter[str]]:
    os.environ.update(TRITON_INTERPRET="1", MEGALITE_KERNELS="triton")
    with simulated() as card:
        here = steps_of(run_from(f"{COMMON} {flags}", device=card.device))
    waits = [str(wait) for wait in waits_of(card.trace) if "step" in wait.within]
    with simulated() as planted:
        w, m, v = (torch.ones(8, device=planted.device) for _ in range(3))
        adamw_(w, torch.ones(8), m, v, lr=0.1, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.0, step=1)
    assert [one.what for one in planted.mixed] == ["_adamw(card, host, card, card, card)"], planted.mixed
    kernels = Counter(fact.name for fact in card.trace if isinstance(fact, Launch) and fact.name.startswith("_"))
    return here, [str(mixed) for mixed in card.mixed], waits, kernels


def test_triton_kernels_do_not_synchronize() -> None:
    small = "--num-layers 1 --global-batch-size 2 --seq-length 8 --vocab-size 30"  # the interpreter takes its time
    flags = f"{LLAMA} --kernels triton --attention-kernel auto --hidden-dropout 0.1 --attention-dropout 0.1 {small}"
    [(here, mixed, waits, kernels)] = run_ranks(1, interpreted, flags)
    assert not mixed and waits == ONCE * STEPS
    turns = 2 * (2 * STEPS + 1)  # queries and keys, there and back in a step and there in an evaluation
    assert kernels["_rotate"] == turns and kernels["_adamw"] and kernels["_sum_of_squares_kernel"], kernels
    there = steps_of(run_from(f"{COMMON} {flags} --kernels torch"))
    assert here == [pytest.approx(pair, rel=1e-4) for pair in there]


Patch = Callable[[Any, str, Any], None]


def a_step(flags: str = "") -> Card:
    with simulated() as card:
        run = run_from(f"{COMMON} {LLAMA} --eod-mask-loss {flags}", device=card.device)
        step.train_step(run)
        run.close()
    return card


def plant(patch: Patch, owner: Any, name: str, defect: Callable[..., None]) -> None:
    """`defect` is called with the arguments of a function and its result, each time after it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def planted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        defect(result, *args, **kwargs)
        return result

    patch(owner, name, planted)


# what is planted: each is one line, of which the test knows the place


def reads_a_norm(y: Tensor, *_: Any) -> None:
    y.detach().norm().item()


def asks_for_nan(_: None, grad: Tensor, dy: Tensor, x: Tensor, **__: Any) -> None:
    assert not dy.isnan().any()


WAITS: dict[str, tuple[Any, str, Callable[..., None], str, str]] = {
    "item in forward": (MLP, "forward", reads_a_norm, "item", "forward"),
    "bool in backward": (wgrad_store, "accumulate_weight_grad_", asks_for_nan, "item", "backward"),
}


@pytest.mark.parametrize("name", WAITS)
def test_synchronization_is_located_by_line_and_phase(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, defect, kind, phase = WAITS[name]
    plant(monkeypatch.setattr, owner, attribute, defect)
    waits = [wait for wait in waits_of(a_step().trace) if "step" in wait.within]
    where = f"tests/simulated_gpu/test_trainer.py:{defect.__code__.co_firstlineno + 1}"
    found = [wait for wait in waits if wait.where == where]
    assert found and {(wait.kind, wait.phase) for wait in found} == {(kind, phase)}
    assert [str(wait) for wait in waits if wait not in found] == ONCE


def table_on_the_host(patch: Patch) -> None:
    tables = gpt.rope_tables
    patch(gpt, "rope_tables", lambda *args, device, **kwargs: tables(*args, **kwargs))


def pageable_batches(patch: Patch) -> None:
    prepare = setup.to_host_batch
    patch(setup, "to_host_batch", lambda micro, pin, **marks: prepare(micro, pin=False, **marks))


MIXED: dict[str, tuple[Callable[[Patch], None], str, str]] = {
    "a table on the host": (table_on_the_host, "mul(", "megalite/kernels/rope.py"),
    "pageable batches": (pageable_batches, "host to card, non_blocking", "megalite/training/batch.py"),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices_are_located_by_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    defect, what, file = MIXED[name]
    defect(monkeypatch.setattr)
    mixed = a_step().mixed
    assert any(what in one.what and one.where.startswith(f"{file}:") for one in mixed), mixed
