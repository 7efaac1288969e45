"""Dense peak rates, the denominator of MFU. From the vendors' data sheets, without sparsity, at boost clock.

A CPU's peak is measured by a short matmul; an unknown card has none (MFU n/a) unless --peak-tflops names it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

# (part of the device name, bf16/fp16 TFLOP/s, fp32 TFLOP/s as torch runs it by default, i.e. without TF32);
# the first match wins, so longer names come first. 0: the card has no bf16 matmul units.
PEAKS: tuple[tuple[str, float, float], ...] = (
    ("GB200", 2500.0, 80.0),
    ("B200", 2250.0, 75.0),
    ("H200", 989.4, 66.9),
    ("H100 NVL", 835.5, 60.0),
    ("H100 PCIe", 756.0, 51.2),
    ("H100", 989.4, 66.9),
    ("H800", 989.4, 66.9),
    ("H20", 148.0, 44.0),
    ("A100", 312.0, 19.5),
    ("A800", 312.0, 19.5),
    ("A40", 149.7, 37.4),
    ("A30", 165.0, 10.3),
    ("A10G", 70.0, 35.0),
    ("A10", 125.0, 31.2),
    ("L40S", 362.05, 91.6),
    ("L40", 181.05, 90.5),
    ("L4", 121.0, 30.3),
    ("V100", 125.0, 15.7),
    ("RTX 5090", 209.5, 104.8),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.0, 35.6),
    ("MI325X", 1307.4, 163.4),
    ("MI300X", 1307.4, 163.4),
    ("MI250X", 383.0, 47.9),
)


@dataclass(frozen=True)
class Peak:
    """`tflops` None: unknown. `source` says where it is from, for the plan."""

    tflops: float | None
    source: str


def peak_of(device_name: str, dtype: torch.dtype) -> Peak:
    """The table's entry for a device name as torch reports it."""
    for part, half, single in PEAKS:
        if part.lower() in device_name.lower():
            tflops = half if dtype in (torch.bfloat16, torch.float16) else single
            if dtype == torch.bfloat16 and part == "V100":
                return Peak(None, f"{part} has no bf16 units")
            return Peak(tflops, f"{device_name} {str(dtype)[6:]} dense")
    return Peak(None, f"{device_name} is not in the table; give --peak-tflops")


def measure_cpu_peak(dtype: torch.dtype, seconds: float = 0.2, size: int = 1024) -> Peak:
    """The best rate of a square matmul on this process's threads, TFLOP/s."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < seconds or best == float("inf"):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    threads = torch.get_num_threads()
    return Peak(2 * size**3 / best / 1e12, f"cpu {str(dtype)[6:]}, measured matmul, {threads} thread{'s' * (threads > 1)}")


def find_peak(device: torch.device, dtype: torch.dtype, override_tflops: float | None = None) -> Peak:
    if override_tflops is not None:
        return Peak(override_tflops, "given")
    if device.type == "cuda":
        return peak_of(torch.cuda.get_device_name(device), dtype)
    return measure_cpu_peak(dtype)
