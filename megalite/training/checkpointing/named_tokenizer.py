"""The tokenizer that a checkpoint names, megalite's own or an external one.

A path in a checkpoint is chosen by its author, not by the user. A path outside the checkpoint is opened nevertheless,
because runs keep their tokenizer elsewhere, but a note names it first.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megalite.checkpoint.storage.location import Location
from megalite.common.console import print_err
from megalite.data.errors import DataError
from megalite.data.tokenizers.build_tokenizer import build_tokenizer

PrintLine = Callable[[str], None]
PATHS = ("tokenizer_model", "vocab_file", "merge_file")


def print_external_paths(options: Mapping[str, Any], source: Location, print_line: PrintLine = print_err) -> None:
    """Print a note for each path in `options`, from the checkpoint `source`, that is outside of it."""
    for name in PATHS:
        path = options.get(name)
        if path is not None and not _is_inside(path, source):
            print_line(f"note: {source} names the {name} {path}, which is not below it: this file is opened")


def _is_inside(path: str, source: Location) -> bool:
    return isinstance(source, Path) and Path(path).resolve().is_relative_to(source.resolve())


def find_usable_tokenizer(find: Callable[[], Mapping[str, Any]], rows: int) -> tuple[dict[str, Any], str | None]:
    """Return the tokenizer's options from `find` if it can be opened and has at most `rows` tokens.

    Returns (options, None), otherwise ({}, reason); ({}, None) if `find` finds no tokenizer.
    """
    try:
        options = dict(find())
        size = build_tokenizer(**options).vocab_size if options else 0
    except DataError as error:
        return {}, str(error)
    if size > rows:
        return {}, f"{size} tokens, but {rows} rows of the embedding"
    return options, None
