"""The goals of tools/gpu_report.py for one H100 or H200, and their measured values."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.bench.gpu_report_runs import TRAINING_RUNS

NOISE = 0.02  # of a ratio of two medians of one run
Results = dict[str, dict[str, Any]]  # by part


@dataclass(frozen=True)
class Goal:
    """A goal and its measured value.

    Attributes:
        name: what is measured.
        value: the measurement; None if there is none.
        bound: the smallest value that reaches the goal, or the largest if `at_least` is False.
        text: the goal in words.
        value_format: the format of the value.
        at_least: True if larger values are better.
        detail: text to show after the value.
    """

    name: str
    value: float | None
    bound: float
    text: str
    value_format: str = "{:.1%}"
    at_least: bool = True
    detail: str = ""

    def to_json(self, judge: bool) -> dict[str, Any]:
        """Return the goal as an entry of report.json. With `judge` False, it is not compared with the value."""
        if self.value is None:
            met = "not measured"
        elif not judge:
            met = "not judged"
        else:
            is_reached = self.value >= self.bound if self.at_least else self.value <= self.bound
            met = "yes" if is_reached else "NO"
        shown = "" if self.value is None else (self.value_format.format(self.value) + self.detail).strip()
        return {"what": self.name, "value": self.value, "shown": shown, "goal": self.text, "met": met}


# --- kernels


@dataclass(frozen=True)
class Metric:
    """A field of kernel_bench.KernelResult that has goals."""

    goal_format: str
    value_format: str
    at_least: bool


METRICS = {
    "of_copy": Metric("{:.0%} of the copy rate", "{:.1%}", True),
    "tflops": Metric("{:.0f} TFLOP/s", "{:.0f} TFLOP/s", True),
    "extra_mib": Metric("at most {:.0f} MiB in addition to inputs and gradients", "{:.0f} MiB", False),
}
FORWARD_AND_BACKWARD = ("forward", "backward")


@dataclass(frozen=True)
class MetricGoal:
    """A bound on a metric of some kernels.

    Attributes:
        ops: the operations.
        sizes: the shapes of rows.
        metric: a key of METRICS.
        bound: the goal, a minimum or a maximum by the metric.
        directions: forward, backward, or both in one time.
        peer: the measured function.
        note: the record, to show with the goal.
    """

    ops: tuple[str, ...]
    sizes: tuple[str, ...]
    metric: str
    bound: float
    directions: tuple[str, ...] = FORWARD_AND_BACKWARD
    peer: str = "megalite"
    note: str = ""


@dataclass(frozen=True)
class SpeedGoal:
    """Some kernels should be as fast as the fastest peer.

    Attributes:
        ops: the operations.
        sizes: the shapes of rows.
        peers: the other functions.
        peer_names: their names in the goal.
        directions: forward, backward, or both in one time.
        part: the part of the report that measures them.
    """

    ops: tuple[str, ...]
    sizes: tuple[str, ...]
    peers: tuple[str, ...]
    peer_names: str
    directions: tuple[str, ...] = FORWARD_AND_BACKWARD
    part: str = "peers"


HIDDEN_SIZES = ("hidden_size 4096", "hidden_size 8192")
VOCAB_SIZES = ("vocab_size 128256",)
SEQUENCES = ("sequence 4096", "sequence 32768")
DENSE, EXPERTS = ("expert_count 1",), ("expert_count 8", "expert_count 16")
ELEMENTWISE_OPS = ("layer_norm", "rope", "swiglu", "bias_gelu", "dropout_add")
COMPILERS, COMPILER_NAMES = ("compile", "liger"), "torch.compile, Liger"
KERNEL_GOALS: tuple[MetricGoal | SpeedGoal, ...] = (
    MetricGoal(("rms_norm",), HIDDEN_SIZES, "of_copy", 0.90, ("forward",), note="record 4,176 GB/s"),
    MetricGoal(("rms_norm",), HIDDEN_SIZES, "of_copy", 0.85, ("backward",), note="record 3,801 GB/s"),
    MetricGoal(ELEMENTWISE_OPS, HIDDEN_SIZES, "of_copy", 0.80),
    MetricGoal(("cross_entropy",), VOCAB_SIZES, "of_copy", 0.80),
    SpeedGoal(ELEMENTWISE_OPS, ("hidden_size 4096",), COMPILERS, COMPILER_NAMES),
    SpeedGoal(("cross_entropy",), VOCAB_SIZES, COMPILERS, COMPILER_NAMES, ("forward", "backward", "both")),
    MetricGoal(("adamw",), ("numel 1073741824",), "of_copy", 0.90, ("forward",)),
    MetricGoal(("linear_cross_entropy",), VOCAB_SIZES, "tflops", 650, ("both",), note="record 701"),
    MetricGoal(("linear_cross_entropy",), VOCAB_SIZES, "extra_mib", 1024, ("both",)),
    SpeedGoal(("attention",), SEQUENCES, ("cudnn",), "cuDNN", part="kernels"),
    MetricGoal(("attention",), SEQUENCES, "tflops", 450, ("forward",), peer="triton"),
    SpeedGoal(("gated_matmul",), DENSE, ("torch",), "cuBLAS and SwiGLU after it"),
    SpeedGoal(("gated_matmul",), EXPERTS, ("torch",), "grouped_mm, and SwiGLU and probabilities after it"),
    SpeedGoal(("grouped_matmul",), DENSE, ("torch",), "cuBLAS"),
    MetricGoal(("grouped_matmul",), EXPERTS, "tflops", 600),
)
KernelRows = dict[tuple[str, str, str, str], dict[str, Any]]  # by part, kernel, shape and peer


def kernel_goals(results: Results) -> Iterator[Goal]:
    """Yield the goals of kernels."""
    rows: KernelRows = {}
    for part in ("kernels", "peers"):
        for row in results.get(part, {}).get("rows", []):
            rows[part, row["kernel"], row["shape"], row["peer"]] = row
    for goal in KERNEL_GOALS:
        for op, size, direction in itertools.product(goal.ops, goal.sizes, goal.directions):
            if isinstance(goal, SpeedGoal):
                yield _speed_goal(goal, f"{op} {direction}", size, rows)
            else:
                yield _metric_goal(goal, f"{op} {direction}", size, rows)


def _speed_goal(goal: SpeedGoal, kernel: str, size: str, rows: KernelRows) -> Goal:
    row = rows.get((goal.part, kernel, size, "megalite"), {})
    peer_rows = [rows.get((goal.part, kernel, size, peer)) for peer in goal.peers]
    peer_times = [peer_row["us"] for peer_row in peer_rows if peer_row is not None]
    speed = min(peer_times) / row["us"] if row and peer_times else None
    detail = f" ({row['tflops']:.0f} TFLOP/s)" if row.get("tflops") else ""
    name = f"{kernel}, {size}: speed over {goal.peer_names}"
    return Goal(name, speed, 1 - NOISE, "1.0 x", "{:.2f} x", detail=detail)


def _metric_goal(goal: MetricGoal, kernel: str, size: str, rows: KernelRows) -> Goal:
    row = rows.get(("kernels", kernel, size, goal.peer), {})
    metric = METRICS[goal.metric]
    name = f"{kernel}, {size}"
    if goal.peer != "megalite":
        name += f", {goal.peer}"
    text = metric.goal_format.format(goal.bound)
    if goal.note:
        text += f" ({goal.note})"
    detail = f" ({row['gb_s']:,.0f} GB/s)" if row and goal.metric == "of_copy" else ""
    return Goal(name, row.get(goal.metric), goal.bound, text, metric.value_format, metric.at_least, detail)


# --- training and correctness


def training_goals(results: Results) -> Iterator[Goal]:
    """Yield the goals of training: MFU, the memory estimate, and the time outside forward and backward."""
    for run in TRAINING_RUNS:
        result, name = results.get(f"train {run.name}", {}), f"training {run.name}"
        layers = f"{result.get('layers')} of {result.get('of_layers')} layers, moments {result.get('moments')}"
        speed = f" ({result.get('tokens_per_s') or 0:,.0f} tokens/s, {layers})"
        yield Goal(f"{name}: MFU", result.get("mfu"), run.mfu_goal, f"{run.mfu_goal:.0%}", detail=speed)
        memory, estimate = result.get("memory"), result.get("estimate")
        error = None if memory is None or not estimate else abs(memory / estimate - 1)
        sizes = f" ({(memory or 0) / 2**30:.1f} GiB of {(estimate or 0) / 2**30:.1f})"
        yield Goal(f"{name}: peak memory off the estimate", error, 0.05, "at most 5%", at_least=False, detail=sizes)
        overhead = result.get("overhead")
        yield Goal(f"{name}: step outside forward and backward", overhead, 0.03, "at most 3%", at_least=False)


def num_failed_tests(results: Results) -> int | None:
    """Return the number of tests that failed or did not end, or None if none was run."""
    counts = results.get("tests", {})
    failed = counts.get("failed", 0) + counts.get("did_not_end", 0)
    return failed if failed or counts.get("passed", 0) else None


def goals(results: Results) -> list[Goal]:
    """Return all goals, in the order of the page."""
    failed_tests = Goal("GPU tests that fail", num_failed_tests(results), 0, "0", "{:.0f}", at_least=False)
    return [*training_goals(results), failed_tests, *kernel_goals(results)]
