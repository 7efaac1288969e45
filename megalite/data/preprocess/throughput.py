"""How fast a preprocessing run goes, as one line: rates since it was started, share of the input, time left."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megalite.data.preprocess.journal import Tally
from megalite.data.preprocess.text_input import TextBlock

READ_AHEAD = 1 << 14  # a decompressor has taken in at most this much more than it has given out


class Meter:
    """progress: of the whole run, counted on by its owner; sizes: of the input files on disk, None if not known."""

    def __init__(self, progress: Tally, sizes: Sequence[int | None]):
        self._now, self._begin = progress, time.perf_counter()
        self._documents, self._tokens = progress.documents[0], sum(progress.tokens)
        self._bytes = progress.input_bytes
        known = [size for size in sizes if size is not None]
        self._before = [sum(known[:i]) for i in range(len(known) + 1)] if len(known) == len(sizes) else None
        self.share: float | None = None  # of the input read so far; None when its size is not known
        self._first: float | None = None

    def read(self, block: TextBlock) -> None:
        if self._before and self._before[-1]:
            self.share = (self._before[block.file] + max(block.disk - READ_AHEAD, 0)) / self._before[-1]
            if self._first is None:
                self._first = self.share

    def line(self) -> str:
        seconds = max(time.perf_counter() - self._begin, 1e-9)
        documents, tokens = self._now.documents[0], sum(self._now.tokens)
        text = (
            f"{documents} documents, {tokens} tokens: {(documents - self._documents) / seconds:.0f} documents/s, "
            f"{(self._now.input_bytes - self._bytes) / seconds / 1e6:.1f} MB/s, "
            f"{(tokens - self._tokens) / seconds:.3g} tokens/s"
        )
        if self.share is None or self._first is None:
            return text
        text += f"; {100 * self.share:.1f} % of the input"
        if self.share > self._first:
            left = round(seconds * (1 - self.share) / (self.share - self._first))
            text += f", {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"
        return text
