"""The recorded duration of each test, which decides the group that it runs in (CONTRIBUTING.md).

    tests/run.sh --all --record FILE        records the tests of a file in tests/durations.txt, on a quiet machine

A line of tests/durations.txt is a group, seconds, the number of tests, and a name. The groups `quick` and `nightly` have
one line per file. The group `presubmit` has one line per test.
"""

import functools
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).parents[1] / "durations.txt"
ROOT = LIST.parent.parent
QUICK, PRESUBMIT, NIGHTLY = "quick", "presubmit", "nightly"
MAX_QUICK_S = 1.0  # longer tests are presubmit tests
MAX_PRESUBMIT_S = 2.0  # longer tests without a marker are slow: a presubmit run has them only if they guard a change
DEFAULT_NIGHTLY_S = 40.0  # assumed for nightly tests without a record
MAX_GUARDED_S = 100.0  # of nightly and slow tests that a presubmit run adds, because they guard a changed file
# What the slow tests of a directory guard, besides their own file; the others guard the package of the same name.
GUARDED_PATHS = {
    "chaos": ("megalite/training", "megalite/launch"),
    "checkpoint": ("megalite/checkpoint", "megalite/training/checkpointing"),
    "distribution": ("pyproject.toml", "Dockerfile", "megalite/__main__.py", "megalite/commands.toml"),
    "docs": ("docs", "README.md"),
    "entry_points": ("pretrain_gpt.py", "megalite/api.py", "megalite/training/job"),
    "repository": ("tests/support",),
    "layouts": ("megalite/models", "megalite/nn", "megalite/parallel", "megalite/optim", "megalite/pipeline"),
    "simulated_gpu": ("megalite/parallel", "megalite/optim", "megalite/pipeline", "megalite/training/train_step.py"),
    "tools": ("tools",),
    "training": ("megalite/training", "megalite/common"),
    "translate": ("tools/translation", "megalite/config"),
}


@dataclass(frozen=True)
class Line:
    """A line of the list. `name` is a test in the group `presubmit`, and a file in the others."""

    group: str
    seconds: float
    name: str
    num_tests: int = 1

    @property
    def file(self) -> str:
        return self.name.split("::")[0]


@functools.cache
def read_lines() -> tuple[Line, ...]:
    rows = (line.split(" ", 3) for line in LIST.read_text("utf-8").splitlines())
    return tuple(Line(group, float(seconds), name, int(tests)) for group, seconds, tests, name in rows)


def lines_of(seconds_of: Mapping[str, float], nightly: Iterable[str]) -> list[Line]:
    """Return the lines for tests with these durations. `nightly` has the tests with that marker."""
    marked, files = set(nightly), defaultdict[tuple[str, str], list[float]](list)
    lines = []
    for test, seconds in seconds_of.items():
        if test not in marked and seconds > MAX_QUICK_S:
            lines.append(Line(PRESUBMIT, seconds, test))
        else:
            files[NIGHTLY if test in marked else QUICK, test.split("::")[0]].append(seconds)
    return lines + [Line(group, sum(each), file, len(each)) for (group, file), each in files.items()]


def groups_that_ran(marker_expression: str) -> set[str]:
    """Return the groups that pytest's -m selects."""
    groups = {QUICK}
    if "not presubmit" not in marker_expression:
        groups.add(PRESUBMIT)
    if not marker_expression:
        groups.add(NIGHTLY)
    return groups


def record(seconds_of: Mapping[str, float], nightly: Iterable[str], groups: set[str]) -> None:
    """Replace the lines of these tests' files in the groups that ran."""
    new = [line for line in lines_of(seconds_of, nightly) if line.group != NIGHTLY or NIGHTLY in groups]
    files, names = {line.file for line in new}, {(line.group, line.name) for line in new}
    old = [line for line in read_lines() if line.file not in files or line.group not in groups]
    lines = new + [line for line in old if (line.group, line.name) not in names and (ROOT / line.file).is_file()]
    lines.sort(key=lambda line: (line.name, line.group))
    text = (f"{line.group} {line.seconds:.2f} {line.num_tests} {line.name}\n" for line in lines)
    LIST.write_text("".join(text), "utf-8")
    read_lines.cache_clear()


def presubmit_seconds() -> dict[str, float]:
    """Return the duration of each presubmit test."""
    return {line.name: line.seconds for line in read_lines() if line.group == PRESUBMIT}


def paths_guarded_by(test: str) -> tuple[str, ...]:
    """Return the files and directories whose change makes a slow test part of a presubmit run."""
    file = test.split("::")[0]
    area = file.split("/")[1]
    return (file, *GUARDED_PATHS.get(area, (f"megalite/{area}",)))


def mean_nightly_seconds() -> dict[str, float]:
    """Return the mean duration of a nightly test, by file."""
    return {line.name: line.seconds / line.num_tests for line in read_lines() if line.group == NIGHTLY}


@functools.cache
def changed_files() -> frozenset[str]:
    """Return the files that changed since this branch left main, or on main since the last merge.

    The set is empty if git cannot tell.
    """

    def git(*args: str) -> str:
        try:
            result = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
        except OSError:  # git is not installed
            return ""
        return result.stdout.strip() if result.returncode == 0 else ""

    head = git("rev-parse", "HEAD")
    base = next(filter(None, (git("merge-base", "HEAD", name) for name in ("origin/main", "main"))), head)
    if base == head:
        base = git("rev-parse", "HEAD^1")
    return frozenset(git("diff", "--name-only", base).splitlines() if base else ())


def any_changed(files: Iterable[str]) -> bool:
    """Return True if one of the files, or a file below one of the directories, changed."""
    for file in files:
        assert (ROOT / file).exists(), f"a test guards {file}, which does not exist"
    return any(f"{changed}/".startswith(f"{file}/") for file in files for changed in changed_files())


def select_within_budget(budget_s: float, items: Iterable[tuple[str, float]]) -> Iterable[str]:
    """Yield the tests of (test, seconds) that fit the budget: those whose own file changed first, then in order."""
    for test, seconds in sorted(items, key=lambda item: item[0].split("::")[0] not in changed_files()):
        if seconds <= budget_s:
            budget_s -= seconds
            yield test
