"""How tools/bench/kernels.py takes time, the two rates that it holds figures against, and its rows: of one case after
the other, of sweeps over tiles, and their best."""

import itertools
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tools.bench.kernel_case import Case, Sizes, Tile, peers_of


@dataclass(frozen=True)
class Row:
    """One measurement: `peer` names who did it. of_copy, of_matmul: as a part of the rates of this run. extra_mib:
    memory beside inputs and results. Of a sweep `tile`, and whether it is the table's own."""

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
        figure = f"{self.gb_s:>7.0f} GB/s   {self.of_copy:>7.1%} of copy"
        if self.tflops is not None and self.of_matmul is not None:
            figure = f"{self.tflops:>7.1f} TFLOP/s{self.of_matmul:>7.1%} of matmul"
        tile = " ".join(f"{name} {value}" for name, value in self.tile.items())
        if self.table:
            tile += " (table)"
        what = f"{self.kernel:<26} {self.shape:<18} {self.peer:<9} {self.us:>11.1f} us +-{self.spread:>5.1%}"
        return f"{what} {figure}  {tile}".rstrip()


class Bench:
    """Measures cases against the rates of this run; `errors` collects who could not."""

    def __init__(self, device: torch.device, repeats: int, dtype: torch.dtype, tiny: bool):
        self.clock, self.dtype = Clock(device, repeats, tiny), dtype
        self.copy_gb_s, self.matmul_tflops = copy_rate(self.clock), matmul_rate(self.clock, dtype)
        self.errors: list[dict[str, str]] = []

    def row(self, case: Case, s: Sizes, peer: str, prepare: Callable[[], Callable[[], Any]], **more: Any) -> Row | None:
        """One measurement, or None and an entry in `errors`."""
        try:
            fn = prepare()
            times, extra = self.clock(fn), self.clock.extra_bytes(fn)
        except Exception as error:  # a peer that lacks the shape, a tile that asks for more than the card has
            text = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            found = {"kernel": case.name, "shape": case.shape(s), "peer": peer, "error": text}
            self.errors.append(found | {k: v for k, v in more.items() if k == "tile"})
            return None
        finally:
            if self.clock.device.type == "cuda":
                torch.cuda.empty_cache()
        us = statistics.median(times)
        low, _, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else (us, us, us)
        gb_s = case.work.bytes(s) / us / 1e3
        tflops = None if case.work.flops is None else case.work.flops(s) / us / 1e6
        dtype = str(s.dtype).removeprefix("torch.")
        of_matmul = None if tflops is None else tflops / self.matmul_tflops
        extra_mib = None if extra is None else extra / 2**20
        spread = (high - low) / us
        rate = (gb_s, gb_s / self.copy_gb_s, tflops, of_matmul)
        return Row(case.name, peer, case.shape(s), s.tokens, dtype, us, spread, *rate, extra_mib, **more)

    def measure(self, cases: list[tuple[Case, Sizes]], peers: list[str]) -> Iterator[Row]:
        for case, s in cases:
            rows = (self.row(case, s, peer, prepare) for peer, prepare in peers_of(case, s, peers))
            yield from (row for row in rows if row is not None)

    def sweep(self, cases: list[tuple[Case, Sizes]], most: int | None) -> Iterator[Row]:
        """Every candidate tile of every launcher; the table's own first."""
        for case, s in cases:
            seen: set[tuple[str, ...]] = set()
            for tile, fn in itertools.islice(case.sweep(s), most):
                first = tuple(tile) not in seen
                seen.add(tuple(tile))
                row = self.row(case, s, "megalite", lambda fn=fn: fn, tile=tile, table=first)
                if row is not None:
                    yield row


def best_of(rows: list[Row]) -> list[dict[str, Any]]:
    """The fastest tile of a sweep for each kernel and size, and its gain over the table's (None: that one failed)."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.kernel, row.shape, tuple(row.tile)), []).append(row)
    found = []
    for (name, shape, _), tried in groups.items():
        best, table = min(tried, key=lambda r: r.us), next((r for r in tried if r.table), None)
        gain = None if table is None else table.us / best.us - 1
        found.append({"kernel": name, "shape": shape, "tile": best.tile, "table": table and table.tile, "gain": gain})
    return found


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
        """The microseconds of each of `repeats` calls after the warm-up."""
        begin, calls = time.perf_counter(), 0
        if self.device.type == "cpu":
            return [1e6 * seconds for seconds in timeit.repeat(fn, number=1, repeat=self.repeats + 1)][1:]
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
