"""Dense peak rates, the denominator of MFU, from the vendors' data sheets: devices.toml.

A CPU's peak is measured with a short matmul. An unknown card has no peak (MFU n/a) unless --peak-tflops gives it,
because a wrong peak would give an MFU that looks right.
"""

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megalite.config.tables import table_beside
from megalite.launch.local_ranks import cores

TABLE = table_beside(__file__, "devices")
PEAKS: Mapping[str, Mapping[str, float]] = TABLE["peaks"]  # words of a device's name -> dtype -> TFLOP/s
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
    for words, rates in PEAKS.items():
        if _holds(device_name, words):
            if (tflops := rates.get(SHORT[dtype])) is None:
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
