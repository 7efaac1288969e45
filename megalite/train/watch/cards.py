"""What NVIDIA's management library knows of this rank's card, where the package nvidia-ml-py is installed.

A figure that a card does not tell is absent; nothing here raises, waits for the card or makes a CUDA context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

# why a card's clock is low: its own protection, not what it was set to (nvml.h, nvmlClocksEventReason*)
THROTTLED = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}


class Card:
    def __init__(self, nvml: Any, handle: Any):
        self._nvml, self._handle = nvml, handle

    def read(self) -> dict[str, float]:
        """temperature_c, power_w, clock_mhz, ecc_errors (uncorrectable, since the driver was loaded), throttled (bits
        of THROTTLED)."""
        n, h = self._nvml, self._handle
        calls: dict[str, Callable[[], float]] = {
            "temperature_c": lambda: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
            "power_w": lambda: n.nvmlDeviceGetPowerUsage(h) / 1000,
            "clock_mhz": lambda: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM),
            "ecc_errors": lambda: n.nvmlDeviceGetTotalEccErrors(
                h, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC
            ),
            "throttled": lambda: n.nvmlDeviceGetCurrentClocksThrottleReasons(h) & sum(THROTTLED),
        }
        return {name: value for name, call in calls.items() if (value := self._ask(call)) is not None}

    def facts(self) -> dict[str, str]:
        """What a fingerprint compares."""
        n, h = self._nvml, self._handle
        calls = {"card": lambda: n.nvmlDeviceGetName(h), "driver": n.nvmlSystemGetDriverVersion}
        return {name: _text(value) for name, call in calls.items() if (value := self._ask(call)) is not None}

    @staticmethod
    def _ask(call: Callable[[], Any]) -> Any:
        with contextlib.suppress(Exception):  # NVMLError: this card does not tell that
            return call()
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value  # before version 12


def open_card(device: torch.device) -> Card | None:
    """None on CPU, without the package, and where the library does not know the card."""
    if device.type != "cuda":
        return None
    try:
        import pynvml  # type: ignore[import-not-found]

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return Card(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except Exception:  # it is a figure more or less
        return None
