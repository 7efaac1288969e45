"""Breakages planted on purpose into a copy of the sources, one at a time (mutations.toml): each has a test that must turn
red, or is a classical mistake of distributed training, which tools/verify.py must find and locate."""

import functools
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import programs
import pytest
import toml_tables

ROOT = programs.ROOT
COPIED = ("megalite", "tests", "tools", "pretrain_gpt.py", "pyproject.toml")
LIMIT_S = 150.0
TABLES = toml_tables.read("chaos/mutations")


@dataclass(frozen=True)
class Breakage:
    """As the table says; `flags`: as the words of a line."""

    name: str
    lines: list[tuple[str, str]]
    test: str = ""
    flags: str = ""
    first: dict[str, Any] = field(default_factory=dict)
    alone: str = ""
    odd: str = ""


BREAKAGES, MISTAKES = ([Breakage(n, **row) for n, row in TABLES[kind].items()] for kind in ("breakages", "mistakes"))


def planted(breakage: Breakage) -> dict[str, str]:
    """The modules that it changes, by path. Raises ValueError if what it replaces is not there, once."""
    sources = dict(_sources())
    changed: dict[str, str] = {}
    for old, new in breakage.lines:
        there = [path for path, text in sources.items() if old in text]
        if len(there) != 1 or sources[there[0]].count(old) != 1:
            raise ValueError(f"{breakage.name}: {old!r} is in {len(there)} modules: plant it anew")
        changed[there[0]] = sources[there[0]] = sources[there[0]].replace(old, new)
    return changed


@functools.cache
def _sources() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in sorted((ROOT / "megalite").rglob("*.py"))}


def rarely(breakages: list[Breakage]) -> list[Any]:
    """As parameters of a test: with each commit where what one breaks was changed."""
    found = []
    for one in breakages:
        guards: tuple[str, ...] = ()
        with suppress(ValueError):  # which a test of its own tells
            guards = tuple(planted(one))
        found.append(pytest.param(one, marks=pytest.mark.nightly(guards=guards), id=one.name))
    return found


def plant(breakage: Breakage, folder: Path) -> None:
    """Into a copy of the sources."""
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    for path, text in planted(breakage).items():
        (folder / path).write_text(text, "utf-8")


def verdict(breakage: Breakage, folder: Path) -> str:
    """Of its test: red, or what else came of it in this empty folder: green, not collected, ..."""
    plant(breakage, folder)
    words = ["-x", "-p", "no:xdist", "--timeout", str(LIMIT_S - 10), f"--rootdir={folder}", breakage.test]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    with programs.group([sys.executable, "-m", "pytest", *words], cwd=folder, env=env) as process:
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return "it hangs"
    if process.returncode == pytest.ExitCode.TESTS_FAILED and "ImportError" not in said and "SyntaxError" not in said:
        return "red"
    return "green" if process.returncode == 0 else f"exit code {process.returncode}: {said[-2000:]}"


def verify(mistake: Breakage, folder: Path) -> tuple[int, dict[str, Any], str]:
    """Exit code, what --json tells, and what was printed, of verify.py in a copy of the sources with the mistake."""
    plant(mistake, folder)
    words = [*toml_tables.spelt(TABLES["words"])(mistake.flags).split(), "--steps", "2", "--json", "told.json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    how: dict[str, Any] = dict(capture_output=True, text=True, timeout=120.0, cwd=folder, env=env)
    done = subprocess.run([sys.executable, "tools/verify.py", *words], **how)
    told = folder / "told.json"
    return done.returncode, json.loads(told.read_text("utf-8")) if told.is_file() else {}, done.stdout + done.stderr


def missed(mistake: Breakage, code: int, found: dict[str, Any], said: str) -> list[str]:
    """What is not as it should be in the answer; empty where the mistake was found and located."""
    if code != 1 or not found:
        return [f"exit code {code}: {said[-3000:]}"]
    wrong, first = [], found["first"] or {}
    for key, value in mistake.first.items():
        outer, _, inner = key.partition(".")
        got = first.get(outer, {}).get(inner) if inner else first.get(outer)
        right = got == value
        if key in ("causes", "where"):
            right = any(value in text for text in ([got] if isinstance(got, str) else got or []))
        if not right:
            wrong.append(f"{key} is {got!r} and should be {value!r}")
    if mistake.alone and not all(mistake.alone in name for name in first.get("others", [""])):
        wrong.append(f"{first.get('others')} differ, and not {mistake.alone} alone")
    if mistake.odd and not any(mistake.odd in line for line in found["one_process"]):
        wrong.append(f"of the one process is said: {found['one_process']}")
    return wrong
