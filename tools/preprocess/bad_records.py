"""Handle bad lines of the input.

A preprocessing run writes samples of them to `PREFIX.rejects.jsonl` (`Rejects`): at most MAX_SAMPLES lines per reason,
with file, line, reason, details and the beginning of the text. `Progress.bad` and `prefix.json` have the complete
counts. Programs that only need the texts use `ValidTexts`. In both cases, `check_bad_fraction` limits the number of bad
lines.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megalite.common.safe_open import open_nofollow
from megalite.data.errors import DataError
from tools.preprocess.journal import Progress, sync
from tools.preprocess.parse_records import BadLine, parse_block
from tools.preprocess.text_input import read_blocks
from tools.preprocess.workers import MAX_SAMPLES, Result

MIN_RECORDS = 1000  # with fewer, the fraction so far says little about the whole input


class Rejects:
    """The file with samples of bad lines.

    Args:
        path: the final path of the file.
        files: the names of the input files.
        size: bytes that an interrupted run has written; later ones are cut off.
    """

    def __init__(self, path: Path, files: Sequence[str], size: int):
        self.path = path
        self._files = files
        self._partial = Path(f"{path}.partial")
        self._file = open(self._partial, "ab", opener=open_nofollow)  # noqa: SIM115, stays open until finish()
        if os.fstat(self._file.fileno()).st_size < size:
            self._file.close()
            raise DataError(f"{self._partial}: shorter than the {size} bytes written before; start over")
        self._file.truncate(size)

    def add(self, file: int, result: Result, progress: Progress) -> None:
        """Write samples of a block's bad lines, up to MAX_SAMPLES per reason, and add its counts to `progress`.

        Args:
            file: the index of the block's file.
            result: the result of the block.
            progress: the counts before this block.
        """
        counts = dict(progress.bad)
        for line, reason, detail, text in result.samples:
            counts[reason] = counts.get(reason, 0) + 1
            if counts[reason] <= MAX_SAMPLES:
                row = {"file": self._files[file], "line": line, "reason": reason, "detail": detail, "text": text}
                raw = json.dumps(row).encode("ascii") + b"\n"
                self._file.write(raw)
                progress.rejects_bytes += len(raw)
        for reason, count in result.bad.items():
            progress.bad[reason] = progress.bad.get(reason, 0) + count

    def sync(self) -> None:
        """Wait until everything written is on disk."""
        sync(self._file)

    def finish(self, size: int) -> None:
        """Give the file its final name, or remove it if its `size` is 0."""
        self.sync()
        if size:
            os.replace(self._partial, self.path)
        else:
            self._partial.unlink()
            self.path.unlink(missing_ok=True)  # of an earlier run with this name
        self._file.close()

    def close(self, remove: bool) -> None:
        """Close the partial file, and delete it if `remove`."""
        if remove and not self._file.closed:
            self._partial.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # on a full disk, flushing the last bytes fails again
            self._file.close()


class ValidTexts:
    """The texts of all files and keys, in order, without bad lines.

    Iterating raises DataError for the first bad line, or, with `max_bad_fraction`, if more lines are bad.

    Args:
        files: the input files.
        keys: the keys of the texts.
        max_bad_fraction: the largest allowed fraction of bad lines.
    """

    def __init__(self, files: Sequence[str], keys: Sequence[str], max_bad_fraction: float = 0.0):
        check_fraction(max_bad_fraction)
        self._files = files
        self._keys = keys
        self._max_bad_fraction = max_bad_fraction
        self._progress = Progress()
        self._first_problem = ""

    def __iter__(self) -> Iterator[str]:
        sizes = [os.path.getsize(name) if name != "-" else 0 for name in self._files]
        bad = self._progress.bad
        for block in read_blocks(self._files, self._keys):
            for line, record in parse_block(block.kind, block.line, block.payload, self._keys):
                self._progress.records += 1
                if not isinstance(record, BadLine):
                    yield from record
                    continue
                problem = f"{self._files[block.file]}:{line}: {record}"
                if not self._max_bad_fraction:
                    raise DataError(f"{problem}; --max-bad-fraction leaves bad lines out")
                self._first_problem = self._first_problem or problem
                bad[record.reason] = bad.get(record.reason, 0) + 1
            fraction_read = (sum(sizes[: block.file]) + block.disk) / max(sum(sizes), 1)
            self._check(min(fraction_read, 0.999))
        self._check(1.0)

    def _check(self, fraction_read: float) -> None:
        hint = f"the first: {self._first_problem}"
        check_bad_fraction(self._progress, self._max_bad_fraction, fraction_read, hint)

    def left_out(self) -> str:
        """Return a note about the bad lines, or an empty string if there were none."""
        if not self._progress.bad:
            return ""
        return f"left out: bad lines: {format_counts(self._progress.bad)}; the first: {self._first_problem}"


def format_counts(bad: dict[str, int]) -> str:
    """Return a text with the number of bad lines for each reason."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(bad.items()))


def check_fraction(max_bad_fraction: float) -> None:
    """Raise DataError unless the value is a fraction."""
    if not 0 <= max_bad_fraction < 1:
        raise DataError(f"max_bad_fraction={max_bad_fraction} is not a fraction: use 0 or more and less than 1")


def check_bad_fraction(progress: Progress, max_bad_fraction: float, fraction_read: float, hint: str) -> None:
    """Raise DataError if too many records are bad.

    Before the end, raise it only if the rest of the input is unlikely to change that: assume that the input has twice
    as many records as its size suggests, and that all further records are good.

    Args:
        progress: the counts so far.
        max_bad_fraction: the largest allowed fraction.
        fraction_read: the fraction of the input that was read; 1 at its end.
        hint: the end of the message.
    """
    num_bad = sum(progress.bad.values())
    if fraction_read >= 1:
        num_records = float(progress.records)
    elif progress.records < MIN_RECORDS:
        return
    else:
        num_records = 2 * progress.records / max(fraction_read, 1e-9)
    if num_bad > max_bad_fraction * num_records:
        counts = f"{num_bad} of {progress.records} lines are bad ({format_counts(progress.bad)})"
        raise DataError(f"{counts}, more than max_bad_fraction={max_bad_fraction} of the input; {hint}")
