"""Small command lines that tests share, and a run of one without what a start does around it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.checkpoint.run.saver import Saver
    from megalite.config.options import Config
    from megalite.train.run_dir import Exit
    from megalite.train.state import Run

SMALL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 0.01 --mock-data --vocab-size 93 --make-vocab-size-divisible-by 8 "
    "--eval-iters 1 --log-interval 1"
).split()
TP2_PP2 = "--nproc 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()


def train(run: Run, config: Config, folder: Path, saver: Saver | None = None) -> tuple[Exit, str]:
    """From the run's step to its last, without a log."""
    from megalite.train.loop import Training, Watch  # torch: others want the command lines alone
    from megalite.train.metrics import Silent
    from megalite.train.phases import Phases
    from megalite.train.stop import StopSignal

    watch = Watch(config, run, folder, Phases(run.mesh, time.perf_counter()), [""] * run.mesh.world.size)
    try:
        return Training(run, config, folder, Silent(), StopSignal(), saver, None, watch).train()
    finally:
        watch.dog.close()
