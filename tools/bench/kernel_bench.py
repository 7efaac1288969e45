"""Measure the cases of tools/bench/kernels.py: the timer, the reference rates, and the results of cases and sweeps."""

import itertools
import statistics
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch

from tools.bench.kernel_case import KernelCase, ProblemSizes, Tile, select_peers


@dataclass(frozen=True)
class KernelResult:
    """One measurement, as a row of the JSON file.

    Attributes:
        kernel: the name of the case.
        peer: the name of the measured function.
        shape: the size that distinguishes the rows of a case.
        tokens: the number of tokens.
        dtype: the dtype of the inputs.
        us: the median time in microseconds.
        spread: the distance of the quartiles, relative to the median.
        gb_s: the rate of the case's minimum bytes.
        of_copy: gb_s relative to the copy rate of this run.
        tflops: the rate of the case's FLOPs; None if it is limited by memory.
        of_matmul: tflops relative to the matmul rate of this run.
        extra_mib: peak memory in addition to inputs and results; None on a CPU.
        tile: the tile, in a sweep.
        table: True if this is the tile of the table, in a sweep.
    """

    kernel: str
    peer: str
    shape: str
    tokens: int
    dtype: str
    us: float
    spread: float
    gb_s: float
    of_copy: float
    tflops: float | None
    of_matmul: float | None
    extra_mib: float | None
    tile: Tile = field(default_factory=dict)
    table: bool = False

    def line(self) -> str:
        """Format the result as a line of text."""
        if self.tflops is not None and self.of_matmul is not None:
            rate = f"{self.tflops:>7.1f} TFLOP/s{self.of_matmul:>7.1%} of matmul"
        else:
            rate = f"{self.gb_s:>7.0f} GB/s   {self.of_copy:>7.1%} of copy"
        tile = " ".join(f"{name} {value}" for name, value in self.tile.items())
        if self.table:
            tile += " (table)"
        case = f"{self.kernel:<26} {self.shape:<18} {self.peer:<9}"
        return f"{case} {self.us:>11.1f} us +-{self.spread:>5.1%} {rate}  {tile}".rstrip()


class KernelBench:
    """The measurements of one run, and the rates to which it compares them. `errors` collects what failed."""

    def __init__(self, device: torch.device, repeats: int, dtype: torch.dtype, tiny: bool):
        self.timer = KernelTimer(device, repeats, tiny)
        self.copy_gb_s = copy_rate(self.timer)
        self.matmul_tflops = matmul_rate(self.timer, dtype)
        self.errors: list[dict[str, Any]] = []

    def measure_one(
        self,
        case: KernelCase,
        s: ProblemSizes,
        peer: str,
        prepare: Callable[[], Callable[[], Any]],
        tile: Tile | None = None,
        table: bool = False,
    ) -> KernelResult | None:
        """Return one measurement, or None if it failed, with an entry in `errors`."""
        try:
            fn = prepare()
            times, extra_bytes = self.timer(fn), self.timer.extra_bytes(fn)
        except Exception as error:  # a peer without this shape, or a tile that needs more than the GPU has
            message = (str(error).strip().splitlines() or [""])[0]
            entry: dict[str, Any] = {
                "kernel": case.name,
                "shape": case.shape(s),
                "peer": peer,
                "error": f"{type(error).__name__}: {message}",
            }
            if tile is not None:
                entry["tile"] = tile
            self.errors.append(entry)
            return None
        finally:
            if self.timer.device.type == "cuda":
                torch.cuda.empty_cache()
        us = statistics.median(times)
        spread = 0.0
        if len(times) > 1:
            low, _, high = statistics.quantiles(times, n=4, method="inclusive")
            spread = (high - low) / us
        gb_s = case.work.bytes(s) / us / 1e3
        tflops = None if case.work.flops is None else case.work.flops(s) / us / 1e6
        return KernelResult(
            kernel=case.name,
            peer=peer,
            shape=case.shape(s),
            tokens=s.tokens,
            dtype=str(s.dtype).removeprefix("torch."),
            us=us,
            spread=spread,
            gb_s=gb_s,
            of_copy=gb_s / self.copy_gb_s,
            tflops=tflops,
            of_matmul=None if tflops is None else tflops / self.matmul_tflops,
            extra_mib=None if extra_bytes is None else extra_bytes / 2**20,
            tile=tile or {},
            table=table,
        )

    def measure(self, cases: list[tuple[KernelCase, ProblemSizes]], peers: list[str]) -> Iterator[KernelResult]:
        """Yield the results of every case and peer."""
        for case, s in cases:
            for peer, prepare in select_peers(case, s, peers):
                result = self.measure_one(case, s, peer, prepare)
                if result is not None:
                    yield result

    def sweep(self, cases: list[tuple[KernelCase, ProblemSizes]], max_tiles: int | None) -> Iterator[KernelResult]:
        """Yield the results of every candidate tile, for each launcher first that of the table.

        triton.autotune has no place here: it varies the constants of one kernel, and a tile also decides the grid and
        the buffers that the kernel's launcher allocates.
        """
        for case, s in cases:
            ((_, prepare),) = select_peers(case, s, [case.sweep_peer])
            launch = prepare()
            launchers: set[tuple[str, ...]] = set()  # by the names of their tile's values
            for candidate in itertools.islice(case.candidates(s), max_tiles):
                tile = candidate.tile
                is_table = tuple(tile) not in launchers
                launchers.add(tuple(tile))
                with candidate.in_use():
                    result = self.measure_one(case, s, "megalite", lambda fn=launch: fn, tile=tile, table=is_table)
                if result is not None:
                    yield result


def best_tiles(results: list[KernelResult]) -> list[dict[str, Any]]:
    """Return the fastest tile of a sweep for each launcher and size.

    `gain` is its speedup over the table's tile minus 1, or None if that tile failed.
    """
    groups: dict[tuple[str, str, tuple[str, ...]], list[KernelResult]] = {}
    for result in results:
        groups.setdefault((result.kernel, result.shape, tuple(result.tile)), []).append(result)
    rows = []
    for (kernel, shape, _), group in groups.items():
        best = min(group, key=lambda result: result.us)
        table = next((result for result in group if result.table), None)
        rows.append(
            {
                "kernel": kernel,
                "shape": shape,
                "tile": best.tile,
                "table": None if table is None else table.tile,
                "gain": None if table is None else table.us / best.us - 1,
            }
        )
    return rows


WARMUP_MS = 30  # an idle GPU needs it to raise its clock
MIN_TIMED_MS = 30  # of the calls of one measurement and the writes between them


class KernelTimer:
    """Times calls in microseconds.

    On a GPU `triton.testing.do_bench` times a call by two events after it has overwritten 256 MB, more than an L2 cache
    holds. The host enqueues the call during that write, so its launch counts only as far as it takes longer.
    """

    def __init__(self, device: torch.device, repeats: int, tiny: bool):
        self.device, self.repeats, self.tiny = device, repeats, tiny

    def __call__(self, fn: Callable[[], Any]) -> list[float]:
        """Return the microseconds of each of at least `repeats` calls after the warmup."""
        if self.device.type == "cpu":
            return [1e6 * seconds for seconds in timeit.repeat(fn, number=1, repeat=self.repeats + 1)][1:]
        from triton.testing import do_bench

        times_ms: list[float] = []
        budget_ms = MIN_TIMED_MS
        while len(times_ms) < self.repeats:
            times_ms += do_bench(fn, warmup=WARMUP_MS, rep=budget_ms, return_mode="all") or []
            budget_ms = ceil(1.1 * (self.repeats - len(times_ms)) * max(times_ms))
        return [1e3 * milliseconds for milliseconds in times_ms]

    def extra_bytes(self, fn: Callable[[], Any]) -> int | None:
        """Return the peak memory of a call in addition to its inputs and results, or None on a CPU."""
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        result = fn()
        torch.cuda.synchronize()
        with_result, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        del result
        return peak - with_result


def copy_rate(timer: KernelTimer, size: int | None = None) -> float:
    """Return the GB/s, read and written, of torch's copy of `size` bytes (default 1 GiB; tiny: 1 MiB)."""
    if size is None:
        size = 1 << 20 if timer.tiny else 1 << 30
    a, b = (torch.ones(size, dtype=torch.int8, device=timer.device) for _ in range(2))
    return 2 * size / statistics.median(timer(lambda: b.copy_(a))) / 1e3


def matmul_rate(timer: KernelTimer, dtype: torch.dtype) -> float:
    """Return the TFLOP/s of torch's product of two matrices of 8192 x 8192 (tiny: 128).

    The matrices hold normal random numbers, because zeros are faster.
    """
    size = 128 if timer.tiny else 8192
    a, b = (torch.randn(size, size, dtype=dtype, device=timer.device) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / statistics.median(timer(lambda: torch.mm(a, b, out=out))) / 1e6
