"""The log of steps: lines at --log-interval, TensorBoard points, and the metrics of both."""

import math
from collections.abc import Sequence
from typing import Any

from megalite.common.console import print_out
from megalite.config.options import Config, effective_log_interval, effective_log_style
from megalite.parallel.comm import all_reduce_
from megalite.training.callbacks import Callback, CallbackList, is_due
from megalite.training.logging.device_memory import memory_line, memory_metrics, memory_tags
from megalite.training.logging.efficiency import efficiency, step_shares
from megalite.training.logging.metrics_logger import MetricsLogger
from megalite.training.logging.time_breakdown import TimeBreakdown
from megalite.training.logging.timers import Timers, log_timers
from megalite.training.monitoring.hardware_monitor import HardwareMonitor
from megalite.training.state import Run, StepResult
from megalite.training.stop_requests import StopRequests


class StepLog(Callback):
    """The log of steps.

    A line is due at the interval, at the first and the last step of a job, and if the run ends after the step.
    """

    def __init__(
        self,
        run: Run,
        config: Config,
        logger: MetricsLogger,
        timers: Timers,
        time_breakdown: TimeBreakdown,
        hardware: HardwareMonitor,
        stops: StopRequests,
        callbacks: CallbackList,
    ) -> None:
        self._options = config.log
        self._logger = logger
        self._timers = timers
        self._time_breakdown = time_breakdown
        self._hardware = hardware
        self._price_per_gpu_hour = config.operations.price_per_gpu_hour
        self._stops = stops
        self._callbacks = callbacks
        self._interval = effective_log_interval(config, run.last_step)
        self._first_step = run.progress.step + 1
        self._is_megatron_style = effective_log_style(config) == "megatron"
        self._num_lines = 0
        self._results: list[StepResult] = []  # steps since the last line

    def on_train_step_end(self, run: Run, result: StepResult) -> None:
        """Log the step if that is due, and move the progress bar."""
        self._results.append(result)
        self._log(run, result)
        self._logger.update_bar(run.progress.step, run.last_step, result.loss)

    def _log(self, run: Run, result: StepResult) -> None:
        """Write a log line and a TensorBoard point if they are due.

        Collective if a line is due, or if a point needs the norm of the parameters.
        """
        options, logger, step = self._options, self._logger, run.progress.step
        line_due = is_due(self._interval, step) or step in (self._first_step, run.last_step)
        line_due = line_due or self._stops.ends_after(step)
        tensorboard_due = options.tensorboard_dir is not None and is_due(options.tensorboard_log_interval, step)
        norm = parameter_norm(run) if options.log_params_norm and (line_due or tensorboard_due) else None
        if tensorboard_due:
            memory = memory_tags(run.mesh) if options.log_memory_to_tensorboard else {}
            logger.log_step(step_metrics(run, [result], norm), memory)
        if not line_due:
            return
        metrics: dict[str, Any] = {"plugin_metrics": run.plugin_metrics.reduce_and_reset(), **memory_metrics(run.mesh)}
        metrics |= step_metrics(run, self._results, norm)
        price = self._price_per_gpu_hour
        metrics["efficiency"] = efficiency(
            step_shares(self._time_breakdown.recent_seconds()),
            sum(result.batch_size for result in self._results) / sum(result.step_s for result in self._results),
            metrics["memory_gib"] / metrics["memory_limit_gib"],
            None if price is None else price * run.mesh.world.size,
        )
        metrics["hardware"] = self._hardware.take_recent()
        self._results.clear()
        logger.log_train(metrics)
        self._num_lines += 1
        # In Megatron-LM's style the first two lines report memory: by the second the optimizer state is allocated.
        early = self._num_lines <= 2 and self._is_megatron_style
        if (early or is_due(options.log_memory_interval, step)) and run.mesh.dp.is_first:
            line = memory_line(run.mesh, step, options.log_device_memory_used)
            if run.mesh.world.is_first:
                logger.info(line)
            else:
                print_out(line)
        log_timers(self._timers, logger, step, self._timers.step_names, metrics["steps"])
        self._callbacks.run("on_log", run, metrics)


def step_metrics(run: Run, results: Sequence[StepResult], params_norm: float | None) -> dict[str, Any]:
    """Return the metrics of the steps since the last log line, by name.

    Losses (nats per token) are means over the steps that updated the weights, and times (seconds) are means over all
    steps. Every value that is not computed here is the last step's.
    """
    num_steps = len(results)
    updated = [result for result in results if not result.skipped]
    losses: dict[str, float | None] = dict.fromkeys(results[-1].losses)
    if updated:
        losses = {name: sum(result.losses[name] for result in updated) / len(updated) for name in losses}
    return {
        **vars(results[-1]),
        **results[-1].moe_metrics,
        **run.progress.to_json(),
        **losses,
        "losses": losses,
        "layer_losses": results[-1].layer_losses if updated else {},
        "last_step": run.last_step,
        "loss_scale": run.loss_scaler.scale,
        "skipped": num_steps - len(updated),
        "nan": sum(not math.isfinite(result.loss) for result in results),
        "steps": num_steps,
        "step_s": sum(result.step_s for result in results) / num_steps,
        "data_s": sum(result.data_s for result in results) / num_steps,
        "tokens_per_step": sum(result.tokens for result in results) // num_steps,
        "params_norm": params_norm,
    }


def parameter_norm(run: Run) -> float:
    """Return the L2 norm of all parameters (main weights), each counted once; collective, one number over the world."""
    return float(all_reduce_(run.optimizer.local_weight_norm_sq(), run.mesh.world)) ** 0.5
