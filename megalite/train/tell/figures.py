"""The figures of a log line and its two forms, megalite's and Megatron-LM's. Pure.

MFU is model FLOPs (causal, no recompute) per second over the dense peak of all devices. A figure that does not exist
(the loss when every step was skipped, the MFU of an unknown card) is None, "n/a" in the line; never 0 or -1.
"""

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalite.config.options import Config, options


@dataclass(frozen=True)
class Interval:
    """Means and totals over the steps since the last line. Times in seconds; loss in nats per token, over the steps
    that updated; `skipped` counts the others, `nan` those whose loss was not finite. `lr`, `grad_norm`, `loss_scale`,
    `batch_size` and `zeros` are the last step's."""

    step: int
    last_step: int
    consumed_samples: int
    consumed_tokens: int
    batch_size: int
    loss: float | None
    lr: float
    grad_norm: float
    loss_scale: float
    skipped: int
    step_s: float
    data_s: float
    tokens_per_step: int
    memory_gib: float
    memory_limit_gib: float
    reserved_gib: float | None = None  # by the CUDA allocator
    z_loss: float | None = None  # not part of `loss`
    nan: int = 0
    steps: int = 1
    params_norm: float | None = None
    zeros: int | None = None  # gradient elements that are 0


@dataclass(frozen=True)
class Speed:
    """Turns seconds into rates, per device. `peak_tflops`: the dense peak of one; None: unknown."""

    flops_per_token: float
    devices: int
    peak_tflops: float | None

    def tokens_per_s(self, i: Interval) -> float:
        return i.tokens_per_step / i.step_s / self.devices

    def tflops(self, i: Interval) -> float:
        return self.tokens_per_s(i) * self.flops_per_token / 1e12

    def too_fast(self, i: Interval) -> bool:
        """Whether the run is above the peak, which then is wrong: measured on a busy CPU, or given wrong."""
        return self.peak_tflops is not None and self.tflops(i) > self.peak_tflops

    def mfu(self, i: Interval) -> float | None:
        if self.peak_tflops is None or self.too_fast(i):
            return None
        return self.tflops(i) / self.peak_tflops


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


def rates(i: Interval, speed: Speed) -> str:
    tokens, tflops, mfu = speed.tokens_per_s(i), speed.tflops(i), speed.mfu(i)
    rate = f"{tokens / 1000:.1f}k" if tokens >= 1000 else f"{tokens:.0f}"
    share = "n/a" if mfu is None else f"{100 * mfu:.1f}%"
    return f"{rate} tok/s/gpu  {f'{tflops:.0f}' if tflops >= 100 else f'{tflops:.3g}'} TF/s  MFU {share}"


def megalite_line(i: Interval, speed: Speed, now: datetime.datetime) -> str:
    loss = "n/a" if i.loss is None else f"{i.loss:.4f}"
    loss += "" if i.z_loss is None else f"  z-loss {i.z_loss:.2e}"
    scale = f"  scale {i.loss_scale:.0f}" if i.loss_scale != 1.0 else ""
    scale += "" if i.params_norm is None else f"  pnorm {i.params_norm:.2f}"
    scale += "" if i.zeros is None else f"  zeros {i.zeros}"
    skipped = f" | skipped {i.skipped}" if i.skipped else ""
    return (
        f"{now:%H:%M:%S}  step {i.step:5d}/{i.last_step}  loss {loss}  lr {i.lr:.1e}  gnorm {i.grad_norm:.2f}{scale} | "
        f"{rates(i, speed)} | {i.memory_gib:.1f}/{i.memory_limit_gib:.0f} GiB | "
        f"data {100 * i.data_s / i.step_s:.1f}% | "
        f"eta {duration((i.last_step - i.step) * i.step_s)}{skipped}"
    )


def megatron_line(i: Interval, speed: Speed, now: datetime.datetime, throughput: bool) -> str:
    """Megatron-LM's training log line field by field, as users' scripts parse it."""
    parts = [
        f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {i.step:8d}/{i.last_step:8d} |",
        f" consumed samples: {i.consumed_samples:12d} |",
        f" elapsed time per iteration (ms): {i.step_s * 1000:.1f} |",
        f" throughput per GPU (TFLOP/s/GPU): {speed.tflops(i):.1f} |" if throughput else "",
        f" learning rate: {i.lr:.6E} |",
        f" global batch size: {i.batch_size:5d} |",
        "" if i.loss is None else f" lm loss: {i.loss:.6E} |",
        "" if i.z_loss is None else f" z_loss: {i.z_loss:.6E} |",
        f" loss scale: {i.loss_scale:.1f} |",
        f" grad norm: {i.grad_norm:.3f} |",
        "" if i.zeros is None else f" num zeros: {i.zeros} |",
        "" if i.params_norm is None else f" params norm: {i.params_norm:.3f} |",
        f" number of skipped iterations: {i.skipped:3d} |",
        f" number of nan iterations: {i.nan:3d} |",
    ]
    return "".join(parts)


def megalite_validation_line(step: int, name: str, loss: float, bpb: float | None, now: datetime.datetime) -> str:
    per_byte = "" if bpb is None else f"  bits per byte {bpb:.4f}"
    return f"{now:%H:%M:%S}  step {step:5d}  {name} loss {loss:.4f}  ppl {perplexity(loss):.5g}{per_byte}"


def megatron_validation_lines(prefix: str, loss: float, name: str = "") -> str:
    """Megatron-LM's framed line; `prefix` as in "iteration 100" or "iteration 100 on test set"."""
    which = f"-{name}" if name else ""
    line = f" validation{which} loss at {prefix} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    dashes = "-" * (len(line) + 1)
    return f"{dashes}\n{line}\n{dashes}"


def megatron_moment(what: str, now: datetime.datetime) -> str:
    """A point of the run, as "after dataloaders are built", and its time."""
    return f"[{what}] datetime: {now:%Y-%m-%d %H:%M:%S.%f} "


def megatron_end(reason: str, step: int, minutes: float) -> str:
    """The `what` of `megatron_moment` for the end of training; `reason` is the loop's."""
    if reason.startswith("SIG"):
        return f"exiting program after receiving {reason.partition(';')[0]}."
    if reason.startswith("exit_duration"):
        return f"exiting program after {minutes} minutes"
    return f"exiting program at iteration {step}" if reason.startswith("exit_interval") else "after training is done"


def megatron_sizes(world: int, sizes: Mapping[str, int]) -> str:
    """`sizes`: of the axes dp, cp, tp and pp, by name."""
    return (
        f"using world size: {world}, data-parallel size: {sizes['dp']}, context-parallel size: {sizes['cp']}, "
        f"hierarchical context-parallel sizes: None, tensor-model-parallel size: {sizes['tp']}, "
        f"pipeline-model-parallel size: {sizes['pp']}"
    )


def megatron_parameters(tp_rank: int, pp_rank: int, number: int) -> str:
    """`number`: of elements that the rank holds. (Megatron-LM of August 2026 names a third rank between the two.)"""
    return f" > number of parameters on (tensor, pipeline) model parallel rank ({tp_rank}, {pp_rank}): {number}"


def megatron_arguments(config: Config) -> str:
    """Every option and its value, in 48 columns of dots."""
    values = {f.name: getattr(getattr(config, section), f.name) for section, f in options()}
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
    return columns([(name, text.replace("\n", "\n" + " " * margin)) for name, text in rows.items()], headed=False)


def columns(rows: Sequence[Sequence[str]], headed: bool = True) -> str:
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
