#!/usr/bin/env python
"""Benchmark training: tokens/s, MFU, peak memory, the time of each part of a step with remedies, next to a peer.

    python tools/benchmark.py --bf16                                    a small Llama as in docs/performance.md
    python tools/benchmark.py --preset llama3-8b --num-layers 16 ...    any flags of pretrain_gpt.py come last
    python tools/benchmark.py --peer transformers --nproc 2 --bf16 --json out.json
    python tools/benchmark.py --nproc 2 --sweep micro-batch-size=1,2 --sweep tensor-model-parallel-size=1,2 --out bench
    python tools/benchmark.py --scaling strong --nproc 1,2,4,8 --out bench

All systems run in processes of their own and take turns, --repeats times. A row is the median over the repeats of the
median step. Ratios to a peer are medians of the ratios of neighboring runs, since other work on the machine varies.

megalite           as pretrain_gpt.py runs it, on --mock-data
transformers       the same model of any family that it has, with its own loss, torch.optim.AdamW and clipping
                   (bench/hf_baseline.py); in bf16 with bf16 weights and with autocast; on 2 processes DDP and FSDP2
+ allocator        on CPU, both sides keep freed memory and use huge pages (glibc tunables, THP_MEM_ALLOC_ENABLE)

--sweep measures every combination of its lists, in the syntax of tools/sweep.py. Flags that contradict each other, and
runs out of memory or time, are rows, too. --out DIR gets bench.json after every run, and bench.csv and plots at the
end; the same command, typed again, resumes. --json FILE writes only bench.json, for one combination. --scaling weak
keeps the batch size per rank, strong that of all ranks together; each rank has the same number of threads in all rows.

Parts of a step are measured in further steps by the run's own timer and sum to 100 %. The idle part is the time that a
rank waits for other stages of the pipeline, and at the end of a step for the slowest rank. Peak memory on CPU is the
sum of the largest resident sizes of all ranks. Exit codes: 0; 1 no row of megalite was measured; 2 usage; 130
interrupted.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.config.options import ConfigError
from tools.cli_common import exits_with, local_path, make_parser, number_in_range, positive_int, run_program

SHAPE = """--num-layers 6 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1408 --vocab-size 32000
 --seq-length 512 --micro-batch-size 2 --swiglu --normalization RMSNorm --position-embedding-type rope
 --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"""
RUN = "--mock-data --train-iters 1000 --lr 1e-4 --lr-decay-style constant --eval-iters 0"


def rank_counts(text: str) -> list[int]:
    """Parse the value of --nproc, as a type of argparse.

    >>> rank_counts("1,2,4")
    [1, 2, 4]
    """
    return [positive_int(number) for number in text.split(",")]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    parser.add_argument("--peer", choices=["transformers"], help="another program, measured alternately with megalite")
    parser.add_argument("--allocator", action="store_true", help="set the allocator's variables on CPU, too")
    parser.add_argument(
        "--nproc", type=rank_counts, default=[1], metavar="N[,N...]", help="number of ranks; several with --scaling"
    )
    parser.add_argument("--sweep", action="append", default=[], metavar="FLAG=A,B", help="may be given several times")
    parser.add_argument("--scaling", choices=["weak", "strong"], help="compare the numbers of ranks in --nproc")
    parser.add_argument(
        "--out", type=local_path, metavar="DIR", help="directory for results, from which the command resumes"
    )
    parser.add_argument("--steps", type=positive_int, default=6, help="timed steps, after those of --warmup")
    parser.add_argument("--warmup", type=number_in_range(int, "[0, inf)"), default=2)
    parser.add_argument("--repeats", type=positive_int, default=3)
    parser.add_argument("--timeout", type=number_in_range(float, "(0, inf)"), default=900, help="seconds for one run")
    parser.add_argument("--memory-gib", type=number_in_range(float, "(0, inf)"), help="memory limit of a rank on CPU")
    parser.add_argument(
        "--price-per-hour",
        type=number_in_range(float, "(0, inf)"),
        help="price of one device, for the cost of a sample",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results of one combination")
    return parser


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the program's own options, and the other arguments. Raises SystemExit(2) for an invalid value."""
    parser = build_parser()
    options, rest = parser.parse_known_args(argv)
    if len(options.nproc) > 1 and not options.scaling:
        parser.error(f"nproc={options.nproc} is several numbers of ranks; give --scaling weak or strong, or one number")
    if len({*options.nproc}) < 2 and options.scaling:
        parser.error(f"scaling={options.scaling} needs several numbers of ranks; give --nproc 1,2,4")
    if options.json and (options.sweep or options.scaling or options.out):
        parser.error(f"json={options.json} is of one combination; give --out DIR")
    return options, rest


@exits_with(2, ConfigError)
def main(argv: list[str]) -> int:
    """Run the program and return its exit code."""
    from tools.bench import matrix

    options, rest = parse(argv)
    flags = RUN.split()
    if not any(flag in rest for flag in ("--preset", "--num-layers", "--config")):
        flags = SHAPE.split() + flags
    if "--global-batch-size" not in rest:
        flags += ["--global-batch-size", "8"]
    return matrix.run(options, flags + rest, Path(__file__).name)


if __name__ == "__main__":
    run_program(main)
