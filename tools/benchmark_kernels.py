#!/usr/bin/env python
"""What the memory-bound kernels reach on this card, beside what a copy reaches in the same run, and beside their peers.

python tools/benchmark_kernels.py                        every kernel, forward and backward, hidden sizes 4096 and 8192
python tools/benchmark_kernels.py --only rms_norm,rope   some of them
python tools/benchmark_kernels.py --sweep                other tiles than the tables have: which is best
python tools/benchmark_kernels.py --list                 what would be measured; needs no card

Bytes are those that must move (each input read once, each result written once), so GB/s of a kernel that reads twice is
low, as it should be. Peers do the same work on the same inputs: torch eager, torch.compile, and Liger-Kernel and apex
where they are installed. The median of --repeats calls counts, each after the L2 cache was overwritten.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from kernel_case import Case, Sizes, candidates, peers_of  # noqa: E402
from kernel_cases import CASES  # noqa: E402

from megalite.kernels.dispatch import KernelError, runs_triton  # noqa: E402

PEERS = ("megalite", "torch", "compile", "liger", "apex")


@dataclass(frozen=True)
class Row:
    """One measurement: `peer` names who did it, `block` the tile where a sweep chose one."""

    kernel: str
    peer: str
    hidden_size: int
    tokens: int
    dtype: str
    us: float
    gb_s: float
    of_copy: float
    block: str = ""

    def line(self) -> str:
        what = f"{self.kernel:<26} {self.hidden_size:>6} {self.peer:<9}"
        return f"{what} {self.us:>9.1f} us {self.gb_s:>7.0f} GB/s {self.of_copy:>7.1%} of copy  {self.block}".rstrip()


class Clock:
    """Times calls on the card, in microseconds."""

    def __init__(self, device: torch.device, repeats: int):
        self.repeats = repeats
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self.waste = torch.empty(max(2 * l2, 1 << 20), dtype=torch.int8, device=device)

    def __call__(self, fn: Callable[[], Any]) -> float:
        for _ in range(3):  # the first call compiles
            fn()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repeats)]
        for begin, end in pairs:
            self.waste.zero_()
            begin.record()
            fn()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e3


def copy_rate(clock: Clock, device: torch.device) -> float:
    """GB/s of torch's copy of 1 GiB, read and written bytes."""
    a, b = (torch.empty(1 << 30, dtype=torch.int8, device=device) for _ in range(2))
    return 2 * a.numel() / clock(lambda: b.copy_(a)) / 1e3


def measure(cases: list[Case], sizes: list[Sizes], peers: list[str], clock: Clock, copy: float) -> Iterator[Row]:
    for case in cases:
        for size in sizes:
            for peer, fn in peers_of(case, size, peers):
                yield row_of(case, size, peer, clock(fn), copy)


def sweep(cases: list[Case], sizes: list[Sizes], clock: Clock, copy: float) -> Iterator[Row]:
    """Every candidate tile of every launcher; the table's own first."""
    for case in cases:
        for size in sizes:
            for label, fn in candidates(case, size):
                try:
                    us = clock(fn)
                except Exception as error:  # a tile that asks for more than the card has
                    print(f"{case.name} {size.hidden_size} {label}: {type(error).__name__}", file=sys.stderr)
                    continue
                yield row_of(case, size, "megalite", us, copy, label)


def row_of(case: Case, size: Sizes, peer: str, us: float, copy: float, label: str = "") -> Row:
    gb_s = case.bytes_moved(size) / us / 1e3
    dtype = str(size.dtype).removeprefix("torch.")
    return Row(case.name, peer, size.hidden_size, size.tokens, dtype, us, gb_s, gb_s / copy, label)


def best_of(rows: list[Row]) -> list[str]:
    """Of a sweep: the fastest tile of each kernel and size, and what it gains over the table's."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.kernel, row.hidden_size), []).append(row)
    lines = []
    for (name, hidden), tried in groups.items():
        best, table = min(tried, key=lambda r: r.us), next((r for r in tried if r.block.endswith("(table)")), None)
        gain = f"{table.us / best.us - 1:+.1%} over the table" if table else "the table's did not run"
        lines.append(f"{name:<26} {hidden:>6}: {best.block}, {best.of_copy:.1%} of copy, {gain}")
    return lines


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", metavar="NAMES", help="kernels by name, separated by commas")
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[4096, 8192], metavar="D")
    parser.add_argument("--tokens", type=int, default=16384, metavar="N")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--sweep", action="store_true", help="time other tiles than the tables'")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--list", action="store_true", help="say what would be measured")
    args = parser.parse_args(argv)
    wanted = args.only.split(",") if args.only else None
    names = {case.op for case in CASES}
    problems = [f"--only {name} is unknown; there are {', '.join(sorted(names))}" for name in wanted or []
                if name not in names]  # fmt: skip
    problems += [f"--{k} {v} is below 1" for k, v in (("tokens", args.tokens), ("repeats", args.repeats)) if v < 1]
    problems += [f"--hidden-sizes {d} is not a positive multiple of 128" for d in args.hidden_sizes if d < 1 or d % 128]
    if not problems and not args.list:
        problems += missing()
    if problems:
        print("\n".join(f"benchmark_kernels.py: {problem}" for problem in problems), file=sys.stderr)
        return 2
    cases = [case for case in CASES if wanted is None or case.op in wanted]
    device = torch.device("cpu" if args.list else "cuda")
    sizes = [Sizes(args.tokens, hidden, getattr(torch, args.dtype), device) for hidden in args.hidden_sizes]
    if args.list:
        for case in cases:
            for size in sizes:
                print(f"{case.name:<26} {size.hidden_size:>6} {case.bytes_moved(size) / 1e6:>8.1f} MB  {case.formula}")
        return 0
    clock = Clock(device, args.repeats)
    copy = copy_rate(clock, device)
    card = torch.cuda.get_device_name(device)
    print(f"{card}: copy {copy:.0f} GB/s")
    rows = []
    for row in sweep(cases, sizes, clock, copy) if args.sweep else measure(cases, sizes, args.peers, clock, copy):
        print(row.line(), flush=True)
        rows.append(row)
    best = best_of(rows) if args.sweep else []
    print("\n".join(best))
    if args.json:
        import triton

        head = {"date": datetime.date.today().isoformat(), "device": card, "torch": torch.__version__}
        head |= {"triton": triton.__version__, "copy_gb_s": copy, "repeats": args.repeats}
        Path(args.json).write_text(json.dumps(head | {"rows": [asdict(row) for row in rows], "best": best}, indent=1))
    return 0


def missing() -> list[str]:
    """Why nothing can be measured here."""
    if not torch.cuda.is_available():
        return ["torch sees no CUDA device, and figures of an interpreter mean nothing; --list says what there is"]
    try:
        return [] if runs_triton("cuda") else ["the dispatcher takes torch; install triton, unset MEGALITE_KERNELS"]
    except KernelError as error:
        return [str(error)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
