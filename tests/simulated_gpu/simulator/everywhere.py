"""The simulated card in every process of a program, its ranks and their children included, without a word in the
program: TEXT as a sitecustomize.py on PYTHONPATH. Each rank takes its own card with `torch.cuda.set_device`. When a
process ends, what was mixed or asked for without being listed is said, and the exit code is 9. Kernels are torch's, but
for the programs in INTERPRETED, which run them in Triton's interpreter."""

import atexit
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
INTERPRETED = ("tools/bench/kernels.py",)
CARDS = "SIMULATED_CARDS"
_kept: list[Any] = []
TEXT = f"""
import sys
sys.path += {[str(ROOT), str(ROOT / "tests")]!r}
from simulated_gpu.simulator import everywhere
everywhere.begin()
"""
WITHOUT = ("gpu_report.py", "gpu_report_smoke.py", "gpu_report_tests.py", "resource_tracker import main")  # no torch


def begin() -> None:
    """Imports what the program will: a mark stands on functions of the package, which must be there by then."""
    words = " ".join(sys.orig_argv)
    if any(word in words for word in WITHOUT) and "--share" not in words:
        return
    if any(word.endswith(INTERPRETED) for word in sys.orig_argv):
        os.environ.update({"TRITON_INTERPRET": "1", "MEGALITE_KERNELS": "triton"})
    else:
        os.environ.setdefault("MEGALITE_KERNELS", "torch")
    on_a_card()


def on_a_card() -> None:
    import torch
    import torch.distributed as dist

    from simulated_gpu.simulator import nccl
    from simulated_gpu.simulator.device import simulated

    whole = simulated(cards=int(os.environ.get(CARDS, "1")))
    _kept.append(whole)  # its end is that of the process
    card = whole.__enter__()
    real = dist.init_process_group

    def init_process_group(backend: str, *args: Any, **kwargs: Any) -> None:
        if backend == "nccl":
            card.device = torch.device("cuda", torch.cuda.current_device())
            backend = nccl.use(card)
        real(backend, *args, **kwargs)

    dist.init_process_group = init_process_group

    def told() -> None:
        mixed = [f"mixed at {fact.where}: {fact.what}" for fact in card.mixed]
        card.running = False
        from simulated_gpu.simulator import state

        lost = [str(error) for machine in state._machines for error in machine.unlisted]
        if mixed or lost:
            print("the simulated card:", *dict.fromkeys([*mixed, *lost]), sep="\n", file=sys.stderr, flush=True)
            os._exit(9)

    atexit.register(told)
