"""From --data-path to one endless dataset: token files mixed by weight, within one sample of it at every prefix.

After n samples, source k has given floor(w_k n) or ceil(w_k n) of them, exactly, for every n. Its j-th sample may
come when w_k n > j and must have come when w_k n >= j + 1; among the sources that may, the one that must soonest is
next (earliest deadline first: with these windows it never misses one; Still, 1979, "quota methods").

Weights are exact fractions, so the order repeats: 0.3 and 0.7 after 10 samples. One period is computed, as far as it is
needed. A period of more than MAX_PERIOD samples (weights that are token counts) is computed block by block, so that a
sample far away costs one block and a few operations for each block before it (`_next_boundary`).
"""

import bisect
import heapq
import itertools
import math
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.option_parsers import parse_split
from megalite.config.options import DataConfig
from megalite.data.datasets.base_dataset import DocumentDataset
from megalite.data.datasets.gpt_dataset import GPTDataset
from megalite.data.datasets.packed_dataset import PackedDataset
from megalite.data.datasets.permutation import Ints
from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import IndexedDataset
from megalite.data.files.missing_files import is_number
from megalite.data.files.sidecar import check_tokenizer, read_sidecar
from megalite.data.tokenizers.tokenizer import Tokenizer

MAX_PERIOD = 1_000_000  # samples of a block; weights with up to six decimals repeat within it


@dataclass
class _Block:
    """Samples `begin` .. `begin` + length of the order, computed up to len(source).

    before  samples that each source gives before the block
    after   samples that each source has given at its end; None: whatever the order comes to
    source  of each sample
    rank    how many samples of its source come before it in the order
    """

    begin: int
    length: int
    before: list[int]
    after: list[int] | None
    source: NDArray[np.int32]
    rank: Ints


class BlendSchedule:
    """`at(i)` -> which source gives sample i of the blend, and which of its samples that is."""

    def __init__(self, weights: Sequence[float | int]):
        if not weights:
            raise DataError("a blend needs at least one source")
        exact = [as_written(weight) for weight in weights]
        total = sum(exact)
        shares = [weight / total for weight in exact]
        self.denominator = math.lcm(*(share.denominator for share in shares))
        self.numerators = [share.numerator * (self.denominator // share.denominator) for share in shares]
        self.repeats = (
            self.denominator <= MAX_PERIOD
        )  # the first block is the period, behind which the order begins again
        self.block = min(self.denominator, MAX_PERIOD)  # samples
        self._boundaries = [[0] * len(weights)]  # samples of each source before each block
        self._first = self._open_block(0, self._boundaries[0], None)
        self._other: _Block | None = None  # the last one that was used, besides the first
        self._lock = threading.Lock()  # the prefetch thread and the main one may meet here

    def sources_at(self, index: NDArray[Any]) -> tuple[Ints, Ints]:
        """(source, sample number within it) for each blend sample in `index`."""
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
        """How many of the first `samples` samples each source gives."""
        number, within = divmod(samples, self.block)
        with self._lock:
            block, shift = self._block(number)
            self._extend(block, within)
            counts = np.bincount(block.source[:within], minlength=len(block.before))
            return (counts + np.asarray(block.before, np.int64) + shift).tolist()

    def _block(self, number: int) -> tuple[_Block, Ints]:
        """(the block `number`, what to add to its ranks)."""
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
        begin = number * self.block
        if self._other is None or self._other.begin != begin:
            self._other = self._open_block(begin, *self._boundaries[number : number + 2])
        return self._other, np.zeros(sources, np.int64)

    def _next_boundary(self) -> list[int]:
        """How many samples each source has given at the end of the next block, n.

        A source must have given floor(w n) and may have given ceil(w n), so at most one sample of each is open. Open
        samples are taken in the order of their deadlines, as many as there are places left. But a sample that may only
        come from place r of the block on needs a place there: of the samples that may not come before r, at most as
        many are taken as places from r on are left by those that have to come there, which are at least

            w (n - r + 1), summed over the sources whose open sample may come before r,
            + the fraction of w n, summed over the others

        Then some order of the block fits every window (Hall's theorem), and the earliest deadline first finds one.
        """
        before, D = self._boundaries[-1], self.denominator
        begin = (len(self._boundaries) - 1) * self.block
        n = begin + self.block
        due = [N * n // D for N in self.numerators]
        fractions = [N * n % D for N in self.numerators]  # times D
        release = {k: self._release(k, due[k]) for k, fraction in enumerate(fractions) if fraction}
        places: list[int] = []
        limits: list[int] = []  # for each of `places`, how many samples may be taken that may not come before it
        early, late = 0, sum(fractions)
        for place, group in itertools.groupby(sorted(release, key=release.__getitem__), key=release.__getitem__):
            if place > begin + 1:
                places.append(place)
                limits.append(-(-(early * (n - place + 1) + late) // D))
            for k in group:
                early += self.numerators[k]
                late -= fractions[k]
        room = np.array(limits, np.int64)
        after = list(map(max, before, due))
        left = n - sum(after)
        for k in sorted((k for k in release if after[k] == due[k]), key=lambda k: (self._deadline(k, due[k]), k)):
            if left == 0:
                break
            concerned = room[: bisect.bisect_right(places, release[k])]
            if concerned.all():
                concerned -= 1
                after[k] += 1
                left -= 1
        return after

    def _release(self, k: int, j: int) -> int:
        """The shortest prefix that may hold sample `j` of source `k`."""
        return j * self.denominator // self.numerators[k] + 1

    def _deadline(self, k: int, j: int) -> int:
        """The shortest prefix that must hold sample `j` of source `k`."""
        return -(-(j + 1) * self.denominator // self.numerators[k])

    def _open_block(self, begin: int, before: list[int], after: list[int] | None) -> _Block:
        return _Block(begin, self.block, before, after, np.empty(0, np.int32), np.empty(0, np.int64))

    def _extend(self, block: _Block, length: int) -> None:
        """Compute the block up to `length` samples."""
        if length <= (done := len(block.source)):
            return
        length = min(block.length, max(length, 2 * done, 4096))
        counts = (np.bincount(block.source, minlength=len(block.before)) + np.asarray(block.before, np.int64)).tolist()
        last: Sequence[float] = [math.inf] * len(counts) if block.after is None else block.after
        end = math.inf if block.after is None else block.begin + block.length
        release, deadline = self._release, self._deadline
        ready: list[tuple[float, int]] = []  # (deadline, source) of sources that may go
        waiting = [(release(k, j), k) for k, j in enumerate(counts) if j < last[k]]  # from which prefix length they may
        heapq.heapify(waiting)
        sources, ranks = [], []
        for n in range(block.begin + done + 1, block.begin + length + 1):  # prefix length after this choice
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
    """Samples of several datasets, interleaved by a BlendOrder. `begin`: its first sample, counted in the run."""

    def __init__(self, datasets: Sequence[DocumentDataset], weights: Sequence[float | int]):
        self.datasets, self.weights, self.order = list(datasets), list(weights), BlendSchedule(weights)
        self.seq_length, self.begin = datasets[0].seq_length, 0
        self.notes: list[str] = []  # for the log

    def _by_source(self, index: Ints) -> Iterator[tuple[DocumentDataset, Ints, Ints]]:
        """(source, its rows among `index`, its own sample numbers)."""
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
        layouts: dict[int, NDArray[np.int32]] = {}
        for source, rows, numbers in self._by_source(index):
            pieces = source.piece_lengths(numbers)
            if pieces is None:
                return None  # the sources of a blend are all packed, or none
            layouts |= dict(zip(rows.tolist(), pieces, strict=True))
        return [layouts[row] for row in range(len(layouts))]

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
                none = f"none of the {samples:,} samples comes from {source.name}"
                lines.append(
                    f"WARNING: {none}: its weight is worth {float(quota):.2g} of one; raise it or drop the source"
                )
        return lines

    def _shares(self) -> list[Fraction]:
        return [Fraction(numerator, self.order.denominator) for numerator in self.order.numerators]


def parse_data_path(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """(prefixes, weights); weights None when only prefixes are given.

    >>> parse_data_path(["0.3", "a", "0.7", "b"])
    (['a', 'b'], [0.3, 0.7])
    """
    if not data_path:
        raise DataError("data_path is empty; give --data-path PREFIX, or WEIGHT PREFIX pairs")
    if not is_number(data_path[0]):
        return list(data_path), None
    if len(data_path) % 2 or not all(is_number(text) for text in data_path[::2]):
        given = f"data_path={' '.join(data_path)}"
        raise DataError(f"{given} is not a list of WEIGHT PREFIX pairs; give each prefix a weight, or none")
    return list(data_path[1::2]), [float(text) for text in data_path[::2]]


def split_fractions(split: str) -> list[tuple[float, float] | None]:
    """Training, validation and test: consecutive parts of 1 in proportion to three numbers; None for 0.

    >>> split_fractions("3, 1")
    [(0.0, 0.75), (0.75, 1.0), None]
    """
    try:
        parts = parse_split(split)
    except ValueError as error:
        raise DataError(f"split={split!r} {error}") from None
    borders = [sum(parts[:k]) / sum(parts) for k in range(4)]
    return [(a, b) if a < b else None for a, b in zip(borders, borders[1:], strict=False)]


def build_blend(
    data_path: Sequence[str],
    seq_length: int,
    seed: int,
    split: str,
    part: tuple[float, float] = (0.0, 1.0),
    how: DataConfig = DataConfig(),  # noqa: B008 (frozen)
    tokenizer: Tokenizer | None = None,
) -> BlendedDataset:
    """The files of `data_path`, mixed.

    data_path  prefixes, or weight prefix pairs; without weights each file counts by its tokens
    split      its name, a coordinate of the shuffle
    part       begin and end of the documents taken of each file, as parts of 1
    tokenizer  refuses data of another one; packing needs it, for the id that fills
    """
    (prefixes, weights), cache, sources = parse_data_path(data_path), how.data_cache_path, []
    for prefix in prefixes:
        file = IndexedDataset(prefix, cache_path=cache, mmap_bin_files=how.mmap_bin_files)
        if tokenizer is not None:
            check_tokenizer(prefix, tokenizer)
        documents = range(round(part[0] * len(file)), round(part[1] * len(file)))
        if how.document_packing != "best-fit":
            sources.append(GPTDataset(file, documents, seq_length, seed, split, cache))
        elif tokenizer is None:
            raise DataError("packing fills samples with the end-of-document token: give --tokenizer-type")
        else:
            sources.append(PackedDataset(file, documents, seq_length, seed, tokenizer.eod, split))
    return merge_copies(sources, weights or [source.num_tokens for source in sources])


def merge_copies(sources: Sequence[DocumentDataset], weights: Sequence[float | int]) -> BlendedDataset:
    """Blend the sources, those with the same documents as one that has the sum of their weights.

    Each would read the same samples in the same order, and the ledger, which knows a source by its digest, could not
    count them apart. The weights are summed as the decimal fractions that they are written as.
    """
    if len(sources) == 1:
        return BlendedDataset(sources, weights)
    kept: dict[str, DocumentDataset] = {}
    sums: dict[str, Fraction] = {}
    notes = []
    for source, weight in zip(sources, weights, strict=True):
        digest = source.digest
        if (first := kept.setdefault(digest, source)) is not source:
            if not first.same_documents(source):
                alike = f"{first.name} and {source.name} have documents of the same lengths and the same first tokens"
                raise DataError(
                    f"{alike}, so that a resume could not tell them apart; merge them (tools/merge_datasets.py)"
                )
            where = "" if first.name == source.name else f", as {first.name} and as {source.name}"
            notes.append(f"{first.name} is in the blend more than once{where}: it is read once, with the summed weight")
        sums[digest] = sums.get(digest, Fraction(0)) + as_written(weight)
    blend = BlendedDataset(list(kept.values()), [int(w) if w.denominator == 1 else float(w) for w in sums.values()])
    blend.notes = notes
    return blend


def as_written(weight: float | int) -> Fraction:
    """Return the fraction that a weight's decimal digits stand for: 0.1 means 1/10."""
    if not (isinstance(weight, int) or math.isfinite(weight)) or weight <= 0:
        raise DataError(f"blend weight {weight} is not a number > 0; drop the source instead")
    return Fraction(str(weight))


_NAMED_SET = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)=(.*)", re.DOTALL)


def parse_named_sets(items: Sequence[str], unnamed: str = "valid") -> dict[str, list[str]]:
    """The data path of every set, by name and in order; without names one set called `unnamed`.

    --valid-data-path 0.3 a 0.7 b                       Megatron's form: one set without a name
    --valid-data-path wiki=data/wiki code=0.3 a 0.7 b   NAME= begins a set, what follows belongs to it
    valid_data_path = ["wiki=", "data/wiki", "code=", "0.3", "a", "0.7", "b"]     the same in TOML; either spelling

    Nothing needs quotes, and the shell can complete a file name after "wiki= ". A name is letters, digits, "_", "-",
    "."; so data/lang=en/a is a path, and lang=en/a is one when written ./lang=en/a.

    >>> parse_named_sets(["wiki=data/wiki", "code=0.3", "a", "0.7", "b"])
    {'wiki': ['data/wiki'], 'code': ['0.3', 'a', '0.7', 'b']}
    >>> parse_named_sets(["0.3", "a", "0.7", "data/lang=en/b"])
    {'valid': ['0.3', 'a', '0.7', 'data/lang=en/b']}
    """
    option = f"valid_data_path={' '.join(items)}"
    if not items:
        raise DataError("valid_data_path is empty; give a prefix, WEIGHT PREFIX pairs, or NAME=PREFIX for named sets")
    begins = [_NAMED_SET.fullmatch(item) for item in items]
    if not any(begins):
        if nameless := [item for item in items if item.startswith("=")]:
            raise DataError(f"{option}: {nameless[0]!r} has no name; write NAME=PREFIX without spaces around '='")
        return {unnamed: list(items)}
    if begins[0] is None:
        raise DataError(f"{option}: {items[0]!r} belongs to no set; begin with NAME=, or name none (./ marks a path)")
    sets: dict[str, list[str]] = {}
    name = ""
    for item, begin in zip(items, begins, strict=True):
        if begin is None:
            sets[name].append(item)
            continue
        name, first = begin.groups()
        if name in sets:
            raise DataError(f"{option}: two sets are called {name!r}; give each its own name")
        sets[name] = [first] if first else []
    for name, path in sets.items():
        if not path:
            raise DataError(f"{option}: set {name!r} has no data; write {name}=PREFIX")
    return sets


def one_set_per_prefix(prefixes: Sequence[str], names: Sequence[str] | None = None) -> dict[str, list[str]]:
    """--multiple-validation-sets: each prefix is a set, called as --validation-set-names says, else by its file name.

    >>> one_set_per_prefix(["data/wiki_text_document", "data/code"])
    {'wiki': ['data/wiki_text_document'], 'code': ['data/code']}
    """
    named = list(names) if names else [Path(prefix).name.removesuffix("_text_document") for prefix in prefixes]
    if len(named) != len(prefixes):
        raise DataError(f"validation_set_names={' '.join(named)}: {len(named)} names for {len(prefixes)} sets")
    for prefix in prefixes:
        if is_number(prefix):
            raise DataError(f"multiple_validation_sets takes prefixes without weights, not {prefix}; drop the weight")
    for name in named:
        if named.count(name) > 1:
            raise DataError(f"two validation sets are called {name!r}; give --validation-set-names, all different")
    return {name: [prefix] for name, prefix in zip(named, prefixes, strict=True)}


def bytes_per_token(prefixes: Sequence[str], weights: Sequence[float] | None = None) -> float | None:
    """UTF-8 bytes of text per token of a set, from "bytes" and "tokens" in each prefix.json; None where one lacks them.
    `weights`: shares of the set's samples; without them each file counts by its tokens. The average is over whole
    files; a part of one (--split) may differ a little."""
    sizes = []
    for prefix in prefixes:
        info = read_sidecar(prefix)
        if info is None or "bytes" not in info:
            return None
        counts = info["bytes"], info.get("tokens")
        if not all(type(count) is int and count > 0 for count in counts):
            raise DataError(f"{prefix}.json: bytes={counts[0]!r} and tokens={counts[1]!r} must both be integers > 0")
        sizes.append(counts)
    shares = weights if weights is not None else [tokens for _, tokens in sizes]
    total = sum(share * size / tokens for share, (size, tokens) in zip(shares, sizes, strict=True))
    return total / sum(shares)


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Bits that the model needs for a byte of text, when a token costs `loss` nats on average: it compares models whose
    tokenizers differ, since the loss per token depends on how much text a token is.

    >>> round(bits_per_byte(2.772588722239781, 4.0), 6)  # 4 bits for 4 bytes
    1.0
    """
    return loss / (bytes_per_token * math.log(2))
