"""Pairwise coverage: a few rows of a table that contain every pair of features that any row has.

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
    """Choose rows greedily by the number of pairs that are still missing, and return them in the table's order."""
    row_pairs, indices = [pairs(features(row)) for row in rows], set[int]()
    missing = set().union(*row_pairs)
    while missing:
        indices.add(best := max(range(len(rows)), key=lambda i: len(row_pairs[i] & missing)))
        missing -= row_pairs[best]
    return [rows[i] for i in sorted(indices)]


def expand_abbreviations(abbreviations: dict[str, str]) -> dict[str, str]:
    """Expand a table of abbreviations of flags. Each may contain earlier ones in braces."""
    expanded = dict[str, str]()
    for name, text in abbreviations.items():
        expanded[name] = text.format_map(expanded)
    return expanded


def nightly_except(
    rows: Sequence[Any], presubmit_rows: Sequence[Any], name: Callable[[Any], str], **guards: Any
) -> list[Any]:
    """Return `rows` as parameters of a test. Those in `presubmit_rows` run before each commit, the others nightly."""
    mark = pytest.mark.nightly(**guards)
    return [pytest.param(row, id=name(row), marks=() if row in presubmit_rows else mark) for row in rows]
