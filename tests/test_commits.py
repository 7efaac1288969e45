"""Commits since the check began have a title of at most 72 characters, and a body that says why."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import ROOT

BASE = "d188ea21f599851ade50f80222ed9245a1115cdf"  # the last commit that is not looked at
TITLE = 72


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True, timeout=60).stdout


def faults(root: Path, base: str) -> Iterator[str]:
    """A line per commit after `base` that says too little, or too much in its title; a merge needs no body."""
    for entry in git(root, "log", "--format=%h%x00%P%x00%s%x00%b%x01", f"{base}..HEAD").split("\x01"):
        if entry.strip():
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
    assert list(faults(ROOT, BASE)) == []


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "a")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "a@b")
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path, "base " * 40)  # without a body too: not looked at
    return tmp_path


def commit(root: Path, message: str) -> str:
    git(root, "commit", "-q", "--allow-empty", "-m", message)
    return git(root, "rev-parse", "HEAD").strip()


def test_each_fault_is_named(repository: Path) -> None:
    base = git(repository, "rev-parse", "HEAD").strip()
    commit(repository, f"{'a' * TITLE}\n\nWhy it was done.\n\nIn two paragraphs.")
    assert is_known(repository, base) and list(faults(repository, base)) == []
    long, bare = commit(repository, f"{'a' * (TITLE + 1)}\n\nWhy."), commit(repository, "What alone")
    found = list(faults(repository, base))
    assert len(found) == 2 and found[0].startswith(bare[:7]) and "no body" in found[0], found
    assert found[1].startswith(long[:7]) and f"{TITLE + 1} characters" in found[1], found
