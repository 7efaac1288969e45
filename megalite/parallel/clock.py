"""Splits the time of a step into phases that add up to it, and names the same spans in a profile.

    with clock.span("backward", "B0.3"):              backward begins
        with clock.span("communication", "all-gather", "tp"):   backward is left, communication begins
            ...                                       and backward goes on

Each moment belongs to the innermost span. On a card a mark is an event on the current stream, so a phase is the time
that the card spent in it, waits included, and the host never waits for the measurement. A span costs two flag checks
unless the step is timed or traced (train/tell/timers.py decides). A clock measures one step, in one thread, at a time.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from megalite.parallel.streams import Mark, mark, seconds_between

NOTHING = contextlib.nullcontext()
REST = "other"  # the part of a step that is in no span


class Clock:
    def __init__(self) -> None:
        self.timed = self.traced = False
        self._device = torch.device("cpu")
        self._phase = REST
        self._marks: list[tuple[str, Mark]] = []  # a phase, and when it began

    def span(self, phase: str, *name: object) -> contextlib.AbstractContextManager[Any]:
        """A context that counts as `phase`; a profile shows it as `name`."""
        return self._span(phase, name) if self.timed or self.traced else NOTHING

    @contextlib.contextmanager
    def _span(self, phase: str, name: tuple[object, ...]) -> Iterator[None]:
        traced = self.traced and name
        with torch.profiler.record_function(" ".join(map(str, name))) if traced else NOTHING:
            interrupted = self.enter(phase) if self.timed else REST
            try:
                yield
            finally:
                if self.timed:
                    self.enter(interrupted)

    def begin(self, device: torch.device) -> None:
        """Begin to time a step."""
        self.timed, self._device, self._marks = True, device, []
        self.enter(REST)

    def end(self) -> None:
        self.enter(REST)
        self.timed = False

    def enter(self, phase: str) -> str:
        """Begin `phase`; return the phase that it interrupts."""
        interrupted, self._phase = self._phase, phase
        self._marks.append((phase, mark(self._device)))
        return interrupted

    def read(self) -> dict[str, float]:
        """Seconds by phase of the step that was timed last. Empty if there is none, or if the card has not finished it;
        its marks are dropped then, because a caller that handles an error must not wait."""
        marks, self._marks = self._marks, []
        spent: dict[str, float] = {}
        for (phase, begin), (_, end) in zip(marks, marks[1:], strict=False):
            seconds = seconds_between(begin, end)
            if seconds is None:
                return {}
            spent[phase] = spent.get(phase, 0.0) + seconds
        return spent
