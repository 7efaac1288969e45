"""Handle a step with a non-finite or spiking loss or gradient norm.

The step is rerun to distinguish bad data from faulty hardware, and the first non-finite value is located.
`AnomalyHandler` decides whether to skip, roll back or stop. In a healthy step only `AnomalyHandler.handle` and
`find_anomaly` run.

    forward    the first module, in the order of the stages, with a non-finite output for a finite input
    backward   otherwise the first parameter, in the order of backward, with a non-finite gradient before reduction
    reduced    otherwise the same for the reduced gradients of the first run, whose parts no longer exist

The same micro-batches on the same ranks give the same bits, because the weights have not changed and dropout is a
function of position.
"""

import bisect
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.common.wording import plural
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.optim.zero.grad_bucket import GradBucket
from megalite.optim.zero.layout import ParamSlot
from megalite.parallel.comm import all_gather_strings
from megalite.training.callbacks import Callback
from megalite.training.logging.event_log import EventLog
from megalite.training.state import Anomaly, InvalidResultError, Run, StepResult, StepSums

FORWARD, BACKWARD, REDUCED = range(3)
STAGE_STRIDE = 100_000  # distance of two stages in the order of modules and parameters
MAX_TRANSIENT_ERRORS = 3  # steps of a run that only the rerun got right; more are not chance
MAX_EMPTY_STEPS = 3  # steps in a row without a label that counts
MAX_ROLLBACKS = 3  # without a window of good steps between them
MAX_SAMPLES = 4096  # samples of an event whose documents are recorded
MAX_CHARS = 1000  # characters of a description, since data paths may be long


@dataclass(frozen=True, order=True)
class NonFiniteOrigin:
    """A place where a non-finite value first appears; the smallest of all ranks is the origin.

    Attributes:
        kind: FORWARD, BACKWARD or REDUCED.
        index: The position in the order of this kind.
        description: The place and the value, in words.
    """

    kind: int
    index: int
    description: str


def find_anomaly(run: Run, sums: StepSums) -> str | None:
    """Return the problem with a step's loss or gradient norm, or None.

    A non-finite value that a dynamic loss scaler handles is not an anomaly.
    """
    if sums.finite:
        return run.spikes.detect(sums.loss, sums.grad_norm) if sums.labels else None
    return None if run.loss_scaler.dynamic else f"loss {sums.loss:.4g}, grad norm {sums.grad_norm:.4g}"


def diagnose_step(
    run: Run, batches: Sequence[Batch], ctx: ForwardContext, first: StepSums, reduce_sums: Callable[[], StepSums]
) -> tuple[StepSums, Anomaly | None]:
    """Locate the origin of an anomaly and, unless --rerun-mode is disabled, rerun the step; collective.

    Args:
        first: The global sums of the first run.
        reduce_sums: Reduces losses over all ranks, with everything else that a step sums.

    Returns:
        (the sums to use, the anomaly). The sums are those of the rerun if there was one.
    """
    reason = find_anomaly(run, first)
    first_origin = None if first.finite else find_non_finite_gradient(run)
    if run.rerun_mode == "disabled":
        return first, Anomaly(reason or "", _gather_origin(run, first_origin, False)[0], finite=first.finite)
    first_checksums = _checksums(run)
    rerun_origin = rerun_forward_backward(run, batches, ctx)
    differs = first_checksums != _checksums(run)
    second = reduce_sums()
    origin, differing_ranks = _gather_origin(run, rerun_origin or first_origin, differs)
    if reason is None:
        if not differing_ranks:
            return second, None
        return second, Anomaly("computed twice, with different results", "", True, differing_ranks)
    is_transient = find_anomaly(run, second) is None
    if is_transient:
        result = f"right (loss {second.loss:.4g}): not the data, but the machine of ranks {list(differing_ranks)}"
    else:
        result = f"{'no better' if differing_ranks else 'the same'}: the data or the numbers, not the machine"
    finding = f"recomputed, it is {result}"
    if origin:
        finding = f"{origin}; {finding}"
    return second, Anomaly(reason, finding, is_transient, differing_ranks, first.finite)


def _checksums(run: Run) -> list[int]:
    """Return integer sums of the bits of this rank's owned gradients, per bucket, and of its losses."""
    owned = [bucket.owned_sums for bucket in run.sync.grad_buckets]
    return [int(values.view(torch.int32).sum(dtype=torch.int64)) for values in [*owned, run.loss_sums.values]]


def rerun_forward_backward(run: Run, batches: Sequence[Batch], ctx: ForwardContext) -> NonFiniteOrigin | None:
    """Rerun forward and backward and return the first non-finite value on this rank.

    Its losses replace those of the first run. Gradients are reduced as in the first run, but this rank's own are
    searched before that. The timeline does not record the rerun.
    """
    timeline, run.pipeline.timeline = run.pipeline.timeline, None
    bad_gradients: list[NonFiniteOrigin] = []

    def search_gradients(bucket: GradBucket) -> None:
        values = ((slot, bucket.param_view(slot)) for slot in bucket.layout.slots)
        bad_gradients.extend(_non_finite_gradients(run, bucket, BACKWARD, values))

    run.sync.pre_reduce_hook = search_gradients
    run.expert_balancer.reset()
    run.loss_sums.zero_()
    with _find_non_finite_output(run) as origins:
        # With more_microbatches, resident buckets are reduced only in finish_grad_sync.
        run.pipeline.step(batches, ctx, more_microbatches=True)
        run.sync.finish_grad_sync()
    run.pipeline.timeline, run.sync.pre_reduce_hook = timeline, None
    if not origins and bad_gradients:  # if a parameter's gradient was bad in several passes, nan precedes inf
        origins.append(max(bad_gradients, key=lambda origin: (-origin.index, origin.description)))
    return origins[0] if origins else None


def _gather_origin(run: Run, origin: NonFiniteOrigin | None, differs: bool) -> tuple[str, tuple[int, ...]]:
    """Gather the origins of all ranks and return (description of the first, ranks whose bits differ); collective."""
    local = None
    if origin is not None:
        local = [origin.kind, origin.index, origin.description[:MAX_CHARS]]
    texts = all_gather_strings(json.dumps([local, differs]), run.mesh.world, run.mesh.device)
    differing_ranks: list[int] = []
    origins: list[tuple[NonFiniteOrigin, int]] = []
    for rank, text in enumerate(texts):
        rank_origin, rank_differs = json.loads(text)
        if rank_differs:
            differing_ranks.append(rank)
        if rank_origin is not None:
            origins.append((NonFiniteOrigin(*rank_origin), rank))
    if not origins:
        return "", tuple(differing_ranks)
    origins.sort()
    first = origins[0][0]
    ranks = [rank for origin, rank in origins if (origin.kind, origin.index) == (first.kind, first.index)]
    other_ranks = f", and on ranks {ranks[1:]}" if len(ranks) > 1 else ""
    return f"first seen in {first.description}{other_ranks}", tuple(differing_ranks)


def find_non_finite_gradient(run: Run) -> NonFiniteOrigin | None:
    """Return the first parameter, in the order of backward, with a non-finite reduced gradient that this rank owns."""
    bad_gradients: list[NonFiniteOrigin] = []
    for bucket in run.sync.grad_buckets:
        values = [(slot, bucket.owned_slice(slot).select(bucket.owned_sums)) for slot in bucket.layout.slots]
        bad_gradients += _non_finite_gradients(run, bucket, REDUCED, values)
    return min(bad_gradients, default=None)


def _non_finite_gradients(
    run: Run, bucket: GradBucket, kind: int, gradients: Iterable[tuple[ParamSlot, Tensor]]
) -> Iterator[NonFiniteOrigin]:
    """Yield the non-finite gradients of a bucket; the first in the order of backward is the smallest."""
    stage = run.mesh.pp.rank + run.mesh.pp.size * bucket.layout.chunk
    for slot, gradient in gradients:
        if gradient.numel() and not bool(torch.isfinite(gradient).all()):
            name = run.sync.layout.entries[slot.entry].spec.name
            description = f"the gradient of {name} ({_nan_or_inf(gradient)}) on {run.mesh.describe()}"
            yield NonFiniteOrigin(kind, -(stage * STAGE_STRIDE + slot.entry), description)


@contextlib.contextmanager
def _find_non_finite_output(run: Run) -> Iterator[list[NonFiniteOrigin]]:
    """Collect the first module that runs on this rank with a finite input and a non-finite output; at most one."""
    origins: list[NonFiniteOrigin] = []
    batch: Any = None  # the micro-batch of the current stage forward
    input_is_finite = False

    def before_stage(_: Any, args: tuple[Any, ...]) -> None:
        nonlocal batch, input_is_finite
        stage_input, batch = args[0], args[1]
        input_is_finite = stage_input is None or bool(torch.isfinite(stage_input).all())

    def after_module(index: int, name: str, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        non_finite = [tensor for tensor in outputs if not bool(torch.isfinite(tensor).all())]
        if non_finite and input_is_finite and not origins:
            samples = format_samples(run, batch.sample_ids_B.tolist())
            description = f"the output of {name} ({_nan_or_inf(non_finite[0])}) on {run.mesh.describe()}, {samples}"
            origins.append(NonFiniteOrigin(FORWARD, index, description))

    def make_hook(index: int, name: str) -> Callable[[Any, Any, Any], None]:
        return lambda _module, _args, output: after_module(index, name, output)

    hooks = []
    for chunk, stage in enumerate(run.pipeline.stages):
        first_index = (run.mesh.pp.rank + run.mesh.pp.size * chunk) * STAGE_STRIDE
        hooks.append(stage.register_forward_pre_hook(before_stage))
        for n, (name, module) in enumerate(_searched_modules(stage)):
            hooks.append(module.register_forward_hook(make_hook(first_index + n, name)))
    try:
        yield origins
    finally:
        for hook in hooks:
            hook.remove()


def _searched_modules(stage: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules whose outputs are searched, in the order of the layers."""
    if stage.embedding is not None:
        yield "embedding", stage.embedding
    for block in stage.blocks:
        yield from _searched_in_block(block)
    if stage.final_norm is not None:
        yield "final_norm", stage.final_norm
    if stage.mtp_embedding is not None:
        yield "the embedding of multi-token prediction", stage.mtp_embedding
    for layer in stage.mtp_layers:
        for block in layer.blocks:
            yield from _searched_in_block(block)
        yield f"layers.{layer.blocks[0].layer}.mtp", layer
    if stage.head is not None:
        yield "head", stage.head


def _searched_in_block(block: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in block.named_children():
        part = name.replace("_", ".", 1).replace("mixer", str(block.spec.mixer))
        yield f"layers.{block.layer}.{part}", module
    yield f"layers.{block.layer}", block


def _nan_or_inf(values: Tensor) -> str:
    return "nan" if bool(torch.isnan(values).any()) else "inf"


def format_samples(run: Run, ids: Sequence[int], max_documents: int = 4) -> str:
    """Format consecutive samples with their first documents: "samples 8..15 (FILE, document 3; FILE, document 4; ...)".

    Only the first `max_documents` samples are searched for documents.
    """
    text = f"sample {ids[0]}" if len(ids) == 1 else f"samples {ids[0]}..{ids[-1]}"
    if run.ledger is None:
        return text
    documents = list(dict.fromkeys(name for i in ids[:max_documents] for name in documents_in_sample(run, i)))
    ellipsis = "; ..." if len(ids) > max_documents or len(documents) > max_documents else ""
    return f"{text} ({'; '.join(documents[:max_documents])}{ellipsis})"


def documents_in_sample(run: Run, sample: int) -> list[str]:
    """Return "FILE, document 3" for each document that has tokens in the sample, in order; [] for generated data."""
    if (ledger := run.ledger) is None:
        return []

    def document_at(position: int) -> str:
        return ledger.blend.locate(sample, position).partition(", token ")[0]

    positions = range(run.seq_length)
    last_document = document_at(positions[-1])
    start = 0
    documents = [document_at(0)]
    while documents[-1] != last_document:  # find the first position of the next document
        start += bisect.bisect_left(
            positions[start:], True, key=lambda position: document_at(position) != documents[-1]
        )
        documents.append(document_at(start))
    return documents


@dataclass
class AnomalyHandler(Callback):
    """The reaction to anomalies: log them, limit skipped steps and transient errors, and roll back after a spike."""

    run: Run
    events: EventLog
    log_line: Callable[[str], None]  # writes a line to the log
    on_unreliable: Callable[[str], None]  # called on all ranks with the reason why a machine is unreliable
    max_skipped: int  # skipped steps in a row that end the run
    why_empty: str = "the data has no labels"  # the likely reason if no label of a step counts
    skipped_in_a_row: int = 0  # steps
    unlabeled_in_a_row: int = 0  # steps in which no label counts
    has_labels: bool = False  # some step of this process had a label that counts
    transient_errors: int = 0  # steps that only the rerun got right

    def on_train_step_end(self, run: Run, result: StepResult) -> None:
        """Handle a step's result; raises what `handle` raises."""
        if problem := self.handle(result):
            self.on_unreliable(problem)

    def handle(self, result: StepResult) -> str | None:
        """Handle a step's result and return why a machine is unreliable, or None; the same on all ranks.

        Raises:
            InvalidResultError: if too many steps in a row were skipped or had no label that counts.
        """
        self._check_labels(result)
        anomaly, step = result.anomaly, self.run.progress.step
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped and anomaly is not None else 0
        if anomaly is None:
            return None
        done = "skipped" if result.skipped else "updated"
        samples = range(self.run.progress.consumed_samples - result.batch_size, self.run.progress.consumed_samples)
        kind = "transient-error" if anomaly.transient else "spike" if anomaly.finite else "non-finite"
        self.log(
            kind, f"step {step}: {anomaly}; {done}", samples[-MAX_SAMPLES:], done=done, ranks=anomaly.differing_ranks
        )
        if self.skipped_in_a_row >= self.max_skipped:
            raise InvalidResultError(
                f"max_skipped_steps={self.max_skipped} in a row: nothing is learned; step {step}: {anomaly}"
            )
        if anomaly.transient and self.run.rerun_mode == "validate_results":
            self.transient_errors += 1
        if self.transient_errors < MAX_TRANSIENT_ERRORS:
            return None
        ranks = list(anomaly.differing_ranks)
        return f"{self.transient_errors} steps were right only when recomputed, the last on ranks {ranks}"

    def _check_labels(self, result: StepResult) -> None:
        """Warn about a step in which no label counts.

        Raises InvalidResultError after MAX_EMPTY_STEPS in a row, and at the end of a run that had no label at all.
        """
        if result.labels != 0:
            self.unlabeled_in_a_row = 0
            self.has_labels = True
            return
        self.unlabeled_in_a_row += 1
        step, end = self.run.progress.step, self.run.progress.consumed_samples
        text = f"step {step}: none of its {result.batch_size * self.run.seq_length:,} labels counts: {self.why_empty}"
        if self.unlabeled_in_a_row >= MAX_EMPTY_STEPS or (step >= self.run.last_step and not self.has_labels):
            steps = f"{self.unlabeled_in_a_row} such {plural('step', self.unlabeled_in_a_row)} in a row"
            raise InvalidResultError(f"{text}; nothing is learned ({steps})")
        self.log("no-labels", f"{text}; nothing was updated", range(end - result.batch_size, end)[-MAX_SAMPLES:])

    def log(self, kind: str, text: str, samples: range, **facts: object) -> None:
        """Write a warning to the log, and an event with the documents of the samples to events.jsonl; on rank 0."""
        if not self.run.mesh.world.is_first:
            return
        self.log_line(f"WARNING: {text}")
        documents = list(dict.fromkeys(name for i in samples for name in documents_in_sample(self.run, i)))
        self.events.add(
            kind,
            self.run.progress.step,
            text=text,
            samples=[samples.start, samples.stop - 1],
            documents=documents,
            **facts,
        )

    def roll_back(self, saved_step: int | None, restore: Callable[[int], object]) -> bool:
        """Return to the checkpoint of `saved_step` and skip the steps since, as with --iterations-to-skip; collective.

        Args:
            saved_step: The step of the newest checkpoint; None if there is none.
            restore: Loads the checkpoint of a step.

        Returns:
            True if the run was rolled back, False if it has no checkpoint.

        Raises:
            InvalidResultError: after MAX_ROLLBACKS in a row.
        """
        run, progress = self.run, self.run.progress
        current_step, rollbacks = progress.step, run.spikes.rollbacks + 1
        if saved_step is None:
            self.log_line(f"WARNING: step {current_step}: this run has no checkpoint yet to return to")
            return False
        if rollbacks > MAX_ROLLBACKS:
            raise InvalidResultError(f"step {current_step}: another spike, after {MAX_ROLLBACKS} rollbacks in a row")
        run.sync.wait_param_sync()
        restore(saved_step)
        start = progress.consumed_samples
        while progress.step < current_step:
            run.skip_step()
        run.spikes.rollbacks = rollbacks
        skipped = range(start, progress.consumed_samples)
        text = (
            f"step {current_step}: back to the checkpoint of step {saved_step}, "
            f"without samples {start}..{skipped.stop - 1}"
        )
        self.log("rollback", text, skipped[-MAX_SAMPLES:], checkpoint=saved_step)
        return True
