"""pretrain_gpt.py is short, and a step is close: five calls lead from `main` to the optimizer."""

from pathlib import Path

import programs
from train_cases import SMALL_RUN

# Trains in one process and prints the functions between `main` and `DistributedOptimizer.step`. A generator or a
# context manager counts like any function, if it is on the stack.
STACK = """
import sys
import pretrain_gpt
from megalite.optim.distributed_optimizer import DistributedOptimizer

real = DistributedOptimizer.step

def step(self, *args, **kwargs):
    frame, names = sys._getframe(1), ["DistributedOptimizer.step"]
    while frame is not None and names[0] != "main":
        if "site-packages" not in frame.f_code.co_filename:
            names.insert(0, frame.f_code.co_qualname)
        frame = frame.f_back
    print("CALLS", *names)
    real(self, *args, **kwargs)

DistributedOptimizer.step = step
sys.exit(pretrain_gpt.main(sys.argv[1:]))
"""


def test_optimizer_step_is_five_calls_below_main(tmp_path: Path) -> None:
    argv = [*SMALL_RUN, "--train-iters", "2", "--eval-iters", "0", "--device", "cpu", "--run-dir", str(tmp_path)]
    done = programs.run_python("-c", STACK, *argv, check=True)
    calls = {tuple(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("CALLS")}
    assert calls == {("main", "TrainCommand.launch", "train", "train_step", "_update", "DistributedOptimizer.step")}
