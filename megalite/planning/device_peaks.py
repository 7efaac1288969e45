"""Peak rates of devices, the denominator of MFU.

Dense peak rates are from the vendors' data sheets. A CPU's is measured with a short matmul. An unknown GPU has none
(MFU n/a) unless --peak-tflops gives it, because a wrong one would give an MFU that looks right.
"""

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megalite.common.tables import load_table
from megalite.kernels.matmul import mm_
from megalite.launch.local_launcher import cpu_count

REPETITIONS = 8  # matmuls of each size, because the system may interrupt some of them
# phrase in a device's name -> dtype -> TFLOP/s
PEAKS: Mapping[str, Mapping[str, float]] = load_table(__file__, "devices")["peaks"]
# phrases in the names of partitions of a GPU, or of GPUs at a lower clock, which contain the name of the full GPU
SLOWER_VARIANTS = ("MIG", "Laptop", "Max-Q")
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class PeakRate:
    """The peak rate of a device for one dtype.

    Attributes:
        tflops: None if it is unknown.
        source: The source of the figure, for the plan.
        too_low: The likely reason, with a remedy, if a run is faster than the peak.
    """

    tflops: float | None
    source: str
    too_low: str = "the table's figure is too low for this device; give --peak-tflops"


def lookup_peak(device_name: str, dtype: torch.dtype) -> PeakRate:
    """Return the table's peak of a device, by the name that torch reports.

    >>> peak = lookup_peak("NVIDIA A100-SXM4-80GB", torch.bfloat16)
    >>> peak.tflops, peak.source
    (312.0, 'NVIDIA A100-SXM4-80GB bf16 dense')
    """
    unknown = PeakRate(None, f"{device_name} is not in the table; give --peak-tflops")
    if any(_contains_phrase(device_name, phrase) for phrase in SLOWER_VARIANTS):
        return unknown
    for phrase, rates in PEAKS.items():
        if _contains_phrase(device_name, phrase):
            tflops = rates.get(DTYPE_NAMES[dtype])
            if tflops is None:
                return PeakRate(None, f"no {DTYPE_NAMES[dtype]} peak is known for {device_name}; give --peak-tflops")
            return PeakRate(tflops, f"{device_name} {DTYPE_NAMES[dtype]} dense")
    return unknown


def _contains_phrase(device_name: str, phrase: str) -> bool:
    """Return whether the name contains `phrase` as entire words: an RTX A4000 does not contain "A40"."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(phrase)}(?![A-Za-z0-9])", device_name, re.IGNORECASE) is not None


def measure_cpu_peak(
    dtype: torch.dtype, seconds: float = 0.25, local_ranks: int = 1, clock: Callable[[], float] = time.perf_counter
) -> PeakRate:
    """Measure the best rate of square matmuls on this process's threads, with the kernel of the layers.

    The size doubles while the next one fits into the time, since large matmuls are faster if the CPU has fast units for
    the dtype. If `local_ranks` processes have more threads than there are cores, each gets its share of the rate.

    Args:
        dtype: The dtype of the matrices.
        seconds: The approximate duration; at least REPETITIONS matmuls are run.
        local_ranks: The number of processes that share this machine.
        clock: Returns the current time in seconds.
    """
    best_rate = 0.0
    size = 128
    deadline = clock() + seconds
    while True:
        a = torch.ones(size, size, dtype=dtype)
        b = torch.ones(size, size, dtype=dtype)
        out = torch.empty_like(a)
        mm_(out, a, b)  # the first call compiles the kernel
        fastest = math.inf
        num_runs = 0
        now = clock()
        next_size_fits = False
        while num_runs < REPETITIONS or (not next_size_fits and now < deadline):
            start = clock()
            mm_(out, a, b)
            now = clock()
            fastest = min(fastest, now - start)
            num_runs += 1
            # twice the size takes 8 times the work, in REPETITIONS + 1 calls
            next_size_fits = size < 1024 and now + 8 * fastest * (REPETITIONS + 1) < deadline
        best_rate = max(best_rate, 2 * size**3 / fastest)
        if not next_size_fits:
            break
        size *= 2
    num_threads = torch.get_num_threads()
    core_share = min(1.0, cpu_count() / (local_ranks * num_threads))
    threads = f"{num_threads} thread{'s' if num_threads > 1 else ''}"
    if core_share < 1:
        threads += f" on {core_share:.2g} of their cores"
    too_low = "it was measured when the run started, while the machine was busier than now; give --peak-tflops"
    return PeakRate(best_rate * core_share / 1e12, f"cpu {DTYPE_NAMES[dtype]}, measured matmul, {threads}", too_low)


def find_peak(
    device: torch.device, dtype: torch.dtype, override_tflops: float | None = None, local_ranks: int = 1
) -> PeakRate:
    """Return the peak of one device, or of one of the `local_ranks` processes that share this machine's CPU."""
    if override_tflops is not None:
        return PeakRate(override_tflops, "given by --peak-tflops", "--peak-tflops is too low for this device")
    if device.type == "cuda":
        return lookup_peak(torch.cuda.get_device_name(device), dtype)
    return measure_cpu_peak(dtype, local_ranks=local_ranks)
