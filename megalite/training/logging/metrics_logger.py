"""The logs of a run: console, log.txt, metrics.jsonl, progress.txt, TensorBoard with Megatron-LM's tags, W&B.

Rank 0 writes them; other ranks have a `Silent` reporter. A figure that does not exist is null in metrics.jsonl and
absent from TensorBoard. A log that a full disk refuses ends no run: that is said once on stderr, and losses counted.
"""

import datetime
import functools
import json
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from megalite.config.console import ProgressBar, print_err, print_out, width_of_terminal
from megalite.config.environment import getenv
from megalite.config.options import LogConfig
from megalite.config.text_file import read_ends
from megalite.data.datasets.blended_dataset import bits_per_byte
from megalite.training.datasets import NamedDataset
from megalite.training.logging import log_format as lines
from megalite.training.logging.log_format import Speed, Values, perplexity
from megalite.training.logging.run_dir import AppendOnlyFile
from megalite.training.state import Progress

PROGRESS_S = 10.0  # between two lines of an evaluation; the first comes sooner
FIRST_PROGRESS_S = 2.0
TIME = "%Y-%m-%d %H:%M:%S"  # in progress.txt
LINE = re.compile(  # of progress.txt: time, devices, what happened, FLOPs so far
    r"^([-\d]{10} [:\d]{8})\t[^\t\n]*\t# GPUs: (\d+)\t([^\t\n]+)(?:.*\tFloating-point operations: ([\d.e+]+)\t)?", re.M
)


class ProgressLog:
    """progress.txt in `folder`, as Megatron-LM's --log-progress writes it: a tab-separated line per start and save of
    all jobs of a training. It is read for the throughput since the first job on the same number of devices, `world`.
    `tokens`: trained before this job. Raises OSError."""

    def __init__(self, folder: Path, world: int, flops_per_token: float, tokens: int):
        self.path, self.world, self.flops, self._first_tokens = folder / "progress.txt", world, flops_per_token, tokens
        self._file, self._begin, self._pending = AppendOnlyFile(self.path), time.time(), -1

    def starting(self) -> None:
        self._append("Starting job")

    def log_save(self, log_step: int, tokens: int, background: bool) -> None:
        """A save of `step` was begun, or, if not in the `background`, done; those before it are complete."""
        self.log_saves_done()
        per_device = 1e12 * self.world
        job = (tokens - self._first_tokens) * self.flops / per_device / (time.time() - self._begin)
        since, flops_then = self._first_job()
        elapsed = max((datetime.datetime.now() - since).total_seconds(), 1.0)  # the file's times are whole seconds
        cumulative = (tokens * self.flops - flops_then) / per_device / elapsed
        self._append(
            f"{'Saving async checkpoint' if background else 'Saved checkpoint'}\tIteration: {log_step}\t"
            f"Job throughput: {job:.1f} TFLOP/s/GPU\tCumulative throughput: {cumulative:.1f} TFLOP/s/GPU\t"
            f"Floating-point operations: {tokens * self.flops:.2e}\tTokens (in billions): {tokens / 1e9:.2f}"
        )
        self._pending = log_step if background else -1

    def log_saves_done(self) -> None:
        """All saves are complete."""
        if self._pending >= 0:
            self._append(f"Saved async checkpoint\tIteration: {self._pending}")
            self._pending = -1

    def _append(self, text: str) -> None:
        head = f"{datetime.datetime.now():{TIME}}\tJob ID: {getenv('SLURM_JOB_ID')}\t# GPUs: {self.world}"
        self._file.write(f"{head}\t{text}")
        self._file.close()

    def _first_job(self) -> tuple[datetime.datetime, float]:
        """(beginning of the first of the latest jobs that all had this number of devices, the training's FLOPs then)"""
        begin: datetime.datetime | None = None
        then = latest = 0.0
        for time_, world, what, flops in LINE.findall(read_ends(self.path)[0]):  # not those torn by a crash
            latest = float(flops or latest)
            if int(world) != self.world:
                begin = None
            elif what == "Starting job" and begin is None:
                begin, then = datetime.datetime.strptime(time_, TIME), latest
        return begin or datetime.datetime.fromtimestamp(self._begin), then


class MetricsLogger:
    """Writes to the console, `folder`/log.txt and metrics.jsonl, and where asked to TensorBoard, W&B and `progress`.
    `log`: its `log_style` is not auto, and its packages are there (training/job/command.py)."""

    def __init__(
        self,
        folder: Path,
        speed: Speed,
        log: LogConfig = LogConfig(),  # noqa: B008 (frozen)
        *,
        wandb_config: dict[str, Any] | None = None,
        progress: ProgressLog | None = None,
    ):
        self.speed, self.log, self.megatron, self._progress = speed, log, log.log_style == "megatron", progress
        self._lost, self._warnings, self._results = Counter[str](), list[str](), dict[str, str]()
        self._too_fast, self._rates = False, ""
        self._bar: ProgressBar | None = None
        self._log, self._rows = AppendOnlyFile(folder / "log.txt"), AppendOnlyFile(folder / "metrics.jsonl")
        self._board = None if log.tensorboard_dir is None else self.try_write("TensorBoard", self._open_board)
        self._wandb = None if log.wandb_project is None else self.try_write("W&B", self._open_wandb, wandb_config)

    def _open_board(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        usual = threading.excepthook  # TensorBoard's thread would print a traceback that the next write raises again
        threading.excepthook = lambda e: None if type(e.thread).__name__ == "_AsyncWriterThread" else usual(e)
        return SummaryWriter(self.log.tensorboard_dir, max_queue=self.log.tensorboard_queue_size)

    def _open_wandb(self, config: dict[str, Any] | None) -> Any:
        import wandb  # type: ignore[import-not-found]

        names = dict(project=self.log.wandb_project, name=self.log.wandb_exp_name, entity=self.log.wandb_entity)
        return wandb.init(**names, dir=self.log.wandb_save_dir, config=config)

    def try_write(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """`call(*args)`, or None where that fails: the first time is said on stderr, all are counted under `what`."""
        try:
            return call(*args)
        except Exception as error:  # TensorBoard and W&B raise errors of many types
            self._lost[what] += 1
            if self._lost[what] == 1:
                why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                print_err(f"WARNING: {what}: {why}; training continues, and lost writes are counted")
            return None

    def info(self, text: str, shown: str | None = None) -> None:
        """`shown`: in place of `text` on the console."""
        print_out(text if shown is None else shown)
        self.try_write(str(self._log.path), self._log.write, text)

    def warning(self, text: str) -> None:
        """On stderr, in log.txt and again in the summary."""
        self._warnings.append(text)
        print_err(f"WARNING: {text}")
        self.try_write(str(self._log.path), self._log.write, f"WARNING: {text}")

    def megatron_timestamp(self, what: str) -> None:
        """A point of the run that has a line in Megatron-LM's log."""
        if self.megatron:
            self.info(lines.megatron_text("moment", what=what, now=datetime.datetime.now()))

    def log_train(self, figures: Values) -> None:
        v, speed, now = self.speed.add_rates(figures), self.speed, datetime.datetime.now()
        self._rates = f"{v['rates']}  {v['memory_gib']:.1f}/{v['memory_limit_gib']:.0f} GiB"
        if v["too_fast"] and not self._too_fast:
            self._too_fast, peak = True, f"{speed.peak_tflops:.3g}"
            self.info(f"note: MFU is n/a: {v['tflops']:.3g} TFLOP/s is above the peak of {peak}: {speed.too_low}")
        if self.megatron:
            self.info(lines.megatron_line(v, now, self.log.log_throughput))
        else:
            self.info(lines.megalite_line(v, now), lines.megalite_line(v, now, width_of_terminal()))
        if v["loss"] is not None:
            self._results["training loss"] = f"{v['loss']:.4f} at step {v['step']:,}"
        own: dict[str, Any] = v.get("of_plugins", {})
        self._row(v["step"], v["consumed_tokens"], lines.metrics_row(v) | own)
        layers = {key[:-7]: means for key, means in own.items() if isinstance(means, list)}
        self._scalars({f"{key}/{n}": mean for key, means in layers.items() for n, mean in enumerate(means)}, v["step"])
        self._scalars({key: mean for key, mean in own.items() if not isinstance(mean, list)}, v["step"])
        self._scalars({"iteration-time": v["step_s"], "throughput": v["tflops"]}, v["step"])

    def update_bar(self, log_step: int, last_step: int, loss: float) -> None:
        """Move the bar at the bottom of a terminal: this step's loss, and rates and memory of the last log line."""
        self._bar = self._bar or ProgressBar("step", last_step, done=log_step - 1)
        self._bar.update(log_step, f"loss {loss:.4f}  {self._rates}")

    def log_step(self, figures: Values, memory: dict[str, float]) -> None:
        """One step in TensorBoard. `memory`: bytes by tag."""
        log_step = figures["step"]
        tags = {f.tag: figures[f.name] for f in lines.METRICS if f.tag and figures.get(f.name) is not None}
        if not self.log.log_loss_scale_to_tensorboard:
            tags.pop("loss-scale", None)
        if self.log.moe_per_layer_logging:
            tags |= figures.get("by_layer", {})
        if self.log.log_world_size_to_tensorboard:
            tags["world-size"] = self.speed.devices
        self._scalars(tags, log_step, figures["consumed_samples"])
        self._scalars(memory, log_step)

    def timers(self, log_step: int, seconds: dict[str, list[float]]) -> None:
        """Log the timers of all ranks, in seconds per step."""
        if text := lines.megatron_timers(self.log.timing_log_option, seconds):
            self.info(text)
        if self.log.log_timers_to_tensorboard:
            self._scalars({f"{name}-time": max(times) for name, times in seconds.items() if any(times)}, log_step)

    def evaluation_bar(self, log_step: int, name: str, iters: int) -> ProgressBar:
        """A bar over the batches of an evaluation."""
        what, begin = f"evaluating {name}".rstrip(), time.monotonic()

        def plain(done: float) -> None:
            if self.megatron and done < iters:
                self.info(f"Evaluating iter {done:.0f}/{iters}")
            elif done < iters:  # after the last the line with its loss follows
                left = lines.duration((time.monotonic() - begin) * (iters / done - 1))
                head = f"{datetime.datetime.now():%H:%M:%S}  step {log_step:5d}  {what}"
                self.info(f"{head}: {done:.0f} of {iters} batches, about {left} left")

        return ProgressBar(what, iters, "batches", every_s=PROGRESS_S, first_s=FIRST_PROGRESS_S, plain=plain)

    def log_validation(self, state: Progress, loss: float, named: NamedDataset[Any], what: str = "") -> None:
        """The loss on a set. `what`: "" during training, " on validation set" or " on test set" at the end."""
        log_step, name, test = state.step, named.name, "test" in what
        bpb = None if named.bytes_per_token is None else bits_per_byte(loss, named.bytes_per_token)
        which = ("test" if test else "validation") + (f" {name}" if name else "")
        if self.megatron:
            self.info(lines.megatron_validation_lines(f"iteration {log_step}{what}", loss, name))
        else:
            self.info(lines.megalite_validation_line(log_step, which, loss, bpb, datetime.datetime.now()))
        self._results[f"{which} loss"] = f"{loss:.4f} at step {log_step:,}, perplexity {perplexity(loss):.5g}"
        key = f"val/{name or ('test' if test else 'valid')}"
        row = {f"{key}/loss": loss, f"{key}/ppl": perplexity(loss)}
        self._row(log_step, state.consumed_tokens, row if bpb is None else {**row, f"{key}/bpb": bpb})
        if not test:
            tag = f"lm loss validation{'-' + name if name else ''}"
            tags = {tag: loss, f"{tag} ppl": perplexity(loss) if self.log.log_validation_ppl_to_tensorboard else None}
            self._scalars(tags, log_step, state.consumed_samples)

    def log_save(self, state: Progress, background: bool) -> None:
        """A save was begun, so those before are complete; if it is not in the background, it is complete too."""
        if self._progress is not None:
            self.try_write("progress.txt", self._progress.log_save, state.step, state.consumed_tokens, background)

    def log_saves_done(self) -> None:
        if self._progress is not None:
            self.try_write("progress.txt", self._progress.log_saves_done)

    def summary(self, rows: dict[str, str]) -> None:
        """Log the end of the run: `rows`, the last losses, the paths of its files, and all warnings."""
        if self._bar is not None:
            self._bar.close()
        where = {"log": self._log.path, "metrics": self._rows.path, "TensorBoard": self.log.tensorboard_dir}
        others = map(self._log.path.with_name, ("report.json", "timeline.json", "trace"))
        where |= {path.stem: path for path in others if path.exists()}
        text = lines.table({**rows, **self._results, **{name: str(path) for name, path in where.items() if path}})
        self.info("\n".join([text, *(f"WARNING: {line}" for line in self._warnings)]))

    def _scalars(self, tags: dict[str, Any], log_step: int, samples: int | None = None) -> None:
        """`samples`: write "TAG vs samples" too."""
        if self._board is None:
            return
        for tag, value in tags.items():
            if value is not None:
                self.try_write("TensorBoard", self._board.add_scalar, tag, value, log_step)
                if samples is not None:
                    self.try_write("TensorBoard", self._board.add_scalar, f"{tag} vs samples", value, samples)

    def _row(self, log_step: int, tokens: int, values: dict[str, Any]) -> None:
        # JSON has no nan
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        row = json.dumps({"step": log_step, "tokens": tokens, **finite})
        self.try_write(str(self._rows.path), self._rows.write, row)
        if self._wandb is not None:
            numbers = {k: v for k, v in finite.items() if v is not None and not isinstance(v, list)}
            self.try_write("W&B", functools.partial(self._wandb.log, {"tokens": tokens, **numbers}, step=log_step))

    def close(self) -> None:
        if self._board is not None:
            self.try_write("TensorBoard", self._board.close)
        if self._wandb is not None:
            self.try_write("W&B", self._wandb.finish)
        for file in (self._log, self._rows):
            self.try_write(str(file.path), file.close)
        for what, times in self._lost.items():
            print_err(f"WARNING: {what}: {times} write{'s' * (times > 1)} failed")


class NullLogger(MetricsLogger):
    """The reporter of all ranks but the first."""

    def __init__(self) -> None:
        super().__init__(Path(), Speed(0.0, 1, None))

    info = warning = update_bar = _row = cast(Any, lambda *_: None)

    def evaluation_bar(self, log_step: int, name: str, iters: int) -> ProgressBar:
        return ProgressBar(name, iters, quiet=True)
