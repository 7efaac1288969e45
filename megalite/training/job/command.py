"""The command: reads flags and launcher, and runs or starts the ranks, one run per directory. Imports no torch, which
takes seconds, and on a cold disk a minute: errors of a command come before that."""

import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from megalite.checkpoint.storage.location import CheckpointError
from megalite.common.optional_packages import missing_packages
from megalite.config import cli, environment
from megalite.config.console import discard_unwritable_output, print_err
from megalite.config.exits import end_at_once
from megalite.config.options import Config, num_local_ranks
from megalite.data.files.missing_files import missing_file_errors, without_data_files
from megalite.launch import rank_info as launcher
from megalite.launch.local_launcher import INTERRUPTED, ORDERLY_S, cpu_count, launch_local, print_stopping
from megalite.launch.rank_info import LaunchError, RankInfo
from megalite.models.families import PRESETS
from megalite.training.job.restarts import RestartPolicy, lock_run_dir
from megalite.training.job.stop_signals import StopImmediately, StopSignalHandler, block_signals
from megalite.training.logging.run_dir import ExitCode, name_conflict, run_dir, write_status

MOST_RANKS_PER_CORE = 8
GPUS_PER_NODE = 8  # assumed by a dry run without a launcher


@dataclass(frozen=True)
class TrainCommand:
    """A correct command. `warnings`: for the log. `ranks`: this process's place, if launched. `stop`: if installed."""

    config: Config
    warnings: Sequence[str] = ()
    ranks: RankInfo | None = None
    signals: StopSignalHandler | None = field(default=None, compare=False)

    def launch(self, train: "Callable[[RankInfo, TrainCommand], int]") -> int:
        """Run `train` on one rank here, or on --nproc local ranks, with restarts. Returns the exit code."""
        config, nproc, rehearses = self.config, num_local_ranks(self.config.parallel), self.config.train.dry_run
        first = self.ranks is None or self.ranks.rank == 0
        try:
            with lock_run_dir(config) if first and not rehearses else contextlib.nullcontext():
                if missing := _missing_files_and_packages(config):
                    ranks, reason = self.ranks or RankInfo(), "\n".join(missing)
                    for line in missing if ranks.local_rank == 0 else []:
                        print_err(f"pretrain_gpt.py: {line}")
                    if ranks.rank == 0 and not rehearses:
                        write_status(
                            run_dir(config), ExitCode.PREFLIGHT.outcome, config, reason, resumes=ranks.is_restart
                        )
                    return ExitCode.PREFLIGHT
                if self.ranks is None and (nproc > 1 or config.operations.max_restarts) and not rehearses:
                    return launch_local(nproc, train, (self,), keep_signals_blocked=True, on_exit=RestartPolicy(config))
                return train(self.ranks or RankInfo(world_size=nproc, local_world_size=min(nproc, GPUS_PER_NODE)), self)
        except (CheckpointError, LaunchError) as error:  # another run in the directory; no room for temporary files
            print_err(f"pretrain_gpt.py: {error}")
            return ExitCode.PREFLIGHT

    def install_signal_handler(self, ranks: RankInfo) -> StopSignalHandler:
        """From now on signals ask the run to stop, including those that were held."""
        if self.signals is not None:
            return self.signals
        no_launcher = ranks.rank == 0 and not (ranks.init_method or "").startswith("file:")
        t, saves = self.config.train, self.config.checkpoint.save is not None
        asks_first = saves or t.exit_signal_handler or t.exit_signal is not None
        stop = StopSignalHandler(asks_first, [t.exit_signal] if t.exit_signal else [], prints=no_launcher)
        stop.install()
        if saves:
            launcher.stop_when_torchrun_exits(ORDERLY_S)
        return stop


def parse(argv: list[str]) -> TrainCommand:
    """Read flags, environment and launcher; all problems are printed at once, with exit code 2."""
    block_signals()
    warnings = launcher.exit_with_torchrun()
    try:
        ranks, of_launcher = launcher.read_environment(), list[str]()
    except LaunchError as error:
        ranks, of_launcher = None, [str(error)]
    world: Callable[[Config], int] = lambda c: num_local_ranks(c.parallel) if ranks is None else ranks.world_size  # noqa: E731

    def machine_problems(config: Config, wrong: list[str]) -> list[str]:
        nproc, problems = num_local_ranks(config.parallel), [*of_launcher, *environment.env_problems()]
        if other := launcher.other_number(ranks, config.parallel.nproc):
            problems.append(other)
        if ranks is None and nproc > MOST_RANKS_PER_CORE * cpu_count() and not config.train.dry_run:
            problems.append(f"nproc={nproc} is more than {MOST_RANKS_PER_CORE} x {cpu_count()} processors; start fewer")
        if ranks is None or (ranks.rank == 0 and not ranks.is_restart):
            problems += name_conflict(config)
        return [
            *problems,
            *(_missing_files_and_packages(config) if wrong or problems else []),
        ]  # alone they have exit code 3: `launch`

    read = cli.parse_config_or_exit(argv, PRESETS, machine_problems, world, quiet=ranks is not None and ranks.rank > 0)
    config = read.config
    if (p := config.parallel).device != "cpu":
        launcher.set_cuda_environment(p.tensor_model_parallel_size, run_dir(config), config.train.deterministic_mode)
    if ranks is not None and config.operations.max_restarts:
        warnings.append("max_restarts is for ranks that --nproc starts: torchrun has its own --max-restarts")
    return TrainCommand(config, [*read.warnings, *environment.env_warnings(), *warnings], ranks)


def _missing_files_and_packages(config: Config) -> list[str]:
    """Missing files and packages, a line each."""
    elsewhere = config.train.dry_run_rank is not None
    files = missing_file_errors(without_data_files(config.data) if elsewhere else config.data, elsewhere)
    return files if config.train.dry_run else [*files, *missing_packages(config.log)]


def run_main(main: Callable[[list[str]], int]) -> NoReturn:
    """End the process with the exit code of `main`, also after a signal that came before a run could take it."""
    try:
        launcher.exit_process(lambda: main(sys.argv[1:]))
    except KeyboardInterrupt as error:
        if not isinstance(error, StopImmediately):  # that one was reported
            print_stopping(signal.Signals[error.args[0]] if error.args else signal.SIGINT)
        end_at_once(INTERRUPTED)
    finally:
        discard_unwritable_output()
