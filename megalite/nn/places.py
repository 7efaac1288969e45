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

UNEQUAL = 1.05  # most work of a rank / mean, above which blocks are halved
NEIGHBOURS = 1.1  # up to which a rank holds neighbouring blocks: one launch, and fewer borders for windows to cross
MOST_BLOCKS = 8  # of a rank: each of them is a launch of attention for itself


class Places(NamedTuple):
    """How a micro-batch's samples are cut.

    blocks  of every rank the numbers of its blocks, in order
    size    tokens of a block
    first   of every block, the first position of the earliest document that it has a token of, in any sample
    """

    blocks: tuple[tuple[int, ...], ...]
    size: int
    first: tuple[int, ...]

    def rows(self, rank: int) -> NDArray[np.int64]:
        """The positions of a rank's tokens, [S].

        >>> place(8, 2, [None]).rows(0)
        array([0, 1, 6, 7])
        """
        return (np.array(self.blocks[rank])[:, None] * self.size + np.arange(self.size)).reshape(-1)

    def runs(self, rank: int) -> list[range]:
        """The positions of a rank's tokens as ranges, as few as there are."""
        runs: list[range] = []
        for block in self.blocks[rank]:
            begin, end = block * self.size, (block + 1) * self.size
            joined = bool(runs) and runs[-1].stop == begin
            runs[-1:] = [range(runs[-1].start, end)] if joined else [*runs[-1:], range(begin, end)]
        return runs

    def seen(self, queries: range, window: int | None) -> range:
        """The positions of the keys that some of these queries see, in any sample. `queries`: whole blocks."""
        begin = self.first[queries.start // self.size]
        return range(begin if window is None else max(begin, queries.start - window + 1), queries.stop)

    def needed(self, rank: int, window: int) -> tuple[int, ...]:
        """The blocks whose keys a rank's queries see in a window, its own among them, in order."""
        seen = (self.seen(run, window) for run in self.runs(rank))
        return tuple(sorted({block for some in seen for block in self.blocks_of(some)}))

    def busiest(self, window: int | None) -> int:
        """The first of the ranks that receive most: all of them where there is no window.

        >>> place(64, 4, [4]).blocks, place(64, 4, [4]).busiest(4)
        (((0, 1), (2, 3), (4, 5), (6, 7)), 1)
        """
        return 0 if window is None else max(range(len(self.blocks)), key=lambda rank: len(self.needed(rank, window)))

    def blocks_of(self, positions: range) -> range:
        """The blocks that have some of these."""
        return range(positions.start // self.size, -(-positions.stop // self.size))


def work_of(
    length: int, blocks: int, windows: Sequence[int | None], first: NDArray[np.integer] | None = None
) -> list[int]:
    """The keys that the queries of each block see, summed over samples and over layers with these windows. first
    [B, T]: of every token, the first position of its document."""
    seen, work = np.arange(1, length + 1)[None] - (0 if first is None else first), np.zeros(blocks, np.int64)
    for window in set(windows):
        some = seen if window is None else np.minimum(seen, window)
        work += windows.count(window) * some.reshape(-1, blocks, length // blocks).sum((0, 2), dtype=np.int64)
    return work.tolist()


def balance(work: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Share out blocks, as many to each rank: the one with most work goes to the rank that has least so far. Or, where
    that is more equal, by turns: cp blocks, those with most work, in the order of the ranks, the next cp in the other.

    >>> balance([1, 3, 5, 7, 9, 11, 13, 15], 4), balance([1, 3, 1, 3], 2), balance([1, 1, 9, 1], 2)
    (((0, 7), (1, 6), (2, 5), (3, 4)), ((2, 3), (0, 1)), ((0, 2), (1, 3)))
    """
    held: list[list[int]] = [[] for _ in range(ranks)]
    order = sorted(range(len(work)), key=lambda b: (work[b], b), reverse=True)
    for block in order:
        able = (mine for mine in held if len(mine) < len(work) // ranks)
        min(able, key=lambda mine: sum(work[b] for b in mine)).append(block)
    rounds = [order[i : i + ranks][:: -1 if i // ranks % 2 else 1] for i in range(0, len(work), ranks)]
    ways = (tuple(tuple(sorted(mine)) for mine in way) for way in (held, zip(*rounds, strict=True)))
    return min(ways, key=lambda way: unequal(work, way))


def unequal(work: Sequence[int], blocks: Sequence[Sequence[int]]) -> float:
    """The most work of a rank / the mean: 1 if they are equal."""
    most = max(sum(work[b] for b in mine) for mine in blocks)
    return most * len(blocks) / sum(work)


def place(length: int, ranks: int, windows: Sequence[int | None], first: NDArray[np.integer] | None = None) -> Places:
    """The cut of a micro-batch over `ranks` ranks, 2 of which divide `length`; arguments as of `work_of`."""
    tried: list[tuple[float, tuple[tuple[int, ...], ...]]] = []
    for each in (2, 4, MOST_BLOCKS):
        if length % (each * ranks) or (tried and min(tried)[0] <= UNEQUAL):
            break
        work = work_of(length, each * ranks, windows, first)
        neighbours = tuple((2 * rank, 2 * rank + 1) for rank in range(ranks)) if each == 2 else ()
        if neighbours and unequal(work, neighbours) <= NEIGHBOURS:
            tried = [(1.0, neighbours)]
        else:
            tried.append((unequal(work, blocks := balance(work, ranks)), blocks))
    blocks = min(tried)[1]
    size = length // (ranks * len(blocks[0]))
    begins = [0] * (length // size) if first is None else first[:, ::size].min(0).tolist()
    return Places(blocks, size, tuple(begins))
