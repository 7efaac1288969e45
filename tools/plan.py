#!/usr/bin/env python
"""Plan a run before it costs anything: the layouts that fit a cluster, the time of a step, and the cost of the run.

python tools/plan.py --preset llama3-405b --num-gpus 16384 --seq-length 8192 --global-batch-size 2048
python tools/plan.py --ask                              asks for everything that it needs, with defaults
python tools/plan.py --hf config.json --device a100 --num-gpus 64 --global-batch-size 256 --tokens 300B
python tools/plan.py memory --preset llama3-8b --num-gpus 8 --tp 2 --pp 2        memory of one layout
python tools/plan.py overlap --preset llama3-8b --num-gpus 64 --zero-stage 3     exposed communication by batch
python tools/plan.py sizes --dp 64                      bytes of state by size and ZeRO stage
python tools/plan.py tokens --preset llama3-8b          tokens, FLOPs, steps, days
python tools/plan.py calibrate --out profile.json       measure this device, for --profile
python tools/plan.py compare RUN                        predictions and measurements of a run directory
python tools/plan.py published                          predicted and published step times

The model is given by --preset, --hf, --config, or any flags of pretrain_gpt.py. If they set tp or pp, only that layout
is planned. Otherwise layouts are searched, and with them micro-batch size, recomputation and split backward if they are
not set. A run's own checks decide which layouts are valid. Times are simulated, and memory is counted.

A layout is described by tp, pp, chunks per rank (vpp) and micro-batch size, and by these words: selective, full
(recomputation; selective: norms and the MLP), split (split backward), ends (embedding and head each count as a layer),
zero 2, zero 3 (the ZeRO stage if it is not 1), ddp (stage 0). Each row has the simplest layout with its tp, pp and
sharding that cannot be distinguished from the fastest one: published steps were mostly within 15 % of their prediction.
Shares of a step count only exposed time, so a collective that overlaps with a matmul counts nothing.

Exit codes: 2 the request is invalid, or no layout fits; 1 the given layout does not fit.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.config.options import ConfigError
from tools.cli_common import exits_with, make_parser, number_in_range, positive_int, run_program

# besides the plan itself ("") and compare
COMMANDS = ("memory", "overlap", "sizes", "published", "tokens", "calibrate")


def build_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command's flags; the plan itself is the command ""."""
    parser = make_parser(__doc__, f"{Path(sys.argv[0]).name} {command}" if command else None)
    if command in ("", "memory", "overlap", "tokens"):
        add_cluster_flags(parser)
    if command in ("", "memory", "overlap", "tokens", "calibrate"):
        parser.add_argument(
            "--precision", choices=["bf16", "fp16", "fp32"], help="default bf16, or that of --bf16 or --fp16"
        )
    if command in ("", "tokens"):
        add_budget_flags(parser)
    if command == "":
        add_plan_flags(parser)
    if command in ("", "overlap"):
        add_output_flags(parser)
    if command == "tokens":
        parser.add_argument(
            "--mfu",
            type=number_in_range(float, "(0, 1]"),
            default=0.4,
            help="assumed fraction of the devices' peak; default 0.4",
        )
    elif command == "sizes":
        parser.add_argument("--dp", type=positive_int, default=4, help="devices that shard the state; default 4")
        parser.add_argument("--parameters", default="7B", help="number of parameters; default 7B")
    elif command == "calibrate":
        add_calibration_flags(parser)
    return parser


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe the model and the cluster."""
    parser.add_argument(
        "--hf", type=Path, metavar="FILE", help="the model: a config.json, or the directory that contains it"
    )
    parser.add_argument("--device", help="a100, h100, h200, b200, v100 or cpu; default h100")
    parser.add_argument("--num-gpus", type=int, metavar="N", help="devices of the cluster; default 8")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="default: the usual number for the device")
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="a TOML file that replaces these three")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="measured rates of a device, written by `calibrate`"
    )


def add_budget_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that give the length of a run and its price."""
    parser.add_argument(
        "--tokens", metavar="N", help="tokens to train on, like 300B or 15.6T; default 20 per parameter"
    )
    parser.add_argument("--data-tokens", metavar="N", help="tokens in the data, to compute the number of epochs")
    parser.add_argument(
        "--price-per-gpu-hour", type=float, metavar="DOLLARS", help="default: an example price of the device"
    )


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only the plan itself has."""
    parser.add_argument(
        "--ask", action="store_true", help="ask for the model, the devices and the rest, one line of stdin each"
    )
    parser.add_argument(
        "--usable-memory",
        type=number_in_range(float, "(0, 1]"),
        default=0.9,
        metavar="SHARE",
        help="fraction of a device's memory to plan with; default 0.9",
    )
    parser.add_argument("--top", type=positive_int, default=10, help="number of layouts to print; default 10")


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name files to write."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that is printed, and more, as JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="draw a picture; the suffix is the format")


def add_calibration_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `calibrate`."""
    parser.add_argument("--out", type=Path, default=Path("profile.json"), help="default profile.json")
    parser.add_argument(
        "--ranks", type=positive_int, default=2, help="local ranks that measure at once, as many as the run will have"
    )
    parser.add_argument(
        "--seconds",
        type=number_in_range(float, "(0, 3600)"),
        default=20.0,
        help="seconds to measure, after the start; default 20",
    )


@exits_with(2, ConfigError)
def main(argv: list[str]) -> int:
    """Run the program and return its exit code."""
    command = ""
    if argv and argv[0] in (*COMMANDS, "compare", "--compare"):
        command = argv[0].removeprefix("--")
        argv = argv[1:]
    if command == "compare":
        from tools.planning import compare

        return compare.main(argv)
    parser = build_parser(command)
    args, run_argv = parser.parse_known_args(argv)
    if run_argv and command in ("sizes", "published"):
        parser.error(f"unrecognized arguments: {' '.join(run_argv)}")
    from tools.planning import commands  # imports torch, which is too slow for --help

    return commands.run(command, args, run_argv)


if __name__ == "__main__":
    run_program(main)
