#!/usr/bin/env python
"""Measure collectives over every group of a layout by size, and the latency and bandwidth of each kind of link.

    python tools/benchmark_comm.py --nproc 2                                       local ranks in one group
    python tools/benchmark_comm.py --nproc 4 --tensor-model-parallel-size 2 --alone --json links.json
    torchrun --nproc_per_node 8 tools/benchmark_comm.py --tensor-model-parallel-size 8 --max-bytes 268435456

The groups are those of training. All groups of an axis run at the same time, as they do in training. With --alone, the
first group is measured again while the others wait, which shows how much groups slow each other down. Bytes are those
of the full tensor, GB/s are 10^9 of these bytes per second, and bus GB/s is the load of one link, as in nccl-tests
(tools/bench/collectives.py). On CPU, local ranks exchange gathers and scatters through shared memory, as in training,
and the rest over gloo.

A message of n bytes takes latency + n / bandwidth. Both are fitted to messages of all sizes, for groups inside a
machine and for groups between machines. --json has them, and the lines that are printed last can be used in the TOML
file of tools/plan.py --cluster. --csv writes a line per measurement.
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
HEADER = "group  ranks at once      collective        bytes          us      GB/s  bus GB/s   slowest"
Results = dict[str, Any]


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
    """Run the program and return its exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    problems = []
    if min(args.times, *sizes) < 1:
        problems.append("times and sizes of axes are at least 1")
    if args.factor < 2:
        problems.append(f"factor={args.factor} is below 2; sizes must grow")
    if args.min_bytes < 4:
        problems.append(f"min_bytes={args.min_bytes} is below 4, one number")
    if args.max_bytes < args.min_bytes:
        problems.append(f"max_bytes={args.max_bytes} is below min_bytes={args.min_bytes}; raise it")
    if not 0 < args.timeout_s < 1e6:
        problems.append(f"timeout_s={args.timeout_s:g} is not a time; give seconds above 0")
    problems += find_unwritable(json=args.json, csv=args.csv)
    if problems:
        parser.error("; ".join(problems))
    return run_on_ranks("benchmark_comm.py", run_benchmark, args, args.tensor_model_parallel_size, check_args)


def check_args(world_size: int, args: argparse.Namespace) -> str:
    """Return a message if this number of ranks cannot be measured, or an empty string."""
    from megalite.parallel.mesh import abstract_mesh
    from megalite.training.job.preflight import choose_device
    from megalite.training.setup import SetupError

    if world_size == 1:
        return "one rank has nobody to exchange with; give --nproc 2 or more"
    try:
        abstract_mesh(world_size, 0, **mesh_sizes(args))
        choose_device(args.device)
    except ValueError as error:
        return f"{error}; give another --nproc or layout"
    except SetupError as error:
        return str(error)
    return ""


def mesh_sizes(args: argparse.Namespace) -> "MeshSizes":
    """Return the sizes of the axes."""
    return {
        "tp": args.tensor_model_parallel_size,
        "pp": args.pipeline_model_parallel_size,
        "cp": args.context_parallel_size,
    }


def run_benchmark(ranks: RankInfo, args: argparse.Namespace) -> int:
    """Measure, report the results on rank 0, and return the exit code, which is the same on all ranks."""
    from megalite.parallel.mesh import build_mesh
    from megalite.training.job.preflight import choose_device

    limit = datetime.timedelta(seconds=args.timeout_s)
    try:
        with process_group(ranks, device=choose_device(args.device), startup_timeout=limit) as device:
            results = measure_all(build_mesh(**mesh_sizes(args), device=device, timeout=limit), args)
    except LaunchError as error:
        print_err(f"benchmark_comm.py: {error}")
        return 3
    if ranks.rank == 0:
        report(results, args)
    return 0


def measure_all(mesh: Any, args: argparse.Namespace) -> Results:
    """Measure all axes, kinds and sizes. Collective over the world.

    Rank 0 writes --json after each row, so that an interrupted run keeps its rows.
    """
    from megalite.parallel.comm import all_gather_strings

    kinds: list[str] = args.kinds
    sizes: list[int] = [args.min_bytes]
    while sizes[-1] * args.factor <= args.max_bytes:
        sizes.append(sizes[-1] * args.factor)
    hosts = all_gather_strings(socket.gethostname(), mesh.world, mesh.device)
    rows: list[dict[str, Any]] = []
    results: Results = {
        "ranks": mesh.world.size,
        "device": mesh.device.type,
        "hosts": hosts,
        "rows": rows,
        "complete": False,
    }
    if mesh.world.is_first:
        print(HEADER)
    axes = distinct_axes(mesh)
    for axis in axes:
        modes = ("all", "one") if args.alone and axis.size < mesh.world.size else ("all",)
        for groups, kind, size in itertools.product(modes, kinds, sizes):
            times = time_groups(axis, kind, size, mesh, args.times, alone=groups == "one")
            rows.append({"groups": groups, **times})
            if mesh.world.is_first:
                print(format_row(rows[-1]), flush=True)
                if args.json is not None:
                    write_json(args.json, results)
    is_inside = {axis.name: len({hosts[rank] for rank in axis.ranks}) == 1 for axis in axes}
    return {**results, "links": fit_links(rows, is_inside), "complete": True}


def fit_links(rows: list[dict[str, Any]], is_inside: dict[str, bool]) -> Results:
    """Fit links to the times of messages, with all groups of an axis at once.

    Returns the link of each axis as `axes`, the slowest one inside a machine as `inside`, and the slowest one between
    machines as `between`. They are those of one rank in one direction.

    Args:
        rows: the measurements.
        is_inside: axis -> True if the ranks of each of its groups are on one machine.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["kind"] == "message" and row["groups"] == "all":
            one_way_s = row["us"] / 1e6 / FACTORS["message"](row["size"])
            points.setdefault(row["axis"], []).append((row["bytes"], one_way_s))
    axes = {}
    for axis, axis_points in points.items():
        latency_s, bytes_per_s = fit_link(axis_points)
        axes[axis] = {"latency_s": latency_s, "bytes_per_s": bytes_per_s}
    links: Results = {"axes": axes}
    # in training, all ranks together only exchange a few values per step, so the world counts only as the sole group
    candidates = {axis: link for axis, link in axes.items() if axis != "world" or len(axes) == 1}
    for name, inside in (("inside", True), ("between", False)):
        matching = [link for axis, link in candidates.items() if is_inside[axis] is inside]
        if matching:
            links[name] = min(matching, key=lambda link: link["bytes_per_s"])
    return links


def format_row(row: dict[str, Any]) -> str:
    """Return a row of the printed table."""
    name = f"{row['axis']:6} {row['size']:5d} {row['groups']:>7} {row['kind']:>15}"
    bandwidths = f"{row['gb_s']:9.3g} {row['median']:9.3g} {row['least']:9.3g}"
    return f"{name} {row['bytes']:12,} {row['us']:11,.1f} {bandwidths}"


def report(results: Results, args: argparse.Namespace) -> None:
    """Print the links, and write the files of --json and --csv."""
    for name in ("inside", "between"):
        if link := results["links"].get(name):
            bandwidth = link["bytes_per_s"] / 1e9
            latency_us = link["latency_s"] * 1e6
            print(f"[{name}]\ngb_per_s = {bandwidth:.4g}\nlatency_us = {latency_us:.4g}", flush=True)
    if args.json is not None:
        write_json(args.json, results)
    if args.csv is not None:
        with open(args.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(results["rows"])


if __name__ == "__main__":
    from tools import benchmark_comm  # under its own name, so that other processes can import what they run

    exit_process(lambda: benchmark_comm.main(sys.argv[1:]))
