"""Lines for people: how far something long is, at most every few seconds, and none for what is short."""

from __future__ import annotations

import threading
import time

from megalite.config.console import let_go_of_console


def show(text: str) -> None:
    """On stdout while that can be written: its reader may be gone, or its disk be full, which ends no run."""
    try:
        print(text + "\n", end="", flush=True)  # one write: ranks share it
    except (OSError, ValueError):
        let_go_of_console()


class ProgressLines:
    """How much of `total`, in `unit`, is done. `add` may be called from any thread."""

    def __init__(self, what: str, total: float, unit: str, every_s: float = 10.0):
        self._what, self._total, self._unit, self._every_s = what, total, unit, every_s
        self._done, self._told, self._lock = 0.0, time.monotonic(), threading.Lock()

    def add(self, amount: float) -> None:
        with self._lock:
            self._done += amount
            now = time.monotonic()
            if now - self._told < self._every_s:
                return
            self._told = now
            show(f"{self._what}: {self._done:.4g} of {self._total:.4g} {self._unit}")
