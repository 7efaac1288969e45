#!/usr/bin/env python
"""Predicted beside measured time of a step, on this machine: calibrated, then real runs of every layout.

    python tools/bench/plan_accuracy.py                     2 ranks: pp 2, vpp 1, 2 and 4, 2 to 16 micro-batches
    python tools/bench/plan_accuracy.py --layouts 1x4 4x8   chunks per rank x micro-batches
    python tools/bench/plan_accuracy.py --profile p.json    calibrated before; --json out.json keeps what was found

A row is the median step of a run of its own (tools/benchmark.py measures it) and its ratio; then how many pairs of
layouts, of those whose measured tokens/s differ by more than 5 %, are ranked alike. A machine that does other work at
the same time measures that: the load is printed with the rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

MODEL = """--num-layers 8 --hidden-size 384 --num-attention-heads 6 --ffn-hidden-size 1024 --vocab-size 2048
 --seq-length 256 --micro-batch-size 1 --swiglu --normalization RMSNorm --position-embedding-type rope
 --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
 --mock-data --train-iters 1000 --lr 1e-4 --lr-decay-style constant --eval-iters 0 --device cpu"""
VOCABULARY = 2048
LAYOUTS = [f"{chunks}x{microbatches}" for chunks in (1, 2, 4) for microbatches in (2, 4, 8, 16)]
DIFFERENT = 0.05  # of tokens/s, below which two layouts count as equal


def flags_of(layout: str) -> list[str]:
    chunks, microbatches = map(int, layout.split("x"))
    virtual = ["--num-virtual-stages-per-pipeline-rank", str(chunks)] if chunks > 1 else []
    return [*MODEL.split(), "--pp", "2", *virtual, "--global-batch-size", str(microbatches)]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, metavar="CHUNKSxMICROBATCHES")
    parser.add_argument("--profile", type=Path, help="calibrated before; default: calibrated now")
    parser.add_argument("--steps", type=int, default=5, help="timed, after 2 others")
    parser.add_argument("--seconds", type=float, default=20.0, help="of calibrating")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)

    from megalite.config import cli
    from tools.planning.calibrate import calibrate
    from tools.planning.profile import read_profile

    options.nproc, options.warmup, out, options.json = 2, 2, options.json, None
    if options.profile is not None:
        profile = read_profile(options.profile)
    else:
        profile = calibrate(cli.parse(flags_of("1x2"), {}), VOCABULARY, 2, options.seconds)
    found = []
    print(f"{'vpp x M':>8}{'predicted':>11}{'measured':>11}{'ratio':>7}   load")
    for layout in options.layouts:
        row = _row(layout, options, profile)
        found.append(row)
        numbers = f"{row['predicted_s']:9.3f} s{row['measured_s']:9.3f} s{row['predicted_s'] / row['measured_s']:7.2f}"
        print(f"{layout:>8}{numbers}   {os.getloadavg()[0]:.1f}", flush=True)
        if out is not None:
            out.write_text(json.dumps({"rows": found, "profile": profile.source}, indent=1))
    same, pairs = ranked_alike(found)
    worst = max(abs(row["predicted_s"] / row["measured_s"] - 1) for row in found)
    print(f"worst {worst:.1%} off; {same} of {pairs} pairs of layouts ranked alike")
    return 0


def _row(layout: str, options: argparse.Namespace, profile: Any) -> dict[str, Any]:
    from megalite.config import cli
    from megalite.train.arrangement import arrange
    from tools.benchmark import measure
    from tools.planning.cluster import cluster
    from tools.planning.step_time import step_time

    flags = flags_of(layout)
    predicted = step_time(arrange(cli.parse(flags, {}), 2, VOCABULARY), cluster("cpu", 2), profile)
    measured = measure("megalite", {}, options, flags)
    if "error" in measured:
        raise SystemExit(f"plan_accuracy.py: {layout}: {measured['stderr']}")
    tokens = measured["tokens_per_step"]
    times = {"predicted_s": predicted.seconds, "measured_s": measured["step_s"]}
    return {"layout": layout, "tokens": tokens, **times, "predicted_parts": predicted.parts, "parts": measured["parts"]}


def ranked_alike(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """(pairs that both rank alike, pairs whose measured tokens/s differ).

    >>> row = lambda tokens, p, m: {"tokens": tokens, "predicted_s": p, "measured_s": m}
    >>> ranked_alike([row(1, 1.0, 1.0), row(1, 2.0, 3.0), row(1, 0.9, 3.1)])  # the last two are equal
    (1, 2)
    """
    same = pairs = 0
    for a, b in itertools.combinations(rows, 2):
        measured = (a["tokens"] / a["measured_s"]) / (b["tokens"] / b["measured_s"])
        predicted = (a["tokens"] / a["predicted_s"]) / (b["tokens"] / b["predicted_s"])
        if abs(measured - 1) > DIFFERENT:
            pairs += 1
            same += (measured > 1) == (predicted > 1)
    return same, pairs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
