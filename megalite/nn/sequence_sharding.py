"""Which tokens of a sample each context-parallel rank holds: a pure function of the borders between documents.

A sample of T tokens is cut into blocks, 2 of them for each of the cp ranks. A causal query sees all keys before it, so
the work of a block grows with its number, and a rank with a late block is given an early one (zigzag):

    tokens   | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |        cp 4: 8 blocks
    rank       0   1   2   3   3   2   1   0          work 1 + 15 = 3 + 13 = 5 + 11 = 7 + 9

Documents and windows hide keys, so work is counted: of every query, the keys that it sees. `balance` shares the blocks
out by that count. Where documents leave the ranks unequal, the blocks are halved, so that each rank has 4, or 8; where
neighbouring blocks are equal enough, as in a window, a rank gets these.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SPLIT_CHUNKS_ABOVE = 1.05  # most work of a rank / mean, above which blocks are halved
CONTIGUOUS_BELOW = (
    1.1  # up to which a rank holds neighbouring blocks: one launch, and fewer borders for windows to cross
)
MAX_CHUNKS_PER_RANK = 8  # of a rank: each of them is a launch of attention for itself


class SequenceSharding(NamedTuple):
    """How a micro-batch's samples are cut.

    blocks  of every rank the numbers of its blocks, in order
    size    tokens of a block
    first   of every block, the first position of the earliest document that it has a token of, in any sample
    """

    seq_chunks_by_rank: tuple[tuple[int, ...], ...]
    seq_chunk_size: int
    first_visible: tuple[int, ...]

    def positions(self, rank: int) -> NDArray[np.int64]:
        """The positions of a rank's tokens, [S].

        >>> place(8, 2, [None]).rows(0)
        array([0, 1, 6, 7])
        """
        return (
            np.array(self.seq_chunks_by_rank[rank])[:, None] * self.seq_chunk_size + np.arange(self.seq_chunk_size)
        ).reshape(-1)

    def contiguous_ranges(self, rank: int) -> list[range]:
        """The positions of a rank's tokens as ranges, as few as there are."""
        contiguous_ranges: list[range] = []
        for block in self.seq_chunks_by_rank[rank]:
            begin, end = block * self.seq_chunk_size, (block + 1) * self.seq_chunk_size
            joined = bool(contiguous_ranges) and contiguous_ranges[-1].stop == begin
            contiguous_ranges[-1:] = (
                [range(contiguous_ranges[-1].start, end)] if joined else [*contiguous_ranges[-1:], range(begin, end)]
            )
        return contiguous_ranges

    def visible_keys(self, queries: range, window: int | None) -> range:
        """The positions of the keys that some of these queries see, in any sample. `queries`: whole blocks."""
        begin = self.first_visible[queries.start // self.seq_chunk_size]
        return range(begin if window is None else max(begin, queries.start - window + 1), queries.stop)

    def required_chunks(self, rank: int, window: int) -> tuple[int, ...]:
        """The blocks whose keys a rank's queries see in a window, its own among them, in order."""
        visible_keys = (self.visible_keys(run, window) for run in self.contiguous_ranges(rank))
        return tuple(sorted({block for some in visible_keys for block in self.chunks_covering(some)}))

    def heaviest_receiver(self, window: int | None) -> int:
        """The first of the ranks that receive most: all of them where there is no window.

        >>> place(64, 4, [4]).blocks, place(64, 4, [4]).busiest(4)
        (((0, 1), (2, 3), (4, 5), (6, 7)), 1)
        """
        return (
            0
            if window is None
            else max(range(len(self.seq_chunks_by_rank)), key=lambda rank: len(self.required_chunks(rank, window)))
        )

    def chunks_covering(self, positions: range) -> range:
        """The blocks that have some of these."""
        return range(positions.start // self.seq_chunk_size, -(-positions.stop // self.seq_chunk_size))


def chunk_workloads(
    length: int,
    seq_chunks_by_rank: int,
    windows: Sequence[int | None],
    first_visible: NDArray[np.integer] | None = None,
) -> list[int]:
    """The keys that the queries of each block see, summed over samples and over layers with these windows. first
    [B, T]: of every token, the first position of its document."""
    visible_keys, work = (
        np.arange(1, length + 1)[None] - (0 if first_visible is None else first_visible),
        np.zeros(seq_chunks_by_rank, np.int64),
    )
    for window in set(windows):
        some = visible_keys if window is None else np.minimum(visible_keys, window)
        work += windows.count(window) * some.reshape(-1, seq_chunks_by_rank, length // seq_chunks_by_rank).sum(
            (0, 2), dtype=np.int64
        )
    return work.tolist()


def assign_chunks(work: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Share out blocks, as many to each rank: the one with most work goes to the rank that has least so far. Or, where
    that is more equal, by turns: cp blocks, those with most work, in the order of the ranks, the next cp in the other.

    >>> balance([1, 3, 5, 7, 9, 11, 13, 15], 4), balance([1, 3, 1, 3], 2), balance([1, 1, 9, 1], 2)
    (((0, 7), (1, 6), (2, 5), (3, 4)), ((2, 3), (0, 1)), ((0, 2), (1, 3)))
    """
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    order = sorted(range(len(work)), key=lambda b: (work[b], b), reverse=True)
    for block in order:
        not_full = (mine for mine in assigned if len(mine) < len(work) // ranks)
        min(not_full, key=lambda mine: sum(work[b] for b in mine)).append(block)
    rounds = [order[i : i + ranks][:: -1 if i // ranks % 2 else 1] for i in range(0, len(work), ranks)]
    ways = (tuple(tuple(sorted(mine)) for mine in way) for way in (assigned, zip(*rounds, strict=True)))
    return min(ways, key=lambda way: imbalance(work, way))


def imbalance(work: Sequence[int], seq_chunks_by_rank: Sequence[Sequence[int]]) -> float:
    """The most work of a rank / the mean: 1 if they are equal."""
    most = max(sum(work[b] for b in mine) for mine in seq_chunks_by_rank)
    return most * len(seq_chunks_by_rank) / sum(work)


def shard_sequence(
    length: int, ranks: int, windows: Sequence[int | None], first_visible: NDArray[np.integer] | None = None
) -> SequenceSharding:
    """The cut of a micro-batch over `ranks` ranks, 2 of which divide `length`; arguments as of `work_of`."""
    tried: list[tuple[float, tuple[tuple[int, ...], ...]]] = []
    for each in (2, 4, MAX_CHUNKS_PER_RANK):
        if length % (each * ranks) or (tried and min(tried)[0] <= SPLIT_CHUNKS_ABOVE):
            break
        work = chunk_workloads(length, each * ranks, windows, first_visible)
        neighbours = tuple((2 * rank, 2 * rank + 1) for rank in range(ranks)) if each == 2 else ()
        if neighbours and imbalance(work, neighbours) <= CONTIGUOUS_BELOW:
            tried = [(1.0, neighbours)]
        else:
            tried.append((imbalance(work, seq_chunks_by_rank := assign_chunks(work, ranks)), seq_chunks_by_rank))
    seq_chunks_by_rank = min(tried)[1]
    seq_chunk_size = length // (ranks * len(seq_chunks_by_rank[0]))
    begins = (
        [0] * (length // seq_chunk_size)
        if first_visible is None
        else first_visible[:, ::seq_chunk_size].min(0).tolist()
    )
    return SequenceSharding(seq_chunks_by_rank, seq_chunk_size, tuple(begins))
