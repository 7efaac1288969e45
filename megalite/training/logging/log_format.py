"""The logged metrics (METRICS) and the log lines of both styles, megalite's and Megatron-LM's; pure functions.

MFU is model FLOPs (causal, no recompute) per second over the dense peak of all devices. HFU also counts recomputed
FLOPs; a run without recomputation has none. A metric without a value (the
loss if every step was skipped, the MFU of an unknown GPU) is None, and "n/a" in the line; never 0 or -1.
"""

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalite.common.tables import load_table
from megalite.config.layer_spec import ROUTER_LOSSES
from megalite.config.options import Config, iter_options

Values = Mapping[str, Any]  # metrics by name; an absent name is None


@dataclass(frozen=True)
class LoggedMetric:
    """The places where a metric is logged; "" for not at all."""

    name: str
    key: str  # in metrics.jsonl and W&B
    megalite: str = ""  # format in megalite's line; starts with "| " if it is the first of a group
    megatron: str = ""  # format in Megatron-LM's line
    megatron_order: int = 0  # position in Megatron-LM's line
    tag: str = ""  # of each step in TensorBoard
    optional: bool = False  # omitted if it is None, instead of null and "n/a"
    default: float | None = None  # value that megalite's line omits
    drop: int = 0  # order in which metrics are omitted from megalite's line if the terminal is too narrow; 0: never


GROUP = "| "  # starts the format of a group's first metric
TABLES = load_table(__file__, "metrics")
METRICS = tuple(LoggedMetric(name, **fields) for name, fields in TABLES["metrics"].items())


def metrics_of(values: Values) -> tuple[LoggedMetric, ...]:
    """Return METRICS, and after the loss a metric for each loss in `values` that it lacks.

    These are the losses of multi-token prediction and of plugins.
    """
    known = {metric.name for metric in METRICS}
    new_losses = [_loss_metric(name) for name in values.get("losses", ()) if name not in known]
    return (METRICS[0], *new_losses, *METRICS[1:])


def _loss_metric(name: str) -> LoggedMetric:
    """Return the metric of a loss that METRICS lacks. Megatron-LM's name of mtp_1_loss is "mtp_1 loss"."""
    is_mtp = re.fullmatch(r"mtp_\d+_loss", name) is not None
    megatron_name = name.replace("_loss", " loss") if is_mtp else name
    return LoggedMetric(
        name,
        key=f"{'train' if is_mtp else 'loss'}/{name}",
        megalite=f"{name.removesuffix('_loss')} {{:.4f}}" if is_mtp else f"{name} {{:.3g}}",
        megatron=f"{megatron_name}: {{:.6E}}",
        megatron_order=10,
        tag=megatron_name,
        optional=True,
        drop=12,
    )


def tag_of(name: str) -> str:
    """Return the tag in TensorBoard of a loss of the head or of a depth of multi-token prediction."""
    return next((metric.tag for metric in METRICS if metric.name == name), _loss_metric(name).tag)


def layer_loss_tags(layer_losses: Mapping[tuple[str, int], float]) -> dict[str, float]:
    """Return the losses of layers by their tags in TensorBoard, as Megatron-LM names those of routers."""
    router_losses = ROUTER_LOSSES.values()
    return {
        f"moe/{name.removeprefix('router_')}_layer_{n}" if name in router_losses else f"{name}_layer_{n}": loss
        for (name, n), loss in layer_losses.items()
    }


@dataclass(frozen=True)
class Speed:
    """The throughput of a run, per device, from the duration of its steps."""

    flops_per_token: float
    devices: int
    peak_tflops: float | None  # dense peak of a device; None if unknown
    too_low: str = ""  # explanation and remedy if a run exceeds the peak
    recomputed: float = 0.0  # recomputed FLOPs, as a multiple of the model's

    def add_rates(self, values: Values) -> dict[str, Any]:
        """Return the metrics with rates added; `too_fast` is True if the run is above the peak, which is then wrong."""
        step_s, peak = values["step_s"], self.peak_tflops
        tokens_per_s = values["tokens_per_step"] / step_s / self.devices
        tflops = tokens_per_s * self.flops_per_token / 1e12
        too_fast = peak is not None and tflops * (1 + self.recomputed) > peak
        mfu = None if peak is None or too_fast else tflops / peak
        hfu = None if mfu is None or not self.recomputed else mfu * (1 + self.recomputed)
        shown_tokens_per_s = f"{tokens_per_s / 1000:.1f}k" if tokens_per_s >= 1000 else f"{tokens_per_s:.0f}"
        shown_tflops = f"{tflops:.0f}" if tflops >= 100 else f"{tflops:.3g}"
        shown_mfu = "n/a" if mfu is None else f"{100 * mfu:.1f}%"
        return {
            **values,
            "tokens_per_s": tokens_per_s,
            "tflops": tflops,
            "mfu": mfu,
            "hfu": hfu,
            "too_fast": too_fast,
            "step_ms": 1000 * step_s,
            "shown_tokens_per_s": shown_tokens_per_s,
            "shown_tflops": shown_tflops,
            "shown_mfu": shown_mfu,
            "shown_hfu": None if hfu is None else f"{100 * hfu:.1f}%",
            "rates": f"{shown_tokens_per_s} tok/s/gpu  {shown_tflops} TF/s  MFU {shown_mfu}",
            "data_share": values["data_s"] / step_s,
            "eta": duration((values["last_step"] - values["step"]) * step_s),
        }


def duration(seconds: float) -> str:
    """Format a duration.

    >>> duration(850), duration(200_000)
    ('00:14:10', '2d 07:33:20')
    """
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    time = f"{h:02d}:{m:02d}:{s:02d}"
    return f"{days}d {time}" if days > 0 else time


def perplexity(loss: float) -> float:
    """Return exp(loss), capped at exp(20) as in Megatron-LM, so that a diverged run does not overflow."""
    return math.exp(min(20.0, loss))


def metrics_row(values: Values) -> dict[str, Any]:
    """Return the metrics by their keys in metrics.jsonl."""
    return {
        metric.key: values.get(metric.name)
        for metric in metrics_of(values)
        if metric.key and not (metric.optional and values.get(metric.name) is None)
    }


def megalite_line(values: Values, now: datetime.datetime, width: int | None = None) -> str:
    """Return megalite's log line.

    Args:
        width: The width of the terminal; metrics that do not fit are omitted, the least important first.
    """
    head = f"{now:%H:%M:%S}  step {values['step']:5d}/{values['last_step']}"
    texts: dict[LoggedMetric, str] = {}
    metrics = metrics_of(values)
    for metric in metrics:
        value = values.get(metric.name)
        template = metric.megalite.removeprefix(GROUP)
        if not metric.megalite or (value is not None and value == metric.default):
            continue
        if value is not None:
            texts[metric] = template.format(value, **values)
        elif not metric.optional:
            texts[metric] = f"{template.partition('{')[0]}n/a"
    line = _join(head, metrics, texts)
    for metric in sorted((metric for metric in texts if metric.drop), key=lambda metric: metric.drop):
        if width is None or len(line) <= width:
            break
        del texts[metric]
        line = _join(head, metrics, texts)
    return line


def _join(head: str, metrics: Sequence[LoggedMetric], texts: Mapping[LoggedMetric, str]) -> str:
    """Join the texts of those of `metrics` that have one to a line, with a bar between two groups."""
    line = head
    group = last_group = 0
    for metric in metrics:
        if metric.megalite.startswith(GROUP):
            group += 1
        if metric in texts:
            line += ("  " if group == last_group else f" {GROUP}") + texts[metric]
            last_group = group
    return line


def megatron_line(values: Values, now: datetime.datetime, throughput: bool) -> str:
    """Return Megatron-LM's training log line, field by field, because users' scripts parse it."""
    metrics = [
        metric
        for metric in metrics_of(values)
        if metric.megatron and values.get(metric.name) is not None and (throughput or metric.name != "tflops")
    ]
    metrics.sort(key=lambda metric: metric.megatron_order)
    head = f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {values['step']:8d}/{values['last_step']:8d} |"
    return "".join([head, *(f" {metric.megatron.format(values[metric.name])} |" for metric in metrics)])


def megalite_validation_line(step: int, name: str, loss: float, bpb: float | None, now: datetime.datetime) -> str:
    """Return megalite's log line of an evaluation; `bpb` are the bits per byte, if known."""
    bpb_text = "" if bpb is None else f"  bits per byte {bpb:.4f}"
    return f"{now:%H:%M:%S}  step {step:5d}  {name} loss {loss:.4f}  ppl {perplexity(loss):.5g}{bpb_text}"


def format_scores(scores: Mapping[str, float]) -> str:
    """Format the scores of a task by their names (data/datasets/requests.py: TaskScores).

    >>> format_scores({"acc": 0.25, "bpb": 1.5})
    'acc 0.2500  bits per byte 1.5000'
    """
    names = {"bpb": "bits per byte"}
    return "  ".join(f"{names.get(name, name)} {value:.4f}" for name, value in scores.items())


def score_line(step: int, task: str, scores: Mapping[str, float], now: datetime.datetime) -> str:
    """Return the log line of the scores of a task, in both styles; Megatron-LM has no such line."""
    return f"{now:%H:%M:%S}  step {step:5d}  {task} {format_scores(scores)}"


def megatron_validation_lines(prefix: str, loss: float, name: str = "") -> str:
    """Return Megatron-LM's framed line of an evaluation.

    Args:
        prefix: For example "iteration 100" or "iteration 100 on test set".
    """
    suffix = f"-{name}" if name else ""
    line = f" validation{suffix} loss at {prefix} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    dashes = "-" * (len(line) + 1)
    return f"{dashes}\n{line}\n{dashes}"


def megatron_text(line: str, **values: Any) -> str:
    """Format one of Megatron-LM's other lines (metrics.toml)."""
    return TABLES["megatron"][line].format(**values)


def megatron_end(reason: str, step: int, minutes: float) -> str:
    """Return the text of Megatron-LM's timestamp at the end of training, for the trainer's reason."""
    if reason.startswith("SIG"):
        return f"exiting program after receiving {reason.partition(';')[0]}."
    if reason.startswith("exit_duration"):
        return f"exiting program after {minutes} minutes"
    return f"exiting program at iteration {step}" if reason.startswith("exit_interval") else "after training is done"


def megatron_arguments(config: Config) -> str:
    """Return Megatron-LM's list of all options and their values, with dots up to column 48."""
    values = {f.name: getattr(getattr(config, section), f.name) for section, f in iter_options()}
    rows = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(values.items())]
    dashes = "-" * 24
    return "\n".join([f"{dashes} arguments {dashes}", *rows, f"{dashes[4:]} end of arguments {'-' * 21}"])


def megatron_timers(option: str, seconds: Mapping[str, Sequence[float]]) -> str:
    """Return Megatron-LM's lines about the timers that ran on any rank, in ms; "" if none did.

    Args:
        option: --timing-log-option: max, minmax or all.
        seconds: Timer name -> the time of each rank, 0 if it did not run there.
    """
    ms_by_name = {name: [1000 * s for s in times if s > 0] for name, times in seconds.items() if any(times)}
    if not ms_by_name:
        return ""
    if option == "all":
        lines = ["times across ranks (ms):"]
        for name in ms_by_name:
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {1000 * s:.2f}" for rank, s in enumerate(seconds[name]) if s > 0]
        return "\n".join(lines)
    lines = ["max time across ranks (ms):" if option == "max" else "(min, max) time across ranks (ms):"]
    for name, ms in ms_by_name.items():
        text = f"{max(ms):.2f}" if option == "max" else f"({min(ms):.2f}, {max(ms):.2f})"
        lines.append(f"    {(name + ' ').ljust(48, '.')}: {text}")
    return "\n".join(lines)


def table(rows: Mapping[str, str]) -> str:
    """Format names and values in two columns; further lines of a value are indented below it."""
    margin = max(map(len, rows)) + 2
    return aligned_table([(name, text.replace("\n", "\n" + " " * margin)) for name, text in rows.items()], headed=False)


def aligned_table(rows: Sequence[Sequence[str]], headed: bool = True) -> str:
    """Format rows as aligned columns; lines are never wrapped.

    Args:
        headed: The first row is the head, and all columns but the first are right-aligned numbers.
    """
    try:
        from rich.cells import cell_len
    except ImportError:  # only torch is installed (tools/gpu_report.py)
        cell_len = len
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
            padding = " " * (width - cell_len(cell))
            cells.append(padding + cell if headed and i else cell + padding)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
