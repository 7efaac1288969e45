"""Complete runs whose ranks record what NCCL would be given: training with every collective, and generation.

A run is a function that each rank calls; `traced(world, run, ...)` returns the facts of every rank.
"""

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from layout_cases import COMMON
from ranks import run_ranks
from train_cases import config_from, pretrain, run_from

from megalite.common.exit_codes import ExitCode
from megalite.generate.generation import Sampling, generate_tokens, load_model
from megalite.launch.rank_info import RankInfo
from megalite.parallel.mesh import build_mesh
from megalite.training.job import job as train_run
from megalite.training.train_step import train_step
from simulated_gpu.simulator import nccl
from simulated_gpu.simulator.device import SimulatedGpu, simulated
from simulated_gpu.simulator.trace import Fact

TORCH = "--kernels torch --attention-kernel torch"
ALL_FEATURES = """--eval-iters 1 --eval-interval 1 --save-interval 1 --save-interval-mins 0.0001 --log-params-norm
 --log-num-zeros-in-grad --check-weight-hash-across-dp-replicas-interval 1 --timing-log-level 2 --log-throughput
 --exit-duration-in-mins 60 --micro-batch-size 1 --global-batch-size 8"""
PROMPTS = [[5, 17, 60], [11], [40, 41, 42]]

Run = Callable[..., None]


@contextlib.contextmanager
def on_gpu(rank: int) -> Iterator[SimulatedGpu]:
    """Simulate the rank's GPU, and record its NCCL operations in the same trace, if it has an `nccl.join` group."""
    with simulated(index=rank) as gpu:
        nccl.use(gpu)
        try:
            yield gpu
        finally:
            nccl.join()


def traced(world: int, run: Run, *args: Any, timeout: float = 600) -> dict[int, list[Fact]]:
    """Call `run(device, *args)` on each rank with its simulated GPU, and return the facts of each rank."""
    return dict(enumerate(run_ranks(world, _traced, run, args, backend=nccl.join, timeout=timeout)))


def broken(world: int, run: Run, *args: Any, timeout: float = 100) -> tuple[dict[int, list[Fact]], list[str]]:
    """Do the same on CPUs for a run that may fail, and also return each rank's error, or "" if it finished."""
    results = run_ranks(world, _broken, run, args, backend=nccl.join, timeout=timeout)
    return dict(enumerate(facts for facts, _ in results)), [text for _, text in results]


def _traced(run: Run, args: tuple[Any, ...]) -> list[Fact]:
    os.environ["MEGALITE_SHARED_MEMORY"] = "off"
    with on_gpu(dist.get_rank()) as gpu:
        run(gpu.device, *args)
        return gpu.trace


def _broken(run: Run, args: tuple[Any, ...]) -> tuple[list[Fact], str]:
    os.environ["MEGALITE_SHARED_MEMORY"] = "off"
    try:
        run(torch.device("cpu"), *args)
        return nccl.facts(), ""
    except Exception as error:
        return nccl.facts(), f"{type(error).__name__}: {error}"


def steps(device: torch.device, flags: str, count: int = 2) -> None:
    """Run only training steps."""
    run = run_from(f"{COMMON} {flags} {TORCH}", device=device)
    for _ in range(count):
        train_step(run)
    run.sync.wait_param_sync()
    run.close()


def everything(device: torch.device, flags: str, save_dir: str) -> None:
    """Train one step, resume from its checkpoint for another, and generate from the last checkpoint."""
    argv = f"{COMMON} {flags} {ALL_FEATURES} {TORCH} --device {device.type} --save {save_dir}".split()
    for extra_flags, exit_code in (("--exit-interval 1", ExitCode.REQUEUE), (f"--load {save_dir}", ExitCode.DONE)):
        with mock.patch.object(train_run, "process_group", lambda *_, **__: contextlib.nullcontext(device)):
            rank, world = dist.get_rank(), dist.get_world_size()
            config = config_from([*argv, "--train-iters", "2", *extra_flags.split()])
            assert pretrain(config, RankInfo(rank, world, rank, world)) == exit_code
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    mesh = build_mesh(tp=tp, pp=pp, device=device, timeout=datetime.timedelta(seconds=60))
    generate_tokens(load_model(Path(save_dir), mesh), PROMPTS, 4, Sampling())


@contextlib.contextmanager
def on_rank(rank: int, owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Plant a defect: on one rank, call `replacement(original, *args)` instead of a function."""
    original = getattr(owner, name)
    is_rank = dist.get_rank() == rank
    with mock.patch.object(
        owner, name, lambda *a, **k: replacement(original, *a, **k) if is_rank else original(*a, **k)
    ):
        yield
