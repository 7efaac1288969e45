"""Compare every hidden state, loss, gradient and weight of every rank with the same quantity in one process.

A rank's tensor is compared with its slice of the reference, the full tensor of one process (reference_sharding.py).
Each copy is compared by itself, so a stale copy is found even if the owner's is right. The distance is the norm of the
difference relative to that of the reference, with the latter spread evenly over its elements:

    distance = |a - b| / (rms(full b) sqrt(elements of a))

For gradients, rms(full b) is at least MIN_GRADIENT_RMS times that of all gradients.

Tolerance: the error of a sum of n rounded terms is about eps sqrt(n) times its size (Higham, Accuracy and Stability of
Numerical Algorithms, 2002, sec. 2.8 and 4.2). n is the longest sum, over the tokens of a step or the widest layer. In
half precision sums run in fp32, and the result of each of OPERATIONS_PER_LAYER successive operations is rounded. A step
starts from the results of the previous one, and Adam divides by small numbers, so each step allows GROWTH times more.
All copies of a weight must be bitwise equal in every precision.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.verification.record import FINAL_NORM, MICROBATCH, STEP, RecordedTensor, Recording, depth_name
from tools.verification.reference_sharding import Layout, RankCoordinates, expected_slices, is_expert_param

Array = NDArray[Any]
Key = tuple[float, str, str]  # step (n + 0.5: the evaluation after step n), kind, name
KINDS = ("input", "forward", "loss", "gradient", "norm", "router", "weight")  # in the order of a step
INPUTS = ("tokens", "positions", "labels", "loss mask")
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
ALLOWED_ROUNDINGS, GROWTH, MIN_GRADIENT_RMS = 16.0, 4.0, 0.1
# The factors of half precision are lower for what is averaged over all tokens; docs/verify.md has measured values.
HALF_FACTORS = {"forward": 2.5, "loss": 0.25, "gradient": 5.0, "norm": 1.0, "weight": 2.0}
HALF_GROWTH, OPERATIONS_PER_LAYER = 2.0, 12
MAX_LOGITS = 2**27  # 1 GiB; larger losses are not recomputed


@dataclass(frozen=True)
class Tolerance:
    """The allowed distance, which depends on the number of terms of the longest sum and on the number of layers."""

    dtype: str
    num_terms: int
    num_layers: int

    def limit(self, step: float, kind: str) -> float:
        """Return the largest allowed distance of a kind of quantity at a step."""
        if kind == "input":
            return 0.0
        eps = EPS[self.dtype]
        later_steps = max(0, step - 1)
        if eps > EPS["float32"]:
            rounding = eps * math.sqrt(OPERATIONS_PER_LAYER * self.num_layers)
            return HALF_FACTORS[kind] * HALF_GROWTH**later_steps * rounding
        return ALLOWED_ROUNDINGS * GROWTH**later_steps * eps * math.sqrt(self.num_terms)


@dataclass(frozen=True, eq=False)
class TensorPart:
    """A rank's elements of a quantity and the same elements of the reference, both flat and of equal length.

    Attributes:
        tensor: description of the rank's tensor.
        slices: position of the rank's tensor in the full tensor.
        deviates: mask of the elements that differ from those of most copies; None if there are no such elements.
    """

    rank: RankCoordinates
    tensor: RecordedTensor
    slices: tuple[slice, ...]
    actual: Array
    expected: Array
    deviates: Array | None = None

    @property
    def box(self) -> tuple[tuple[int, int], ...]:
        """The position in the full tensor, as hashable (start, stop) pairs."""
        return tuple((cut.start, cut.stop) for cut in self.slices)

    @property
    def error(self) -> float:
        return float(np.linalg.norm(self.actual - self.expected))

    def wrong_elements(self, tolerance: float) -> Array:
        """Return a mask of the elements that differ; if all differ slightly, of those that differ most."""
        if self.deviates is not None:
            return self.deviates
        distance = np.abs(self.actual - self.expected)
        max_expected = _max_finite(np.abs(self.expected))
        max_distance = _max_finite(distance)
        return ~(distance <= min(tolerance * max_expected, max_distance / 2))  # NaN is wrong


@dataclass
class QuantityDiff:
    """The difference of one quantity from its reference at one step.

    Attributes:
        distance: the largest distance of a rank.
        wrong_parts: the parts beyond the tolerance.
        problem: a sentence if the quantity is incomplete or in only one of the two runs; otherwise empty.
    """

    step: float
    kind: str
    name: str
    tolerance: float
    distance: float = 0.0
    parts: list[TensorPart] = field(default_factory=list)
    wrong_parts: list[TensorPart] = field(default_factory=list)
    problem: str = ""

    @property
    def differs(self) -> bool:
        return bool(self.problem or self.wrong_parts)


class Reference:
    """The arrays of the run in one process, by quantity and first sample of the micro-batch (-1 for those without)."""

    def __init__(self, recording: Recording):
        self.parameters = recording.parameters
        self.vocabulary = recording.vocabulary
        self.arrays: dict[Key, dict[int, Array]] = {}
        for tensor, data in recording.tensors:
            samples = self.arrays.setdefault((tensor.step, tensor.kind, tensor.name), {})
            samples[tensor.sample] = data.reshape(tensor.shape)
        forward = (tensor.name for tensor, _ in recording.tensors if tensor.kind == "forward")
        self.forward = list(dict.fromkeys(forward))
        gradients: dict[float, list[Array]] = {}
        for (step, kind, _), samples in self.arrays.items():
            if kind == "gradient":
                gradients.setdefault(step, []).append(samples[-1])
        self.min_gradient_rms = {step: MIN_GRADIENT_RMS * _rms(arrays) for step, arrays in gradients.items()}

    def scale(self, key: Key) -> float:
        """Return the size by which differences of this quantity are divided."""
        floor = self.min_gradient_rms[key[0]] if key[1] == "gradient" else 0.0
        return max(_rms(self.arrays[key].values()), floor, 1e-300)

    def order(self, key: Key) -> tuple[float, int, int, str]:
        """Return the sort key of a quantity in the order of computation; gradients are in the order of backward."""
        step, kind, name = key
        index = 0
        if kind in ("gradient", "weight") and name in self.parameters:
            index = self.parameters.index(name) * (-1 if kind == "gradient" else 1)
        elif kind == "forward" and name in self.forward:
            index = self.forward.index(name)
        elif name in INPUTS:
            index = INPUTS.index(name)
        elif kind == "loss":
            index = (MICROBATCH, STEP).index(name)
        return step, KINDS.index(kind), index, name


def step_label(step: float) -> str:
    """Return "step 3", or "the evaluation after step 3" for 3.5."""
    return f"step {step:g}" if step == int(step) else f"the evaluation after step {math.floor(step)}"


def compare(
    reference: Reference, ranks: Sequence[Recording], layout: Layout, tolerance: Tolerance
) -> list[QuantityDiff]:
    """Compare the recordings of all ranks with the reference, and return all quantities in the order of computation."""
    parts: dict[Key, list[TensorPart]] = {}
    problems: dict[Key, str] = {}
    for rank, recording in enumerate(ranks):
        for tensor, data in recording.tensors:
            key = (tensor.step, tensor.kind, tensor.name)
            full = reference.arrays.get(key, {}).get(tensor.sample)
            if full is None:
                what = f"micro-batch of sample {tensor.sample}" if tensor.sample >= 0 else tensor.name
                problems.setdefault(key, f"rank {rank} has a {what}, which one process does not have")
                continue
            try:
                has_token_rows = tensor.name in reference.vocabulary
                part = _tensor_part(tensor, data, full, layout.coordinates(rank), layout, has_token_rows)
            except ValueError as error:
                problems.setdefault(key, str(error))
            else:
                parts.setdefault(key, []).append(part)
    diffs = []
    for key in sorted({*reference.arrays, *problems}, key=reference.order):
        step, kind, name = key
        diff = QuantityDiff(step, kind, name, tolerance.limit(step, kind), parts=parts.get(key, []))
        diff.problem = problems.get(key, "")
        if key in reference.arrays:
            diff.problem = diff.problem or _missing_elements(reference.arrays[key], diff.parts)
            _measure(diff, reference.scale(key))
            if not diff.wrong_parts and kind == "weight":
                diff.wrong_parts = list(_deviating_copies(diff.parts))
        diffs.append(diff)
    return diffs


def _tensor_part(
    tensor: RecordedTensor, data: Array, full: Array, rank: RankCoordinates, layout: Layout, has_token_rows: bool
) -> TensorPart:
    """Pair a rank's data with the same elements of the full array; padding is cut off.

    Raises:
        ValueError: if the rank's shape does not fit.
    """
    shape = tensor.shape
    if tensor.first_position >= 0:  # the position in the sequence is known
        shape = full.shape[:1] + tensor.shape[1:]
    is_expert = is_expert_param(tensor.name)
    slices = expected_slices(shape, full.shape, rank, layout, is_expert=is_expert, has_token_rows=has_token_rows)
    if tensor.first_position >= 0:
        positions = slice(tensor.first_position, tensor.first_position + tensor.shape[0])
        slices = (positions, *slices[1:])
    expected = full[slices].reshape(-1)[tensor.start : tensor.start + data.size].astype(np.float64)
    actual = data.reshape(-1).astype(np.float64)[: expected.size]
    return TensorPart(rank, tensor, slices, actual, expected)


def _measure(diff: QuantityDiff, scale: float) -> None:
    """Fill in the distance and the wrong parts."""
    for part in diff.parts:
        if not part.actual.size:
            continue
        if diff.kind == "input":
            distance = float((part.actual != part.expected).any())
        else:
            distance = part.error / (scale * math.sqrt(part.actual.size))
        if math.isnan(distance):
            distance = math.inf
        diff.distance = max(diff.distance, distance)
        if distance > diff.tolerance:
            diff.wrong_parts.append(part)


def _deviating_copies(parts: Sequence[TensorPart]) -> Iterator[TensorPart]:
    """Yield the copies that are not equal to most copies of the same elements.

    Of two different copies, the one that is further from the reference is yielded.
    """
    copies_by_position: dict[tuple[Any, ...], list[TensorPart]] = {}
    for part in parts:
        position = (part.box, part.tensor.start, part.actual.size)
        copies_by_position.setdefault(position, []).append(part)
    for copies in copies_by_position.values():
        groups: dict[bytes, list[TensorPart]] = {}
        for part in copies:
            groups.setdefault(part.actual.tobytes(), []).append(part)
        majority, *minorities = sorted(groups.values(), key=lambda group: (-len(group), group[0].error))
        for group in minorities:
            for part in group:
                yield dataclasses.replace(part, deviates=part.actual != majority[0].actual)


def _missing_elements(samples: dict[int, Array], parts: Sequence[TensorPart]) -> str:
    """Return a sentence on the elements that no rank has, or an empty string."""
    for sample, full in samples.items():
        is_covered = np.zeros(full.shape, bool)
        for part in parts:
            if part.tensor.sample == sample:
                box = is_covered[part.slices]
                flat = box.reshape(-1)
                flat[part.tensor.start : part.tensor.start + part.actual.size] = True
                is_covered[part.slices] = flat.reshape(box.shape)
        if not is_covered.all():
            message = f"{int((~is_covered).sum()):,} of {is_covered.size:,} elements are on no rank"
            return message if sample < 0 else f"{message}, in the micro-batch of sample {sample}"
    return ""


def reference_loss_problems(
    reference: Reference,
    tolerance: Tolerance,
    softcap: float | None = None,
    num_depths: int = 0,
    depth_weight: float = 0.0,
    logit_multiplier: float = 1.0,
) -> Iterator[str]:
    """Check the losses of the one process against their definition, and yield a line about the first wrong one.

    The definition is the cross entropy of the final hidden states over the true vocabulary, summed over the labels that
    count, and divided by their number. The loss of a micro-batch also has those of the depths of multi-token
    prediction, with their weight. Losses with more than MAX_LOGITS logits are not checked.

    Args:
        softcap: the bound C of the logits x, which are C tanh(x / C); None: no bound.
        num_depths: the number of depths of multi-token prediction.
        depth_weight: the weight of the loss of each depth.
        logit_multiplier: the factor of the logits before they are bounded.
    """
    if problem := next(_depth_input_problems(reference, num_depths), None):
        yield problem
        return
    for step in sorted({step for step, kind, _ in reference.arrays if kind == "loss"}):
        labels_of_sample = reference.arrays.get((step, "input", "labels"), {})
        mask_of_sample = reference.arrays.get((step, "input", "loss mask"), {})
        losses = reference.arrays[step, "loss", MICROBATCH]
        limit = tolerance.limit(step, "loss")
        head_name = reference.vocabulary[-1]  # the head, or the embedding if they are tied
        head = logit_multiplier * reference.arrays[math.ceil(step) - 1, "weight", head_name][-1].astype(np.float64)
        total, count = 0.0, 0.0
        for sample, hidden in reference.arrays[step, "forward", FINAL_NORM].items():
            if hidden.size // hidden.shape[-1] * head.shape[0] > MAX_LOGITS:
                return
            labels = labels_of_sample[sample]
            mask = mask_of_sample.get(sample, np.ones(labels.shape))
            loss = _summed_loss(hidden, head, labels, mask, softcap)
            total += loss
            for depth in range(1, num_depths + 1):
                depth_hidden = reference.arrays[step, "forward", depth_name(depth)][sample]
                depth_labels, depth_mask = (
                    reference.arrays[step, "input", depth_name(depth, name)][sample] for name in ("labels", "loss mask")
                )
                loss += depth_weight * _summed_loss(depth_hidden, head, depth_labels, depth_mask, softcap)
            count += float(mask.sum())
            recorded = float(losses[sample])
            if abs(loss - recorded) > limit * max(abs(loss), 1.0):
                yield (
                    f"{step_label(step)}: the loss of the micro-batch of sample {sample} is {recorded:.9g}, and by its "
                    f"definition {loss:.9g}: {int(mask.sum())} of {mask.size} labels count, in a vocabulary of "
                    f"{len(head)}"
                )
                return
        mean = float(reference.arrays[step, "loss", STEP][-1])
        if count and abs(mean - total / count) > limit * max(abs(mean), 1.0):
            yield (
                f"{step_label(step)}: the loss is {mean:.9g}, and by its definition {total / count:.9g}: the sum of "
                f"all micro-batches over the {count:.0f} labels that count"
            )
            return


def _depth_input_problems(reference: Reference, num_depths: int) -> Iterator[str]:
    """Yield a line about each wrong input of multi-token prediction.

    At position i, depth k has the token k ahead and the model's label k ahead. It may count only labels that the model
    counts, except for those in other documents, and none after the sample.
    """
    for (step, kind, name), labels_of_sample in reference.arrays.items():
        if (kind, name) != ("input", "labels"):
            continue
        for (sample, labels), depth in itertools.product(labels_of_sample.items(), range(1, num_depths + 1)):
            arrays = {
                quantity: reference.arrays[step, kind, depth_name(depth, quantity)][sample]
                for quantity in ("tokens", "labels", "loss mask")
            }
            tokens = reference.arrays[step, kind, "tokens"][sample]
            mask = reference.arrays.get((step, kind, "loss mask"), {}).get(sample, np.ones(labels.shape))
            where = f"{step_label(step)}: depth {depth} of multi-token prediction, sample {sample}:"
            if (arrays["tokens"][:-depth] != tokens[depth:]).any():
                yield f"{where} its inputs are not the tokens {depth} ahead"
            if (arrays["labels"][:-depth] != labels[depth:]).any():
                yield f"{where} its labels are not the model's labels {depth} ahead"
            if arrays["loss mask"][-depth:].any():
                yield f"{where} labels after the sample count"
            if (arrays["loss mask"][:-depth] > mask[depth:]).any():
                yield f"{where} labels count that the model's loss mask leaves out"


def _summed_loss(hidden: Array, head: Array, labels: Array, mask: Array, softcap: float | None) -> float:
    """Return the cross entropy of hidden states, summed over the labels that count."""
    logits = hidden.astype(np.float64) @ head.T
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    return float((_cross_entropy(logits, labels) * mask).sum())


def _cross_entropy(logits: Array, labels: Array) -> Array:
    max_logits = logits.max(-1, keepdims=True)
    log_sum_exp = np.log(np.exp(logits - max_logits).sum(-1)) + max_logits[..., 0]
    return log_sum_exp - np.take_along_axis(logits, labels[..., None], -1)[..., 0]


def _max_finite(values: Array) -> float:
    return float(values[np.isfinite(values)].max(initial=0.0))


def _rms(arrays: Iterable[Array]) -> float:
    """Return the root mean square of the elements of all arrays together."""
    total, count = 0.0, 0
    for array in arrays:
        total += float(np.square(array.astype(np.float64)).sum())
        count += array.size
    return math.sqrt(total / max(1, count))
