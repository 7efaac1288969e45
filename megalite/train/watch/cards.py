"""What NVIDIA's management library knows of this rank's card, where the package nvidia-ml-py is installed.

A figure that a card does not tell is absent; nothing here raises or waits for the card.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

# why a card's clock is low: its own protection, not what it was set to (nvml.h, nvmlClocksEventReason*)
THROTTLED = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}


class Card:
    """`figures` and `facts`: how to ask for each."""

    def __init__(self, device: torch.device):
        self.figures: dict[str, Callable[[], float]] = {}
        self.facts: dict[str, Callable[[], str]] = {}
        if device.type != "cuda":
            return
        uuid = f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', '')}"
        with contextlib.suppress(Exception):  # no package, no driver, a part of a card
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
    """Of each that answers."""
    found = {}
    for name, call in calls.items():
        with contextlib.suppress(Exception):  # NVMLError: this card does not tell that
            found[name] = call()
    return found
