#!/usr/bin/env python
"""Pretrain a GPT: parse -> build -> train.

python pretrain_gpt.py FLAGS                        one process
python pretrain_gpt.py --nproc 4 FLAGS              four local ranks, started here
torchrun --nproc_per_node 4 pretrain_gpt.py FLAGS   the same, started by torchrun
srun python pretrain_gpt.py FLAGS                   the same, under SLURM
mpirun -n 4 python pretrain_gpt.py FLAGS            the same, under Open MPI, MPICH, Intel MPI or MVAPICH
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: nothing has begun

from megalite.checkpoint.storage.location import CheckpointError
from megalite.config import cli, environment
from megalite.config.console import complain, let_go_of_console
from megalite.config.options import Config, local_processes
from megalite.config.packages import missing_packages
from megalite.data.files.missing_files import absent, rehearsed
from megalite.models.families import PRESETS
from megalite.parallel.launch import (
    LaunchError,
    Ranks,
    follow_torchrun,
    leave,
    prepare_cuda,
    read_environment,
    save_after_torchrun,
    torchrun_restarts,
)
from megalite.parallel.local_ranks import INTERRUPTED, ORDERLY_S, cores, start_local, tell_stopping
from megalite.train.restarts import Restarts, locked_run
from megalite.train.run_dir import Exit, leave_status, run_folder, taken
from megalite.train.stop import Stopped, hold, stop_signal

MOST_RANKS_PER_CORE = 8
GPUS_PER_NODE = 8  # of the machines that a dry run without a launcher is about


def run(ranks: Ranks, config: Config, warnings: list[str]) -> None:
    """One rank, from its place in the world to its exit code."""
    stop = stop_signal(config, tells=ranks.rank == 0 and not (ranks.init_method or "").startswith("file:"))
    stop.install()
    if config.checkpoint.save is not None:
        save_after_torchrun(ORDERLY_S)
    from megalite.train.run import pretrain  # imports torch

    rehearsal = None
    if config.train.as_rank is not None:
        from tools.planning.as_rank import tell as rehearsal
    code = pretrain(config, ranks, warnings, stop, rehearsal)
    sys.exit(0 if stop.final and torchrun_restarts() else code)


def _lost(config: Config) -> list[str]:
    """Files and packages that are not there, a line each."""
    elsewhere = config.train.as_rank is not None
    files = absent(rehearsed(config.data) if elsewhere else config.data, elsewhere)
    return files if config.train.dry_run else [*files, *missing_packages(config.log)]


def _refuse(config: Config, lost: list[str], ranks: Ranks | None) -> int:
    """Something is not there: before torch is imported, which takes seconds, and on a cold disk a minute."""
    for line in lost if ranks is None or ranks.local_rank == 0 else []:
        complain(f"pretrain_gpt.py: {line}")
    folder = run_folder(config)
    if (ranks is None or ranks.rank == 0) and folder.is_dir() and not config.train.dry_run:
        resumes = ranks is not None and ranks.resumes
        leave_status(folder, Exit.PREFLIGHT.outcome, config, "\n".join(lost), resumes=resumes)
    return Exit.PREFLIGHT


def main(argv: list[str]) -> int:
    hold()
    lacks = follow_torchrun()
    ranks: Ranks | None = None
    unlaunched: list[str] = []
    try:
        ranks = read_environment()
    except LaunchError as error:
        unlaunched = [str(error)]

    def world(config: Config) -> int:
        return local_processes(config.parallel) if ranks is None else ranks.world

    def of_this_machine(config: Config, wrong: list[str]) -> list[str]:
        nproc, problems = local_processes(config.parallel), [*unlaunched, *environment.problems()]
        if ranks is None and nproc > MOST_RANKS_PER_CORE * cores() and not config.train.dry_run:
            problems.append(f"nproc={nproc} is more than {MOST_RANKS_PER_CORE} x {cores()} processors; start fewer")
        if ranks is None or (ranks.rank == 0 and not ranks.resumes):
            problems += taken(config)
        return [*problems, *(_lost(config) if wrong or problems else [])]  # alone they have a code of their own

    found = cli.read_or_exit(argv, PRESETS, of_this_machine, world, quiet=ranks is not None and ranks.rank > 0)
    config, nproc = found.config, local_processes(found.config.parallel)
    if config.parallel.device != "cpu":
        prepare_cuda(config.parallel.tensor_model_parallel_size, run_folder(config), config.train.deterministic_mode)
    if ranks is not None and config.operations.max_restarts:
        lacks.append("max_restarts is for ranks that --nproc starts: torchrun has --max-restarts of its own")
    told, first = [*found.warnings, *environment.warnings(), *lacks], ranks is None or ranks.rank == 0
    try:
        with locked_run(config) if first and not config.train.dry_run else contextlib.nullcontext():
            if lost := _lost(config):
                return _refuse(config, lost, ranks)
            if ranks is None and (nproc > 1 or config.operations.max_restarts) and not config.train.dry_run:
                return start_local(nproc, run, (config, told), holds_signals=True, ended=Restarts(config))
            alone = Ranks(world=nproc, local_world=min(nproc, GPUS_PER_NODE))
            return run(ranks or alone, config, told)  # type: ignore[func-returns-value]
    except (CheckpointError, LaunchError) as error:  # another run has the directory; no room for temporary files
        complain(f"pretrain_gpt.py: {error}")
        return Exit.PREFLIGHT


if __name__ == "__main__":
    try:
        leave(lambda: main(sys.argv[1:]))
    except KeyboardInterrupt as error:
        if not isinstance(error, Stopped):  # which was told
            tell_stopping(signal.Signals[error.args[0]] if error.args else signal.SIGINT)
        os._exit(INTERRUPTED)
    finally:
        let_go_of_console()
