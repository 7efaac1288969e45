"""From --data-path to one endless dataset: several token files, mixed by weight."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.config.pattern import read_split
from megalite.data.errors import DataError
from megalite.data.files.indexed import IndexedDataset
from megalite.data.files.missing_files import is_number
from megalite.data.files.sidecar import check_tokenizer
from megalite.data.samples.blend_order import BlendOrder
from megalite.data.samples.gpt_dataset import GptDataset
from megalite.data.samples.packed_dataset import PackedDataset
from megalite.data.samples.source import Source
from megalite.data.tokenizers.tokenizer import Tokenizer


class Blend:
    """Samples of several datasets, interleaved so that every prefix has the weights (blend_order.py). `begin`: the
    number of its first sample, where a run has read others before."""

    def __init__(self, datasets: Sequence[Source], weights: Sequence[float | int]):
        self.datasets, self.weights, self.order = list(datasets), list(weights), BlendOrder(weights)
        self.seq_length, self.begin = datasets[0].seq_length, 0

    def _by_source(self, index: NDArray[np.int64]) -> Iterator[tuple[Source, NDArray[np.int64], NDArray[np.int64]]]:
        """(source, its rows among `index`, its own sample numbers)."""
        sources, numbers = self.order.at(index - self.begin)
        for k in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == k)
            yield self.datasets[k], rows, numbers[rows]

    def samples(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        out = np.empty((len(index), self.seq_length + 1), np.int64)
        for source, rows, numbers in self._by_source(index):
            out[rows] = source.samples(numbers)
        return out

    def layout(self, index: NDArray[np.int64]) -> list[NDArray[np.int32]] | None:
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


@dataclass(frozen=True)
class Reading:
    """How token files are read.

    cache_path  directory for orders of epochs and for files fetched from URLs; None: orders stay in memory
    tokenizer   refuses data of another one; packing needs it, for the id that fills
    packed      best-fit packing of whole documents (packing.py) instead of one line of tokens
    """

    cache_path: str | Path | None = None
    tokenizer: Tokenizer | None = None
    packed: bool = False
    mmap_bin_files: bool = True


def build_blend(
    data_path: Sequence[str],
    seq_length: int,
    seed: int,
    split: str,
    part: tuple[float, float] = (0.0, 1.0),
    how: Reading | None = None,
) -> Blend:
    """The files of `data_path`, mixed.

    data_path  prefixes, or weight prefix pairs; without weights each file counts by its tokens
    split      its name, a coordinate of the shuffle
    part       begin and end of the documents taken of each file, as parts of 1
    """
    prefixes, weights = parse_data_path(data_path)
    how, sources = how or Reading(), []
    for prefix in prefixes:
        file = IndexedDataset(prefix, cache_path=how.cache_path, mmap_bin_files=how.mmap_bin_files)
        if how.tokenizer is not None:
            check_tokenizer(prefix, how.tokenizer)
        documents = range(round(part[0] * len(file)), round(part[1] * len(file)))
        if not how.packed:
            sources.append(GptDataset(file, documents, seq_length, seed, split, how.cache_path))
        elif how.tokenizer is None:
            raise DataError("packing fills samples with the end-of-document token: give --tokenizer-type")
        else:
            sources.append(PackedDataset(file, documents, seq_length, seed, how.tokenizer.eod, split))
    return Blend(sources, weights or [source.num_tokens for source in sources])
