"""Every row of the tables names tests that are there, says rightly which are long, and what they type."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from megalite.config.megatron_flags import OPTION, known_flags

TESTS = Path(__file__).resolve().parents[1]
TABLES = (TESTS / "chaos/README.md").read_text("utf-8")
ROWS = re.findall(r"^\| (\w+) \| [^|]+ \| (.+) \|$", TABLES, re.M)[1:]
FLAGS = [
    (re.findall(r"`(--[\w-]+)`", flags), test) for flags, test in re.findall(r"^\| (`--.+) \| `(.+)` \|$", TABLES, re.M)
]
GROUPS = ("profiling", "logging", "straggler", "rerun engine", "In-process restart", "ft_package", "fault injector")
GROUPS += ("opentelemetry", "workload inspector", "one logger", "autoresume")  # of Megatron-LM's parser
OTHERS = r"--(exit-|(no-|disable-)?manual-gc|(no-)?check-for-|check-weight|iterations-to-skip|empty-unused|distributed-timeout)"


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


def used_by(path: Path, name: str) -> str:
    """The source of what is called `name` at the top of a test module, and of all of tests/ that it uses."""
    seen: set[tuple[Path, str]] = set()
    wanted, source = [(path, name)], ""
    while wanted:
        if (here := wanted.pop()) in seen:
            continue
        seen.add(here)
        for node in ast.parse(here[0].read_text("utf-8")).body:
            if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == here[1] for a in node.names):
                module = (node.module or "").replace(".", "/") + ".py"
                found = [folder / module for folder in (here[0].parent, TESTS) if (folder / module).is_file()]
                wanted += [(found[0], here[1])] if found else []
            elif here[1] in named_by(node):
                source += ast.unparse(node) + "\n"
                wanted += [(here[0], inner.id) for inner in ast.walk(node) if isinstance(inner, ast.Name)]
                wanted += [(here[0], inner.arg) for inner in ast.walk(node) if isinstance(inner, ast.arg)]  # fixtures
    return source


def named_by(node: ast.stmt) -> set[str]:
    """What a statement at the top of a module gives a name to."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}


@pytest.mark.parametrize("flags,test", FLAGS, ids=[test.rpartition("::")[2] for _, test in FLAGS])
def test_a_flag_of_operations_is_typed_by_its_test(flags: list[str], test: str) -> None:
    path, _, name = test.partition("::")
    assert found_in(TESTS / path, name) is not None, test
    source = used_by(TESTS / path, name)
    missing = [flag for flag in flags if not re.search(rf"(?<![\w-]){flag}(?![\w-])", source)]
    assert not missing, f"{test} does not type {missing}"


def test_no_flag_of_operations_is_forgotten() -> None:
    acts = {name: flag.group for name, flag in known_flags().items() if flag.verdict == OPTION}
    wanted = {name for name, group in acts.items() if group in GROUPS or re.match(OTHERS, name)}
    listed = [flag for flags, _ in FLAGS for flag in flags]
    assert wanted == set(listed), wanted ^ set(listed)
