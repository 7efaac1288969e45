"""Self-test of collectives: runs every collective of every group once at startup, with known results.

Each rank sends its own integers through the functions that a step uses: gloo or NCCL, shared memory if ranks have it,
both groups of the pipeline, first and last stage. A link, a GPU's memory or a library that corrupts a bit is reported
here with the group and the ranks, and not days later as an odd loss. The values are integers because a sum of floats
may round the corrupted bit away.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.common.fault_injection import inject_fault
from megalite.launch.rank_info import LaunchError
from megalite.parallel import comm
from megalite.parallel.mesh import RECEIVE, SEND, Axis, Mesh

SMALL, LARGE = 1 << 10, 1 << 18  # elements of a full tensor; NCCL uses other protocols for large tensors
MAX_REPORTS = 8  # the error quotes the reports of at most this number of ranks


@dataclass(frozen=True)
class Outcome:
    """The result of one operation over an axis."""

    axis: Axis
    op: str
    result: Tensor
    expected: Tensor


def test_values(rank: int, n: int, device: torch.device, num_ranks: int = 1) -> Tensor:
    """Return the int32 values [n] that global rank `rank` sends.

    The values are linear in the rank: with the sum of several ranks as `rank` and their number as `num_ranks`, this is
    the sum of their values.
    """
    return (torch.arange(n, device=device) * 2654435761 % 1048573 * num_ranks + 40503 * rank).int()


def check_collectives(mesh: Mesh) -> None:
    """Test all groups. Collective. Raises LaunchError on all ranks; it names the group, the operation and the ranks."""
    if mesh.world.size == 1:
        return
    outcomes: list[Outcome] = []
    for n in (SMALL, LARGE) if mesh.device.type != "cpu" else (SMALL,):
        for axis in sorted(mesh.active_axes, key=lambda axis: axis is not mesh.world):
            outcomes += _run_collectives(axis, n, mesh)
    num_wrong = torch.stack([(outcome.result != outcome.expected).sum() for outcome in outcomes]).tolist()
    faults = [_describe(outcome, mesh.world.rank) for outcome, count in zip(outcomes, num_wrong, strict=True) if count]
    if comm.all_reduce_int(len(faults), mesh) or faults:  # the sum itself may be wrong
        reports = list(filter(None, comm.all_gather_strings("; ".join(faults), mesh.world, mesh.device)))[:MAX_REPORTS]
        advice = "leave out the node, GPU or link that these have in common, and try tools/check_cluster.py on it"
        raise LaunchError("\n".join(["collectives give wrong values:", *reports, advice]))


def _run_collectives(axis: Axis, n: int, mesh: Mesh) -> Iterator[Outcome]:
    """Run the collectives that a step may use on `axis`, with about `n` elements."""
    rank, device = mesh.world.rank, mesh.device
    shard_size = max(1, n // axis.size)
    n = shard_size * axis.size

    def values_of(index: int) -> Tensor:
        return test_values(axis.ranks[index], n, device)

    values = test_values(rank, n, device)
    total = test_values(sum(axis.ranks), n, device, axis.size)
    inject_fault("init.collectives", rank, 0, values)
    yield Outcome(axis, "all_reduce", comm.all_reduce_(values.clone(), axis), total)
    for index in (0, axis.size - 1):
        op = f"broadcast of rank {axis.ranks[index]}"
        yield Outcome(axis, op, comm.broadcast_(values.clone(), axis, index), values_of(index))
    shard = axis.shard_slice(shard_size)
    if axis is mesh.dp_cp_tp:  # runs that have this axis exchange full matrices over it (Muon)
        splits = [shard_size] * axis.size
        expected = torch.cat([values_of(index)[shard] for index in range(axis.size)])
        yield Outcome(axis, "all_to_all", comm.start_all_to_all(values, splits, splits, axis).wait(), expected)
    if axis.name in ("pp", "pp_grad"):
        step = 1 if axis.name == "pp" else -1
        source = (axis.rank - step) % axis.size
        op = f"message from rank {axis.ranks[source]}"
        yield Outcome(axis, op, ring_shift(axis, values, step), values_of(source))
    elif axis.name != "world":  # a step uses no other collective on it
        expected = torch.cat([values_of(index)[:shard_size] for index in range(axis.size)])
        yield Outcome(axis, "all_gather", comm.start_all_gather(values[:shard_size], axis).wait(), expected)
        yield Outcome(axis, "reduce_scatter", comm.start_reduce_scatter(values.clone(), axis).wait(), total[shard])


def ring_shift(axis: Axis, x: Tensor, step: int) -> Tensor:
    """Send `x` to the rank `step` further along the axis; return the tensor received from the rank `step` before.

    Ranks with an even index send first, so that no two neighbors both block in a send.
    """
    received = torch.empty_like(x)
    target = (axis.rank + step) % axis.size
    source = (axis.rank - step) % axis.size
    messages = [(x, axis, target, SEND), (received, axis, source, RECEIVE)]
    for message in messages if axis.rank % 2 == 0 else reversed(messages):
        comm.start_p2p(*message).wait()
    return received


def _describe(outcome: Outcome, rank: int) -> str:
    """Describe the first wrong value, and name the rank that sent it if each rank contributes a part of the result."""
    axis, op, result, expected = outcome.axis, outcome.op, outcome.result, outcome.expected
    wrong = (result != expected).nonzero().flatten().tolist()
    i = wrong[0]
    part = ""
    if op in ("all_gather", "all_to_all"):
        part = f", in rank {axis.ranks[i * axis.size // len(result)]}'s part"
    return (
        f"{op} over {axis.name} (ranks {list(axis.ranks)}): on rank {rank} {len(wrong)} of {len(result)} values are "
        f"wrong{part}, the first is {int(result[i])}, not {int(expected[i])}"
    )
