"""The command: reads flags and launcher, and runs or starts the ranks, one run per directory. Imports no torch, which
takes seconds, and on a cold disk a minute: errors of a command come before that."""

import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from megalite.checkpoint.storage.location import CheckpointError
from megalite.config import cli, environment
from megalite.config.console import complain, let_go_of_console
from megalite.config.exits import end_at_once
from megalite.config.options import Config, local_processes
from megalite.config.packages import missing_packages
from megalite.data.files.missing_files import absent, rehearsed
from megalite.launch import ranks as launcher
from megalite.launch.local_ranks import INTERRUPTED, ORDERLY_S, cores, start_local, tell_stopping
from megalite.launch.ranks import LaunchError, Ranks
from megalite.models.families import PRESETS
from megalite.train.life.restarts import Restarts, locked_run
from megalite.train.life.stop import Stopped, StopSignal, hold
from megalite.train.tell.run_dir import Exit, leave_status, run_folder, taken

MOST_RANKS_PER_CORE = 8
GPUS_PER_NODE = 8  # assumed by a dry run without a launcher


@dataclass(frozen=True)
class Command:
    """A correct command. `warnings`: for the log. `ranks`: this process's place, if launched. `stop`: if installed."""

    config: Config
    warnings: Sequence[str] = ()
    ranks: Ranks | None = None
    stop: StopSignal | None = field(default=None, compare=False)

    def launch(self, train: "Callable[[Ranks, Command], int]") -> int:
        """Run `train` on one rank here, or on --nproc local ranks, with restarts. Returns the exit code."""
        config, nproc, rehearses = self.config, local_processes(self.config.parallel), self.config.train.dry_run
        first = self.ranks is None or self.ranks.rank == 0
        try:
            with locked_run(config) if first and not rehearses else contextlib.nullcontext():
                if missing := _missing(config):
                    ranks, reason = self.ranks or Ranks(), "\n".join(missing)
                    for line in missing if ranks.local_rank == 0 else []:
                        complain(f"pretrain_gpt.py: {line}")
                    if ranks.rank == 0 and not rehearses:
                        leave_status(run_folder(config), Exit.PREFLIGHT.outcome, config, reason, resumes=ranks.resumes)
                    return Exit.PREFLIGHT
                if self.ranks is None and (nproc > 1 or config.operations.max_restarts) and not rehearses:
                    return start_local(nproc, train, (self,), holds_signals=True, ended=Restarts(config))
                return train(self.ranks or Ranks(world=nproc, local_world=min(nproc, GPUS_PER_NODE)), self)
        except (CheckpointError, LaunchError) as error:  # another run in the directory; no room for temporary files
            complain(f"pretrain_gpt.py: {error}")
            return Exit.PREFLIGHT

    def listen(self, ranks: Ranks) -> StopSignal:
        """From now on signals ask the run to stop, including those that were held."""
        if self.stop is not None:
            return self.stop
        no_launcher = ranks.rank == 0 and not (ranks.init_method or "").startswith("file:")
        t, saves = self.config.train, self.config.checkpoint.save is not None
        asks_first = saves or t.exit_signal_handler or t.exit_signal is not None
        stop = StopSignal(asks_first, [t.exit_signal] if t.exit_signal else [], tells=no_launcher)
        stop.install()
        if saves:
            launcher.save_after_torchrun(ORDERLY_S)
        return stop


def parse(argv: list[str]) -> Command:
    """Read flags, environment and launcher; all problems are printed at once, with exit code 2."""
    hold()
    warnings = launcher.follow_torchrun()
    try:
        ranks, of_launcher = launcher.read_environment(), list[str]()
    except LaunchError as error:
        ranks, of_launcher = None, [str(error)]
    world: Callable[[Config], int] = lambda c: local_processes(c.parallel) if ranks is None else ranks.world  # noqa: E731

    def of_this_machine(config: Config, wrong: list[str]) -> list[str]:
        nproc, problems = local_processes(config.parallel), [*of_launcher, *environment.problems()]
        if other := launcher.other_number(ranks, config.parallel.nproc):
            problems.append(other)
        if ranks is None and nproc > MOST_RANKS_PER_CORE * cores() and not config.train.dry_run:
            problems.append(f"nproc={nproc} is more than {MOST_RANKS_PER_CORE} x {cores()} processors; start fewer")
        if ranks is None or (ranks.rank == 0 and not ranks.resumes):
            problems += taken(config)
        return [*problems, *(_missing(config) if wrong or problems else [])]  # alone they have exit code 3: `launch`

    read = cli.read_or_exit(argv, PRESETS, of_this_machine, world, quiet=ranks is not None and ranks.rank > 0)
    config = read.config
    if (p := config.parallel).device != "cpu":
        launcher.prepare_cuda(p.tensor_model_parallel_size, run_folder(config), config.train.deterministic_mode)
    if ranks is not None and config.operations.max_restarts:
        warnings.append("max_restarts is for ranks that --nproc starts: torchrun has its own --max-restarts")
    return Command(config, [*read.warnings, *environment.warnings(), *warnings], ranks)


def _missing(config: Config) -> list[str]:
    """Missing files and packages, a line each."""
    elsewhere = config.train.as_rank is not None
    files = absent(rehearsed(config.data) if elsewhere else config.data, elsewhere)
    return files if config.train.dry_run else [*files, *missing_packages(config.log)]


def as_program(main: Callable[[list[str]], int]) -> NoReturn:
    """End the process with the exit code of `main`, also after a signal that came before a run could take it."""
    try:
        launcher.leave(lambda: main(sys.argv[1:]))
    except KeyboardInterrupt as error:
        if not isinstance(error, Stopped):  # that one was reported
            tell_stopping(signal.Signals[error.args[0]] if error.args else signal.SIGINT)
        end_at_once(INTERRUPTED)
    finally:
        let_go_of_console()
