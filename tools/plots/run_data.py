"""The files of a run directory, read so that their content cannot cause errors later.

Files may be torn, of another version, or of a run in progress. A number is finite or missing. Files that cannot be read
are named in `problems`; the others are used as they are.
"""

import contextlib
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megalite.common.text_file import TextFileError, read_small_text
from megalite.config.config_file import read_config_file
from megalite.config.layer_spec import ROUTER_LOSSES
from megalite.config.options import ConfigError
from megalite.training.logging.event_log import read_jsonl
from megalite.training.logging.log_format import METRICS
from megalite.training.logging.status import current_outcome
from tools.plots.style import sanitize

Point = tuple[float, float, float]  # step, tokens, value
CURVE_KEYS = (
    "train/loss",
    "train/lr",
    "train/grad_norm",
    "train/noise_scale",
    "perf/tokens_per_s_per_gpu",
    "perf/mfu",
    "perf/hfu",
    "mem/max_allocated_gib",
)
OTHER_LOSSES = [metric.key for metric in METRICS if metric.name in ("z_loss", *ROUTER_LOSSES.values())]
ANOMALY_EVENTS = ("spike", "non-finite", "transient-error", "rollback")  # events that a curve shows
RUN_FILES = ("metrics.jsonl", "status.json", "run_config.toml", "report.json", "timeline.json", "events.jsonl")
MAX_FILE_BYTES = 256 << 20  # of timeline.json, the largest file that is read as a whole
MAX_COLUMNS = 700  # columns of a picture; each shows the smallest and the largest of its points
MAX_SET_NAME = 14  # characters of the name of a validation set
MAX_LABEL = 20  # characters of a run's name in a legend


class RunError(Exception):
    """The directory is not a run directory. The message is one line with a remedy."""


def finite_number(value: Any) -> float | None:
    """Return a finite number of JSON as a float, and None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300 or not math.isfinite(value):
        return None
    return float(value)


def as_list(value: Any) -> list[Any]:
    """Return `value` if it is a list, otherwise an empty list."""
    return value if isinstance(value, list) else []


def as_dict(value: Any) -> dict[str, Any]:
    """Return `value` if it is a dictionary, otherwise an empty one."""
    return value if isinstance(value, dict) else {}


def downsample(points: Sequence[Point], columns: int = MAX_COLUMNS) -> list[Point]:
    """Return the points that can be seen: the lowest and the highest of each column, and both ends.

    >>> len(downsample([(i, i, i % 7) for i in range(100_000)])) <= 2 * MAX_COLUMNS + 2
    True
    """
    if len(points) <= 2 * columns:
        return list(points)
    size = len(points) / columns
    visible = {0, len(points) - 1}
    for column in range(columns):
        indices = range(round(column * size), round((column + 1) * size))
        visible.add(min(indices, key=lambda i: points[i][2]))
        visible.add(max(indices, key=lambda i: points[i][2]))
    return [points[i] for i in sorted(visible)]


def is_other_loss(key: str) -> bool:
    """Return True for the key of a loss besides that of the labels; plugins' are below loss/."""
    return key in OTHER_LOSSES or key.startswith("loss/")


@dataclass
class RunData:
    """The data of one run.

    Attributes:
        name: The name of the run in a report.
        rows: The lines of metrics.jsonl.
        events: The lines of events.jsonl since the run last started from scratch.
        config: The options that are not defaults, as section -> option -> value.
        problems: One line for each file that cannot be read.
    """

    directory: Path
    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    timeline: Any = None
    problems: list[str] = field(default_factory=list)
    _visible_points: dict[str, list[Point]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name in a legend; of a long name, its start and its end."""
        return self.name if len(self.name) <= MAX_LABEL else f"{self.name[:11]}…{self.name[-8:]}"

    @cached_property
    def curves(self) -> dict[str, list[Point]]:
        """The points of each key of metrics.jsonl that is shown, by step; of a repeated step, the last one."""
        curves: dict[str, dict[float, Point]] = {}
        for row in self.rows:
            step, tokens = finite_number(row.get("step")), finite_number(row.get("tokens"))
            if step is None:
                continue
            for key, value in row.items():
                y = finite_number(value)
                is_shown = key in CURVE_KEYS or key.startswith(("val/", "eval/")) or is_other_loss(key)
                if y is not None and is_shown:
                    curves.setdefault(key, {})[step] = step, step if tokens is None else tokens, y
        return {key: sorted(points.values()) for key, points in curves.items()}

    def curve(self, key: str) -> list[Point]:
        return self.curves.get(key, [])

    @cached_property
    def steps_in_line(self) -> dict[float, float]:
        """The number of steps whose mean a log line has, by the step of the line; only lines that have it."""
        num_steps: dict[float, float] = {}
        for row in self.rows:
            step, steps, skipped = (finite_number(row.get(key)) for key in ("step", "perf/steps", "train/skipped"))
            if step is not None and steps is not None:
                num_steps[step] = steps - (skipped or 0.0)
        return num_steps

    @cached_property
    def weighted_losses(self) -> list[Point]:
        """The training losses, with the first line after a resume merged into the next.

        The first line after a resume is the mean of one step, which would look like a notch.
        """
        losses = list(self.curve("train/loss"))
        for resumed in self.resumed:
            i = next((i for i, point in enumerate(losses) if point[0] > resumed), len(losses))
            if i + 1 >= len(losses):
                continue
            (first_step, _, first_loss), (step, tokens, loss) = losses[i : i + 2]
            first_count, count = self.steps_in_line.get(first_step, 0.0), self.steps_in_line.get(step, 0.0)
            if 0 < first_count < count:
                mean = (first_count * first_loss + count * loss) / (first_count + count)
                losses[i : i + 2] = [(step, tokens, mean)]
        return losses

    def visible_points(self, key: str) -> list[Point]:
        """Return as many points of a curve as can be seen."""
        if key not in self._visible_points:
            points = self.weighted_losses if key == "train/loss" else self.curve(key)
            self._visible_points[key] = downsample(points)
        return self._visible_points[key]

    def last(self, key: str) -> float | None:
        """Return the last value of a curve."""
        points = self.curve(key)
        return points[-1][2] if points else None

    @property
    def validation(self) -> dict[str, list[Point]]:
        """The losses of each validation set."""
        keys = [key for key in self.curves if key.startswith("val/") and key.endswith("/loss")]
        prefix, suffix = len("val/"), len("/loss")
        return {sanitize(key[prefix:-suffix], MAX_SET_NAME): self.curve(key) for key in keys}

    def scores(self, score: str) -> dict[str, list[Point]]:
        """Return the curves of a score of --eval-requests, such as "acc", by task."""
        prefix, suffix = "eval/", f"/{score}"
        keys = [key for key in self.curves if key.startswith(prefix) and key.endswith(suffix)]
        return {sanitize(key[len(prefix) : -len(suffix)], MAX_LABEL): self.curve(key) for key in keys}

    @cached_property
    def run_info(self) -> dict[str, Any]:
        """The facts that the newest process wrote at its start (training/logging/plan_summary.py: plan_as_json)."""
        infos = [as_dict(event.get("run_info")) for event in self.events if event.get("event") == "started"]
        return next((info for info in reversed(infos) if info), {})

    @cached_property
    def expert_loads(self) -> list[tuple[float, list[float]]]:
        """(step, load of every expert relative to the mean) of a mixture of experts."""
        rows = {
            finite_number(row.get("step")): [finite_number(load) for load in as_list(row.get("moe/load"))]
            for row in self.rows
        }
        num_experts = max(map(len, rows.values()), default=0)
        loads = []
        for step, row in rows.items():
            finite = [load for load in row if load is not None]
            if step is not None and len(finite) == num_experts > 0:
                loads.append((step, finite))
        return sorted(loads)

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the axes; 1 if they are not known."""
        sizes = as_dict(self.run_info.get("mesh"))
        return {axis: max(1, int(finite_number(sizes.get(axis)) or 1)) for axis in ("world", "pp", "dp", "cp", "tp")}

    @property
    def devices(self) -> int:
        return int(finite_number(self.report.get("devices")) or self.mesh["world"])

    @property
    def resumed(self) -> list[float]:
        """The steps after which another process resumed the run."""
        starts = [finite_number(event.get("step")) for event in self.events if event.get("event") == "started"]
        return [step for step in starts[1:] if step is not None]

    @property
    def anomalies(self) -> list[tuple[float, str]]:
        """(step, event) of steps with an anomalous loss or gradient."""
        rows = [(finite_number(event.get("step")), event.get("event")) for event in self.events]
        return [(step, str(event)) for step, event in rows if step is not None and event in ANOMALY_EVENTS]

    def tokens_at(self, step: float) -> float:
        """Return the tokens at a step, interpolated between log lines."""
        import numpy as np

        points = self.curve("train/loss") or [(0.0, 0.0, 0.0)]
        steps, tokens, _ = zip((0.0, 0.0, 0.0), *points, strict=True)
        return float(np.interp(step, steps, tokens))

    @property
    def peaks_gib(self) -> list[float]:
        """The peak memory of every rank, from heartbeats."""
        peaks: list[float] = []
        for event in self.events:
            memory = event.get("memory_gib")
            if event.get("event") != "heartbeat" or not isinstance(memory, list):
                continue
            values = [finite_number(value) or 0.0 for value in memory]
            if len(peaks) == len(values):
                values = [max(pair) for pair in zip(peaks, values, strict=True)]
            peaks = values
        return peaks

    @property
    def outcome(self) -> str:
        """The outcome in status.json; "killed" if it says that a process runs, but none does."""
        return sanitize(current_outcome(self.directory, self.status), 30)


def _parse_file(path: Path, parse: Callable[[str], Any], problems: list[str]) -> Any:
    try:
        return parse(read_small_text(path, "a run directory", MAX_FILE_BYTES)) if path.exists() else None
    except TextFileError as error:
        problems.append(f"{path.name} {sanitize(error.reason)}")
        return None
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read ({sanitize(error)})")
        return None


def read_run(directory: Path, name: str) -> RunData:
    """Read a run directory. Raises RunError if it has none of a run's files."""
    if not any((directory / file).is_file() for file in RUN_FILES):
        raise RunError(f"{sanitize(directory)}: no files of a run are there; give a run directory")
    run = RunData(directory, sanitize(name))
    for file, rows in (("metrics.jsonl", run.rows), ("events.jsonl", run.events)):
        try:
            rows += (row for _, row in read_jsonl(directory / file))
        except (OSError, RecursionError) as error:
            run.problems.append(f"{file} cannot be read ({sanitize(error)})")
    from_scratch = [i for i, event in enumerate(run.events) if event.get("from_scratch")]
    if from_scratch:
        run.events = run.events[from_scratch[-1] :]
    run.status = as_dict(_parse_file(directory / "status.json", json.loads, run.problems))
    run.report = as_dict(_parse_file(directory / "report.json", json.loads, run.problems))
    run.timeline = _parse_file(directory / "timeline.json", json.loads, run.problems)
    run.config = _parse_file(directory / "run_config.toml", tomllib.loads, run.problems) or {}
    return run


def read_runs(directories: Iterable[Path]) -> list[RunData]:
    """Read run directories, with names that differ: the directory's, or also its parent's. Raises RunError."""
    paths = [Path(directory) for directory in directories]
    resolved = [path.resolve() for path in paths]
    names = [path.name or str(path) for path in resolved]
    if len(set(names)) < len(names):
        names = ["/".join(path.parts[-2:]) for path in resolved]
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]


def differences(a: RunData, b: RunData, key: str = "train/loss") -> list[Point]:
    """Return (step, tokens of `a`, absolute difference) where both have the mean of equally many steps."""
    values_b = {step: y for step, _, y in b.curve(key) if a.steps_in_line.get(step) == b.steps_in_line.get(step)}
    return [(step, tokens, abs(y - values_b[step])) for step, tokens, y in a.curve(key) if step in values_b]


def option_sources(run: RunData, presets: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return (section, option, value, source) of each option that is not its default.

    The source is a flag, the TOML file or the preset; otherwise the option follows from others, or the file has changed
    since.
    """
    from megalite.config.cli import parse_args

    on_command_line = parse_args([str(arg) for arg in as_list(run.run_info.get("command"))[1:]]).values
    path = str(on_command_line.get("config", ""))
    in_file: Mapping[str, Any] = {}
    if path:
        with contextlib.suppress(ConfigError):
            in_file = read_config_file(path)
    preset = str(on_command_line.get("preset", in_file.get("preset", "")))
    in_preset = presets.get(preset, {})
    unknown_source = ""
    if on_command_line:
        is_file_unreadable = path and not in_file
        unknown_source = f"{sanitize(path)}, or follows from others" if is_file_unreadable else "follows from others"

    def source_of(name: str, value: Any) -> str:
        if name in on_command_line:
            return "flag"
        if name in in_file and _is_same(in_file[name], value):
            return sanitize(path)
        if name in in_preset and _is_same(in_preset[name], value):
            return f"--preset {sanitize(preset)}"
        return unknown_source

    sources = []
    for section, values in run.config.items():
        for name, value in as_dict(values).items():
            sources.append((sanitize(section), sanitize(name), sanitize(value, 200), source_of(name, value)))
    return sources


def _is_same(a: Any, b: Any) -> bool:
    return list(a) == b if isinstance(a, tuple) else a == b
