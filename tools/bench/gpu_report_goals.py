"""Goals for one H100 or H200, their measured values, and the page of tools/gpu_report.py."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.bench.gpu_report_runs import ABLATIONS, TRAINING_RUNS

NOISE = 0.02  # of a ratio of two medians of one run
MAX_FAILURES_SHOWN, MAX_FAILURE_LINES = 20, 15
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
        if run.mfu_goal is None:
            continue
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


def num_differing_cases(results: Results, part: str) -> int | None:
    """Return the number of smoke cases of a part that failed, or None if none was run."""
    cases = [case for case in results.get(part, {}).get("cases", []) if not case["status"].startswith("not run")]
    return sum(case["status"] != "ok" for case in cases) if cases else None


def goals(results: Results) -> list[Goal]:
    """Return all goals, in the order of the page."""

    def zero_goal(name: str, value: int | None) -> Goal:
        return Goal(name, value, 0, "0", "{:.0f}", at_least=False)

    return [
        *training_goals(results),
        zero_goal("GPU tests that fail", num_failed_tests(results)),
        *kernel_goals(results),
        zero_goal("results that differ from the CPU's", num_differing_cases(results, "smoke")),
        zero_goal("layouts that differ from one GPU", num_differing_cases(results, "layouts")),
    ]


# --- the page


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Format a Markdown table as lines."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def format_variant(summary: dict[str, Any]) -> str:
    """Format the measurements of a variant of an ablation."""
    speed = f"{summary['tokens_per_s']:,.0f} tokens/s"
    if summary["mfu"]:
        speed += f", MFU {summary['mfu']:.1%}"
    batch = f"micro-batches {summary['micro_batches']} x {summary['micro_batch']}"
    return f"{speed}, attention {summary['attention']}, {batch}, {summary['memory'] / 2**30:.1f} GiB"


def ablation_rows(results: Results) -> Iterator[list[str]]:
    """Yield the table rows of ablations and of tiles, with the reason in place of values that were not measured."""
    for part in ABLATIONS:
        if part in results:
            plan = results[part]["plan"]
            for row in results[part]["rows"]:
                yield _ablation_row(row, plan)
    sweep = results.get("tiles", {})
    for best in sweep.get("best", []):
        yield _tile_row(best, sweep)


def _ablation_row(row: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    if "ratio" not in row:
        return [row["name"], row["status"], "", "", "", ""]
    off, on = row["sides"]
    spread = f"{min(row['ratios']):.3f} to {max(row['ratios']):.3f}"
    notes = [
        "{layers} of {of_layers} layers, sequence {seq_length}, moments {moments}".format_map(plan),
        f"{len(row['ratios'])} pairs",
        *(f"{name} {value}" for name, value in row["load"].items()),
    ]
    if row["status"] != "ok":
        notes.append(row["status"])
    return [row["name"], format_variant(off), format_variant(on), f"{row['ratio']:.3f}", spread, ", ".join(notes)]


def _tile_row(best: dict[str, Any], sweep: dict[str, Any]) -> list[str]:
    rows = [row for row in sweep["rows"] if (row["kernel"], row["shape"]) == (best["kernel"], best["shape"])]
    table_row = next((row for row in rows if row["tile"] == best["table"]), None)
    best_row = next((row for row in rows if row["tile"] == best["tile"]), None)
    spreads = [f"quartiles {row['spread']:.1%}" for row in (table_row, best_row) if row]
    gain = "" if best["gain"] is None else f"{1 + best['gain']:.3f}"
    notes = f"{rows[0]['tokens']} tokens, {rows[0]['dtype']}, {sweep['repeats']} calls, {len(rows)} tiles"
    name = f"tile of {best['kernel']}, {best['shape']}"
    return [name, _format_tile(table_row), _format_tile(best_row), gain, ", ".join(spreads), notes]


def _format_tile(row: dict[str, Any] | None) -> str:
    if row is None:
        return "did not run"
    values = ", ".join(f"{value} {name}" for name, value in row["tile"].items())
    return f"{row['us']:.1f} us, {row['of_copy']:.1%} of the copy rate, {values}"


def section(title: str, lines: list[str]) -> list[str]:
    """Format a program's unchanged output under a title."""
    return ["", f"### {title}", "", "```", *lines, "```"]


def markdown(report: dict[str, Any]) -> str:
    """Return report.md for the content of report.json."""
    facts, results, parts = report["facts"], report["results"], report["parts"]
    dry_run = ": a dry run on CPU at tiny sizes; no figure means anything" if report["dry_run"] else ""
    lines = [f"# GPU report{dry_run}"]
    for text in facts.get("warnings", []):
        lines += ["", f"**Warning:** {text}"]
    fact_rows = [[key, str(value)] for key, value in facts.items() if key not in ("plans", "warnings")]
    goal_rows = [[goal[key] for key in ("what", "shown", "goal", "met")] for goal in report["figures"]]
    lines += ["", *table(["", ""], fact_rows)]
    lines += ["", "## Goals", "", *table(["what", "measured", "goal", "reached"], goal_rows), ""]
    if ablations := list(ablation_rows(results)):
        header = ["ablation", "off", "on", "speed on over off", "least and most", "measured with"]
        lines += ["## Ablations", "", *table(header, ablations), ""]
    part_rows = [[part["name"], part["status"], f"{part['seconds']:.0f}"] for part in parts]
    lines += ["## Parts", "", *table(["part", "status", "seconds"], part_rows)]
    for part in parts:
        if part["status"] not in ("waiting", "running") and part["tail"]:
            lines += section(f"{part['name']}: {part['status']}", part["tail"])
    for name in ("smoke", "layouts"):
        for case in results.get(name, {}).get("cases", []):
            if case["tail"]:
                lines += section(f"{case['name']}: {case['status']}", case["tail"])
    for failure in results.get("tests", {}).get("failures", [])[:MAX_FAILURES_SHOWN]:
        lines += section(failure["test"], failure["text"].splitlines()[-MAX_FAILURE_LINES:])
    return "\n".join(lines) + "\n"
