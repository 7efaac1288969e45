"""Temperature, clock, ECC errors, throttling and use of a GPU."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

# Reasons of a low clock that protect the GPU, as opposed to a user's setting (nvml.h, nvmlClocksEventReason*).
THROTTLED = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}


class GpuMonitor:
    """Access to this rank's GPU through NVIDIA's management library, if nvidia-ml-py is installed.

    Without it, or on a CPU, the tables are empty. Use `read_sensors` to call their functions, since a GPU may not
    support all of them.

    Attributes:
        sensors: Functions that return measured values, by name.
        usage: Functions that return shares that nvidia-smi shows: the time in which a kernel ran, and the memory that
            all processes use.
        facts: Functions that return constant facts, by name.
    """

    def __init__(self, device: torch.device):
        self.sensors: dict[str, Callable[[], float]] = {}
        self.usage: dict[str, Callable[[], float]] = {}
        self.facts: dict[str, Callable[[], str]] = {}
        if device.type != "cuda":
            return
        uuid = f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', '')}"
        with contextlib.suppress(Exception):  # no package, no driver, or a part of a GPU (MIG)
            import pynvml as nvml  # type: ignore[import-not-found]

            nvml.nvmlInit()
            gpu, uncorrected = nvml.nvmlDeviceGetHandleByUUID(uuid), nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
            self.facts = {"gpu": lambda: nvml.nvmlDeviceGetName(gpu), "driver": nvml.nvmlSystemGetDriverVersion}
            self.sensors = {
                "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
                "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
                "clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
                "ecc_errors": lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, uncorrected, nvml.NVML_VOLATILE_ECC),
                "throttled": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu) & sum(THROTTLED),
            }
            self.usage = {
                "gpu_busy": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
                "gpu_memory": lambda: _memory_in_use(nvml, gpu),
            }


def _memory_in_use(nvml: Any, gpu: Any) -> float:
    """Return the share of the GPU's memory that is in use; version 2 leaves out what the driver reserves."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu, version=nvml.nvmlMemory_v2)
    except Exception:  # a driver before 510, or an older package
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    return memory.used / memory.total


def read_sensors(calls: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return the results of the calls that do not fail, by name."""
    results = {}
    for name, call in calls.items():
        with contextlib.suppress(Exception):  # NVMLError: not supported by this GPU
            results[name] = call()
    return results
