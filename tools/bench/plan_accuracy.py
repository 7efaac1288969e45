#!/usr/bin/env python
"""Predicted beside measured time of a step, on this machine: calibrated, then real runs of every layout.

    python tools/bench/plan_accuracy.py                     2 ranks: pp 2, vpp 1, 2 and 4, 2 to 16 micro-batches
    python tools/bench/plan_accuracy.py --layouts 1x4 4x8   chunks per rank x micro-batches
    python tools/bench/plan_accuracy.py --profile p.json    calibrated before; --json out.json keeps what was found
    python tools/bench/plan_accuracy.py --asleep            layers sleep: the schedule alone, on a busy machine too

A row is the median step of a run of its own (tools/benchmark.py measures it) and its ratio; then how many pairs of
layouts, of those whose measured tokens/s differ by more than 5 %, are ranked alike. A machine that does other work at
the same time measures that: the load is printed with the rows. Sleeping needs no core: with --asleep every layer takes
20 ms forward and 40 ms backward beside its little work, in the real runtime with its real messages.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megalite.config import cli
from megalite.launch.local_ranks import start_local
from megalite.launch.ranks import process_group
from megalite.plan.arrangement import arrange
from megalite.plan.cluster import cluster
from megalite.plan.cost import shape_of
from megalite.plan.profile import default_profile, read_profile
from megalite.plan.step_time import step_time
from megalite.train.setup import build_run
from megalite.train.step import train_step
from tools.bench.contender import measure, time_steps, write
from tools.planning.calibrate import calibrate
from tools.program import parser_of, read_json

MODEL = """--num-layers 8 --hidden-size 384 --num-attention-heads 6 --ffn-hidden-size 1024 --vocab-size 2048
 --seq-length 256 --micro-batch-size 1 --swiglu --normalization RMSNorm --position-embedding-type rope
 --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
 --mock-data --train-iters 1000 --lr 1e-4 --lr-decay-style constant --eval-iters 0 --device cpu"""
VOCABULARY = 2048
LAYOUTS = [f"{chunks}x{microbatches}" for chunks in (1, 2, 4) for microbatches in (2, 4, 8, 16)]
ASLEEP = ["--hidden-size", "32", "--ffn-hidden-size", "64", "--num-attention-heads", "2", "--seq-length", "16"]
LAYER_S = (0.02, 0.04)  # that a layer sleeps, forward and backward
DIFFERENT = 0.05  # of tokens/s, below which two layouts count as equal


def flags_of(layout: str, asleep: bool = False) -> list[str]:
    chunks, microbatches = map(int, layout.split("x"))
    virtual = ["--num-virtual-stages-per-pipeline-rank", str(chunks)] if chunks > 1 else []
    batch = ["--pp", "2", *virtual, "--global-batch-size", str(microbatches)]
    return [*MODEL.split(), *(ASLEEP if asleep else ()), *batch]


def main(argv: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, metavar="CHUNKSxMICROBATCHES")
    parser.add_argument("--profile", type=Path, help="a calibrated profile; default: calibrate now")
    parser.add_argument("--asleep", action="store_true", help="let layers sleep instead of compute")
    parser.add_argument("--steps", type=int, default=5, help="steps to time, after 2 others")
    parser.add_argument("--seconds", type=float, default=20.0, help="time to calibrate")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    out = options.json
    vars(options).update(nproc=2, warmup=2, json=None, memory_gib=None)  # as measure() has them
    if options.asleep:
        profile = asleep_profile()
    elif options.profile is not None:
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


def asleep_profile() -> Any:
    arrangement = arrange(cli.parse(flags_of("1x2", asleep=True), {}), 2, VOCABULARY)
    nothing = (0.0, 0.0, 0.0)
    blocks = {"layer": (*LAYER_S, 0.0), "embedding": nothing, "head": nothing, "update": nothing}
    return dataclasses.replace(default_profile("cpu"), shape=shape_of(arrangement), blocks=blocks)


def lasting(call: Callable[..., Any], seconds: dict[int, float]) -> Callable[..., Any]:
    """`call` of a stage's forward or backward, which then sleeps as long as the stage is to take."""

    def lasts(flight: Any, key: tuple[int, int], *args: Any) -> Any:
        result = call(flight, key, *args)
        time.sleep(seconds[key[0]])
        return result

    return lasts


def asleep_rank(ranks: Any, task: dict[str, Any]) -> None:
    """One rank of a real run, whose layers sleep; writes the times of its steps."""
    with process_group(ranks, device="cpu", startup_timeout=datetime.timedelta(minutes=5)) as device:
        arrangement = arrange(cli.parse(task["flags"], {}), ranks.world, VOCABULARY)
        run = build_run(arrangement.config, ranks, device, arrangement=arrangement)
        pipeline: Any = run.pipeline
        layers = {stage: arrangement.counts[stage] for stage in pipeline.place.stages(ranks.rank)}
        for name, seconds in zip(("_forward", "_backward"), LAYER_S, strict=True):
            lasts = {stage: n * seconds for stage, n in layers.items()}
            setattr(pipeline, name, lasting(getattr(pipeline, name), lasts))
        write(task, ranks.rank, steps=time_steps(lambda: train_step(run), device, 2, task["steps"]))
        run.close()


def _asleep(flags: list[str], options: argparse.Namespace) -> float:
    """Seconds of the median step, of the slower rank."""
    from tools.bench import plan_accuracy  # by its own name, so that other processes can import what they run

    with tempfile.TemporaryDirectory(prefix="asleep-") as folder:
        task = {"flags": flags, "steps": options.steps, "folder": folder}
        if code := start_local(2, plan_accuracy.asleep_rank, (task,)):
            raise SystemExit(f"plan_accuracy.py: a rank ended with exit code {code}")
        each = [read_json(path)["steps"] for path in sorted(Path(folder).glob("rank*.json"))]
    return statistics.median(map(max, zip(*each, strict=True)))


def _row(layout: str, options: argparse.Namespace, profile: Any) -> dict[str, Any]:
    flags = flags_of(layout, options.asleep)
    arrangement = arrange(cli.parse(flags, {}), 2, VOCABULARY)
    predicted = step_time(arrangement, cluster("cpu", 2), profile)
    tokens = arrangement.batch_sizes.final * arrangement.config.model.seq_length
    row = {"layout": layout, "tokens": tokens, "predicted_s": predicted.seconds, "predicted_parts": predicted.parts}
    if options.asleep:
        return row | {"measured_s": _asleep(flags, options)}
    measured = measure("megalite", {}, options, flags)
    if "error" in measured:
        raise SystemExit(f"plan_accuracy.py: {layout}: {measured['stderr']}")
    return row | {"measured_s": measured["step_s"], "parts": measured["parts"]}


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
