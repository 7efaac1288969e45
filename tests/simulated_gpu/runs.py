"""Whole runs on ranks that write down what NCCL would be told: training with all that is collective, and text.

A run is a function of one rank; `traced(world, run, ...)` gives its facts, rank by rank.
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
from simulated_gpu.simulator.device import Card, simulated
from simulated_gpu.simulator.trace import Fact

TORCH = "--kernels torch --attention-kernel torch"
EVERYTHING = """--eval-iters 1 --eval-interval 1 --save-interval 1 --save-interval-mins 0.0001 --log-params-norm
 --log-num-zeros-in-grad --check-weight-hash-across-dp-replicas-interval 1 --timing-log-level 2 --log-throughput
 --exit-duration-in-mins 60 --micro-batch-size 1 --global-batch-size 8"""
PROMPTS = [[5, 17, 60], [11], [40, 41, 42]]

Run = Callable[..., None]


@contextlib.contextmanager
def on_card(rank: int) -> Iterator[Card]:
    """Its simulated card, in whose trace its NCCL writes, too: of a group that was begun with `nccl.join`, or alone."""
    with simulated(index=rank) as card:
        nccl.use(card)
        try:
            yield card
        finally:
            nccl.join()


def traced(world: int, run: Run, *args: Any, timeout: float = 600) -> dict[int, list[Fact]]:
    """`run(here, *args)` on each rank, `here` its simulated card."""
    return dict(enumerate(run_ranks(world, _traced, run, args, backend=nccl.join, timeout=timeout)))


def broken(world: int, run: Run, *args: Any, timeout: float = 100) -> tuple[dict[int, list[Fact]], list[str]]:
    """The same on CPUs, of a run that may fail: also what each rank died of, "" where it came to its end."""
    results = run_ranks(world, _broken, run, args, backend=nccl.join, timeout=timeout)
    return dict(enumerate(facts for facts, _ in results)), [text for _, text in results]


def _traced(run: Run, args: tuple[Any, ...]) -> list[Fact]:
    os.environ["MEGALITE_SHARED_MEMORY"] = "off"
    with on_card(dist.get_rank()) as there:
        run(there.device, *args)
        return there.trace


def _broken(run: Run, args: tuple[Any, ...]) -> tuple[list[Fact], str]:
    os.environ["MEGALITE_SHARED_MEMORY"] = "off"
    try:
        run(torch.device("cpu"), *args)
        return nccl.facts(), ""
    except Exception as error:
        return nccl.facts(), f"{type(error).__name__}: {error}"


def steps(here: torch.device, flags: str, count: int = 2) -> None:
    """Training steps alone."""
    run = run_from(f"{COMMON} {flags} {TORCH}", device=here)
    for _ in range(count):
        train_step(run)
    run.buffer.wait_param_sync()
    run.close()


def everything(here: torch.device, flags: str, folder: str) -> None:
    """Two runs: one that stops after a step, one that goes on from what it saved; then text from the last checkpoint."""
    words = f"{COMMON} {flags} {EVERYTHING} {TORCH} --device {here.type} --save {folder}".split()
    for last, ends in (("--exit-interval 1", ExitCode.REQUEUE), (f"--load {folder}", ExitCode.DONE)):
        with mock.patch.object(train_run, "process_group", lambda *_, **__: contextlib.nullcontext(here)):
            rank, world = dist.get_rank(), dist.get_world_size()
            config = config_from([*words, "--train-iters", "2", *last.split()])
            assert pretrain(config, RankInfo(rank, world, rank, world)) == ends
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    mesh = build_mesh(tp=tp, pp=pp, device=here, timeout=datetime.timedelta(seconds=60))
    generate_tokens(load_model(Path(folder), mesh), PROMPTS, 4, Sampling())


@contextlib.contextmanager
def on_rank(rank: int, owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """On one rank `replacement(original, *args)` is called in place of a function: to plant a defect."""
    original = getattr(owner, name)
    here = dist.get_rank() == rank
    with mock.patch.object(owner, name, lambda *a, **k: replacement(original, *a, **k) if here else original(*a, **k)):
        yield
