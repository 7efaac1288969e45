"""Examines a step whose numbers are suspicious: computes it again, to tell bad data from a bad machine, and seeks the
first number that is not finite. `Doubts` draws the consequences. In a good step only it and `reason_to_doubt` run.

    forward    the first module, in the order of the stages, whose output is not finite though its input was
    backward   else the first parameter, in the order of backward, whose gradient on a rank alone is not finite
    reduced    else the same in the sums of the first computation, whose parts no longer exist

The same micro-batches on the same ranks give the same bits: weights have not changed, and dropout has coordinates.
"""

import bisect
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.nn.micro_batch import Batch
from megalite.optim.buffer import ParamAndGradBuffer
from megalite.optim.layout import Bucket, ParamSlot
from megalite.parallel.comm import all_gather_strings
from megalite.training.logging.run_dir import EventLog
from megalite.training.state import Anomaly, InvalidResultError, Run, StepResult, StepSums

FORWARD, BACKWARD, REDUCED = range(3)
MAX_TRANSIENT_ERRORS = 3  # steps of a run that only the second computation got right: more are not chance
MOST_EMPTY = 3  # steps in a row without a label that counts
MOST_ROLLBACKS = 3  # without a window of good steps between them
MOST_SAMPLES = 4096  # whose documents are recorded
LONGEST = 1000  # characters of a finding's words: paths of data may be long
NonFiniteOrigin = list[Any]  # [FORWARD, BACKWARD or REDUCED, position in its order, words]; the smallest is the origin


def find_anomaly(run: Run, numbers: StepSums) -> str | None:
    """What is wrong with a step's numbers, not counting an overflow that the loss scaler handles."""
    if numbers.finite:
        return run.spikes.detect(numbers.loss, numbers.grad_norm) if numbers.tokens else None
    return None if run.loss_scaler.dynamic else f"loss {numbers.loss:.4g}, grad norm {numbers.grad_norm:.4g}"


def diagnose_step(
    run: Run, batches: Sequence[Batch], losses: Tensor, first: StepSums, agree: Callable[[Tensor], StepSums]
) -> tuple[StepSums, Anomaly | None]:
    """Search where a suspicious step went wrong and, unless --rerun-mode is disabled, compute it again. Returns (the
    numbers that count, the doubt). `losses`: of this rank; `agree`: sums them over all ranks. Collective."""
    reason = find_anomaly(run, first)
    found = None if first.finite else find_non_finite_gradient(run)
    if run.rerun_mode == "disabled":
        return first, Anomaly(reason or "", _gather_origin(run, found, False)[0], finite=first.finite)
    bits = _bits(run.buffer, losses)
    losses, better = rerun_forward_backward(run, batches)
    differs = bits != _bits(run.buffer, losses)
    second = agree(losses)
    origin, other = _gather_origin(run, better or found, differs)
    if reason is None:
        return second, Anomaly("computed twice, with other results", "", True, other) if other else None
    if passed := find_anomaly(run, second) is None:
        words = f"right (loss {second.loss:.4g}): not the data, but the machine of ranks {list(other)}"
    else:
        words = f"{'no better' if other else 'the same'}: the data or the numbers, not the machine"
    words = f"computed again it is {words}"
    return second, Anomaly(reason, f"{origin}; {words}" if origin else words, passed, other, first.finite)


def _bits(buffer: ParamAndGradBuffer, losses: Tensor) -> list[int]:
    """Sums of the bits of the gradients that this rank owns, and of its losses, as integers: exact in any order."""
    owned = [buffer.grads.owned(bucket) for bucket in buffer.layout.buckets]
    return [int(x.view(torch.int32).sum(dtype=torch.int64)) for x in [*owned, losses]]


def rerun_forward_backward(run: Run, batches: Sequence[Batch]) -> tuple[Tensor, NonFiniteOrigin | None]:
    """Forward and backward once more: (losses, the first value that is not finite on this rank). Gradients are reduced
    as in the first computation, but this rank's own are searched before. A timeline shows the first alone."""
    kept, run.pipeline.timeline = run.pipeline.timeline, None
    nominal, grads = sum(batch.tokens_SB.numel() for batch in batches) * run.mesh.dp_cp.size, run.buffer.grads
    gradients: list[NonFiniteOrigin] = []

    def look(bucket: Bucket) -> None:
        parts = ((slot, grads.param_view(slot)) for slot in bucket.slots)
        gradients.extend(_bad_gradients(run, bucket, BACKWARD, parts))

    run.buffer.grad_reduce.pre_reduce_hook = look
    run.expert_balancer.reset()
    with _first_bad_output(run) as found:
        losses = run.pipeline.step(
            batches, run.loss_scaler.scale / nominal, more_microbatches=True
        )  # buckets that stay wait
        run.buffer.finish_grad_sync()
    run.pipeline.timeline, run.buffer.grad_reduce.pre_reduce_hook = kept, None
    if not found and gradients:  # of a parameter that several runs were bad for, nan comes before inf
        found.append(max(gradients, key=lambda finding: (-finding[1], finding[2])))
    return losses, found[0] if found else None


def _gather_origin(run: Run, mine: NonFiniteOrigin | None, differs: bool) -> tuple[str, tuple[int, ...]]:
    """(the origin in words, ranks whose bits differ), from the findings of all ranks; collective."""
    text = json.dumps([None if mine is None else [*mine[:2], mine[2][:LONGEST]], differs])
    told = [json.loads(text) for text in all_gather_strings(text, run.mesh.world, run.mesh.device)]
    other = tuple(rank for rank, (_, yes) in enumerate(told) if yes)
    if not (found := sorted((finding, rank) for rank, (finding, _) in enumerate(told) if finding is not None)):
        return "", other
    (kind, number, words), _ = found[0]
    alike = [rank for (k, n, _), rank in found if (k, n) == (kind, number)]
    more = f", and on ranks {alike[1:]}" if len(alike) > 1 else ""
    return f"first seen in {words}{more}", other


def find_non_finite_gradient(run: Run) -> NonFiniteOrigin | None:
    """The first parameter in the order of backward whose reduced gradient is not finite in what this rank owns."""
    grads, gradients = run.buffer.grads, list[NonFiniteOrigin]()
    for bucket in run.buffer.layout.buckets:
        owned = grads.owned(bucket)
        parts = [(slot, grads.owned_slice(slot).select(owned)) for slot in bucket.slots]
        gradients += _bad_gradients(run, bucket, REDUCED, parts)
    return min(gradients, default=None)


def _bad_gradients(
    run: Run, bucket: Bucket, kind: int, parts: Iterable[tuple[ParamSlot, Tensor]]
) -> Iterator[NonFiniteOrigin]:
    """Of a bucket's parameters. The first in the order of backward is the smallest."""
    stage = run.mesh.pp.rank + run.mesh.pp.size * bucket.chunk
    for slot, part in parts:
        if part.numel() and not bool(torch.isfinite(part).all()):
            name = run.buffer.layout.entries[slot.entry].spec.name
            words = f"the gradient of {name} ({_kind_of(part)}) on {run.mesh.describe()}"
            yield [kind, -(stage * 100_000 + slot.entry), words]


@contextlib.contextmanager
def _first_bad_output(run: Run) -> Iterator[list[NonFiniteOrigin]]:
    """Collects at most one finding: the first module of this rank in time that makes a finite input infinite or NaN."""
    found: list[NonFiniteOrigin] = []
    here: list[Any] = [None, False]  # the micro-batch, and whether what came in is finite

    def begin(_: Any, args: tuple[Any, ...]) -> None:
        here[:] = args[1], args[0] is None or bool(torch.isfinite(args[0]).all())

    def look(place: tuple[int, str], output: Any) -> None:
        bad = [x for x in (output if isinstance(output, tuple) else (output,)) if not bool(torch.isfinite(x).all())]
        if bad and here[1] and not found:
            samples = format_samples(run, here[0].sample_ids_B.tolist())
            words = f"the output of {place[1]} ({_kind_of(bad[0])}) on {run.mesh.describe()}, {samples}"
            found.append([FORWARD, place[0], words])

    hooks = []
    for chunk, stage in enumerate(run.pipeline.stages):
        first = (run.mesh.pp.rank + run.mesh.pp.size * chunk) * 100_000
        hooks.append(stage.register_forward_pre_hook(begin))
        for n, (name, module) in enumerate(_parts(stage)):
            place = (first + n, name)
            hooks.append(module.register_forward_hook(lambda _m, _args, output, place=place: look(place, output)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _parts(stage: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules whose outputs are searched, in the order of the layers."""
    if stage.embedding is not None:
        yield "embedding", stage.embedding
    for block in stage.blocks:
        for name, module in block.named_children():
            yield f"layers.{block.layer}.{name.replace('_', '.')}", module
        yield f"layers.{block.layer}", block
    if stage.head is not None:
        yield "head", stage.head


def _kind_of(x: Tensor) -> str:
    return "nan" if bool(torch.isnan(x).any()) else "inf"


def format_samples(run: Run, ids: Sequence[int], most: int = 4) -> str:
    """`samples 8..15 (FILE, document 3; FILE, document 4; ...)`, with the first `most` documents."""
    text = f"sample{'s' * (len(ids) > 1)} {ids[0]}" + (f"..{ids[-1]}" if len(ids) > 1 else "")
    if run.ledger is None:
        return text
    places = list(dict.fromkeys(place for i in ids[:most] for place in documents_in_sample(run, i)))
    return f"{text} ({'; '.join(places[:most])}{'; ...' if len(ids) > most or len(places) > most else ''})"


def documents_in_sample(run: Run, sample: int) -> list[str]:
    """`FILE, document 3` for each document that a sample has tokens of, in order; [] for generated data."""
    if (ledger := run.ledger) is None:
        return []
    name = lambda position: ledger.blend.locate(sample, position).partition(", token ")[0]  # noqa: E731
    places, at, positions = [name(0)], 0, range(run.seq_length)
    while places[-1] != name(positions[-1]):
        at += bisect.bisect_left(positions[at:], True, key=lambda position: name(position) != places[-1])
        places.append(name(at))
    return places


@dataclass
class AnomalyHandler:
    """Reports steps whose numbers are in doubt, bounds how many the run skips and how many the machine computes wrong,
    and after a spike may return to the last checkpoint. `say`: writes to the log. `max_skipped`: steps in a row."""

    run: Run
    events: EventLog
    say: Callable[[str], None]
    max_skipped: int
    why_empty: str = "the data has none"  # the likely reason why no label of a step counts
    skipped: int = 0  # steps in a row
    empty: int = 0  # steps in a row in which no label counts
    has_labels: bool = False  # some step of this process had one
    passed: int = 0  # steps that only the second computation got right

    def handle(self, result: StepResult) -> str | None:
        """After each step: why this machine is unreliable, if it is; the same on all ranks. Raises BadResult."""
        self._look_at_labels(result)
        doubt, step = result.anomaly, self.run.state.step
        self.skipped = self.skipped + 1 if result.skipped and doubt is not None else 0
        if doubt is None:
            return None
        done = "skipped" if result.skipped else "updated"
        samples = range(self.run.state.consumed_samples - result.batch_size, self.run.state.consumed_samples)
        kind = "transient-error" if doubt.transient else "spike" if doubt.finite else "non-finite"
        self.log(kind, f"step {step}: {doubt}; {done}", samples[-MOST_SAMPLES:], done=done, ranks=doubt.differing_ranks)
        if self.skipped >= self.max_skipped:
            raise InvalidResultError(
                f"max_skipped_steps={self.max_skipped} in a row: nothing is learned; step {step}: {doubt}"
            )
        self.passed += doubt.transient and self.run.rerun_mode == "validate_results"
        if self.passed < MAX_TRANSIENT_ERRORS:
            return None
        return (
            f"{self.passed} steps were right only when computed again, the last on ranks {list(doubt.differing_ranks)}"
        )

    def _look_at_labels(self, result: StepResult) -> None:
        """Warn of a step in which no label counts. Raises BadResult after MOST_EMPTY in a row, and at the end of a run
        that has had no other."""
        if result.labels != 0:
            self.empty, self.has_labels = 0, True
            return
        self.empty += 1
        step, end = self.run.state.step, self.run.state.consumed_samples
        text = f"step {step}: none of its {result.batch_size * self.run.seq_length:,} labels counts: {self.why_empty}"
        if self.empty >= MOST_EMPTY or (step >= self.run.last_step and not self.has_labels):
            raise InvalidResultError(
                f"{text}; nothing is learned ({self.empty} such step{'s' * (self.empty > 1)} in a row)"
            )
        self.log("no-labels", f"{text}; nothing was updated", range(end - result.batch_size, end)[-MOST_SAMPLES:])

    def log(self, kind: str, text: str, samples: range, **facts: object) -> None:
        """Write to the log, and with the documents of the samples to events.jsonl."""
        if not self.run.mesh.world.is_first:
            return
        self.say(f"WARNING: {text}")
        documents = list(dict.fromkeys(place for i in samples for place in documents_in_sample(self.run, i)))
        where = {"samples": [samples.start, samples.stop - 1], "documents": documents}
        self.events.add(kind, self.run.state.step, text=text, **where, **facts)

    def roll_back(self, saved: int | None, restore: Callable[[int], object]) -> bool:
        """Return to the checkpoint of step `saved`, which `restore` loads, and pass over the steps since, as with
        --iterations-to-skip. Returns whether that was done; collective. Raises BadResult."""
        run, state = self.run, self.run.state
        reached, rollbacks = state.step, run.spikes.rollbacks + 1
        if saved is None:
            self.say(f"WARNING: step {reached}: this run has no checkpoint yet to return to")
            return False
        if rollbacks > MOST_ROLLBACKS:
            raise InvalidResultError(f"step {reached}: another spike, after {MOST_ROLLBACKS} rollbacks in a row")
        run.buffer.wait_param_sync()
        restore(saved)
        begin = state.consumed_samples
        while state.step < reached:
            run.skip_step()
        run.spikes.rollbacks = rollbacks
        passed = range(begin, state.consumed_samples)
        text = f"step {reached}: back to the checkpoint of step {saved}, without samples {begin}..{passed.stop - 1}"
        self.log("rollback", text, passed[-MOST_SAMPLES:], checkpoint=saved)
        return True
