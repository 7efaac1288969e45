"""The blend of --data-path: token files mixed by weight into one endless dataset.

After n samples, source k has given floor(w_k n) or ceil(w_k n) of them, exactly, for every n. Its sample j may come
when w_k n > j and must have come when w_k n >= j + 1. Among the sources that may give the next sample, the one with the
earliest deadline does (earliest deadline first; with these windows it never misses one; Still, 1979, "quota methods").

Weights are exact fractions, so the order repeats: 0.3 and 0.7 repeat after 10 samples. One period is computed, as far
as it is needed. A period of more than MAX_PERIOD samples (weights that are token counts) is computed block by block, so
that a distant sample costs one block and a few operations for each block before it (`_next_boundary`).
"""

import bisect
import heapq
import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.options import DataConfig
from megalite.data.datasets.base_dataset import DocumentDataset
from megalite.data.datasets.data_path import parse_data_path
from megalite.data.datasets.gpt_dataset import GPTDataset
from megalite.data.datasets.packed_dataset import PackedDataset
from megalite.data.datasets.permutation import Ints
from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import IndexedDataset
from megalite.data.files.sidecar import check_tokenizer
from megalite.data.tokenizers.tokenizer import Tokenizer

MAX_PERIOD = 1_000_000  # samples of a block; weights with up to six decimals repeat within it


@dataclass
class _Block:
    """Samples `start` .. `start` + length of the order, computed up to len(source).

    before  samples that each source gives before the block
    after   samples that each source has given at the end of the block; None: not prescribed
    source  source of each sample
    rank    number of samples of the same source that come before it in the order
    """

    start: int
    length: int
    before: list[int]
    after: list[int] | None
    source: NDArray[np.int32]
    rank: Ints


class BlendSchedule:
    """The order of a blend: the source of each sample, and its number within that source.

    numerators, denominator  source k gives numerators[k] of every `denominator` samples
    block                    samples per block
    repeats                  True if the first block is a full period, after which the order repeats
    """

    def __init__(self, weights: Sequence[float | int]):
        if not weights:
            raise DataError("a blend needs at least one source")
        exact = [as_written(weight) for weight in weights]
        total = sum(exact)
        shares = [weight / total for weight in exact]
        self.denominator = math.lcm(*(share.denominator for share in shares))
        self.numerators = [share.numerator * (self.denominator // share.denominator) for share in shares]
        self.repeats = self.denominator <= MAX_PERIOD
        self.block = min(self.denominator, MAX_PERIOD)
        self._boundaries = [[0] * len(weights)]  # samples of each source before each block
        self._first = self._open_block(0, self._boundaries[0], None)
        self._other: _Block | None = None  # the block used last, other than the first
        self._lock = threading.Lock()  # for calls from the prefetch thread and the main thread

    def sources_at(self, index: NDArray[Any]) -> tuple[Ints, Ints]:
        """Return (source, sample number within it) for each blend sample in `index`."""
        index = np.asarray(index, np.int64)
        numbers, within = np.divmod(index, self.block)
        sources, ranks = np.empty_like(index), np.empty_like(index)
        with self._lock:
            for number in np.unique(numbers).tolist():
                rows = numbers == number
                block, shift = self._block(number)
                self._extend(block, int(within[rows].max()) + 1)
                source = block.source[within[rows]].astype(np.int64)
                sources[rows] = source
                ranks[rows] = block.rank[within[rows]] + shift[source]
        return sources, ranks

    def samples_per_source(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples each source gives."""
        number, within = divmod(samples, self.block)
        with self._lock:
            block, shift = self._block(number)
            self._extend(block, within)
            counts = np.bincount(block.source[:within], minlength=len(block.before))
            return (counts + np.asarray(block.before, np.int64) + shift).tolist()

    def _block(self, number: int) -> tuple[_Block, Ints]:
        """Return (the block that serves block `number`, the shift of its ranks for each source)."""
        first, sources = self._first, len(self.numerators)
        if number == 0:
            return first, np.zeros(sources, np.int64)
        self._extend(first, self.block)
        if self.repeats:
            return first, number * np.array(self.numerators, np.int64)
        if len(self._boundaries) == 1:
            self._boundaries.append(np.bincount(first.source, minlength=sources).tolist())
        while len(self._boundaries) < number + 2:
            self._boundaries.append(self._next_boundary())
        start = number * self.block
        if self._other is None or self._other.start != start:
            self._other = self._open_block(start, *self._boundaries[number : number + 2])
        return self._other, np.zeros(sources, np.int64)

    def _next_boundary(self) -> list[int]:
        """Return how many samples each source has given at the end of the next block, after n samples.

        A source must have given floor(w n) and may have given ceil(w n), so at most one sample of each source is
        optional. Optional samples are chosen in the order of their deadlines until the block is full. A sample that may
        only come from place r of the block on needs a place there. So among the samples that may not come before r, at
        most as many are chosen as the required samples leave free from r on. The required ones occupy at least

            w (n - r + 1), summed over the sources whose optional sample may come before r,
            + the fraction of w n, summed over the others

        Then some order of the block satisfies every window (Hall's theorem), and earliest deadline first finds one.
        """
        before, D = self._boundaries[-1], self.denominator
        start = (len(self._boundaries) - 1) * self.block
        n = start + self.block
        required = [N * n // D for N in self.numerators]
        fractions = [N * n % D for N in self.numerators]  # times D
        release = {k: self._release(k, required[k]) for k, fraction in enumerate(fractions) if fraction}
        places: list[int] = []
        limits: list[int] = []  # for each of `places`, how many samples that may not come before it may be chosen
        early, late = 0, sum(fractions)
        by_release = sorted(release, key=release.__getitem__)
        for place, group in itertools.groupby(by_release, key=release.__getitem__):
            if place > start + 1:
                places.append(place)
                limits.append(-(-(early * (n - place + 1) + late) // D))
            for k in group:
                early += self.numerators[k]
                late -= fractions[k]
        num_choosable = np.array(limits, np.int64)
        after = list(map(max, before, required))
        num_open = n - sum(after)
        optional = [k for k in release if after[k] == required[k]]
        for k in sorted(optional, key=lambda k: (self._deadline(k, required[k]), k)):
            if num_open == 0:
                break
            affected = num_choosable[: bisect.bisect_right(places, release[k])]  # a view
            if affected.all():
                affected -= 1
                after[k] += 1
                num_open -= 1
        return after

    def _release(self, k: int, j: int) -> int:
        """Return the length of the shortest prefix that may contain sample `j` of source `k`."""
        return j * self.denominator // self.numerators[k] + 1

    def _deadline(self, k: int, j: int) -> int:
        """Return the length of the shortest prefix that must contain sample `j` of source `k`."""
        return -(-(j + 1) * self.denominator // self.numerators[k])

    def _open_block(self, start: int, before: list[int], after: list[int] | None) -> _Block:
        return _Block(start, self.block, before, after, np.empty(0, np.int32), np.empty(0, np.int64))

    def _extend(self, block: _Block, length: int) -> None:
        """Compute the block up to `length` samples."""
        done = len(block.source)
        if length <= done:
            return
        length = min(block.length, max(length, 2 * done, 4096))
        counts = (np.bincount(block.source, minlength=len(block.before)) + np.asarray(block.before, np.int64)).tolist()
        last: Sequence[float] = [math.inf] * len(counts) if block.after is None else block.after
        end = math.inf if block.after is None else block.start + block.length
        release, deadline = self._release, self._deadline
        ready: list[tuple[float, int]] = []  # (deadline, source) of the sources that may be next
        # (prefix length from which the source may be next, source)
        waiting = [(release(k, j), k) for k, j in enumerate(counts) if j < last[k]]
        heapq.heapify(waiting)
        sources, ranks = [], []
        for n in range(block.start + done + 1, block.start + length + 1):  # the prefix length after this choice
            while waiting and waiting[0][0] <= n:
                _, k = heapq.heappop(waiting)
                heapq.heappush(ready, (min(deadline(k, counts[k]), end), k))
            _, k = heapq.heappop(ready)
            sources.append(k)
            ranks.append(counts[k])
            counts[k] += 1
            if counts[k] < last[k]:
                heapq.heappush(waiting, (release(k, counts[k]), k))
        block.source = np.concatenate([block.source, np.array(sources, np.int32)])
        block.rank = np.concatenate([block.rank, np.array(ranks, np.int64)])


class BlendedDataset:
    """Samples of several datasets, interleaved by a BlendSchedule.

    `begin` is the number, counted in the whole run, of the blend's first sample. `notes` are lines for the log.
    """

    def __init__(self, datasets: Sequence[DocumentDataset], weights: Sequence[float | int]):
        self.datasets = list(datasets)
        self.weights = list(weights)
        self.order = BlendSchedule(weights)
        self.seq_length = datasets[0].seq_length
        self.begin = 0
        self.notes: list[str] = []

    def _by_source(self, index: Ints) -> Iterator[tuple[DocumentDataset, Ints, Ints]]:
        """Yield (source, its rows among `index`, its sample numbers) for each source that `index` reads."""
        sources, numbers = self.order.sources_at(index - self.begin)
        for k in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == k)
            yield self.datasets[k], rows, numbers[rows]

    def samples(self, index: Ints) -> Ints:
        out = np.empty((len(index), self.seq_length + 1), np.int64)
        for source, rows, numbers in self._by_source(index):
            out[rows] = source.samples(numbers)
        return out

    def piece_lengths(self, index: Ints) -> list[NDArray[np.int32]] | None:
        lengths_of_row: dict[int, NDArray[np.int32]] = {}
        for source, rows, numbers in self._by_source(index):
            pieces = source.piece_lengths(numbers)
            if pieces is None:
                return None  # the sources of a blend are all packed, or none
            lengths_of_row |= dict(zip(rows.tolist(), pieces, strict=True))
        return [lengths_of_row[row] for row in range(len(lengths_of_row))]

    def locate(self, i: int, position: int) -> str:
        source, number = (int(a[0]) for a in self.order.sources_at(np.array([i - self.begin])))
        return self.datasets[source].locate(number, position)

    def describe(self, samples: int) -> str:
        if len(self.datasets) == 1:
            return self.datasets[0].describe(samples)
        lines = []
        for share, dataset in zip(self._shares(), self.datasets, strict=True):
            lines.append(f"{float(share):.4f} of {dataset.describe(round(samples * share))}")
        return "\n".join([*lines, *self.unused(samples - self.begin)])

    def unused(self, samples: int) -> list[str]:
        """Return a line for each source that gives none of the blend's first `samples` samples."""
        quotas = [share * samples for share in self._shares()]
        if samples < 1 or min(quotas) >= 1:
            return []
        lines = []
        for source, count, quota in zip(self.datasets, self.order.samples_per_source(samples), quotas, strict=True):
            if count == 0:
                problem = f"none of the {samples:,} samples comes from {source.name}"
                remedy = "raise it or drop the source"
                lines.append(f"WARNING: {problem}: its weight is worth {float(quota):.2g} of one; {remedy}")
        return lines

    def _shares(self) -> list[Fraction]:
        return [Fraction(numerator, self.order.denominator) for numerator in self.order.numerators]


def build_blend(
    data_path: Sequence[str],
    seq_length: int,
    seed: int,
    split: str,
    fractions: tuple[float, float] = (0.0, 1.0),
    data_config: DataConfig = DataConfig(),  # noqa: B008 (frozen)
    tokenizer: Tokenizer | None = None,
) -> BlendedDataset:
    """Open the token files of `data_path` and blend them.

    Args:
        data_path: prefixes, or WEIGHT PREFIX pairs; without weights each file counts by its tokens
        split: name of the set ("train", "valid", ...), a coordinate of the shuffle
        fractions: (start, end) of the documents to use from each file, as fractions of 1
        data_config: cache directory, mapping and packing of the files
        tokenizer: data of another tokenizer is refused; packing needs it for the padding id

    Raises:
        DataError: a file is missing, damaged, too short, or made with another tokenizer
    """
    prefixes, weights = parse_data_path(data_path)
    cache = data_config.data_cache_path
    sources = []
    for prefix in prefixes:
        file = IndexedDataset(prefix, cache_path=cache, mmap_bin_files=data_config.mmap_bin_files)
        if tokenizer is not None:
            check_tokenizer(prefix, tokenizer)
        documents = range(round(fractions[0] * len(file)), round(fractions[1] * len(file)))
        if data_config.document_packing != "best-fit":
            sources.append(GPTDataset(file, documents, seq_length, seed, split, cache))
        elif tokenizer is None:
            raise DataError("packing fills samples with the end-of-document token: give --tokenizer-type")
        else:
            sources.append(PackedDataset(file, documents, seq_length, seed, tokenizer.eod, split))
    return merge_copies(sources, weights or [source.num_tokens for source in sources])


def merge_copies(sources: Sequence[DocumentDataset], weights: Sequence[float | int]) -> BlendedDataset:
    """Blend the sources; sources with the same documents become one with the sum of their weights.

    Copies would read the same samples in the same order, and the ledger, which identifies a source by its digest, could
    not count them separately. Weights are summed as the decimal fractions that they are written as.

    Raises:
        DataError: two sources have the same digest, but different tokens
    """
    if len(sources) == 1:
        return BlendedDataset(sources, weights)
    sources_by_digest: dict[str, DocumentDataset] = {}
    sums: dict[str, Fraction] = {}
    notes = []
    for source, weight in zip(sources, weights, strict=True):
        digest = source.digest
        first = sources_by_digest.setdefault(digest, source)
        if first is not source:
            if not first.same_documents(source):
                problem = f"{first.name} and {source.name} have documents of the same lengths and the same first tokens"
                raise DataError(
                    f"{problem}, so that a resume could not tell them apart; merge them (tools/merge_datasets.py)"
                )
            names = "" if first.name == source.name else f", as {first.name} and as {source.name}"
            notes.append(f"{first.name} is in the blend more than once{names}: it is read once, with the summed weight")
        sums[digest] = sums.get(digest, Fraction(0)) + as_written(weight)
    summed = [int(weight) if weight.denominator == 1 else float(weight) for weight in sums.values()]
    blend = BlendedDataset(list(sources_by_digest.values()), summed)
    blend.notes = notes
    return blend


def as_written(weight: float | int) -> Fraction:
    """Return the fraction that a weight's decimal digits stand for: 0.1 means 1/10.

    Raises DataError for a weight that is not a finite number > 0.
    """
    if not (isinstance(weight, int) or math.isfinite(weight)) or weight <= 0:
        raise DataError(f"blend weight {weight} is not a number > 0; drop the source instead")
    return Fraction(str(weight))
