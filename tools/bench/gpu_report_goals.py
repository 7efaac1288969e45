"""Goals for one H100 or H200, what was measured of each, and the page of tools/gpu_report.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

GOAL_SIZES = (4096, 8192)
SEQUENCES = (4096, 32768)
VOCABULARY = 128256
NOISE = 0.02  # of a ratio of two medians of one run
Results = dict[str, dict[str, Any]]  # by part


@dataclass(frozen=True)
class Goal:
    """`value` of the results, or None where it was not measured. `least`: at least `bound`, else at most."""

    what: str
    bound: float
    text: str
    value: Callable[[Results], float | None]
    show: str = "{:.1%}"
    least: bool = True
    detail: Callable[[Results], str] = lambda results: ""

    def figure(self, results: Results, judge: bool) -> dict[str, Any]:
        value = self.value(results)
        if value is None:
            met = "not measured"
        elif not judge:
            met = "not judged"
        else:
            met = "yes" if (value >= self.bound if self.least else value <= self.bound) else "NO"
        shown = "" if value is None else self.show.format(value)
        return {
            "what": self.what,
            "value": value,
            "shown": (shown + (self.detail(results) if shown else "")).strip(),
            "goal": self.text,
            "met": met,
        }


def row(results: Results, part: str, kernel: str, shape: str, peer: str = "megalite") -> dict[str, Any] | None:
    rows = results.get(part, {}).get("rows", [])
    return next((r for r in rows if (r["kernel"], r["shape"], r["peer"]) == (kernel, shape, peer)), None)


def of_kernel(name: str, kernel: str, shape: str, peer: str = "megalite") -> Callable[[Results], float | None]:
    def value(results: Results) -> float | None:
        measured = row(results, "kernels", kernel, shape, peer)
        return None if measured is None else measured[name]

    return value


def speed_over(part: str, kernel: str, shape: str, peers: tuple[str, ...]) -> Callable[[Results], float | None]:
    """How much faster than the fastest of `peers`."""

    def value(results: Results) -> float | None:
        ours, others = row(results, part, kernel, shape), [row(results, part, kernel, shape, p) for p in peers]
        times = [r["us"] for r in others if r is not None]
        return None if ours is None or not times else min(times) / ours["us"]

    return value


def rate(kernel: str, shape: str) -> Callable[[Results], str]:
    def text(results: Results) -> str:
        measured = row(results, "kernels", kernel, shape)
        return "" if measured is None else f" ({measured['gb_s']:,.0f} GB/s)"

    return text


def kernel_goals() -> Iterator[Goal]:
    def of_copy(kernel: str, shape: str, bound: float, record: str = "") -> Goal:
        text = f"{bound:.0%} of the copy rate{record}"
        return Goal(f"{kernel}, {shape}", bound, text, of_kernel("of_copy", kernel, shape), detail=rate(kernel, shape))

    halves = ("forward", "backward")
    for size in GOAL_SIZES:
        yield of_copy("rms_norm forward", f"hidden_size {size}", 0.90, " (record 4,176 GB/s)")
        yield of_copy("rms_norm backward", f"hidden_size {size}", 0.85, " (record 3,801 GB/s)")
    for op in ("layer_norm", "rope", "swiglu", "bias_gelu", "dropout_add"):
        for size in GOAL_SIZES:
            for half in halves:
                yield of_copy(f"{op} {half}", f"hidden_size {size}", 0.80)
    vocabulary = f"vocab_size {VOCABULARY}"
    for half in halves:
        yield of_copy(f"cross_entropy {half}", vocabulary, 0.80)
    same = [(f"{op} {half}", "hidden_size 4096") for op in ("layer_norm", "rope", "swiglu", "bias_gelu", "dropout_add")
            for half in halves]  # fmt: skip
    for kernel, shape in [*same, *((f"cross_entropy {half}", vocabulary) for half in (*halves, "both"))]:
        value = speed_over("peers", kernel, shape, ("compile", "liger"))
        yield Goal(f"{kernel}, {shape}: speed over torch.compile, Liger", 1 - NOISE, "1.0 x", value, "{:.2f} x")
    yield of_copy("adamw forward", f"numel {1 << 30}", 0.90)
    head = ("linear_cross_entropy both", vocabulary)
    yield Goal(
        f"{', '.join(head)}, D 4096", 650, "650 TFLOP/s (record 701)", of_kernel("tflops", *head), "{:.0f} TFLOP/s"
    )
    extra = of_kernel("extra_mib", *head)
    yield Goal("the same: memory beside inputs and gradients", 1024, "at most 1 GiB", extra, "{:.0f} MiB", least=False)
    for length in SEQUENCES:
        for half in halves:
            kernel, shape = f"attention {half}", f"sequence {length}"
            value, reached = speed_over("kernels", kernel, shape, ("cudnn",)), of_kernel("tflops", kernel, shape)
            detail = lambda results, reached=reached: f" ({reached(results) or 0:.0f} TFLOP/s)"  # noqa: E731
            what = f"{kernel}, {shape}: speed over cuDNN"
            yield Goal(what, 1 - NOISE, "1.0 x", value, "{:.2f} x", detail=detail)
        own = of_kernel("tflops", "attention forward", f"sequence {length}", "triton")
        yield Goal(f"attention forward in Triton, sequence {length}", 450, "450 TFLOP/s", own, "{:.0f} TFLOP/s")


def training_goals() -> Iterator[Goal]:
    shapes = {"llama3-8b-4096": 0.62, "llama3-8b-4096-mb4": 0.62, "gpt-1.3b-2048": 0.60, "gpt-1.3b-4096": 0.60}
    for shape, mfu in shapes.items():

        def value(results: Results, key: str, shape: str = shape) -> float | None:
            return results.get(f"train {shape}", {}).get(key)

        def speed(results: Results, value: Any = value) -> str:
            layers, all_layers, moments = (value(results, key) for key in ("layers", "of_layers", "moments"))
            rate = value(results, "tokens_per_s") or 0
            return f" ({rate:,.0f} tokens/s, {layers} of {all_layers} layers, moments {moments})"

        def off(results: Results, value: Any = value) -> float | None:
            memory, expected = value(results, "memory"), value(results, "estimate")
            return None if memory is None or not expected else abs(memory / expected - 1)

        def memory(results: Results, value: Any = value) -> str:
            sizes = [(value(results, key) or 0) / 2**30 for key in ("memory", "estimate")]
            return f" ({sizes[0]:.1f} GiB of {sizes[1]:.1f})"

        yield Goal(f"training {shape}: MFU", mfu, f"{mfu:.0%}", lambda r, v=value: v(r, "mfu"), detail=speed)
        yield Goal(
            f"training {shape}: peak memory off the estimate", 0.05, "at most 5%", off, least=False, detail=memory
        )
        over = lambda r, v=value: v(r, "overhead")  # noqa: E731
        yield Goal(f"training {shape}: step outside forward and backward", 0.03, "at most 3%", over, least=False)


def count(part: str, *keys: str) -> Callable[[Results], float | None]:
    def value(results: Results) -> float | None:
        result = results.get(part, {})
        ran = result.get("passed", 0) + result.get("failed", 0) + result.get("did_not_end", 0)
        return sum(result.get(key, 0) for key in keys) if ran else None

    return value


def differing(part: str) -> Callable[[Results], float | None]:
    def value(results: Results) -> float | None:
        cases = [case for case in results.get(part, {}).get("cases", []) if not case["status"].startswith("not run")]
        return sum(case["status"] != "ok" for case in cases) if cases else None

    return value


def goals() -> list[Goal]:
    return [
        *training_goals(),
        Goal("tests on the card that fail", 0, "0", count("tests", "failed", "did_not_end"), "{:.0f}", least=False),
        *kernel_goals(),
        Goal("results that differ from the CPU's", 0, "0", differing("smoke"), "{:.0f}", least=False),
        Goal("layouts that differ from one card", 0, "0", differing("layouts"), "{:.0f}", least=False),
        Goal("invalid accesses of memory", 0, "0", count("sanitizer", "invalid_accesses"), "{:.0f}", least=False),
    ]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def section(title: str, lines: list[str]) -> list[str]:
    """What a program has printed, as it is."""
    return ["", f"### {title}", "", "```", *lines, "```"]


def markdown(report: dict[str, Any]) -> str:
    facts, results, parts = report["facts"], report["results"], report["parts"]
    dry = ": a dry run on CPU at tiny sizes; no figure means anything" if report["dry_run"] else ""
    lines = [f"# GPU report{dry}"]
    lines += [line for text in facts.get("warnings", []) for line in ("", f"**Warning:** {text}")]
    shown = [[key, str(value)] for key, value in facts.items() if key not in ("plans", "warnings")]
    lines += ["", *table(["", ""], shown), "", "## Goals", ""]
    figures = [[figure[key] for key in ("what", "shown", "goal", "met")] for figure in report["figures"]]
    lines += [*table(["what", "measured", "goal", "reached"], figures), "", "## Parts", ""]
    lines += table(["part", "status", "seconds"], [[p["name"], p["status"], f"{p['seconds']:.0f}"] for p in parts])
    for part in parts:
        if part["status"] not in ("waiting", "running") and part["tail"]:
            lines += section(f"{part['name']}: {part['status']}", part["tail"])
    cases = [case for part in ("smoke", "layouts") for case in results.get(part, {}).get("cases", [])]
    for case in cases:
        if case["tail"]:
            lines += section(f"{case['name']}: {case['status']}", case["tail"])
    for failure in results.get("tests", {}).get("failures", [])[:20]:
        lines += section(failure["test"], failure["text"].splitlines()[-15:])
    return "\n".join(lines) + "\n"
