"""Small command lines for tests, and runs of them: in this process, without startup checks, or with a signal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import programs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megalite.checkpoint.manager.saver import CheckpointSaver
    from megalite.common.exit_codes import RunResult
    from megalite.config.options import Config
    from megalite.launch.rank_info import RankInfo
    from megalite.models.gpt import Stage
    from megalite.training.job.stop_signals import StopSignalHandler
    from megalite.training.state import Run

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 0.01 --mock-data --vocab-size 93 --make-vocab-size-divisible-by 8 "
    "--eval-iters 1 --log-interval 1"
).split()
BORDERS = " --reset-position-ids --reset-attention-mask --eod-mask-loss"  # of documents
TP2_PP2 = "--nproc 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()


def config_from(words: str | Sequence[str]) -> Config:
    """Parse a command line. Raises ConfigError."""
    from megalite.config import cli
    from megalite.models.families import PRESETS

    return cli.read(words.split() if isinstance(words, str) else words, PRESETS)[0]


def this_rank() -> RankInfo:
    """Return this rank of tests/support/ranks.py, or the only rank."""
    import torch.distributed as dist

    from megalite.launch.rank_info import RankInfo

    return RankInfo(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else RankInfo()


def stage_from(words: str | Sequence[str], dtype: torch.dtype) -> Stage:
    """Build the complete model on one rank, without a run."""
    from megalite.parallel.mesh import Mesh
    from megalite.planning.run_plan import make_run_plan

    config = config_from(words)
    return make_run_plan(config, 1, config.data.vocab_size).build_stages(Mesh.single_process(), dtype)[0]


OPEN: list[Run] = []  # until the test is over, or what tests/support/ranks.py calls


def run_from(given: Config | str | Sequence[str], **how: Any) -> Run:
    """Build a run on this rank and the CPU; `how` has arguments of build_run. It is closed after the test."""
    import torch

    from megalite.config.options import Config
    from megalite.training.setup import build_run

    config = given if isinstance(given, Config) else config_from(given)
    OPEN.append(build_run(config, how.pop("ranks", this_rank()), how.pop("device", torch.device("cpu")), **how))
    return OPEN[-1]


def close_runs() -> None:
    while OPEN:
        OPEN.pop().close()


def kept(run: Run, kind: str = "") -> dict[str, Tensor]:
    """Copy everything that an update changes: weights, main weights, moments and the number of updates, or one kind."""
    import torch

    pieces = {piece.name: piece.data.clone() for piece in run.optimizer.checkpoint_shards()}
    pieces |= {"updates": torch.tensor(run.optimizer.num_updates)}
    return {name: data for name, data in pieces.items() if name.startswith(kind)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Return True if all tensors are equal to the bit; a NaN is unequal."""
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def pretrain(
    config: Config, ranks: RankInfo | None = None, warnings: Sequence[str] = (), stop: StopSignalHandler | None = None
) -> int:
    """Run the program on one rank from a parsed command line, and return its exit code."""
    import pretrain_gpt
    from megalite.launch.rank_info import RankInfo
    from megalite.training.job.command import TrainCommand
    from megalite.training.job.stop_signals import StopSignalHandler

    with mock.patch("megalite.training.job.job.keep_freed_heap"):  # for the whole process
        return pretrain_gpt.train(
            ranks or RankInfo(), TrainCommand(config, warnings, signals=stop or StopSignalHandler())
        )


def train(run: Run, config: Config, folder: Path, saver: CheckpointSaver | None = None) -> RunResult:
    """Train from the run's step to its last, without a log."""
    from megalite.training.job.stop_signals import StopSignalHandler
    from megalite.training.logging.metrics_logger import NullLogger
    from megalite.training.logging.time_breakdown import TimeBreakdown
    from megalite.training.logging.timers import Timers
    from megalite.training.monitoring.watchdog import Watchdog
    from megalite.training.train_step import train_step
    from megalite.training.trainer import Monitors, Trainer  # torch: others want the command lines alone

    dog = Watchdog(run.mesh, folder, Timers(), 600.0)
    monitors = Monitors(
        config, run, folder, TimeBreakdown(run.mesh, time.perf_counter()), [""] * run.mesh.world.size, dog
    )
    try:
        training = Trainer(run, config, folder, NullLogger(), StopSignalHandler(), saver, None, monitors)
        with monitors.collector.running(), contextlib.closing(monitors.profiler):
            for asks in training.steps():
                training.end_step(train_step(run, **asks))
        return training.finish()
    finally:
        monitors.watchdog.close()


def logged(folder: Path, what: str = "train/loss") -> list[Any]:
    """Return a metric of each step that a run has logged."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
    return [row[what] for row in rows if "train/loss" in row]


def waits(pid: int, number: int) -> bool:
    """Return True if a process blocks a signal or has a handler for it. It blocks only for a short time."""
    masks = re.findall(r"Sig(?:Blk|Cgt):\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def signalled(
    *flags: str, number: int, after: str = "step     5/", again_s: float | None = None, alone: bool = False
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a run whose process group gets a signal, as terminals, timeout, scancel and systemd
    send it, once the run has shown `after`, while torch is imported where that is "". `again_s`: a second one, so much
    later. `alone`: only to the launcher."""
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags]
    pipe = subprocess.PIPE
    start = programs.Popen if after else subprocess.Popen  # a forked one has torch from the start
    process = start(words, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, start_new_session=True)
    shown = []
    try:
        for line in process.stdout if after else []:
            shown.append(line)
            if after in line:
                break
        while not after and not waits(process.pid, signal.SIGTERM):
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, number) if alone else os.killpg(process.pid, number)
        if again_s is not None:
            time.sleep(again_s)
            os.killpg(process.pid, number)
        out, err = process.communicate(timeout=60)
        return process.returncode, "".join(shown) + out, err
    finally:
        process.kill()
