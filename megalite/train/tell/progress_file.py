"""progress.txt as Megatron-LM's --log-progress writes it: a tab-separated line per start and save, over all jobs of a
training. It is read for the throughput since the first job on the same number of devices."""

import datetime
import time
from pathlib import Path

from megalite.config.environment import variable
from megalite.config.own_file import opener

TIME = "%Y-%m-%d %H:%M:%S"


class ProgressLog:
    """The file in `folder`, for `world` devices. `tokens`: trained before this job. Raises OSError."""

    def __init__(self, folder: Path, world: int, flops_per_token: float, tokens: int):
        self.path, self.world, self.flops, self._first_tokens = folder / "progress.txt", world, flops_per_token, tokens
        self._begin, self._pending = time.time(), -1

    def starting(self) -> None:
        self._append("Starting job")

    def saving(self, step: int, tokens: int, background: bool) -> None:
        """A save of `step` was begun, or, if not in the `background`, done; those before it are complete."""
        self.saved_all()
        per_device = 1e12 * self.world
        job = (tokens - self._first_tokens) * self.flops / per_device / (time.time() - self._begin)
        since, flops_then = self._first_job()
        elapsed = max((datetime.datetime.now() - since).total_seconds(), 1.0)  # the file's times are whole seconds
        cumulative = (tokens * self.flops - flops_then) / per_device / elapsed
        self._append(
            f"{'Saving async checkpoint' if background else 'Saved checkpoint'}\tIteration: {step}\t"
            f"Job throughput: {job:.1f} TFLOP/s/GPU\tCumulative throughput: {cumulative:.1f} TFLOP/s/GPU\t"
            f"Floating-point operations: {tokens * self.flops:.2e}\tTokens (in billions): {tokens / 1e9:.2f}"
        )
        self._pending = step if background else -1

    def saved_all(self) -> None:
        """All saves are complete."""
        if self._pending >= 0:
            self._append(f"Saved async checkpoint\tIteration: {self._pending}")
            self._pending = -1

    def _append(self, text: str) -> None:
        head = f"{datetime.datetime.now():{TIME}}\tJob ID: {variable('SLURM_JOB_ID')}\t# GPUs: {self.world}"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8", opener=opener) as file:
            file.write(f"{head}\t{text}\n")

    def _first_job(self) -> tuple[datetime.datetime, float]:
        """(beginning of the first of the latest jobs that all had this number of devices, the training's FLOPs then)"""
        begin: datetime.datetime | None = None
        then = latest = 0.0
        with open(self.path, encoding="utf-8", errors="replace", opener=opener) as lines:
            for line in lines:
                fields = line.rstrip("\n").split("\t")
                try:
                    world, what = int(fields[2].partition(": ")[2]), fields[3]
                    if len(fields) > 7:
                        latest = float(fields[7].partition(": ")[2])
                    if world != self.world:
                        begin = None
                    elif what == "Starting job" and begin is None:
                        begin, then = datetime.datetime.strptime(fields[0], TIME), latest
                except (ValueError, IndexError):
                    continue  # torn by a crash
        return begin or datetime.datetime.fromtimestamp(self._begin), then
