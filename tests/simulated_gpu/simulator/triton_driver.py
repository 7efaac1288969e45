"""A driver of Triton for the simulated GPU, with which triton.testing.do_bench times calls."""

from typing import Any

import torch
from torch import Tensor


class SimulatedDriver:
    """The part of a Triton driver that do_bench needs. No kernel can be launched with it."""

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_empty_cache_for_benchmark(self) -> Tensor:
        return torch.empty(1, dtype=torch.int32, device="cuda")

    def clear_cache(self, cache: Tensor) -> None:
        cache.zero_()


def install() -> None:
    """Make it Triton's driver in this process."""
    from triton.runtime import driver

    driver.set_active(SimulatedDriver())  # type: ignore[arg-type]
