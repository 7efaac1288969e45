"""Few rows of a table in which every two features meet that meet in any row of it: what runs with each commit, where the
whole table runs with `tests/run.sh --all`."""

from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest


def pairs(features: dict[str, Hashable]) -> set[Any]:
    """Every two features of one row, each with its value."""
    return set(combinations(sorted(features.items(), key=lambda item: item[0]), 2))


def cover(rows: Sequence[Any], features: Callable[[Any], dict[str, Hashable]]) -> list[Any]:
    """Greedy: again and again the row with most pairs that are still to be met. In the table's order."""
    of_rows, chosen = [pairs(features(row)) for row in rows], set[int]()
    missing = set().union(*of_rows)
    while missing:
        chosen.add(best := max(range(len(rows)), key=lambda i: len(of_rows[i] & missing)))
        missing -= of_rows[best]
    return [rows[i] for i in sorted(chosen)]


def spelled(words: dict[str, str]) -> dict[str, str]:
    """Words of a table of flags, each of which may have those before it in braces."""
    known = dict[str, str]()
    for name, text in words.items():
        known[name] = text.format_map(known)
    return known


def rarely(rows: Sequence[Any], often: Sequence[Any], name: Callable[[Any], str], **guards: Any) -> list[Any]:
    """`rows` as parameters of a test, of which only those in `often` run before each commit."""
    mark = pytest.mark.nightly(**guards)
    return [pytest.param(row, id=name(row), marks=() if row in often else mark) for row in rows]
