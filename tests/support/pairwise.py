"""Pairwise coverage: a few rows of a table that have every pair of features that any row has.

These rows run before each commit. The whole table runs with `tests/run.sh --all`.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest


def pairs(features: dict[str, Hashable]) -> set[Any]:
    """Return every pair of features of a row, each with its value."""
    return set(combinations(sorted(features.items(), key=lambda item: item[0]), 2))


def cover(rows: Sequence[Any], features: Callable[[Any], dict[str, Hashable]]) -> list[Any]:
    """Choose rows greedily, by the number of pairs that are still missing; return them in the table's order."""
    of_rows, chosen = [pairs(features(row)) for row in rows], set[int]()
    missing = set().union(*of_rows)
    while missing:
        chosen.add(best := max(range(len(rows)), key=lambda i: len(of_rows[i] & missing)))
        missing -= of_rows[best]
    return [rows[i] for i in sorted(chosen)]


def spelled(words: dict[str, str]) -> dict[str, str]:
    """Expand words of a table of flags. Each may contain earlier ones in braces."""
    known = dict[str, str]()
    for name, text in words.items():
        known[name] = text.format_map(known)
    return known


def rarely(rows: Sequence[Any], often: Sequence[Any], name: Callable[[Any], str], **guards: Any) -> list[Any]:
    """Return `rows` as parameters of a test. Only those in `often` run before each commit, the others nightly."""
    mark = pytest.mark.nightly(**guards)
    return [pytest.param(row, id=name(row), marks=() if row in often else mark) for row in rows]
