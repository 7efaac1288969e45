"""Composition of affine maps of states over context-parallel ranks.

Each range of positions maps the state before it to the state after it, S' = A S + U, and the state before the first
range is zero. A map is a tensor [A | U], [B, H, K, columns + V]; a diagonal A is one column. A rank has the maps of its
own ranges, and gets the states before them:

    gather   [A | U] of all ranges --all-gather--> S_1 = U_0, S_2 = A_1 S_1 + U_1, .. on every rank
    scan     rounds with distance d = 1, 2, 4, .. (Hillis and Steele, doi:10.1145/7902.7903): each range sends the
             composed map of the d ranges up to it to the range d after it, in one all-to-all. If these start at the
             first range, they are a state, and only U is sent

With n ranges, at most m on each of cp ranks, and R = ceil(log2 n) rounds, per rank:

             receives           collectives   products with a K x K matrix, one after the other
    gather   (cp - 1) m maps    1             n - 1 with K x V
    scan     at most m R maps   R             at most 2 m (R - 1) with K x (K + V)
    buffers  gather: (cp + 1) m maps; scan: at most 4 m maps

`count_exchange` counts exactly what the rank that receives most gets. Each further collective is counted as one more
map, since its start takes about as long (4.2 MB with the sizes of Qwen3-Next). The scan is used if its sum is smaller:
from cp 4 in zigzag order, for cp 2, 4 and from 6 if every rank has one range.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.delta_rule import apply_map
from megalite.parallel.comm import start_all_gather, start_all_to_all
from megalite.parallel.mesh import Axis


class ScanTransfer(NamedTuple):
    """A map or a state that a range sends to a later one in a round of a scan; ranges are numbered in order.

    is_state  it starts at the first range, so it is a state; otherwise it is a map
    """

    source: int
    target: int
    is_state: bool


def scan_rounds(num_ranges: int) -> list[list[ScanTransfer]]:
    """Return the transfers of each round of a scan, in order of their targets.

    >>> scan_rounds(3)[1]
    [ScanTransfer(source=0, target=2, is_state=True)]
    """
    rounds = []
    distance = 1
    while distance < num_ranges:
        targets = range(distance, num_ranges)
        rounds.append([ScanTransfer(target - distance, target, target < 2 * distance) for target in targets])
        distance *= 2
    return rounds


class ExchangeCounts(NamedTuple):
    """The counts of an exchange of maps.

    Attributes:
        is_scan: It is a scan, and not a gather.
        received: The channels that a rank receives, at most, for each sample, head and row of a state.
        num_collectives: The number of collectives.
    """

    is_scan: bool
    received: int
    num_collectives: int


@functools.lru_cache(maxsize=256)
def count_exchange(ranks: tuple[int, ...], columns: int, value_dim: int) -> ExchangeCounts:
    """Return the counts of the exchange that is used.

    Args:
        ranks: The rank of each range, in the order in which the state passes through them.
        columns: The columns of A.
        value_dim: The columns V of a state.

    >>> count_exchange((0, 1, 0), columns=128, value_dim=128)
    ExchangeCounts(is_scan=False, received=512, num_collectives=1)
    >>> count_exchange((0, 1, 2, 3), columns=128, value_dim=128)  # a map in the first round, a state in the second
    ExchangeCounts(is_scan=True, received=384, num_collectives=2)
    """
    num_ranges = Counter(ranks)
    map_channels = columns + value_dim
    gathered = (len(num_ranges) - 1) * max(num_ranges.values()) * map_channels
    scanned = max(_scanned_channels(ranks, map_channels, value_dim).values())
    num_rounds = len(scan_rounds(len(ranks)))
    if scanned + (num_rounds - 1) * map_channels < gathered:
        return ExchangeCounts(True, scanned, num_rounds)
    return ExchangeCounts(False, gathered, 1)


def _scanned_channels(ranks: Sequence[int], map_channels: int, state_channels: int) -> Counter[int]:
    """Return the channels that each rank receives in a scan."""
    received = Counter(dict.fromkeys(ranks, 0))
    for transfer in itertools.chain.from_iterable(scan_rounds(len(ranks))):
        if ranks[transfer.source] != ranks[transfer.target]:
            received[ranks[transfer.target]] += state_channels if transfer.is_state else map_channels
    return received


def heaviest_receiver(ranks: Sequence[int]) -> int:
    """Return the first of the ranks that receive most in a scan, if maps are twice as large as states.

    >>> heaviest_receiver([0, 1, 2, 3])
    2
    """
    received = _scanned_channels(ranks, 2, 1)
    return max(sorted(received), key=received.__getitem__)


def states_before(maps: list[Tensor], columns: int, ranks: Sequence[int], cp: Axis) -> list[Tensor]:
    """Return the state [B, H, K, V] before each of this rank's ranges. Collective over cp.

    Args:
        maps: The maps [A | U] of this rank's ranges, in the order of `ranks`.
        columns: The columns of A.
        ranks: The rank of each range, in the order in which the state passes through them.
        cp: The axis.
    """
    counts = count_exchange(tuple(ranks), columns, maps[0].shape[-1] - columns)
    states = (_scan if counts.is_scan else _gather)(maps, columns, ranks, cp)
    own_ranges = [number for number, rank in enumerate(ranks) if rank == cp.rank]
    return [states[number] if number else torch.zeros_like(maps[0][..., columns:]) for number in own_ranges]


def _gather(maps: list[Tensor], columns: int, ranks: Sequence[int], cp: Axis) -> dict[int, Tensor]:
    """Return the states before this rank's ranges by their numbers, from the maps of all ranks."""
    max_per_rank = max(Counter(ranks).values())
    padded = maps + [torch.zeros_like(maps[0])] * (max_per_rank - len(maps))
    gathered = start_all_gather(torch.stack(padded), cp).wait().unflatten(0, (cp.size, -1))
    maps_of_rank = [iter(part) for part in gathered]
    states: dict[int, Tensor] = {}
    state = None
    for number, rank in enumerate(ranks):
        if rank == cp.rank and state is not None:
            states[number] = state
        if len(states) == len(maps):
            break
        A, U = next(maps_of_rank[rank]).tensor_split([columns], -1)
        state = U if state is None else apply_map(A, U, state)
    return states


def _compose(later: Tensor, earlier: Tensor, columns: int) -> Tensor:
    """Return [A A' | A U' + U] of two maps, or if `earlier` is a state U', the state A U' + U."""
    A, U = later.tensor_split([columns], -1)
    return apply_map(A, F.pad(U, (earlier.shape[-1] - U.shape[-1], 0)), earlier)


def _scan(maps: list[Tensor], columns: int, ranks: Sequence[int], cp: Axis) -> dict[int, Tensor]:
    """Return the states before this rank's ranges by their numbers, in rounds of an all-to-all."""
    own_maps = dict(zip((number for number, rank in enumerate(ranks) if rank == cp.rank), maps, strict=True))
    before: dict[int, Tensor] = {}  # the composed map, or the state, of the ranges before each own range
    for transfers in scan_rounds(len(ranks)):
        sent: dict[int, Tensor] = {}  # by target
        for source, target, is_state in transfers:
            if source not in own_maps:
                continue
            x = own_maps[source]
            if source in before:
                x = _compose(x, before[source], columns)
            elif is_state:  # of the first range
                x = x[..., columns:]
            sent[target] = x
        for target, x in _exchange(transfers, sent, columns, ranks, cp, maps[0]).items():
            before[target] = _compose(before[target], x, columns) if target in before else x
    return before


def _exchange(
    transfers: Sequence[ScanTransfer],
    sent: dict[int, Tensor],
    columns: int,
    ranks: Sequence[int],
    cp: Axis,
    like: Tensor,
) -> dict[int, Tensor]:
    """Return what this rank's ranges receive in a round of a scan, by target; maps have the shape of `like`."""
    state_like = like[..., columns:]

    def shape_of(transfer: ScanTransfer) -> torch.Size:
        return (state_like if transfer.is_state else like).shape

    received: dict[int, Tensor] = {}
    to_rank: list[list[ScanTransfer]] = [[] for _ in range(cp.size)]
    from_rank: list[list[ScanTransfer]] = [[] for _ in range(cp.size)]
    for transfer in transfers:
        source, target = ranks[transfer.source], ranks[transfer.target]
        if source == target == cp.rank:
            received[transfer.target] = sent[transfer.target]
        elif source == cp.rank:
            to_rank[target].append(transfer)
        elif target == cp.rank:
            from_rank[source].append(transfer)
    input_splits, output_splits = (
        [sum(shape_of(transfer).numel() for transfer in part) for part in parts] for parts in (to_rank, from_rank)
    )
    parts = [sent[transfer.target].reshape(-1) for transfer in itertools.chain.from_iterable(to_rank)]
    flat = torch.cat([like.new_empty(0), *parts])
    flat = start_all_to_all(flat, input_splits, output_splits, cp).wait()
    for transfer in itertools.chain.from_iterable(from_rank):
        shape = shape_of(transfer)
        part, flat = flat.tensor_split([shape.numel()])
        received[transfer.target] = part.view(shape)
    return received
