"""Summarize a benchmark's results, and format them as text, as CSV and for pictures."""

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.common.safe_open import write_atomically
from megalite.config import cli
from megalite.models.families import PRESETS
from megalite.planning.bottleneck import format_shares
from megalite.planning.layer_kinds import flops_per_token
from megalite.planning.run_plan import RunPlan, make_run_plan
from megalite.training.logging.log_format import aligned_table
from tools.bench.breakdown import LOSSES, full_breakdown
from tools.bench.results import OK, REFUSED, WAITING, BenchResult

SPREAD = ("", "_least", "_most")  # suffixes of the median, the minimum and the maximum
Summary = dict[str, Any]


def summarize(rows: Sequence[BenchResult], price_per_hour: float | None = None) -> list[Summary]:
    """Return a summary of every result, as JSON values.

    All summaries have `label`, `values`, `contender`, `ranks`, `status`, `reason` and `runs`, the number of runs. With
    at least one run they also have:

        step_s, tokens_per_s, mfu    medians over the runs, and with the suffixes of SPREAD minima and maxima
        tflops, peak_tflops          of the step, and of one device
        memory_gib                   median of the peak memory of all ranks
        speed, memory                relative to megalite's under the same flags
        breakdown                    megalite's alone (breakdown.full_breakdown)

    On a CPU the peak is the largest that a run with this precision and number of ranks has measured.
    """
    plans = [plan_of(row) for row in rows]
    peaks: dict[tuple[object, int], float] = {}
    for row, plan in zip(rows, plans, strict=True):
        for run in row.runs:
            if plan is not None and (peak := run.get("peak_tflops")):
                key = (plan.shape.dtype, row.nproc)
                peaks[key] = max(peaks.get(key, 0.0), peak)
    megalite_rows = {row.identity[1:]: row for row in rows if row.contender.startswith("megalite")}
    summaries = []
    for row, plan in zip(rows, plans, strict=True):
        peak = None if plan is None else peaks.get((plan.shape.dtype, row.nproc))
        summary = _summarize_row(row, plan, peak, price_per_hour)
        summaries.append(summary | compare_to_megalite(row, megalite_rows.get(row.identity[1:])))
    return summaries


def compare_to_megalite(row: BenchResult, base: BenchResult | None) -> Summary:
    """Return `speed` and `memory` as multiples of megalite's under the same flags.

    They are medians of the ratios of neighboring runs, because the load of a machine changes.
    """
    pairs = [] if base is None else list(zip(base.runs, row.runs, strict=False))
    if not pairs:
        return {}
    return {
        "speed": statistics.median(own["step_s"] / peer["step_s"] for own, peer in pairs),
        "memory": statistics.median(peer["memory"] / own["memory"] for own, peer in pairs),
    }


def plan_of(row: BenchResult) -> RunPlan | None:
    """Return the plan of a result's run, or None if it was refused or its vocabulary is unknown."""
    if row.status == REFUSED:
        return None
    config, _ = cli.read(row.flags, PRESETS)
    vocab_size = next((run["vocab_size"] for run in row.runs if "vocab_size" in run), config.data.vocab_size)
    return None if vocab_size is None else make_run_plan(config, row.nproc, vocab_size)


def _summarize_row(row: BenchResult, plan: RunPlan | None, peak: float | None, price: float | None) -> Summary:
    summary: Summary = {
        "label": row.label,
        "values": row.values,
        "contender": row.contender,
        "ranks": row.nproc,
        "status": row.status,
        "reason": row.reason,
        "runs": len(row.runs),
    }
    if plan is None or not row.runs:
        return summary
    step_times = sorted(run["step_s"] for run in row.runs)
    median_s, min_s, max_s = statistics.median(step_times), step_times[0], step_times[-1]
    tokens = plan.shape.batch_size * plan.config.model.seq_length
    flops = flops_per_token(plan.config.model, plan.shape.padded_vocab) * tokens
    for suffix, step_s in zip(SPREAD, (median_s, max_s, min_s), strict=True):
        summary[f"tokens_per_s{suffix}"] = tokens / step_s
        summary[f"mfu{suffix}"] = flops / step_s / 1e12 / peak / row.nproc if peak else None
    summary["step_s"] = median_s
    summary["step_s_least"] = min_s
    summary["step_s_most"] = max_s
    summary["peak_tflops"] = peak
    summary["tflops"] = flops / median_s / 1e12
    summary["memory_gib"] = statistics.median(run["memory"] for run in row.runs) / 2**30
    median_run = min(row.runs, key=lambda run: abs(run["step_s"] - median_s))
    if row.contender.startswith("megalite") and "vocab_size" in median_run:
        summary["breakdown"] = full_breakdown(median_run, plan, peak, price)
    return summary


def percent(share: float | None) -> str:
    """Format a share, or "n/a" if there is none."""
    return "n/a" if share is None else f"{share:.1%}"


def breakdown_lines(breakdown: Mapping[str, Any]) -> list[str]:
    """Format a breakdown as lines of text."""
    lines = ["of a step: " + format_shares(breakdown["shares"])]
    if breakdown["lost"] is None:
        lines.append("of the peak: n/a, as none is known, or one that was measured while the machine was busy")
    else:
        lines.append(f"of the peak: MFU {percent(breakdown['mfu'])}; lost to " + format_shares(breakdown["lost"]))
    metrics = breakdown["efficiency"]
    if metrics["cost_per_sample"] is None:
        cost = "n/a without --price-per-hour"
    else:
        cost = f"{metrics['cost_per_sample']:.3g}"
    share = {name: percent(metrics[name]) for name in metrics if name.endswith(("_time", "_utilization"))}
    lines.append(
        f"efficiency: devices compute {share['gpu_utilization']} of the time, memory {share['memory_utilization']} "
        f"full, {metrics['samples_per_s']:,.4g} samples/s, cost per sample {cost}; data {share['data_time']}, forward "
        f"{share['forward_time']}, backward {share['backward_time']}, communication {share['communication_time']}"
    )
    lines.append(f"bound: {breakdown['bound']['by']}: {breakdown['bound']['evidence']}")
    if breakdown["advice"]:
        lines.append(f"advice: {breakdown['advice']}")
    return lines


def rank_lines(run: Mapping[str, Any]) -> list[str]:
    """Format the parts of a step on each rank, if there are several, and the overlap of communication on a GPU."""
    if len(run["parts"]) < 2:
        return []
    lines = []
    for rank, parts in enumerate(run["parts"]):
        total = sum(parts.values())
        lines.append(f"rank {rank}: {format_shares({name: seconds / total for name, seconds in parts.items()})}")
    timeline = run.get("timeline") or {}
    if seconds := timeline.get("communication_s"):
        lines.append(f"rank 0: {seconds * 1e3:.1f} ms of messages, {timeline['hidden_s'] / seconds:.0%} behind kernels")
    return lines


def add_scaling_efficiency(summaries: list[Summary]) -> list[Summary]:
    """Add `per_rank`, the tokens/s of a rank, and `efficiency` to the summaries of a scaling benchmark.

    The efficiency is relative to the smallest number of ranks of the same system under the same flags.
    """
    for summary in summaries:
        if "tokens_per_s" in summary:
            summary["per_rank"] = summary["tokens_per_s"] / summary["ranks"]

    def group(summary: Summary) -> tuple[object, ...]:
        system = summary["contender"].removesuffix(" ddp").removesuffix(" fsdp2")  # one rank needs neither
        return system, *((name, value) for name, value in summary["values"].items() if name != "ranks")

    for summary in summaries:
        if "per_rank" in summary:
            others = [other for other in summaries if "per_rank" in other and group(other) == group(summary)]
            base = min(others, key=lambda other: other["ranks"])
            summary["efficiency"] = summary["per_rank"] / base["per_rank"]
    return summaries


def text_table(summaries: Sequence[Summary]) -> str:
    """Format the summaries as a table with a row each, followed by the reasons of those without values."""
    is_scaling = any("efficiency" in summary for summary in summaries)
    has_peers = len({summary["contender"] for summary in summaries}) > 1
    header = ["", "who"] if has_peers else [""]
    header += ["tokens/s", "least", "most", "TFLOP/s", "MFU", "GiB"]
    if has_peers:
        header += ["speed", "memory"]
    if is_scaling:
        header += ["per rank", "efficiency"]
    rows = [[*header, "bound", "loses most by"]]
    width = len(rows[0])
    for summary in summaries:
        cells = [summary["label"], summary["contender"]] if has_peers else [summary["label"]]
        if "tokens_per_s" in summary:
            cells += [f"{summary[f'tokens_per_s{suffix}']:,.0f}" for suffix in SPREAD]
            cells += [f"{summary['tflops']:.3f}", percent(summary["mfu"]), f"{summary['memory_gib']:.2f}"]
            if has_peers:
                cells += [f"{summary[name]:.2f}" if name in summary else "n/a" for name in ("speed", "memory")]
            if is_scaling:
                cells += [f"{summary['per_rank']:,.0f}", percent(summary["efficiency"])]
            if breakdown := summary.get("breakdown"):
                losses: dict[str, float] = breakdown["lost"] or {}
                cause = max(losses, key=losses.__getitem__, default=None)
                cells += [breakdown["bound"]["by"], "n/a" if cause is None else f"{cause} {losses[cause]:.1%}"]
        if summary["status"] not in (OK, WAITING):  # also after values, if a later run was out of memory
            cells += [""] * (len(header) + 1 - len(cells))
            cells.append(summary["status"])
        cells += [""] * (width - len(cells))
        rows.append(cells[:width])
    lines = [aligned_table(rows)]
    for summary in summaries:
        if summary["reason"]:
            lines.append("{label}, {contender}: {status}: {reason}".format_map(summary))
    if has_peers:
        lines.append("speed and memory: as a multiple of megalite's under the same flags")
    return "\n".join(lines)


def write_csv(summaries: Sequence[Summary], path: Path) -> None:
    """Write one line per summary, with the varied flags in the first columns.

    Shares of a step become columns share_NAME, and losses of the peak lost_NAME.
    """
    varied = list(dict.fromkeys(name for summary in summaries for name in summary["values"]))
    lines = []
    for summary in summaries:
        line = dict(summary["values"])
        line |= {name: value for name, value in summary.items() if name not in ("values", "breakdown", "label")}
        if breakdown := summary.get("breakdown"):
            line |= {f"share_{name}": share for name, share in breakdown["shares"].items()}
            line |= {f"lost_{name}": (breakdown["lost"] or {}).get(name) for name in LOSSES}
            line |= breakdown["efficiency"]
            line |= {"bound": breakdown["bound"]["by"], "advice": breakdown["advice"]}
        lines.append(line)
    columns = list(dict.fromkeys([*varied, *(name for line in lines for name in line)]))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_atomically(path, text.getvalue())
