#!/usr/bin/env python
"""Pretrain a GPT: parse -> build -> train.

python pretrain_gpt.py FLAGS                        one process
python pretrain_gpt.py --nproc 4 FLAGS              four local ranks, started here
torchrun --nproc_per_node 4 pretrain_gpt.py FLAGS   the same, started by torchrun
srun python pretrain_gpt.py FLAGS                   the same, under SLURM
"""

from __future__ import annotations

import os
import sys

from megalite import cli
from megalite.config import Config
from megalite.models.families import PRESETS
from megalite.parallel.launch import LaunchError, Ranks, read_environment, start_local


def run(ranks: Ranks, config: Config) -> None:
    """One rank, from its place in the world to its exit code."""
    from megalite.train.run import pretrain  # imports torch

    sys.exit(pretrain(config, ranks))


def main(argv: list[str]) -> int:
    config = cli.parse(argv, PRESETS)
    try:
        ranks = read_environment(os.environ)
    except LaunchError as error:
        print(f"pretrain_gpt.py: {error}", file=sys.stderr)
        return 2
    if ranks is not None:
        return run(ranks, config)  # type: ignore[func-returns-value]
    return start_local(config.parallel.nproc, run, (config,)) if config.parallel.nproc > 1 else run(Ranks(), config)  # type: ignore[func-returns-value]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
