"""Times of collectives over the groups of a mesh: what tools/check_cluster.py and tools/benchmark_comm.py measure.

Algorithm bandwidth is bytes / time, where bytes are those of the whole tensor. Bus bandwidth is what one link must
carry whatever the number of ranks n, so that it can be held against the hardware's: algorithm bandwidth times

    all_reduce 2 (n - 1) / n      all_gather, reduce_scatter, all_to_all (n - 1) / n      broadcast 1      message 2

(doc/PERFORMANCE.md of github.com/NVIDIA/nccl-tests). message: every rank sends to the next of the ring and gets from
the one before, one after the other as stages of a pipeline do: one direction takes half of its time.
"""

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from megalite.common.console import print_err
from megalite.launch.local_launcher import launch_local
from megalite.launch.rank_info import LaunchError, RankInfo, nproc_error, read_environment, set_cuda_environment
from tools.bench.systems import time_steps

FACTORS: dict[str, Callable[[int], float]] = {"all_reduce": lambda n: 2 * (n - 1) / n}
FACTORS |= dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), lambda n: (n - 1) / n)
FACTORS |= {"broadcast": lambda n: 1, "message": lambda n: 2}
WARM_UP = 2
Row = dict[str, Any]


def bandwidths(kind: str, size: int, ranks: int, seconds: float) -> tuple[float, float]:
    """The algorithm's and the bus's bandwidth in GB/s (10^9 bytes) for `size` bytes over `ranks` ranks.

    >>> bandwidths("all_reduce", 8_000_000, 4, 0.002)
    (4.0, 6.0)
    >>> bandwidths("all_gather", 8_000_000, 4, 0.002)
    (4.0, 3.0)
    """
    rate = size / seconds / 1e9
    return rate, rate * FACTORS[kind](ranks)


def over_groups(axis: Any, kind: str, size: int, mesh: Any, times: int, alone: bool = False) -> Row:
    """All groups of an axis at once, as in a run, or only that of rank 0; collective over the world.

    us, gb_s, median    time, algorithm and bus bandwidth of the median rank
    least, slowest      bus bandwidth of the slowest rank, and which one that is
    """
    works = not alone or 0 in axis.ranks
    call = call_of(kind, axis, size, mesh.device)
    everywhere(0.0, mesh)  # nobody begins while others still measure what was before
    mine = timed(call, mesh.device, times) if works else 0.0
    everyone = everywhere(mine, mesh)
    took = {rank: seconds for rank, seconds in enumerate(everyone) if seconds > 0}
    seconds = statistics.median(took.values())
    slowest = max(took, key=lambda rank: took[rank])
    rate, bus = bandwidths(kind, size, axis.size, seconds)
    least = bandwidths(kind, size, axis.size, took[slowest])[1]
    what = dict(axis=axis.name, size=axis.size, kind=kind, bytes=size, us=1e6 * seconds)
    return dict(**what, gb_s=rate, median=bus, least=least, slowest=slowest)


def call_of(kind: str, axis: Any, size: int, device: Any) -> Callable[[], Any]:
    """A function that runs one collective on `size` bytes of fp32, with the code that a training step uses."""
    import torch
    import torch.distributed as dist

    from megalite.parallel import comm
    from megalite.parallel.self_test import ring_shift

    part = torch.zeros(max(1, size // 4 // axis.size), device=device)
    whole = torch.zeros(len(part) * axis.size, device=device)
    other = torch.empty_like(whole)
    return {
        "all_reduce": lambda: comm.all_reduce_(whole, axis),
        "all_gather": lambda: comm.start_all_gather_into(whole, part, axis).wait(),
        "reduce_scatter": lambda: comm.start_reduce_scatter_into(part, whole, axis).wait(),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=axis.group),
        "broadcast": lambda: comm.broadcast_(whole, axis),
        "message": lambda: ring_shift(axis, whole, 1),
    }[kind]


def timed(call: Callable[[], Any], device: Any, times: int) -> float:
    """Seconds of one call: the median of `times`, each with a wait for the device."""
    return statistics.median(time_steps(call, device, WARM_UP, times))


def everywhere(value: float, mesh: Any) -> list[float]:
    """`value` of every rank, by rank."""
    import torch

    from megalite.parallel.comm import all_reduce_

    table = torch.zeros(mesh.world.size, dtype=torch.float64, device=mesh.device)
    table[mesh.world.rank] = value
    return all_reduce_(table, mesh.world).tolist()


def axes_of(mesh: Any) -> list[Any]:
    """Those of a layout that have several ranks, each set of ranks once; the world only where no axis is it."""
    names, axes = ("tp", "cp", "dp", "pp", "dp_cp", "world"), []
    for axis in map(mesh.axis, names):
        if axis.size > 1 and all(axis.ranks != other.ranks for other in axes):
            axes.append(axis)
    return axes


def fit(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Latency in s and bytes/s of a link on which n bytes take latency + n / rate: least squares of the relative
    errors over (bytes, seconds), so that small messages count as much as large ones. Both are positive.

    >>> latency, rate = fit([(n, 1e-5 + n / 2e9) for n in (1024, 65536, 1 << 24)])
    >>> round(latency * 1e6, 6), round(rate / 1e9, 6)
    (10.0, 2.0)
    """
    known = list(points)
    sizes, took = np.array(known).T
    each, latency = np.polyfit(sizes, took, 1, w=1 / took).tolist() if np.ptp(sizes) else (0.0, 0.0)
    if min(latency, each) <= 0:  # noise above the slope, or one size: the smallest and the largest message tell
        (_, latency), (n, seconds) = min(known), max(known)
        return latency, n / seconds
    return latency, 1 / each


def on_ranks(
    program: str,
    work: Callable[[RankInfo, Namespace], int],
    args: Namespace,
    tp: int,
    problem: Callable[[int, Namespace], str] = lambda world, args: "",
) -> int:
    """The exit code of `work` on the ranks that a launcher has started, or else on --nproc local ones. `problem` says
    why that many ranks cannot do it."""
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
        return launch_local(nproc, _one_rank, (work, args))
    return work(ranks or RankInfo(), args)


def _one_rank(ranks: RankInfo, work: Callable[[RankInfo, Namespace], int], args: Namespace) -> int:
    return work(ranks, args)
