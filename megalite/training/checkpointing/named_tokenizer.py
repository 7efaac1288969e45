"""The tokenizer that a checkpoint names, of this program or another.

A path in a checkpoint is its author's choice, not the user's. One that leads out of the checkpoint is opened all the
same, as runs keep their tokenizer elsewhere, but not before a note has named it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megalite.checkpoint.storage.location import Location
from megalite.config.console import print_err
from megalite.data.errors import DataError
from megalite.data.tokenizers.build_tokenizer import build_tokenizer

Note = Callable[[str], None]
PATHS = ("tokenizer_model", "vocab_file", "merge_file")


def announce(options: Mapping[str, Any], source: Location, note: Note = print_err) -> None:
    """Name each path of `options`, which stand in the checkpoint `source`, that leads out of it."""
    for name in PATHS:
        path = options.get(name)
        if path is not None and not _below(path, source):
            note(f"note: {source} names the {name} {path}, which is not below it: this file is opened")


def _below(path: str, source: Location) -> bool:
    return isinstance(source, Path) and Path(path).resolve().is_relative_to(source.resolve())


def fitting(find: Callable[[], Mapping[str, Any]], rows: int) -> tuple[dict[str, Any], str | None]:
    """(the tokenizer's options that `find` gives, None) if it opens here and has at most `rows` tokens; ({}, why not)
    otherwise, and ({}, None) where there is none."""
    try:
        options = dict(find())
        size = build_tokenizer(**options).vocab_size if options else 0
    except DataError as error:
        return {}, str(error)
    if size > rows:
        return {}, f"{size} tokens, but {rows} rows of the embedding"
    return options, None
