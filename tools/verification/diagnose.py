"""Where a difference begins, on which ranks, and what it looks like: the cause that leaves such a pattern.

A pattern is a test of numbers that few mistakes pass: the ranks' values sum to the reference (a sum over them was left
out), they are the reference times 2 or a size of the layout (summed or averaged once too often), they are the values
of the step before (nothing was gathered), the difference is one vector at every token (a bias), or one per position.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tools.verification.compare_ranks import Key, Piece, Reference, Row
from tools.verification.record import ADDED, ATTENTION, MICROBATCH, SUMMED
from tools.verification.reference_sharding import Layout, of_experts

CLOSE = 1e-3  # relative: a pattern holds, or the tolerance of half precision, which has no better numbers
NAMED = 6  # micro-batches that are listed


class Finding(NamedTuple):
    """The first difference in the order of computation. `layer`: None outside of the layers. `ranks`: those that
    differ, by axis. `where`: in the whole tensor. `causes`: the likeliest first."""

    step: float
    kind: str
    name: str
    layer: int | None
    apart: float
    tolerance: float
    ranks: dict[str, list[int]]
    where: str
    others: list[str]  # of the same kind at the same step
    causes: list[str]


class Seen(NamedTuple):
    """The comparison in which patterns are looked for."""

    row: Row
    rows: Sequence[Row]  # of the same kind and step
    pieces: dict[Key, list[Piece]]
    reference: Reference
    layout: Layout
    microbatches: int  # of a rank and step


def find(
    rows: Sequence[Row], pieces: dict[Key, list[Piece]], reference: Reference, layout: Layout, microbatches: int
) -> Finding | None:
    """None where nothing differs."""
    first = next((row for row in rows if row.differs), None)
    if first is None:
        return None
    alike = [row for row in rows if (row.step, row.kind) == (first.step, first.kind)]
    split = [axis for axis in ("cp", "tp", "ep", "etp") if axis == "tp" or getattr(layout, axis) > 1]
    number, axes = re.match(r"layers\.(\d+)", first.name), ("rank", "pp", "dp", *split)
    layer = int(number[1]) if number else None
    ranks = {axis: sorted({getattr(piece.place, axis) for piece in first.wrong}) for axis in axes}
    where, others = first.missing or _where(first), [row.name for row in alike if row.differs]
    causes = _causes(Seen(first, alike, pieces, reference, layout, microbatches))
    facts = (first.step, first.kind, first.name, layer, first.apart, first.tolerance)
    return Finding(*facts, ranks, where, others, causes)


def _where(row: Row) -> str:
    """The range of each dim of the whole tensor that holds all the elements that differ."""
    spans: list[tuple[int, int]] = []
    count, total = 0, 0
    for piece in row.wrong:
        bad = piece.bad(row.tolerance)
        count, total = count + int(bad.sum()), total + bad.size
        if not bad.any() or not piece.slices:
            continue
        flat = piece.item.first + np.flatnonzero(bad)
        shape = [cut.stop - cut.start for cut in piece.slices]
        for dim, at in enumerate(np.unravel_index(flat, shape)):
            low, high = int(at.min()) + piece.slices[dim].start, int(at.max()) + piece.slices[dim].start
            if dim == len(spans):
                spans.append((low, high))
            spans[dim] = min(spans[dim][0], low), max(spans[dim][1], high)
    box = ", ".join(str(low) if low == high else f"{low}..{high}" for low, high in spans)
    told = f"[{box}], {count:,} of {total:,} elements" if spans else ""
    every, wrong = ({piece.item.sample for piece in some} for some in (row.pieces, row.wrong))
    if wrong == every:
        return told
    first = ", ".join(map(str, sorted(wrong)[:NAMED]))
    if len(wrong) > NAMED:
        first += ", ..."
    samples = f"in micro-batches of samples {first} alone"
    return f"{told}, {samples}" if told else samples


def _causes(seen: Seen) -> list[str]:
    if seen.row.missing:
        return ["ranks do not hold or compute what one process does: how samples, layers or elements are shared out"]
    if seen.row.kind == "input":
        return [f"the {seen.row.name} of a micro-batch are others: how ranks read or cut their samples"]
    by_kind = {"forward": _forward, "loss": _loss, "gradient": _gradient, "norm": _norm}
    by_kind |= {"router": _router, "weight": _weight}
    return by_kind[seen.row.kind](seen)


def _border(seen: Seen) -> list[str]:
    """Whether what differs first is the first of its pipeline rank, where the rank before it is right."""
    at = [row.name for row in seen.rows].index(seen.row.name)
    if at == 0:
        return []
    before, here = ({piece.place.pp for piece in row.pieces} for row in (seen.rows[at - 1], seen.row))
    if before & here:
        return []
    sender, receiver = min(before), min(here)
    return [f"it begins where pp rank {receiver} goes on with what pp rank {sender} sends: the message between them"]


def _forward(seen: Seen) -> list[str]:
    row, found = seen.row, _border(seen)
    first_tp = [piece for piece in row.wrong if piece.place.tp == 0]
    if row.step > 1:
        first = "training in steps before is" if row.step % 1 else "step 1 and the weights after it are"
        other = "what evaluation does otherwise" if row.step % 1 else "what a step keeps"
        found.append(f"{first} right: weights used before they have come, or {other}")
    delta = [_tokens(piece) for piece in row.wrong if len(piece.item.shape) == 3]
    close = max(CLOSE, row.tolerance)
    if delta and all(_constant(one, (0, 1), close) for one in delta):
        vector = "the same vector is missing or too much at every token"
        found.append(f"{vector}: a bias added another number of times than 1")
    elif delta and delta[0].shape[1] > 1 and all(_constant(one, (1,), close) for one in delta):
        found.append("the difference depends on the position alone: an offset of positions")
    if not found and (row.name.endswith(ADDED) or re.fullmatch(r"layers\.\d+|embedding", row.name)):
        found.append("dropout or what is added: a mask that is drawn without the rank's place in sequence or batch")
    if seen.layout.tp > 1 and not first_tp and row.wrong:
        offset = "an offset into positions, heads or ids that forgets the rank"
        found.append(f"tp rank 0 is right and others are not: {offset}")
    if f"{row.name}.router" in seen.reference.parameters:
        found.append("tokens on their way to experts and back: which ranks they go to, or what sums count there")
    elif seen.layout.tp > 1 and first_tp and row.name.endswith(SUMMED):
        heads = ", or the heads and groups that a rank takes" if row.name.endswith(ATTENTION) else ""
        found.append(f"a sum over tp that is missing, or made twice, in this layer{heads}")
    if len({piece.place.dp for piece in row.wrong}) < seen.layout.dp:
        found.append("some dp ranks are right: their weights, or the coordinates of their samples")
    return found or ["the computation of this layer"]


def _tokens(piece: Piece) -> Any:
    """The difference as [positions, samples, width]."""
    return (piece.here - piece.there).reshape([cut.stop - cut.start for cut in piece.slices])


def _constant(delta: Any, over: tuple[int, ...], close: float) -> bool:
    rest = delta - delta.mean(over, keepdims=True)
    return float(np.linalg.norm(rest)) < close * float(np.linalg.norm(delta))


def _taken(seen: Seen) -> Iterator[str]:
    """Whether all that differs is what another layer has there."""
    others = {
        name
        for step, kind, name in seen.reference.arrays
        if (step, kind) == (0, "weight") and _within(name) == _within(seen.row.name) != name and name != seen.row.name
    }
    for name in sorted(others):
        whole = seen.reference.arrays[0, "weight", name][-1]
        if all((whole[piece.slices].reshape(-1) == piece.here).all() for piece in seen.row.wrong):
            yield f"these are the values of {name}: a layer that takes itself for another"


def _other_experts(seen: Seen) -> Iterator[str]:
    """Whether ranks have, to the bit, whole experts that others should have."""
    if not of_experts(seen.row.name):
        return
    whole = seen.reference.arrays[0, "weight", seen.row.name][-1].astype(np.float64)
    experts, n = {one.tobytes() for one in whole}, math.prod(whole.shape[1:])
    if all(one.here[at : at + n].tobytes() in experts for one in seen.row.wrong for at in range(0, one.here.size, n)):
        yield "these are other experts': a rank that takes its experts, or all of them, for another's"


def _within(name: str) -> str:
    return re.sub(r"^layers\.\d+\.", "", name)


def _old(piece: Piece, seen: Seen) -> bool:
    """Whether the elements that differ are, to the bit, what this rank had a step before."""
    item, bad = piece.item, piece.bad(seen.row.tolerance)
    before = seen.pieces.get((item.step - 1, item.kind, item.name), [])
    own = [one for one in before if one.place == piece.place and one.slices == piece.slices]
    return bool(own) and bool(bad.any()) and bool((own[0].here[bad] == piece.here[bad]).all())


def _loss(seen: Seen) -> list[str]:
    if seen.row.name == MICROBATCH:
        return ["the final hidden states agree: padding of the vocabulary, labels that count, or the head's sums"]
    return ["every micro-batch agrees: how many tokens are counted, or how the losses of ranks become one"]


def _factor(row: Row) -> float | None:
    """By which all that differs is the reference times."""
    factors, close = [], max(CLOSE, row.tolerance)
    for piece in row.wrong:
        size = float(piece.there @ piece.there)
        if size <= 0:
            return None
        factor = float(piece.here @ piece.there) / size
        if np.linalg.norm(piece.here - factor * piece.there) > close * max(1e-300, float(np.linalg.norm(piece.here))):
            return None
        factors.append(factor)
    if not factors or max(factors) - min(factors) > close * max(map(abs, factors)):
        return None
    return sum(factors) / len(factors)


def _named(factor: float, seen: Seen) -> str:
    """2, 1/4, ... as what they are in this layout."""
    close = max(CLOSE, seen.row.tolerance / 2)
    first = ("ep", "etp", "edp") if of_experts(seen.row.name) else ()
    sizes = {axis: getattr(seen.layout, axis) for axis in (*first, "dp", "cp", "tp", "pp")}
    sizes["micro-batches"] = seen.microbatches
    for name, size in [*sizes.items(), ("two", 2)]:
        if size > 1 and math.isclose(factor, size, rel_tol=close):
            return f"{size} times what it should be, the number of {name}: added up once too often"
        if size > 1 and math.isclose(factor, 1 / size, rel_tol=close):
            return f"1/{size} of what it should be, the number of {name}: averaged once too often, or a share alone"
    return f"{factor:.4g} times what it should be"


def _gradient(seen: Seen) -> list[str]:
    wrong, found = [row for row in seen.rows if row.differs], _border(seen)
    every, stages = len(wrong) == len(seen.rows), range(seen.layout.pp)
    copied = all(len({p.box for p in row.pieces if p.place.pp == pp}) < 2 for row in wrong for pp in stages)
    factors = [_factor(row) for row in wrong]
    if None not in factors and max(factors) - min(factors) < max(CLOSE, seen.row.tolerance) * max(map(abs, factors)):  # type: ignore[type-var, operator]
        one = f"the gradient of {wrong[0].name}" if len(wrong) == 1 else "each of these"
        which = "every gradient" if every else one
        found.append(f"{which} is {_named(factors[0] or 0.0, seen)}")
    if all(of_experts(row.name) for row in wrong):
        found.append("only experts': the sum over ranks with the same ones, or a factor for those with others")
    elif all(_tp_sums(row) for row in wrong) and seen.layout.tp > 1:
        missing = "the all-reduce over tp of replicated weights is missing"
        found.append(f"tp ranks hold summands whose sum is right: {missing}")
    elif copied and not every and seen.layout.tp > 1:
        found.append("only what all tp ranks hold alike: norms, biases after a sum, learned positions")
    if {row.name for row in wrong} <= {*seen.reference.vocabulary}:
        tied = "if it is tied, the sum over the first and the last stage; its padding"
        found.append(f"only what has a row per id: {tied}")
    if all(_dp_alone(row) for row in wrong):
        found.append("the gradients of one dp rank alone: the sum over dp does not reach these elements")
    stages = {piece.place.pp for row in wrong for piece in row.wrong}
    if len(stages) < seen.layout.pp and not every:
        found.append(f"only stages of pp ranks {sorted(stages)}")
    if every and not found:
        weight = "the weight of micro-batches or of ranks in the loss"
        found.append(f"every gradient differs, without a common factor: {weight}")
    if not found:
        found.append("backward of this layer, or a part of it that is not summed, or summed before it was complete")
    return found


def _stretches(pieces: Sequence[Piece], axis: str) -> list[list[Piece]]:
    """The pieces of the same elements that ranks hold which differ in this axis, dp (with cp) or tp, alone."""
    stretches: dict[tuple[Any, ...], list[Piece]] = {}
    for piece in pieces:
        other = (piece.place.dp, piece.place.cp) if axis == "tp" else piece.place.tp
        stretches.setdefault((piece.place.pp, other, piece.box, piece.item.first, piece.here.size), []).append(piece)
    return list(stretches.values())


def _tp_sums(row: Row) -> bool:
    """Whether what tp ranks have of the same elements adds up to the reference."""
    stretches = [some for some in _stretches(row.pieces, "tp") if some[0].here.size]
    sums = ((sum(piece.here for piece in some), some) for some in stretches)
    return bool(stretches) and all(len(some) > 1 and _close(x, some[0].there, row.tolerance) for x, some in sums)


def _dp_alone(row: Row) -> bool:
    """Whether those elements that differ add up to the reference over the dp ranks that hold them."""
    stretches = _stretches(row.wrong, "dp")
    for some in stretches:
        bad = np.any([piece.bad(row.tolerance) for piece in some], 0)
        total = np.sum([piece.here for piece in some], 0)[bad] if len(some) > 1 else np.zeros(0)
        if not _close(total, some[0].there[bad], row.tolerance):
            return False
    return bool(stretches)


def _close(a: Any, b: Any, tolerance: float) -> bool:
    close = max(CLOSE, tolerance) * float(np.linalg.norm(b))
    return a.shape == b.shape and float(np.linalg.norm(a - b)) <= close


def _norm(seen: Seen) -> list[str]:
    row, arrays = seen.row, seen.reference.arrays.items()
    squares = {key[2]: float((one[-1] ** 2.0).sum()) for key, one in arrays if key[:2] == (row.step, "gradient")}
    others = sum(square for name, square in squares.items() if not of_experts(name)) / sum(squares.values())
    if others < 1 and all(_close(piece.here, others**0.5 * piece.there, row.tolerance) for piece in row.wrong):
        return ["every gradient agrees, and the norm has none of the experts'"]
    text = "every gradient agrees: how often copies count in the norm, or by how many tokens it is divided"
    factor = _factor(seen.row)
    return [text if factor is None else f"{text} (it is {factor:.6g} times what it should be)"]


def _router(seen: Seen) -> list[str]:
    factor = _factor(seen.row)
    told = [] if factor is None else [f"{seen.row.name} is {_named(factor, seen)}"]
    return [*told, "every gradient agrees: choices that recomputation or an evaluation counts, too, or ranks left out"]


def _weight(seen: Seen) -> list[str]:
    wrong = [piece for row in seen.rows for piece in row.wrong]
    if seen.row.step == 0:
        other = "the weights begin otherwise: how initial values are drawn, or how a rank's share of them is cut"
        return [*_taken(seen), *_other_experts(seen), other]
    dp = sorted({piece.place.dp for piece in wrong})
    if all(_old(piece, seen) for piece in wrong):
        return [f"these elements are those of the step before on dp ranks {dp}: the gather of weights left them stale"]
    if len(dp) < seen.layout.dp:
        return [f"only on dp ranks {dp}: the gather of weights, or an update of their own share"]
    return ["every gradient agrees: the update, its rate, clipping or moments, or the gather after it"]
