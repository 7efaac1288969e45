"""Every collective of every group, done once with numbers whose result is known, before a run trusts them.

Each rank sends whole numbers of its own through the functions that a step uses: gloo or NCCL, shared memory where ranks
have it, both channels of the pipeline, first and last stage. A link, a card's memory or a library that changes a bit is
found here, with the group and the ranks, and not in a loss that looks odd days later. Of floats a sum may round the bit
away.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.faults import fault
from megalite.parallel.comm import all_reduce_, broadcast_, gather_texts, start_all_gather, start_reduce_scatter
from megalite.parallel.launch import LaunchError
from megalite.parallel.mesh import Axis, Mesh

SMALL, LARGE = 1 << 10, 1 << 18  # elements of a whole tensor; NCCL has other protocols for large ones
SHOWN = 8  # ranks that tell what they found

Outcome = tuple[str, Tensor, Tensor]  # what was done, what came of it, what should have


def numbers(rank: int, n: int, device: torch.device, ranks: int = 1) -> Tensor:
    """What global rank `rank` sends: [n], int32; what `ranks` of them come to, where `rank` is their sum."""
    return (torch.arange(n, device=device) * 2654435761 % 1048573 * ranks + 40503 * rank).int()


def check_collectives(mesh: Mesh) -> None:
    """Collective. Raises LaunchError on all ranks, which names group, operation and ranks."""
    if mesh.world.size == 1:
        return
    outcomes: list[tuple[Axis, str, Tensor, Tensor]] = []
    for n in (SMALL, LARGE) if mesh.device.type != "cpu" else (SMALL,):
        for axis in sorted(mesh.axes, key=lambda axis: axis is not mesh.world):
            outcomes += [(axis, *outcome) for outcome in _outcomes(axis, mesh.world.rank, n, mesh.device)]
    wrong = torch.stack([(got != want).sum() for _, _, got, want in outcomes]).tolist()
    found = [_told(*outcome, mesh.world.rank) for outcome, times in zip(outcomes, wrong, strict=True) if times]
    number = torch.tensor(len(found), dtype=torch.int64, device=mesh.device)
    if int(all_reduce_(number, mesh.world)) or found:
        told = list(filter(None, gather_texts("; ".join(found), mesh.world, mesh.device)))[:SHOWN]
        advice = "leave out the node, card or link that these have in common, and try tools/check_cluster.py on it"
        raise LaunchError("\n".join(["collectives do not give what they should:", *told, advice]))


def _outcomes(axis: Axis, rank: int, n: int, device: torch.device) -> Iterator[Outcome]:
    part = max(1, n // axis.size)
    n = part * axis.size
    mine, of = numbers(rank, n, device), lambda place: numbers(axis.ranks[place], n, device)
    total = numbers(sum(axis.ranks), n, device, axis.size)
    fault("init.collectives", rank, 0, mine)
    yield "all_reduce", all_reduce_(mine.clone(), axis), total
    for place in (0, axis.size - 1):
        yield f"broadcast of rank {axis.ranks[place]}", broadcast_(mine.clone(), axis, place), of(place)
    if axis.name in ("pp", "pp_back"):
        step = 1 if axis.name == "pp" else -1
        source = (axis.rank - step) % axis.size
        yield f"message from rank {axis.ranks[source]}", pass_on(axis, mine, step), of(source)
    elif axis.name != "world":  # which does no more
        each = [of(place)[:part] for place in range(axis.size)]
        yield "all_gather", start_all_gather(mine[:part], axis).wait(), torch.cat(each)
        block = total[axis.rank * part : (axis.rank + 1) * part]
        yield "reduce_scatter", start_reduce_scatter(mine.clone(), axis).wait(), block


def pass_on(axis: Axis, mine: Tensor, step: int) -> Tensor:
    """What the neighbour sent, as the pipeline sends. Even ones send first: nobody waits for a receive after his."""
    got, to, source = torch.empty_like(mine), *(axis.ranks[(axis.rank + d) % axis.size] for d in (step, -step))
    calls = [lambda: dist.isend(mine, to, group=axis.group), lambda: dist.irecv(got, source, group=axis.group)]
    for call in calls if axis.rank % 2 == 0 else reversed(calls):
        work = call()
        assert work is not None
        work.wait()
    return got


def _told(axis: Axis, what: str, got: Tensor, want: Tensor, rank: int) -> str:
    """The first value that is wrong; of an all-gather each part is a rank's."""
    wrong = (got != want).nonzero().flatten().tolist()
    i = wrong[0]
    part = f", in rank {axis.ranks[i * axis.size // len(got)]}'s part" if what == "all_gather" else ""
    return (
        f"{what} over {axis.name} (ranks {list(axis.ranks)}): on rank {rank} {len(wrong)} of {len(got)} values are "
        f"wrong{part}, the first is {int(got[i])}, not {int(want[i])}"
    )
