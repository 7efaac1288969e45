"""The logs of a run: console, log.txt, metrics.jsonl, progress.txt, and the trackers (metrics_sinks.py).

Rank 0 writes them; other ranks have a `NullLogger`. A metric without a value is null in metrics.jsonl and absent from
TensorBoard. A failed write (a full disk) does not end the run: it is reported once on stderr, and all are counted.
"""

import datetime
import json
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megalite.common.console import ProgressBar, print_err, print_out, width_of_terminal
from megalite.common.environment import getenv
from megalite.common.text_file import read_ends
from megalite.common.wording import plural
from megalite.config.options import LogConfig
from megalite.data.datasets.bits_per_byte import bits_per_byte
from megalite.data.datasets.requests import TaskScores
from megalite.training.datasets import NamedDataset
from megalite.training.logging import log_format
from megalite.training.logging.event_log import AppendOnlyFile
from megalite.training.logging.log_format import Speed, Values, perplexity
from megalite.training.logging.metrics_sinks import QueuedSink, TrackedRun, row_sinks, tensorboard_sinks
from megalite.training.state import Progress

PROGRESS_S = 10.0  # between two progress lines of an evaluation
FIRST_PROGRESS_S = 2.0
TIME = "%Y-%m-%d %H:%M:%S"  # time format of progress.txt
LINE = re.compile(  # a line of progress.txt: time, devices, event, FLOPs so far
    r"^([-\d]{10} [:\d]{8})\t[^\t\n]*\t# GPUs: (\d+)\t([^\t\n]+)(?:.*\tFloating-point operations: ([\d.e+]+)\t)?", re.M
)


class ProgressLog:
    """progress.txt, as Megatron-LM's --log-progress writes it: a tab-separated line per start and save of all jobs.

    The file is read back for the throughput since the first job on the same number of devices. Methods raise OSError.

    Args:
        world: The number of devices.
        tokens: The tokens trained before this job.
    """

    def __init__(self, directory: Path, world: int, flops_per_token: float, tokens: int):
        self.path = directory / "progress.txt"
        self.world = world
        self.flops = flops_per_token
        self._initial_tokens = tokens
        self._file = AppendOnlyFile(self.path)
        self._start = time.time()
        self._pending_step: int | None = None  # step of a background save

    def log_start(self) -> None:
        """Log the start of the job."""
        self._append("Starting job")

    def log_save(self, step: int, tokens: int, background: bool) -> None:
        """Log that a save was started in the background, or is done; earlier saves are complete."""
        self.log_saves_done()
        per_device = 1e12 * self.world
        job_rate = (tokens - self._initial_tokens) * self.flops / per_device / (time.time() - self._start)
        first_start, first_flops = self._first_job()
        elapsed_s = max((datetime.datetime.now() - first_start).total_seconds(), 1.0)  # the file has full seconds
        total_rate = (tokens * self.flops - first_flops) / per_device / elapsed_s
        self._append(
            f"{'Saving async checkpoint' if background else 'Saved checkpoint'}\tIteration: {step}\t"
            f"Job throughput: {job_rate:.1f} TFLOP/s/GPU\tCumulative throughput: {total_rate:.1f} TFLOP/s/GPU\t"
            f"Floating-point operations: {tokens * self.flops:.2e}\tTokens (in billions): {tokens / 1e9:.2f}"
        )
        self._pending_step = step if background else None

    def log_saves_done(self) -> None:
        """Log that the pending background save is complete, if there is one."""
        if self._pending_step is not None:
            self._append(f"Saved async checkpoint\tIteration: {self._pending_step}")
            self._pending_step = None

    def _append(self, text: str) -> None:
        head = f"{datetime.datetime.now():{TIME}}\tJob ID: {getenv('SLURM_JOB_ID')}\t# GPUs: {self.world}"
        self._file.write(f"{head}\t{text}")
        self._file.close()

    def _first_job(self) -> tuple[datetime.datetime, float]:
        """Return (start, FLOPs of the training at the start) of the first job since the number of devices changed."""
        start: datetime.datetime | None = None
        start_flops = latest_flops = 0.0
        for time_, world, event, flops in LINE.findall(read_ends(self.path)[0]):  # incomplete lines do not match
            latest_flops = float(flops or latest_flops)
            if int(world) != self.world:
                start = None
            elif event == "Starting job" and start is None:
                start = datetime.datetime.strptime(time_, TIME)
                start_flops = latest_flops
        return start or datetime.datetime.fromtimestamp(self._start), start_flops


class MetricsLogger:
    """The logger of rank 0: console, log.txt, metrics.jsonl, and if enabled trackers and progress.txt.

    Args:
        log: The options, with a `log_style` other than auto; the packages that they need are installed, which
            training/job/command.py has checked.
        tracked_config: Section -> option -> value, which trackers show with the run. Without it the rows of
            metrics.jsonl are sent to no tracker.
        resumes: Whether the run continues an earlier one, also in its trackers.
    """

    def __init__(
        self,
        directory: Path,
        speed: Speed,
        log: LogConfig = LogConfig(),  # noqa: B008 (frozen)
        *,
        tracked_config: dict[str, dict[str, Any]] | None = None,
        resumes: bool = False,
        progress: ProgressLog | None = None,
    ):
        self.speed = speed
        self.log = log
        self.megatron_style = log.log_style == "megatron"
        self._progress = progress
        self._failed_writes = Counter[str]()  # failed writes by log
        self._failed_writes_lock = threading.Lock()  # trackers write in their own threads
        self._warnings = list[str]()
        self._results = dict[str, str]()  # the last losses, for the summary
        self._too_fast = False  # the note about a FLOP/s above the peak was printed
        self._rates = ""  # rates and memory of the last log line
        self._bar: ProgressBar | None = None
        self._log = AppendOnlyFile(directory / "log.txt")
        self._rows = AppendOnlyFile(directory / "metrics.jsonl")
        rows = [] if tracked_config is None else row_sinks(log, TrackedRun(directory, tracked_config, resumes))
        self._tag_sinks = [QueuedSink(sink, self.try_write) for sink in tensorboard_sinks(log)]
        self._row_sinks = [QueuedSink(sink, self.try_write) for sink in rows]

    def try_write(self, log_name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Return `call(*args)`, or None if it raises; failures are counted, and the first of each log is reported."""
        try:
            return call(*args)
        except Exception as error:  # trackers raise errors of many types
            with self._failed_writes_lock:
                self._failed_writes[log_name] += 1
                is_first = self._failed_writes[log_name] == 1
            if is_first:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                print_err(f"WARNING: {log_name}: {reason}; training continues, and lost writes are counted")
            return None

    def info(self, text: str, console_text: str | None = None) -> None:
        """Log `text`, or on the console `console_text` if it is given."""
        print_out(text if console_text is None else console_text)
        self.try_write(str(self._log.path), self._log.write, text)

    def warning(self, text: str) -> None:
        """Log a warning on stderr and in log.txt, and repeat it in the summary."""
        self._warnings.append(text)
        print_err(f"WARNING: {text}")
        self.try_write(str(self._log.path), self._log.write, f"WARNING: {text}")

    def megatron_timestamp(self, what: str) -> None:
        """Log Megatron-LM's line about a point of the run, in its style only."""
        if self.megatron_style:
            self.info(log_format.megatron_text("moment", what=what, now=datetime.datetime.now()))

    def log_train(self, metrics: Values) -> None:
        """Write a log line and a row of metrics.jsonl about the steps since the last one."""
        values, now = self.speed.add_rates(metrics), datetime.datetime.now()
        step = values["step"]
        self._rates = f"{values['rates']}  {values['memory_gib']:.1f}/{values['memory_limit_gib']:.0f} GiB"
        if values["too_fast"] and not self._too_fast:
            self._too_fast = True
            self.info(
                f"note: MFU is n/a: {values['tflops'] * (1 + self.speed.recomputed):.3g} TFLOP/s is above the peak of "
                f"{self.speed.peak_tflops:.3g}: {self.speed.too_low}"
            )
        if self.megatron_style:
            self.info(log_format.megatron_line(values, now, self.log.log_throughput))
        else:
            self.info(log_format.megalite_line(values, now), log_format.megalite_line(values, now, width_of_terminal()))
        if values["loss"] is not None:
            self._results["training loss"] = f"{values['loss']:.4f} at step {step:,}"
        plugin_metrics: dict[str, Any] = values.get("plugin_metrics", {})
        groups = {
            f"{group}/{name}": value
            for group in ("efficiency", "hardware")
            for name, value in values.get(group, {}).items()
            if value is not None
        }
        self._write_row(step, values["consumed_tokens"], log_format.metrics_row(values) | groups | plugin_metrics)
        for key, mean in plugin_metrics.items():
            if isinstance(mean, list):  # a mean per layer; the key is NAME/layers
                name = key.removesuffix("/layers")
                self._write_scalars({f"{name}/{n}": layer_mean for n, layer_mean in enumerate(mean)}, step)
            else:
                self._write_scalars({key: mean}, step)
        rates = {"iteration-time": values["step_s"], "throughput": values["tflops"]}
        self._write_scalars({**rates, "mfu": values["mfu"], "hfu": values["hfu"], **groups}, step)

    def update_bar(self, step: int, last_step: int, loss: float) -> None:
        """Move the bar at the bottom of a terminal; it shows this step's loss and the rates of the last log line."""
        self._bar = self._bar or ProgressBar("step", last_step, done=step - 1)
        self._bar.update(step, f"loss {loss:.4f}  {self._rates}")

    def log_step(self, metrics: Values, memory: dict[str, float]) -> None:
        """Write the metrics of a step, and the memory (bytes by tag), to TensorBoard."""
        step = metrics["step"]
        tags = {
            metric.tag: metrics[metric.name]
            for metric in log_format.metrics_of(metrics)
            if metric.tag and metrics.get(metric.name) is not None
        }
        if not self.log.log_loss_scale_to_tensorboard:
            tags.pop("loss-scale", None)
        if self.log.moe_per_layer_logging:
            tags |= log_format.layer_loss_tags(metrics["layer_losses"])
        if self.log.log_world_size_to_tensorboard:
            tags["world-size"] = self.speed.devices
        self._write_scalars(tags, step, metrics["consumed_samples"])
        self._write_scalars(memory, step)

    def log_timers(self, step: int, seconds: dict[str, list[float]]) -> None:
        """Log the timers of all ranks, in seconds per step."""
        if text := log_format.megatron_timers(self.log.timing_log_option, seconds):
            self.info(text)
        if self.log.log_timers_to_tensorboard:
            self._write_scalars({f"{name}-time": max(times) for name, times in seconds.items() if any(times)}, step)

    def evaluation_bar(self, step: int, name: str, iters: int) -> ProgressBar:
        """Return a progress bar over the batches of an evaluation."""
        title, start = f"evaluating {name}".rstrip(), time.monotonic()

        def log_progress(done: float) -> None:
            if done >= iters:  # the line with the loss follows
                return
            if self.megatron_style:
                self.info(f"Evaluating iter {done:.0f}/{iters}")
            else:
                remaining = log_format.duration((time.monotonic() - start) * (iters / done - 1))
                head = f"{datetime.datetime.now():%H:%M:%S}  step {step:5d}  {title}"
                self.info(f"{head}: {done:.0f} of {iters} batches, about {remaining} left")

        return ProgressBar(title, iters, "batches", every_s=PROGRESS_S, first_s=FIRST_PROGRESS_S, plain=log_progress)

    def log_validation(
        self, progress: Progress, losses: Mapping[str, float], dataset: NamedDataset[Any], suffix: str = ""
    ) -> None:
        """Log the losses on a validation or test set.

        Args:
            losses: Means in nats per label, by name: "loss", and with it the others of the head.
            suffix: "" during training, " on validation set" or " on test set" at its end.
        """
        step, name, loss = progress.step, dataset.name, losses["loss"]
        is_test = "test" in suffix
        bpb = None if dataset.bytes_per_token is None else bits_per_byte(loss, dataset.bytes_per_token)
        title = ("test" if is_test else "validation") + (f" {name}" if name else "")
        if self.megatron_style:
            self.info(log_format.megatron_validation_lines(f"iteration {step}{suffix}", loss, name))
        else:
            self.info(log_format.megalite_validation_line(step, title, loss, bpb, datetime.datetime.now()))
        self._results[f"{title} loss"] = f"{loss:.4f} at step {step:,}, perplexity {perplexity(loss):.5g}"
        key = f"val/{name or ('test' if is_test else 'valid')}"
        row = {f"{key}/{loss_name}": mean for loss_name, mean in losses.items()} | {f"{key}/ppl": perplexity(loss)}
        if bpb is not None:
            row[f"{key}/bpb"] = bpb
        self._write_row(step, progress.consumed_tokens, row)
        if not is_test:
            validation = f"validation{'-' + name if name else ''}"
            tag = f"lm loss {validation}"
            tags = {f"{log_format.tag_of(loss_name)} {validation}": mean for loss_name, mean in losses.items()}
            if self.log.log_validation_ppl_to_tensorboard:
                tags[f"{tag} ppl"] = perplexity(loss)
            self._write_scalars(tags, step, progress.consumed_samples)

    def log_scores(self, progress: Progress, scores_by_task: Mapping[str, TaskScores]) -> None:
        """Log the scores of the requests of each task."""
        step = progress.step
        row: dict[str, float] = {}
        for task, scores in scores_by_task.items():
            self.info(log_format.score_line(step, task, scores.values, datetime.datetime.now()))
            row |= {f"eval/{task}/{name}": value for name, value in scores.values.items()}
            self._results[f"scores of {task}"] = f"{log_format.format_scores(scores.values)} at step {step:,}"
        self._write_row(step, progress.consumed_tokens, row)
        self._write_scalars(row, step, progress.consumed_samples)

    def log_save(self, progress: Progress, background: bool) -> None:
        """Log a save in progress.txt; earlier saves are complete, and this one too unless it is in the background."""
        if self._progress is not None:
            self.try_write("progress.txt", self._progress.log_save, progress.step, progress.consumed_tokens, background)

    def log_saves_done(self) -> None:
        """Log in progress.txt that all saves are complete."""
        if self._progress is not None:
            self.try_write("progress.txt", self._progress.log_saves_done)

    def log_summary(self, rows: dict[str, str]) -> None:
        """Log the end of the run: `rows`, the last losses, the paths of its files, and all warnings."""
        if self._bar is not None:
            self._bar.close()
        paths = {"log": self._log.path, "metrics": self._rows.path, "TensorBoard": self.log.tensorboard_dir}
        optional_paths = map(self._log.path.with_name, ("report.json", "timeline.json", "trace"))
        paths |= {path.stem: path for path in optional_paths if path.exists()}
        text = log_format.table({**rows, **self._results, **{name: str(path) for name, path in paths.items() if path}})
        self.info("\n".join([text, *(f"WARNING: {line}" for line in self._warnings)]))

    def _write_scalars(self, tags: dict[str, Any], step: int, samples: int | None = None) -> None:
        """Write values by tag to TensorBoard; with `samples` also "TAG vs samples"."""
        values = {tag: value for tag, value in tags.items() if value is not None}
        for sink in self._tag_sinks if values else ():
            sink.log(values, step)
            if samples is not None:
                sink.log({f"{tag} vs samples": value for tag, value in values.items()}, samples)

    def _write_row(self, step: int, tokens: int, values: dict[str, Any]) -> None:
        """Write a row to metrics.jsonl and trackers; values that are not finite become null: JSON has no nan."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        row = json.dumps({"step": step, "tokens": tokens, **finite})
        self.try_write(str(self._rows.path), self._rows.write, row)
        numbers = {key: value for key, value in finite.items() if value is not None and not isinstance(value, list)}
        for sink in self._row_sinks:
            sink.log({"tokens": tokens, **numbers}, step)

    def close(self) -> None:
        """Close all logs and report how many writes failed."""
        for sink in (*self._tag_sinks, *self._row_sinks):
            sink.close()
        for file in (self._log, self._rows):
            self.try_write(str(file.path), file.close)
        for log_name, times in self._failed_writes.items():
            print_err(f"WARNING: {log_name}: {times} {plural('write', times)} failed")


class NullLogger(MetricsLogger):
    """The logger of all ranks except rank 0, which writes nothing."""

    def __init__(self) -> None:
        super().__init__(Path(), Speed(0.0, 1, None))

    def info(self, *_: Any) -> None:
        """Write nothing."""

    def warning(self, *_: Any) -> None:
        """Write nothing."""

    def update_bar(self, *_: Any) -> None:
        """Show nothing."""

    def _write_row(self, *_: Any) -> None:
        """Write nothing."""

    def evaluation_bar(self, step: int, name: str, iters: int) -> ProgressBar:
        """Return a progress bar that shows nothing."""
        return ProgressBar(name, iters, quiet=True)
