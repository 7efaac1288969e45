"""Summarize a benchmark's rows as text, as CSV, and as rows for pictures."""

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.config import cli
from megalite.models.families import PRESETS
from megalite.planning.bottleneck import format_shares
from megalite.planning.layer_kinds import flops_per_token
from megalite.planning.run_plan import RunPlan, make_run_plan
from megalite.training.logging.log_format import aligned_table
from megalite.training.logging.run_dir import write_atomically
from tools.bench.breakdown import LOST, break_down
from tools.bench.results import OK, REFUSED, WAITING, Row

SPREAD = ("", "_least", "_most")
Figures = dict[str, Any]


def figures(rows: Sequence[Row], price_per_hour: float | None = None) -> list[Figures]:
    """Every row has values, contender, ranks, status, reason, runs; where it is ok, also medians over its runs with
    least and most: step_s, tokens_per_s, mfu; memory_gib, peak_tflops; speed and memory beside megalite's; breakdown
    (megalite's). On a CPU the peak is the best that a run of that precision and number of ranks has measured."""
    plans = [arrangement_of(row) for row in rows]
    peaks: dict[tuple[object, int], float] = {}
    for row, plan in zip(rows, plans, strict=True):
        for run in row.runs:
            if plan is not None and (peak := run.get("peak_tflops")):
                key = (plan.dtype, row.nproc)
                peaks[key] = max(peaks.get(key, 0.0), peak)
    bases = {row.identity[1:]: row for row in rows if row.contender.startswith("megalite")}
    measured = []
    for row, plan in zip(rows, plans, strict=True):
        peak = None if plan is None else peaks.get((plan.dtype, row.nproc))
        measured.append(_of_row(row, plan, peak, price_per_hour) | compared(row, bases.get(row.identity[1:])))
    return measured


def compared(row: Row, base: Row | None) -> Figures:
    """`speed` and `memory` as multiples of megalite's under the same flags: medians over neighbouring runs, since a
    machine is seldom quiet."""
    pairs = [] if base is None else list(zip(base.runs, row.runs, strict=False))
    if not pairs:
        return {}
    speed = statistics.median(own["step_s"] / peer["step_s"] for own, peer in pairs)
    return {"speed": speed, "memory": statistics.median(peer["memory"] / own["memory"] for own, peer in pairs)}


def arrangement_of(row: Row) -> RunPlan | None:
    """None where it was refused."""
    if row.status == REFUSED:
        return None
    config, _ = cli.read(row.flags, PRESETS)
    vocab = next((run["vocab_size"] for run in row.runs if "vocab_size" in run), config.data.vocab_size)
    return None if vocab is None else make_run_plan(config, row.nproc, vocab)


def _of_row(row: Row, plan: RunPlan | None, peak: float | None, price: float | None) -> Figures:
    one: Figures = dict(label=row.label, values=row.values, contender=row.contender, ranks=row.nproc)
    one |= dict(status=row.status, reason=row.reason, runs=len(row.runs))
    if plan is None or not row.runs:
        return one
    times = sorted(run["step_s"] for run in row.runs)
    tokens = plan.batch_size * plan.config.model.seq_length
    flops = flops_per_token(plan.config.model, plan.padded_vocab) * tokens
    for end, step in zip(SPREAD, (statistics.median(times), times[-1], times[0]), strict=True):
        one[f"tokens_per_s{end}"] = tokens / step
        one[f"mfu{end}"] = flops / step / 1e12 / peak / row.nproc if peak else None
    one |= dict(step_s=statistics.median(times), step_s_least=times[0], step_s_most=times[-1], peak_tflops=peak)
    one["tflops"] = flops / one["step_s"] / 1e12
    one["memory_gib"] = statistics.median(run["memory"] for run in row.runs) / 2**30
    middle = min(row.runs, key=lambda run: abs(run["step_s"] - one["step_s"]))
    if row.contender.startswith("megalite") and "vocab_size" in middle:
        one["breakdown"] = break_down(middle, plan, peak, price)
    return one


def percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.1%}"


def breakdown_lines(breakdown: Mapping[str, Any]) -> list[str]:
    """A breakdown in lines."""
    lines = ["of a step: " + format_shares(breakdown["shares"])]
    if breakdown["lost"] is None:
        lines.append("of the peak: n/a, as none is known, or one that was measured while the machine was busy")
    else:
        lines.append(f"of the peak: MFU {percent(breakdown['mfu'])}; lost to " + format_shares(breakdown["lost"]))
    of = breakdown["efficiency"]
    cost = "n/a without --price-per-hour" if of["cost_per_sample"] is None else f"{of['cost_per_sample']:.3g}"
    share = {name: percent(of[name]) for name in of if name.endswith(("_time", "_utilization"))}
    lines.append(
        f"efficiency: devices compute {share['gpu_utilization']} of the time, memory {share['memory_utilization']} "
        f"full, {of['samples_per_s']:,.4g} samples/s, cost per sample {cost}; data {share['data_time']}, forward "
        f"{share['forward_time']}, backward {share['backward_time']}, communication {share['communication_time']}"
    )
    lines.append(f"bound: {breakdown['bound']['by']}: {breakdown['bound']['evidence']}")
    return [*lines, f"advice: {breakdown['advice']}"] if breakdown["advice"] else lines


def by_rank(run: Mapping[str, Any]) -> list[str]:
    """The parts of a step on each of several ranks, in lines; on cards also what kernels hide of the messages."""
    if len(run["parts"]) < 2:
        return []
    parts = [{name: seconds / sum(one.values()) for name, seconds in one.items()} for one in run["parts"]]
    lines = [f"rank {rank}: {format_shares(shares)}" for rank, shares in enumerate(parts)]
    if whole := (timeline := run.get("timeline") or {}).get("communication_s"):
        lines.append(f"rank 0: {whole * 1e3:.1f} ms of messages, {timeline['hidden_s'] / whole:.0%} behind kernels")
    return lines


def with_efficiency(measured: list[Figures]) -> list[Figures]:
    """For a scaling: `per_rank` tokens/s, and `efficiency` against the fewest ranks among rows that are alike."""
    for one in measured:
        if "tokens_per_s" in one:
            one["per_rank"] = one["tokens_per_s"] / one["ranks"]

    def alike(one: Figures) -> tuple[object, ...]:
        who = one["contender"].removesuffix(" ddp").removesuffix(" fsdp2")  # ways to several ranks
        return who, *((name, value) for name, value in one["values"].items() if name != "ranks")

    for one in measured:
        like = [other for other in measured if "per_rank" in other and alike(other) == alike(one)]
        if "per_rank" in one:
            one["efficiency"] = one["per_rank"] / min(like, key=lambda other: other["ranks"])["per_rank"]
    return measured


def text_table(measured: Sequence[Figures]) -> str:
    """For people: a row each, and why where there is no figure."""
    scaling = any("efficiency" in one for one in measured)
    peers = len({one["contender"] for one in measured}) > 1
    head = ["", "who"] if peers else [""]
    head += ["tokens/s", "least", "most", "TFLOP/s", "MFU", "GiB"]
    if peers:
        head += ["speed", "memory"]
    if scaling:
        head += ["per rank", "efficiency"]
    rows = [[*head, "bound", "loses most by"]]
    for one in measured:
        cells = [one["label"], one["contender"]] if peers else [one["label"]]
        if "tokens_per_s" in one:
            cells += [f"{one[f'tokens_per_s{end}']:,.0f}" for end in SPREAD]
            cells += [f"{one['tflops']:.3f}", percent(one["mfu"]), f"{one['memory_gib']:.2f}"]
            if peers:
                cells += [f"{one[name]:.2f}" if name in one else "n/a" for name in ("speed", "memory")]
            if scaling:
                cells += [f"{one['per_rank']:,.0f}", percent(one["efficiency"])]
            if breakdown := one.get("breakdown"):
                gone: dict[str, float] = breakdown["lost"] or {}
                most = max(gone, key=gone.__getitem__, default=None)
                cells += [breakdown["bound"]["by"], "n/a" if most is None else f"{most} {gone[most]:.1%}"]
        if one["status"] not in (OK, WAITING):  # after figures, too: a later run may be out of memory
            cells = [*cells, *[""] * (len(head) + 1 - len(cells)), one["status"]]
        rows.append([*cells, *[""] * (len(rows[0]) - len(cells))][: len(rows[0])])
    about = "{label}, {contender}: {status}: {reason}"
    lines = [about.format(**one) for one in measured if one["reason"]]
    if peers:
        lines.append("speed and memory: as a multiple of megalite's under the same flags")
    return "\n".join([aligned_table(rows), *lines])


def write_csv(measured: Sequence[Figures], path: Path) -> None:
    """One line per row; columns of what varies first. What is lost of the peak as lost_NAME, shares as share_NAME."""
    varied = list(dict.fromkeys(name for one in measured for name in one["values"]))
    lines = []
    for one in measured:
        flat = {**one["values"], **{k: v for k, v in one.items() if k not in ("values", "breakdown", "label")}}
        if breakdown := one.get("breakdown"):
            flat |= {f"share_{name}": share for name, share in breakdown["shares"].items()}
            flat |= {f"lost_{name}": (breakdown["lost"] or {}).get(name) for name in LOST}
            flat |= breakdown["efficiency"] | {"bound": breakdown["bound"]["by"], "advice": breakdown["advice"]}
        lines.append(flat)
    names = [*varied, *(name for name in dict.fromkeys(name for line in lines for name in line) if name not in varied)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_atomically(path, text.getvalue())
