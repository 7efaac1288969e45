"""Measuring one case of tools/bench/kernels.py after the other: rows, sweeps over tiles, and their best."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tools.bench.kernel_case import Case, Sizes, Tile, peers_of
from tools.bench.kernel_clock import Clock, copy_rate, matmul_rate


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
        tile = " ".join(f"{name} {value}" for name, value in self.tile.items()) + " (table)" * self.table
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
        return Row(
            *(case.name, peer, case.shape(s), s.tokens, str(s.dtype).removeprefix("torch."), us, (high - low) / us),
            *(gb_s, gb_s / self.copy_gb_s, tflops, None if tflops is None else tflops / self.matmul_tflops),
            None if extra is None else extra / 2**20,
            **more,
        )

    def measure(self, cases: list[tuple[Case, Sizes]], peers: list[str]) -> Iterator[Row]:
        for case, s in cases:
            for peer, prepare in peers_of(case, s, peers):
                row = self.row(case, s, peer, prepare)
                if row is not None:
                    yield row

    def sweep(self, cases: list[tuple[Case, Sizes]], most: int | None) -> Iterator[Row]:
        """Every candidate tile of every launcher; the table's own first."""
        for case, s in cases:
            seen: set[tuple[str, ...]] = set()
            for tile, fn in itertools.islice(case.tiles(s), most):
                first = tuple(tile) not in seen
                seen.add(tuple(tile))
                row = self.row(case, s, "megalite", lambda fn=fn: fn, tile=tile, table=first)
                if row is not None:
                    yield row


def best_of(rows: list[Row]) -> list[dict[str, Any]]:
    """Of a sweep: the fastest tile of each kernel and size, and what it gains over the table's (None: that failed)."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.kernel, row.shape, tuple(row.tile)), []).append(row)
    made = []
    for (name, shape, _), tried in groups.items():
        best, table = min(tried, key=lambda r: r.us), next((r for r in tried if r.table), None)
        gain = None if table is None else table.us / best.us - 1
        made.append({"kernel": name, "shape": shape, "tile": best.tile, "table": table and table.tile, "gain": gain})
    return made


def build(share: str, cases: list[tuple[Case, Sizes]], most: int | None) -> None:
    """Launch one share of the tiles once, so that Triton's cache on disk has them. Flat tensors are short here: the
    code is the same, and several processes have room."""
    part, jobs = map(int, share.split("/"))
    number = 0
    for case, s in cases:
        with contextlib.suppress(Exception):  # the sweep says so
            for _, fn in itertools.islice(case.tiles(replace(s, numel=min(s.numel, 1 << 20))), most):
                number += 1
                if number % jobs == part:
                    with contextlib.suppress(Exception):
                        fn()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
