"""Examines a step whose numbers are suspicious: computes it again, to tell bad data from a bad machine, and searches
for the first number that is not finite. Nothing here runs in a good step.

    forward    the first module, in the order of the stages, whose output is not finite though its input was
    backward   else the first parameter, in the order of backward, whose gradient is not finite on a rank, before
               gradients are summed over ranks
    reduced    else the same in the sums of the first computation, whose parts no longer exist

The same micro-batches on the same ranks give the same bits: weights have not changed, and dropout has coordinates.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.models.gpt import Batch
from megalite.optim.buffer import ParamBuffer
from megalite.optim.layout import Bucket, Slot
from megalite.parallel.comm import gather_texts
from megalite.train.state import Doubt, Numbers, Run

FORWARD, BACKWARD, REDUCED = range(3)
LONGEST = 1000  # characters of a finding's words: paths of data may be long
Finding = list[Any]  # [FORWARD, BACKWARD or REDUCED, position in its order, words]; the smallest is the origin


def reason_to_doubt(run: Run, numbers: Numbers) -> str | None:
    """What is wrong with a step's numbers, not counting an overflow that the loss scaler handles."""
    if numbers.finite:
        return run.spikes.find(numbers.loss, numbers.grad_norm) if numbers.tokens else None
    told = f"loss {numbers.loss:.4g}, grad norm {numbers.grad_norm:.4g}"
    return None if run.loss_scaler.dynamic else told


def look_again(
    run: Run, batches: Sequence[Batch], losses: Tensor, first: Numbers, agree: Callable[[Tensor], Numbers]
) -> tuple[Numbers, Doubt | None]:
    """Search where a suspicious step went wrong and, unless --rerun-mode is disabled, compute it again. Returns (the
    numbers that count, the doubt). `losses`: of this rank; `agree`: sums them over all ranks. Collective."""
    reason = reason_to_doubt(run, first)
    found = None if first.finite else bad_gradient(run)
    if run.rerun == "disabled":
        return first, Doubt(reason or "", _conclude(run, found, False)[0], finite=first.finite)
    bits = _bits(run.buffer, losses)
    losses, better = compute_again(run, batches)
    differs = bits != _bits(run.buffer, losses)
    second = agree(losses)
    origin, other = _conclude(run, better or found, differs)
    if reason is None:
        return second, Doubt("computed twice, with other results", "", True, other) if other else None
    if passed := reason_to_doubt(run, second) is None:
        words = f"right (loss {second.loss:.4g}): not the data, but the machine of ranks {list(other)}"
    else:
        words = f"{'no better' if other else 'the same'}: the data or the numbers, not the machine"
    words = f"computed again it is {words}"
    return second, Doubt(reason, f"{origin}; {words}" if origin else words, passed, other, first.finite)


def _bits(buffer: ParamBuffer, losses: Tensor) -> list[int]:
    """Sums of the bits of the gradients that this rank owns, and of its losses, as integers: exact in any order."""
    owned = [buffer.grads.owned(bucket) for bucket in buffer.layout.buckets]
    return [int(x.view(torch.int32).sum(dtype=torch.int64)) for x in [*owned, losses]]


def compute_again(run: Run, batches: Sequence[Batch]) -> tuple[Tensor, Finding | None]:
    """Forward and backward once more: (losses, the first value that is not finite on this rank). Gradients are reduced
    as in the first computation, but this rank's own are searched before. A timeline shows the first computation
    alone."""
    kept, run.pipeline.timeline = run.pipeline.timeline, None
    nominal, gradients = sum(batch.tokens_SB.numel() for batch in batches) * run.mesh.data.size, _BadGradient(run)
    with _first_bad_output(run) as found, run.buffer.grad_reduce.shown_to(gradients.look_before):
        losses = run.pipeline.step(batches, run.loss_scaler.scale / nominal, more=True)  # buckets that stay wait
        run.buffer.finish()
    run.pipeline.timeline = kept
    return losses, found[0] if found else gradients.finding(BACKWARD)


def _conclude(run: Run, mine: Finding | None, differs: bool) -> tuple[str, tuple[int, ...]]:
    """(the origin in words, ranks whose bits differ), from the findings of all ranks; collective."""
    text = json.dumps([None if mine is None else [*mine[:2], mine[2][:LONGEST]], differs])
    told = [json.loads(text) for text in gather_texts(text, run.mesh.world, run.mesh.device)]
    other = tuple(rank for rank, (_, yes) in enumerate(told) if yes)
    found = sorted((finding, rank) for rank, (finding, _) in enumerate(told) if finding is not None)
    if not found:
        return "", other
    (kind, number, words), _ = found[0]
    alike = [rank for (k, n, _), rank in found if (k, n) == (kind, number)]
    more = f", and on ranks {alike[1:]}" if len(alike) > 1 else ""
    return f"first seen in {words}{more}", other


def bad_gradient(run: Run) -> Finding | None:
    """The first parameter in the order of backward whose reduced gradient is not finite in what this rank owns."""
    gradients, grads = _BadGradient(run), run.buffer.grads
    for bucket in run.buffer.layout.buckets:
        for slot in bucket.slots:
            gradients.look(bucket, slot, grads.owned_part(bucket, slot).of(grads.owned(bucket)))
    return gradients.finding(REDUCED)


class _BadGradient:
    """The first one in the order of backward of those that were looked at."""

    def __init__(self, run: Run):
        self.run, self._worst = run, None

    def look_before(self, bucket: Bucket) -> None:
        """At all that this rank has of a bucket."""
        for slot in bucket.slots:
            self.look(bucket, slot, self.run.buffer.grads.part(slot))

    def look(self, bucket: Bucket, slot: Slot, part: Tensor) -> None:
        if part.numel() and not bool(torch.isfinite(part).all()):
            stage = self.run.mesh.pp.rank + self.run.mesh.pp.size * bucket.chunk
            at = (stage, slot.entry, self.run.buffer.layout.entries[slot.entry].spec.name, _kind_of(part))
            self._worst = at if self._worst is None else max(self._worst, at)

    def finding(self, kind: int) -> Finding | None:
        if self._worst is None:
            return None
        stage, entry, name, what = self._worst
        return [kind, -(stage * 100_000 + entry), f"the gradient of {name} ({what}) on {self.run.mesh.describe()}"]


@contextlib.contextmanager
def _first_bad_output(run: Run) -> Iterator[list[Finding]]:
    """Collects at most one finding: the first module of this rank, in time, that makes a finite input infinite or
    NaN."""
    found: list[Finding] = []
    here: list[Any] = [None, False]  # the micro-batch, and whether what came in is finite

    def begin(_: Any, args: tuple[Any, ...]) -> None:
        here[:] = args[1], args[0] is None or bool(torch.isfinite(args[0]).all())

    def look(place: tuple[int, str], output: Any) -> None:
        bad = [x for x in (output if isinstance(output, tuple) else (output,)) if not bool(torch.isfinite(x).all())]
        if bad and here[1] and not found:
            samples = samples_in_words(run, here[0].sample_ids_B.tolist())
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


def samples_in_words(run: Run, ids: Sequence[int], most: int = 4) -> str:
    """`samples 8..15 (FILE, document 3; FILE, document 4; ...)`, with the first `most` documents."""
    text = f"sample{'s' * (len(ids) > 1)} {ids[0]}" + (f"..{ids[-1]}" if len(ids) > 1 else "")
    if run.ledger is None:
        return text
    places = list(dict.fromkeys(place for i in ids[:most] for place in documents_of(run, i)))
    return f"{text} ({'; '.join(places[:most])}{'; ...' if len(ids) > most or len(places) > most else ''})"


def documents_of(run: Run, sample: int) -> list[str]:
    """`FILE, document 3` for each document that a sample has tokens of, in order; [] for generated data."""
    if (ledger := run.ledger) is None:
        return []

    def name(position: int) -> str:
        return ledger.blend.where(sample, position).partition(", token ")[0]

    def after(a: int, first: str, b: int, last: str) -> list[str]:
        """Those that begin in (a, b]."""
        if first == last or b - a == 1:
            return [last] if first != last else []
        middle = (a + b) // 2
        here = name(middle)
        return [*after(a, first, middle, here), *after(middle, here, b, last)]

    first, end = name(0), run.seq_length - 1
    return [first, *after(0, first, end, name(end))]
