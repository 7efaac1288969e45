"""How documents become samples: pure functions from integers to places in the token file.

    epoch e    documents in the order of a shuffle of (seed, e), laid end to end: T tokens
    stream     epoch 0 | epoch 1 | epoch 2 ...            one endless line of tokens
    sample j   tokens j*S .. j*S + S of the stream        S inputs, and the S labels one token ahead
    index i    the samples that begin in one epoch, shuffled among themselves

    stream  |--doc 7--|---doc 2---|-doc 9-|----- ...      S = 8
    sample  0|-------|1|-------|2|-------|                each token is a label once (the very first never)

Every token is used exactly once per epoch, document borders and epoch borders included. Sample i depends on (seed,
lengths, S) alone: not on how many samples a run asks for, so a run can be extended. Only the two epochs in use
exist, at 12 bytes per document (`Epoch`); no table of samples is kept: a binary search in `starts` finds one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.indexed import DataError
from megalite.data.permutation import fold, permutation, permute


@dataclass(frozen=True)
class Epoch:
    """One pass over the documents: order [D] of document numbers, starts [D + 1] in tokens of the epoch."""

    order: NDArray[Any]
    starts: NDArray[np.int64]


def split_ranges(split: str, num_documents: int) -> list[range]:
    """Documents of training, validation and test: consecutive parts in proportion to three numbers.

    >>> split_ranges("969, 30, 1", 1000)
    [range(0, 969), range(969, 999), range(999, 1000)]
    """
    texts = [part for part in re.split(r"[,/\s]+", split.strip()) if part]
    try:
        parts = [float(text) for text in texts]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or min(parts) < 0 or not 0 < sum(parts) < float("inf"):
        raise DataError(f"split={split!r} is not up to three numbers >= 0, comma-separated; use for example 969,30,1")
    parts += [0.0] * (3 - len(parts))
    borders = [round(sum(parts[:k]) / sum(parts) * num_documents) for k in range(4)]
    return [range(a, b) for a, b in zip(borders, borders[1:], strict=False)]


def build_epoch(lengths: NDArray[Any], key: int) -> Epoch:
    """Shuffle the documents of `lengths` (numbered from 0) by `key`."""
    n, a = len(lengths), 0
    order = np.empty(n, np.int32 if n < 1 << 31 else np.int64)
    starts = np.zeros(n + 1, np.int64)
    for part in permutation(n, key):
        b = a + len(part)
        order[a:b] = part
        ends = starts[a + 1 : b + 1]
        ends[:] = np.take(lengths, part)
        ends[0] += starts[a]
        np.cumsum(ends, out=ends)
        a = b
    return Epoch(order, starts)


def first_sample(epoch: int, tokens: int, seq_length: int) -> int:
    """Number of samples that begin before `epoch`, when each epoch has `tokens` tokens."""
    return -(-epoch * tokens // seq_length)


def place(index: NDArray[Any], tokens: int, seq_length: int, seed_key: int) -> tuple[NDArray[np.int64], ...]:
    """(epoch, first token in that epoch) of the samples `index`. They end seq_length tokens later."""
    index = np.asarray(index, np.int64)
    epoch = index * seq_length // tokens
    offset = np.empty_like(index)
    for e in np.unique(epoch).tolist():
        here = epoch == e
        first = first_sample(e, tokens, seq_length)
        count = first_sample(e + 1, tokens, seq_length) - first
        shuffled = permute(index[here] - first, count, fold(seed_key, "samples", e))
        offset[here] = (first + shuffled) * seq_length - e * tokens
    return epoch, offset
