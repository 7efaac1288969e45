"""Named validation sets: what is a name and what a path, and the loss per byte of text."""

import doctest
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.data.errors import DataError
from megalite.data.samples import validation_sets
from megalite.data.samples.blend import parse_data_path
from megalite.data.samples.validation_sets import bits_per_byte, bytes_per_token, parse_named_sets, sets_of_each

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]*", fullmatch=True)
PATHS = st.sampled_from(["a", "data/x", "/abs/lang=en/part", "./lang=en/x", "s3://bucket/k=v/x", "with space/x"])
VALUES = st.one_of(
    st.lists(PATHS, min_size=1, max_size=3),
    st.lists(st.tuples(st.sampled_from(["0.3", "1", "2e-1"]), PATHS), min_size=1, max_size=3).map(
        lambda pairs: [part for pair in pairs for part in pair]
    ),
)


@given(sets=st.dictionaries(NAMES, VALUES, min_size=1, max_size=4), apart=st.booleans())
def test_both_spellings_come_back(sets: dict[str, list[str]], apart: bool) -> None:
    items = []
    for name, path in sets.items():
        items += [f"{name}=", *path] if apart else [f"{name}={path[0]}", *path[1:]]
    assert parse_named_sets(items) == sets
    for path in sets.values():
        parse_data_path(path)  # each is a data path as ever
        assert parse_named_sets(path) == {"valid": path}  # and alone, in Megatron-LM's plain form, one set
        assert parse_named_sets(path, "test") == {"test": path}


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "valid_data_path is empty"),
        (["a", "wiki=b"], "'a' belongs to no set; begin with NAME="),
        (["wiki=a", "wiki=b"], "two sets are called 'wiki'"),
        (["wiki=a", "code="], "set 'code' has no data; write code=PREFIX"),
        (["wiki", "=", "a"], "'=' has no name; write NAME=PREFIX without spaces"),
    ],
)
def test_bad_forms_are_refused(items: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_named_sets(items)


def test_multiple_validation_sets_of_megatron() -> None:
    assert sets_of_each(["x/a_text_document", "y/b"]) == {"a": ["x/a_text_document"], "b": ["y/b"]}
    assert sets_of_each(["x/a", "y/a"], ["one", "two"]) == {"one": ["x/a"], "two": ["y/a"]}
    for prefixes, names, message in (
        (["x/a", "y/a"], None, "two validation sets are called 'a'; give --validation-set-names"),
        (["a", "b"], ["one"], "1 names for 2 sets"),
        (["0.5", "a"], None, "takes prefixes without weights, not 0.5"),
    ):
        with pytest.raises(DataError, match=message):
            sets_of_each(prefixes, names)


def info(prefix: Path, **counts: object) -> str:
    made_by = {"name": "t", "fingerprint": "0", "vocab_size": 10, "eod": 0}
    prefix.with_name(prefix.name + ".json").write_text(json.dumps({"version": 1, "tokenizer": made_by, **counts}))
    return str(prefix)


def test_bytes_per_token_of_a_blend(tmp_path: Path) -> None:
    a, b = info(tmp_path / "a", tokens=100, bytes=400), info(tmp_path / "b", tokens=300, bytes=600)
    assert bytes_per_token([a]) == 4
    assert bytes_per_token([a, b]) == 1000 / 400  # by tokens
    assert bytes_per_token([a, b], [3.0, 1.0]) == (3 * 4 + 2) / 4
    assert bytes_per_token([a, str(tmp_path / "none")]) is None
    assert bytes_per_token([a, info(tmp_path / "old", tokens=5)]) is None
    for bad in ({"bytes": 0, "tokens": 5}, {"bytes": 5, "tokens": True}, {"bytes": 5.0, "tokens": 1}, {"bytes": 5}):
        with pytest.raises(DataError, match="must both be integers > 0"):
            bytes_per_token([info(tmp_path / "bad", **bad)])


def test_a_uniform_model_over_bytes_needs_eight_bits_for_each() -> None:
    assert bits_per_byte(math.log(256), 1.0) == pytest.approx(8)
    assert bits_per_byte(math.log(65536), 2.0) == pytest.approx(8)  # two bytes to a token, the same model


def test_examples_of_the_documentation() -> None:
    assert doctest.testmod(validation_sets).failed == 0
