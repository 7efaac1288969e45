"""Command lines of small runs, and functions that run them in this process, without startup checks, or with a signal."""

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
SMALL_RUN = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 0.01 --mock-data --vocab-size 93 --make-vocab-size-divisible-by 8 "
    "--eval-iters 1 --log-interval 1"
).split()
DOCUMENT_FLAGS = " --reset-position-ids --reset-attention-mask --eod-mask-loss"  # between documents
TP2_PP2 = "--nproc 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()


def config_from(argv: str | Sequence[str]) -> Config:
    """Parse a command line of pretrain_gpt.py. Raises ConfigError."""
    from megalite.config import cli
    from megalite.models.families import PRESETS

    return cli.read(argv.split() if isinstance(argv, str) else argv, PRESETS)[0]


def this_rank() -> RankInfo:
    """Return this rank of tests/support/ranks.py, or the only rank."""
    import torch.distributed as dist

    from megalite.launch.rank_info import RankInfo

    return RankInfo(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else RankInfo()


def stage_from(argv: str | Sequence[str], dtype: torch.dtype) -> Stage:
    """Build the complete model on one rank, without a run."""
    from megalite.parallel.mesh import Mesh
    from megalite.planning.run_plan import make_run_plan

    config = config_from(argv)
    return make_run_plan(config, 1, config.data.vocab_size).balance.build_stages(Mesh.single_process(), dtype)[0]


OPEN_RUNS: list[Run] = []  # closed at the end of the test, or of the function that tests/support/ranks.py calls


def run_from(config_or_argv: Config | str | Sequence[str], **options: Any) -> Run:
    """Build a run, by default on this rank and the CPU, which is closed after the test. `options` go to build_run."""
    import torch

    from megalite.config.options import Config
    from megalite.training.setup import build_run

    config = config_or_argv if isinstance(config_or_argv, Config) else config_from(config_or_argv)
    OPEN_RUNS.append(
        build_run(config, options.pop("ranks", this_rank()), options.pop("device", torch.device("cpu")), **options)
    )
    return OPEN_RUNS[-1]


def close_runs() -> None:
    while OPEN_RUNS:
        OPEN_RUNS.pop().close()


def copy_state(run: Run, kind: str = "") -> dict[str, Tensor]:
    """Return copies of what an update changes, by name: weights, main weights, moments and the number of updates.

    With `kind`, only the tensors whose names start with it.
    """
    import torch

    state = {shard.name: shard.data.clone() for shard in run.optimizer.checkpoint_shards()}
    state |= {"updates": torch.tensor(run.optimizer.num_updates)}
    return {name: data for name, data in state.items() if name.startswith(kind)}


def is_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Return True if all tensors have equal elements. A NaN is unequal to itself."""
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def pretrain(
    config: Config,
    ranks: RankInfo | None = None,
    warnings: Sequence[str] = (),
    signals: StopSignalHandler | None = None,
) -> int:
    """Run the program on one rank from a parsed command line, and return its exit code."""
    import pretrain_gpt
    from megalite.launch.rank_info import RankInfo
    from megalite.training.job.command import TrainCommand
    from megalite.training.job.stop_signals import StopSignalHandler

    with mock.patch("megalite.training.job.job.keep_freed_heap"):  # it would change the process of the tests
        return pretrain_gpt.train(
            ranks or RankInfo(), TrainCommand(config, warnings, signals=signals or StopSignalHandler())
        )


def train(run: Run, config: Config, run_dir: Path, saver: CheckpointSaver | None = None) -> RunResult:
    """Train from the run's current step to its last one, without a log."""
    from megalite.training.builtin_callbacks import build_trainer  # imports torch, which the command lines do not need
    from megalite.training.job.stop_signals import StopSignalHandler
    from megalite.training.logging.metrics_logger import NullLogger
    from megalite.training.logging.time_breakdown import TimeBreakdown
    from megalite.training.logging.timers import Timers
    from megalite.training.monitoring.monitors import Monitors
    from megalite.training.monitoring.watchdog import Watchdog
    from megalite.training.train_step import train_step

    watchdog = Watchdog(run.mesh, run_dir, Timers(), 600.0)
    monitors = Monitors(
        config, run, run_dir, TimeBreakdown(run.mesh, time.perf_counter()), [""] * run.mesh.world.size, watchdog
    )
    try:
        trainer = build_trainer(run, config, run_dir, NullLogger(), StopSignalHandler(), saver, None, monitors)
        with monitors.collector.running(), contextlib.closing(monitors.profiler):
            for step_options in trainer.steps():
                trainer.end_step(train_step(run, **step_options))
        return trainer.finish()
    finally:
        monitors.watchdog.close()


def read_metric(run_dir: Path, metric: str = "train/loss") -> list[Any]:
    """Return the values of a metric of all steps that a run has logged."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text("utf-8").splitlines())
    return [row[metric] for row in rows if "train/loss" in row]


def blocks_or_handles(pid: int, signal_number: int) -> bool:
    """Return True if a process blocks a signal or has a handler for it. A run blocks signals only for a short time."""
    masks = re.findall(r"Sig(?:Blk|Cgt):\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
    return any(int(mask, 16) >> (signal_number - 1) & 1 for mask in masks)


def run_with_signal(
    *flags: str,
    signal_number: int,
    after_text: str = "step     5/",
    repeat_after_s: float | None = None,
    only_launcher: bool = False,
) -> tuple[int, str, str]:
    """Send a signal to a run, and return its exit code, stdout and stderr.

    Args:
        signal_number: The signal. Like terminals, timeout, scancel and systemd, it is sent to the process group.
        after_text: The output after which it is sent. With "", it is sent as soon as the run handles SIGTERM, while it
            imports torch.
        repeat_after_s: Send the signal a second time, this much later.
        only_launcher: Send it only to the launcher.
    """
    argv = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags]
    pipe = subprocess.PIPE
    start = programs.Popen if after_text else subprocess.Popen  # a forked program has imported torch from the start
    process = start(argv, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, start_new_session=True)
    lines = []
    try:
        for line in process.stdout if after_text else []:
            lines.append(line)
            if after_text in line:
                break
        while not after_text and not blocks_or_handles(process.pid, signal.SIGTERM):
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal_number) if only_launcher else os.killpg(process.pid, signal_number)
        if repeat_after_s is not None:
            time.sleep(repeat_after_s)
            os.killpg(process.pid, signal_number)
        out, err = process.communicate(timeout=60)
        return process.returncode, "".join(lines) + out, err
    finally:
        process.kill()
