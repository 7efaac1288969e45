#!/usr/bin/env python
"""Collectives over every group of a layout, by size: time, bandwidth, and the latency and rate of each kind of link.

    python tools/benchmark_comm.py --nproc 2                                       local ranks, one group of all
    python tools/benchmark_comm.py --nproc 4 --tensor-model-parallel-size 2 --alone --json links.json
    torchrun --nproc_per_node 8 tools/benchmark_comm.py --tensor-model-parallel-size 8 --max-bytes 268435456

Groups are those that training has, and all groups of an axis work at the same time as they do there; with --alone once
more only the first one does, so that what they take from each other shows. Bytes are those of the whole tensor, GB/s
10^9 bytes of it, bus GB/s what one link carries, as nccl-tests counts (tools/bench/collectives.py). On CPU, ranks of a
machine exchange gathers and scatters through shared memory, as training does, and the rest over gloo.

Links: the latency and the rate that a message of n bytes takes latency + n / rate by, fitted to messages of all
sizes, of the groups inside a machine and of those between machines; --json has them, and the lines that
are printed last are those of a cluster's TOML file, which tools/plan.py --cluster reads. --csv: a line each.
"""

import argparse
import csv
import datetime
import itertools
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.console import print_err
from megalite.launch.process_group import exit_process, process_group
from megalite.launch.rank_info import LaunchError, RankInfo
from tools.bench.collectives import FACTORS, distinct_axes, fit_link, run_on_ranks, time_groups
from tools.cli_common import find_unwritable, make_parser, positive_int, write_json

if TYPE_CHECKING:
    from megalite.parallel.mesh import MeshSizes

COLUMNS = ("axis", "size", "groups", "kind", "bytes", "us", "gb_s", "median", "least", "slowest")
HEAD = "group  ranks at once      collective        bytes          us      GB/s  bus GB/s   slowest"
Found = dict[str, Any]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__, allow_abbrev=True)
    parser.add_argument("--nproc", type=positive_int, help="local ranks to start, without a launcher")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--min-bytes", type=int, default=1024)
    parser.add_argument("--max-bytes", type=int, default=67_108_864)
    parser.add_argument("--factor", type=int, default=4, help="ratio of one size to the one before")
    parser.add_argument("--kinds", nargs="+", choices=[*FACTORS], default=[*FACTORS])
    parser.add_argument("--times", type=int, default=10, help="repetitions of each; the median is reported")
    parser.add_argument("--alone", action="store_true", help="also time the first group of each axis alone")
    parser.add_argument(
        "--timeout-s", type=float, default=300.0, help="limit in seconds for the start and for each collective"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    return parser


def main(argv: list[str]) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    rules = (
        (min(args.times, *sizes) < 1, "times and sizes of axes are at least 1"),
        (args.factor < 2, f"factor={args.factor} is below 2; sizes must grow"),
        (args.min_bytes < 4, f"min_bytes={args.min_bytes} is below 4, one number"),
        (args.max_bytes < args.min_bytes, f"max_bytes={args.max_bytes} is below min_bytes={args.min_bytes}; raise it"),
        (not 0 < args.timeout_s < 1e6, f"timeout_s={args.timeout_s:g} is not a time; give seconds above 0"),
    )
    wrong = [*(text for is_wrong, text in rules if is_wrong), *find_unwritable(json=args.json, csv=args.csv)]
    if wrong:
        parser.error("; ".join(wrong))
    return run_on_ranks("benchmark_comm.py", bench, args, args.tensor_model_parallel_size, problem)


def problem(world: int, args: argparse.Namespace) -> str:
    """Why these ranks cannot be measured so; empty where they can."""
    from megalite.parallel.mesh import abstract_mesh
    from megalite.training.job.preflight import choose_device
    from megalite.training.setup import SetupError

    if world == 1:
        return "one rank has nobody to exchange with; give --nproc 2 or more"
    try:
        abstract_mesh(world, 0, **shape_of(args))
        choose_device(args.device)
    except ValueError as error:
        return f"{error}; give another --nproc or layout"
    except SetupError as error:
        return str(error)
    return ""


def shape_of(args: argparse.Namespace) -> "MeshSizes":
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    return {"tp": tp, "pp": pp, "cp": cp}


def bench(ranks: RankInfo, args: argparse.Namespace) -> int:
    """The exit code, the same on all ranks."""
    from megalite.parallel.mesh import build_mesh
    from megalite.training.job.preflight import choose_device

    limit = datetime.timedelta(seconds=args.timeout_s)
    try:
        with process_group(ranks, device=choose_device(args.device), startup_timeout=limit) as device:
            measured = measure(build_mesh(**shape_of(args), device=device, timeout=limit), args)
    except LaunchError as error:
        print_err(f"benchmark_comm.py: {error}")
        return 3
    if ranks.rank == 0:
        tell(measured, args)
    return 0


def measure(mesh: Any, args: argparse.Namespace) -> Found:
    """Measure all axes, kinds and sizes, on all ranks together. Rank 0 writes --json after each row, so that a run that
    is cut off leaves its rows."""
    from megalite.parallel.comm import all_gather_strings

    kinds: list[str] = args.kinds
    sizes: list[int] = [args.min_bytes]  # the last one --max-bytes or just below
    while sizes[-1] * args.factor <= args.max_bytes:
        sizes.append(sizes[-1] * args.factor)
    hosts = all_gather_strings(socket.gethostname(), mesh.world, mesh.device)
    measured: Found = dict(ranks=mesh.world.size, device=mesh.device.type, hosts=hosts, rows=[], complete=False)
    if mesh.world.is_first:
        print(HEAD)
    for axis in distinct_axes(mesh):
        ways = ("all", "one") if args.alone and axis.size < mesh.world.size else ("all",)
        for groups, kind, size in itertools.product(ways, kinds, sizes):
            row = time_groups(axis, kind, size, mesh, args.times, alone=groups == "one")
            measured["rows"].append({"groups": groups, **row})
            if mesh.world.is_first:
                print(line_of(measured["rows"][-1]), flush=True)
                if args.json is not None:
                    write_json(args.json, measured)
    inside = {axis.name: len({hosts[rank] for rank in axis.ranks}) == 1 for axis in distinct_axes(mesh)}
    return measured | {"links": links_of(measured["rows"], inside), "complete": True}


def links_of(rows: list[dict[str, Any]], inside: dict[str, bool]) -> Found:
    """Fitted to messages: `axes` by name, of these the slowest `inside` a machine and `between` machines; of one rank
    in one direction, all groups of an axis at once, as in training.

    inside: axis -> whether its ranks are on one machine.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["kind"] == "message" and row["groups"] == "all":
            one_way = row["us"] / 1e6 / FACTORS["message"](row["size"])
            points.setdefault(row["axis"], []).append((row["bytes"], one_way))
    axes = {axis: dict(zip(("latency_s", "bytes_per_s"), fit_link(some), strict=True)) for axis, some in points.items()}
    links: Found = {"axes": axes}
    for where, wanted in (("inside", True), ("between", False)):
        # of the world only where it is a group of the layout: all ranks exchange nothing but the step's agreement
        several = {axis: link for axis, link in axes.items() if axis != "world" or len(axes) < 2}
        if some := [link for axis, link in several.items() if inside[axis] is wanted]:
            links[where] = min(some, key=lambda link: link["bytes_per_s"])
    return links


def line_of(row: dict[str, Any]) -> str:
    """A row of the table on the terminal."""
    who = f"{row['axis']:6} {row['size']:5d} {row['groups']:>7} {row['kind']:>15}"
    rates = "".join(f" {row[name]:9.3g}" for name in ("gb_s", "median", "least"))
    return f"{who} {row['bytes']:12,} {row['us']:11,.1f}{rates}"


def tell(measured: Found, args: argparse.Namespace) -> None:
    """The links on the terminal, and the files."""
    for name in ("inside", "between"):
        if link := measured["links"].get(name):
            rate, delay = link["bytes_per_s"] / 1e9, link["latency_s"] * 1e6
            print(f"[{name}]\ngb_per_s = {rate:.4g}\nlatency_us = {delay:.4g}", flush=True)
    if args.json is not None:
        write_json(args.json, measured)
    if args.csv is not None:
        with open(args.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(measured["rows"])


if __name__ == "__main__":
    from tools import benchmark_comm  # by its own name, so that other processes can import what they run

    exit_process(lambda: benchmark_comm.main(sys.argv[1:]))
