#!/usr/bin/env python
"""Plan a run before it costs anything: which layouts fit a cluster, how fast a step is, what it takes and costs.

python tools/plan.py --preset llama3-405b --num-gpus 16384 --seq-length 8192 --global-batch-size 2048
python tools/plan.py --ask                              asks for what it needs, with defaults
python tools/plan.py --hf config.json --device a100 --num-gpus 64 --global-batch-size 256 --tokens 300B
python tools/plan.py memory --preset llama3-8b --num-gpus 8 --tp 2 --pp 2        of one layout, without its time
python tools/plan.py sizes --dp 64                      bytes of state by size and ZeRO stage
python tools/plan.py tokens --preset llama3-8b          tokens, FLOPs, steps, days
python tools/plan.py calibrate --out profile.json       measure this device, for --profile
python tools/plan.py compare RUN                        predicted beside measured, of a run's directory
python tools/plan.py published                          predicted beside published step times

The model: --preset, --hf, --config, or any flags of pretrain_gpt.py. Where they name tp or pp, that layout alone is
planned; else layouts are searched, with micro-batch, recompute and split backward as far as they are left open. What a
layout is refused for are the run's own checks. Times are simulated, memory is counted. Layouts are called by tp, pp,
chunks per rank (vpp) and micro-batch; selective, full: recompute (selective: norms and the MLP); split: backward; ends:
embedding and head each take the place of a layer; zero 2, zero 3: the ZeRO stage, where it is not 1; ddp: stage 0. A
row is the plainest layout of its tp, pp and sharding that cannot be told from the fastest, as published steps were
mostly within 15 % of their prediction. Shares are of what shows: a collective behind a matmul takes nothing. Exit code
2: the question is wrong, or nothing fits; 1: the given layout does not.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.config.options import ConfigError
from tools.program import parser_of, refusing, run_program, take

# tables of flags.toml, by command; "": the plan
FLAGS = {"": "places precision amount plan", "memory": "places precision", "sizes": "sizes", "published": ""}
FLAGS |= {"tokens": "places precision amount tokens", "calibrate": "precision calibrate"}


def flags_of(command: str) -> argparse.ArgumentParser:
    parser = parser_of(__doc__, f"{Path(sys.argv[0]).name} {command}" if command else None)
    for table in FLAGS[command].split():
        take(parser, f"plan {table}")
    return parser


@refusing(2, ConfigError)
def main(argv: list[str]) -> int:
    name = argv[0] if argv and argv[0] in (*FLAGS, "compare", "--compare") else ""
    command, rest = name.removeprefix("--"), argv[1:] if name else argv
    if command == "compare":
        from tools.planning import compare

        return compare.main(rest)
    parser = flags_of(command)
    args, words = parser.parse_known_args(rest)
    if words and command in ("sizes", "published"):
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    from tools.planning import commands  # imports torch, which --help does without

    return commands.run(command, args, words)


if __name__ == "__main__":
    run_program(main)
