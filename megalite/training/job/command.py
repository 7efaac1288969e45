"""The training command: parse the flags, detect the launcher, and run or launch the ranks, one run per directory.

This module does not import torch, which takes seconds, or a minute from a cold disk: errors of the command are reported
before that.
"""

import contextlib
import importlib.util
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from megalite.checkpoint.storage.location import CheckpointError
from megalite.common import environment
from megalite.common.console import discard_unwritable_output, print_err
from megalite.common.exit_codes import ExitCode
from megalite.common.exits import exit_now
from megalite.common.optional_packages import missing_package_message
from megalite.config import cli
from megalite.config.env_overrides import env_problems
from megalite.config.options import Config, LogConfig, num_local_ranks
from megalite.data.files.missing_files import missing_file_errors, without_data_files
from megalite.launch import process_group, rank_info
from megalite.launch.local_launcher import ORDERLY_STOP_S, cpu_count, launch_local, print_stopping
from megalite.launch.rank_info import LaunchError, RankInfo
from megalite.models.families import PRESETS
from megalite.training.job.restarts import RestartPolicy, lock_run_dir
from megalite.training.job.stop_signals import StopImmediately, StopSignalHandler, block_signals
from megalite.training.logging.run_dir import name_conflict, run_dir
from megalite.training.logging.status import write_status

MAX_RANKS_PER_CORE = 8
GPUS_PER_NODE = 8  # assumed by a dry run without a launcher


@dataclass(frozen=True)
class TrainCommand:
    """A valid command line."""

    config: Config
    warnings: Sequence[str] = ()  # lines for the log
    ranks: RankInfo | None = None  # this process's rank; None without a launcher
    signals: StopSignalHandler | None = field(default=None, compare=False)  # if it is installed already

    def launch(self, train: "Callable[[RankInfo, TrainCommand], int]") -> int:
        """Run `train` in this process, or on --nproc local ranks with restarts, and return the exit code."""
        config = self.config
        nproc = num_local_ranks(config.parallel)
        dry_run = config.train.dry_run
        is_first = self.ranks is None or self.ranks.rank == 0
        try:
            with lock_run_dir(config) if is_first and not dry_run else contextlib.nullcontext():
                if missing := _missing_files_and_packages(config):
                    ranks = self.ranks or RankInfo()
                    if ranks.local_rank == 0:
                        for line in missing:
                            print_err(f"pretrain_gpt.py: {line}")
                    if ranks.rank == 0 and not dry_run:
                        write_status(
                            run_dir(config),
                            ExitCode.PREFLIGHT.outcome,
                            config,
                            "\n".join(missing),
                            resumes=ranks.is_restart,
                        )
                    return ExitCode.PREFLIGHT
                if self.ranks is None and (nproc > 1 or config.operations.max_restarts) and not dry_run:
                    return launch_local(nproc, train, (self,), keep_signals_blocked=True, on_exit=RestartPolicy(config))
                return train(self.ranks or RankInfo(world_size=nproc, local_world_size=min(nproc, GPUS_PER_NODE)), self)
        except (CheckpointError, LaunchError) as error:  # another run in the directory; no room for temporary files
            print_err(f"pretrain_gpt.py: {error}")
            return ExitCode.PREFLIGHT

    def install_signal_handler(self, ranks: RankInfo) -> StopSignalHandler:
        """Install and return the handler of stop signals; signals that were blocked until now are delivered to it."""
        if self.signals is not None:
            return self.signals
        no_launcher = ranks.rank == 0 and not (ranks.init_method or "").startswith("file:")
        train = self.config.train
        saves = self.config.checkpoint.save is not None
        stops_gracefully = saves or train.exit_signal_handler or train.exit_signal is not None
        extra_signals = [train.exit_signal] if train.exit_signal else []
        handler = StopSignalHandler(stops_gracefully, extra_signals, prints=no_launcher)
        handler.install()
        if saves:
            process_group.stop_when_torchrun_exits(ORDERLY_STOP_S)
        return handler


def parse(argv: list[str]) -> TrainCommand:
    """Parse the flags and read the environment and the launcher; prints all problems and exits with code 2."""
    block_signals()
    warnings = process_group.exit_with_torchrun()
    launcher_problems: list[str] = []
    ranks: RankInfo | None = None
    try:
        ranks = rank_info.read_environment()
    except LaunchError as error:
        launcher_problems.append(str(error))

    def world_size(config: Config) -> int:
        return num_local_ranks(config.parallel) if ranks is None else ranks.world_size

    def machine_problems(config: Config, option_problems: list[str]) -> list[str]:
        nproc = num_local_ranks(config.parallel)
        problems = [*launcher_problems, *env_problems()]
        if problem := rank_info.nproc_error(ranks, config.parallel.nproc):
            problems.append(problem)
        if ranks is None and nproc > MAX_RANKS_PER_CORE * cpu_count() and not config.train.dry_run:
            problems.append(f"nproc={nproc} is more than {MAX_RANKS_PER_CORE} x {cpu_count()} processors; start fewer")
        if ranks is None or (ranks.rank == 0 and not ranks.is_restart):
            problems += name_conflict(config)
        if option_problems or problems:  # without other problems `launch` reports missing files, with exit code 3
            problems += _missing_files_and_packages(config)
        return problems

    parsed = cli.parse_config_or_exit(
        argv, PRESETS, machine_problems, world_size, quiet=ranks is not None and ranks.rank > 0
    )
    config = parsed.config
    if config.parallel.device != "cpu":
        process_group.set_cuda_environment(
            config.parallel.tensor_model_parallel_size, run_dir(config), config.train.deterministic_mode
        )
    if ranks is not None and config.operations.max_restarts:
        warnings.append("max_restarts is for ranks that --nproc starts: torchrun has its own --max-restarts")
    return TrainCommand(config, [*parsed.warnings, *environment.env_warnings(), *warnings], ranks)


def _missing_files_and_packages(config: Config) -> list[str]:
    """Return a line for each missing file and package."""
    other_machine = config.train.dry_run_rank is not None  # --dry-run-rank plans a run on another machine
    data = without_data_files(config.data) if other_machine else config.data
    files = missing_file_errors(data, other_machine)
    return files if config.train.dry_run else [*files, *missing_packages(config.log)]


def missing_packages(log: LogConfig) -> list[str]:
    """Return one line for each logging option whose package is not installed; imports no package."""
    options = (
        ("tensorboard_dir", log.tensorboard_dir, "tensorboard"),
        ("wandb_project", log.wandb_project, "wandb"),
        ("mlflow_experiment", log.mlflow_experiment, "mlflow"),
        ("trackio_project", log.trackio_project, "trackio"),
    )
    return [
        missing_package_message(f"{option}={value!r}", package)
        for option, value, package in options
        if value is not None and importlib.util.find_spec(package) is None
    ]


def run_main(main: Callable[[list[str]], int]) -> NoReturn:
    """End the process with the exit code of `main`, or as interrupted by a signal that no run handled."""
    try:
        process_group.exit_process(lambda: main(sys.argv[1:]))
    except KeyboardInterrupt as error:
        if not isinstance(error, StopImmediately):  # the handler of StopImmediately has reported it
            print_stopping(signal.Signals[error.args[0]] if error.args else signal.SIGINT)
        exit_now(ExitCode.INTERRUPTED)
    finally:
        discard_unwritable_output()
