"""The trackers that receive the metrics of a run, behind one protocol: TensorBoard, W&B, MLflow, trackio, plugins'.

Each tracker is opened, written and closed in a thread of its own, behind a bounded queue. A tracker that is slow,
broken or out of reach therefore neither delays nor ends the training. Values that find the queue full are dropped and
counted.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from megalite.common.console import print_err
from megalite.common.exits import message_of
from megalite.common.safe_open import write_atomically
from megalite.config.options import LogConfig
from megalite.config.registry import REGISTRIES

MAX_PENDING = 10_000  # entries in a queue; a TensorBoard entry has the scalars of a step
CLOSE_TIMEOUT_S = 10.0  # the wait for a tracker at the end of a run
MLFLOW_PARAMS_PER_BATCH = 100  # limits of MLflow's tracking server
MLFLOW_PARAM_CHARACTERS = 500


class SinkError(Exception):
    """Values were lost; the text is the reason."""


class MetricsSink(Protocol):
    """A tracker. All methods are called from the same thread and may block or raise any exception."""

    name: str

    def open(self) -> None:
        """Import the package and open the tracker's run."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write values by name."""

    def close(self) -> None:
        """Write what is pending and end the tracker's run."""


class QueuedSink:
    """A sink that is written by a daemon thread. Its methods neither raise nor wait, except `close` for a limited time.

    Args:
        try_write: Calls a function with arguments, and reports and counts an exception under a name; thread-safe.
    """

    def __init__(
        self,
        sink: MetricsSink,
        try_write: Callable[..., Any],
        max_pending: int = MAX_PENDING,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ):
        self.sink = sink
        self._try_write = try_write
        self._close_timeout_s = close_timeout_s
        self._queue: queue.Queue[tuple[Mapping[str, float], int] | None] = queue.Queue(max_pending)
        self._is_open = False
        self._thread = threading.Thread(target=self._run, name=f"{sink.name} sink", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Queue values by name."""
        self._try_write(self.sink.name, self._put, (values, step))

    def _put(self, entry: tuple[Mapping[str, float], int]) -> None:
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            raise SinkError(f"it is slower than the training, and {self._queue.maxsize:,} writes wait for it") from None

    def _run(self) -> None:
        self._try_write(self.sink.name, self._open)
        while (entry := self._queue.get()) is not None:
            self._try_write(self.sink.name, self._write, *entry)
        if self._is_open:
            self._try_write(self.sink.name, self.sink.close)

    def _open(self) -> None:
        self.sink.open()
        self._is_open = True

    def _write(self, values: Mapping[str, float], step: int) -> None:
        if not self._is_open:
            raise SinkError("it could not be opened")
        self.sink.log(values, step)

    def close(self) -> None:
        """Close the sink after what is queued, and give up after `close_timeout_s`."""
        deadline = time.monotonic() + self._close_timeout_s
        with contextlib.suppress(queue.Full):  # the thread is blocked
            self._queue.put(None, timeout=self._close_timeout_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() or not self._queue.empty():
            for _ in range(max(1, self._queue.qsize())):  # the end mark counts for the write in progress
                self._try_write(self.sink.name, self._give_up)

    def _give_up(self) -> None:
        raise SinkError(f"not finished {self._close_timeout_s:g} s after the end of the run")


class RunIdFile:
    """The file in the run directory with a tracker's id of the run, so that a resumed run continues it.

    Args:
        resumes: Whether the run continues an earlier one. Otherwise a file of an earlier run is replaced.
    """

    def __init__(self, path: Path, resumes: bool):
        self.path = path
        self.resumes = resumes

    def read(self) -> str | None:
        """Return the id to continue, or None for a new run of the tracker."""
        if not self.resumes or not self.path.exists():
            return None
        return self.path.read_text(encoding="utf-8").strip() or None

    def write(self, run_id: str) -> None:
        """Keep the id for a resume; without it a resume starts a new run, so a failure does not lose the tracker."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, f"{run_id}\n")
        except OSError as error:
            print_err(f"WARNING: {self.path}: {error.strerror}; a resume will start a new run in this tracker")


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows.

    Attributes:
        directory: The run directory.
        config: Section -> option -> value, for the options that are not at their defaults.
        resumes: Whether the run continues an earlier one.
    """

    directory: Path
    config: Mapping[str, Mapping[str, Any]]
    resumes: bool

    @property
    def name(self) -> str:
        """The name of the run directory."""
        return self.directory.resolve().name

    def id_file(self, name: str) -> RunIdFile:
        """Return the file of this name with a tracker's id of the run."""
        return RunIdFile(self.directory / name, self.resumes)


class TensorBoardSink:
    """TensorBoard's event files."""

    name = "TensorBoard"

    def __init__(self, directory: str, queue_size: int):
        self._directory = directory
        self._queue_size = queue_size

    def open(self) -> None:
        """Create the event file."""
        from torch.utils.tensorboard import SummaryWriter

        default_hook = threading.excepthook

        def excepthook(args: Any) -> None:
            # An error in TensorBoard's thread is raised again by the next write, so its traceback is not printed.
            if type(args.thread).__name__ != "_AsyncWriterThread":
                default_hook(args)

        threading.excepthook = excepthook
        self._writer = SummaryWriter(self._directory, max_queue=self._queue_size)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write scalars by tag."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases; WANDB_MODE=offline writes to the disk only."""

    name = "W&B"

    def __init__(self, log: LogConfig, config: Mapping[str, Any], run_id: RunIdFile):
        self._log = log
        self._config = config
        self._run_id = run_id

    def open(self) -> None:
        """Start or continue the run."""
        import wandb  # type: ignore[import-not-found]

        names = dict(project=self._log.wandb_project, name=self._log.wandb_exp_name, entity=self._log.wandb_entity)
        run_id = self._run_id.read()
        resume = {} if run_id is None else {"id": run_id, "resume": "allow"}
        self._run = wandb.init(**names, dir=self._log.wandb_save_dir, config=self._config, **resume)
        self._run_id.write(self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write a row."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflowSink:
    """A run of MLflow on the server or in the directory of MLFLOW_TRACKING_URI."""

    name = "MLflow"

    def __init__(self, experiment: str, run_name: str, config: Mapping[str, Mapping[str, Any]], run_id: RunIdFile):
        self._experiment = experiment
        self._run_name = run_name
        self._config = config
        self._run_id = run_id

    def open(self) -> None:
        """Start or continue the run; a new one gets the options as parameters."""
        from mlflow import MlflowClient  # type: ignore[import-not-found]

        self._client = MlflowClient()
        self._id = self._run_id.read()
        if self._id is not None:
            try:
                self._client.update_run(self._id, status="RUNNING")
                return
            except Exception as error:  # it was deleted, or is on another server
                print_err(f"WARNING: MLflow: run {self._id} cannot be continued ({error}); a new one is started")
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            experiment_id = self._client.create_experiment(self._experiment)
        else:
            experiment_id = experiment.experiment_id
        self._id = self._client.create_run(experiment_id, run_name=self._run_name).info.run_id
        self._run_id.write(self._id)
        try:
            self._log_params()
        except Exception as error:
            print_err(f"WARNING: MLflow: the options are not shown with the run ({error})")

    def _log_params(self) -> None:
        from mlflow.entities import Param  # type: ignore[import-not-found]

        params = [
            Param(f"{section}.{name}", str(value)[:MLFLOW_PARAM_CHARACTERS])
            for section, options in self._config.items()
            for name, value in options.items()
        ]
        for batch in _batches(params, MLFLOW_PARAMS_PER_BATCH):
            self._client.log_batch(self._id, params=batch)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write a row in one request."""
        from mlflow.entities import Metric  # type: ignore[import-not-found]

        now_ms = int(1000 * time.time())
        self._client.log_batch(self._id, metrics=[Metric(key, float(v), now_ms, step) for key, v in values.items()])

    def close(self) -> None:
        """End the run; its status says only that the process has ended, status.json has the outcome."""
        self._client.set_terminated(self._id)


class TrackioSink:
    """A run of trackio, on this machine or in the Space of TRACKIO_SPACE_ID. Runs are continued by name."""

    name = "trackio"

    def __init__(self, project: str, run_name: str, config: Mapping[str, Any], run_name_file: RunIdFile):
        self._project = project
        self._run_name = run_name
        self._config = config
        self._run_name_file = run_name_file

    def open(self) -> None:
        """Start or continue the run. trackio chooses another name for a new run if its name is in use."""
        import trackio  # type: ignore[import-not-found]

        earlier = self._run_name_file.read()
        self._run = trackio.init(
            project=self._project,
            name=earlier or self._run_name,
            config=dict(self._config),
            resume="never" if earlier is None else "allow",
        )
        self._run_name_file.write(self._run.name)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write a row."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class PluginSink:
    """A tracker of a plugin. Its code runs in the sink's thread, and may raise anything, also SystemExit.

    Args:
        name: The name under which the plugin has registered it.
        build: The registered function, which returns a tracker with the methods of `MetricsSink`.
    """

    def __init__(self, name: str, build: Callable[[TrackedRun], Any], run: TrackedRun):
        self.name = name
        self._build = build
        self._run = run

    def open(self) -> None:
        """Build the tracker and open it."""
        self._call(self._open)

    def _open(self) -> None:
        self._tracker = self._build(self._run)
        self._tracker.open()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write values by name."""
        self._call(lambda: self._tracker.log(values, step))

    def close(self) -> None:
        """Close the tracker."""
        self._call(lambda: self._tracker.close())

    @staticmethod
    def _call(function: Callable[[], Any]) -> None:
        try:
            function()
        except Exception:
            raise
        except BaseException as error:
            raise SinkError(message_of(error)) from error


def tensorboard_sinks(log: LogConfig) -> list[MetricsSink]:
    """Return the sinks that receive Megatron-LM's tags."""
    if log.tensorboard_dir is None:
        return []
    return [TensorBoardSink(log.tensorboard_dir, log.tensorboard_queue_size)]


def row_sinks(log: LogConfig, run: TrackedRun) -> list[MetricsSink]:
    """Return the sinks that receive the rows of metrics.jsonl."""
    sinks: list[MetricsSink] = []
    if log.wandb_project is not None:
        sinks.append(WandbSink(log, run.config, run.id_file("wandb_run_id.txt")))
    if log.mlflow_experiment is not None:
        sinks.append(MLflowSink(log.mlflow_experiment, run.name, run.config, run.id_file("mlflow_run_id.txt")))
    if log.trackio_project is not None:
        sinks.append(TrackioSink(log.trackio_project, run.name, run.config, run.id_file("trackio_run_id.txt")))
    plugins = REGISTRIES["tracker"].plugin_components
    for name, build in plugins.items():
        # each has its own copy of the options, since a plugin may change them
        own_run = replace(run, config={section: dict(options) for section, options in run.config.items()})
        sinks.append(PluginSink(name, build, own_run))
    return sinks


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
