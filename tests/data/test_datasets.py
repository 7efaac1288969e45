"""From --data-path and --split to datasets, and the cache of their orders."""

from pathlib import Path

import numpy as np
import pytest
from token_files import numbered

from megalite.data.errors import DataError
from megalite.data.files.indexed import IndexedDataset
from megalite.data.samples.blend import build_blend, parse_data_path
from megalite.data.samples.gpt_dataset import GptDataset
from megalite.data.samples.source import Dataset


def write(prefix: Path, documents: int, first: int = 0) -> str:
    numbered(prefix, [10] * documents, first)
    return str(prefix)


def tokens(dataset: Dataset | None, n: int = 200) -> set[int]:
    return set(dataset.samples(np.arange(n)).reshape(-1).tolist())


def test_parts_share_no_document(tmp_path: Path) -> None:
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
    assert build_blend([a], 4, 1, "train").describe(400).endswith("5.33 epochs; more than 4 teach little")


def test_parse_data_path() -> None:
    assert parse_data_path(["a"]) == (["a"], None)
    assert parse_data_path(["a", "b", "c"]) == (["a", "b", "c"], None)
    assert parse_data_path(["1", "a", "2e-1", "b"]) == (["a", "b"], [1.0, 0.2])
    for bad in (["0.3", "a", "b"], ["0.3", "a", "b", "0.7"], ["0.3"]):
        with pytest.raises(DataError, match="is not a list of WEIGHT PREFIX pairs"):
            parse_data_path(bad)
    with pytest.raises(DataError, match="data_path is empty"):
        parse_data_path([])


def dataset(prefix: str, directory: Path | None, seed: int = 1) -> GptDataset:
    data = IndexedDataset(prefix)
    return GptDataset(data, range(len(data)), 7, seed, "train", directory)


def test_cache_gives_the_same_samples_and_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix, directory = write(tmp_path / "a", 50), tmp_path / "cache"
    want = dataset(prefix, None).samples(np.arange(150))  # over two epoch borders
    assert np.array_equal(dataset(prefix, directory).samples(np.arange(150)), want)
    assert len(list(directory.glob("*.epoch"))) == 3

    def never(*_: object) -> None:
        raise AssertionError("built although it was cached")

    monkeypatch.setattr("megalite.data.samples.gpt_dataset.build_epoch", never)
    assert np.array_equal(dataset(prefix, directory).samples(np.arange(150)), want)


def test_other_data_seed_or_split_has_other_files(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    prefix = write(tmp_path / "a", 50)
    seen: set[str] = set()
    for step in range(4):
        if step == 2:
            prefix = write(tmp_path / "a", 51)  # the same name, other documents
        dataset(prefix, directory, seed=2 if step == 1 else 1).samples(np.array([0]))[0]
        if step == 3:
            data = IndexedDataset(prefix)  # the first data's lengths again
            GptDataset(data, range(50), 7, 1, "train", directory).samples(np.array([0]))
        found = {p.name for p in directory.glob("*.epoch")}
        assert len(found - seen) == (1 if step < 3 else 0)
        seen = found
