"""Properties of samples and of their shuffle: every token once per epoch.

They hold for any documents, sequence length, seed and split.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from token_files import write_numbered

from megalite.data.datasets.base_dataset import Dataset
from megalite.data.datasets.data_path import split_fractions
from megalite.data.datasets.epoch_order import build_epoch
from megalite.data.datasets.gpt_dataset import GPTDataset, TokenStream
from megalite.data.datasets.packed_dataset import PackedDataset
from megalite.data.datasets.permutation import fold, permute
from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import IndexedDataset

PAD = 10**6


def first_sample(epoch: int, tokens: int, seq_length: int) -> int:
    """Return the number of samples that start before an epoch."""
    return -(-epoch * tokens // seq_length)


def epoch_stream(data: IndexedDataset, documents: range, key_lengths: NDArray[np.int32], key: int) -> NDArray[np.int64]:
    """Return the documents, concatenated in the order of the epoch, by definition."""
    order = build_epoch(key_lengths, key).order
    return np.concatenate([data.document(documents.start + int(d)) for d in order] or [np.empty(0, np.int64)])


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=25),
    seq_length=st.integers(1, 30),
    seed=st.integers(0, 2**31),
    first=st.integers(0, 3),
)
def test_every_token_is_used_once_per_epoch(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int, seed: int, first: int
) -> None:
    data = write_numbered(tmp_path_factory.mktemp("s") / "a", lengths)
    documents = range(min(first, len(lengths) - 1), len(lengths))
    tokens = sum(lengths[documents.start :])
    assume(tokens >= seq_length + 1)
    dataset = GPTDataset(data, documents, seq_length, seed)
    first_samples = [first_sample(e, tokens, seq_length) for e in range(4)]
    samples = dataset.samples(np.arange(first_samples[3]))

    own_counts = Counter(data.tokens[int(data.spans(np.array([documents.start]))[0][0]) :].tolist())
    used_counts = Counter(samples[:, :-1].reshape(-1).tolist())  # the inputs are windows that do not overlap
    excess = first_samples[3] * seq_length - 3 * tokens  # the last sample may run into a fourth epoch
    assert 0 <= excess < seq_length
    assert set(used_counts) == set(own_counts)
    assert sum(abs(used_counts[t] - 3) for t in own_counts) == excess


def test_samples_are_windows_of_the_token_stream(tmp_path: Path) -> None:
    lengths, seq_length = [3, 0, 11, 1, 7, 0, 5], 4
    data = write_numbered(tmp_path / "a", lengths)
    dataset = GPTDataset(data, range(len(lengths)), seq_length, 9)
    counts = [first_sample(e, sum(lengths), seq_length) for e in range(4)]
    keys, lengths_array = [fold(fold(9, "train"), "documents", e) for e in range(4)], np.array(lengths, np.int32)
    stream = np.concatenate([epoch_stream(data, range(7), lengths_array, key) for key in keys])
    for e in range(3):
        actual = {tuple(row) for row in dataset.samples(np.arange(counts[e], counts[e + 1])).tolist()}
        expected = {tuple(stream[j * 4 : j * 4 + 5].tolist()) for j in range(counts[e], counts[e + 1])}
        assert actual == expected  # the same windows, in another order


KINDS: dict[str, Callable[[IndexedDataset, int], Dataset]] = {
    "end to end": lambda data, seed: GPTDataset(data, range(1, len(data)), 9, seed),
    "packed": lambda data, seed: PackedDataset(data, range(1, len(data)), 9, seed, PAD),
}


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_pure_and_where_names_each_document(tmp_path: Path, kind: str) -> None:
    data = write_numbered(tmp_path / "a", [4, 0, 23, 6, 1, 30, 3])
    dataset, index = KINDS[kind](data, 3), np.arange(30)  # epochs of 7 and 9 samples
    samples = dataset.samples(index)
    assert not np.array_equal(samples, KINDS[kind](data, 4).samples(index))
    for i in np.random.default_rng(0).permutation(30).tolist():  # one by one, in any order
        fresh = KINDS[kind](data, 3)
        assert np.array_equal(fresh.samples(np.array([i]))[0], samples[i])
        for position, token in enumerate(samples[i].tolist()):
            location = fresh.locate(i, position)
            if token == PAD:
                assert location == f"{data.prefix}.bin, padding of sample {i}, position {position}"
                continue
            prefix, document, token_position = location.split(", ")
            assert prefix == data.prefix + ".bin"
            assert data.document(int(document.split()[1]))[int(token_position.split()[1])] == token


def test_too_little_data_is_refused(tmp_path: Path) -> None:
    for lengths in ([], [0, 0], [3], [2, 2]):
        with pytest.raises(DataError, match="tokens in .* documents, fewer than one sample of seq_length 4"):
            GPTDataset(write_numbered(tmp_path / "a", lengths), range(len(lengths)), 4, 1)
    dataset = GPTDataset(write_numbered(tmp_path / "a", [5]), range(1), 4, 1)
    assert dataset.samples(np.array([0])).tolist() == [[0, 1, 2, 3, 4]]


def test_order_of_billions_of_samples_needs_no_table() -> None:
    """The sizes are beyond 32 bits, and the order is computed."""
    tokens, seq_length = 15 * 10**12 + 7, 8192
    index = np.array([0, 2**31, 2**32 + 5, 10**10])
    stream = TokenStream(tokens, 1)
    starts = stream.sample_starts(index, seq_length)
    assert (starts // tokens).tolist() == [i * seq_length // tokens for i in index.tolist()]
    assert (starts % seq_length == 0).all()
    epochs, offsets, counts, _ = stream.token_ranges(starts, 5)
    assert np.array_equal(epochs, starts // tokens) and np.array_equal(offsets, starts % tokens)
    assert counts.tolist() == [5] * len(index)


@pytest.mark.parametrize(
    "split,documents,sizes",
    [
        *[("969, 30, 1", 1000, (969, 30, 1)), ("99,1,0", 200, (198, 2, 0)), ("949,50,1", 2000, (1898, 100, 2))],
        *[("0.5,0.5", 10, (5, 5, 0)), ("1", 5, (5, 0, 0)), ("2,1,1", 8, (4, 2, 2))],
        *[("'99,1,0'", 200, (198, 2, 0)), ('"3 1"', 8, (6, 2, 0))],
    ],
)
def test_split(split: str, documents: int, sizes: tuple[int, ...]) -> None:
    parts = split_fractions(split)
    ranges = [range(round(part[0] * documents), round(part[1] * documents)) for part in parts if part is not None]
    assert tuple(map(len, ranges)) == tuple(size for size in sizes if size)
    assert [part is not None for part in parts] == [size > 0 for size in sizes]
    assert [i for part in ranges for i in part] == list(range(documents))


@pytest.mark.parametrize("split", ["", "a,b,c", "1,2,3,4", "-1,2,3", "0,0,0", "nan", "1,inf"])
def test_bad_splits_are_refused(split: str) -> None:
    with pytest.raises(DataError, match="split="):
        split_fractions(split)


# ---- the stream of tokens alone, with sequence lengths that change
def inputs(stream: TokenStream, index: NDArray[np.int64], seq_length: int) -> list[tuple[int, int]]:
    """Return (epoch, token) of every input of the samples."""
    tokens = []
    epochs, offsets, counts, positions = stream.token_ranges(stream.sample_starts(index, seq_length), seq_length)
    for k in np.argsort(positions).tolist():
        tokens += [(int(epochs[k]), int(offsets[k]) + i) for i in range(int(counts[k]))]
    return tokens


@settings(max_examples=80)
@given(
    tokens=st.integers(1, 60),
    eras=st.lists(st.tuples(st.integers(1, 13), st.integers(0, 30)), max_size=5),
    last=st.integers(1, 13),
)
def test_every_token_of_a_stream_once_per_epoch(tokens: int, eras: list[tuple[int, int]], last: int) -> None:
    stream, used = TokenStream(tokens, 5), []
    for seq_length, samples in eras:
        used += inputs(stream, np.arange(samples), seq_length)
        stream = stream.advanced_by(samples, seq_length)
    index = np.arange(3 * tokens // last + 3)
    used += inputs(stream, index, last)
    starts = stream.sample_starts(index, last)
    columns = stream.token_ranges(starts, last + 1)
    epochs, offsets, counts, positions = (column[np.argsort(columns[3])] for column in columns)
    assert np.array_equal(np.cumsum(counts)[:-1], positions[1:]) and counts.sum() == len(starts) * (last + 1)
    pieces = [
        zip([e] * n, range(offset, offset + n), strict=True)
        for e, offset, n in zip(epochs, offsets, counts, strict=True)
    ]
    token_starts = (starts[:, None] + np.arange(last + 1)).reshape(-1)  # one start per token
    assert [*itertools.chain(*pieces)] == [
        *zip(*(column.tolist() for column in stream.token_ranges(token_starts, 1)[:2]), strict=True)
    ]
    assert len(set(used)) == len(used)
    # in whatever segment a sample of the last era starts, all segments before it are used up
    used_up = {token for token in used if token[0] < max(used)[0] - 1}
    assert used_up == {(epoch, token) for epoch in range(max(used)[0] - 1) for token in range(tokens)}


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda x: sum(x) > 0),
    eras=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=4),
    last=st.tuples(st.integers(1, 9), st.integers(0, 20)),
)
def test_started_documents_are_counted_exactly(
    lengths: list[int], eras: list[tuple[int, int]], last: tuple[int, int]
) -> None:
    sizes = np.array(lengths, np.int32)
    stream = TokenStream(int(sizes.sum()), 3)

    def starts_of(epoch: int) -> NDArray[np.int64]:
        return build_epoch(sizes, epoch).starts

    for seq_length, samples in [*eras, last]:
        used = set(inputs(stream, np.arange(samples), seq_length))
        # an empty document starts at the token after it, so several documents may start at one token
        expected = sum((epoch, int(s)) in used for epoch in {e for e, _ in used} for s in starts_of(epoch)[:-1])
        middle = samples // 2
        counts = [
            stream.count_document_starts(range(*part), seq_length, starts_of)
            for part in ((0, middle), (middle, samples))
        ]
        assert sum(counts) == expected
        stream = stream.advanced_by(samples, seq_length)


def test_shuffle_stays_within_an_epoch() -> None:
    starts = TokenStream(97, 11).sample_starts(np.arange(26), 8)  # 13 samples begin in epoch 0, 12 in epoch 1
    assert starts.tolist() != sorted(starts.tolist())
    assert sorted(starts[:13].tolist()) == list(range(0, 104, 8))
    assert sorted(starts[13:25].tolist()) == list(range(104, 200, 8))
    remaining = TokenStream(10_000, 1).advanced_by(300, 8).sample_starts(np.arange(300), 16)
    assert not np.array_equal(remaining, np.sort(remaining)) and len(set(remaining.tolist())) == 300


# ---- the computed shuffle is a bijection, depends on its key, and is close to uniform
GOLDEN_8 = [0, 4, 2, 5, 6, 3, 1, 7]
GOLDEN_LARGE = [647831989802, 633655622351, 930786388621]


@settings(max_examples=80)
@given(n=st.one_of(st.integers(0, 300), st.integers(300, 40_000)), key=st.integers(0, 2**64 - 1))
def test_permutation_is_a_random_access_bijection(n: int, key: int) -> None:
    shuffled = permute(np.arange(n), n, key)
    assert np.array_equal(np.sort(shuffled), np.arange(n))
    assert np.array_equal(permute(np.arange(n // 3, n), n, key), shuffled[n // 3 :])


@pytest.mark.parametrize("n", [3, 1_000_000, 1_000_001, 1_002_000, 1_002_001])
def test_permutation_is_a_bijection_around_squares(n: int) -> None:
    assert np.array_equal(np.bincount(permute(np.arange(n), n, 11)), np.ones(n))


def test_permutation_never_changes() -> None:
    """A run resumed with another version needs the same order, so these numbers are part of the format."""
    assert permute(np.arange(8), 8, fold(1234, "train")).tolist() == GOLDEN_8
    assert permute(np.array([0, 1, 10**12 - 1]), 10**12, 99).tolist() == GOLDEN_LARGE


@pytest.mark.parametrize("n", [3, 4])
def test_permutation_orders_are_equally_likely(n: int) -> None:
    keys = 2400
    orders = Counter(tuple(permute(np.arange(n), n, fold("uniform", k)).tolist()) for k in range(keys))
    cells = 6 if n == 3 else 24
    expected = keys / cells
    chi_square = sum((count - expected) ** 2 / expected for count in orders.values()) + (cells - len(orders)) * expected
    assert chi_square < 2.5 * (cells - 1)  # mean of the distribution: cells - 1


def test_permutation_scatters_neighbors() -> None:
    n = 200_000
    shuffled = permute(np.arange(n), n, 3).astype(np.float64)
    assert abs(np.corrcoef(shuffled[:-1], shuffled[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(shuffled, np.arange(n))[0, 1]) < 0.02


def test_permutation_refuses_an_index_outside() -> None:
    for bad in (-1, 10):
        with pytest.raises(IndexError, match="outside 0..9"):
            permute(np.array([bad]), 10, 0)
