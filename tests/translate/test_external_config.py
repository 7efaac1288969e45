"""Reading another trainer's configuration is cheap: a file that is too large, too deep or missing is one error."""

import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.common.optional_packages import PIP_EXTRAS
from megalite.config.options import ConfigError
from tools.translation.external_config import MAX_BYTES, MAX_DEPTH, MAX_VALUES, read_mapping

DOUBLED = "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 28))
MERGED = "".join(f"a{i}: &a{i}\n  <<: [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 28))
WIDE = "a: &a [" + ", ".join("x" * 300) + "]\n" + "".join(f"b{i}: *a\n" for i in range(300))
COSTLY = {
    "an alias of an alias 27 times.yaml": ("a0: &a0 {x: 1}\n" + DOUBLED, "nested more than"),
    "a merge of a merge 27 times.yaml": ("a0: &a0 {x: 1}\n" + MERGED, "nested more than"),
    "one alias many times.yaml": (WIDE, f"more than {MAX_VALUES} keys and values"),
    "an anchor in itself.yaml": ("a: &a {b: *a}\n", "nested more than"),
    "a list in itself.yaml": ("a: &a [*a]\n", "nested more than"),
    "deep.yaml": ("a: " + "[" * 1500 + "]" * 1500, "nested more than"),
    "deep.json": ('{"a":' * 5000 + "1" + "}" * 5000, "nested more than"),
    "deep.toml": ("a=" + "[" * 50_000, "nested more than"),
    "dots.toml": ("a." * 3000 + "b = 1", f"a key of more than {MAX_DEPTH} parts"),
    "quoted dots.toml": ('"a" . ' * 30_000 + "b = 1", f"a key of more than {MAX_DEPTH} parts"),
    "dots of a table.toml": ("[" + "a." * 100_000 + "b]\nx = 1", f"a key of more than {MAX_DEPTH} parts"),
    "a long name.toml": ("a" * 250_000 + " = 1", "more than 200 characters"),
    "many keys.json": (json.dumps({f"key_{i}": i for i in range(8_000)}), f"more than {MAX_VALUES} keys and values"),
    "many bytes.json": ('{"a": "' + "x" * MAX_BYTES + '"}', "it has more than 256 KiB"),
    "a long number.toml": ("a = " + "9" * 5000, "4300 digits"),
    "two documents.yaml": ("a: 1\n---\nb: 2\n", "another document"),
    "no date.yaml": ("a: 2024-99-99\n", "month must be in 1..12"),
    "no time.yaml": ("a: !!timestamp x\n", "a value does not fit its tag"),
    "no bool.yaml": ("a: !!bool x\n", "a value does not fit its tag"),
    "no name.yaml": ("? {a: 1}\n: 2\n", "unhashable key"),
    "an object.yaml": ("a: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    "twice.json": ('{"a": {"stage": 1, "b": 2, "stage": 3}}', "the key stage is given twice; keep one"),
    "twice.yaml": ("a:\n  stage: 1\n  stage: 3\n", "the key stage is given twice; keep one"),
    "twice in a list.yaml": ("- {1: x, 1: y}\n", "the key 1 is given twice; keep one"),
    "a list.yaml": ("[1, 2]", "is not a table of keys with values"),
    "empty.yaml": ("", "is not a table of keys with values"),
    "words.json": ('"words"', "is not a table of keys with values"),
    "zero.toml": ("a = \0", "Invalid value"),
}


def problem_of(path: str | Path) -> str:
    with pytest.raises(ConfigError) as error:
        read_mapping(str(path))
    (problem,) = error.value.problems
    assert len(problem.splitlines()) == 1 and len(problem) < 1000
    return problem


@pytest.mark.parametrize("name", COSTLY)
def test_expensive_files_are_one_error(name: str, tmp_path: Path) -> None:
    """Without limits these take minutes, or do not end; the slowest takes a second."""
    text, message = COSTLY[name]
    (tmp_path / name).write_text(text)
    assert message in problem_of(tmp_path / name)


def test_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in [("pipe", "a pipe, a device"), (".", "Is a directory"), ("nothing", "No such file")]:
        assert message in problem_of(tmp_path / path)
    assert "a pipe, a device" in problem_of("/dev/zero")


def test_same_mapping_in_three_formats(tmp_path: Path) -> None:
    tree = {"a": {"b": [1, 2.5, "x"], "c": True}, "d.e": {"f": "a.b.c." * 3}}
    (tmp_path / "x.json").write_text(json.dumps(tree))
    (tmp_path / "y").write_text(json.dumps(tree))
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "flow.yaml").write_text("{a: {b: [1, 2.5, x], c: true}, d.e: {f: a.b.c.a.b.c.a.b.c.}}")
    (tmp_path / "merged.yaml").write_text("a:\n  <<: {b: [1, 2.5, x]}\n  <<: {c: true}\nd.e: {f: a.b.c.a.b.c.a.b.c.}\n")
    (tmp_path / "x.toml").write_text(
        '# a.b.c.d.e = 1\n[a]\nb = [1, 2.5, "x"]\nc = true\n["d.e"]\nf = "a.b.c.a.b.c.a.b.c."\n'
    )
    for path in tmp_path.iterdir():
        assert read_mapping(str(path)) == tree, path.name


LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates() | st.binary()
TREES = st.recursive(
    LEAF, lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner), max_leaves=12
)


@settings(deadline=None, max_examples=60)
@given(tree=TREES)
def test_random_yaml_round_trips_or_is_one_error(tree: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = yaml.safe_dump(tree)
    assert_read_or_refused(text, "x.yaml", yaml.safe_load, tmp_path_factory)


@settings(deadline=None, max_examples=200)
@given(
    text=st.text(alphabet="ab01:-[]{}&*<>!?|#%@.'\"= \n\t", max_size=60),
    ending=st.sampled_from(["yaml", "toml", "json"]),
)
def test_random_text_is_read_or_one_error(text: str, ending: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert_read_or_refused(text, f"x.{ending}", None, tmp_path_factory)


def assert_read_or_refused(
    text: str, name: str, reader: Callable[[str], Any] | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    path.write_text(text, encoding="utf-8", newline="")
    try:
        mapping = read_mapping(str(path))
    except ConfigError as error:
        (problem,) = error.problems
        assert len(problem.splitlines()) == 1
    else:
        assert isinstance(mapping, dict) and (reader is None or repr(mapping) == repr(reader(text)))


def test_extra_named_in_an_error_has_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for package, extra in PIP_EXTRAS.items():
        assert any(re.match(rf"{package}\b", requirement) for requirement in extras[extra]), (package, extra)
