"""Locations of checkpoints (paths, or URLs that fsspec supports), names in a --save directory, and errors."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from megalite.common.optional_packages import missing_package_message
from megalite.config.option import find_url_secret

TRACKER = "latest_checkpointed_iteration.txt"
LOCK_FILE = ".lock"
# names in a directory iter_NNNNNNN or release that only Megatron-LM writes, in any of its formats
_MEGATRON_NAMES = (".metadata", "metadata.json", "mp_rank_00", "mp_rank_00_000", "mp_rank_00_000_000")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message names the file and the reason."""


class OtherRankError(CheckpointError):
    """Another rank has failed, and reports the reason."""


def error_text(error: BaseException) -> str:
    """Return the message of an error, with its type and source line unless it is about files.

    Some errors, such as MemoryError, have no message.
    """
    text = str(error)
    if text and isinstance(error, (CheckpointError, OSError)):
        return text
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    location = "" if frame is None else f" in {Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}"
    title = f"{type(error).__name__}{location}"
    return f"{title}: {text}" if text else title


@dataclass(frozen=True)
class RemotePath:
    """A file or directory behind a URL, with the interface of a Path.

    It is not an os.PathLike, so that code for local paths fails on it.

    Attributes:
        text: The URL.
        path: The name in the fsspec file system.
        files: The fsspec file system.
    """

    text: str
    path: str
    files: Any = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """The directory that contains it."""
        return RemotePath(self.text.rpartition("/")[0], self.path.rpartition("/")[0], self.files)

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.text}/{name}", f"{self.path}/{name}", self.files)

    def __str__(self) -> str:
        return self.text


Location = Path | RemotePath
P = TypeVar("P", bound=Location)
Append = Callable[[bytes | bytearray | memoryview], object]  # appends bytes to a file that is being written


def is_url(text: str | Path | RemotePath) -> bool:
    """Return True if `text` is a location outside the local file system."""
    return isinstance(text, RemotePath) or ("://" in str(text) and not str(text).startswith(("file://", "local://")))


def parse_location(text: str | Path | RemotePath) -> Location:
    """Return a path, given with or without `file://`, or the location of a URL.

    The fsspec package of the URL's protocol finds the credentials itself.

    Raises:
        CheckpointError: The protocol is unknown, its package is not installed, or the URL contains a secret.
    """
    if isinstance(text, (Path, RemotePath)):
        return text
    if not is_url(text):
        head, _, rest = text.rpartition("://")
        if head and not rest.startswith("/"):
            raise CheckpointError(f"{text!r} is not absolute: give file:///directory, or a path alone")
        return Path(rest)
    if (reason := find_url_secret(text)) is not None:
        raise CheckpointError(f"the location of a checkpoint {reason}")
    if "::" in text:
        raise CheckpointError(f"{text!r} chains protocols, through which no checkpoint can be written; give one URL")
    try:
        import fsspec.core
    except ImportError:
        raise CheckpointError(missing_package_message(f"{text!r}: a URL", "fsspec")) from None
    # Listings are not cached, because other processes write here. A new client would take 0.3 s, so fsspec caches it.
    try:
        files, path = fsspec.core.url_to_fs(text.rstrip("/"), use_listings_cache=False)
    except (ImportError, ValueError) as error:  # the message names the package, or the unknown protocol
        raise CheckpointError(f"{text!r}: {error}; install what it names, or give a local path") from None
    return RemotePath(text.rstrip("/"), path.rstrip("/"), files)


def checkpoint_dir(directory: str | Path | RemotePath, step: int) -> Location:
    """Return the directory of the checkpoint of a step."""
    return parse_location(directory) / f"iter_{step:07d}"


def step_from_name(name: str) -> int | None:
    """Return the step of a checkpoint directory with this name, or None for any other name."""
    match = re.fullmatch(r"iter_([0-9]{7}|[1-9][0-9]{7,})", name)
    return int(match[1]) if match else None


def is_megatron_checkpoint(directory: Path) -> bool:
    """Return True if the directory is a checkpoint of Megatron-LM, and not one of megalite."""
    is_megalite = any((directory / name).exists() for name in ("manifest.json", "COMPLETE"))
    return not is_megalite and any((directory / name).exists() for name in _MEGATRON_NAMES)
