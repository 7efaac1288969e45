"""Best-fit packing: samples of complete documents, so that only documents longer than a sample are cut.

    document   S + 1 tokens or fewer: one piece. Longer: pieces of S + 1, each starting with the last token of the one
               before, so that every token but the document's first is a label in exactly one piece
    bin        a sample of S + 1 tokens, filled by best-fit decreasing: the longest piece first, each into the fullest
               bin that has space for it (arXiv:2404.10830); the remaining space at the end is padding

Pieces of one length are interchangeable, and so are bins with the same free space, so the plan is made for groups of
them and equals the plan made piece by piece. A bin with r free tokens takes r // s pieces of length s and keeps
r mod s < r / 2 free, so a group is touched at most log2(S) times: O(S log S) group steps and a few numpy passes for any
number of documents.

The plan depends only on the lengths and S, and is made once for all epochs and seeds. A `PackedDataset` follows it:

    epoch e    all bins, in the order of a shuffle of (seed, e); the pieces of a bin are shuffled too, since best fit
               puts the longest first, so that a position would reveal a document's length
    sample i   bin permute(i mod bins) of epoch i // bins
    tokens     piece | piece | ... | padding     S + 1 in total, as in GPTDataset; piece_lengths() returns the lengths
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.datasets.base_dataset import DocumentDataset
from megalite.data.datasets.permutation import Ints, fold, mix32, permute
from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import IndexedDataset

CHUNK = 1 << 18  # documents or pieces at a time, so that temporaries fit in the cache
FillStep = tuple[int, int, int]  # first bin, number of bins, pieces for each


class DocumentPieces:
    """The pieces of documents of `lengths` [D], numbered in document order, of at most `capacity` tokens.

    Most documents are one piece, so only the others are listed: a table of all would cost 4 bytes per document.
    """

    def __init__(self, lengths: NDArray[Any], capacity: int):
        if capacity < 2:
            raise DataError(f"capacity={capacity} tokens hold no label; use a seq_length of at least 1")
        self.lengths, self.capacity = lengths, capacity
        self.num_tokens = 0
        special, counts = [], []  # documents that are not one piece, and their numbers of pieces
        for a in range(0, len(lengths), CHUNK):
            tokens = lengths[a : a + CHUNK].astype(np.int64)
            count = np.where(tokens > 1, -(-(tokens - 1) // (capacity - 1)), tokens)
            rows = np.flatnonzero(count != 1)
            special.append(rows + a)
            counts.append(count[rows])
            self.num_tokens += int(tokens.sum())
        self._special = np.concatenate(special) if special else np.empty(0, np.int64)
        self._count = np.concatenate(counts) if counts else np.empty(0, np.int64)
        self._shift = np.concatenate([[0], np.cumsum(self._count - 1)])  # piece number - document number
        self._after = self._special + 1 + self._shift[1:]  # number of the piece after each special document
        self.num_cut = int((self._count > 1).sum())

    def __len__(self) -> int:
        return len(self.lengths) + int(self._shift[-1])

    def lookup(self, piece: NDArray[Any]) -> tuple[Ints, Ints, Ints]:
        """Return (document, first token in it, length) of each of the pieces numbered `piece`."""
        piece = np.asarray(piece, np.int64)
        before = np.searchsorted(self._after, piece, side="right")  # special documents that end before the piece
        document = piece - self._shift[before]
        chunk = np.zeros_like(piece)
        if len(self._special):
            nearest = np.minimum(before, len(self._special) - 1)
            inside = (before < len(self._special)) & (piece >= self._after[nearest] - self._count[nearest])
            document[inside] = self._special[nearest[inside]]
            chunk[inside] = (piece - self._after[nearest] + self._count[nearest])[inside]
        start = chunk * (self.capacity - 1)
        return document, start, np.minimum(self.lengths[document] - start, self.capacity)


@dataclass(frozen=True)
class PackingPlan:
    """The pieces of every bin: bin b contains order[starts[b] : starts[b + 1]], longest first.

    order is [pieces], int32 below 2^31, else int64; starts is [bins + 1].
    """

    pieces: DocumentPieces
    order: NDArray[Any]
    starts: Ints

    @property
    def num_bins(self) -> int:
        return len(self.starts) - 1

    @property
    def padding(self) -> float:
        """The fraction of all tokens in bins that is padding."""
        total = self.num_bins * self.pieces.capacity
        repeated = len(self.pieces) - int(np.count_nonzero(self.pieces.lengths))  # tokens that are in two pieces
        return 1 - (self.pieces.num_tokens + repeated) / total if total else 0.0


def plan_packing(lengths: NDArray[Any], capacity: int) -> PackingPlan:
    """Pack documents of `lengths` [D] into bins of `capacity` tokens; empty documents are left out."""
    pieces = DocumentPieces(lengths, capacity)
    by_length, counts = _sorted(pieces)
    steps, num_bins = _best_fit(counts)
    used = np.zeros(num_bins, by_length.dtype)  # number of pieces in each bin
    for first, n, each in steps:
        used[first : first + n] += each
    starts = np.zeros(num_bins + 1, np.int64)
    np.cumsum(used, dtype=np.int64, out=starts[1:])
    used[:] = 0
    order = np.empty_like(by_length)
    done = 0
    for first, n, each in steps:
        max_bins = max(1, CHUNK // each)  # bins at a time
        for a in range(first, first + n, max_bins):
            b = min(a + max_bins, first + n)
            places = (starts[a:b] + used[a:b])[:, None] + np.arange(each)
            order[places] = by_length[done : done + places.size].reshape(places.shape)
            used[a:b] += each
            done += places.size
    return PackingPlan(pieces, order, starts)


def _sorted(pieces: DocumentPieces) -> tuple[NDArray[Any], Ints]:
    """Return the piece numbers, longest first and in order among equals, and the number of pieces of each length.

    The counts are [capacity + 1]. A counting sort in chunks needs 4 bytes per piece where argsort needs 16.
    """
    total, capacity = len(pieces), pieces.capacity
    sort_dtype = np.uint16 if capacity < 1 << 16 else np.int32  # numpy sorts 16 bits by radix, much faster

    def chunks() -> Any:
        """Yield (number of the first piece, free tokens beside each piece) for each chunk."""
        for a in range(0, total, CHUNK):
            numbers = np.arange(a, min(a + CHUNK, total))
            yield a, capacity - pieces.lookup(numbers)[2]  # free tokens beside the piece: ascending means longest first

    counts = np.zeros(capacity + 1, np.int64)
    for _, free in chunks():
        counts += np.bincount(free, minlength=capacity + 1)
    next_position = np.cumsum(counts) - counts
    out = np.empty(total, np.int32 if total < 1 << 31 else np.int64)
    for a, free in chunks():
        order = np.argsort(free.astype(sort_dtype), kind="stable")
        count = np.bincount(free, minlength=capacity + 1)
        shift = next_position - (np.cumsum(count) - count)
        out[shift[free[order]] + np.arange(len(order))] = order + a
        next_position += count
    return out, counts[::-1]


def _best_fit(counts: Ints) -> tuple[list[FillStep], int]:
    """Return (steps in the order of the sorted pieces, number of bins) of best-fit decreasing over groups.

    If a bin with r free tokens is the fullest one that fits length s, it remains so until it has no space for another
    piece of length s. So the bins with r free tokens are filled one after the other, r // s pieces each, then the bins
    with the next larger free space.

    Args:
        counts: number of pieces of each length [capacity + 1]
    """
    capacity = len(counts) - 1
    groups: dict[int, list[tuple[int, int]]] = {}  # free tokens -> ranges of bins (first, number)
    free_sizes: list[int] = []  # keys of groups, sorted
    steps: list[FillStep] = []
    num_bins = 0

    def add_bins(free: int, first: int, n: int) -> None:
        if free and n:
            if free not in groups:
                groups[free] = []
                insort(free_sizes, free)
            groups[free].append((first, n))

    for length in (np.flatnonzero(counts)[::-1]).tolist():
        remaining = int(counts[length])
        while remaining:
            index = bisect_left(free_sizes, length)
            if index < len(free_sizes):
                free = free_sizes[index]
                first, n = groups[free].pop()
                if not groups[free]:
                    del groups[free], free_sizes[index]
            else:
                free, first, n = capacity, num_bins, -(-remaining // (capacity // length))
                num_bins += n
            each = free // length
            full = min(n, remaining // each)
            rest = remaining % each if full < n else 0  # pieces for one more bin, the last that this length reaches
            num_used = full + bool(rest)
            for start, bins, pieces in ((first, full, each), (first + full, int(rest > 0), rest)):
                if bins:
                    steps.append((start, bins, pieces))
                    remaining -= bins * pieces
                    add_bins(free - pieces * length, start, bins)
            add_bins(free, first + num_used, n - num_used)
    return steps, num_bins


class PackedDataset(DocumentDataset):
    """The documents `documents` of one file, packed, epoch after epoch. `pad` is usually the end-of-document id."""

    packed = True

    def __init__(
        self, data: IndexedDataset, documents: range, seq_length: int, seed: int, pad: int, split: str = "train"
    ):
        super().__init__(data, documents, seq_length, seed, split)
        self.pad = pad
        self._first_bin = 0  # bins of earlier phases of the run
        if not len(self._lengths) or int(self._lengths.max()) < 2:
            problem = f"the {split} split has no document of two tokens or more among {len(documents)}"
            raise DataError(
                f"{data.prefix}: {problem}, so nothing to predict: use a larger part in --split, or more data"
            )
        self.plan = plan_packing(self._lengths, seq_length + 1)

    def resume(self, history: Sequence[tuple[int, int]]) -> str | None:
        """Resume after the given samples.

        If they were packed for another sequence length, skip to the start of the next epoch.
        """
        epoch = within = 0  # the next bin: its epoch, and its number within the epoch
        bins, length, note = self.plan.num_bins, self.seq_length, None
        for seq_length, samples in history:
            if samples and seq_length != length:
                epoch, within, length = epoch + (within > 0), 0, seq_length
                plan = self.plan if seq_length == self.seq_length else plan_packing(self._lengths, seq_length + 1)
                bins = plan.num_bins
            full_epochs, within = divmod(within + samples, bins)
            epoch += full_epochs
        if length != self.seq_length:
            epoch, within = epoch + (within > 0), 0
            note = f"{self.name} was packed for {length} tokens before: it continues with its next epoch"
        self._first_bin = epoch * self.plan.num_bins + within
        return note

    def count_tokens_and_documents(self, samples: range) -> tuple[int, int]:
        tokens = documents = 0
        for a in range(samples.start, samples.stop, CHUNK):
            _, _, start, length = self._rows(np.arange(a, min(a + CHUNK, samples.stop)))
            # the first token of a later piece repeats the last one of the piece before it
            tokens += int((length - (start > 0)).sum())
            documents += int((start == 0).sum())
        return tokens, documents

    def samples(self, index: Ints) -> Ints:
        ends, document, start, length = self._rows(index)
        out = np.full((len(index), self.seq_length + 1), self.pad, np.int64)
        starts_in_file = self._data.spans(document + self._documents.start)[0] + start
        tokens = np.empty(int(length.sum()), np.int64)
        self._data.copy_tokens(starts_in_file, length, tokens)
        used = np.add.reduceat(length, ends[:-1]) if len(index) else length
        out[np.arange(self.seq_length + 1) < used[:, None]] = tokens
        return out

    def piece_lengths(self, index: Ints) -> list[NDArray[np.int32]]:
        ends, _, _, length = self._rows(index)
        return np.split(length.astype(np.int32), ends[1:-1]) if len(index) else []

    def _rows(self, index: Ints) -> tuple[Ints, ...]:
        """Return the pieces of some samples, one sample after the other.

        Returns:
            (ends, document, first token in it, length); the pieces of row r are ends[r] : ends[r + 1] of the last three
        """
        epochs, numbers = np.divmod(np.asarray(index, np.int64) + self._first_bin, self.plan.num_bins)
        bins = np.empty_like(numbers)
        for e in np.unique(epochs).tolist():
            in_epoch = epochs == e
            bins[in_epoch] = permute(numbers[in_epoch], self.plan.num_bins, fold(self._key, "bins", e))
        starts = self.plan.starts[bins]
        counts = self.plan.starts[bins + 1] - starts
        ends = np.concatenate([[0], np.cumsum(counts)])
        row = np.repeat(np.arange(len(bins)), counts)
        piece = self.plan.order[starts[row] + np.arange(len(row)) - ends[row]].astype(np.int64)
        shuffle_key = np.empty(len(row), np.uint32)
        for e in np.unique(epochs).tolist():
            in_epoch = epochs[row] == e
            shuffle_key[in_epoch] = mix32(piece[in_epoch].astype(np.uint32), fold(self._key, "pieces", e))
        piece = piece[np.lexsort((piece, shuffle_key, row))]
        return ends, *self.plan.pieces.lookup(piece)

    def locate(self, i: int, position: int) -> str:
        _, document, start, length = self._rows(np.array([i]))
        ends = np.cumsum(length)
        k = int(np.searchsorted(ends, position, side="right"))
        if k == len(ends):
            return f"{self._data.prefix}.bin, padding of sample {i}, position {position}"
        token = int(start[k]) + position - int(ends[k] - length[k])
        return f"{self._data.prefix}.bin, document {int(document[k]) + self._documents.start}, token {token}"

    def describe(self, samples: int) -> str:
        plan, cut = self.plan, expected_cut_documents(self._lengths, self.seq_length)
        counts = f"{len(self._documents)} documents, {self.num_tokens} tokens, {samples / plan.num_bins:.2f} epochs"
        packed = f"packed into {plan.num_bins} samples, {100 * plan.padding:.2f} % padding"
        num_cut = f"{plan.pieces.num_cut} documents cut (end to end: about {cut:.0f})"
        return f"{self._data.prefix}: {counts}; {packed}, {num_cut}"


def expected_cut_documents(lengths: NDArray[np.int32], seq_length: int) -> float:
    """Return the expected number of documents that samples of GPTDataset would cut.

    Cuts are seq_length = S apart and the token at a cut belongs to both samples, so a cut falls into a document of L
    tokens with probability (L - 2) / S, for 2 <= L <= S + 2.
    """
    parts = (lengths[a : a + CHUNK] for a in range(0, len(lengths), CHUNK))
    return sum(float(np.sum(np.clip((part - 2.0) / seq_length, 0, 1))) for part in parts)
