"""Best-fit packing: samples of whole documents, so that only those longer than a sample are cut.

    document   S + 1 tokens or fewer: one piece. Longer: pieces of S + 1, each beginning with the last token of the one
               before, so that every token but the document's first is a label in exactly one piece
    bin        a sample of S + 1 places, filled by best-fit decreasing: the longest piece first, each into the fullest
               bin that has room for it (arXiv:2404.10830); the free rest is padding, at the end

Pieces of one length are alike, and so are bins with the same room, so the plan is made for groups of them, and equals
the plan made piece by piece. A bin of room r takes r // s pieces of length s and keeps r mod s < r / 2, so a group is
touched at most log2(S) times: O(S log S) group steps and a few numpy passes for any number of documents.

The plan depends on the lengths and S alone, and is made once for all epochs and seeds. A `PackedDataset` follows it:

    epoch e    all bins, in the order of a shuffle of (seed, e); the pieces of a bin are shuffled too, since best fit
               puts the longest first, so that a position would tell a document's length
    sample i   bin permute(i mod bins) of epoch i // bins
    tokens     piece | piece | ... | padding     S + 1 of them, as from GptDataset; layout() gives the pieces' lengths
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.data.datasets.base_dataset import DocumentDataset
from megalite.data.datasets.permutation import Ints, fold, mix32, permute
from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import IndexedDataset

CHUNK = 1 << 18  # documents or pieces at a time: temporaries stay in the cache
FillStep = tuple[int, int, int]  # first bin, number of bins, pieces for each


class DocumentPieces:
    """The pieces of documents of `lengths` [D], numbered in document order. Most documents are one piece, so only the
    others are listed: a table of all would cost 4 bytes per document."""

    def __init__(self, lengths: NDArray[Any], capacity: int):
        if capacity < 2:
            raise DataError(f"capacity={capacity} tokens hold no label; use a seq_length of at least 1")
        self.lengths, self.capacity = lengths, capacity
        special, counts, self.num_tokens = [], [], 0
        for a in range(0, len(lengths), CHUNK):
            tokens = lengths[a : a + CHUNK].astype(np.int64)
            count = np.where(tokens > 1, -(-(tokens - 1) // (capacity - 1)), tokens)
            at = np.flatnonzero(count != 1)
            special.append(at + a)
            counts.append(count[at])
            self.num_tokens += int(tokens.sum())
        self._special = np.concatenate(special) if special else np.empty(0, np.int64)
        self._count = np.concatenate(counts) if counts else np.empty(0, np.int64)
        self._shift = np.concatenate([[0], np.cumsum(self._count - 1)])  # piece number - document number
        self._after = self._special + 1 + self._shift[1:]  # number of the piece after each special document
        self.num_cut = int((self._count > 1).sum())

    def __len__(self) -> int:
        return len(self.lengths) + int(self._shift[-1])

    def lookup(self, piece: NDArray[Any]) -> tuple[Ints, Ints, Ints]:
        """(document, first token in it, length) of each of the pieces numbered `piece`."""
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


class PackingPlan(NamedTuple):
    """Bin b holds order[starts[b] : starts[b + 1]], longest first. order [P], int32 below 2^31; starts [bins + 1]."""

    pieces: DocumentPieces
    order: NDArray[Any]
    starts: Ints

    @property
    def num_bins(self) -> int:
        return len(self.starts) - 1

    @property
    def padding(self) -> float:
        """The share of all places in bins that is padding."""
        whole = self.num_bins * self.pieces.capacity
        repeated = len(self.pieces) - int(np.count_nonzero(self.pieces.lengths))  # the tokens that two pieces share
        return 1 - (self.pieces.num_tokens + repeated) / whole if whole else 0.0


def plan_packing(lengths: NDArray[Any], capacity: int) -> PackingPlan:
    """The plan for documents of `lengths` [D] in bins of `capacity` tokens, without empty documents."""
    pieces = DocumentPieces(lengths, capacity)
    by_length, counts = _sorted(pieces)
    steps, num_bins = _best_fit(counts)
    used = np.zeros(num_bins, by_length.dtype)  # pieces per bin
    for first, n, each in steps:
        used[first : first + n] += each
    starts = np.zeros(num_bins + 1, np.int64)
    np.cumsum(used, dtype=np.int64, out=starts[1:])
    used[:] = 0
    order, done = np.empty_like(by_length), 0
    for first, n, each in steps:
        most = max(1, CHUNK // each)  # bins at a time
        for a in range(first, first + n, most):
            b = min(a + most, first + n)
            places = (starts[a:b] + used[a:b])[:, None] + np.arange(each)
            order[places] = by_length[done : done + places.size].reshape(places.shape)
            used[a:b] += each
            done += places.size
    return PackingPlan(pieces, order, starts)


def _sorted(pieces: DocumentPieces) -> tuple[NDArray[Any], Ints]:
    """Piece numbers, longest first and in order among equals, and the number of pieces of each length [capacity + 1],
    by a counting sort in chunks, with 4 bytes per piece where argsort needs 16."""
    total, capacity = len(pieces), pieces.capacity
    narrow = np.uint16 if capacity < 1 << 16 else np.int32  # numpy sorts 16 bits by radix, much faster

    def chunks() -> Any:
        for a in range(0, total, CHUNK):
            numbers = np.arange(a, min(a + CHUNK, total))
            yield a, capacity - pieces.lookup(numbers)[2]  # the room that the piece leaves: smallest first

    counts = np.zeros(capacity + 1, np.int64)
    for _, room in chunks():
        counts += np.bincount(room, minlength=capacity + 1)
    next_place = np.cumsum(counts) - counts
    out = np.empty(total, np.int32 if total < 1 << 31 else np.int64)
    for a, room in chunks():
        at = np.argsort(room.astype(narrow), kind="stable")
        count = np.bincount(room, minlength=capacity + 1)
        shift = next_place - (np.cumsum(count) - count)
        out[shift[room[at]] + np.arange(len(at))] = at + a
        next_place += count
    return out, counts[::-1]


def _best_fit(counts: Ints) -> tuple[list[FillStep], int]:
    """Best-fit decreasing over groups: (steps in the order of the pieces, number of bins). If a bin with room r is the
    fullest that fits length s, it is so until it has no room for another s. So the bins of that room are filled one
    after the other, r // s pieces each, then those of the next larger room."""
    capacity = len(counts) - 1
    groups: dict[int, list[tuple[int, int]]] = {}  # room -> ranges of bins (first, number)
    rooms: list[int] = []  # keys of groups, sorted
    steps: list[FillStep] = []
    num_bins = 0

    def give(room: int, first: int, n: int) -> None:
        if room and n:
            if room not in groups:
                groups[room] = []
                insort(rooms, room)
            groups[room].append((first, n))

    for length in (np.flatnonzero(counts)[::-1]).tolist():
        left = int(counts[length])
        while left:
            at = bisect_left(rooms, length)
            if at < len(rooms):
                room = rooms[at]
                first, n = groups[room].pop()
                if not groups[room]:
                    del groups[room], rooms[at]
            else:
                room, first, n = capacity, num_bins, -(-left // (capacity // length))
                num_bins += n
            each = room // length
            full = min(n, left // each)
            rest = left % each if full < n else 0  # for one bin more: the last that this length reaches
            behind = full + bool(rest)
            for at, bins, taken in ((first, full, each), (first + full, int(rest > 0), rest)):
                if bins:
                    steps.append((at, bins, taken))
                    left -= bins * taken
                    give(room - taken * length, at, bins)
            give(room, first + behind, n - behind)
    return steps, num_bins


class PackedDataset(DocumentDataset):
    """The documents `documents` of one file, packed, epoch after epoch. `pad`: usually the end-of-document id."""

    packed = True

    def __init__(
        self, data: IndexedDataset, documents: range, seq_length: int, seed: int, pad: int, split: str = "train"
    ):
        super().__init__(data, documents, seq_length, seed, split)
        self.pad, self._first = pad, 0
        if not len(self._lengths) or int(self._lengths.max()) < 2:
            none = f"the {split} split has no document of two tokens or more among {len(documents)}"
            raise DataError(f"{data.prefix}: {none}, so nothing to predict: use a larger part in --split, or more data")
        self.plan = plan_packing(self._lengths, seq_length + 1)

    def resume(self, taken: Sequence[tuple[int, int]]) -> str | None:
        """After bins of another length the next epoch begins."""
        epoch = within = 0  # the next bin
        bins, length, note = self.plan.num_bins, self.seq_length, None
        for seq_length, samples in taken:
            if samples and seq_length != length:
                epoch, within, length = epoch + (within > 0), 0, seq_length
                plan = self.plan if seq_length == self.seq_length else plan_packing(self._lengths, seq_length + 1)
                bins = plan.num_bins
            more, within = divmod(within + samples, bins)
            epoch += more
        if length != self.seq_length:
            epoch, within = epoch + (within > 0), 0
            note = f"{self.name} was packed for {length} tokens before: it continues with its next epoch"
        self._first = epoch * self.plan.num_bins + within
        return note

    def count_tokens_and_documents(self, samples: range) -> tuple[int, int]:
        tokens = documents = 0
        for a in range(samples.start, samples.stop, CHUNK):
            _, _, start, length = self._rows(np.arange(a, min(a + CHUNK, samples.stop)))
            tokens += int(
                (length - (start > 0)).sum()
            )  # the first token of a later piece is the last of the one before
            documents += int((start == 0).sum())
        return tokens, documents

    def samples(self, index: Ints) -> Ints:
        ends, document, start, length = self._rows(index)
        out = np.full((len(index), self.seq_length + 1), self.pad, np.int64)
        begins = self._data.spans(document + self._documents.start)[0] + start
        together = np.empty(int(length.sum()), np.int64)
        self._data.copy_tokens(begins, length, together)
        used = np.add.reduceat(length, ends[:-1]) if len(index) else length
        out[np.arange(self.seq_length + 1) < used[:, None]] = together
        return out

    def piece_lengths(self, index: Ints) -> list[NDArray[np.int32]]:
        ends, _, _, length = self._rows(index)
        return np.split(length.astype(np.int32), ends[1:-1]) if len(index) else []

    def _rows(self, index: Ints) -> tuple[Ints, ...]:
        """The pieces of some samples, one sample after the other: (ends, document, first token in it, length); those of
        row r are ends[r] : ends[r + 1] of the last three."""
        epochs, numbers = np.divmod(np.asarray(index, np.int64) + self._first, self.plan.num_bins)
        bins = np.empty_like(numbers)
        for e in np.unique(epochs).tolist():
            in_epoch = epochs == e
            bins[in_epoch] = permute(numbers[in_epoch], self.plan.num_bins, fold(self._key, "bins", e))
        starts, counts = self.plan.starts[bins], self.plan.starts[bins + 1] - self.plan.starts[bins]
        ends = np.concatenate([[0], np.cumsum(counts)])
        row = np.repeat(np.arange(len(bins)), counts)
        piece = self.plan.order[starts[row] + np.arange(len(row)) - ends[row]].astype(np.int64)
        turn = np.empty(len(row), np.uint32)
        for e in np.unique(epochs).tolist():
            in_epoch = epochs[row] == e
            turn[in_epoch] = mix32(piece[in_epoch].astype(np.uint32), fold(self._key, "pieces", e))
        piece = piece[np.lexsort((piece, turn, row))]
        return ends, *self.plan.pieces.lookup(piece)

    def locate(self, i: int, position: int) -> str:
        _, document, start, length = self._rows(np.array([i]))
        ends = np.cumsum(length)
        at = int(np.searchsorted(ends, position, side="right"))
        if at == len(ends):
            return f"{self._data.prefix}.bin, padding of sample {i}, position {position}"
        token = int(start[at]) + position - int(ends[at] - length[at])
        return f"{self._data.prefix}.bin, document {int(document[at]) + self._documents.start}, token {token}"

    def describe(self, samples: int) -> str:
        plan, cut = self.plan, expected_cut_documents(self._lengths, self.seq_length)
        counts = f"{len(self._documents)} documents, {self.num_tokens} tokens, {samples / plan.num_bins:.2f} epochs"
        packed = f"packed into {plan.num_bins} samples, {100 * plan.padding:.2f} % padding"
        few = f"{plan.pieces.num_cut} documents cut (end to end: about {cut:.0f})"
        return f"{self._data.prefix}: {counts}; {packed}, {few}"


def expected_cut_documents(lengths: NDArray[np.int32], seq_length: int) -> float:
    """The expected number of documents that samples of GptDataset cut. Cuts are seq_length apart and the token there
    belongs to both samples, so one falls into L tokens with probability (L - 2) / S, for 2 <= L <= S + 2."""
    parts = (lengths[a : a + CHUNK] for a in range(0, len(lengths), CHUNK))
    return sum(float(np.sum(np.clip((part - 2.0) / seq_length, 0, 1))) for part in parts)
