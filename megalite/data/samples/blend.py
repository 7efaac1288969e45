"""From --data-path to one endless dataset: token files mixed by weight, within one sample of it at every prefix.

After n samples, source k has given floor(w_k n) or ceil(w_k n) of them, exactly, for every n. Its j-th sample may
come when w_k n > j and must have come when w_k n >= j + 1; among the sources that may, the one that must soonest is
next (earliest deadline first: with these windows it never misses one; Still, 1979, "quota methods").

Weights are exact fractions, so the order repeats: 0.3 and 0.7 after 10 samples. One period is computed, as far as it is
needed. A period longer than PERIOD samples (weights that are token counts) is cut there and repeated; the counts are
then exact up to n = PERIOD, and off by less than 1 + n/PERIOD beyond.
"""

import heapq
import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.options import DataConfig
from megalite.config.pattern import read_split
from megalite.data.errors import DataError
from megalite.data.files.indexed import IndexedDataset
from megalite.data.files.missing_files import is_number
from megalite.data.files.sidecar import check_tokenizer, read_info
from megalite.data.samples.gpt_dataset import GptDataset
from megalite.data.samples.packing import PackedDataset
from megalite.data.samples.permutation import Ints
from megalite.data.samples.source import Source
from megalite.data.tokenizers.tokenizer import Tokenizer

PERIOD = 1_000_000  # weights with up to six decimals are exact


class BlendOrder:
    """`at(i)` -> which source gives sample i of the blend, and which of its samples that is."""

    def __init__(self, weights: Sequence[float | int]):
        if not weights:
            raise DataError("a blend needs at least one source")
        for weight in weights:
            if not (math.isfinite(weight) and weight > 0):
                raise DataError(f"blend weight {weight} is not a number > 0; drop the source instead")
        exact = [Fraction(str(weight)) for weight in weights]  # 0.1 means 1/10
        total = sum(exact)
        shares = [weight / total for weight in exact]
        self.denominator = math.lcm(*(share.denominator for share in shares))
        self.numerators = [share.numerator * (self.denominator // share.denominator) for share in shares]
        self.period = min(self.denominator, PERIOD)
        self._source = np.empty(0, np.int32)
        self._rank = np.empty(0, np.int32)  # how many times the source appears earlier in the period
        self._counts = [0] * len(weights)  # up to the end of the computed part
        self._ready: list[tuple[int, int]] = []  # (deadline, source) of sources that may go
        self._waiting = [(1, k) for k in range(len(weights))]  # (prefix length from which the source may go, source)

    def at(self, index: NDArray[Any]) -> tuple[Ints, Ints]:
        """(source, sample number within it) for each blend sample in `index`."""
        index = np.asarray(index, np.int64)
        periods, within = np.divmod(index, self.period)
        self._extend(self.period if periods.any() else int(within.max(initial=-1)) + 1)
        source = self._source[within].astype(np.int64)  # beyond a period all of it is known, and so its counts
        return source, self._rank[within] + periods * np.asarray(self._counts, np.int64)[source]

    def counts(self, samples: int) -> list[int]:
        """How many of the first `samples` samples each source gives."""
        periods, within = divmod(samples, self.period)
        self._extend(self.period if periods else within)
        counts = np.bincount(self._source[:within], minlength=len(self._counts))
        return (counts + periods * np.asarray(self._counts, np.int64)).tolist()

    def _extend(self, length: int) -> None:
        if length <= (done := len(self._source)):
            return
        length = min(self.period, max(length, 2 * done, 4096))
        sources, ranks = [], []
        counts, ready, waiting = self._counts, self._ready, self._waiting
        for n in range(done + 1, length + 1):  # prefix length after this choice
            while waiting and waiting[0][0] <= n:
                _, k = heapq.heappop(waiting)
                deadline = -(-(counts[k] + 1) * self.denominator // self.numerators[k])
                heapq.heappush(ready, (deadline, k))
            _, k = heapq.heappop(ready)
            sources.append(k)
            ranks.append(counts[k])
            counts[k] += 1
            heapq.heappush(waiting, (counts[k] * self.denominator // self.numerators[k] + 1, k))
        self._source = np.concatenate([self._source, np.array(sources, np.int32)])
        self._rank = np.concatenate([self._rank, np.array(ranks, np.int32)])


class Blend:
    """Samples of several datasets, interleaved by a BlendOrder. `begin`: its first sample, counted in the run."""

    def __init__(self, datasets: Sequence[Source], weights: Sequence[float | int]):
        self.datasets, self.weights, self.order = list(datasets), list(weights), BlendOrder(weights)
        self.seq_length, self.begin = datasets[0].seq_length, 0

    def _by_source(self, index: Ints) -> Iterator[tuple[Source, Ints, Ints]]:
        """(source, its rows among `index`, its own sample numbers)."""
        sources, numbers = self.order.at(index - self.begin)
        for k in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == k)
            yield self.datasets[k], rows, numbers[rows]

    def samples(self, index: Ints) -> Ints:
        out = np.empty((len(index), self.seq_length + 1), np.int64)
        for source, rows, numbers in self._by_source(index):
            out[rows] = source.samples(numbers)
        return out

    def layout(self, index: Ints) -> list[NDArray[np.int32]] | None:
        layouts: dict[int, NDArray[np.int32]] = {}
        for source, rows, numbers in self._by_source(index):
            pieces = source.layout(numbers)
            if pieces is None:
                return None  # the sources of a blend are all packed, or none
            layouts |= dict(zip(rows.tolist(), pieces, strict=True))
        return [layouts[row] for row in range(len(layouts))]

    def where(self, i: int, position: int) -> str:
        source, number = (int(a[0]) for a in self.order.at(np.array([i - self.begin])))
        return self.datasets[source].where(number, position)

    def describe(self, samples: int) -> str:
        if len(self.datasets) == 1:
            return self.datasets[0].describe(samples)
        total = sum(self.weights)
        shares = [(weight / total, dataset) for weight, dataset in zip(self.weights, self.datasets, strict=True)]
        return "\n".join(f"{share:.4f} of {dataset.describe(round(samples * share))}" for share, dataset in shares)


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


def split_parts(split: str) -> list[tuple[float, float] | None]:
    """Training, validation and test: consecutive parts of 1 in proportion to three numbers; None for 0.

    >>> split_parts("3, 1")
    [(0.0, 0.75), (0.75, 1.0), None]
    """
    try:
        parts = read_split(split)
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
) -> Blend:
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
            sources.append(GptDataset(file, documents, seq_length, seed, split, cache))
        elif tokenizer is None:
            raise DataError("packing fills samples with the end-of-document token: give --tokenizer-type")
        else:
            sources.append(PackedDataset(file, documents, seq_length, seed, tokenizer.eod, split))
    return Blend(sources, weights or [source.num_tokens for source in sources])


BEGINS_SET = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)=(.*)", re.DOTALL)


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
    begins = [BEGINS_SET.fullmatch(item) for item in items]
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


def sets_of_each(prefixes: Sequence[str], names: Sequence[str] | None = None) -> dict[str, list[str]]:
    """--multiple-validation-sets: each prefix is a set, called as --validation-set-names says, else by its file name.

    >>> sets_of_each(["data/wiki_text_document", "data/code"])
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
        info = read_info(prefix)
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
