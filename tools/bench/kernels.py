#!/usr/bin/env python
"""What the kernels reach on this card, beside what a copy and a matmul reach in the same run, and beside peers.

python tools/bench/kernels.py                        every kernel, forward and backward, at large sizes
python tools/bench/kernels.py --only rms_norm,rope   some of them
python tools/bench/kernels.py --sweep                other tiles than the tables have: which is best
python tools/bench/kernels.py --list                 what would be measured; needs no card
python tools/bench/kernels.py --device cpu           tiny sizes in Triton's interpreter: whether it runs

Bytes are those that must move (each input read once, each result written once), so GB/s of a kernel that reads twice is
low, as it should be; FLOPs are those of the formula in --list. Peers do the same work on the same inputs: torch eager,
torch.compile, and Liger-Kernel where it is installed; of attention the own kernel (triton) and torch's by
backend, "megalite" being what the dispatcher takes. The median of --repeats calls counts, each after the L2 cache was
overwritten; a figure is as sure as its spread (quartiles, as a part of the median) is small.
"""

import argparse
import datetime
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megalite.common.environment import safe_path
from megalite.common.optional_packages import MissingPackageError
from megalite.kernels.dispatch import KernelError, runs_triton, triton_installed
from tools.bench.kernel_bench import Bench, Row, best_of
from tools.bench.kernel_case import Case, Sizes, absent
from tools.bench.kernel_cases import CASES
from tools.cli_common import make_parser, write_json

PEERS = ("megalite", "torch", "compile", "liger", "triton", "cudnn", "flash")
# flag and field of Sizes: values on a card, and on a CPU
SIZES = {
    "hidden_size": ([4096, 8192], [128]),
    "vocab_size": ([128256], [300]),
    "sequence": ([4096, 32768], [24]),
    "numel": ([1 << 30], [3000]),
    "expert_count": ([1, 8, 16], [1, 3]),
}
TOKENS = (16384, 24)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", metavar="NAMES", help="kernels by name, separated by commas")
    parser.add_argument(
        "--half",
        choices=["forward", "backward", "both"],
        help="measure only forwards, only backwards, or only kernels that are timed over both",
    )
    parser.add_argument("--hidden-sizes", type=int, nargs="+", metavar="N", dest="hidden_size")
    parser.add_argument("--vocab-sizes", type=int, nargs="+", metavar="N", dest="vocab_size")
    parser.add_argument("--sequences", type=int, nargs="+", metavar="N", dest="sequence")
    parser.add_argument("--numels", type=int, nargs="+", metavar="N", dest="numel")
    parser.add_argument("--expert-counts", type=int, nargs="+", metavar="N", dest="expert_count")
    parser.add_argument("--tokens", type=int, metavar="N")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="use the CPU's small sizes on a GPU, to see whether it runs"
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--sweep", action="store_true", help="also time tile sizes that are not in the tables")
    parser.add_argument("--tiles", type=int, metavar="N", help="most tiles to try per kernel and size in a sweep")
    parser.add_argument("--seconds", type=float, help="start no measurement after this time")
    parser.add_argument("--json", metavar="FILE", help="write the results to this file, after each one")
    parser.add_argument("--list", action="store_true", help="list what would be measured")
    return parser


def main(argv: list[str]) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    wanted = args.only.split(",") if args.only else None
    names = {case.op for case in CASES}
    problems = [f"--only {name} is unknown; there are {', '.join(sorted(names))}" for name in wanted or []
                if name not in names]  # fmt: skip
    numbers = {"tokens": args.tokens, "repeats": args.repeats, "tiles": args.tiles}
    numbers |= {f"{name.replace('_', '-')}s": v for name in SIZES for v in getattr(args, name) or []}
    problems += [f"--{name} {v} is below 1" for name, v in numbers.items() if v is not None and v < 1]
    problems += [f"--hidden-sizes {d} is not a multiple of 128" for d in args.hidden_size or [] if d % 128]
    cpu = args.device == "cpu" and not args.list
    if cpu and triton_installed():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("MEGALITE_KERNELS", "triton")
    if not problems and not args.list:
        problems += missing(args.device)
    if args.json and not args.list:
        try:
            open(args.json, "a").close()
        except OSError as error:
            problems.append(f"--json {args.json} cannot be written: {error.strerror}")
    if problems:
        print("\n".join(f"kernels.py: {problem}" for problem in problems), file=sys.stderr)
        return 2
    device = torch.device("cpu" if args.list else args.device)
    tiny = cpu or args.tiny
    base = Sizes(args.tokens or TOKENS[tiny], SIZES["hidden_size"][tiny][0], getattr(torch, args.dtype), device)
    values = {name: getattr(args, name) or defaults[tiny] for name, defaults in SIZES.items()}
    there = [case for case in CASES if (not wanted or case.op in wanted) and args.half in (None, case.half)]
    cases = [(case, s) for case in there for s in case.sizes(base, values)]
    if args.list:
        for case, s in cases:
            print(f"{case.name:<26} {case.shape(s):<18} {case.work.bytes(s) / 1e6:>8.1f} MB  {case.work.formula}")
        return 0
    with safe_path():  # inductor, the peer compile, starts `python -c`
        return run(args, device, cases)


def run(args: argparse.Namespace, device: torch.device, cases: list[tuple[Case, Sizes]]) -> int:
    begin = time.monotonic()
    bench = Bench(device, args.repeats, getattr(torch, args.dtype), args.tiny or device.type == "cpu")
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{card}: copy {bench.copy_gb_s:.0f} GB/s, matmul {bench.matmul_tflops:.0f} TFLOP/s")
    for package in absent(args.peers):
        print(f"{package} is not installed: no figures of it")
    head = {"date": datetime.date.today().isoformat(), "device": card, "torch": torch.__version__}
    head |= {"interpreted": device.type == "cpu" and runs_triton("cpu")}
    if triton_installed():
        import triton

        head |= {"triton": triton.__version__}
    head |= {"copy_gb_s": bench.copy_gb_s, "matmul_tflops": bench.matmul_tflops, "repeats": args.repeats}
    head |= {"formulas": {case.name: case.work.formula for case, _ in cases}}
    rows: list[Row] = []

    def save(**more: Any) -> None:
        if args.json:
            made = head | {"rows": [asdict(row) for row in rows], "errors": bench.errors} | more
            write_json(Path(args.json), made)

    save(complete=False)
    complete = True
    for row in bench.sweep(cases, args.tiles) if args.sweep else bench.measure(cases, args.peers):
        print(row.line(), flush=True)
        rows.append(row)
        save(complete=False)
        if args.seconds is not None and time.monotonic() - begin > args.seconds:
            complete = False
            print(f"stopped after {args.seconds:.0f} s")
            break
    best = best_of(rows) if args.sweep else []
    for one in best:
        gain = "the table's did not run" if one["gain"] is None else f"{one['gain']:+.1%} over the table"
        print(f"{one['kernel']:<26} {one['shape']:<18} {one['tile']}: {gain}")
    for error in bench.errors:
        print(f"{error['kernel']} {error['shape']} {error['peer']}: {error['error']}", file=sys.stderr)
    save(complete=complete, best=best)
    return 1 if any(error["peer"] == "megalite" and not args.sweep for error in bench.errors) else 0


def missing(device: str) -> list[str]:
    """Why nothing can be measured here."""
    if device == "cuda" and not torch.cuda.is_available():
        return ["torch sees no CUDA device; --list says what there is, --device cpu tries it at tiny sizes"]
    try:
        if runs_triton(device) or device == "cpu":
            return []
        return ["the dispatcher takes torch; install triton, unset MEGALITE_KERNELS"]
    except (KernelError, MissingPackageError) as error:
        return [str(error)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
