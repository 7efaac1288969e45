"""Trackers neither delay nor end a run, and a resumed run continues its runs in them.

The packages are replaced by modules that record what they receive, except that of the example plugin.
"""

import json
import os
import sys
import threading
import time
import types
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import programs
import pytest
from program_runs import load_json_lines
from train_cases import SMALL_RUN, config_from, pretrain

from megalite.common.exit_codes import ExitCode
from megalite.config.options import LogConfig
from megalite.training.logging.log_format import Speed
from megalite.training.logging.metrics_logger import MetricsLogger
from megalite.training.logging.metrics_sinks import MLFLOW_PARAM_CHARACTERS, QueuedSink, RunIdFile


class RecordingSink:
    """A sink that keeps what it receives, and blocks or raises on request."""

    name = "tracker"

    def __init__(self, fails_to: str = "") -> None:
        self.fails_to = fails_to
        self.released = threading.Event()
        self.released.set()
        self.steps: list[int] = []
        self.is_closed = False

    def _act(self, method: str) -> None:
        self.released.wait(60)
        if self.fails_to == method:
            raise ConnectionError("the network is down")

    def open(self) -> None:
        self._act("open")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._act("log")
        self.steps.append(step)

    def close(self) -> None:
        self._act("close")
        self.is_closed = True


@pytest.fixture
def logger(tmp_path: Path) -> MetricsLogger:
    return MetricsLogger(tmp_path, Speed(1.0, 1, None), LogConfig(log_style="megalite"))


def test_sink_gets_everything_in_order(logger: MetricsLogger, capsys: pytest.CaptureFixture[str]) -> None:
    sink = RecordingSink()
    logger._row_sinks = [QueuedSink(sink, logger.try_write)]
    for step in range(100):
        logger._write_row(step, 0, {"train/loss": 1.0})
    logger.close()
    assert sink.steps == [*range(100)] and sink.is_closed and capsys.readouterr().err == ""


@pytest.mark.parametrize(("fails_to", "lost"), [("open", 4), ("log", 3), ("close", 1)])
def test_broken_sink_is_reported_once_and_counted(
    fails_to: str, lost: int, logger: MetricsLogger, capsys: pytest.CaptureFixture[str]
) -> None:
    logger._row_sinks = [QueuedSink(RecordingSink(fails_to), logger.try_write)]
    for step in range(3):
        logger._write_row(step, 0, {})
    logger.close()
    first, count = capsys.readouterr().err.splitlines()
    assert first == "WARNING: tracker: the network is down; training continues, and lost writes are counted"
    assert count == f"WARNING: tracker: {lost} write{'s' if lost > 1 else ''} failed"
    assert [row["step"] for row in load_json_lines(logger._rows.path)] == [0, 1, 2]


@pytest.mark.parametrize("max_pending", [5, 1000])
def test_blocked_sink_never_delays_the_training(
    max_pending: int, logger: MetricsLogger, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sink never answers: 5 entries wait, the others are dropped; at the end all of them are lost."""
    sink = RecordingSink()
    sink.released.clear()
    logger._row_sinks = [QueuedSink(sink, logger.try_write, max_pending, close_timeout_s=0.3)]
    start = time.monotonic()
    for step in range(100):
        logger._write_row(step, 0, {})
    logged_s = time.monotonic() - start
    logger.close()
    closed_s = time.monotonic() - start
    sink.released.set()
    err = capsys.readouterr().err
    assert logged_s < 5 and 0.3 <= closed_s < logged_s + 5 and not sink.steps
    assert len(load_json_lines(logger._rows.path)) == 100
    reason = "5 writes wait for it" if max_pending == 5 else "not finished 0.3 s after the end of the run"
    assert reason in err and f"WARNING: tracker: {100 if max_pending == 5 else 101} writes failed" in err


class FakeTrackers:
    """W&B, MLflow and trackio as modules that keep runs by id, as their servers do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = defaultdict(list)  # run -> rows
        self.params: dict[str, Any] = {}
        self.status: dict[str, str] = {}
        self.threads: set[threading.Thread] = set()
        self.down = False
        self._num_runs = 0
        self._experiments: dict[str, str] = {}
        namespace = types.SimpleNamespace
        entities = namespace(
            Metric=lambda key, value, timestamp, step: namespace(key=key, value=value, time=timestamp, step=step),
            Param=lambda key, value: (key, value),
        )
        modules = {
            "wandb": namespace(init=self._start_wandb),
            "mlflow": namespace(MlflowClient=lambda: self, entities=entities),
            "mlflow.entities": entities,
            "trackio": namespace(init=self._start_trackio),
        }
        for name, module in modules.items():
            module.__spec__ = "installed"
            monkeypatch.setitem(sys.modules, name, module)

    def _new_id(self, tracker: str) -> str:
        self.threads.add(threading.current_thread())
        if self.down:
            raise ConnectionError(f"{tracker} cannot be reached")
        self._num_runs += 1
        return f"{tracker}-{self._num_runs}"

    def _run(self, run_id: str) -> Any:
        self.status[run_id] = "RUNNING"
        return types.SimpleNamespace(
            id=run_id,
            name=run_id,
            log=lambda row, step: self.rows[run_id].append({"step": step, **row}),
            finish=lambda: self.status.update({run_id: "FINISHED"}),
        )

    def _start_wandb(self, id: str | None = None, resume: str | None = None, **_: Any) -> Any:  # noqa: A002
        assert (id is None) is (resume is None)
        return self._run(id or self._new_id("wandb"))

    def _start_trackio(self, project: str, name: str, resume: str, config: dict[str, Any]) -> Any:
        assert project == "mine" and config["train"]["train_iters"] > 0
        if resume == "allow" and name in self.rows:
            return self._run(name)
        return self._run(self._new_id("trackio") + f"-{name}")

    def get_experiment_by_name(self, name: str) -> Any:
        experiment_id = self._experiments.get(name)
        return experiment_id and types.SimpleNamespace(experiment_id=experiment_id)

    def create_experiment(self, name: str) -> str:
        assert name not in self._experiments  # a second one is refused
        return self._experiments.setdefault(name, "7")

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        assert experiment_id == "7"
        return types.SimpleNamespace(info=self._run_info(self._new_id("mlflow")))

    def _run_info(self, run_id: str) -> Any:
        self.status[run_id] = "RUNNING"
        return types.SimpleNamespace(run_id=run_id)

    def update_run(self, run_id: str, status: str) -> None:
        self.status[run_id] = status

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert self.status[run_id] == "RUNNING" and len(params) <= 100
        self.params.update(params)
        if metrics:
            assert all(abs(metric.time / 1000 - time.time()) < 60 for metric in metrics)
            self.rows[run_id].append({"step": metrics[0].step, **{metric.key: metric.value for metric in metrics}})

    def set_terminated(self, run_id: str) -> None:
        self.status[run_id] = "FINISHED"


def train(run_dir: Path, steps: int) -> int:
    flags = f"--train-iters {steps} --lr-decay-iters 4 --save {run_dir} --load {run_dir} --wandb-project mine"
    flags += " --mlflow-experiment mine --trackio-project mine"
    return pretrain(config_from([*SMALL_RUN, *flags.split()]))


def test_resumed_run_continues_the_runs_of_its_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackers = FakeTrackers(monkeypatch)
    run_dir = tmp_path / "first"
    for steps in (2, 4):
        assert train(run_dir, steps) == ExitCode.DONE
    assert sorted(run_id.split("-")[0] for run_id in trackers.rows) == ["mlflow", "trackio", "wandb"]
    assert set(trackers.status.values()) == {"FINISHED"} and threading.main_thread() not in trackers.threads
    assert [run_id.endswith("-first") for run_id in trackers.rows if run_id.startswith("trackio")] == [True]
    for rows in trackers.rows.values():
        training = [row for row in rows if "train/loss" in row]
        assert [row["step"] for row in training] == [1, 2, 3, 4]
        written = [row for row in load_json_lines(run_dir / "metrics.jsonl") if "train/loss" in row]
        assert [row["train/loss"] for row in training[2:]] == [row["train/loss"] for row in written[-2:]]
    assert trackers.params["train.train_iters"] == "2"  # of the first process
    assert all(len(value) <= MLFLOW_PARAM_CHARACTERS for value in trackers.params.values())
    assert train(tmp_path / "second", 1) == ExitCode.DONE
    assert len(trackers.rows) == 6


def test_tracker_is_kept_if_its_id_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    RunIdFile(tmp_path / "file/wandb_run_id.txt", resumes=False).write("run-1")
    assert "wandb_run_id.txt: " in (err := capsys.readouterr().err) and "a resume will start a new run" in err


def test_run_trains_while_trackers_are_down(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    trackers = FakeTrackers(monkeypatch)
    trackers.down = True
    assert train(tmp_path / "run", 2) == ExitCode.DONE
    err = capsys.readouterr().err
    for name, tracker in (("W&B", "wandb"), ("MLflow", "mlflow"), ("trackio", "trackio")):
        assert f"WARNING: {name}: {tracker} cannot be reached; training continues" in err
        assert err.count(f"WARNING: {name}: ") == 2
    assert not trackers.rows and not [*(tmp_path / "run").glob("*_run_id.txt")]
    assert [row["step"] for row in load_json_lines(tmp_path / "run/metrics.jsonl") if "train/loss" in row] == [1, 2]


def test_run_in_the_directory_of_another_one_starts_runs_of_its_own(tmp_path: Path, monkeypatch) -> None:
    trackers = FakeTrackers(monkeypatch)
    used, base = tmp_path / "used", tmp_path / "base"
    assert train(used, 1) == train(base, 2) == ExitCode.DONE
    flags = f"--train-iters 4 --lr-decay-iters 4 --load {base} --run-dir {used} --mlflow-experiment mine"
    assert pretrain(config_from([*SMALL_RUN, *flags.split()])) == ExitCode.DONE
    steps = {run: [row["step"] for row in rows if "train/loss" in row] for run, rows in trackers.rows.items()}
    assert [steps[run] for run in steps if run.startswith("mlflow")] == [[1], [1, 2], [3, 4]]


@pytest.mark.parametrize("fails", ["update_run", "log_batch"])
def test_mlflow_keeps_its_rows_if_a_request_at_the_start_fails(fails: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """The run of the first process was deleted, or the options cannot be written."""
    trackers = FakeTrackers(monkeypatch)
    if fails == "update_run":
        assert train(tmp_path / "run", 2) == ExitCode.DONE
    write = getattr(trackers, fails)

    def fail_at_the_start(run_id: str, **arguments: Any) -> None:
        if fails == "update_run" or "params" in arguments:
            raise ConnectionError("no such run")
        write(run_id, **arguments)

    monkeypatch.setattr(trackers, fails, fail_at_the_start)
    assert train(tmp_path / "run", 4) == ExitCode.DONE
    *_, rows = (rows for run, rows in trackers.rows.items() if run.startswith("mlflow"))
    first_step = 3 if fails == "update_run" else 1
    assert [row["step"] for row in rows if "train/loss" in row] == [*range(first_step, 5)]
    assert "WARNING: MLflow: " in (err := capsys.readouterr().err) and "no such run" in err


# ---- trackers of plugins
TRACKER = """
import threading, megalite

@megalite.register("tracker", "mine")
class Mine:
    def __init__(self, run):
        assert threading.current_thread() is not threading.main_thread()
        self.run, self.file = run, run.id_file("mine_run_id.txt")
    def open(self):
        self.id = self.file.read() or f"{self.run.name}-{self.run.config['train']['train_iters']}"
        self.file.write(self.id)
        self.out = open(f"{self.id}.rows", "a")
    def log(self, values, step):
        FAILS
        if "train/loss" in values:
            print(step, values["train/loss"], file=self.out)
    def close(self):
        self.out.close()
"""


def train_with_plugin(directory: Path, steps: int, *flags: str, fails: str = "pass") -> str:
    """Train in another process, and return its output. Rank 1 of 2 would fail to write the same file."""
    (directory / "mine.py").write_text(TRACKER.replace("FAILS", fails))
    argv = [*SMALL_RUN, *f"--plugin mine.py --train-iters {steps} --lr-decay-iters 4 --save run --load run".split()]
    return programs.run_python("pretrain_gpt.py", *argv, *flags, cwd=directory, timeout=200, check=True).stderr


@pytest.mark.slow
def test_tracker_of_a_plugin_gets_the_rows_once_and_is_continued(tmp_path: Path) -> None:
    train_with_plugin(tmp_path, 2, "--nproc", "2")
    train_with_plugin(tmp_path, 4)
    written = [row for row in load_json_lines(tmp_path / "run/metrics.jsonl") if "train/loss" in row]
    lines = [f"{row['step']} {row['train/loss']}" for row in written]
    assert (tmp_path / "run-2.rows").read_text().splitlines() == lines and len(lines) == 4
    assert [path.name for path in tmp_path.glob("*.rows")] == ["run-2.rows"]


@pytest.mark.presubmit
@pytest.mark.parametrize(("fails", "reason"), [("1 / 0", "division by zero"), ("exit(3)", "SystemExit: 3")])
def test_broken_tracker_of_a_plugin_does_not_end_the_run(tmp_path: Path, fails: str, reason: str) -> None:
    err = train_with_plugin(tmp_path, 2, fails=fails)
    rows = load_json_lines(tmp_path / "run/metrics.jsonl")
    assert f"WARNING: mine: {reason}; training continues" in err
    assert f"WARNING: mine: {len(rows)} writes failed" in err
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2]


@pytest.mark.nightly(guards=("examples/plugins", "megalite/training/logging/metrics_sinks.py"))
def test_example_writes_an_experiment_of_comet(tmp_path: Path) -> None:
    """The package writes the file that `comet upload` sends; a resume writes another one of the same experiment."""
    if find_spec("comet_ml") is None:
        pytest.skip("needs comet_ml")
    offline = tmp_path / "offline"
    offline.mkdir()
    env = {**os.environ, "COMET_START_ONLINE": "0", "COMET_OFFLINE_DIRECTORY": str(offline), "COMET_PROJECT_NAME": "p"}
    plugin = Path(__file__).parents[2] / "examples/plugins/tracker.py"
    metrics, keys = {}, set()
    for steps in (2, 4):
        flags = f"--plugin {plugin} --train-iters {steps} --lr-decay-iters 4 --save run --load run"
        argv = [*SMALL_RUN, *flags.split()]
        programs.run_python("pretrain_gpt.py", *argv, cwd=tmp_path, env=env, timeout=200, check=True)
        keys.add((tmp_path / "run/comet_run_id.txt").read_text().strip())
        [archive] = offline.iterdir()
        with zipfile.ZipFile(archive) as file:
            messages = [json.loads(line) for line in file.read("messages.json").splitlines()]
            assert json.loads(file.read("experiment.json"))["offline_id"] in keys
        archive.unlink()
        for message in messages:
            if (
                message["type"] == "metric_msg"
                and (metric := message["payload"]["metric"])["metricName"] == "train/loss"
            ):
                metrics[metric["step"]] = metric["metricValue"]
        payloads = [message["payload"] for message in messages if message["type"] == "parameter_msg"]
        parameters = {payload["param"]["paramName"] for payload in payloads if "param" in payload}
        assert ("train|train_iters" in parameters) == (steps == 2)
    rows = [row for row in load_json_lines(tmp_path / "run/metrics.jsonl") if "train/loss" in row]
    assert metrics == {row["step"]: row["train/loss"] for row in rows} and len(metrics) == 4 and len(keys) == 1
