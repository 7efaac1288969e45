"""Evaluations: the losses of the head on validation and test sets, and the scores of requests by likelihood."""

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megalite.common.fault_injection import inject_fault
from megalite.config.options import Config, DataConfig
from megalite.data.datasets.requests import score_tasks
from megalite.nn.loss_sums import LossSums, RequestSums
from megalite.nn.micro_batch import ForwardContext
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh
from megalite.training.batch import to_device
from megalite.training.callbacks import Callback, CallbackList, is_due
from megalite.training.datasets import NamedDataset
from megalite.training.logging.metrics_logger import MetricsLogger
from megalite.training.logging.timers import log_timers
from megalite.training.monitoring.monitors import Monitors
from megalite.training.request_loader import RequestLoader
from megalite.training.state import Loader, Run, StepResult
from megalite.training.stop_requests import StopRequests

STOP_CHECK_S = 2.0  # interval at which ranks agree, during an evaluation, on whether to stop


def why_no_label_counts(data: DataConfig) -> str:
    """Return the likely reason why no label counts, with the flag that causes it and a remedy."""
    reasons = []
    if data.eod_mask_loss:
        reasons.append("--eod-mask-loss masks the label after each end of a document, and every token seems to be one")
    if data.document_packing == "best-fit":
        reasons.append("--document-packing best-fit counts labels within a document, and all seem to be one token long")
    if data.fim_data:
        reasons.append("--fim-data does not count tokens filled with --fim-pad-token")
    if not reasons:
        return "the data masks all of them; look at the program that writes it"
    return f"{'; '.join(reasons)}; look at the data (tools/inspect_data.py) and at its tokenizer, or drop the flag"


class EvaluationInterrupted(Exception):
    """A rank asked to stop during an evaluation; raised on all ranks after the same batch."""


class _StopVote:
    """The agreement of all ranks, during an evaluation, on whether to stop.

    They check after the same batches: every STOP_CHECK_S at the pace of the slowest rank.
    """

    def __init__(self, mesh: Mesh, num_batches: int, stop_requested: Callable[[], bool] | None) -> None:
        self._mesh = mesh
        self._num_batches = num_batches
        self._stop_requested = stop_requested
        self._start = time.monotonic()
        self._next_check = 1  # in batches

    def after_batch(self, done: int) -> None:
        """Check after `done` batches, if that is due. Raises EvaluationInterrupted if some rank wants to stop."""
        if self._stop_requested is None or not done == self._next_check < self._num_batches:
            return
        status = [time.monotonic() - self._start, self._stop_requested()]
        reduced = all_reduce_(
            torch.tensor(status, dtype=torch.float64, device=self._mesh.device), self._mesh.world, dist.ReduceOp.MAX
        )
        seconds, should_stop = reduced.tolist()
        if should_stop:
            raise EvaluationInterrupted(f"after {done} of {self._num_batches} batches")
        self._next_check += max(1, min(done, int(STOP_CHECK_S * done / seconds))) if seconds else 1


def evaluate(
    run: Run,
    data: Loader,
    iters: int,
    on_batch: Callable[[int], None] = lambda batches: None,
    stop_requested: Callable[[], bool] | None = None,
) -> float:
    """Return the mean loss per token over the first `iters` global batches of a set, or NaN if no label counts.

    Collective over all ranks.

    Args:
        on_batch: Called with 1 after each global batch.
        stop_requested: Returns True if this rank wants to stop.

    Raises:
        EvaluationInterrupted: if some rank wants to stop.
    """
    return evaluation_losses(run, data, iters, on_batch, stop_requested).get("loss", math.nan)


def evaluation_losses(
    run: Run,
    data: Loader,
    iters: int,
    on_batch: Callable[[int], None] = lambda batches: None,
    stop_requested: Callable[[], bool] | None = None,
) -> dict[str, float]:
    """Return the mean of each loss of the head per label, by name; {} if no label counts.

    Arguments and errors are those of `evaluate`.
    """
    mesh = run.mesh
    size = run.eval_batch_size
    inject_fault("eval.begin", mesh.world.rank, run.progress.step)
    loss_sums = LossSums(run.loss_sums.head_losses, (), mesh.device, run.loss_sums.num_depths)
    labels = 0  # of this rank's samples
    vote = _StopVote(mesh, iters, stop_requested)
    ctx = ForwardContext(run.progress.step, loss_sums=loss_sums)
    for i in range(iters):
        host_batches, _ = data.get(i * size, size)
        run.pipeline.evaluate([to_device(batch, mesh.device) for batch in host_batches], ctx)
        labels += sum(batch.num_targets for batch in host_batches)
        on_batch(1)
        vote.after_batch(i + 1)
    local_labels = torch.zeros(1, dtype=torch.float64, device=mesh.device)
    if mesh.pp.is_last and mesh.tp.is_first:
        local_labels.fill_(float(labels))
    sums = torch.cat([loss_sums.local_values(mesh), local_labels])
    *global_sums, global_labels = all_reduce_(sums, mesh.world).tolist()
    return loss_sums.means(global_sums, global_labels, 0) if global_labels else {}


def request_losses(
    run: Run,
    loader: RequestLoader,
    on_batch: Callable[[int], None] = lambda batches: None,
    stop_requested: Callable[[], bool] | None = None,
) -> NDArray[np.float64]:
    """Return the negative log-likelihood of the continuation of each request in nats, [requests], on all ranks.

    Collective over all ranks. `on_batch`, `stop_requested` and errors are those of `evaluate`.
    """
    mesh = run.mesh
    inject_fault("eval.begin", mesh.world.rank, run.progress.step)
    request_sums = RequestSums(len(loader.packed.request_set.requests), mesh.device)
    vote = _StopVote(mesh, loader.num_batches, stop_requested)
    ctx = ForwardContext(run.progress.step, request_sums=request_sums)
    for i, host_batches in enumerate(loader):
        run.pipeline.evaluate([to_device(batch, mesh.device) for batch in host_batches], ctx)
        on_batch(1)
        vote.after_batch(i + 1)
    return all_reduce_(request_sums.local_values(mesh), mesh.world).cpu().numpy()


class Evaluation(Callback):
    """The evaluations of a run: validation sets and requests at --eval-interval, all sets after the last step."""

    def __init__(
        self, config: Config, logger: MetricsLogger, monitors: Monitors, stops: StopRequests, callbacks: CallbackList
    ) -> None:
        self._interval = config.train.eval_interval
        self._iters = config.train.eval_iters
        self._data_config = config.data
        self._logger = logger
        self._monitors = monitors
        self._stops = stops
        self._callbacks = callbacks

    def on_train_step_end(self, run: Run, result: StepResult) -> None:
        """Evaluate sets and requests if that is due; the evaluation after the last step is `evaluate_last_step`'s."""
        step = run.progress.step
        if is_due(self._interval, step) and step < run.last_step:
            self._evaluate_sets(run, run.valid_loaders, "")
            if not self._stops.agreed:
                self._score_requests(run)

    def evaluate_last_step(self, run: Run) -> None:
        """Evaluate the validation sets, the requests and the test sets, until a stop request interrupts that."""
        self._evaluate_sets(run, run.valid_loaders, " on validation set")
        if not self._stops.agreed:
            self._score_requests(run)
        if not self._stops.agreed:
            self._evaluate_sets(run, run.test_loaders, " on test set")

    def _evaluate_sets(self, run: Run, sets: Sequence[NamedDataset[Loader]], suffix: str) -> None:
        """Evaluate the sets until all ranks agree to stop; an unfinished set is not logged. Collective.

        Args:
            suffix: The suffix of the log lines (`MetricsLogger.log_validation`).
        """
        logger, monitors, timers = self._logger, self._monitors, self._monitors.timers
        step = run.progress.step
        for named in sets if self._iters > 0 else ():
            monitors.watchdog.set_activity("evaluate", step)
            with monitors.collector.evaluation(), timers("evaluate", 0), monitors.time_breakdown("evaluation"):
                with logger.evaluation_bar(step, named.name, self._iters) as bar:
                    try:
                        losses = evaluation_losses(run, named.data, self._iters, bar.add, self._stops.is_requested)
                    except EvaluationInterrupted as error:
                        self._stops.agreed = True
                        reason = self._stops.agreed_reason
                        logger.info(f"stopping ({reason}): the evaluation of step {step} ends {error}, without a loss")
                        return
            if not losses:
                set_name = f"the set {named.name}" if named.name else "an evaluation"
                reason = why_no_label_counts(self._data_config)
                logger.info(f"WARNING: step {step}: no label of {set_name} counts, so it has no loss: {reason}")
                continue
            logger.log_validation(run.progress, losses, named, suffix)
            self._callbacks.run("on_eval_end", run, named.name, losses["loss"])
            log_timers(timers, logger, step, ("evaluate",))

    def _score_requests(self, run: Run) -> None:
        """Score the requests of --eval-requests, also without sets, and log the scores. Collective.

        Nothing is logged if all ranks agree to stop.
        """
        loader = run.requests
        if loader is None:
            return
        logger, monitors, timers = self._logger, self._monitors, self._monitors.timers
        step = run.progress.step
        monitors.watchdog.set_activity("evaluate", step)
        with monitors.collector.evaluation(), timers("evaluate", 0), monitors.time_breakdown("evaluation"):
            with logger.evaluation_bar(step, "requests", loader.num_batches) as bar:
                try:
                    loss_R = request_losses(run, loader, bar.add, self._stops.is_requested)
                except EvaluationInterrupted as error:
                    self._stops.agreed = True
                    reason = self._stops.agreed_reason
                    logger.info(f"stopping ({reason}): the requests of step {step} end {error}, without scores")
                    return
        logger.log_scores(run.progress, score_tasks(loader.packed.request_set.requests, loss_R))
        log_timers(timers, logger, step, ("evaluate",))
