"""Parsers of --data-path, --split and the options that name validation sets."""

import re
from collections.abc import Sequence
from pathlib import Path

from megalite.config.option_parsers import parse_split
from megalite.data.errors import DataError
from megalite.data.files.missing_files import is_number


def parse_data_path(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Return (prefixes, weights) of a --data-path; weights are None if it lists only prefixes.

    Raises DataError for an empty list or incomplete pairs.

    >>> parse_data_path(["0.3", "a", "0.7", "b"])
    (['a', 'b'], [0.3, 0.7])
    """
    if not data_path:
        raise DataError("data_path is empty; give --data-path PREFIX, or WEIGHT PREFIX pairs")
    if not is_number(data_path[0]):
        return list(data_path), None
    if len(data_path) % 2 or not all(is_number(text) for text in data_path[::2]):
        option = f"data_path={' '.join(data_path)}"
        raise DataError(f"{option} is not a list of WEIGHT PREFIX pairs; give all prefixes a weight, or none of them")
    return list(data_path[1::2]), [float(text) for text in data_path[::2]]


def split_fractions(split: str) -> list[tuple[float, float] | None]:
    """Return the (start, end) fractions of the training, validation and test set; None for an empty set.

    The sets are consecutive and in proportion to the three numbers of `split`. Raises DataError.

    >>> split_fractions("3, 1")
    [(0.0, 0.75), (0.75, 1.0), None]
    """
    try:
        shares = parse_split(split)
    except ValueError as error:
        raise DataError(f"split={split!r} {error}") from None
    boundaries = [sum(shares[:k]) / sum(shares) for k in range(4)]
    return [(a, b) if a < b else None for a, b in zip(boundaries, boundaries[1:], strict=False)]


_NAMED_SET = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)=(.*)", re.DOTALL)


def parse_named_sets(items: Sequence[str], unnamed: str = "valid") -> dict[str, list[str]]:
    """Return the data path of every set, by name and in order; without names, one set called `unnamed`.

    --valid-data-path 0.3 a 0.7 b                       Megatron's form: one set without a name
    --valid-data-path wiki=data/wiki code=0.3 a 0.7 b   NAME= starts a set; the items after it belong to the set
    valid_data_path = ["wiki=", "data/wiki", "code=", "0.3", "a", "0.7", "b"]     the same in TOML; either spelling

    Nothing needs quotes, and the shell can complete a file name after "wiki= ". A name consists of letters, digits,
    "_", "-" and "."; so data/lang=en/a is a path, and lang=en/a is one when written ./lang=en/a. Raises DataError.

    >>> parse_named_sets(["wiki=data/wiki", "code=0.3", "a", "0.7", "b"])
    {'wiki': ['data/wiki'], 'code': ['0.3', 'a', '0.7', 'b']}
    >>> parse_named_sets(["0.3", "a", "0.7", "data/lang=en/b"])
    {'valid': ['0.3', 'a', '0.7', 'data/lang=en/b']}
    """
    option = f"valid_data_path={' '.join(items)}"
    if not items:
        raise DataError("valid_data_path is empty; give a prefix, WEIGHT PREFIX pairs, or NAME=PREFIX for named sets")
    matches = [_NAMED_SET.fullmatch(item) for item in items]
    if not any(matches):
        nameless = [item for item in items if item.startswith("=")]
        if nameless:
            raise DataError(f"{option}: {nameless[0]!r} has no name; write NAME=PREFIX without spaces around '='")
        return {unnamed: list(items)}
    if matches[0] is None:
        raise DataError(f"{option}: {items[0]!r} belongs to no set; start with NAME=, or name no set (./ marks a path)")
    sets: dict[str, list[str]] = {}
    name = ""
    for item, match in zip(items, matches, strict=True):
        if match is None:
            sets[name].append(item)
            continue
        name, first_item = match.groups()
        if name in sets:
            raise DataError(f"{option}: two sets are called {name!r}; give each its own name")
        sets[name] = [first_item] if first_item else []
    for name, path in sets.items():
        if not path:
            raise DataError(f"{option}: set {name!r} has no data; write {name}=PREFIX")
    return sets


def one_set_per_prefix(prefixes: Sequence[str], names: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Return the sets of --multiple-validation-sets: each prefix is one, with a name from `names` or its file name.

    Raises DataError.

    >>> one_set_per_prefix(["data/wiki_text_document", "data/code"])
    {'wiki': ['data/wiki_text_document'], 'code': ['data/code']}
    """
    named = list(names) if names else [Path(prefix).name.removesuffix("_text_document") for prefix in prefixes]
    if len(named) != len(prefixes):
        raise DataError(f"validation_set_names={' '.join(named)}: {len(named)} names for {len(prefixes)} sets")
    for prefix in prefixes:
        if is_number(prefix):
            raise DataError(f"multiple_validation_sets takes prefixes without weights, not {prefix}; drop the weight")
    for name in named:
        if named.count(name) > 1:
            raise DataError(f"two validation sets are called {name!r}; give --validation-set-names, all different")
    return {name: [prefix] for name, prefix in zip(named, prefixes, strict=True)}
