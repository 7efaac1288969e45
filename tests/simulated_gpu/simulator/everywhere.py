"""The simulated GPU in every process of an unchanged program, including its ranks and their children.

Put TEXT into a sitecustomize.py on PYTHONPATH. Each rank selects its own GPU with `torch.cuda.set_device`. If tensors
were mixed or an unlisted attribute was used, the process reports it at its end and exits with code 9. Kernels are
torch's, except in the programs in INTERPRETED, which run them in Triton's interpreter.
"""

import atexit
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
INTERPRETED = ("tools/bench/kernels.py",)
NUM_GPUS = "SIMULATED_GPUS"
_simulations: list[Any] = []
TEXT = f"""
import sys
sys.path += {[str(ROOT), str(ROOT / "tests")]!r}
from simulated_gpu.simulator import everywhere
everywhere.start()
"""
PROGRAMS_WITHOUT_TORCH = ("gpu_report.py", "gpu_report_tests.py", "resource_tracker import main")  # they do not need it


def start() -> None:
    """Simulate a GPU in this process, and import the package, whose functions the simulator marks."""
    command = " ".join(sys.orig_argv)
    if any(part in command for part in PROGRAMS_WITHOUT_TORCH) and "--share" not in command:
        return
    if any(part.endswith(INTERPRETED) for part in sys.orig_argv):
        os.environ.update({"TRITON_INTERPRET": "1", "MEGALITE_KERNELS": "triton"})
    else:
        os.environ.setdefault("MEGALITE_KERNELS", "torch")
    simulate_gpu()


def simulate_gpu() -> None:
    import torch
    import torch.distributed as dist

    from simulated_gpu.simulator import nccl, triton_driver
    from simulated_gpu.simulator.device import simulated

    triton_driver.install()
    simulation = simulated(num_gpus=int(os.environ.get(NUM_GPUS, "1")))
    _simulations.append(simulation)  # lasts as long as the process
    gpu = simulation.__enter__()
    original = dist.init_process_group

    def init_process_group(backend: str, *args: Any, **kwargs: Any) -> None:
        if backend == "nccl":
            gpu.device = torch.device("cuda", torch.cuda.current_device())
            backend = nccl.use(gpu)
        original(backend, *args, **kwargs)

    dist.init_process_group = init_process_group

    def report_problems() -> None:
        mixed = [f"mixed at {fact.where}: {fact.what}" for fact in gpu.mixed]
        gpu.running = False
        from simulated_gpu.simulator import state

        unlisted = [str(error) for machine in state._machines for error in machine.unlisted]
        if mixed or unlisted:
            print("the simulated GPU:", *dict.fromkeys([*mixed, *unlisted]), sep="\n", file=sys.stderr, flush=True)
            os._exit(9)

    atexit.register(report_problems)
