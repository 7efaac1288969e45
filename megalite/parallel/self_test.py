"""Runs every collective of every group once, with integers whose result is known, before a run trusts them.

Each rank sends integers of its own through the functions that a step uses: gloo or NCCL, shared memory where ranks have
it, both channels of the pipeline, first and last stage. A link, a card's memory or a library that changes a bit is
found here, with the group and the ranks, and not days later in a loss that looks odd. They are integers because a sum
of floats may round the changed bit away.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megalite.common.fault_injection import inject_fault
from megalite.launch.rank_info import LaunchError
from megalite.parallel import comm
from megalite.parallel.mesh import RECEIVE, SEND, Axis, Mesh

SMALL, LARGE = 1 << 10, 1 << 18  # elements of a whole tensor; NCCL has other protocols for large ones
MAX_REPORTS = 8  # ranks whose reports the error holds

Outcome = tuple[str, Tensor, Tensor]  # operation, result, expected result


def test_values(rank: int, n: int, device: torch.device, ranks: int = 1) -> Tensor:
    """The int32 values [n] that global rank `rank` sends, or the sum of `ranks` ranks', if `rank` is that of theirs."""
    return (torch.arange(n, device=device) * 2654435761 % 1048573 * ranks + 40503 * rank).int()


def check_collectives(mesh: Mesh) -> None:
    """Test all groups; collective. Raises LaunchError on all ranks, which names group, operation and ranks."""
    if mesh.world.size == 1:
        return
    outcomes: list[tuple[Axis, str, Tensor, Tensor]] = []
    for n in (SMALL, LARGE) if mesh.device.type != "cpu" else (SMALL,):
        for axis in sorted(mesh.active_axes, key=lambda axis: axis is not mesh.world):
            outcomes += [(axis, *outcome) for outcome in _run_collectives(axis, n, mesh)]
    wrong = torch.stack([(got != want).sum() for _, _, got, want in outcomes]).tolist()
    faults = [_describe(*outcome, mesh.world.rank) for outcome, count in zip(outcomes, wrong, strict=True) if count]
    if comm.all_reduce_int(len(faults), mesh) or faults:  # the sum itself may be wrong
        reports = list(filter(None, comm.all_gather_strings("; ".join(faults), mesh.world, mesh.device)))[:MAX_REPORTS]
        advice = "leave out the node, card or link that these have in common, and try tools/check_cluster.py on it"
        raise LaunchError("\n".join(["collectives give wrong values:", *reports, advice]))


def _run_collectives(axis: Axis, n: int, mesh: Mesh) -> Iterator[Outcome]:
    part, rank, device = max(1, n // axis.size), mesh.world.rank, mesh.device
    n = part * axis.size
    sent, sent_by = test_values(rank, n, device), lambda place: test_values(axis.ranks[place], n, device)
    total = test_values(sum(axis.ranks), n, device, axis.size)
    inject_fault("init.collectives", rank, 0, sent)
    yield "all_reduce", comm.all_reduce_(sent.clone(), axis), total
    for place in (0, axis.size - 1):
        yield f"broadcast of rank {axis.ranks[place]}", comm.broadcast_(sent.clone(), axis, place), sent_by(place)
    mine, each = slice(axis.rank * part, (axis.rank + 1) * part), [part] * axis.size
    if axis is mesh.dp_cp_tp:  # where a run has it, whole matrices travel on it
        parts = [sent_by(place)[mine] for place in range(axis.size)]
        yield "all_to_all", comm.start_all_to_all(sent, each, each, axis).wait(), torch.cat(parts)
    if axis.name in ("pp", "pp_grad"):
        step = 1 if axis.name == "pp" else -1
        source = (axis.rank - step) % axis.size
        yield f"message from rank {axis.ranks[source]}", ring_shift(axis, sent, step), sent_by(source)
    elif axis.name != "world":  # a step uses no other collective on it
        parts = [sent_by(place)[:part] for place in range(axis.size)]
        yield "all_gather", comm.start_all_gather(sent[:part], axis).wait(), torch.cat(parts)
        yield "reduce_scatter", comm.start_reduce_scatter(sent.clone(), axis).wait(), total[mine]


def ring_shift(axis: Axis, x: Tensor, step: int) -> Tensor:
    """Send `x` to the rank `step` places further; return what came from the other side. Even positions send first, so
    that no two neighbours both wait in a send."""
    got, to, source = torch.empty_like(x), *((axis.rank + d) % axis.size for d in (step, -step))
    messages = [(x, axis, to, SEND), (got, axis, source, RECEIVE)]
    for message in messages if axis.rank % 2 == 0 else reversed(messages):
        comm.start_p2p(*message).wait()
    return got


def _describe(axis: Axis, what: str, got: Tensor, want: Tensor, rank: int) -> str:
    """Name the first wrong value; where each rank gives a part also the rank that it came from."""
    wrong = (got != want).nonzero().flatten().tolist()
    i = wrong[0]
    part = f", in rank {axis.ranks[i * axis.size // len(got)]}'s part" if what in ("all_gather", "all_to_all") else ""
    return (
        f"{what} over {axis.name} (ranks {list(axis.ranks)}): on rank {rank} {len(wrong)} of {len(got)} values are "
        f"wrong{part}, the first is {int(got[i])}, not {int(want[i])}"
    )
