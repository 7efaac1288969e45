"""The trainer on the simulated GPU: no devices are mixed, a step synchronizes once, and losses equal a CPU's.

Defects are planted one at a time, and each is reported with its line.
"""

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
from pairwise import nightly_except
from ranks import run_ranks
from torch import Tensor
from train_cases import run_from

from megalite.kernels.adamw import adamw_
from megalite.models import gpt
from megalite.nn import wgrad_store
from megalite.nn.mlp import MLP
from megalite.training import setup
from megalite.training import train_step as step
from megalite.training.evaluation import evaluate
from megalite.training.logging.step_log import parameter_norm
from megalite.training.replica_check import check_replicas
from megalite.training.state import Run
from simulated_gpu import runs
from simulated_gpu.simulator import nccl
from simulated_gpu.simulator.device import SimulatedGpu, simulated
from simulated_gpu.simulator.trace import Launch, waits_of

COMMON = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2
 --global-batch-size 4 --train-iters 9 --lr 0.01 --seed 7 --mock-data --tokenizer-type NullTokenizer --vocab-size 94
 --make-vocab-size-divisible-by 8 --eval-iters 1 --kernels torch --attention-kernel torch"""
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
 --untie-embeddings-and-output-weights --ffn-hidden-size 48"""
STEPS = 2
SUMMED = "--check-weight-hash-across-dp-replicas-interval 9"  # checks the bits of the weights
ONCE = ["tolist megalite/training/train_step.py"]  # the agreement
SUBSTITUTIONS = {"LLAMA": LLAMA, "SUMMED": SUMMED}
SUBSTITUTIONS |= {f"{kind[0].upper()}P2": f"--{kind}-model-parallel-size 2" for kind in ("tensor", "pipeline")}
TABLES = tomllib.loads(Path(__file__).with_name("trainer.toml").read_text("utf-8"))
ALONE, (OFTEN, RARELY) = TABLES["alone"], TABLES["together"].values()


def steps_of(run: Run) -> list[tuple[float, ...]]:
    """Return (loss, gradient norm) of each step, then the evaluation loss and the norm of the weights."""
    try:
        steps: list[tuple[float, ...]] = []
        for _ in range(STEPS):
            result = step.train_step(run)
            steps.append((result.loss, result.grad_norm))
        run.sync.wait_param_sync()
        check_replicas(run, STEPS)
        return [*steps, (evaluate(run, run.valid_loaders[0].data, 1), parameter_norm(run))]
    finally:
        run.close()


@pytest.mark.parametrize("name", ALONE)
def test_gpu_step_synchronizes_once_and_equals_a_cpu(name: str) -> None:
    flags, tolerance = ALONE[name]
    flags = f"--hidden-dropout 0 --attention-dropout 0 {flags.format_map(SUBSTITUTIONS)}"
    with simulated() as gpu:
        gpu_steps = steps_of(run_from(f"{COMMON} {flags}", device=gpu.device))
    assert not gpu.mixed
    assert [str(wait) for wait in waits_of(gpu.trace) if "step" in wait.within] == ONCE * STEPS
    cpu_steps = steps_of(run_from(f"{COMMON} {flags}"))
    assert gpu_steps == [pytest.approx(pair, rel=tolerance, abs=0) for pair in cpu_steps]


def compare_with_cpu(flags: str) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]], list[str], list[str]]:
    """Return this rank's results on a simulated GPU and on a CPU, mixed operations, and the host's waits in steps."""
    cpu_steps = steps_of(run_from(f"{COMMON} {flags} --no-shared-memory"))
    with runs.on_gpu(dist.get_rank()) as gpu:
        gpu_steps = steps_of(run_from(f"{COMMON} {flags}", device=gpu.device))
    waits = [str(wait) for wait in waits_of(gpu.trace) if "step" in wait.within]
    return gpu_steps, cpu_steps, [str(mixed) for mixed in gpu.mixed], waits


@pytest.mark.parametrize("name", nightly_except([*OFTEN, *RARELY], [*OFTEN], str))
def test_each_rank_synchronizes_once_per_step_under_every_layout(name: str) -> None:
    world, flags = (OFTEN | RARELY)[name]
    for gpu_steps, cpu_steps, mixed, waits in run_ranks(
        world, compare_with_cpu, flags.format_map(SUBSTITUTIONS), backend=nccl.join
    ):
        assert gpu_steps == cpu_steps and not mixed and waits == ONCE * STEPS


def interpreted(flags: str) -> tuple[list[tuple[float, ...]], list[str], list[str], Counter[str]]:
    os.environ.update(TRITON_INTERPRET="1", MEGALITE_KERNELS="triton")
    with simulated() as gpu:
        gpu_steps = steps_of(run_from(f"{COMMON} {flags}", device=gpu.device))
    waits = [str(wait) for wait in waits_of(gpu.trace) if "step" in wait.within]
    with simulated() as mixed_gpu:
        w, m, v = (torch.ones(8, device=mixed_gpu.device) for _ in range(3))
        adamw_(w, torch.ones(8), m, v, lr=0.1, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.0, step=1)
    assert [fact.what for fact in mixed_gpu.mixed] == ["_adamw(gpu, host, gpu, gpu, gpu)"], mixed_gpu.mixed
    kernels = Counter(fact.name for fact in gpu.trace if isinstance(fact, Launch) and fact.name.startswith("_"))
    return gpu_steps, [str(mixed) for mixed in gpu.mixed], waits, kernels


def test_triton_kernels_do_not_synchronize() -> None:
    small_flags = "--num-layers 1 --global-batch-size 2 --seq-length 8 --vocab-size 30"  # the interpreter is slow
    flags = (
        f"{LLAMA} --kernels triton --attention-kernel auto --hidden-dropout 0.1 --attention-dropout 0.1 {small_flags}"
    )
    [(gpu_steps, mixed, waits, kernels)] = run_ranks(1, interpreted, flags)
    assert not mixed and waits == ONCE * STEPS
    num_rotations = 2 * (2 * STEPS + 1)  # queries and keys, forward and backward in a step and forward in an evaluation
    assert kernels["_rotate"] == num_rotations and kernels["_adamw"] and kernels["_sum_of_squares_kernel"], kernels
    cpu_steps = steps_of(run_from(f"{COMMON} {flags} --kernels torch"))
    assert gpu_steps == [pytest.approx(pair, rel=1e-4) for pair in cpu_steps]


Patch = Callable[[Any, str, Any], None]


def run_step(flags: str = "") -> SimulatedGpu:
    with simulated() as gpu:
        run = run_from(f"{COMMON} {LLAMA} --eod-mask-loss {flags}", device=gpu.device)
        step.train_step(run)
        run.close()
    return gpu


def plant(patch: Patch, owner: Any, name: str, defect: Callable[..., None]) -> None:
    """Call `defect` after each call of a function, with its result and arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def planted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        defect(result, *args, **kwargs)
        return result

    patch(owner, name, planted)


# the planted defects: each is one line, whose number the test knows


def read_norm(y: Tensor, *_: Any) -> None:
    y.detach().norm().item()


def check_for_nan(_: None, grad: Tensor, dy: Tensor, x: Tensor, **__: Any) -> None:
    assert not dy.isnan().any()


WAITS: dict[str, tuple[Any, str, Callable[..., None], str, str]] = {
    "item in forward": (MLP, "forward", read_norm, "item", "forward"),
    "bool in backward": (wgrad_store, "accumulate_weight_grad_", check_for_nan, "item", "backward"),
}


@pytest.mark.parametrize("name", WAITS)
def test_synchronization_is_located_by_line_and_phase(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, defect, kind, phase = WAITS[name]
    plant(monkeypatch.setattr, owner, attribute, defect)
    waits = [wait for wait in waits_of(run_step().trace) if "step" in wait.within]
    where = f"tests/simulated_gpu/test_trainer.py:{defect.__code__.co_firstlineno + 1}"
    planted = [wait for wait in waits if wait.where == where]
    assert planted and {(wait.kind, wait.phase) for wait in planted} == {(kind, phase)}
    assert [str(wait) for wait in waits if wait not in planted] == ONCE


def table_on_the_host(patch: Patch) -> None:
    original = gpt.rope_tables
    patch(gpt, "rope_tables", lambda length, rope, device, dtype: original(length, rope, dtype=dtype))


def pageable_batches(patch: Patch) -> None:
    original = setup.to_host_batch
    patch(setup, "to_host_batch", lambda micro, pin, **marks: original(micro, pin=False, **marks))


MIXED: dict[str, tuple[Callable[[Patch], None], str, str]] = {
    "a table on the host": (table_on_the_host, "mul(", "megalite/kernels/rope.py"),
    "pageable batches": (pageable_batches, "host to gpu, non_blocking", "megalite/training/batch.py"),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices_are_located_by_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    defect, what, file = MIXED[name]
    defect(monkeypatch.setattr)
    mixed = run_step().mixed
    assert any(what in fact.what and fact.where.startswith(f"{file}:") for fact in mixed), mixed
