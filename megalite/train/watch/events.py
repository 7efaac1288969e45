"""events.jsonl of the run directory: what happened to a run beside its steps, one JSON object per line.

    {"time": "2026-11-22T12:04:31+01:00", "event": "straggler", "rank": 0, "step": 120, ...}

Launcher and ranks append to the same file, each line in one write, so that none tears another's. Imports no torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megalite.train.run_dir import at_once, complain, now


class Events:
    """Of one process; `rank` None: the launcher. Telling never raises: the first loss is said on stderr."""

    def __init__(self, folder: Path, rank: int | None = None):
        self.path, self.rank, self._lost = folder / "events.jsonl", rank, False

    def add(self, event: str, step: int | None = None, **facts: Any) -> None:
        """`facts`: what JSON can hold; anything else as its text."""
        row = {"time": now(), "event": event, "rank": self.rank, "step": step, **facts}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = at_once(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                os.write(file, (json.dumps(row, default=str) + "\n").encode(errors="backslashreplace"))
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            if not self._lost:
                self._lost = True
                complain(f"WARNING: {self.path}: {getattr(error, 'strerror', None) or error}; events are lost there")
