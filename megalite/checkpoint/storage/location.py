"""Places of checkpoints, paths or URLs that fsspec knows; the names in a --save directory; the errors."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from megalite.common.optional_packages import missing_package_message
from megalite.config.option import find_url_secret

TRACKER = "latest_checkpointed_iteration.txt"
LOCK_FILE = ".lock"
# in a folder iter_NNNNNNN or release that Megatron-LM has written, in any format, and never in one of ours
_MEGATRON = (".metadata", "metadata.json", "mp_rank_00", "mp_rank_00_000", "mp_rank_00_000_000")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; its text names the file and the reason."""


class OtherRankError(CheckpointError):
    """Another rank failed, and tells why."""


def error_text(error: BaseException) -> str:
    """Text of the error, with its type and place unless it is about files: a MemoryError has no text."""
    text, place = str(error), error.__traceback__
    if text and isinstance(error, (CheckpointError, OSError)):
        return text
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = "" if place is None else f" in {Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno}"
    return f"{type(error).__name__}{where}{': ' * bool(text)}{text}"


@dataclass(frozen=True)
class RemotePath:
    """A folder or file behind a URL, with the interface of a Path. `files`: the fsspec file system; `path`: its name
    there. Not an os.PathLike: code for local paths must fail on it."""

    text: str
    path: str
    files: Any = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self.text.rpartition("/")[0], self.path.rpartition("/")[0], self.files)

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.text}/{name}", f"{self.path}/{name}", self.files)

    def __str__(self) -> str:
        return self.text


Location = Path | RemotePath
P = TypeVar("P", bound=Location)
Append = Callable[[bytes | bytearray | memoryview], object]  # of a file that is being written


def is_url(text: str | Path | RemotePath) -> bool:
    """Whether it names a place outside the local file system."""
    return isinstance(text, RemotePath) or ("://" in str(text) and not str(text).startswith(("file://", "local://")))


def parse_location(text: str | Path | RemotePath) -> Location:
    """A path, with or without `file://`, or a URL, whose package finds the credentials. Raises CheckpointError for an
    unknown protocol or a package that is not installed."""
    if isinstance(text, (Path, RemotePath)):
        return text
    if not is_url(text):
        head, _, rest = text.rpartition("://")
        if head and not rest.startswith("/"):
            raise CheckpointError(f"{text!r} is not absolute: give file:///directory, or a path alone")
        return Path(rest)
    if (reason := find_url_secret(text)) is not None:
        raise CheckpointError(f"the place of a checkpoint {reason}")
    if "::" in text:
        raise CheckpointError(f"{text!r} chains protocols, through which no checkpoint can be written; give one URL")
    try:
        import fsspec.core
    except ImportError:
        raise CheckpointError(missing_package_message(f"{text!r}: a URL", "fsspec")) from None
    try:  # no cache of listings: other processes write here. A new client would cost 0.3 s: fsspec keeps one
        files, path = fsspec.core.url_to_fs(text.rstrip("/"), use_listings_cache=False)
    except (ImportError, ValueError) as error:  # the message names the package, or the protocol nobody knows
        raise CheckpointError(f"{text!r}: {error}; install what it names, or give a local path") from None
    return RemotePath(text.rstrip("/"), path.rstrip("/"), files)


def checkpoint_dir(directory: str | Path | RemotePath, step: int) -> Location:
    return parse_location(directory) / f"iter_{step:07d}"


def step_from_name(name: str) -> int | None:
    """The step of a checkpoint's folder with this name; None for any other name."""
    match = re.fullmatch(r"iter_([0-9]{7}|[1-9][0-9]{7,})", name)
    return int(match[1]) if match else None


def is_megatron_checkpoint(folder: Path) -> bool:
    """Whether it is a checkpoint of Megatron-LM, and not one of ours."""
    ours = any((folder / name).exists() for name in ("manifest.json", "COMPLETE"))
    return not ours and any((folder / name).exists() for name in _MEGATRON)
