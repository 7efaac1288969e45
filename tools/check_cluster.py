#!/usr/bin/env python
"""Check ranks, nodes and links before a run is given to them: versions, values and bandwidth of every collective.

    torchrun --nnodes 16 --nproc-per-node 8 ... tools/check_cluster.py --tensor-parallel 8
    srun python tools/check_cluster.py                        the same, under SLURM
    python tools/check_cluster.py --nproc 4                   local ranks, started here

Bus bandwidth is what one link must carry whatever the number of ranks (tools/bench/collectives.py has the factors);
tools/benchmark_comm.py measures more sizes and kinds, to plan with.
A collective is as fast as its slowest link, so pairs of ranks tell which one it is: neighbours of the ring, all even
ones at once, then all odd ones.

Exit codes: 0 fine, 1 wrong values or a slow link, 3 the ranks could not meet or are not alike.
"""

import argparse
import datetime
import json
import socket
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.console import print_err
from megalite.launch.rank_info import LaunchError, RankInfo, exit_process, process_group
from tools.bench.collectives import everywhere, on_ranks, over_groups, timed
from tools.cli_common import make_parser, number_in_range, positive_int

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "message")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__, allow_abbrev=True)
    parser.add_argument("--nproc", type=positive_int, help="local ranks to start, without a launcher")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument(
        "--tensor-parallel", type=positive_int, default=1, help="check the groups of a run with this tp"
    )
    parser.add_argument("--pipeline-parallel", type=positive_int, default=1)
    parser.add_argument(
        "--sizes", type=positive_int, nargs="+", help="bytes; default: from 1 KiB to 256 MiB, on a CPU to 4 MiB"
    )
    parser.add_argument(
        "--times", type=positive_int, default=10, help="repetitions of each collective; the median is reported"
    )
    parser.add_argument(
        "--slow", type=float, default=0.5, help="a pair below this fraction of the median pair's rate is slow"
    )
    parser.add_argument("--expect", type=float, help="bus bandwidth in GB/s that all_reduce must reach in each group")
    parser.add_argument(
        "--timeout-s",
        type=number_in_range(float, "(0, 1e6]"),
        default=300.0,
        help="limit in seconds for the start and for each collective",
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    return on_ranks("check_cluster.py", check, args, args.tensor_parallel)


def check(ranks: RankInfo, args: argparse.Namespace) -> int:
    """The exit code, the same on all ranks."""
    from megalite.parallel.mesh import build_mesh, world_axis
    from megalite.parallel.self_test import check_collectives
    from megalite.training.job.preflight import choose_device
    from megalite.training.monitoring.rank_consistency import compare_facts, machine_facts
    from megalite.training.setup import SetupError

    limit = datetime.timedelta(seconds=args.timeout_s)
    report: dict[str, Any] = {"ranks": ranks.world_size, "hosts": [socket.gethostname()], "warnings": [], "rows": []}
    code = 0
    try:
        with process_group(ranks, device=choose_device(args.device), startup_timeout=limit) as here:
            if ranks.world_size > 1:
                report["hosts"], report["warnings"] = compare_facts(machine_facts(here), world_axis(), here)
                try:
                    shape = dict(tp=args.tensor_parallel, pp=args.pipeline_parallel)
                    mesh = build_mesh(**shape, device=here, timeout=limit, shared_memory=False)
                except ValueError as error:
                    raise LaunchError(str(error)) from None
                try:
                    check_collectives(mesh)
                except LaunchError as error:
                    report["wrong"] = str(error)
                if "wrong" not in report:  # how fast a wrong result comes is of no interest
                    report |= measure(mesh, here, args)
            code = 1 if "wrong" in report or report.get("slow") else 0
    except (LaunchError, SetupError) as error:
        code, report["could not begin"] = 3, str(error)
    if ranks.rank == 0 or (code == 3 and ranks.local_rank == 0):
        tell(report, code, args)
    return code


# ---- bandwidth


def measure(mesh: Any, device: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Rows and pairs of all ranks, and what is slow; collective."""
    sizes = args.sizes or [1 << n for n in ((10, 16, 22) if device.type == "cpu" else (10, 16, 22, 28))]
    rows = []
    for axis in (mesh.world, mesh.dp, mesh.tp, mesh.pp):
        if axis.size > 1 and (axis is mesh.world or axis.size < mesh.world.size):  # the same ranks once
            for size in sizes:
                rows += [over_groups(axis, kind, size, mesh, args.times) for kind in KINDS]
    of_pairs = pairs(mesh, device, max(sizes), args.times)
    link = expected(device)
    usual = statistics.median(rate for _, _, rate in of_pairs)
    about = "ranks {} and {}: {:.3g} GB/s between them, the median pair has {:.3g}"
    slow = [about.format(a, b, rate, usual) for a, b, rate in of_pairs if rate < args.slow * usual]
    for row in rows:
        if args.expect and row["kind"] == "all_reduce" and row["bytes"] == max(sizes) and row["least"] < args.expect:
            reached = f"all_reduce over {row['axis']} with rank {row['slowest']}: {row['least']:.3g} GB/s"
            slow.append(f"{reached}, not {args.expect:g}")
    found = {"rows": rows, "pairs": of_pairs, "slow": slow}
    best = max(row["median"] for row in rows if row["kind"] == "all_reduce")
    return found | ({"link": f"{link}; all_reduce reaches {best:.3g}"} if link else {})


def pairs(mesh: Any, device: Any, size: int, times: int) -> list[tuple[int, int, float]]:
    """(rank, rank, GB/s) of the ring's neighbours, there and back, by the time of the first of them."""
    import torch
    import torch.distributed as dist

    world, rates = mesh.world, []
    tensor = torch.zeros(max(1, size // 4), device=device)
    for first in (0, 1) if world.size > 2 else (0,):
        partner = world.rank + 1 if world.rank % 2 == first else world.rank - 1
        both = (dist.send, dist.recv) if world.rank < partner else (dist.recv, dist.send)
        there_and_back = lambda to=partner, both=both: [call(tensor, to) for call in both]  # noqa: E731
        alone = not 0 <= partner < world.size
        seconds = everywhere(0.0 if alone else timed(there_and_back, device, times), mesh)
        for rank in range(first, world.size - 1, 2):
            rates.append((rank, rank + 1, 2 * 4 * len(tensor) / seconds[rank] / 1e9))
    return rates


def expected(device: Any) -> str:
    """The rate of a card's link as its vendor states it, in words; empty where nothing is known."""
    import torch

    from megalite.planning.cluster import DEVICES

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    rates = [
        link.nominal_bytes_per_s / 1e9 for card, _, link, _ in DEVICES.values() if name and card.vendor_name == name
    ]
    return f"{name}: {rates[0]:g} GB/s in each direction inside a node, by its data sheet" if rates else ""


# ---- what people and programs read


def tell(found: dict[str, Any], code: int, args: argparse.Namespace) -> None:
    for line in found["warnings"]:
        print(f"WARNING: {line}")
    for key in ("could not begin", "wrong"):
        if key in found:
            print_err(f"check_cluster.py: {found[key]}")
    if found["rows"]:
        head = ("group", "ranks", "collective", "bytes", "us", "bus GB/s", "slowest", "rank")
        print("{:8} {:>5} {:>15} {:>12} {:>10} {:>9} {:>9} {:>5}".format(*head))
    for row in found["rows"]:
        print(
            f"{row['axis']:8} {row['size']:5d} {row['kind']:>15} {row['bytes']:12,} {row['us']:10.1f} "
            f"{row['median']:9.3g} {row['least']:9.3g} {row['slowest']:5d}"
        )
    if found.get("pairs"):
        a, b, rate = min(found["pairs"], key=lambda pair: pair[2])
        print(f"slowest pair: ranks {a} ({found['hosts'][a]}) and {b} ({found['hosts'][b]}), {rate:.3g} GB/s")
    if "link" in found:
        print(found["link"])
    for line in found.get("slow", ()):
        print(f"SLOW: {line}")
    print({0: "fine", 1: "not fit for a run", 3: "could not begin"}[code], flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({**found, "exit": code}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from tools import check_cluster  # by its own name, so that other processes can import what they run

    exit_process(lambda: check_cluster.main(sys.argv[1:]))
