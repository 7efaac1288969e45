"""Read a run directory so that no file can surprise the reader: a figure is a finite number or is not there.

Files may be torn, of another version, or of a run that goes on. What cannot be read is named in `problems`; everything
else is taken for what it is.
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
from megalite.config.options import ConfigError
from megalite.training.logging.event_log import read_jsonl
from megalite.training.logging.status import current_outcome
from tools.plots.style import clean

Point = tuple[float, float, float]  # step, tokens, value
KEYS = ("train/loss", "train/lr", "train/grad_norm", "perf/tokens_per_s_per_gpu", "perf/mfu", "mem/max_allocated_gib")
MAX_FILE_BYTES = 256 << 20  # of timeline.json, the largest of the files that are read whole
COLUMNS = 700  # of a picture: of the points that share one, the least and the most are drawn
DOUBTS = ("spike", "non-finite", "transient-error", "rollback")  # events that a curve shows


class RunError(Exception):
    """This is no run directory; one line that says what to do."""


def number(value: Any) -> float | None:
    """A finite number, else None: JSON has anything."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300 or not math.isfinite(value):
        return None
    return float(value)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def thin(points: Sequence[Point], columns: int = COLUMNS) -> list[Point]:
    """No more than can be seen: of each column the lowest and the highest, and both ends.

    >>> len(thin([(i, i, i % 7) for i in range(100_000)])) <= 2 * COLUMNS + 2
    True
    """
    if len(points) <= 2 * columns:
        return list(points)
    size = len(points) / columns
    kept = {0, len(points) - 1}
    for column in range(columns):
        some = range(round(column * size), round((column + 1) * size))
        kept |= {min(some, key=lambda i: points[i][2]), max(some, key=lambda i: points[i][2])}
    return [points[i] for i in sorted(kept)]


@dataclass
class Run:
    """`name`: as the page calls it. `problems`: a line for each file that cannot be read."""

    folder: Path
    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)  # of metrics.jsonl
    events: list[dict[str, Any]] = field(default_factory=list)  # since it was begun at step 0
    status: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)  # section -> option -> value, where not the default
    timeline: Any = None
    problems: list[str] = field(default_factory=list)
    _thin: dict[str, list[Point]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name in a legend, where 20 letters have room: its begin and its end."""
        return self.name if len(self.name) <= 20 else f"{self.name[:11]}…{self.name[-8:]}"

    @cached_property
    def curves(self) -> dict[str, list[Point]]:
        """Key of metrics.jsonl that the page shows -> its points in the order of steps; of a step that came again, the
        last."""
        curves: dict[str, dict[float, Point]] = {}
        for row in self.rows:
            step, tokens = number(row.get("step")), number(row.get("tokens"))
            if step is None:
                continue
            for key, value in row.items():
                if (key in KEYS or key.startswith("val/")) and (y := number(value)) is not None:
                    curves.setdefault(key, {})[step] = step, step if tokens is None else tokens, y
        return {key: sorted(points.values()) for key, points in curves.items()}

    def curve(self, key: str) -> list[Point]:
        return self.curves.get(key, [])

    @cached_property
    def steps_of(self) -> dict[float, float]:
        """Step of a log line -> the steps that its loss is the mean of, where it says so."""
        found: dict[float, float] = {}
        for row in self.rows:
            step, steps, skipped = (number(row.get(key)) for key in ("step", "perf/steps", "train/skipped"))
            if step is not None and steps is not None:
                found[step] = steps - (skipped or 0.0)
        return found

    @cached_property
    def weighed(self) -> list[Point]:
        """Losses; of a process that took over the first line, a mean of one step, is one with the next, of the rest."""
        found = list(self.curve("train/loss"))
        for resumed in self.resumed:
            i = next((i for i, point in enumerate(found) if point[0] > resumed), len(found))
            (few, more) = (self.steps_of.get(point[0], 0.0) for point in (found[i : i + 2] + [(0.0, 0.0, 0.0)] * 2)[:2])
            if 0 < few < more:
                step, tokens, loss = found[i + 1]
                found[i : i + 2] = [(step, tokens, (few * found[i][2] + more * loss) / (few + more))]
        return found

    def drawn(self, key: str) -> list[Point]:
        """As many points of a curve as can be seen."""
        if key not in self._thin:
            self._thin[key] = thin(self.weighed if key == "train/loss" else self.curve(key))
        return self._thin[key]

    def last(self, key: str) -> float | None:
        points = self.curve(key)
        return points[-1][2] if points else None

    @property
    def validation(self) -> dict[str, list[Point]]:
        """Set -> its losses."""
        keys = [key for key in self.curves if key.startswith("val/") and key.endswith("/loss")]
        return {clean(key[4:-5], 14): self.curve(key) for key in keys}

    @cached_property
    def about(self) -> dict[str, Any]:
        """The facts that the newest process wrote when it started (training/logging/plan_summary.py: facts)."""
        told = [table(e.get("run_info")) for e in self.events if e.get("event") == "started"]
        return next((about for about in reversed(told) if about), {})

    @cached_property
    def loads(self) -> list[tuple[float, list[float]]]:
        """(step, the load of every expert, over their mean) of a model that has experts."""
        rows = {number(row.get("step")): [number(x) for x in listed(row.get("moe/load"))] for row in self.rows}
        experts = max(map(len, rows.values()), default=0)
        whole = ((step, [x for x in load if x is not None]) for step, load in rows.items() if step is not None)
        return sorted((step, load) for step, load in whole if len(load) == experts > 0)

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes; all 1 where they are not known."""
        told = table(self.about.get("mesh"))
        return {axis: max(1, int(number(told.get(axis)) or 1)) for axis in ("world", "pp", "dp", "cp", "tp")}

    @property
    def devices(self) -> int:
        return int(number(self.report.get("devices")) or self.mesh["world"])

    @property
    def resumed(self) -> list[float]:
        """Steps after which a process took over from another."""
        starts = [number(e.get("step")) for e in self.events if e.get("event") == "started"]
        return [step for step in starts[1:] if step is not None]

    @property
    def doubts(self) -> list[tuple[float, str]]:
        """(step, what) of steps whose loss or gradient was doubted."""
        rows = [(number(e.get("step")), e.get("event")) for e in self.events]
        return [(step, str(what)) for step, what in rows if step is not None and what in DOUBTS]

    def tokens_at(self, step: float) -> float:
        """As the losses near it tell: between two log lines a batch is constant."""
        import numpy as np

        points = self.curve("train/loss") or [(0.0, 0.0, 0.0)]
        steps, tokens, _ = zip((0.0, 0.0, 0.0), *points, strict=True)
        return float(np.interp(step, steps, tokens))

    @property
    def peaks_gib(self) -> list[float]:
        """Memory of every rank at most, as heartbeats told."""
        most: list[float] = []
        for event in self.events:
            now = event.get("memory_gib")
            if event.get("event") == "heartbeat" and isinstance(now, list):
                values = [number(n) or 0.0 for n in now]
                most = [max(pair) for pair in zip(most, values, strict=True)] if len(most) == len(values) else values
        return most

    @property
    def outcome(self) -> str:
        """As status.json says; "killed" where nobody runs that said so."""
        return clean(current_outcome(self.folder, self.status), 30)


def _parsed(path: Path, parse: Callable[[str], Any], problems: list[str]) -> Any:
    try:
        return parse(read_small_text(path, "a run directory", MAX_FILE_BYTES)) if path.exists() else None
    except TextFileError as error:
        problems.append(f"{path.name} {clean(error.reason)}")
        return None
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read ({clean(error)})")
        return None


def read_run(folder: Path, name: str) -> Run:
    """Raises RunError where nothing of a run is there."""
    files = ("metrics.jsonl", "status.json", "run_config.toml", "report.json", "timeline.json", "events.jsonl")
    if not any((folder / file).is_file() for file in files):
        raise RunError(f"{clean(folder)}: no files of a run are there; give a run directory")
    run = Run(folder, clean(name))
    for file, rows in (("metrics.jsonl", run.rows), ("events.jsonl", run.events)):
        try:
            rows += (row for _, row in read_jsonl(folder / file))
        except (OSError, RecursionError) as error:
            run.problems.append(f"{file} cannot be read ({clean(error)})")
    fresh = [i for i, event in enumerate(run.events) if event.get("from_scratch")]
    run.events = run.events[fresh[-1] :] if fresh else run.events
    run.status = table(_parsed(folder / "status.json", json.loads, run.problems))
    run.report = table(_parsed(folder / "report.json", json.loads, run.problems))
    run.timeline = _parsed(folder / "timeline.json", json.loads, run.problems)
    run.config = _parsed(folder / "run_config.toml", tomllib.loads, run.problems) or {}
    return run


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """With names that differ: the folder's, or as much of its path as that takes. Raises RunError."""
    paths = [Path(folder) for folder in folders]
    whole = [path.resolve() for path in paths]
    names = [path.name or str(path) for path in whole]
    if len(set(names)) < len(names):
        names = ["/".join(path.parts[-2:]) for path in whole]
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]


def differences(a: Run, b: Run, key: str = "train/loss") -> list[Point]:
    """(step, tokens of `a`, distance) where both have a value, of as many steps."""
    theirs = {step: value for step, _, value in b.curve(key) if a.steps_of.get(step) == b.steps_of.get(step)}
    return [(step, tokens, abs(y - theirs[step])) for step, tokens, y in a.curve(key) if step in theirs]


def whence(run: Run, presets: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """(section, option, value, where it was said) of each option that is not its default: a flag, the TOML file, the
    preset; else another option made it so, or the file has changed since."""
    from megalite.config.cli import parse_args

    given = parse_args([str(word) for word in listed(run.about.get("command"))[1:]]).values
    path, file = str(given.get("config", "")), {}
    if path:
        with contextlib.suppress(ConfigError):
            file = read_config_file(path)
    preset = str(given.get("preset", file.get("preset", "")))
    said = [(given, "flag"), (file, clean(path)), (presets.get(preset, {}), f"--preset {clean(preset)}")]
    found = []
    for section, values in run.config.items():
        for name, value in table(values).items():
            sources = (source for some, source in said if name in some and (some is given or _same(some[name], value)))
            unknown = "" if not given else f"{clean(path)}, or follows" if path and not file else "follows from others"
            found.append((clean(section), clean(name), clean(value, 200), next(sources, unknown)))
    return found


def _same(a: Any, b: Any) -> bool:
    return list(a) == b if isinstance(a, tuple) else a == b
