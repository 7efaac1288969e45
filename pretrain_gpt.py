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
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process without a traceback

from megalite.launch.rank_info import RankInfo
from megalite.training.job.command import TrainCommand, parse, run_main


def train(ranks: RankInfo, command: TrainCommand) -> int:
    """Train on one rank and return its exit code."""
    signals = command.install_signal_handler(ranks)  # before the imports of torch, which take seconds
    from megalite.training.job.job import TrainingJob
    from megalite.training.setup import build_run
    from megalite.training.train_step import train_step

    with TrainingJob(command, ranks, signals) as job:  # reports every outcome and sets the exit code
        plan, sources = job.preflight()
        if plan.config.train.dry_run:
            return job.print_plan(plan, sources)
        with job.join_process_group(plan, sources) as device:
            run = build_run(plan.config, ranks, device, sources=sources, plan=plan)
            with job.trainer(run, plan, sources) as trainer:  # loads a checkpoint or other weights first
                for step_options in trainer.steps():  # until the last step, or until all ranks agree to stop
                    trainer.end_step(train_step(run, **step_options))  # log, evaluate, save, check health
    return job.exit_code


def main(argv: list[str]) -> int:
    """Run as a single process, as a launcher of --nproc ranks with restarts, or as a rank of another launcher."""
    return parse(argv).launch(train)


if __name__ == "__main__":
    run_main(main)
