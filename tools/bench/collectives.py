"""Time collectives over the groups of a mesh, for tools/check_cluster.py and tools/benchmark_comm.py.

Algorithm bandwidth is bytes / time, where the bytes are those of the full tensor. Bus bandwidth is what one link
carries. It does not depend on the number of ranks n, so it can be compared with the hardware's bandwidth. It is the
algorithm bandwidth times

    all_reduce 2 (n - 1) / n      all_gather, reduce_scatter, all_to_all (n - 1) / n      broadcast 1      message 2

(doc/PERFORMANCE.md of github.com/NVIDIA/nccl-tests). In `message`, every rank sends to the next rank of a ring and
receives from the previous one, one after the other like the stages of a pipeline; one direction takes half of the time.
"""

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from megalite.common.console import print_err
from megalite.launch.local_launcher import launch_local
from megalite.launch.process_group import set_cuda_environment
from megalite.launch.rank_info import LaunchError, RankInfo, nproc_error, read_environment
from tools.bench.systems import time_steps

# bus bandwidth / algorithm bandwidth, by the number of ranks
FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "message": lambda n: 2,
}
WARMUP_CALLS = 2
Row = dict[str, Any]


def bandwidths(kind: str, size: int, ranks: int, seconds: float) -> tuple[float, float]:
    """Return the algorithm and the bus bandwidth in GB/s (10^9 bytes) for `size` bytes over `ranks` ranks.

    >>> bandwidths("all_reduce", 8_000_000, 4, 0.002)
    (4.0, 6.0)
    >>> bandwidths("all_gather", 8_000_000, 4, 0.002)
    (4.0, 3.0)
    """
    rate = size / seconds / 1e9
    return rate, rate * FACTORS[kind](ranks)


def time_groups(axis: Any, kind: str, size: int, mesh: Any, times: int, alone: bool = False) -> Row:
    """Time one kind of collective on all groups of an axis at once, as in a run. Collective over the world.

    Args:
        axis: an axis of the mesh with more than one rank.
        kind: a key of FACTORS.
        size: bytes of the full tensor.
        mesh: the mesh of all ranks.
        times: the number of calls, whose median counts.
        alone: time only the group of rank 0.

    Returns:
        A row with the arguments and

        us, gb_s, median    time, algorithm and bus bandwidth of the median rank
        least, slowest      bus bandwidth of the slowest rank, and the number of this rank
    """
    takes_part = not alone or 0 in axis.ranks
    call = collective_fn(kind, axis, size, mesh.device)
    gather_values(0.0, mesh)  # a barrier: no rank starts while others still measure the previous collective
    own_seconds = time_call(call, mesh.device, times) if takes_part else 0.0
    all_seconds = gather_values(own_seconds, mesh)
    seconds_by_rank = {rank: seconds for rank, seconds in enumerate(all_seconds) if seconds > 0}
    median_seconds = statistics.median(seconds_by_rank.values())
    slowest = max(seconds_by_rank, key=seconds_by_rank.__getitem__)
    algorithm_rate, bus_rate = bandwidths(kind, size, axis.size, median_seconds)
    _, slowest_bus_rate = bandwidths(kind, size, axis.size, seconds_by_rank[slowest])
    return {
        "axis": axis.name,
        "size": axis.size,
        "kind": kind,
        "bytes": size,
        "us": 1e6 * median_seconds,
        "gb_s": algorithm_rate,
        "median": bus_rate,
        "least": slowest_bus_rate,
        "slowest": slowest,
    }


def collective_fn(kind: str, axis: Any, size: int, device: Any) -> Callable[[], Any]:
    """Return a function that runs one collective on `size` bytes of fp32, by the code that a training step uses."""
    import torch
    import torch.distributed as dist

    from megalite.parallel import comm
    from megalite.parallel.self_test import ring_shift

    shard = torch.zeros(max(1, size // 4 // axis.size), device=device)
    full = torch.zeros(len(shard) * axis.size, device=device)
    output = torch.empty_like(full)
    return {
        "all_reduce": lambda: comm.all_reduce_(full, axis),
        "all_gather": lambda: comm.start_all_gather_into(full, shard, axis).wait(),
        "reduce_scatter": lambda: comm.start_reduce_scatter_into(shard, full, axis).wait(),
        "all_to_all": lambda: dist.all_to_all_single(output, full, group=axis.group),
        "broadcast": lambda: comm.broadcast_(full, axis),
        "message": lambda: ring_shift(axis, full, 1),
    }[kind]


def time_call(call: Callable[[], Any], device: Any, times: int) -> float:
    """Return the median seconds of `times` calls, each including the wait for the device."""
    return statistics.median(time_steps(call, device, WARMUP_CALLS, times))


def gather_values(value: float, mesh: Any) -> list[float]:
    """Return the values of all ranks, in their order. Collective over the world."""
    import torch

    from megalite.parallel.comm import all_reduce_

    table = torch.zeros(mesh.world.size, dtype=torch.float64, device=mesh.device)
    table[mesh.world.rank] = value
    return all_reduce_(table, mesh.world).tolist()


def distinct_axes(mesh: Any) -> list[Any]:
    """Return the axes of a layout that have several ranks, but only one of those with the same set of ranks."""
    axes = []
    for axis in map(mesh.axis, ("tp", "cp", "dp", "pp", "dp_cp", "world")):
        if axis.size > 1 and all(axis.ranks != other.ranks for other in axes):
            axes.append(axis)
    return axes


def fit_link(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Fit the latency in s and the rate in bytes/s of a link on which n bytes take latency + n / rate.

    The fit minimizes the squares of relative errors, so that small messages count as much as large ones. Both results
    are positive.

    Args:
        points: measured (bytes, seconds).

    >>> latency, rate = fit_link([(n, 1e-5 + n / 2e9) for n in (1024, 65536, 1 << 24)])
    >>> round(latency * 1e6, 6), round(rate / 1e9, 6)
    (10.0, 2.0)
    """
    known = list(points)
    sizes, times = np.array(known).T
    seconds_per_byte, latency = 0.0, 0.0
    if np.ptp(sizes):
        seconds_per_byte, latency = np.polyfit(sizes, times, 1, w=1 / times).tolist()
    if min(latency, seconds_per_byte) <= 0:  # one size, or too much noise: take the smallest and the largest message
        _, latency = min(known)
        size, seconds = max(known)
        return latency, size / seconds
    return latency, 1 / seconds_per_byte


def run_on_ranks(
    program: str,
    work: Callable[[RankInfo, Namespace], int],
    args: Namespace,
    tp: int,
    problem: Callable[[int, Namespace], str] = lambda world, args: "",
) -> int:
    """Run `work` on the ranks of the launcher, or without one on --nproc local ranks, and return the exit code.

    Args:
        program: the name of the program, for its messages.
        work: the function of each rank.
        args: the program's options, with `nproc` and `device`.
        tp: the tensor-parallel size, on which CUDA variables depend.
        problem: returns the reason why that many ranks cannot do the work, or an empty string.
    """
    nproc = args.nproc or 1
    try:
        ranks = read_environment()
    except LaunchError as error:
        print_err(f"{program}: {error}")
        return 3
    text = nproc_error(ranks, args.nproc) or problem(nproc if ranks is None else ranks.world_size, args)
    if text:
        print_err(f"{program}: {text}")
        return 2
    if args.device != "cpu":
        set_cuda_environment(tp, Path("."))
    if ranks is None and nproc > 1:
        return launch_local(nproc, _run_rank, (work, args))
    return work(ranks or RankInfo(), args)


def _run_rank(ranks: RankInfo, work: Callable[[RankInfo, Namespace], int], args: Namespace) -> int:
    return work(ranks, args)
