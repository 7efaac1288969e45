"""The health monitor: each rank's own time, memory and GPU at log lines, and problems with them.

    own time of a rank = its step - its waits for others    (parallel/phase_timer.py)

A step takes the same time on all ranks, since they wait for each other; the slowest rank waits least. A rank is
compared with the ranks of the same pipeline stage, which have the same work. It is a straggler if the median of its
own time exceeds that of the others by SLOW_MARGIN, and by MIN_STEP_SHARE of a step, at LINES_IN_A_ROW log lines. On a
CPU the wait for a free core is subtracted.

One all-reduce gathers a row per rank, at log lines that are at least TIMED_EVERY steps apart, or at each line if an
option needs it. Everything else is a function of that table, so all ranks get the same result.
"""

import bisect
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megalite.config.options import OperationsConfig
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh
from megalite.training.callbacks import Callback
from megalite.training.logging.event_log import EventLog
from megalite.training.logging.metrics_logger import MetricsLogger
from megalite.training.logging.time_breakdown import TIMED_EVERY, TimeBreakdown
from megalite.training.monitoring.gpu_monitor import THROTTLED, GpuMonitor, read_sensors
from megalite.training.state import Run

OWN_PHASES = ("data", "forward", "backward", "graph", "optimizer", "other")  # phases that are not waits for other ranks
HEALTH = ("step_s", "queued_s", "memory_gib", "temperature_c", "power_w", "clock_mhz", "ecc_errors", "throttled")
SLOW_MARGIN = 0.3  # excess of a straggler's own time over its peers'
MIN_STEP_SHARE = 0.05  # minimum excess, as a share of the step time
LINES_IN_A_ROW = 3  # log lines at which a problem must be present before it is reported
MIN_TIMED_STEPS = 4  # timed steps before ranks are compared
HEARTBEAT_S = 60.0  # interval of heartbeat events; a second per rank if that is longer
Row = Mapping[str, float]  # a rank's values by phase and by HEALTH; nan: unknown


@dataclass(frozen=True)
class Problem:
    """A problem of a rank.

    Attributes:
        event: Name of the event in events.jsonl.
        min_lines: Number of log lines in a row at which the problem must be present before it is reported.
    """

    event: str
    rank: int
    text: str
    min_lines: int = 1


class HealthMonitor:
    """The monitor of stragglers, step times and GPUs.

    Args:
        time_breakdown: Keeps the last timed steps.
        hosts: The host names of all ranks.
    """

    def __init__(
        self,
        mesh: Mesh,
        time_breakdown: TimeBreakdown,
        hosts: Sequence[str],
        events: EventLog,
        options: OperationsConfig,
    ):
        self.mesh = mesh
        self.hosts = hosts
        self._timed_steps = time_breakdown.recent
        self._gpu = GpuMonitor(mesh.device)
        self._max_temperature = options.max_gpu_temperature or math.inf
        self._max_step_s = options.max_step_time_s or math.inf
        self._straggler_count = options.straggler_minmax_count if options.log_straggler else 0
        checks_each_line = self._straggler_count or options.max_gpu_temperature or options.max_step_time_s
        self._interval = 1 if checks_each_line else TIMED_EVERY
        self._last_step: int | None = None  # step of the last check
        self._events = events
        self._next_heartbeat = 0.0
        self._streaks: Counter[tuple[str, int]] = Counter()  # (event, rank) -> log lines in a row
        self._ecc_errors: dict[int, float] = {}  # by rank, at the last check
        self._cpu_wait_s = cpu_wait_s()

    def check(self, metrics: Mapping[str, Any], logger: MetricsLogger) -> str | None:
        """Check all ranks if that is due, and return the first new problem, the same on all ranks; collective.

        Rank 0 logs all new problems.

        Args:
            metrics: The metrics of a log line, among them its step and the number and the mean time of its steps.
        """
        step = metrics["step"]
        if self._last_step is None:
            self._last_step = step - metrics["steps"]
        if step - self._last_step < self._interval:
            return None
        rows = self.gather_rows(step - self._last_step, metrics["step_s"], metrics["memory_gib"])
        self._last_step = step
        new_problems = self.new_problems(rows)
        if self.mesh.world.is_first:
            for problem in new_problems:
                logger.warning(f"step {step}: {problem.text}")
                host = self.hosts[problem.rank]
                self._events.add(problem.event, step, subject_rank=problem.rank, host=host, text=problem.text)
            if self._straggler_count and (line := straggler_line(rows, self._straggler_count)):
                logger.info(line)
            if time.monotonic() > self._next_heartbeat:
                self._next_heartbeat = time.monotonic() + max(HEARTBEAT_S, len(rows))
                self._events.add("heartbeat", step, **rows_by_column(rows))
        return new_problems[0].text if new_problems else None

    def gather_rows(self, steps: int, step_s: float, memory_gib: float) -> list[Row]:
        """Gather the rows of all ranks, over the `steps` steps since the last check; collective."""
        mesh = self.mesh
        previous_wait_s, self._cpu_wait_s = self._cpu_wait_s, cpu_wait_s()
        local = {"step_s": step_s, "memory_gib": memory_gib, **read_sensors(self._gpu.sensors)}
        local["queued_s"] = (self._cpu_wait_s - previous_wait_s) / steps if mesh.device.type == "cpu" else 0.0
        for phase in OWN_PHASES:
            local[phase] = math.nan
            if self._timed_steps:
                local[phase] = statistics.median([seconds.get(phase, 0.0) for seconds in self._timed_steps])
        names = (*OWN_PHASES, *HEALTH)
        table = torch.zeros(mesh.world.size, len(names) + 1, dtype=torch.float64)
        table[mesh.world.rank] = torch.tensor([*(local.get(name, math.nan) for name in names), mesh.pp.rank])
        rows = all_reduce_(table.to(mesh.device), mesh.world).tolist()
        return [dict(zip((*names, "pp"), row, strict=True)) for row in rows]

    def new_problems(self, rows: Sequence[Row]) -> list[Problem]:
        """Return each problem that has just been present for enough log lines; its text names the rank and its host."""
        problems = list(self._problems(rows))
        keys = [(problem.event, problem.rank) for problem in problems]
        self._streaks = Counter({key: self._streaks[key] + 1 for key in keys})
        return [
            replace(problem, text=f"rank {problem.rank} on {self.hosts[problem.rank]} {problem.text}")
            for problem in problems
            if self._streaks[problem.event, problem.rank] == problem.min_lines
        ]

    def _problems(self, rows: Sequence[Row]) -> Iterator[Problem]:
        """Yield each problem at this log line, with a text without its rank."""
        if len(self._timed_steps) >= MIN_TIMED_STEPS:
            for rank, text in slow_ranks(rows).items():
                yield Problem("straggler", rank, text, LINES_IN_A_ROW)
        step_s = max(row["step_s"] for row in rows)
        if step_s > self._max_step_s:
            slowest = max(range(len(rows)), key=lambda rank: own_time_s(rows[rank]))
            text = f"waits least, and a step takes {step_s:.3g} s, above {self._max_step_s:g}"
            yield Problem("step-time", slowest, text)
        for rank, row in enumerate(rows):
            if row["temperature_c"] > self._max_temperature:
                text = f"has a GPU at {row['temperature_c']:.0f} C, above {self._max_temperature}"
                yield Problem("temperature", rank, text)
            if row["ecc_errors"] > self._ecc_errors.get(rank, math.inf):
                self._streaks["ecc", rank] = 0  # each error is a new problem
                yield Problem("ecc", rank, "has a GPU with an uncorrectable memory error")
            self._ecc_errors[rank] = row["ecc_errors"]
            if row["throttled"] > 0:
                reasons = ", ".join(reason for bit, reason in THROTTLED.items() if int(row["throttled"]) & bit)
                text = f"has a GPU that slows itself down: {reasons}"
                yield Problem("throttled", rank, text, LINES_IN_A_ROW)


class HealthCheck(Callback):
    """The check of all ranks at log lines, and the reaction to a problem.

    Args:
        on_problem: Called on all ranks with the first new problem.
    """

    def __init__(self, monitor: HealthMonitor, logger: MetricsLogger, on_problem: Callable[[str], None]) -> None:
        self._monitor = monitor
        self._logger = logger
        self._on_problem = on_problem

    def on_log(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Check all ranks if that is due; collective if it is."""
        if problem := self._monitor.check(metrics, self._logger):
            self._on_problem(problem)


def own_time_s(row: Row) -> float:
    """Return a rank's own time per step: all phases but the waits for other ranks."""
    return sum(row[phase] for phase in OWN_PHASES)


def rows_by_column(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """Return the values of all ranks by name, None if unknown; without names that no rank knows."""
    columns = {name: [round(row[name], 6) if math.isfinite(row[name]) else None for row in rows] for name in rows[0]}
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def slow_ranks(rows: Sequence[Row]) -> dict[int, str]:
    """Return the stragglers by rank, with a text that says how slow it is and in which phase."""
    sorted_times: dict[float, list[float]] = defaultdict(list)  # pipeline rank -> own times
    for row in rows:
        if math.isfinite(own_time_s(row)):
            bisect.insort(sorted_times[row["pp"]], own_time_s(row))
    stragglers = {}
    for rank, row in enumerate(rows):
        times = sorted_times[row["pp"]]
        num_peers = max(0, len(times) - 1)
        median = math.inf
        if num_peers:
            # The median without this rank's own time, by index, since there may be thousands of ranks.
            own_index = bisect.bisect_left(times, own_time_s(row))
            middle = ((num_peers - 1) // 2, num_peers // 2)
            median = sum(times[i if i < own_index else i + 1] for i in middle) / 2
        excess_s = own_time_s(row) - row["queued_s"] - median
        if excess_s > SLOW_MARGIN * median and excess_s > MIN_STEP_SHARE * row["step_s"]:
            peers = [peer for r, peer in enumerate(rows) if r != rank and peer["pp"] == row["pp"]]
            excess = {phase: row[phase] - statistics.median(peer[phase] for peer in peers) for phase in OWN_PHASES}
            phase = max(excess, key=lambda name: excess[name])
            stragglers[rank] = (
                f"is a straggler: {1000 * own_time_s(row):.1f} ms of local work per step, "
                f"peers {1000 * median:.1f} ms (+{1000 * excess[phase]:.1f} ms in {phase})"
            )
    return stragglers


def cpu_wait_s() -> float:
    """Return how long this thread has waited for a free core; 0 if that is unknown (proc(5), schedstat)."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def straggler_line(rows: Sequence[Row], count: int) -> str:
    """Return Megatron-LM's line with the ranks of the `count` smallest and largest values of each known quantity.

    Megatron-LM's line has one of each.
    """
    fields = []
    for name, unit in (("own", "ms"), ("data", "ms"), ("temperature_c", "C"), ("power_w", "W"), ("clock_mhz", "MHz")):
        scale = 1000 if unit == "ms" else 1
        values = [scale * (own_time_s(row) if name == "own" else row[name]) for row in rows]
        known = sorted((value, rank) for rank, value in enumerate(values) if math.isfinite(value))
        if not known:
            continue
        for label, selected in (("Mn", known[:count]), ("Mx", known[::-1][:count])):
            text = " ".join(f"{value:.1f}{unit}/{rank}" for value, rank in selected)
            fields.append(f"{label} {name.partition('_')[0]}/Rnk: {text}")
    return " | ".join(["stragglers", *fields]) if fields else ""
