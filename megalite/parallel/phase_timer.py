"""Splits the time of a step into phases that add up to it, and names the same spans in a profile.

    with clock.span("backward", "B0.3"):              backward begins
        with clock.span("communication", "all-gather", "tp"):   backward is left, communication begins
            ...                                       and backward goes on

Each moment belongs to the innermost span. On a card a mark is an event on the current stream, so a phase is the time
that the card spent in it, waits included, and the host never waits for the measurement. A span costs two flag checks
unless the step is timed or traced (training/logging/timers.py decides). A clock measures one step, in one thread, at a time.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from megalite.parallel.streams import Timestamp, elapsed_seconds, record_timestamp

NULL_CONTEXT = contextlib.nullcontext()
OTHER_PHASE = "other"  # the part of a step that is in no span


class PhaseTimer:
    def __init__(self) -> None:
        self.timed = self.traced = False
        self._device = torch.device("cpu")
        self._phase = OTHER_PHASE
        self._timestamps: list[tuple[str, Timestamp]] = []  # a phase, and when it began

    def span(self, phase: str, *name: object) -> contextlib.AbstractContextManager[Any]:
        """A context that counts as `phase`; a profile shows it as `name`."""
        return self._span(phase, name) if self.timed or self.traced else NULL_CONTEXT

    @contextlib.contextmanager
    def _span(self, phase: str, name: tuple[object, ...]) -> Iterator[None]:
        traced = self.traced and name
        with torch.profiler.record_function(" ".join(map(str, name))) if traced else NULL_CONTEXT:
            interrupted = self.switch_phase(phase) if self.timed else OTHER_PHASE
            try:
                yield
            finally:
                if self.timed:
                    self.switch_phase(interrupted)

    def start_step(self, device: torch.device) -> None:
        """Begin to time a step."""
        self.timed, self._device, self._timestamps = True, device, []
        self.switch_phase(OTHER_PHASE)

    def end_step(self) -> None:
        self.switch_phase(OTHER_PHASE)
        self.timed = False

    def switch_phase(self, phase: str) -> str:
        """Begin `phase`; return the phase that it interrupts."""
        interrupted, self._phase = self._phase, phase
        self._timestamps.append((phase, record_timestamp(self._device)))
        return interrupted

    def phase_seconds(self) -> dict[str, float]:
        """Seconds by phase of the step that was timed last. Empty if there is none, or if the card has not finished it;
        its marks are dropped then, because a caller that handles an error must not wait."""
        marks, self._timestamps = self._timestamps, []
        spent: dict[str, float] = {}
        for (phase, start_step), (_, end_step) in zip(marks, marks[1:], strict=False):
            seconds = elapsed_seconds(start_step, end_step)
            if seconds is None:
                return {}
            spent[phase] = spent.get(phase, 0.0) + seconds
        return spent
