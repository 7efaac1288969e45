"""The heartbeat: status.json is renewed every BEAT_S while a run lives, so that an old one means it is gone or hangs.

A thread of rank 0 writes it, as one batch or file may take longer than that, and a disk that hangs must not block the
run. It pauses while the watchdog sees a hang.
"""

import threading
from pathlib import Path

from megalite.config.options import Config
from megalite.train.state import Run
from megalite.train.tell.run_dir import leave_status, stands
from megalite.train.watch.hang import Watchdog

BEAT_S = 10.0
CLOSE_S = 5.0  # time for a write that has begun


class Heartbeat:
    """`resumes`: of `Ranks`. Another run's status stays until this one begins, which may be refused."""

    def __init__(self, folder: Path, run: Run, config: Config, dog: Watchdog, resumes: bool):
        self._folder, self._run, self._config, self._dog = folder, run, config, dog
        self._closing, self._writing = threading.Event(), threading.Lock()  # writers share a temporary file
        self._thread = threading.Thread(target=self._beat, name="megalite-heartbeat", daemon=True)
        if not stands(folder, config, resumes):
            self.begin()

    def begin(self) -> None:
        if self._run.mesh.world.is_first:
            self._say()
            if self._thread.ident is None:
                self._thread.start()

    def close(self) -> None:
        """End the thread; the run then writes the last status."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            if not self._dog.hangs:
                self._say()

    def _say(self) -> None:
        state = self._run.state
        with self._writing:
            if self._folder.is_dir():
                leave_status(self._folder, "running", self._config, step=state.step, tokens=state.consumed_tokens)
