"""status.json says every BEAT_S that the run lives, whatever it does: steps, evaluates, saves, loads, compiles.

A thread of rank 0, as one batch or one file may take longer than that; it is silent while the watchdog has told that
nothing goes on, so that a status which is old belongs to a run that is gone or hangs. It has the disk to itself: one
that hangs holds up nobody else.
"""

from __future__ import annotations

import threading
from pathlib import Path

from megalite.config.options import Config
from megalite.train.state import Run
from megalite.train.tell.run_dir import leave_status, stands
from megalite.train.watch.hang import Watchdog

BEAT_S = 10.0  # between two looks of others at status.json that are worth it
CLOSE_S = 5.0  # that a disk gets for a beat on its way


class Heartbeat:
    """`resumes`: of `Ranks`. Another run's status stands until this one begins: it may be refused."""

    def __init__(self, folder: Path, run: Run, config: Config, dog: Watchdog, resumes: bool):
        self._folder, self._run, self._config, self._dog = folder, run, config, dog
        self._closing, self._one = threading.Event(), threading.Lock()  # says at a time: they have one temporary file
        self._thread = threading.Thread(target=self._beat, name="megalite-heartbeat", daemon=True)
        if not stands(folder, config, resumes):
            self.begin()

    def begin(self) -> None:
        if self._run.mesh.world.is_first:
            self._say()
            if self._thread.ident is None:
                self._thread.start()

    def close(self) -> None:
        """The next word is the last one."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            if not self._dog.hangs:
                self._say()

    def _say(self) -> None:
        state = self._run.state
        with self._one:
            if self._folder.is_dir():
                leave_status(self._folder, "running", self._config, step=state.step, tokens=state.consumed_tokens)
