"""Any tree of a trainer's keys, with any values, becomes a file that --config takes, or one line for each problem."""

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalite.config.config_file import parse_config_text
from megalite.config.options import ConfigError, build
from tools.translation.external_config import MAX_VALUES
from tools.translation.source_keys import TABLES, load_format
from tools.translation.translate import FORMATS, translate

HERE = Path(__file__).parent
LISTED: dict[str, dict[str, str]] = tomllib.loads((HERE / "keys.toml").read_text("utf-8"))
KEYS = {
    name: sorted(
        {(part, key) for part, rows in load_format(name).items() if part not in TABLES for key in rows if key != "*"}
        | {(part, key) for part, keys in LISTED.get(name, {}).items() for key in keys.split()}
        | {tuple(old.rpartition(".")[::2]) for old in load_format(name)["renamed"]}
    )
    for name in FORMATS
}
ODD = [
    0,
    -1,
    1,
    2,
    3,
    8,
    1e-9,
    0.5,
    1.5,
    -2.5,
    1e308,
    -1e308,
    10**40,
    math.inf,
    math.nan,
    True,
    False,
    None,
    "",
    "auto",
]
ODD += [
    "???",
    "${a.b}",
    "${model}",
    "${.x}",
    "1e-4",
    "1_000",
    "true",
    "none",
    "x" * 300,
    "a\nb",
    '"',
    "\x7f",
    "é",
    [],
    {},
]
ODD += [
    [1, 2],
    [0.9, 0.95],
    ["a", None],
    [[1]],
    [{"x": 1}, 2],
    [{"x": 1}],
    {"x": {"y": {}}},
    "adamw",
    "fsdp",
    "2024-01-01",
]
ODD += [
    "s3://KEY:SECRET@host/x",
    "[",
    "]",
    "#",
    "a=b",
    "llama3",
    "8b",
    "full_shard",
    "cosine",
    "linear",
    "bf16",
    "gelu",
]
VALUES = st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=8)
NAMES = st.sampled_from(
    ["x", "a.b", "enabled", "enable", "name", "type", "params", "1", "", "[0]", "model", "settings", "*"]
)


def values_of(name: str) -> st.SearchStrategy[Any]:
    """Return a strategy of values, including those that rows of the trainer list."""
    rows = [row for section, rows in load_format(name).items() if section not in TABLES for row in rows.values()]
    listed = {value for row in rows if isinstance(row, dict) for value in row}
    return VALUES | st.sampled_from(sorted(listed))


def set_key(tree: dict[str, Any], section: str, key: str, value: Any) -> None:
    for part in section.split(".") if section not in ("top", "") else []:
        inner = tree.get(part)
        if not isinstance(inner, dict):
            inner = tree[part] = {}
        tree = inner
    tree[key] = value


@st.composite
def trees(draw: Any, name: str) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for section, key in draw(st.lists(st.sampled_from(KEYS[name]), max_size=12)):
        set_key(tree, section, key, draw(values_of(name)))
    for section, _ in draw(st.lists(st.sampled_from(KEYS[name]), max_size=3)):
        set_key(tree, section, draw(NAMES), draw(VALUES | st.dictionaries(NAMES, VALUES, max_size=2)))
    return tree


def check(tree: Any, gpus: int | None, path: Path) -> None:
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    try:
        text, _ = translate(str(path), gpus)
    except ConfigError as error:
        assert error.problems and all(len(problem.splitlines()) == 1 for problem in error.problems)
        assert all(len(problem) < 1000 for problem in error.problems)
        return
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert "SECRET" not in text and all(len(line) < 10_000 for line in comments)
    values = parse_config_text(text, "run.toml")
    values.pop("preset", None)
    build(values)


@pytest.mark.parametrize("name", FORMATS)
def test_random_key_values_give_a_file_or_an_error(name: str, tmp_path: Path) -> None:
    @settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
    @given(tree=trees(name), gpus=st.sampled_from([None, 1, 2, 7, 8, 64]))
    def run(tree: dict[str, Any], gpus: int | None) -> None:
        check(tree, gpus, tmp_path / "x.yaml")

    run()


@pytest.mark.parametrize("name", FORMATS)
def test_each_value_of_each_key_gives_a_file_or_an_error(name: str, tmp_path: Path) -> None:
    """Each key is alone in a file, with one value in turn; all pairs would be too many."""
    for number, (section, key) in enumerate(KEYS[name]):
        tree: dict[str, Any] = {}
        set_key(tree, section, key, ODD[number % len(ODD)])
        check(tree, (None, 8)[number % 2], tmp_path / "x.yaml")


def test_many_unknown_keys_are_a_few_lines(tmp_path: Path) -> None:
    unknown = {f"gradient_accumulation_step_{i}": i for i in range(MAX_VALUES // 2)}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({"train_batch_size": 8, **unknown}))
    text, is_complete = translate(str(tmp_path / "x.yaml"), 8)
    assert not is_complete and len(text.splitlines()) < MAX_VALUES // 4


def test_unknown_section_is_reported(tmp_path: Path) -> None:
    for section in ("nothing", "model.nothing", "zero_optimization.x.y.z", "settings", "defaults", "cases", "renamed"):
        tree: dict[str, Any] = {"train_batch_size": 8}
        set_key(tree, section, "enabled", True)
        set_key(tree, section, "x", 1)
        check(tree, 8, tmp_path / "x.yaml")
        text, is_complete = translate(str(tmp_path / "x.yaml"), 8)
        assert f"{section}.x = 1: unknown here" in text or f", {section}.x = 1: unknown" in text
        assert not is_complete
