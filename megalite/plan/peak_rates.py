"""Dense peak rates, the denominator of MFU, from the vendors' data sheets: without sparsity, at boost clock.

A CPU's peak is measured with a short matmul. An unknown card has no peak (MFU n/a) unless --peak-tflops gives it,
because a wrong peak would give an MFU that looks right.
"""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megalite.launch.local_ranks import cores

# (words of the device name, bf16, fp16, fp32): TFLOP/s of one device as torch counts devices, accumulating in fp32;
# fp32 without TF32, torch's default. None: the device has no matmul units for it. The first match counts, so the longer
# name of a family comes first. An MI250X appears as two devices, each with half of the card's rate.
PEAKS: tuple[tuple[str, float | None, float, float], ...] = (
    ("GB300", 2500.0, 2500.0, 83.3),
    ("GB200", 2500.0, 2500.0, 80.0),
    ("B300", 2250.0, 2250.0, 75.0),
    ("B200", 2250.0, 2250.0, 75.0),
    ("GH200", 989.4, 989.4, 66.9),
    ("H200 NVL", 835.5, 835.5, 60.0),
    ("H200", 989.4, 989.4, 66.9),
    ("H100 NVL", 835.5, 835.5, 60.0),
    ("H100 PCIe", 756.0, 756.0, 51.2),
    ("H100", 989.4, 989.4, 66.9),
    ("H800 PCIe", 756.0, 756.0, 51.2),
    ("H800", 989.4, 989.4, 66.9),
    ("H20", 148.0, 148.0, 44.0),
    ("A100", 312.0, 312.0, 19.5),
    ("A800", 312.0, 312.0, 19.5),
    ("A40", 149.7, 149.7, 37.4),
    ("A30", 165.0, 165.0, 10.3),
    ("A10G", 70.0, 70.0, 35.0),
    ("A10", 125.0, 125.0, 31.2),
    ("L40S", 362.05, 362.05, 91.6),
    ("L40", 181.05, 181.05, 90.5),
    ("L4", 121.0, 121.0, 30.3),
    ("V100S", None, 130.0, 16.4),
    ("V100-PCIE", None, 112.0, 14.0),
    ("V100", None, 125.0, 15.7),
    ("T4", None, 65.0, 8.1),
    ("RTX 6000 Ada", 364.25, 364.25, 91.1),
    ("RTX A6000", 154.8, 154.8, 38.7),
    ("RTX 5090", 209.5, 209.5, 104.8),
    ("RTX 4090 D", 147.0, 147.0, 73.5),
    ("RTX 4090", 165.2, 165.2, 82.6),
    ("RTX 3090 Ti", 80.0, 80.0, 40.0),
    ("RTX 3090", 71.0, 71.0, 35.6),
    ("MI355X", 2516.6, 2516.6, 157.3),
    ("MI350X", 2306.9, 2306.9, 144.2),
    ("MI325X", 1307.4, 1307.4, 163.4),
    ("MI300X", 1307.4, 1307.4, 163.4),
    ("MI300A", 980.6, 980.6, 122.6),
    ("MI250X", 191.5, 191.5, 47.9),
    ("MI250", 181.05, 181.05, 45.3),
)
# words in the names of parts of a card, or of cards at a lower clock, that contain the card's name
SLOWER = ("MIG", "Laptop", "Max-Q")

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class Peak:
    """`tflops` None: unknown. `source`: where the figure is from, for the plan."""

    tflops: float | None
    source: str


def peak_of(device_name: str, dtype: torch.dtype) -> Peak:
    """The table's entry for a device name as torch reports it.

    >>> peak_of("NVIDIA A100-SXM4-80GB", torch.bfloat16)
    Peak(tflops=312.0, source='NVIDIA A100-SXM4-80GB bf16 dense')
    """
    unknown = Peak(None, f"{device_name} is not in the table; give --peak-tflops")
    if any(_holds(device_name, words) for words in SLOWER):
        return unknown
    for words, bf16, fp16, fp32 in PEAKS:
        if _holds(device_name, words):
            tflops = {torch.bfloat16: bf16, torch.float16: fp16, torch.float32: fp32}.get(dtype)
            if tflops is None:
                return Peak(None, f"no {SHORT[dtype]} peak is known for {device_name}; give --peak-tflops")
            return Peak(tflops, f"{device_name} {SHORT[dtype]} dense")
    return unknown


def _holds(device_name: str, words: str) -> bool:
    """Whether the name contains `words`, as whole words: an RTX A4000 is no A40."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(words)}(?![A-Za-z0-9])", device_name, re.IGNORECASE) is not None


REPETITIONS = 8  # of each size, because the system may interrupt some


def measure_cpu_peak(
    dtype: torch.dtype, seconds: float = 0.25, local_ranks: int = 1, clock: Callable[[], float] = time.perf_counter
) -> Peak:
    """The best rate of square matmuls on this process's threads, in TFLOP/s. It takes about `seconds`, but always
    REPETITIONS matmuls.

    The size doubles while the next one fits into the time. Large ones are faster if the dtype has fast units; fp16 has
    none on many CPUs, where one product of size 1024 would take seconds. If `local_ranks` processes have more threads
    than cores, each gets its share of the rate.
    """
    best, size, end = 0.0, 128, clock() + seconds
    while True:
        a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
        torch.mm(a, b)  # the first call makes the kernel
        fastest, runs, now = math.inf, 0, clock()
        bigger = False
        while runs < REPETITIONS or (not bigger and now < end):
            start = clock()
            torch.mm(a, b)
            now = clock()
            fastest, runs = min(fastest, now - start), runs + 1
            # the next size is 8 times the work, REPETITIONS + 1 times
            bigger = size < 1024 and now + 8 * fastest * (REPETITIONS + 1) < end
        best = max(best, 2 * size**3 / fastest)
        if not bigger:
            break
        size *= 2
    threads = torch.get_num_threads()
    share = min(1.0, cores() / (local_ranks * threads))
    where = f"{threads} thread{'s' * (threads > 1)}" + (f" on {share:.2g} of their cores" if share < 1 else "")
    return Peak(best * share / 1e12, f"cpu {SHORT[dtype]}, measured matmul, {where}")


def find_peak(
    device: torch.device, dtype: torch.dtype, override_tflops: float | None = None, local_ranks: int = 1
) -> Peak:
    """The peak of one device, or of one of the `local_ranks` processes that share this machine's CPU."""
    if override_tflops is not None:
        return Peak(override_tflops, "given by --peak-tflops")
    if device.type == "cuda":
        return peak_of(torch.cuda.get_device_name(device), dtype)
    return measure_cpu_peak(dtype, local_ranks=local_ranks)
