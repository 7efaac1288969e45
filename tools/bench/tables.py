"""What a benchmark's rows come to: figures of each, as text, as CSV, and as rows for pictures."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.config import cli
from megalite.models.families import PRESETS
from megalite.models.flops import train_flops_per_token
from megalite.train.arrangement import Arrangement, arrange
from megalite.train.run_dir import write_atomically
from tools.bench.breakdown import LOST, break_down
from tools.bench.turns import OK, REFUSED, WAITING, Row

SPREAD = ("", "_least", "_most")
Figures = dict[str, Any]


def figures(rows: Sequence[Row], price_per_hour: float | None = None) -> list[Figures]:
    """Of every row: values, contender, ranks, status, reason, runs; where it is ok, medians over its runs with least
    and most: step_s, tokens_per_s, mfu; memory_gib, peak_tflops, breakdown (megalite's). On a CPU the peak is the best
    that a run of that precision and number of ranks has measured."""
    plans = [arrangement_of(row) for row in rows]
    peaks: dict[tuple[object, int], float] = {}
    for row, made in zip(rows, plans, strict=True):
        for run in row.runs:
            if made is not None and (peak := run.get("peak_tflops")):
                key = (made.dtype, row.nproc)
                peaks[key] = max(peaks.get(key, 0.0), peak)
    found = []
    for row, made in zip(rows, plans, strict=True):
        peak = None if made is None else peaks.get((made.dtype, row.nproc))
        found.append(_of_row(row, made, peak, price_per_hour))
    return found


def arrangement_of(row: Row) -> Arrangement | None:
    """None where it was refused."""
    if row.status == REFUSED:
        return None
    config, _ = cli.read(row.flags, PRESETS)
    vocab = next((run["vocab_size"] for run in row.runs if "vocab_size" in run), config.data.vocab_size)
    return None if vocab is None else arrange(config, row.nproc, vocab)


def _of_row(row: Row, made: Arrangement | None, peak: float | None, price: float | None) -> Figures:
    one: Figures = dict(label=row.label, values=row.values, contender=row.contender, ranks=row.nproc)
    one |= dict(status=row.status, reason=row.reason, runs=len(row.runs))
    if made is None or not row.runs:
        return one
    times = sorted(run["step_s"] for run in row.runs)
    tokens = made.batch_size * made.config.model.seq_length
    flops = train_flops_per_token(made.config.model, made.config.model.seq_length, made.padded_vocab) * tokens
    for end, step in zip(SPREAD, (statistics.median(times), times[-1], times[0]), strict=True):
        one[f"tokens_per_s{end}"] = tokens / step
        one[f"mfu{end}"] = flops / step / 1e12 / peak / row.nproc if peak else None
    one |= dict(step_s=statistics.median(times), step_s_least=times[0], step_s_most=times[-1], peak_tflops=peak)
    one["tflops"] = flops / one["step_s"] / 1e12
    one["memory_gib"] = statistics.median(run["memory"] for run in row.runs) / 2**30
    middle = min(row.runs, key=lambda run: abs(run["step_s"] - one["step_s"]))
    if row.contender.startswith("megalite") and "vocab_size" in middle:
        one["breakdown"] = break_down(middle, made, peak, price)
    return one


def percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.1%}"


def told(found: Mapping[str, Any]) -> list[str]:
    """A breakdown in lines."""
    lines = ["of a step: " + _sorted(found["shares"])]
    if found["lost"] is None:
        lines.append("of the peak: n/a, as none is known, or one that was measured while the machine was busy")
    else:
        lines.append(f"of the peak: MFU {percent(found['mfu'])}; lost to " + _sorted(found["lost"]))
    of = found["efficiency"]
    cost = "n/a without --price-per-hour" if of["cost_per_sample"] is None else f"{of['cost_per_sample']:.3g}"
    lines.append(
        f"efficiency: devices compute {percent(of['gpu_utilization'])} of the time, memory "
        f"{percent(of['memory_utilization'])} full, {of['samples_per_s']:,.4g} samples/s, cost per sample {cost}; data "
        f"{percent(of['data_time'])}, forward {percent(of['forward_time'])}, backward {percent(of['backward_time'])}, "
        f"communication {percent(of['communication_time'])}"
    )
    lines.append(f"bound: {found['bound']['by']}: {found['bound']['evidence']}")
    return [*lines, f"advice: {found['advice']}"] if found["advice"] else lines


def _sorted(of: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in sorted(of.items(), key=lambda one: -one[1]) if share)


def with_efficiency(found: list[Figures]) -> list[Figures]:
    """Of a scaling: `per_rank` tokens/s, and `efficiency` against the fewest ranks among rows that are alike."""
    for one in found:
        if "tokens_per_s" in one:
            one["per_rank"] = one["tokens_per_s"] / one["ranks"]

    def alike(one: Figures) -> tuple[object, ...]:
        who = one["contender"].removesuffix(" ddp").removesuffix(" fsdp2")  # ways to several ranks
        return who, *((name, value) for name, value in one["values"].items() if name != "ranks")

    for one in found:
        like = [other for other in found if "per_rank" in other and alike(other) == alike(one)]
        if "per_rank" in one:
            one["efficiency"] = one["per_rank"] / min(like, key=lambda other: other["ranks"])["per_rank"]
    return found


def text_table(found: Sequence[Figures]) -> str:
    """For people: a row each, and why where there is no figure."""
    from megalite.train.figures import columns

    scaling = any("efficiency" in one for one in found)
    peers = len({one["contender"] for one in found}) > 1
    head = ["", *(["who"] if peers else []), "tokens/s", "least", "most", "MFU", "GiB"]
    head += ["per rank", "efficiency"] if scaling else []
    rows = [[*head, "bound", "loses most by"]]
    for one in found:
        cells = [one["label"], *([one["contender"]] if peers else [])]
        if "tokens_per_s" in one:
            cells += [f"{one[f'tokens_per_s{end}']:,.0f}" for end in SPREAD]
            cells += [percent(one["mfu"]), f"{one['memory_gib']:.2f}"]
            cells += [f"{one['per_rank']:,.0f}", percent(one["efficiency"])] if scaling else []
            cells += _bound(one.get("breakdown"))
        if one["status"] not in (OK, WAITING):  # after figures, too: a later run may be out of memory
            cells = [*cells, *[""] * (len(head) + 1 - len(cells)), one["status"]]
        rows.append([*cells, *[""] * (len(rows[0]) - len(cells))][: len(rows[0])])
    lines = [f"{one['label']}, {one['contender']}: {one['status']}: {one['reason']}" for one in found if one["reason"]]
    return "\n".join([columns(rows), *lines])


def _bound(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return ["", ""]
    gone = found["lost"]
    most = "n/a" if gone is None else max(gone, key=lambda name: gone[name])
    return [found["bound"]["by"], most if gone is None else f"{most} {gone[most]:.1%}"]


def write_csv(found: Sequence[Figures], path: Path) -> None:
    """One line per row; columns of what varies first. What is lost of the peak as lost_NAME, shares as share_NAME."""
    varied = list(dict.fromkeys(name for one in found for name in one["values"]))
    lines = []
    for one in found:
        flat = {**one["values"], **{k: v for k, v in one.items() if k not in ("values", "breakdown", "label")}}
        if made := one.get("breakdown"):
            flat |= {f"share_{name}": share for name, share in made["shares"].items()}
            flat |= {f"lost_{name}": (made["lost"] or {}).get(name) for name in LOST}
            flat |= {name: value for name, value in made["efficiency"].items()}
            flat |= {"bound": made["bound"]["by"], "advice": made["advice"]}
        lines.append(flat)
    names = [*varied, *(name for name in dict.fromkeys(name for line in lines for name in line) if name not in varied)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_atomically(path, text.getvalue())
