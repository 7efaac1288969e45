"""How tools/bench/kernels.py takes time, and the two rates that it holds figures against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

WARM_UP_S = 0.03  # and three calls: the first one compiles, and a card that was idle raises its clock
FLUSH_BYTES = 2 << 30


class Clock:
    """Times calls in microseconds.

    On a card between two events, after a write of 2 GiB: that empties the L2 cache, and takes about 0.5 ms, in which
    this process gets ahead of the card, so that what Python needs to launch is not in the figure. What is slower to
    launch than that is slow for a user too.
    """

    def __init__(self, device: torch.device, repeats: int, tiny: bool):
        self.device, self.repeats, self.tiny = device, repeats, tiny
        self.waste = torch.empty(0 if tiny else FLUSH_BYTES, dtype=torch.int8, device=device)

    def __call__(self, fn: Callable[[], Any]) -> list[float]:
        """Of each of `repeats` calls after the warm-up."""
        begin, calls = time.perf_counter(), 0
        if self.device.type == "cpu":
            return [self._once(fn) for _ in range(self.repeats + 1)][1:]
        while calls < 3 or time.perf_counter() - begin < WARM_UP_S:
            fn()
            torch.cuda.synchronize()
            calls += 1
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repeats)]
        for start, stop in pairs:
            self.waste.zero_()
            start.record()
            fn()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) * 1e3 for start, stop in pairs]

    def _once(self, fn: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        fn()
        return (time.perf_counter() - begin) * 1e6

    def extra_bytes(self, fn: Callable[[], Any]) -> int | None:
        """The most memory that a call takes beside what is there before and after it: beside inputs and results.
        None on CPU, where nobody counts."""
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        made = fn()
        torch.cuda.synchronize()
        after, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        del made
        return most - after


def copy_rate(clock: Clock, size: int | None = None) -> float:
    """GB/s of torch's copy of `size` bytes (1 GiB; tiny: 1 MiB), bytes read and written."""
    size = size or 1 << (20 if clock.tiny else 30)
    a, b = (torch.ones(size, dtype=torch.int8, device=clock.device) for _ in range(2))
    return 2 * size / statistics.median(clock(lambda: b.copy_(a))) / 1e3


def matmul_rate(clock: Clock, dtype: torch.dtype) -> float:
    """TFLOP/s of torch's product of two matrices of 8192 x 8192 (tiny: 128), of normal numbers: zeros are faster."""
    size = 128 if clock.tiny else 8192
    a, b = (torch.randn(size, size, dtype=dtype, device=clock.device) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / statistics.median(clock(lambda: torch.mm(a, b, out=out))) / 1e6
