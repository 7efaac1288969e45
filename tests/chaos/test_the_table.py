"""Every row of the table names tests that are there, and says rightly which of them are long."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROWS = re.findall(r"^\| (\w+) \| [^|]+ \| (.+) \|$", (TESTS / "chaos/README.md").read_text("utf-8"), re.M)[1:]


def found_in(path: Path, name: str) -> ast.FunctionDef | None:
    body = ast.parse(path.read_text("utf-8")).body if path.is_file() else []
    return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)


@pytest.mark.parametrize("row,tests", ROWS, ids=[f"{i}-{row}" for i, (row, _) in enumerate(ROWS)])
def test_a_row_names_tests_that_are_there(row: str, tests: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`( \(long\))?", tests)
    assert named and len(named) == tests.count("::")
    for path, name, long in named:
        found = found_in(TESTS / path, name)
        assert found is not None, f"{row}: {path}::{name}"
        marks = [ast.unparse(mark) for mark in found.decorator_list]
        assert ("pytest.mark.long" in marks) == bool(long), f"{row}: {path}::{name}"


def test_no_row_is_forgotten() -> None:
    groups = {"C": 19, "P": 12, "N": 7, "I": 9, "S": 3}
    wanted = [f"{letter}{i}" for letter, number in groups.items() for i in range(1, number + 1)]
    assert [row for row, _ in ROWS if row != "all"] == wanted
