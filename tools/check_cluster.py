#!/usr/bin/env python
"""Check ranks, nodes and links before a run uses them: versions, and values and bandwidth of every collective.

    torchrun --nnodes 16 --nproc-per-node 8 ... tools/check_cluster.py --tensor-parallel 8
    srun python tools/check_cluster.py                        the same under SLURM
    python tools/check_cluster.py --nproc 4                   starts local ranks

Bus bandwidth is the load of one link, so it does not depend on the number of ranks (tools/bench/collectives.py has the
factors). tools/benchmark_comm.py measures more sizes and kinds of collectives, as input for planning. A collective is
as fast as its slowest link. To find that link, neighboring ranks exchange messages in pairs: all even pairs at once,
then all odd ones.

Exit codes: 0 fine, 1 wrong values or a slow link, 3 the rendezvous failed or the ranks do not match.
"""

import argparse
import datetime
import functools
import json
import socket
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.console import print_err
from megalite.launch.process_group import exit_process, process_group
from megalite.launch.rank_info import LaunchError, RankInfo
from tools.bench.collectives import gather_values, run_on_ranks, time_call, time_groups
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
    """Run the program and return its exit code."""
    args = build_parser().parse_args(argv)
    return run_on_ranks("check_cluster.py", check, args, args.tensor_parallel)


def check(ranks: RankInfo, args: argparse.Namespace) -> int:
    """Check the ranks, report the results on rank 0, and return the exit code, which is the same on all ranks."""
    from megalite.parallel.mesh import build_mesh, world_axis
    from megalite.parallel.self_test import check_collectives
    from megalite.training.job.preflight import choose_device
    from megalite.training.monitoring.rank_consistency import compare_facts, machine_facts
    from megalite.training.setup import SetupError

    limit = datetime.timedelta(seconds=args.timeout_s)
    results: dict[str, Any] = {"ranks": ranks.world_size, "hosts": [socket.gethostname()], "warnings": [], "rows": []}
    code = 0
    try:
        with process_group(ranks, device=choose_device(args.device), startup_timeout=limit) as device:
            if ranks.world_size > 1:
                results["hosts"], results["warnings"] = compare_facts(machine_facts(device), world_axis(), device)
                try:
                    mesh = build_mesh(
                        tp=args.tensor_parallel,
                        pp=args.pipeline_parallel,
                        device=device,
                        timeout=limit,
                        shared_memory=False,
                    )
                except ValueError as error:
                    raise LaunchError(str(error)) from None
                try:
                    check_collectives(mesh)
                except LaunchError as error:
                    results["wrong"] = str(error)
                else:  # the bandwidth of wrong results does not matter
                    results |= measure(mesh, device, args)
            code = 1 if "wrong" in results or results.get("slow") else 0
    except (LaunchError, SetupError) as error:
        code = 3
        results["could not begin"] = str(error)
    if ranks.rank == 0 or (code == 3 and ranks.local_rank == 0):
        report(results, code, args)
    return code


def measure(mesh: Any, device: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return the bandwidths of all groups and pairs, and messages about slow ones. Collective over the world."""
    sizes = args.sizes
    if not sizes:
        sizes = [1 << 10, 1 << 16, 1 << 22]
        if device.type != "cpu":
            sizes.append(1 << 28)
    rows = []
    for axis in (mesh.world, mesh.dp, mesh.tp, mesh.pp):
        if axis.size > 1 and (axis is mesh.world or axis.size < mesh.world.size):  # measure the same ranks once
            for size in sizes:
                rows += [time_groups(axis, kind, size, mesh, args.times) for kind in KINDS]
    pairs = neighbor_bandwidths(mesh, device, max(sizes), args.times)
    median = statistics.median(bandwidth for _, _, bandwidth in pairs)
    slow = []
    for a, b, bandwidth in pairs:
        if bandwidth < args.slow * median:
            slow.append(f"ranks {a} and {b}: {bandwidth:.3g} GB/s between them, the median pair has {median:.3g}")
    largest = [row for row in rows if row["kind"] == "all_reduce" and row["bytes"] == max(sizes)]
    for row in largest:
        if args.expect and row["least"] < args.expect:
            slowest = f"all_reduce over {row['axis']} with rank {row['slowest']}: {row['least']:.3g} GB/s"
            slow.append(f"{slowest}, not {args.expect:g}")
    results = {"rows": rows, "pairs": pairs, "slow": slow}
    if link := expected_bandwidth(device):
        best = max(row["median"] for row in rows if row["kind"] == "all_reduce")
        results["link"] = f"{link}; all_reduce reaches {best:.3g}"
    return results


def neighbor_bandwidths(mesh: Any, device: Any, size: int, times: int) -> list[tuple[int, int, float]]:
    """Return (rank, next rank, GB/s) of a message to the next rank and back, by the first rank's time."""
    import torch
    import torch.distributed as dist

    world = mesh.world
    bandwidths = []
    tensor = torch.zeros(max(1, size // 4), device=device)

    def exchange(partner: int) -> None:
        if world.rank < partner:
            dist.send(tensor, partner)
            dist.recv(tensor, partner)
        else:
            dist.recv(tensor, partner)
            dist.send(tensor, partner)

    for first in (0, 1) if world.size > 2 else (0,):
        partner = world.rank + 1 if world.rank % 2 == first else world.rank - 1
        seconds = 0.0
        if 0 <= partner < world.size:
            seconds = time_call(functools.partial(exchange, partner), device, times)
        seconds_by_rank = gather_values(seconds, mesh)
        for rank in range(first, world.size - 1, 2):
            bandwidths.append((rank, rank + 1, 2 * 4 * len(tensor) / seconds_by_rank[rank] / 1e9))
    return bandwidths


def expected_bandwidth(device: Any) -> str:
    """Return a text with the bandwidth in the data sheet of a GPU, or an empty one if the GPU is unknown."""
    import torch

    from megalite.planning.cluster import DEVICES

    if device.type != "cuda":
        return ""
    name = torch.cuda.get_device_name(device)
    for spec in DEVICES.values():
        if spec.device.vendor_name == name:
            bandwidth = spec.intra_node.nominal_bytes_per_s / 1e9
            return f"{name}: {bandwidth:g} GB/s in each direction inside a node, by its data sheet"
    return ""


def report(results: dict[str, Any], code: int, args: argparse.Namespace) -> None:
    """Print the results, and write the file of --json."""
    for line in results["warnings"]:
        print(f"WARNING: {line}")
    for key in ("could not begin", "wrong"):
        if key in results:
            print_err(f"check_cluster.py: {results[key]}")
    if results["rows"]:
        header = ("group", "ranks", "collective", "bytes", "us", "bus GB/s", "slowest", "rank")
        print("{:8} {:>5} {:>15} {:>12} {:>10} {:>9} {:>9} {:>5}".format(*header))
    for row in results["rows"]:
        print(
            f"{row['axis']:8} {row['size']:5d} {row['kind']:>15} {row['bytes']:12,} {row['us']:10.1f} "
            f"{row['median']:9.3g} {row['least']:9.3g} {row['slowest']:5d}"
        )
    if results.get("pairs"):
        hosts = results["hosts"]
        a, b, bandwidth = min(results["pairs"], key=lambda pair: pair[2])
        print(f"slowest pair: ranks {a} ({hosts[a]}) and {b} ({hosts[b]}), {bandwidth:.3g} GB/s")
    if "link" in results:
        print(results["link"])
    for line in results.get("slow", ()):
        print(f"SLOW: {line}")
    print({0: "fine", 1: "not fit for a run", 3: "could not begin"}[code], flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({**results, "exit": code}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from tools import check_cluster  # under its own name, so that other processes can import what they run

    exit_process(lambda: check_cluster.main(sys.argv[1:]))
