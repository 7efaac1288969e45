"""The sharding of samples over context-parallel ranks: a pure function of the borders between documents.

A sample of T tokens is cut into chunks, 2 for each of the cp ranks. A causal query sees all keys before it, so the work
of a chunk grows with its number, and a rank with a late chunk also gets an early one (zigzag):

    tokens   | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |        cp 4: 8 chunks
    rank       0   1   2   3   3   2   1   0          work 1 + 15 = 3 + 13 = 5 + 11 = 7 + 9

Documents and windows hide keys, so work is counted: the keys that each query sees. `assign_chunks` assigns the chunks
by that count. If documents leave the ranks unequal, chunks are halved, so that each rank has 4, or 8. If neighboring
chunks are equal enough, as in a window, a rank gets neighbors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SPLIT_CHUNKS_ABOVE = 1.05  # imbalance above which chunks are halved
# imbalance up to which a rank has neighboring chunks: one launch, and fewer borders that windows cross
CONTIGUOUS_BELOW = 1.1
MAX_CHUNKS_PER_RANK = 8  # each chunk is a launch of attention


@dataclass(frozen=True)
class SequenceSharding:
    """The sharding of a micro-batch's samples over cp.

    seq_chunks_by_rank  the numbers of each rank's chunks, in order
    seq_chunk_size      tokens per chunk
    first_visible       for each chunk, the first position of the earliest document with a token in it, in any sample
    """

    seq_chunks_by_rank: tuple[tuple[int, ...], ...]
    seq_chunk_size: int
    first_visible: tuple[int, ...]

    def positions(self, rank: int) -> NDArray[np.int64]:
        """Return the positions of a rank's tokens, [S].

        >>> shard_sequence(8, 2, [None]).positions(0)
        array([0, 1, 6, 7])
        """
        starts = np.array(self.seq_chunks_by_rank[rank]) * self.seq_chunk_size
        return (starts[:, None] + np.arange(self.seq_chunk_size)).reshape(-1)

    def contiguous_ranges(self, rank: int) -> list[range]:
        """Return the positions of a rank's tokens as the smallest number of ranges."""
        ranges: list[range] = []
        for chunk in self.seq_chunks_by_rank[rank]:
            start, end = chunk * self.seq_chunk_size, (chunk + 1) * self.seq_chunk_size
            if ranges and ranges[-1].stop == start:
                ranges[-1] = range(ranges[-1].start, end)
            else:
                ranges.append(range(start, end))
        return ranges

    def range_ranks(self) -> list[int]:
        """Return the rank of each range of `contiguous_ranges`, in the order of their positions.

        >>> shard_sequence(64, 4, [None]).range_ranks(), shard_sequence(64, 4, []).range_ranks()
        ([0, 1, 2, 3, 2, 1, 0], [0, 1, 2, 3])
        """
        rank_of_start = {
            positions.start: rank
            for rank in range(len(self.seq_chunks_by_rank))
            for positions in self.contiguous_ranges(rank)
        }
        return [rank_of_start[start] for start in sorted(rank_of_start)]

    def visible_keys(self, queries: range, window: int | None) -> range:
        """Return the positions of the keys that some query of these chunks sees, in any sample."""
        start = self.first_visible[queries.start // self.seq_chunk_size]
        return range(start if window is None else max(start, queries.start - window + 1), queries.stop)

    def required_chunks(self, rank: int, window: int) -> tuple[int, ...]:
        """Return the chunks whose keys a rank's queries see in a window, its own included, in order."""
        visible_keys = (self.visible_keys(queries, window) for queries in self.contiguous_ranges(rank))
        return tuple(sorted({chunk for keys in visible_keys for chunk in self.chunks_covering(keys)}))

    def heaviest_receiver(self, window: int | None) -> int:
        """Return the first of the ranks that receive most. Without a window, all receive the same.

        >>> sharding = shard_sequence(64, 4, [4])
        >>> sharding.seq_chunks_by_rank, sharding.heaviest_receiver(4)
        (((0, 1), (2, 3), (4, 5), (6, 7)), 1)
        """
        if window is None:
            return 0
        ranks = range(len(self.seq_chunks_by_rank))
        return max(ranks, key=lambda rank: len(self.required_chunks(rank, window)))

    def chunks_covering(self, positions: range) -> range:
        """Return the chunks that contain some of these positions."""
        return range(positions.start // self.seq_chunk_size, -(-positions.stop // self.seq_chunk_size))


def chunk_workloads(
    length: int, num_chunks: int, windows: Sequence[int | None], first_visible: NDArray[np.integer] | None = None
) -> list[int]:
    """Return the number of keys that the queries of each chunk see, summed over samples and layers.

    `windows` are those of the layers. `first_visible` [B, T]: the first position of each token's document.
    """
    visible_keys = np.arange(1, length + 1)[None] - (0 if first_visible is None else first_visible)
    work = np.zeros(num_chunks, np.int64)
    for window in set(windows):
        keys = visible_keys if window is None else np.minimum(visible_keys, window)
        keys_by_chunk = keys.reshape(-1, num_chunks, length // num_chunks).sum((0, 2), dtype=np.int64)
        work += windows.count(window) * keys_by_chunk
    return work.tolist()


def assign_chunks(work: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Assign equally many chunks to each rank, so that the work is balanced.

    Two assignments are computed, and the better one is returned. In the first, the chunk with the most work goes to the
    rank with the least work so far. In the second, the chunks are dealt in rounds by decreasing work, alternately in
    the order of the ranks and in reverse.

    >>> assign_chunks([1, 3, 5, 7, 9, 11, 13, 15], 4)
    ((0, 7), (1, 6), (2, 5), (3, 4))
    >>> assign_chunks([1, 3, 1, 3], 2), assign_chunks([1, 1, 9, 1], 2)
    (((2, 3), (0, 1)), ((0, 2), (1, 3)))
    """
    greedy: list[list[int]] = [[] for _ in range(ranks)]
    order = sorted(range(len(work)), key=lambda chunk: (work[chunk], chunk), reverse=True)
    for chunk in order:
        not_full = [chunks for chunks in greedy if len(chunks) < len(work) // ranks]
        least_loaded = min(not_full, key=lambda chunks: sum(work[c] for c in chunks))
        least_loaded.append(chunk)
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for i in range(0, len(work), ranks):
        is_reversed = i // ranks % 2 == 1
        for chunks, chunk in zip(reversed(dealt) if is_reversed else dealt, order[i : i + ranks], strict=True):
            chunks.append(chunk)
    candidates = [tuple(tuple(sorted(chunks)) for chunks in assignment) for assignment in (greedy, dealt)]
    return min(candidates, key=lambda assignment: imbalance(work, assignment))


def imbalance(work: Sequence[int], seq_chunks_by_rank: Sequence[Sequence[int]]) -> float:
    """Return the largest work of a rank divided by the mean; 1 if all are equal."""
    if not sum(work):  # no layer has attention
        return 1.0
    max_work = max(sum(work[chunk] for chunk in chunks) for chunks in seq_chunks_by_rank)
    return max_work * len(seq_chunks_by_rank) / sum(work)


def shard_sequence(
    length: int, ranks: int, windows: Sequence[int | None], first_visible: NDArray[np.integer] | None = None
) -> SequenceSharding:
    """Return the sharding of a micro-batch over `ranks` ranks.

    2 * ranks must divide `length`. The other arguments are those of `chunk_workloads`.
    """
    candidates: list[tuple[float, tuple[tuple[int, ...], ...]]] = []
    for chunks_per_rank in (2, 4, MAX_CHUNKS_PER_RANK):
        if length % (chunks_per_rank * ranks) or (candidates and min(candidates)[0] <= SPLIT_CHUNKS_ABOVE):
            break
        work = chunk_workloads(length, chunks_per_rank * ranks, windows, first_visible)
        neighbors = tuple((2 * rank, 2 * rank + 1) for rank in range(ranks)) if chunks_per_rank == 2 else ()
        if neighbors and imbalance(work, neighbors) <= CONTIGUOUS_BELOW:
            candidates = [(1.0, neighbors)]
        else:
            assignment = assign_chunks(work, ranks)
            candidates.append((imbalance(work, assignment), assignment))
    seq_chunks_by_rank = min(candidates)[1]
    seq_chunk_size = length // (ranks * len(seq_chunks_by_rank[0]))
    if first_visible is None:
        first_by_chunk = [0] * (length // seq_chunk_size)
    else:
        first_by_chunk = first_visible[:, ::seq_chunk_size].min(0).tolist()
    return SequenceSharding(seq_chunks_by_rank, seq_chunk_size, tuple(first_by_chunk))
