"""The health of all ranks at log lines: each one's own time, memory and card, and what is wrong with them.

    own time of a rank = its step - its waits for others    (parallel/phase_timer.py)

A step takes all ranks equally long, since they wait for each other; the slow one waits least. A rank is compared with
those at its position in the pipeline, with the same work: it is a straggler when the median of its last steps is above
theirs by MARGIN, and by MATERIAL of a step, at LINES lines in a row. On a CPU queueing for a processor is subtracted.

One all-reduce gathers a row per rank, at log lines EVERY steps apart, or at each line where an option needs it. The
rest is a function of that table, so all ranks find the same.
"""

import bisect
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch

from megalite.config.options import OperationsConfig
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh
from megalite.training.logging.metrics_logger import MetricsLogger
from megalite.training.logging.run_dir import EventLog
from megalite.training.logging.timers import TIMED_EVERY, TimeBreakdown
from megalite.training.monitoring.rank_consistency import THROTTLED, GpuMonitor, read_sensors
from megalite.training.state import StepResult

OWN_PHASES = ("data", "forward", "backward", "graph", "optimizer", "other")  # phases of the clock without the waits
HEALTH = ("step_s", "queued_s", "memory_gib", "temperature_c", "power_w", "clock_mhz", "ecc_errors", "throttled")
SLOW_MARGIN, MIN_STEP_SHARE, LINES_IN_A_ROW = 0.3, 0.05, 3
MIN_TIMED_STEPS = 4  # timed steps before ranks are judged
HEARTBEAT_S = 60.0  # between two heartbeat events; a second per rank where that is longer
Row = Mapping[str, float]  # a rank's values by the names above; nan: unknown


class HealthMonitor:
    """`phases` keep the timed steps. `hosts`: of all ranks."""

    def __init__(self, mesh: Mesh, phases: TimeBreakdown, hosts: Sequence[str], events: EventLog, o: OperationsConfig):
        self.mesh, self._steps, self.hosts, self._card = mesh, phases.recent, hosts, GpuMonitor(mesh.device)
        self._hottest, self._longest_s = o.max_gpu_temperature or math.inf, o.max_step_time_s or math.inf
        self._shown = o.straggler_minmax_count if o.log_straggler else 0
        self._every = 1 if self._shown or o.max_gpu_temperature or o.max_step_time_s else TIMED_EVERY
        self._last: int | None = None  # step of the last row
        self._events, self._next_heartbeat = events, 0.0
        self._streaks: Counter[tuple[str, int]] = Counter()  # lines in a row
        self._errors: dict[int, float] = {}  # of memory, at the line before
        self._queued = cpu_wait_s()

    def check(self, since: Sequence[StepResult], step: int, memory_gib: float, report: MetricsLogger) -> str | None:
        """The first new problem, the same on all ranks; collective. Rank 0 logs all. `since`: the last log line."""
        self._last = step - len(since) if self._last is None else self._last
        if step - self._last < self._every:
            return None
        rows = self.gather_rows(step - self._last, sum(r.step_s for r in since) / len(since), memory_gib)
        self._last = step
        new_problems = self.new_problems(rows)
        if self.mesh.world.is_first:
            for event, rank, text in new_problems:
                report.warning(f"step {step}: {text}")
                self._events.add(event, step, subject_rank=rank, host=self.hosts[rank], text=text)
            if self._shown and (line := straggler_line(rows, self._shown)):
                report.info(line)
            if time.monotonic() > self._next_heartbeat:
                self._next_heartbeat = time.monotonic() + max(HEARTBEAT_S, len(rows))
                self._events.add("heartbeat", step, **rows_by_column(rows))
        return new_problems[0][2] if new_problems else None

    def gather_rows(self, steps: int, step_s: float, memory_gib: float) -> list[Row]:
        """The rows of all ranks, over the `steps` since the last ones; collective."""
        queued, before, mesh = cpu_wait_s(), self._queued, self.mesh
        self._queued = queued
        mine = {"step_s": step_s, "memory_gib": memory_gib, **read_sensors(self._card.figures)}
        mine["queued_s"] = (queued - before) / steps if mesh.device.type == "cpu" else 0.0
        for phase in OWN_PHASES:
            mine[phase] = statistics.median([s.get(phase, 0.0) for s in self._steps]) if self._steps else math.nan
        names = (*OWN_PHASES, *HEALTH)
        table = torch.zeros(mesh.world.size, len(names) + 1, dtype=torch.float64)
        table[mesh.world.rank] = torch.tensor([*(mine.get(name, math.nan) for name in names), mesh.pp.rank])
        rows = all_reduce_(table.to(mesh.device), mesh.world).tolist()
        return [dict(zip((*names, "pp"), row, strict=True)) for row in rows]

    def new_problems(self, rows: Sequence[Row]) -> list[tuple[str, int, str]]:
        """(event, rank, text) of each new problem."""
        now = list(self._problems(rows))
        self._streaks = Counter({(event, rank): self._streaks[event, rank] + 1 for event, rank, _, _ in now})
        new = [finding for finding in now if self._streaks[finding[:2]] == finding[2]]
        return [(event, rank, f"rank {rank} on {self.hosts[rank]} {text}") for event, rank, _, text in new]

    def _problems(self, rows: Sequence[Row]) -> Iterator[tuple[str, int, int, str]]:
        """Problems at this line: event, rank, lines in a row that make it a finding, text."""
        for rank, text in slow_ranks(rows).items() if len(self._steps) >= MIN_TIMED_STEPS else ():
            yield "straggler", rank, LINES_IN_A_ROW, text
        last = max(range(len(rows)), key=lambda rank: own_time_s(rows[rank]))
        if (step_s := max(row["step_s"] for row in rows)) > self._longest_s:
            yield "step-time", last, 1, f"waits least, and a step takes {step_s:.3g} s, above {self._longest_s:g}"
        for rank, row in enumerate(rows):
            if row["temperature_c"] > self._hottest:
                yield "temperature", rank, 1, f"has a card at {row['temperature_c']:.0f} C, above {self._hottest}"
            if row["ecc_errors"] > self._errors.get(rank, math.inf):
                self._streaks["ecc", rank] = 0  # each error is a new problem
                yield "ecc", rank, 1, "has a card with an uncorrectable memory error"
            self._errors[rank] = row["ecc_errors"]
            if row["throttled"] > 0:
                reasons = ", ".join(text for bit, text in THROTTLED.items() if int(row["throttled"]) & bit)
                yield "throttled", rank, LINES_IN_A_ROW, f"has a card that slows itself down: {reasons}"


def own_time_s(row: Row) -> float:
    return sum(row[phase] for phase in OWN_PHASES)


def rows_by_column(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """Value of each rank by name, for names of which some rank has a value."""
    known = {name: [round(row[name], 6) if math.isfinite(row[name]) else None for row in rows] for name in rows[0]}
    return {name: figures for name, figures in known.items() if any(figure is not None for figure in figures)}


def slow_ranks(rows: Sequence[Row]) -> dict[int, str]:
    """Rank -> how slow it is, and in which phase, in words."""
    places: dict[float, list[float]] = defaultdict(list)
    for row in rows:
        if math.isfinite(own_time_s(row)):
            bisect.insort(places[row["pp"]], own_time_s(row))
    slow = {}
    for rank, row in enumerate(rows):
        ordered, usual = places[row["pp"]], math.inf
        if n := max(0, len(ordered) - 1):  # the median without this rank's; there may be thousands of ranks
            at = bisect.bisect_left(ordered, own_time_s(row))
            usual = sum(ordered[i + (i >= at)] for i in ((n - 1) // 2, n // 2)) / 2
        beyond = own_time_s(row) - row["queued_s"] - usual
        if beyond > SLOW_MARGIN * usual and beyond > MIN_STEP_SHARE * row["step_s"]:
            peers = [other for r, other in enumerate(rows) if r != rank and other["pp"] == row["pp"]]
            excess = {phase: row[phase] - statistics.median(peer[phase] for peer in peers) for phase in OWN_PHASES}
            phase = max(excess, key=lambda name: excess[name])
            slow[rank] = (
                f"is a straggler: {1000 * own_time_s(row):.1f} ms of local work per step, "
                f"peers {1000 * usual:.1f} ms (+{1000 * excess[phase]:.1f} ms in {phase})"
            )
    return slow


def cpu_wait_s() -> float:
    """How long this thread has waited for a free processor; 0 where that is unknown (proc(5), schedstat)."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def straggler_line(rows: Sequence[Row], count: int) -> str:
    """The `count` ranks with the least and the most of each known figure; Megatron-LM's line has one of each."""
    parts = []
    for name, unit in (("own", "ms"), ("data", "ms"), ("temperature_c", "C"), ("power_w", "W"), ("clock_mhz", "MHz")):
        scale = 1000 if unit == "ms" else 1
        figures = [scale * (own_time_s(row) if name == "own" else row[name]) for row in rows]
        known = sorted((figure, rank) for rank, figure in enumerate(figures) if math.isfinite(figure))
        for end, chosen in (("Mn", known[:count]), ("Mx", known[::-1][:count])) if known else ():
            shown = " ".join(f"{figure:.1f}{unit}/{rank}" for figure, rank in chosen)
            parts.append(f"{end} {name.partition('_')[0]}/Rnk: {shown}")
    return " | ".join(["stragglers", *parts]) if parts else ""
