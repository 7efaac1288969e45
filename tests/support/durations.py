"""What each test took, and so in which class it is (CONTRIBUTING.md): tests/durations.txt, written by a run.

    tests/run.sh --all --record        a run that others do not disturb; or of whole files, as tests/run.sh --all --record FILE

A line is a class, seconds, what took them, and of how many tests: of the classes quick and everything a file has one
line, of the class commit a test has.
"""

import functools
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).parents[1] / "durations.txt"
ROOT = LIST.parent.parent
QUICK, COMMIT, EVERYTHING = "quick", "commit", "everything"
QUICK_S = 1.0  # longer ones run with each commit alone
COMMIT_S = 40.0  # longer ones run with everything alone, by their mark
GUARDED_S = 90.0  # of the class everything, with each commit: tests of what it changed


@dataclass(frozen=True)
class Line:
    """`name`: a file, or of the class commit a test."""

    kind: str
    seconds: float
    name: str
    tests: int = 1

    @property
    def file(self) -> str:
        return self.name.split("::")[0]


@functools.cache
def read() -> tuple[Line, ...]:
    rows = (line.split(" ", 3) for line in LIST.read_text("utf-8").splitlines())
    return tuple(Line(kind, float(seconds), name, int(tests)) for kind, seconds, tests, name in rows)


def summed(took: Mapping[str, float], everything: Iterable[str]) -> list[Line]:
    """From the seconds of tests, some of which have the mark."""
    marked, files = set(everything), defaultdict[tuple[str, str], list[float]](list)
    lines = []
    for test, seconds in took.items():
        if test not in marked and seconds > QUICK_S:
            lines.append(Line(COMMIT, seconds, test))
        else:
            files[EVERYTHING if test in marked else QUICK, test.split("::")[0]].append(seconds)
    return lines + [Line(kind, sum(each), file, len(each)) for (kind, file), each in files.items()]


def ran(marks: str) -> set[str]:
    """Classes, by what pytest's -m was."""
    return {QUICK} | ({COMMIT} if "not commit" not in marks else set()) | ({EVERYTHING} if not marks else set())


def record(took: Mapping[str, float], everything: Iterable[str], kinds: set[str]) -> None:
    """In place of what was known of these files in the classes that ran."""
    new = [line for line in summed(took, everything) if line.kind != EVERYTHING or EVERYTHING in kinds]
    files, names = {line.file for line in new}, {(line.kind, line.name) for line in new}
    kept = [line for line in read() if line.file not in files or line.kind not in kinds]
    lines = new + [line for line in kept if (line.kind, line.name) not in names and (ROOT / line.file).is_file()]
    lines.sort(key=lambda line: (line.name, line.kind))
    text = (f"{line.kind} {line.seconds:.2f} {line.tests} {line.name}\n" for line in lines)
    LIST.write_text("".join(text), "utf-8")
    read.cache_clear()


def of_commits() -> set[str]:
    """Tests that are not quick."""
    return {line.name for line in read() if line.kind == COMMIT}


def mean_of_everything() -> dict[str, float]:
    """By file: seconds of one of its tests that run with everything."""
    return {line.name: line.seconds / line.tests for line in read() if line.kind == EVERYTHING}


@functools.cache
def changed_files() -> frozenset[str]:
    """Since this branch left main, and on main since the last merge; none where git cannot tell."""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        except OSError:  # there is none
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "HEAD")
    base = next(filter(None, (git("merge-base", "HEAD", name) for name in ("origin/main", "main"))), head)
    if base == head:
        base = git("rev-parse", "HEAD^1")
    return frozenset(git("diff", "--name-only", base).splitlines() if base else ())


def guarded(files: Iterable[str]) -> bool:
    """Whether one of them, or what is in one that is a folder, was changed. AssertionError: one is not there."""
    for file in files:
        assert (ROOT / file).exists(), f"a test guards {file}, which does not exist"
    return any(f"{changed}/".startswith(f"{file}/") for file in files for changed in changed_files())


def within(spent_s: float, items: Iterable[tuple[str, float]]) -> Iterable[str]:
    """Names, in their order, as long as their seconds fit."""
    for name, seconds in items:
        spent_s -= seconds
        if spent_s < 0:
            return
        yield name
