"""Bad lines: passed over by `GoodTexts` where texts alone are wanted; else a sample of them in `PREFIX.rejects.jsonl`;
and how many a run may have.

At most SAMPLES lines of each reason are written, with file, line, reason, what exactly is wrong and how the text
begins; the counts, which are complete, are in `Tally.bad` and in `prefix.json`.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megalite.common.safe_open import open_nofollow
from megalite.data.errors import DataError
from tools.preprocess.journal import Tally, sync
from tools.preprocess.parse_records import BadLine, parse_block
from tools.preprocess.text_input import read_blocks
from tools.preprocess.workers import SAMPLES, Result

JUDGED_AFTER = 1000  # records, before which no share is taken for that of the whole input


class Rejects:
    def __init__(self, path: Path, files: Sequence[str], size: int):
        self.path, self._files = path, files
        self._partial = Path(f"{path}.partial")
        self._file = open(self._partial, "ab", opener=open_nofollow)  # noqa: SIM115, stays open until finish()
        if os.fstat(self._file.fileno()).st_size < size:
            self._file.close()
            raise DataError(f"{self._partial}: shorter than the {size} bytes written before; start over")
        self._file.truncate(size)

    def add(self, file: int, result: Result, progress: Tally) -> None:
        """Write what there is room for and count it in `progress`, which has the counts before this block."""
        taken = dict(progress.bad)
        for line, reason, detail, text in result.samples:
            taken[reason] = taken.get(reason, 0) + 1
            if taken[reason] <= SAMPLES:
                row = {"file": self._files[file], "line": line, "reason": reason, "detail": detail, "text": text}
                raw = json.dumps(row).encode("ascii") + b"\n"
                self._file.write(raw)
                progress.rejects_bytes += len(raw)
        for reason, count in result.bad.items():
            progress.bad[reason] = progress.bad.get(reason, 0) + count

    def sync(self) -> None:
        sync(self._file)

    def finish(self, size: int) -> None:
        self.sync()
        if size:
            os.replace(self._partial, self.path)
        else:  # nor does that of an earlier run under this name say anything about this one
            self._partial.unlink()
            self.path.unlink(missing_ok=True)
        self._file.close()

    def close(self, remove: bool) -> None:
        if remove and not self._file.closed:
            self._partial.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a full disk refuses the last bytes again
            self._file.close()


class GoodTexts:
    """Every text of the files under every key, in order. DataError names file, line and reason of the first bad line,
    or where `max_bad` of the lines may be bad says that there are more; `left_out` says which were."""

    def __init__(self, files: Sequence[str], keys: Sequence[str], max_bad: float = 0.0):
        check_fraction(max_bad)
        self.files, self.keys, self.max_bad = files, keys, max_bad
        self.tally, self.first = Tally(), ""

    def __iter__(self) -> Iterator[str]:
        sizes = [os.path.getsize(name) if name != "-" else 0 for name in self.files]
        for block in read_blocks(self.files, self.keys):
            for line, found in parse_block(block.kind, block.line, block.payload, self.keys):
                self.tally.records += 1
                if not isinstance(found, BadLine):
                    yield from found
                    continue
                words = f"{self.files[block.file]}:{line}: {found}"
                if not self.max_bad:
                    raise DataError(f"{words}; --max-bad-fraction leaves bad lines out")
                self.first = self.first or words
                self.tally.bad[found.reason] = self.tally.bad.get(found.reason, 0) + 1
            share = (sum(sizes[: block.file]) + block.disk) / max(sum(sizes), 1)
            self._judge(min(share, 0.999))
        self._judge(1.0)

    def _judge(self, share: float) -> None:
        judge(self.tally, self.max_bad, share, f"the first: {self.first}")

    def left_out(self) -> str:
        return f"left out: bad lines: {in_words(self.tally.bad)}; the first: {self.first}" if self.tally.bad else ""


def in_words(bad: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(bad.items()))


def check_fraction(max_bad: float) -> None:
    if not 0 <= max_bad < 1:
        raise DataError(f"max_bad_fraction={max_bad} is not a fraction: use 0 or more and less than 1")


def judge(progress: Tally, limit: float, share_read: float, see: str) -> None:
    """Raise when more than `limit` of the records are bad; before the end, when the rest can hardly change that.

    share_read: of the input, 1 at the end. Before the end the whole input is taken to have twice the
    records that its size lets expect, all of the further ones good.
    """
    bad = sum(progress.bad.values())
    if share_read < 1 and progress.records < JUDGED_AFTER:
        return
    whole = progress.records if share_read >= 1 else 2 * progress.records / max(share_read, 1e-9)
    if bad > limit * whole:
        share = f"{bad} of {progress.records} lines are bad ({in_words(progress.bad)})"
        raise DataError(f"{share}, more than max_bad_fraction={limit} of the input; {see}")
