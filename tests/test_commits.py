"""Commits since the check began have a title of at most 72 characters, and a body that says why."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import ROOT

BASE = "d188ea21f599851ade50f80222ed9245a1115cdf"  # the last commit that is not looked at
TITLE = 72


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True, timeout=60).stdout


FORMAT = "--format=%h%x00%P%x00%s%x00%b%x01"


def faults(log: str) -> Iterator[str]:
    """A line per commit that says too little, or too much in its title; a merge needs no body."""
    for entry in filter(str.strip, log.split("\x01")):
        commit, parents, title, body = entry.strip("\n").split("\0")
        if len(title) > TITLE:
            yield f"{commit}: the title has {len(title)} characters, at most {TITLE}: {title}"
        if not body.strip() and len(parents.split()) < 2:
            yield f"{commit}: no body says why: {title}"


def is_known(root: Path, base: str) -> bool:
    """Whether `root` is a clone of its own that reaches back to `base`: a source distribution or a shallow clone is not."""
    try:
        top = Path(git(root, "rev-parse", "--show-toplevel").strip())
        git(root, "merge-base", "--is-ancestor", base, "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return False
    return top.resolve() == root.resolve()


def test_commits_say_what_and_why() -> None:
    if not is_known(ROOT, BASE):
        pytest.skip("no history that reaches back to the base")
    assert list(faults(git(ROOT, "log", FORMAT, f"{BASE}..HEAD"))) == []


def test_each_fault_is_named() -> None:
    rows = [("a1", "a0", "a" * TITLE, "Why it was done.\n\nIn two paragraphs.\n"), ("a2", "a0 a1", "A merge", "")]
    rows += [("a3", "a2", "a" * (TITLE + 1), "Why.\n"), ("a4", "a3", "What alone", "")]
    long, bare = faults("\n".join("\0".join(row) + "\x01" for row in rows))
    assert long.startswith(f"a3: the title has {TITLE + 1} characters") and bare.startswith("a4: no body")
