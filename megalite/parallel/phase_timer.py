"""Phase timer: splits the time of a step into phases that add up to it, and names the same spans in a profile.

    with timer.span("backward", "B0.3"):                        backward starts
        with timer.span("communication", "all-gather", "tp"):   backward is interrupted, communication starts
            ...                                                 backward resumes

Time is attributed to the innermost span. On a GPU a timestamp is an event on the current stream, so a phase is the time
that the GPU spent in it, waits included, and the host never waits for the measurement. A span costs two flag checks
unless the step is timed (training/logging/time_breakdown.py decides) or traced (training/logging/profiler.py). A timer
measures one step at a time, in one thread.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from megalite.parallel.streams import Timestamp, elapsed_seconds, record_timestamp

NULL_CONTEXT = contextlib.nullcontext()
OTHER_PHASE = "other"  # the part of a step outside of all spans


class PhaseTimer:
    """A timer of the phases of a step.

    Attributes:
        timed: True while a step is timed.
        traced: True while spans are to be named in a profile.
    """

    def __init__(self) -> None:
        self.timed = self.traced = False
        self._device = torch.device("cpu")
        self._phase = OTHER_PHASE
        self._timestamps: list[tuple[str, Timestamp]] = []  # (phase, when it starts)

    def span(self, phase: str, *name: object) -> contextlib.AbstractContextManager[Any]:
        """Return a context whose time counts as `phase`; a profile shows it as `name`, joined by spaces."""
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
        """Start timing a step."""
        self.timed = True
        self._device = device
        self._timestamps = []
        self.switch_phase(OTHER_PHASE)

    def end_step(self) -> None:
        """Stop timing the step."""
        self.switch_phase(OTHER_PHASE)
        self.timed = False

    def switch_phase(self, phase: str) -> str:
        """Start `phase` and return the phase that it interrupts."""
        interrupted = self._phase
        self._phase = phase
        self._timestamps.append((phase, record_timestamp(self._device)))
        return interrupted

    def phase_seconds(self) -> dict[str, float]:
        """Return the seconds by phase of the last timed step, and discard its timestamps.

        Returns {} if no step was timed or the GPU has not finished it: a caller that handles an error must not wait.
        """
        timestamps = self._timestamps
        self._timestamps = []
        seconds_by_phase: dict[str, float] = {}
        for (phase, start), (_, end) in itertools.pairwise(timestamps):
            seconds = elapsed_seconds(start, end)
            if seconds is None:
                return {}
            seconds_by_phase[phase] = seconds_by_phase.get(phase, 0.0) + seconds
        return seconds_by_phase
