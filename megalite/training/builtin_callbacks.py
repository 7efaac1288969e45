"""The built-in callbacks of a run in their order, and the trainer that runs them."""

from pathlib import Path

from megalite.checkpoint.manager.saver import CheckpointSaver
from megalite.config.options import Config
from megalite.config.registry import REGISTRIES
from megalite.training.callbacks import CallbackList
from megalite.training.checkpointing.checkpointer import Checkpointer
from megalite.training.checkpointing.rollback import SpikeRollback
from megalite.training.evaluation import Evaluation, why_no_label_counts
from megalite.training.job.stop_signals import StopSignalHandler
from megalite.training.logging.metrics_logger import MetricsLogger
from megalite.training.logging.step_log import StepLog
from megalite.training.logging.timers import PipelineTimeline
from megalite.training.monitoring.health import HealthCheck
from megalite.training.monitoring.monitors import Monitors
from megalite.training.monitoring.replica_monitor import ReplicaCheck, ReplicaMismatchLog
from megalite.training.monitoring.rerun import AnomalyHandler
from megalite.training.state import Run
from megalite.training.stop_requests import StopRequests
from megalite.training.trainer import Trainer


def build_trainer(
    run: Run,
    config: Config,
    directory: Path,
    logger: MetricsLogger,
    signals: StopSignalHandler,
    saver: CheckpointSaver | None,
    saved_step: int | None,
    monitors: Monitors,
) -> Trainer:
    """Connect the callbacks of a run and return its trainer.

    Args:
        config: The configuration that checkpoints store.
        directory: The run directory.
        saved_step: The step of the newest checkpoint, or None.
    """
    train, operations, timers = config.train, config.operations, monitors.timers
    callbacks = CallbackList()
    stops = StopRequests(run, train, directory, signals, lambda: saver is not None and saver.failed)
    checkpointer = Checkpointer(run, config, logger, saver, saved_step, monitors, callbacks)
    evaluation = Evaluation(config, logger, monitors, stops, callbacks)
    mismatches = ReplicaMismatchLog(logger, monitors.events)
    anomalies = AnomalyHandler(
        run,
        monitors.events,
        logger.info,
        stops.report_problem,
        train.max_skipped_steps,
        why_no_label_counts(config.data),
    )

    def on_health_problem(problem: str) -> None:
        if operations.health_action == "exit":
            stops.report_problem(problem)
        elif operations.health_action == "checkpoint":
            checkpointer.request_save()

    # The order at the end of a step; all ranks run the collectives in it. A step is measured before anything else, and
    # its anomalies are known before it is logged. A rollback comes before the save, which must not keep what it undoes.
    callbacks.extend(
        [
            monitors.time_breakdown,
            PipelineTimeline(timers, config.log.profile_pipeline, directory),
            mismatches,
            anomalies,
            *REGISTRIES["callback"].plugin_components.values(),
            StepLog(run, config, logger, timers, monitors.time_breakdown, monitors.hardware, stops, callbacks),
            HealthCheck(monitors.health, logger, on_health_problem),
            monitors.profiler,
            ReplicaCheck(
                operations.check_weight_hash_across_dp_replicas_interval,
                operations.check_replicas_action,
                mismatches,
                logger,
            ),
            monitors.collector,
            evaluation,
            SpikeRollback(config, checkpointer, anomalies),
            checkpointer,
        ]
    )
    return Trainer(run, config, callbacks, stops, evaluation, checkpointer, signals, monitors.watchdog, timers)
