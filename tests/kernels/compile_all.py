#!/usr/bin/env python
"""Compile every kernel of every table for every card, and say which would not fit, or spill registers.

python tests/kernels/compile_all.py                     with the Triton that is installed
python tests/kernels/compile_all.py --triton DIR        with the one there (pip install --target DIR --no-deps triton==X)
python tests/kernels/compile_all.py --only rms_norm,attention --dtypes bfloat16 --cards 9.0
python tests/kernels/compile_all.py --table FILE.md     the figures too

Exit status 1 if a kernel does not compile, or would be refused by a card, or spills where it is not known to. All of
it takes about half an hour on one core; what was compiled before is kept.
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", metavar="DIR", help="a folder with another Triton's package")
    parser.add_argument("--only", metavar="NAMES", help="kernels by name, separated by commas")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="N", help="columns, or channels of a head")
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--cards", nargs="+", metavar="X.Y", help="compute capabilities")
    parser.add_argument("--table", metavar="FILE", help="write registers, spills and shared memory of each there")
    args = parser.parse_args(argv)
    os.environ.pop("TRITON_INTERPRET", None)
    if args.triton:
        sys.path.insert(0, args.triton)
    import triton
    from compiling import CARDS, cache_folder

    if args.triton and Path(args.triton).resolve() not in Path(triton.__file__).resolve().parents:
        parser.error(f"--triton {args.triton}: there is no triton; {triton.__file__} was imported")
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder()))
    cards = [c for c in CARDS.values() if not args.cards or c.name in args.cards]
    return compile_all(args, triton.__version__, [c.capability for c in cards])


def compile_all(args: argparse.Namespace, version: str, capabilities: list[int]) -> int:
    from compiling import build, recorded, tile_of
    from expected import known_spill
    from launches import every

    begin, count, bad, lines = time.monotonic(), 0, 0, []
    for work in every():
        wanted = not args.only or work.op in args.only.split(",")
        wanted &= not args.sizes or work.size in args.sizes
        if not wanted or (args.dtypes and str(work.dtype).removeprefix("torch.") not in args.dtypes):
            continue
        for capability in capabilities:
            for launch in recorded(work.run, capability):
                count += 1
                try:
                    made = build(launch, capability)
                except Exception as error:  # Triton's compiler raises many kinds; the next kernel is tried all the same
                    bad += 1
                    print(f"{work.name}: {launch.name} {tile_of(launch)}: {type(error).__name__}: {str(error)[:300]}")
                    continue
                figures = f"{made.registers} | {made.stack} | {made.shared}"
                lines.append(f"| {work.name} | {launch.name} | {tile_of(launch)} | {made.card.name} | {figures} |\n")
                for problem in made.problems():
                    known = "spilled" in problem and known_spill(launch)
                    bad += not known
                    print(f"{work.name}: {problem}{' (known)' if known else ''}", flush=True)
    if args.table:
        head = "| work | kernel | tile | card | registers | stack | shared |\n|---|---|---|---|---|---|---|\n"
        Path(args.table).write_text(head + "".join(lines))
    took = time.monotonic() - begin
    print(f"triton {version}: {count} kernels for {len(capabilities)} cards, {bad} that must be mended, {took:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
