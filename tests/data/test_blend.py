"""Blends: counts match the weights at every prefix, samples are random access, and options make the blend.

The options are --data-path, --split and the named validation sets.
"""

import doctest
import hashlib
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from token_files import write_numbered

from megalite.data.datasets import blended_dataset as blends
from megalite.data.datasets.base_dataset import Dataset
from megalite.data.datasets.bits_per_byte import bits_per_byte, bytes_per_token
from megalite.data.datasets.blended_dataset import BlendedDataset, BlendSchedule, build_blend
from megalite.data.datasets.data_path import one_set_per_prefix, parse_data_path, parse_named_sets
from megalite.data.datasets.mock_dataset import MockDataset
from megalite.data.errors import DataError

STORED_ORDERS = [
    ([0.3, 0.7], "10bf4d05840b90b5"),
    ([1, 2, 4.5], "73a3039ac657def9"),
    ([953560, 254000000000], "96f3f15222e6c8e1"),
    ([0.25, 0.25, 0.5], "0313b444fed5685f"),
    ([123456789, 987654321, 1000003], "e2207d482440e4cb"),
]
WEIGHTS = st.one_of(st.floats(1e-4, 1.0), st.integers(1, 10**12), st.sampled_from([0.1, 0.2, 0.3, 0.7, 1.0, 1e-6]))


@settings(max_examples=60)
@given(weights=st.lists(WEIGHTS, min_size=1, max_size=8))
def test_blend_counts_match_weights_at_every_prefix(weights: list[float]) -> None:
    n = 600
    source, number = BlendSchedule(weights).sources_at(np.arange(n))
    exact = [Fraction(str(w)) for w in weights]
    total = sum(exact)
    for k, weight in enumerate(exact):
        counts = np.cumsum(source == k).tolist()
        for length in range(1, n + 1):
            quota = weight / total * length
            assert math.floor(quota) <= counts[length - 1] <= math.ceil(quota)
        assert number[source == k].tolist() == list(range(counts[-1]))  # each sample of the source once, in order


def test_blend_small_example() -> None:
    source, number = BlendSchedule([0.3, 0.7]).sources_at(np.arange(10))
    assert source.tolist() == [1, 1, 0, 1, 1, 0, 1, 1, 0, 1]
    assert number.tolist() == [0, 1, 0, 2, 3, 1, 4, 5, 2, 6]


def test_blend_samples_are_random_access() -> None:
    weights = [1, 2, 4.5]
    order = BlendSchedule(weights)
    expected = BlendSchedule(weights).sources_at(np.arange(4000))
    for i in (3999, 15, 0, 16, 2500):  # any order, from a fresh object or not
        for schedule in (order, BlendSchedule(weights)):
            source, number = schedule.sources_at(np.array([i]))
            assert (source[0], number[0]) == (expected[0][i], expected[1][i])
    index = 10**12 + 3
    source, number = order.sources_at(np.array([index]))
    assert abs(number[0] - index * [2 / 15, 4 / 15, 9 / 15][source[0]]) <= 1


TINY_AND_LARGE = st.one_of(
    st.integers(1, 10**12),
    st.floats(1e-9, 1.0),
    st.integers(0, 12).map(lambda digits: 10**digits + digits),  # from one token to a trillion
    st.sampled_from([0.0999, 0.0999, 0.001, 1 + 1e-9]),  # many equal weights: their samples are due together
)


@settings(max_examples=40)
@example(weights=[0.0999] * 10 + [0.0001] * 10, block=10)
@example(weights=[0.1] * 9 + [0.001] * 100, block=11)
@given(weights=st.lists(TINY_AND_LARGE, min_size=1, max_size=40), block=st.sampled_from([1, 7, 50, 333]))
def test_blend_counts_match_weights_beyond_a_block(weights: list[float], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalite.data.datasets.blended_dataset.MAX_PERIOD", block)
        order, other = BlendSchedule(weights), BlendSchedule(weights)
    n = 500
    last = other.sources_at(np.array([n - 1]))  # asked for before any earlier sample
    source, number = order.sources_at(np.arange(n))
    assert (last[0][0], last[1][0]) == (source[-1], number[-1])
    exact = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    integer_weights = [int(weight * common) for weight in exact]
    total, counts = sum(integer_weights), [0] * len(weights)
    for length in range(1, n + 1):
        k = int(source[length - 1])
        assert number[length - 1] == counts[k]
        counts[k] += 1
        for weight, count in zip(integer_weights, counts, strict=True):
            assert weight * length // total <= count <= -(-weight * length // total)
        if length % 50 == 0:
            assert other.samples_per_source(length) == counts


@pytest.mark.parametrize(
    ("weights", "samples"),
    [
        ([953_560, 254e9], 62_464_000),  # 234.5 samples of the first
        ([1e-7] * 3 + [1 / 3, 2 / 3], 40_000_000),
    ],
)
def test_blend_with_token_counts_is_exact_far_away(weights: list[float], samples: int) -> None:
    order, exact = BlendSchedule(weights), [Fraction(str(weight)) for weight in weights]
    for n in (samples, samples - 1, samples + 1_234_567):
        counts = order.samples_per_source(n)
        assert sum(counts) == n
        for count, weight in zip(counts, exact, strict=True):
            quota = weight / sum(exact) * n
            assert math.floor(quota) <= count <= math.ceil(quota)
    source, number = order.sources_at(np.arange(samples, samples + 50))
    assert number.tolist() == [order.samples_per_source(samples + i)[k] for i, k in enumerate(source.tolist())]


def test_blend_order_never_changes() -> None:
    """Stored runs resume with this order. The digests are those of version 0.1.0."""
    for weights, digest in STORED_ORDERS:
        source, number = BlendSchedule(weights).sources_at(np.arange(0, 50_000))
        rows = np.stack([source, number]).astype("<i8").tobytes()
        assert hashlib.blake2b(rows, digest_size=8).hexdigest() == digest


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf")])
def test_blend_refuses_bad_weights(weight: float) -> None:
    with pytest.raises(DataError, match="blend weight"):
        BlendSchedule([1.0, weight])


def test_blend_returns_the_samples_of_its_sources() -> None:
    a, b = (MockDataset(50, 8, seed) for seed in (1, 2))
    mixed = BlendedDataset([a, b], [0.25, 0.75])
    source, number = mixed.order.sources_at(np.arange(40))
    for n in range(41):
        assert mixed.order.samples_per_source(n) == np.bincount(source[:n], minlength=2).tolist()
    rows = mixed.samples(np.arange(40))
    for i in range(40):
        assert np.array_equal(rows[i], (a, b)[source[i]].samples(np.array([int(number[i])]))[0])
        assert mixed.locate(i, 3) == f"mock sample {number[i]}, token 3"
    assert (source == 0).sum() == 10


def test_mock_data_is_learnable_noisy_and_within_the_vocabulary() -> None:
    for vocab_size in (2, 93, 50_257):
        train, valid = (MockDataset(vocab_size, 64, 7, name) for name in ("train", "valid"))
        tokens = train.samples(np.arange(50))
        assert tokens.shape == (50, 65) and tokens.min() >= 0 and tokens.max() < vocab_size
        assert np.array_equal(tokens[3], train.samples(np.array([3]))[0])
        assert not np.array_equal(tokens, valid.samples(np.arange(50)))
    assert tokens.max() > 49_000  # every part of a split vocabulary is used
    steps = (tokens[:, 1:] - tokens[:, :-1]) % (512 * 98) // 98
    largest_shares = [np.bincount(row).max() / row.size for row in steps]
    assert 0.7 < np.mean(largest_shares) < 0.95  # most steps are the same, some are noise


# ---- blends of files
def write(prefix: Path, documents: int, first: int = 0) -> str:
    write_numbered(prefix, [10] * documents, first)
    return str(prefix)


def tokens(dataset: Dataset | None, n: int = 200) -> set[int]:
    return set(dataset.samples(np.arange(n)).reshape(-1).tolist())


def test_splits_share_no_document(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 100)
    train, valid, test = (
        build_blend([prefix], 4, 1, name, part)
        for name, part in (("train", (0.0, 0.8)), ("valid", (0.8, 0.95)), ("test", (0.95, 1.0)))
    )
    assert tokens(train, 300) == set(range(800))
    assert tokens(valid) == set(range(800, 950))
    assert tokens(test) == set(range(950, 1000))


def test_too_little_validation_data_is_refused_with_a_remedy(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 10)
    with pytest.raises(DataError, match="the test split has 0 tokens in 0 documents.*larger part in --split"):
        build_blend([prefix], 4, 1, "test", (0.999, 1.0))


def test_blend_of_files(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 30), write(tmp_path / "b", 90, first=1000)
    weighted = build_blend(["0.25", a, "0.75", b], 4, 1, "train")
    by_size = build_blend([a, b], 4, 1, "train")
    rows = weighted.samples(np.arange(100))
    assert (rows[:, 0] < 1000).sum() == 25
    assert np.array_equal(rows, by_size.samples(np.arange(100)))  # 300 : 900 tokens
    assert weighted.describe(150) == f"0.2500 of {a}: 30 documents, 300 tokens, 0.51 epochs\n" + (
        f"0.7500 of {b}: 90 documents, 900 tokens, 0.50 epochs"
    )
    assert build_blend([a], 4, 1, "train").describe(300).endswith("4.00 epochs")
    assert build_blend([a], 4, 1, "train").describe(400).endswith("5.33 epochs; more than 4 add little")


def test_parse_data_path() -> None:
    assert parse_data_path(["a"]) == (["a"], None)
    assert parse_data_path(["a", "b", "c"]) == (["a", "b", "c"], None)
    assert parse_data_path(["1", "a", "2e-1", "b"]) == (["a", "b"], [1.0, 0.2])
    for bad in (["0.3", "a", "b"], ["0.3", "a", "b", "0.7"], ["0.3"]):
        with pytest.raises(DataError, match="is not a list of WEIGHT PREFIX pairs"):
            parse_data_path(bad)
    with pytest.raises(DataError, match="data_path is empty"):
        parse_data_path([])


# ---- named validation sets: names and paths, and the loss per byte of text
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]*", fullmatch=True)
PATHS = st.sampled_from(["a", "data/x", "/abs/lang=en/part", "./lang=en/x", "s3://bucket/k=v/x", "with space/x"])
VALUES = st.one_of(
    st.lists(PATHS, min_size=1, max_size=3),
    st.lists(st.tuples(st.sampled_from(["0.3", "1", "2e-1"]), PATHS), min_size=1, max_size=3).map(
        lambda pairs: [part for pair in pairs for part in pair]
    ),
)


@given(sets=st.dictionaries(NAMES, VALUES, min_size=1, max_size=4), separate=st.booleans())
def test_data_path_spellings_round_trip(sets: dict[str, list[str]], separate: bool) -> None:
    items = []
    for name, path in sets.items():
        items += [f"{name}=", *path] if separate else [f"{name}={path[0]}", *path[1:]]
    assert parse_named_sets(items) == sets
    for path in sets.values():
        parse_data_path(path)  # each is a plain data path, too
        assert parse_named_sets(path) == {"valid": path}  # without names, as in Megatron-LM, it is one set
        assert parse_named_sets(path, "test") == {"test": path}


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "valid_data_path is empty"),
        (["a", "wiki=b"], "'a' belongs to no set; start with NAME="),
        (["wiki=a", "wiki=b"], "two sets are called 'wiki'"),
        (["wiki=a", "code="], "set 'code' has no data; write code=PREFIX"),
        (["wiki", "=", "a"], "'=' has no name; write NAME=PREFIX without spaces"),
    ],
)
def test_bad_data_paths_are_refused(items: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_named_sets(items)


def test_multiple_validation_sets() -> None:
    assert one_set_per_prefix(["x/a_text_document", "y/b"]) == {"a": ["x/a_text_document"], "b": ["y/b"]}
    assert one_set_per_prefix(["x/a", "y/a"], ["one", "two"]) == {"one": ["x/a"], "two": ["y/a"]}
    for prefixes, names, message in (
        (["x/a", "y/a"], None, "two validation sets are called 'a'; give --validation-set-names"),
        (["a", "b"], ["one"], "1 names for 2 sets"),
        (["0.5", "a"], None, "takes prefixes without weights, not 0.5"),
    ):
        with pytest.raises(DataError, match=message):
            one_set_per_prefix(prefixes, names)


def info(prefix: Path, **counts: object) -> str:
    tokenizer = {"name": "t", "fingerprint": "0", "vocab_size": 10, "eod": 0}
    prefix.with_name(prefix.name + ".json").write_text(json.dumps({"version": 1, "tokenizer": tokenizer, **counts}))
    return str(prefix)


def test_bytes_per_token_of_a_blend(tmp_path: Path) -> None:
    a, b = info(tmp_path / "a", tokens=100, bytes=400), info(tmp_path / "b", tokens=300, bytes=600)
    assert bytes_per_token([a]) == 4
    assert bytes_per_token([a, b]) == 1000 / 400  # weighted by tokens
    assert bytes_per_token([a, b], [3.0, 1.0]) == (3 * 4 + 2) / 4
    assert bytes_per_token([a, str(tmp_path / "none")]) is None
    assert bytes_per_token([a, info(tmp_path / "old", tokens=5)]) is None
    for bad in ({"bytes": 0, "tokens": 5}, {"bytes": 5, "tokens": True}, {"bytes": 5.0, "tokens": 1}, {"bytes": 5}):
        with pytest.raises(DataError, match="must both be integers > 0"):
            bytes_per_token([info(tmp_path / "bad", **bad)])


def test_uniform_byte_model_needs_eight_bits_per_byte() -> None:
    assert bits_per_byte(math.log(256), 1.0) == pytest.approx(8)
    assert bits_per_byte(math.log(65536), 2.0) == pytest.approx(8)  # the same model with two bytes per token


def test_examples_of_the_documentation() -> None:
    assert doctest.testmod(blends).failed == 0
