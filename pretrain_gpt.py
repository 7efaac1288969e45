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

from megalite.launch.rank_info import RankInfo
from megalite.training.job.command import TrainCommand, parse, run_main


def train(ranks: RankInfo, command: TrainCommand) -> int:
    """One rank, from its place in the world to its exit code."""
    stop = command.install_signal_handler(ranks)  # for signals, before torch is imported
    from megalite.training.job.job import TrainingJob
    from megalite.training.setup import build_run
    from megalite.training.train_step import train_step

    with TrainingJob(command, ranks, stop) as life:  # how it ends is told here, whatever happens: life/run.py: failure
        plan, sources = life.preflight()
        if plan.config.train.dry_run:
            return life.print_plan(plan, sources)
        with life.join_process_group(plan, sources) as device:
            run = build_run(plan.config, ranks, device, sources=sources, arrangement=plan)
            with life.trainer(run, plan, sources) as training:  # from a checkpoint, a branch or fresh weights
                for step_options in training.steps():  # until the last one, or a reason to stop that all ranks agree on
                    training.end_step(train_step(run, **step_options))  # log, evaluate, save, look for what is wrong
    return life.exit_code


def main(argv: list[str]) -> int:
    return parse(argv).launch(train)  # as one process, as --nproc of them and their restarts, or as a launcher's rank


if __name__ == "__main__":
    run_main(main)
