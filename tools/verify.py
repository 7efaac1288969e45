#!/usr/bin/env python
"""Does a layout train as one process does? Your command line at a small size, both ways, everything compared.

python tools/verify.py --config run.toml --tp 2 --pp 4 --dp 8              any flags of pretrain_gpt.py
python tools/verify.py --preset llama3-8b --tp 2 --pp 2 --nproc 8 ...      --nproc: ranks of the run, not of the check
python tools/verify.py FLAGS --dtype bfloat16 --out agreement.png          in bf16, with a picture
python tools/verify.py FLAGS --whole                                       at its own size, on its own data

Trains --steps steps in one process and on the layout, from the same weights, evaluates after the first and the last,
and compares every hidden state, loss, gradient and weight of every rank. Sizes and ranks are reduced (--most-ranks)
with all that the layout is about left in them; where tp ranks share groups of keys and values, a second run may be of
that alone. Where something differs: the first step, layer and parameter, its ranks and elements, and what leaves such
a pattern. On a CPU unless --device cuda. Exit codes: 0 they agree; 1 they differ, or the layout failed; 2 usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.program import parser_of, run_program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megalite.config.options import Config
    from tools.checks.agreement import Row, Tolerance
    from tools.checks.causes import Finding
    from tools.checks.places import Layout
    from tools.checks.recording import Recording
    from tools.checks.smaller import Smaller

DTYPES = ("float64", "float32", "bfloat16")
WHAT = {
    "input": "what micro-batches hold",
    "forward": "hidden states and losses",
    "loss": "loss",
    "gradient": "gradients",
    "norm": "gradient norm",
    "weight": "weights",
}
OF = {
    "input": "the {} of a micro-batch",
    "forward": "the output of {}",
    "loss": "the loss of a {}",
    "gradient": "the gradient of {}",
    "norm": "the gradient norm of the {}",
    "weight": "the weights {}",
}
NAMED = 6  # names of what differs that are listed


class Failed(Exception):
    """One process, or the layout, ended with an error, which it has told itself."""


class Stopped(Exception):
    """By a signal. `code`: what to exit with."""

    def __init__(self, code: int):
        self.code = code


@dataclass(frozen=True)
class Verdict:
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
        kinds = [*WHAT]
        return [found[key] for key in sorted(found, key=lambda key: (kinds.index(key[0]), key[1]))]

    @property
    def notes(self) -> list[str]:
        evaluated = any(row.step % 1 for row in self.rows)
        return [*self.made.notes, *["not evaluated: --eval-iters 0, or no validation set"] * (not evaluated)]


def train(config: Config, dtype: str, layout: Layout, timeout_s: float) -> list[Recording]:
    """On local ranks, what each of them had. Raises Failed and Stopped."""
    from megalite.parallel.local_ranks import End, start_local
    from tools.checks.recording import read_all, take

    with tempfile.TemporaryDirectory(prefix="megalite-verify-") as folder:
        ends: list[End] = []
        args = (config, dtype, config.train.train_iters, folder)
        code = start_local(layout.world, take, args, timeout_s=timeout_s, holds_signals=True, ended=ends.append)
        if ends[-1].asked:
            raise Stopped(code)
        if code:
            late = f"it is not done after {timeout_s:g} s; give more with --timeout"
            why = late if code == 124 else f"{ends[-1].cause}; its error is above"
            raise Failed(f"the run on {layout.world} rank{'s' * (layout.world > 1)} failed: {why}")
        return read_all(Path(folder), layout)


def verify(made: Smaller, dtype: str, timeout_s: float) -> Verdict:
    """Train both ways and compare. Raises Failed."""
    from megalite.config.console import Bar
    from tools.checks.agreement import Reference, Tolerance, compare, second_reading
    from tools.checks.causes import find
    from tools.checks.places import Layout
    from tools.checks.smaller import twin

    m, t = made.config.model, made.config.train
    batch = t.global_batch_size or 1
    tolerance = Tolerance(dtype, max(m.seq_length * batch, m.ffn_size, m.hidden_size), m.num_layers)
    with Bar("verify", 3, "parts") as bar:
        bar.at(0, "one process")
        (one,) = train(twin(made.config), dtype, Layout(), timeout_s)
        bar.at(1, str(made.layout))
        ranks = train(made.config, dtype, made.layout, timeout_s)
        bar.at(2, "comparing")
        reference = Reference(one)
        rows, pieces = compare(reference, ranks, made.layout, tolerance)
        odd = list(second_reading(reference, tolerance))
        number = batch // (t.micro_batch_size * made.layout.dp)
        return Verdict(made, tolerance, rows, find(rows, pieces, reference, made.layout, number), odd)


def in_precision(config: Config, dtype: str) -> Config:
    """float64 leaves the options as they are (a loss scale, bf16 moments); only tensors are wider."""
    from dataclasses import replace

    if dtype == "float64":
        return config
    return replace(config, precision=replace(config.precision, bf16=dtype == "bfloat16", fp16=False))


def text_of(verdict: Verdict, dtype: str) -> str:
    """For people."""
    from megalite.train.tell.figures import columns

    made, m, t = verdict.made, verdict.made.config.model, verdict.made.config.train
    chunks, steps = _chunks(made), t.train_iters
    lines = [
        f"asked for: {made.wanted}; verified: {made.layout}{chunks}, {dtype}, {steps} step{'s' * (steps != 1)}",
        f"of {m.num_layers} layers, hidden {m.hidden_size}, {m.num_attention_heads} heads in {m.groups} groups, "
        f"feed-forward {m.ffn_size}, {m.seq_length} tokens, batch {t.global_batch_size} in micro-batches of "
        f"{t.micro_batch_size}",
        *(f"note: {note}" for note in verdict.notes),
    ]
    rows: list[tuple[str, ...]] = [("compared", "step", "furthest apart", "by", "allowed", "differ")]
    for row in verdict.worst:
        alike = [one for one in verdict.rows if (one.kind, one.step) == (row.kind, row.step)]
        count = f"{sum(one.differs for one in alike)} of {len(alike)}"
        name = row.name if row.apart or row.differs else "equal"
        when = f"{row.step:g}" if row.step == int(row.step) else f"eval {int(row.step)}"
        rows.append((WHAT[row.kind], when, name, f"{row.apart:.1e}", f"{row.tolerance:.1e}", count))
    lines += ["", columns(rows), ""]
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
    from tools.checks.agreement import when
    from tools.checks.recording import STEP

    ranks = "; ".join(f"{axis} {' '.join(map(str, some))}" for axis, some in found.ranks.items() if some)
    others = ", ".join(found.others[:NAMED]) + f" and {len(found.others) - NAMED} more" * (len(found.others) > NAMED)
    evaluated, name = found.step % 1 > 0, found.name
    what = "the validation loss" if evaluated and (found.kind, name) == ("loss", STEP) else OF[found.kind].format(name)
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
    return {
        "agrees": verdict.agrees,
        "dtype": dtype,
        "steps": verdict.made.config.train.train_iters,
        "wanted": asdict(verdict.made.wanted),
        "verified": asdict(verdict.made.layout),
        "notes": verdict.notes,
        "first": None if verdict.finding is None else asdict(verdict.finding),
        "one_process": verdict.odd,
        "rows": [{key: getattr(row, key) for key in keys} for row in verdict.rows],
    }


def _arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=3, help="of training; default: 3")
    parser.add_argument("--dtype", choices=DTYPES, default="float64", help="in float64, the default, nothing hides")
    parser.add_argument("--most-ranks", type=int, default=8, help="processes of the layout, at most; default: 8")
    parser.add_argument("--whole", action="store_true", help="keep sizes, data and layout as they are")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run; default: 600")
    parser.add_argument("--json", type=Path, help="FILE with all that was compared")
    parser.add_argument("--out", type=Path, help="FILE for a picture of the agreement, .png or .svg")
    return parser.parse_known_args(argv)


def prepare(args: argparse.Namespace, words: list[str]) -> list[Smaller]:
    """Raises ConfigError, with every problem."""
    from megalite.config import cli
    from megalite.config.check import check
    from megalite.config.options import ConfigError
    from megalite.models.families import PRESETS
    from tools.checks.smaller import layout_of, of_groups, smaller
    from tools.program import unwritable

    counts = (("steps", args.steps), ("most_ranks", args.most_ranks))
    wrong = [f"{name}={value} is below 1; give 1 or more" for name, value in counts if value < 1]
    wrong += [] if 0 < args.timeout < 1e6 else [f"timeout={args.timeout:g} is no time; give seconds above 0"]
    if wrong := [*wrong, *unwritable(pictures=("out",), json=args.json, out=args.out)]:
        raise ConfigError(wrong)
    found = cli.read_all(words, PRESETS, world=lambda config: layout_of(config)[0].world)
    if found.config.checkpoint.use_checkpoint_args:
        raise ConfigError(["use_checkpoint_args takes the sizes from a checkpoint; give them as flags, or --config"])
    config = in_precision(found.config, args.dtype)
    try:
        first = smaller(config, args.most_ranks, args.steps, args.whole)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    second = None if args.whole else of_groups(config, first, args.most_ranks)
    runs = [first] if second is None else [first, second]
    if wrong := [line for made in runs for line in check(made.config, made.layout.world)]:
        raise ConfigError([f"at its small size: {line}; or give --whole" for line in wrong])
    from megalite.train.life.preflight import choose_device  # imports torch
    from megalite.train.setup import SetupError

    if found.config.train.compile:
        first.notes.append("--compile is not verified: blocks run as they are")
    try:
        choose_device(first.config.parallel.device)
    except SetupError as error:
        raise ConfigError([str(error)]) from None
    return runs


def main(argv: list[str]) -> int:
    args, words = _arguments(argv)
    from megalite.config.console import complain
    from megalite.config.options import ConfigError

    try:
        runs = prepare(args, words)
    except ConfigError as error:
        complain("\n".join(f"verify.py: {problem}" for problem in error.problems))
        return 2
    verdicts: list[Verdict] = []
    try:
        for made in runs:
            verdicts.append(verify(made, args.dtype, args.timeout))
            print("\n" * (len(verdicts) > 1) + text_of(verdicts[-1], args.dtype), flush=True)
            if not verdicts[-1].agrees:
                break
    except Failed as error:
        complain(f"verify.py: {error}")
        return 1
    except Stopped as stopped:
        complain("verify.py: interrupted")
        return stopped.code
    try:
        if args.json is not None:
            args.json.write_text(json.dumps(as_json(verdicts, args.dtype)), "utf-8")
        if args.out is not None:
            _draw(verdicts[0] if verdicts[-1].agrees else verdicts[-1], args.out, args.dtype)
    except (OSError, ValueError) as error:  # matplotlib says by ValueError that it does not know a format
        complain(f"verify.py: {error}")
        return 2
    return 0 if verdicts[-1].agrees else 1


def _draw(verdict: Verdict, path: Path, dtype: str) -> None:
    """Raises OSError, ValueError and MissingPackage."""
    from tools.pictures.agreement import picture
    from tools.pictures.canvas import save

    save(picture(verdict.rows, str(verdict.made.layout), dtype), path)


if __name__ == "__main__":
    run_program(main)
