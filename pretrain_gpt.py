#!/usr/bin/env python
"""Pretrain a GPT: parse -> build -> train.

python pretrain_gpt.py FLAGS                        one process
python pretrain_gpt.py --nproc 4 FLAGS              four local ranks, started here
torchrun --nproc_per_node 4 pretrain_gpt.py FLAGS   the same, started by torchrun
srun python pretrain_gpt.py FLAGS                   the same, under SLURM
mpirun -n 4 python pretrain_gpt.py FLAGS            the same, under Open MPI, MPICH, Intel MPI or MVAPICH
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: nothing has begun

from megalite.launch.ranks import Ranks
from megalite.train.life.command import Command, as_program, parse


def train(ranks: Ranks, asked: Command) -> int:
    """One rank, from its place in the world to its exit code."""
    stop = asked.listen(ranks)  # for signals, before torch is imported
    from megalite.train.life.run import Life
    from megalite.train.setup import build_run
    from megalite.train.step import train_step

    with Life(asked, ranks, stop) as life:  # how it ends is told here, whatever happens: life/run.py: failure
        plan, sources = life.preflight()
        if plan.config.train.dry_run:
            return life.tell(plan, sources)
        with life.group(plan, sources) as device:
            run = build_run(plan.config, ranks, device, sources=sources, arrangement=plan)
            with life.training(run, plan, sources) as training:  # from a checkpoint, a branch or fresh weights
                for asks in training.steps():  # until the last one, or a reason to stop that all ranks agree on
                    training.after(train_step(run, **asks))  # log, evaluate, save, look for what is wrong
    return life.code


def main(argv: list[str]) -> int:
    return parse(argv).launch(train)  # as one process, as --nproc of them and their restarts, or as a launcher's rank


if __name__ == "__main__":
    as_program(main)
