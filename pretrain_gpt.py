#!/usr/bin/env python
"""Pretrain a GPT: parse -> build -> train.

python pretrain_gpt.py FLAGS                        one process
python pretrain_gpt.py --nproc 4 FLAGS              four local ranks, started here
torchrun --nproc_per_node 4 pretrain_gpt.py FLAGS   the same, started by torchrun
srun python pretrain_gpt.py FLAGS                   the same, under SLURM
mpirun -n 4 python pretrain_gpt.py FLAGS            the same, under Open MPI, MPICH, Intel MPI or MVAPICH
"""

from __future__ import annotations

import os
import sys

from megalite import cli
from megalite.config import Config
from megalite.config_check import check
from megalite.models.families import PRESETS
from megalite.parallel.launch import (
    INTERRUPTED,
    LaunchError,
    Ranks,
    cores,
    prepare_cuda,
    read_environment,
    start_local,
)
from megalite.train.run_dir import run_folder

MOST_RANKS_PER_CORE = 8
GPUS_PER_NODE = 8  # of the machines that a dry run without a launcher is about


def run(ranks: Ranks, config: Config) -> None:
    """One rank, from its place in the world to its exit code."""
    from megalite.train.run import pretrain  # imports torch

    sys.exit(pretrain(config, ranks))


def main(argv: list[str]) -> int:
    config = cli.parse(argv, PRESETS)
    nproc = config.parallel.nproc
    try:
        ranks = read_environment(os.environ)
        problems = check(config, nproc) if ranks is None else []
        plans = config.train.dry_run
        if ranks is None and nproc > MOST_RANKS_PER_CORE * cores() and not plans:
            problems.append(f"nproc={nproc} is more than {MOST_RANKS_PER_CORE} x {cores()} processors; start fewer")
    except LaunchError as error:
        problems = [str(error)]
    for problem in problems:
        print(f"pretrain_gpt.py: {problem}", file=sys.stderr)
    if problems:
        return 2
    if config.parallel.device != "cpu":
        prepare_cuda(config.parallel.tensor_model_parallel_size, run_folder(config))
    if ranks is None and nproc > 1 and not plans:
        return start_local(nproc, run, (config,))
    return run(ranks or Ranks(world=nproc, local_world=min(nproc, GPUS_PER_NODE)), config)  # type: ignore[func-returns-value]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
