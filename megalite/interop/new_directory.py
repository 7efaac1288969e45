"""A directory that appears whole or not at all: it is made beside its place and renamed at the end."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalite.checkpoint.format.manifest import CheckpointError


@contextmanager
def new_directory(folder: Path) -> Iterator[Path]:
    """An empty directory to fill, which becomes `folder` when the block ends without an error; else nothing is left.
    Raises CheckpointError for `folder` that is not empty or cannot be written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not empty; give a new directory")
    part = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        if folder.exists():
            folder.rmdir()
        os.replace(part, folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error}); give a directory elsewhere") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
