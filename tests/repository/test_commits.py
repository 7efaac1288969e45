"""Commits have a title `area: imperative summary` of at most 72 characters, and a body that says why."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import ROOT

BASE = "602878a8c0331f7d11f5a376fe49e33f59b705db"  # the last commit that is not checked
TITLE = 72
FORM = re.compile(r"[a-z][\w./, -]*: [a-z]")  # "area: imperative summary"


def git(root: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=root, check=True, capture_output=True, text=True, timeout=60).stdout


FORMAT = "--format=%h%x00%P%x00%s%x00%b%x01"


def faults(log: str) -> Iterator[str]:
    """Yield a line for each commit with a title of the wrong form or length or without a body; merges need neither."""
    for entry in filter(str.strip, log.split("\x01")):
        commit, parents, title, body = entry.strip("\n").split("\0")
        if len(title) > TITLE:
            yield f"{commit}: the title has {len(title)} characters, at most {TITLE}: {title}"
        is_merge = len(parents.split()) > 1
        if not is_merge and not FORM.match(title):
            yield f"{commit}: the title is not of the form 'area: imperative summary': {title}"
        if not body.strip() and not is_merge:
            yield f"{commit}: no body says why: {title}"


def is_known(root: Path, base: str) -> bool:
    """Return whether `root` is the root of a clone that reaches back to `base`.

    A source distribution and a shallow clone are not.
    """
    try:
        top = Path(git(root, "rev-parse", "--show-toplevel").strip())
        git(root, "merge-base", "--is-ancestor", base, "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return False
    return top.resolve() == root.resolve()


def test_commit_titles_and_bodies() -> None:
    if not is_known(ROOT, BASE):
        pytest.skip("no history that reaches back to the base")
    assert list(faults(git(ROOT, "log", FORMAT, f"{BASE}..HEAD"))) == []


def test_commit_check_names_each_fault() -> None:
    rows = [("a1", "a0", "docs: " + "a" * (TITLE - 6), "Why it was done.\n\nIn two paragraphs.\n")]
    rows += [("a2", "a0 a1", "Merge branch 'x'", ""), ("a3", "a2", "docs: " + "a" * TITLE, "Why.\n")]
    rows += [("a4", "a3", "docs: what alone", ""), ("a5", "a4", "Lines that grew by their layout", "Why.\n")]
    long, bare, form = faults("\n".join("\0".join(row) + "\x01" for row in rows))
    assert long.startswith(f"a3: the title has {TITLE + 6} characters")
    assert bare.startswith("a4: no body")
    assert form.startswith("a5: the title is not of the form")
