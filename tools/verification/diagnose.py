"""Locate the first difference between a layout and one process, and name the causes that fit its pattern.

A pattern is a property of the numbers that few mistakes have. Examples: the values of all ranks sum to the reference (a
sum over them is missing), they are the reference times 2 or times a size of the layout (they were summed or averaged
once too often), they are the values of the previous step (an all-gather is missing), the difference is the same vector
at every token (a bias), or depends only on the position.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.verification.compare_ranks import Array, Key, QuantityDiff, Reference, TensorPart
from tools.verification.record import ATTENTION, ATTENTION_ADDED, ENDS_IN_TP_SUM, MICROBATCH
from tools.verification.reference_sharding import Layout, is_expert_param

PATTERN_TOLERANCE = 1e-3  # relative; in half precision the tolerance of the comparison if that is larger
MAX_NAMED_SAMPLES = 6


@dataclass(frozen=True)
class Finding:
    """The first difference in the order of computation.

    Attributes:
        layer: number of the layer; None outside the layers.
        ranks: the ranks that differ, by axis.
        location: the range of elements in the full tensor.
        differing: names of all quantities of the same kind that differ at the same step.
        causes: sentences, the most likely cause first.
    """

    step: float
    kind: str
    name: str
    layer: int | None
    distance: float
    tolerance: float
    ranks: dict[str, list[int]]
    location: str
    differing: list[str]
    causes: list[str]


@dataclass(frozen=True)
class _Comparison:
    """The first quantity that differs, with everything that patterns are looked for in.

    Attributes:
        diffs: all quantities of the same kind and step.
        num_microbatches: micro-batches per rank and step.
    """

    diff: QuantityDiff
    diffs: Sequence[QuantityDiff]
    parts: dict[Key, list[TensorPart]]
    reference: Reference
    layout: Layout
    num_microbatches: int


def diagnose(
    diffs: Sequence[QuantityDiff],
    parts: dict[Key, list[TensorPart]],
    reference: Reference,
    layout: Layout,
    num_microbatches: int,
) -> Finding | None:
    """Return the first difference and its likely causes, or None if nothing differs.

    Args:
        diffs, parts: the result of `compare`.
        num_microbatches: micro-batches per rank and step.
    """
    first = next((diff for diff in diffs if diff.differs), None)
    if first is None:
        return None
    same_kind = [diff for diff in diffs if (diff.step, diff.kind) == (first.step, first.kind)]
    axes = ["rank", "pp", "dp", "tp"]
    axes += [axis for axis in ("cp", "ep", "etp") if getattr(layout, axis) > 1]
    layer = re.match(r"layers\.(\d+)", first.name)
    return Finding(
        step=first.step,
        kind=first.kind,
        name=first.name,
        layer=int(layer[1]) if layer else None,
        distance=first.distance,
        tolerance=first.tolerance,
        ranks={axis: sorted({getattr(part.rank, axis) for part in first.wrong_parts}) for axis in axes},
        location=first.problem or _location(first),
        differing=[diff.name for diff in same_kind if diff.differs],
        causes=_causes(_Comparison(first, same_kind, parts, reference, layout, num_microbatches)),
    )


def _location(diff: QuantityDiff) -> str:
    """Return the range of each dim of the full tensor that contains all the wrong elements, and their number."""
    spans: list[tuple[int, int]] = []
    num_wrong, total = 0, 0
    for part in diff.wrong_parts:
        wrong = part.wrong_elements(diff.tolerance)
        num_wrong += int(wrong.sum())
        total += wrong.size
        if not wrong.any() or not part.slices:
            continue
        shape = [cut.stop - cut.start for cut in part.slices]
        indices = np.unravel_index(part.tensor.start + np.flatnonzero(wrong), shape)
        for dim, index in enumerate(indices):
            low = int(index.min()) + part.slices[dim].start
            high = int(index.max()) + part.slices[dim].start
            if dim == len(spans):
                spans.append((low, high))
            spans[dim] = min(spans[dim][0], low), max(spans[dim][1], high)
    box = ", ".join(str(low) if low == high else f"{low}..{high}" for low, high in spans)
    elements = f"[{box}], {num_wrong:,} of {total:,} elements" if spans else ""
    wrong_samples = {part.tensor.sample for part in diff.wrong_parts}
    if wrong_samples == {part.tensor.sample for part in diff.parts}:
        return elements
    names = [str(sample) for sample in sorted(wrong_samples)[:MAX_NAMED_SAMPLES]]
    if len(wrong_samples) > MAX_NAMED_SAMPLES:
        names.append("...")
    samples = f"only in micro-batches of samples {', '.join(names)}"
    return f"{elements}, {samples}" if elements else samples


def _causes(comparison: _Comparison) -> list[str]:
    """Return the likely causes of the first difference."""
    diff = comparison.diff
    if diff.problem:
        return ["ranks do not have or compute what one process does: check how samples, layers or elements are sharded"]
    if diff.kind == "input":
        return [f"the {diff.name} of a micro-batch are different: check how ranks read or split their samples"]
    by_kind: dict[str, Callable[[_Comparison], list[str]]] = {
        "forward": _forward_causes,
        "loss": _loss_causes,
        "gradient": _gradient_causes,
        "norm": _norm_causes,
        "router": _router_causes,
        "weight": _weight_causes,
    }
    return by_kind[diff.kind](comparison)


def _forward_causes(comparison: _Comparison) -> list[str]:
    diff, layout = comparison.diff, comparison.layout
    causes = _pipeline_message(comparison)
    if diff.step % 1:
        causes.append(
            "the training steps before it are right: weights used before they are complete, or a difference "
            "between evaluation and training"
        )
    elif diff.step > 1:
        causes.append(
            "step 1 and the weights after it are right: weights used before they are complete, or state that "
            "a step leaves behind"
        )
    deltas = [_token_differences(part) for part in diff.wrong_parts if len(part.tensor.shape) == 3]
    tolerance = max(PATTERN_TOLERANCE, diff.tolerance)
    if deltas and all(_is_constant(delta, (0, 1), tolerance) for delta in deltas):
        causes.append("every token differs by the same vector: a bias is missing, or is added more than once")
    elif deltas and deltas[0].shape[1] > 1 and all(_is_constant(delta, (1,), tolerance) for delta in deltas):
        causes.append("the difference depends only on the position: an offset of positions")
    if not causes and (diff.name.endswith(ATTENTION_ADDED) or re.fullmatch(r"layers\.\d+|embedding", diff.name)):
        causes.append(
            "dropout, or what is added here: a mask that ignores the rank's position in the sequence or the batch"
        )
    tp_rank_0_differs = any(part.rank.tp == 0 for part in diff.wrong_parts)
    if layout.tp > 1 and diff.wrong_parts and not tp_rank_0_differs:
        causes.append(
            "tp rank 0 is right and other tp ranks are not: an offset of positions, heads or ids ignores the tp rank"
        )
    if f"{diff.name}.router" in comparison.reference.parameters:
        causes.append("dispatch or combine of tokens to experts: the ranks they are sent to, or their weighted sum")
    elif layout.tp > 1 and tp_rank_0_differs and diff.name.endswith(ENDS_IN_TP_SUM):
        heads = ", or the wrong heads or groups on a rank" if diff.name.endswith(ATTENTION) else ""
        causes.append(f"a sum over tp in this layer is missing, or is done twice{heads}")
    if len({part.rank.dp for part in diff.wrong_parts}) < layout.dp:
        causes.append("some dp ranks are right: the weights of the others, or the coordinates of their samples")
    return causes or ["the computation of this layer"]


def _loss_causes(comparison: _Comparison) -> list[str]:
    if comparison.diff.name == MICROBATCH:
        return ["the final hidden states agree: padding of the vocabulary, labels that count, or the sums in the head"]
    return ["every micro-batch agrees: the number of tokens that count, or how the losses of ranks are combined"]


def _gradient_causes(comparison: _Comparison) -> list[str]:
    layout = comparison.layout
    wrong = [other for other in comparison.diffs if other.differs]
    all_differ = len(wrong) == len(comparison.diffs)
    causes = _pipeline_message(comparison)
    factor = _common_factor(wrong)
    if factor is not None:
        subject = "each of these"
        if all_differ:
            subject = "every gradient"
        elif len(wrong) == 1:
            subject = f"the gradient of {wrong[0].name}"
        causes.append(f"{subject} is {_describe_factor(factor, comparison)}")
    if all(is_expert_param(other.name) for other in wrong):
        causes.append("only gradients of experts differ: the sum over ranks with the same experts, or a factor of ep")
    elif layout.tp > 1 and all(_is_missing_tp_sum(other) for other in wrong):
        causes.append(
            "the gradients of tp ranks sum to the reference: the all-reduce over tp of replicated weights is missing"
        )
    elif layout.tp > 1 and not all_differ and all(_is_replicated_over_tp(other, layout) for other in wrong):
        causes.append("only weights that are replicated over tp differ: norms, biases after a sum, learned positions")
    if {other.name for other in wrong} <= {*comparison.reference.vocabulary}:
        causes.append(
            "only weights with a row per token id differ: if tied, the sum over the first and last stage; padding"
        )
    if all(_is_missing_dp_sum(other) for other in wrong):
        causes.append("each dp rank has only its own gradients: the sum over dp does not reach these elements")
    pp_ranks = {part.rank.pp for other in wrong for part in other.wrong_parts}
    if len(pp_ranks) < layout.pp and not all_differ:
        causes.append(f"only stages of pp ranks {sorted(pp_ranks)} differ")
    if causes:
        return causes
    if all_differ:
        return ["every gradient differs, without a common factor: the weight of micro-batches or of ranks in the loss"]
    return ["the backward of this layer, or a gradient that is not reduced, or reduced before it was complete"]


def _norm_causes(comparison: _Comparison) -> list[str]:
    diff = comparison.diff
    squares: dict[str, float] = {}
    for (step, kind, name), arrays in comparison.reference.arrays.items():
        if (step, kind) == (diff.step, "gradient"):
            squares[name] = float((arrays[-1] ** 2.0).sum())
    dense_fraction = sum(square for name, square in squares.items() if not is_expert_param(name)) / sum(
        squares.values()
    )
    if dense_fraction < 1 and all(
        _is_close(part.actual, dense_fraction**0.5 * part.expected, diff.tolerance) for part in diff.wrong_parts
    ):
        return ["every gradient agrees, and the norm contains none of the experts' gradients"]
    cause = "every gradient agrees: how often copies count in the norm, or the number of tokens by which it is divided"
    factor = _factor(diff)
    return [cause if factor is None else f"{cause} (it is {factor:.6g} times what it should be)"]


def _router_causes(comparison: _Comparison) -> list[str]:
    factor = _factor(comparison.diff)
    causes = []
    if factor is not None:
        causes.append(f"{comparison.diff.name} is {_describe_factor(factor, comparison)}")
    causes.append(
        "every gradient agrees: assignments counted again in recomputation or evaluation, or ranks whose counts are "
        "missing"
    )
    return causes


def _weight_causes(comparison: _Comparison) -> list[str]:
    if comparison.diff.step == 0:
        causes = [*_values_of_another_layer(comparison), *_values_of_other_experts(comparison)]
        causes.append("the initial weights differ: how initial values are drawn, or how they are sharded")
        return causes
    wrong_parts = [part for diff in comparison.diffs for part in diff.wrong_parts]
    dp_ranks = sorted({part.rank.dp for part in wrong_parts})
    if all(_is_value_of_previous_step(part, comparison) for part in wrong_parts):
        return [
            f"on dp ranks {dp_ranks} these elements have the values of the previous step: the all-gather of weights "
            "left them stale"
        ]
    if len(dp_ranks) < comparison.layout.dp:
        return [f"only on dp ranks {dp_ranks}: the all-gather of weights, or the update of these ranks' own shards"]
    return ["every gradient agrees: the update, its learning rate, clipping or moments, or the all-gather after it"]


def _pipeline_message(comparison: _Comparison) -> list[str]:
    """Return a cause if the first difference is the first quantity of its pipeline rank; all before it are right."""
    index = [diff.name for diff in comparison.diffs].index(comparison.diff.name)
    if index == 0:
        return []
    previous_pp_ranks = {part.rank.pp for part in comparison.diffs[index - 1].parts}
    pp_ranks = {part.rank.pp for part in comparison.diff.parts}
    if previous_pp_ranks & pp_ranks:
        return []
    sender, receiver = min(previous_pp_ranks), min(pp_ranks)
    return [f"it starts where pp rank {receiver} continues with what pp rank {sender} sends: the message between them"]


def _token_differences(part: TensorPart) -> Array:
    """Return the difference as [positions, samples, width]."""
    return (part.actual - part.expected).reshape([cut.stop - cut.start for cut in part.slices])


def _is_constant(delta: Array, dims: tuple[int, ...], tolerance: float) -> bool:
    """Return True if `delta` is the same at every index of `dims`."""
    rest = delta - delta.mean(dims, keepdims=True)
    return float(np.linalg.norm(rest)) < tolerance * float(np.linalg.norm(delta))


def _values_of_another_layer(comparison: _Comparison) -> Iterator[str]:
    """Yield a cause for each layer whose initial values all wrong parts have."""
    diff, reference = comparison.diff, comparison.reference
    for step, kind, name in sorted(reference.arrays):
        is_same_param = _name_in_layer(name) == _name_in_layer(diff.name) != name and name != diff.name
        if (step, kind) != (0, "weight") or not is_same_param:
            continue
        full = reference.arrays[0, "weight", name][-1]
        if all((full[part.slices].reshape(-1) == part.actual).all() for part in diff.wrong_parts):
            yield f"these are the values of {name}: the layer uses the number of another layer"


def _values_of_other_experts(comparison: _Comparison) -> Iterator[str]:
    """Yield a cause if ranks have exactly the values of experts that belong to other ranks."""
    diff = comparison.diff
    if not is_expert_param(diff.name):
        return
    full = comparison.reference.arrays[0, "weight", diff.name][-1].astype(np.float64)
    experts = {expert.tobytes() for expert in full}
    size = math.prod(full.shape[1:])
    for part in diff.wrong_parts:
        if any(part.actual[i : i + size].tobytes() not in experts for i in range(0, part.actual.size, size)):
            return
    yield "these are other experts' values: a rank initializes or holds the experts of another rank"


def _name_in_layer(name: str) -> str:
    return re.sub(r"^layers\.\d+\.", "", name)


def _is_value_of_previous_step(part: TensorPart, comparison: _Comparison) -> bool:
    """Return True if the wrong elements are exactly the values that this rank had a step before."""
    tensor = part.tensor
    wrong = part.wrong_elements(comparison.diff.tolerance)
    for previous in comparison.parts.get((tensor.step - 1, tensor.kind, tensor.name), []):
        if previous.rank == part.rank and previous.slices == part.slices:
            return bool(wrong.any()) and bool((previous.actual[wrong] == part.actual[wrong]).all())
    return False


def _factor(diff: QuantityDiff) -> float | None:
    """Return the number by which the reference has to be multiplied to get all wrong parts, or None."""
    factors = []
    tolerance = max(PATTERN_TOLERANCE, diff.tolerance)
    for part in diff.wrong_parts:
        square = float(part.expected @ part.expected)
        if square <= 0:
            return None
        factor = float(part.actual @ part.expected) / square
        rest = np.linalg.norm(part.actual - factor * part.expected)
        if rest > tolerance * max(1e-300, float(np.linalg.norm(part.actual))):
            return None
        factors.append(factor)
    if not factors or max(factors) - min(factors) > tolerance * max(map(abs, factors)):
        return None
    return sum(factors) / len(factors)


def _common_factor(diffs: Sequence[QuantityDiff]) -> float | None:
    """Return the factor that all these quantities have in common, or None."""
    factors = []
    for diff in diffs:
        factor = _factor(diff)
        if factor is None:
            return None
        factors.append(factor)
    tolerance = max(PATTERN_TOLERANCE, diffs[0].tolerance)
    if max(factors) - min(factors) >= tolerance * max(map(abs, factors)):
        return None
    return factors[0]


def _describe_factor(factor: float, comparison: _Comparison) -> str:
    """Describe a factor, with the size of the layout that it or its inverse is equal to."""
    tolerance = max(PATTERN_TOLERANCE, comparison.diff.tolerance / 2)
    axes = ["dp", "cp", "tp", "pp"]
    if is_expert_param(comparison.diff.name):
        axes = ["ep", "etp", "edp", *axes]
    sizes = [(axis, getattr(comparison.layout, axis)) for axis in axes]
    for name, size in [*sizes, ("micro-batches", comparison.num_microbatches), ("two", 2)]:
        if size > 1 and math.isclose(factor, size, rel_tol=tolerance):
            return f"{size} times what it should be, the number of {name}: added up once too often"
        if size > 1 and math.isclose(factor, 1 / size, rel_tol=tolerance):
            return f"1/{size} of what it should be, the number of {name}: averaged once too often, or not summed"
    return f"{factor:.4g} times what it should be"


def _is_replicated_over_tp(diff: QuantityDiff, layout: Layout) -> bool:
    """Return True if all ranks of each pipeline rank have the same elements."""
    return all(len({part.box for part in diff.parts if part.rank.pp == pp}) < 2 for pp in range(layout.pp))


def _is_missing_tp_sum(diff: QuantityDiff) -> bool:
    """Return True if the values of the tp ranks with the same elements sum to the reference."""
    groups = [group for group in _groups_over_axis(diff.parts, "tp") if group[0].actual.size]
    for group in groups:
        total = sum(part.actual for part in group)
        if len(group) < 2 or not _is_close(total, group[0].expected, diff.tolerance):
            return False
    return bool(groups)


def _is_missing_dp_sum(diff: QuantityDiff) -> bool:
    """Return True if the wrong elements sum to the reference over the dp ranks that have them."""
    groups = _groups_over_axis(diff.wrong_parts, "dp")
    for group in groups:
        wrong = np.any([part.wrong_elements(diff.tolerance) for part in group], 0)
        total = np.sum([part.actual for part in group], 0)[wrong] if len(group) > 1 else np.zeros(0)
        if not _is_close(total, group[0].expected[wrong], diff.tolerance):
            return False
    return bool(groups)


def _groups_over_axis(parts: Sequence[TensorPart], axis: str) -> list[list[TensorPart]]:
    """Group the parts with the same elements on ranks that differ only in `axis`: tp, or dp (together with cp)."""
    groups: dict[tuple[Any, ...], list[TensorPart]] = {}
    for part in parts:
        rank = part.rank
        other_axes = (rank.dp, rank.cp) if axis == "tp" else rank.tp
        key = (rank.pp, other_axes, part.box, part.tensor.start, part.actual.size)
        groups.setdefault(key, []).append(part)
    return list(groups.values())


def _is_close(actual: Any, expected: Any, tolerance: float) -> bool:
    limit = max(PATTERN_TOLERANCE, tolerance) * float(np.linalg.norm(expected))
    return actual.shape == expected.shape and float(np.linalg.norm(actual - expected)) <= limit
