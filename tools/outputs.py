"""Files that a program is asked to write: looked at before its work, so that an hour of it is not for nothing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

FORMATS = (".png", ".svg", ".pdf")


def local(text: str) -> str:
    """A path of argparse that is no URL, which would become a folder here; it may hold a secret, so it is not told."""
    if "://" in text:
        raise argparse.ArgumentTypeError("a URL, and this takes a local path only; give one")
    return text


def local_path(text: str) -> Path:
    return Path(local(text))


def unwritable(*, pictures: tuple[str, ...] = (), **paths: Path | None) -> Iterator[str]:
    """What is wrong with these, `name=value breaks rule; remedy`. Of `pictures` the suffix is the format."""
    for name, path in paths.items():
        if path is None:
            continue
        folder = path.parent
        if not folder.is_dir():
            yield f"{name}={path} cannot be written: {folder} is no folder; make it"
        elif path.is_dir():
            yield f"{name}={path} is a folder; give the name of a file"
        elif not os.access(path if path.exists() else folder, os.W_OK):
            yield f"{name}={path} cannot be written: no permission; give another path"
        elif name in pictures and path.suffix.lower() not in FORMATS:
            yield f"{name}={path} has no suffix of a picture; end it in one of {' '.join(FORMATS)}"
