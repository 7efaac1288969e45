"""Facts and figures of this rank's card, from NVIDIA's management library, where the package nvidia-ml-py is installed.

A figure that a card does not have is absent; nothing here raises or waits for the card.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

# reasons of a low clock that protect the card, not a setting of somebody (nvml.h, nvmlClocksEventReason*)
THROTTLED = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}


class Card:
    """`figures` and `facts`: a function for each."""

    def __init__(self, device: torch.device):
        self.figures: dict[str, Callable[[], float]] = {}
        self.facts: dict[str, Callable[[], str]] = {}
        if device.type != "cuda":
            return
        uuid = f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', '')}"
        with contextlib.suppress(Exception):  # no package, no driver, or only a part of a card
            import pynvml as n  # type: ignore[import-not-found]

            n.nvmlInit()
            card, uncorrected = n.nvmlDeviceGetHandleByUUID(uuid), n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
            self.facts = {"card": lambda: n.nvmlDeviceGetName(card), "driver": n.nvmlSystemGetDriverVersion}
            self.figures = {
                "temperature_c": lambda: n.nvmlDeviceGetTemperature(card, n.NVML_TEMPERATURE_GPU),
                "power_w": lambda: n.nvmlDeviceGetPowerUsage(card) / 1000,
                "clock_mhz": lambda: n.nvmlDeviceGetClockInfo(card, n.NVML_CLOCK_SM),
                "ecc_errors": lambda: n.nvmlDeviceGetTotalEccErrors(card, uncorrected, n.NVML_VOLATILE_ECC),
                "throttled": lambda: n.nvmlDeviceGetCurrentClocksThrottleReasons(card) & sum(THROTTLED),
            }


def read(calls: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """The results of those calls that do not fail."""
    results = {}
    for name, call in calls.items():
        with contextlib.suppress(Exception):  # NVMLError: not supported by this card
            results[name] = call()
    return results
