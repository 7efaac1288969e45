"""What tools/verify.py trains, compares and tells, once the two configurations are made."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megalite.config.console import ProgressBar
from megalite.config.options import Config
from megalite.launch.local_launcher import LaunchResult, launch_local
from megalite.training.logging.log_format import aligned_table
from tools.plots.curves import verified
from tools.plots.style import save
from tools.verification.compare_ranks import KINDS, Reference, Row, Tolerance, compare, second_reading, when
from tools.verification.diagnose import Finding, find
from tools.verification.record import STEP, Recording, read_all, take
from tools.verification.reference_sharding import Layout
from tools.verification.shrink import Smaller, twin

WORDS = {  # kind: all of it, and the one of a name
    "input": ("what micro-batches hold", "the {} of a micro-batch"),
    "forward": ("hidden states and losses", "the output of {}"),
    "loss": ("loss", "the loss of a {}"),
    "gradient": ("gradients", "the gradient of {}"),
    "norm": ("gradient norm", "the gradient norm of the {}"),
    "router": ("routers' counts and losses", "the sums {}"),
    "weight": ("weights", "the weights {}"),
}
NAMED = 6  # names of what differs that are listed


class Failed(Exception):
    """One process, or the layout, ended with an error, which it has told itself."""


class Stopped(Exception):
    """By a signal. `code`: what to exit with."""

    def __init__(self, code: int):
        self.code = code


class Verdict(NamedTuple):
    """`odd`: what is wrong with the one process itself."""

    made: Smaller
    tolerance: Tolerance
    rows: list[Row]
    finding: Finding | None
    odd: list[str]

    @property
    def agrees(self) -> bool:
        return self.finding is None and not self.odd

    @property
    def worst(self) -> list[Row]:
        """Of every kind and step: what is furthest beyond its tolerance."""
        found: dict[tuple[str, float], Row] = {}
        for row in self.rows:
            old = found.setdefault((row.kind, row.step), row)
            if (row.differs, row.apart) > (old.differs, old.apart):
                found[row.kind, row.step] = row
        return [found[key] for key in sorted(found, key=lambda key: (KINDS.index(key[0]), key[1]))]

    @property
    def notes(self) -> list[str]:
        notes = [*self.made.notes]
        if not any(row.step % 1 for row in self.rows):
            notes.append("not evaluated: --eval-iters 0, or no validation set")
        return notes


def train(config: Config, dtype: str, layout: Layout, timeout_s: float) -> list[Recording]:
    """On local ranks, what each of them had. Raises Failed and Stopped."""
    with tempfile.TemporaryDirectory(prefix="megalite-verify-") as folder:
        ends: list[LaunchResult] = []
        args = (config, dtype, config.train.train_iters, folder)
        code = launch_local(
            layout.world, take, args, timeout_s=timeout_s, keep_signals_blocked=True, on_exit=ends.append
        )
        if ends[-1].signals:
            raise Stopped(code)
        if code:
            late = f"it is not done after {timeout_s:g} s; give more with --timeout"
            why = late if code == 124 else f"{ends[-1].cause}; its error is above"
            raise Failed(f"the run on {layout.world} rank{'s' if layout.world > 1 else ''} failed: {why}")
        return read_all(Path(folder), layout)


def verify(made: Smaller, dtype: str, timeout_s: float) -> Verdict:
    """Train both ways and compare. Raises Failed."""
    m, t = made.config.model, made.config.train
    batch = t.global_batch_size or 1
    tolerance = Tolerance(dtype, max(m.seq_length * batch, m.ffn_size, m.hidden_size), m.num_layers)
    with ProgressBar("verify", 3, "parts") as bar:
        bar.update(0, "one process")
        (one,) = train(twin(made.config), dtype, Layout(), timeout_s)
        bar.update(1, str(made.layout))
        ranks = train(made.config, dtype, made.layout, timeout_s)
        bar.update(2, "comparing")
        reference = Reference(one)
        rows, pieces = compare(reference, ranks, made.layout, tolerance)
        odd = list(second_reading(reference, tolerance))
        number = batch // (t.micro_batch_size * made.layout.dp)
        return Verdict(made, tolerance, rows, find(rows, pieces, reference, made.layout, number), odd)


def text_of(verdict: Verdict, dtype: str) -> str:
    """For people."""
    made, m, t = verdict.made, verdict.made.config.model, verdict.made.config.train
    chunks, steps = _chunks(made), t.train_iters
    lines = [
        f"asked for: {made.wanted}; verified: {made.layout}{chunks}, {dtype}, {steps} step{'' if steps == 1 else 's'}",
        f"of {m.num_layers} layers, hidden {m.hidden_size}, {m.num_attention_heads} heads in {m.num_kv_groups} groups, "
        f"feed-forward {m.ffn_size}, {m.seq_length} tokens, batch {t.global_batch_size} in micro-batches of "
        f"{t.micro_batch_size}",
    ]
    if any(m.moe_layers):
        lines.append(f"{m.moe_router_topk} of {m.num_experts} experts for each token, {m.expert_ffn_size} wide")
    lines += [f"note: {note}" for note in verdict.notes]
    rows: list[tuple[str, ...]] = [("compared", "step", "furthest apart", "by", "allowed", "differ")]
    for row in verdict.worst:
        alike = [one for one in verdict.rows if (one.kind, one.step) == (row.kind, row.step)]
        count = f"{sum(one.differs for one in alike)} of {len(alike)}"
        name = row.name if row.apart or row.differs else "equal"
        when = f"{row.step:g}" if row.step == int(row.step) else f"eval {int(row.step)}"
        rows.append((WORDS[row.kind][0], when, name, f"{row.apart:.1e}", f"{row.tolerance:.1e}", count))
    lines += ["", aligned_table(rows), ""]
    if verdict.odd:
        lines += ["one process itself is wrong:", *(f"  {line}" for line in verdict.odd)]
    if verdict.finding is not None:
        lines += _told(verdict.finding)
    number = len({row.name for row in verdict.rows if row.kind == "weight"})
    if verdict.agrees:
        lines.append(f"agreed: {made.layout} trains as one process does ({number} parameters, every copy of them)")
    return "\n".join(lines)


def _chunks(made: Smaller) -> str:
    p = made.config.parallel
    spelt, pp = p.pipeline_model_parallel_layout, p.pipeline_model_parallel_size
    number = (spelt.count("|") + 1) // pp if spelt else p.num_virtual_stages_per_pipeline_rank or 1
    return f", {number} chunks" if number > 1 else ""


def _told(found: Finding) -> list[str]:
    ranks = "; ".join(f"{axis} {' '.join(map(str, some))}" for axis, some in found.ranks.items() if some)
    others = ", ".join(found.others[:NAMED])
    if len(found.others) > NAMED:
        others += f" and {len(found.others) - NAMED} more"
    evaluated, name = found.step % 1 > 0, found.name
    what = WORDS[found.kind][1].format(name)
    what = "the validation loss" if evaluated and (found.kind, name) == ("loss", STEP) else what
    place = "in" if evaluated else "after" if found.kind == "weight" else "at"
    at = f"{place} {when(found.step)}" if found.step else "before the first step"
    lines = [
        f"DIFFERS first {at}: {what}, {found.apart:.3g} apart where {found.tolerance:.1e} is allowed",
        f"  on ranks: {ranks or 'none'}",
        f"  where: {found.where}",
    ]
    if len(found.others) > 1:
        lines.append(f"  all of that kind there: {others}")
    return [*lines, *(f"  likely: {cause}" for cause in found.causes)]


def as_json(verdicts: Sequence[Verdict], dtype: str) -> dict[str, Any]:
    """What is told of all, in what is told of the first run; the second's own under its name."""
    first, *second = (_one(verdict, dtype) for verdict in verdicts)
    differing = [one["first"] for one in (first, *second) if one["first"] is not None]
    both = {"agrees": all(verdict.agrees for verdict in verdicts), "first": differing[0] if differing else None}
    return {**first, **both, "second": second[0] if second else None}


def _one(verdict: Verdict, dtype: str) -> dict[str, Any]:
    keys = ("step", "kind", "name", "apart", "tolerance", "differs", "missing")
    made, first = verdict.made, None if verdict.finding is None else verdict.finding._asdict()
    told = {"agrees": verdict.agrees, "dtype": dtype, "steps": made.config.train.train_iters}
    told |= {"wanted": made.wanted._asdict(), "verified": made.layout._asdict(), "notes": verdict.notes, "first": first}
    rows = [{key: getattr(row, key) for key in keys} for row in verdict.rows]
    return told | {"one_process": verdict.odd, "rows": rows}


def draw(verdict: Verdict, path: Path, dtype: str) -> None:
    """Raises OSError, ValueError and MissingPackage."""
    save(verified(verdict.rows, str(verdict.made.layout), dtype), path)
