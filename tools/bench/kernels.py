#!/usr/bin/env python
"""Measure the kernels on this GPU, compared with the rates of a copy and a matmul of the same run, and with peers.

python tools/bench/kernels.py                        every kernel, forward and backward, at large sizes
python tools/bench/kernels.py --only rms_norm,rope   some kernels
python tools/bench/kernels.py --sweep                other tiles than those of the tables, and the best of them
python tools/bench/kernels.py --list                 what would be measured; needs no GPU
python tools/bench/kernels.py --device cpu           tiny sizes in Triton's interpreter, to test that it runs

Bytes are the minimum: each input is read once and each result is written once. So a kernel that reads twice has low
GB/s, as it should. FLOPs are those of the formula in --list. Peers do the same work on the same inputs: torch eager,
torch.compile, and Liger-Kernel if it is installed. The peers of attention are the Triton kernel (triton) and torch's
backends; "megalite" is what the dispatcher chooses. A time is the median of at least --repeats calls, each after the L2
cache was overwritten (triton.testing.do_bench). Its spread is the distance of the quartiles relative to the median.
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
from tools.bench.kernel_bench import KernelBench, KernelResult, best_tiles
from tools.bench.kernel_case import KernelCase, ProblemSizes, missing_packages
from tools.bench.kernel_cases import CASES, GPU_SIZES, TINY_SIZES, list_cases
from tools.cli_common import make_parser, write_json

PEERS = ("megalite", "torch", "compile", "liger", "triton", "cudnn", "flash")


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
    parser.add_argument("--tokens", type=int, nargs=1, metavar="N")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="use the CPU's small sizes on a GPU, to see whether it runs"
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--repeats", type=int, default=30, help="timed calls at least (default 30)")
    parser.add_argument("--sweep", action="store_true", help="also time tile sizes that are not in the tables")
    parser.add_argument("--tiles", type=int, metavar="N", help="most tiles to try per kernel and size in a sweep")
    parser.add_argument("--seconds", type=float, help="start no measurement after this time")
    parser.add_argument("--json", metavar="FILE", help="write the results to this file, after each one")
    parser.add_argument("--list", action="store_true", help="list what would be measured")
    return parser


def find_problems(args: argparse.Namespace, names: list[str]) -> list[str]:
    """Return the problems of the arguments; `names` are the kernels of --only."""
    known_names = {case.op for case in CASES}
    problems = [
        f"--only {name} is unknown; there are {', '.join(sorted(known_names))}"
        for name in names
        if name not in known_names
    ]
    counts: list[tuple[str, int | None]] = [("repeats", args.repeats), ("tiles", args.tiles)]
    for name in GPU_SIZES:
        flag = name.replace("_", "-").removesuffix("s") + "s"
        counts += [(flag, value) for value in getattr(args, name) or []]
    problems += [f"--{flag} {count} is below 1" for flag, count in counts if count is not None and count < 1]
    problems += [f"--hidden-sizes {d} is not a multiple of 128" for d in args.hidden_size or [] if d % 128]
    return problems


def device_problems(device_type: str) -> list[str]:
    """Return the reasons why nothing can be measured on this type of device."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return ["torch sees no CUDA device; --list says what there is, --device cpu tries it at tiny sizes"]
    try:
        if runs_triton(device_type) or device_type == "cpu":
            return []
        return ["the dispatcher takes torch; install triton, unset MEGALITE_KERNELS"]
    except (KernelError, MissingPackageError) as error:
        return [str(error)]


def main(argv: list[str]) -> int:
    """Run the program, and return its exit code."""
    args = build_parser().parse_args(argv)
    names = args.only.split(",") if args.only else []
    problems = find_problems(args, names)
    on_cpu = args.device == "cpu" and not args.list
    if on_cpu and triton_installed():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("MEGALITE_KERNELS", "triton")
    if not problems and not args.list:
        problems += device_problems(args.device)
    if args.json and not args.list:
        try:
            open(args.json, "a").close()
        except OSError as error:
            problems.append(f"--json {args.json} cannot be written: {error.strerror}")
    if problems:
        print("\n".join(f"kernels.py: {problem}" for problem in problems), file=sys.stderr)
        return 2
    device = torch.device("cpu" if args.list else args.device)
    default_sizes = TINY_SIZES if on_cpu or args.tiny else GPU_SIZES
    sizes = {name: getattr(args, name) or default for name, default in default_sizes.items()}
    cases = list_cases(sizes, getattr(torch, args.dtype), device, names, args.half)
    if args.list:
        for case, s in cases:
            print(f"{case.name:<26} {case.shape(s):<18} {case.work.bytes(s) / 1e6:>8.1f} MB  {case.work.formula}")
        return 0
    with safe_path():  # inductor, of the peer compile, starts `python -c`
        return run(args, device, cases)


def run(args: argparse.Namespace, device: torch.device, cases: list[tuple[KernelCase, ProblemSizes]]) -> int:
    """Measure the cases, and return the exit code."""
    start = time.monotonic()
    bench = KernelBench(device, args.repeats, getattr(torch, args.dtype), args.tiny or device.type == "cpu")
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{device_name}: copy {bench.copy_gb_s:.0f} GB/s, matmul {bench.matmul_tflops:.0f} TFLOP/s")
    for package in missing_packages(args.peers):
        print(f"{package} is not installed: no figures of it")
    header: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": device_name,
        "torch": torch.__version__,
        "interpreted": device.type == "cpu" and runs_triton("cpu"),
    }
    if triton_installed():
        import triton

        header["triton"] = triton.__version__
    header["copy_gb_s"] = bench.copy_gb_s
    header["matmul_tflops"] = bench.matmul_tflops
    header["repeats"] = args.repeats
    header["formulas"] = {case.name: case.work.formula for case, _ in cases}
    results: list[KernelResult] = []

    def save(complete: bool, **extra: Any) -> None:
        if args.json:
            rows = [asdict(result) for result in results]
            write_json(Path(args.json), {**header, "rows": rows, "errors": bench.errors, "complete": complete, **extra})

    save(complete=False)
    complete = True
    for result in bench.sweep(cases, args.tiles) if args.sweep else bench.measure(cases, args.peers):
        print(result.line(), flush=True)
        results.append(result)
        save(complete=False)
        if args.seconds is not None and time.monotonic() - start > args.seconds:
            complete = False
            print(f"stopped after {args.seconds:.0f} s")
            break
    best = best_tiles(results) if args.sweep else []
    for row in best:
        gain = "the table's did not run" if row["gain"] is None else f"{row['gain']:+.1%} over the table"
        print(f"{row['kernel']:<26} {row['shape']:<18} {row['tile']}: {gain}")
    for error in bench.errors:
        print(f"{error['kernel']} {error['shape']} {error['peer']}: {error['error']}", file=sys.stderr)
    save(complete=complete, best=best)
    has_failed = any(error["peer"] == "megalite" for error in bench.errors) and not args.sweep
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
