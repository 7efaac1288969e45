"""The observers of a run that start before its initial state is loaded."""

import time
from pathlib import Path

from megalite.config.options import Config, effective_log_style
from megalite.training.logging.event_log import EventLog
from megalite.training.logging.garbage_collector import GarbageCollector
from megalite.training.logging.profiler import Profiler
from megalite.training.logging.time_breakdown import TimeBreakdown
from megalite.training.logging.timers import Timers
from megalite.training.monitoring.hardware_monitor import HardwareMonitor
from megalite.training.monitoring.health import HealthMonitor
from megalite.training.monitoring.watchdog import Watchdog
from megalite.training.state import Run


class Monitors:
    """The observers of a run.

    Timers, profiler, garbage collector, time breakdown, event log, watchdog, health and hardware monitor.

    Args:
        hosts: The host names of all ranks.
        watchdog: The watchdog that has been running since the process started.
    """

    def __init__(
        self,
        config: Config,
        run: Run,
        directory: Path,
        time_breakdown: TimeBreakdown,
        hosts: list[str],
        watchdog: Watchdog,
    ) -> None:
        log, operations = config.log, config.operations
        timed = effective_log_style(config) == "megatron" or log.timing_log_level > 0 or log.log_timers_to_tensorboard
        self.timers = Timers(log.timing_log_level if timed else -1, run.mesh, log.barrier_with_level_1_timing)
        self.profiler = Profiler(operations, run.mesh, directory / "trace", time_breakdown)
        self.collector = GarbageCollector(
            operations.manual_gc, operations.manual_gc_interval, operations.manual_gc_eval
        )
        self.time_breakdown = time_breakdown
        self.events = EventLog(directory, run.mesh.world.rank)
        watchdog.attach(run.mesh, 60 * config.parallel.distributed_timeout_minutes)
        watchdog.timers = self.timers
        self.watchdog = watchdog
        self.health = HealthMonitor(run.mesh, time_breakdown, hosts, self.events, operations)
        self.hardware = HardwareMonitor(run.mesh.device)  # started on rank 0 only
        self.start_time = time.monotonic()
