"""Several validation sets have names, each with its own loss, and that loss as bits per byte of text:

    --valid-data-path 0.3 a 0.7 b                       Megatron's form: one set without a name
    --valid-data-path wiki=data/wiki code=0.3 a 0.7 b   NAME= begins a set, what follows belongs to it
    valid_data_path = ["wiki=", "data/wiki", "code=", "0.3", "a", "0.7", "b"]     the same in TOML; either spelling
    --multiple-validation-sets --valid-data-path a b    Megatron's other form: each prefix is a set

Nothing needs quotes, and the shell can complete a file name after "wiki= ". A name is letters, digits, "_", "-", ".";
so data/lang=en/a is a path, and lang=en/a is one when written ./lang=en/a.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from megalite.data.errors import DataError
from megalite.data.files.missing_files import is_number
from megalite.data.files.sidecar import read_info

BEGINS_SET = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)=(.*)", re.DOTALL)


def parse_named_sets(items: Sequence[str], unnamed: str = "valid") -> dict[str, list[str]]:
    """The data path of every set, by name and in order; without names one set called `unnamed`.

    >>> parse_named_sets(["wiki=data/wiki", "code=0.3", "a", "0.7", "b"])
    {'wiki': ['data/wiki'], 'code': ['0.3', 'a', '0.7', 'b']}
    >>> parse_named_sets(["0.3", "a", "0.7", "data/lang=en/b"])
    {'valid': ['0.3', 'a', '0.7', 'data/lang=en/b']}
    """
    option = f"valid_data_path={' '.join(items)}"
    if not items:
        raise DataError("valid_data_path is empty; give a prefix, WEIGHT PREFIX pairs, or NAME=PREFIX for named sets")
    begins = [BEGINS_SET.fullmatch(item) for item in items]
    if not any(begins):
        if nameless := [item for item in items if item.startswith("=")]:
            raise DataError(f"{option}: {nameless[0]!r} has no name; write NAME=PREFIX without spaces around '='")
        return {unnamed: list(items)}
    if begins[0] is None:
        raise DataError(f"{option}: {items[0]!r} belongs to no set; begin with NAME=, or name none (./ marks a path)")
    sets: dict[str, list[str]] = {}
    name = ""
    for item, begin in zip(items, begins, strict=True):
        if begin is None:
            sets[name].append(item)
            continue
        name, first = begin.groups()
        if name in sets:
            raise DataError(f"{option}: two sets are called {name!r}; give each its own name")
        sets[name] = [first] if first else []
    for name, path in sets.items():
        if not path:
            raise DataError(f"{option}: set {name!r} has no data; write {name}=PREFIX")
    return sets


def sets_of_each(prefixes: Sequence[str], names: Sequence[str] | None = None) -> dict[str, list[str]]:
    """--multiple-validation-sets: each prefix is a set, called as --validation-set-names says, else by its file name.

    >>> sets_of_each(["data/wiki_text_document", "data/code"])
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


def bytes_per_token(prefixes: Sequence[str], weights: Sequence[float] | None = None) -> float | None:
    """UTF-8 bytes of text per token of a set, from "bytes" and "tokens" in each prefix.json; None where one lacks them.
    `weights`: shares of the set's samples; without them each file counts by its tokens. The average is over whole
    files; a part of one (--split) may differ a little."""
    sizes = []
    for prefix in prefixes:
        info = read_info(prefix)
        if info is None or "bytes" not in info:
            return None
        counts = info["bytes"], info.get("tokens")
        if not all(type(count) is int and count > 0 for count in counts):
            raise DataError(f"{prefix}.json: bytes={counts[0]!r} and tokens={counts[1]!r} must both be integers > 0")
        sizes.append(counts)
    shares = weights if weights is not None else [tokens for _, tokens in sizes]
    total = sum(share * size / tokens for share, (size, tokens) in zip(shares, sizes, strict=True))
    return total / sum(shares)


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Bits that the model needs for a byte of text, when a token costs `loss` nats on average: it compares models whose
    tokenizers differ, since the loss per token depends on how much text a token is.

    >>> round(bits_per_byte(2.772588722239781, 4.0), 6)  # 4 bits for 4 bytes
    1.0
    """
    return loss / (bytes_per_token * math.log(2))
