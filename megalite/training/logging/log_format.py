"""The figures of a log line, a row of FIGURES each, and the lines of both styles, megalite's and Megatron-LM's. Pure.

MFU is model FLOPs (causal, no recompute) per second over the dense peak of all devices. A figure that does not exist
(the loss when every step was skipped, the MFU of an unknown card) is None, "n/a" in the line; never 0 or -1.
"""

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megalite.common.tables import load_table
from megalite.config.options import Config, iter_options

Values = Mapping[str, Any]  # figures by name; a name that is absent is None


class LoggedMetric(NamedTuple):
    """Where a figure goes, "" for nowhere: its `key` in metrics.jsonl and W&B, its field in megalite's line (a group's
    first begins with "| "), its field in Megatron-LM's and the `place` there, its TensorBoard `tag` of each step.
    `optional`: not null and "n/a" where it is None, but absent. `usual`: a value that megalite's line leaves out.
    `drop`: in which order figures are left out of megalite's line on a terminal that is too narrow for all; 0: never.
    """

    name: str
    key: str
    ours: str = ""
    megatron: str = ""
    place: int = 0
    tag: str = ""
    optional: bool = False
    usual: float | None = None
    drop: int = 0


GROUP = "| "  # begins the field of a group's first figure
TABLES = load_table(__file__, "metrics")
METRICS = tuple(LoggedMetric(name, **fields) for name, fields in TABLES["figures"].items())


@dataclass(frozen=True)
class Speed:
    """Turns seconds into rates, per device. `peak_tflops`: the dense peak of one; None: unknown. `too_low`: what that
    means of a peak that a run exceeds."""

    flops_per_token: float
    devices: int
    peak_tflops: float | None
    too_low: str = ""

    def add_rates(self, v: Values) -> dict[str, Any]:
        """The figures and those that follow from them. `too_fast`: above the peak, which is wrong then."""
        step_s, peak = v["step_s"], self.peak_tflops
        tokens = v["tokens_per_step"] / step_s / self.devices
        tflops = tokens * self.flops_per_token / 1e12
        too_fast = peak is not None and tflops > peak
        mfu = None if peak is None or too_fast else tflops / peak
        more: dict[str, Any] = dict(
            tokens_per_s=tokens, tflops=tflops, mfu=mfu, too_fast=too_fast, step_ms=1000 * step_s,
            shown_tokens_per_s=f"{tokens / 1000:.1f}k" if tokens >= 1000 else f"{tokens:.0f}",
            shown_tflops=f"{tflops:.0f}" if tflops >= 100 else f"{tflops:.3g}",
            shown_mfu="n/a" if mfu is None else f"{100 * mfu:.1f}%",
        )  # fmt: skip
        more["rates"] = "{shown_tokens_per_s} tok/s/gpu  {shown_tflops} TF/s  MFU {shown_mfu}".format(**more)
        eta = duration((v["last_step"] - v["step"]) * step_s)
        return {**v, **more, "data_share": v["data_s"] / step_s, "eta": eta}


def duration(seconds: float) -> str:
    """
    >>> duration(850), duration(200_000)
    ('00:14:10', '2d 07:33:20')
    """
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return f"{days}d " * (days > 0) + f"{h:02d}:{m:02d}:{s:02d}"


def perplexity(loss: float) -> float:
    """Capped at exp(20), as in Megatron-LM, so that a diverged run does not overflow."""
    return math.exp(min(20.0, loss))


def metrics_row(v: Values) -> dict[str, Any]:
    """The figures in metrics.jsonl."""
    return {f.key: v.get(f.name) for f in METRICS if f.key and not (f.optional and v.get(f.name) is None)}


def megalite_line(v: Values, now: datetime.datetime, width: int | None = None) -> str:
    """`width`: of the terminal; figures that do not fit are left out, the least important first."""
    head = f"{now:%H:%M:%S}  step {v['step']:5d}/{v['last_step']}"
    texts: dict[LoggedMetric, str] = {}
    for f in METRICS:
        if f.ours and (value := v.get(f.name)) is not None and value != f.usual:
            texts[f] = f.ours.removeprefix(GROUP).format(value, **v)
        elif f.ours and value is None and not f.optional:
            texts[f] = f"{f.ours.removeprefix(GROUP).partition('{')[0]}n/a"
    line = _joined(head, texts)
    for f in sorted((f for f in texts if f.drop), key=lambda f: f.drop):
        if width is None or len(line) <= width:
            break
        del texts[f]
        line = _joined(head, texts)
    return line


def _joined(head: str, texts: Mapping[LoggedMetric, str]) -> str:
    """The line of these figures, with a bar between those of two groups."""
    line, group, last = head, 0, 0
    for f in METRICS:
        group += f.ours.startswith(GROUP)
        if f in texts:
            line += ("  " if group == last else f" {GROUP}") + texts[f]
            last = group
    return line


def megatron_line(v: Values, now: datetime.datetime, throughput: bool) -> str:
    """Megatron-LM's training log line field by field, as users' scripts parse it."""
    there = [f for f in METRICS if f.megatron and v.get(f.name) is not None and (throughput or f.name != "tflops")]
    parts = [f" {f.megatron.format(v[f.name])} |" for f in sorted(there, key=lambda f: f.place)]
    return "".join([f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {v['step']:8d}/{v['last_step']:8d} |", *parts])


def megalite_validation_line(step: int, name: str, loss: float, bpb: float | None, now: datetime.datetime) -> str:
    per_byte = "" if bpb is None else f"  bits per byte {bpb:.4f}"
    return f"{now:%H:%M:%S}  step {step:5d}  {name} loss {loss:.4f}  ppl {perplexity(loss):.5g}{per_byte}"


def megatron_validation_lines(prefix: str, loss: float, name: str = "") -> str:
    """Megatron-LM's framed line; `prefix` as in "iteration 100" or "iteration 100 on test set"."""
    which = f"-{name}" if name else ""
    line = f" validation{which} loss at {prefix} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    dashes = "-" * (len(line) + 1)
    return f"{dashes}\n{line}\n{dashes}"


def megatron_text(line: str, **values: Any) -> str:
    """One of Megatron-LM's lines beside those of steps (figures.toml)."""
    return TABLES["megatron"][line].format(**values)


def megatron_end(reason: str, step: int, minutes: float) -> str:
    """The `what` of Megatron-LM's `moment` for the end of training; `reason` is the loop's."""
    if reason.startswith("SIG"):
        return f"exiting program after receiving {reason.partition(';')[0]}."
    if reason.startswith("exit_duration"):
        return f"exiting program after {minutes} minutes"
    return f"exiting program at iteration {step}" if reason.startswith("exit_interval") else "after training is done"


def megatron_arguments(config: Config) -> str:
    """Every option and its value, in 48 columns of dots."""
    values = {f.name: getattr(getattr(config, section), f.name) for section, f in iter_options()}
    rows = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(values.items())]
    dashes = "-" * 24
    return "\n".join([f"{dashes} arguments {dashes}", *rows, f"{dashes[4:]} end of arguments {'-' * 21}"])


def megatron_timers(option: str, seconds: Mapping[str, Sequence[float]]) -> str:
    """Timers that ran on some rank, in ms. `seconds`: name -> the time of each rank, 0 where it did not run."""
    ran = {name: [1000 * s for s in times if s > 0] for name, times in seconds.items() if any(times)}
    if option == "all":
        lines = ["times across ranks (ms):"]
        for name in ran:
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {1000 * s:.2f}" for rank, s in enumerate(seconds[name]) if s > 0]
        return "\n".join(lines) if ran else ""
    lines = ["max time across ranks (ms):" if option == "max" else "(min, max) time across ranks (ms):"]
    for name, ms in ran.items():
        shown = f"{max(ms):.2f}" if option == "max" else f"({min(ms):.2f}, {max(ms):.2f})"
        lines.append(f"    {(name + ' ').ljust(48, '.')}: {shown}")
    return "\n".join(lines) if ran else ""


def table(rows: Mapping[str, str]) -> str:
    """Names and values in two columns. Further lines of a value are indented below it."""
    margin = max(map(len, rows)) + 2
    return aligned_table([(name, text.replace("\n", "\n" + " " * margin)) for name, text in rows.items()], headed=False)


def aligned_table(rows: Sequence[Sequence[str]], headed: bool = True) -> str:
    """`headed`: the first row is the table's head, and columns but the first hold numbers. Lines are never wrapped."""
    try:
        from rich.cells import cell_len
    except ImportError:  # a machine with torch alone (tools/gpu_report.py)
        cell_len = len
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        spare = [" " * (width - cell_len(cell)) for width, cell in zip(widths, row, strict=True)]
        cells = [s + cell if headed and i else cell + s for i, (cell, s) in enumerate(zip(row, spare, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
