"""Goals for one H100 or H200, what was measured of each, and the page of tools/gpu_report.py."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

GOAL_SIZES = (4096, 8192)
SEQUENCES = (4096, 32768)
VOCABULARY = 128256
MFU = {"llama3-8b-4096": 0.62, "llama3-8b-4096-mb4": 0.62, "gpt-1.3b-2048": 0.60, "gpt-1.3b-4096": 0.60}
NOISE = 0.02  # of a ratio of two medians of one run
Results = dict[str, dict[str, Any]]  # by part


@dataclass(frozen=True)
class Goal:
    """`value`: None where it was not measured. `least`: at least `bound`, else at most. `detail`: beside the value."""

    what: str
    value: float | None
    bound: float
    text: str
    show: str = "{:.1%}"
    least: bool = True
    detail: str = ""

    def figure(self, judge: bool) -> dict[str, Any]:
        if self.value is None:
            met = "not measured"
        elif not judge:
            met = "not judged"
        else:
            met = "yes" if (self.value >= self.bound if self.least else self.value <= self.bound) else "NO"
        shown = "" if self.value is None else (self.show.format(self.value) + self.detail).strip()
        return {"what": self.what, "value": self.value, "shown": shown, "goal": self.text, "met": met}


def kernel_goals(results: Results) -> Iterator[Goal]:
    def row(kernel: str, shape: str, peer: str = "megalite", part: str = "kernels") -> dict[str, Any]:
        rows = results.get(part, {}).get("rows", [])
        return next((r for r in rows if (r["kernel"], r["shape"], r["peer"]) == (kernel, shape, peer)), {})

    def of_copy(kernel: str, shape: str, bound: float, record: str = "") -> Goal:
        measured, text = row(kernel, shape), f"{bound:.0%} of the copy rate{record}"
        rate = f" ({measured['gb_s']:,.0f} GB/s)" if measured else ""
        return Goal(f"{kernel}, {shape}", measured.get("of_copy"), bound, text, detail=rate)

    def speed_over(whom: str, peers: tuple[str, ...], kernel: str, shape: str, part: str, detail: str = "") -> Goal:
        """How much faster than the fastest of `peers`."""
        ours, others = row(kernel, shape, part=part), [row(kernel, shape, peer, part) for peer in peers]
        times = [other["us"] for other in others if other]
        speed = min(times) / ours["us"] if ours and times else None
        return Goal(f"{kernel}, {shape}: speed over {whom}", speed, 1 - NOISE, "1.0 x", "{:.2f} x", detail=detail)

    halves, vocabulary = ("forward", "backward"), f"vocab_size {VOCABULARY}"
    ops = ("layer_norm", "rope", "swiglu", "bias_gelu", "dropout_add")
    for size in GOAL_SIZES:
        yield of_copy("rms_norm forward", f"hidden_size {size}", 0.90, " (record 4,176 GB/s)")
        yield of_copy("rms_norm backward", f"hidden_size {size}", 0.85, " (record 3,801 GB/s)")
    for op, size, half in itertools.product(ops, GOAL_SIZES, halves):
        yield of_copy(f"{op} {half}", f"hidden_size {size}", 0.80)
    yield from (of_copy(f"cross_entropy {half}", vocabulary, 0.80) for half in halves)
    same = [(f"{op} {half}", "hidden_size 4096") for op, half in itertools.product(ops, halves)]
    same += [(f"cross_entropy {half}", vocabulary) for half in (*halves, "both")]
    for kernel, shape in same:
        yield speed_over("torch.compile, Liger", ("compile", "liger"), kernel, shape, "peers")
    yield of_copy("adamw forward", f"numel {1 << 30}", 0.90)
    head, name = row("linear_cross_entropy both", vocabulary), f"linear_cross_entropy both, {vocabulary}, D 4096"
    yield Goal(name, head.get("tflops"), 650, "650 TFLOP/s (record 701)", "{:.0f} TFLOP/s")
    extra = head.get("extra_mib")
    yield Goal("the same: memory beside inputs and gradients", extra, 1024, "at most 1 GiB", "{:.0f} MiB", least=False)
    for shape in (f"sequence {length}" for length in SEQUENCES):
        for kernel in ("attention forward", "attention backward"):
            reached = f" ({row(kernel, shape).get('tflops') or 0:.0f} TFLOP/s)"
            yield speed_over("cuDNN", ("cudnn",), kernel, shape, "kernels", reached)
        own = row("attention forward", shape, "triton").get("tflops")
        yield Goal(f"attention forward in Triton, {shape}", own, 450, "450 TFLOP/s", "{:.0f} TFLOP/s")


def training_goals(results: Results) -> Iterator[Goal]:
    for shape, mfu in MFU.items():
        run, name = results.get(f"train {shape}", {}), f"training {shape}"
        layers = f"{run.get('layers')} of {run.get('of_layers')} layers, moments {run.get('moments')}"
        speed = f" ({run.get('tokens_per_s') or 0:,.0f} tokens/s, {layers})"
        yield Goal(f"{name}: MFU", run.get("mfu"), mfu, f"{mfu:.0%}", detail=speed)
        memory, expected = run.get("memory"), run.get("estimate")
        off = None if memory is None or not expected else abs(memory / expected - 1)
        sizes = f" ({(memory or 0) / 2**30:.1f} GiB of {(expected or 0) / 2**30:.1f})"
        yield Goal(f"{name}: peak memory off the estimate", off, 0.05, "at most 5%", least=False, detail=sizes)
        outside = f"{name}: step outside forward and backward"
        yield Goal(outside, run.get("overhead"), 0.03, "at most 3%", least=False)


def goals(results: Results) -> list[Goal]:
    def none(what: str, value: float | None) -> Goal:
        return Goal(what, value, 0, "0", "{:.0f}", least=False)

    def count(part: str, *keys: str) -> float | None:
        result = results.get(part, {})
        ran = any(result.get(key, 0) for key in ("passed", "failed", "did_not_end"))
        return sum(result.get(key, 0) for key in keys) if ran else None

    def differing(part: str) -> float | None:
        cases = [case for case in results.get(part, {}).get("cases", []) if not case["status"].startswith("not run")]
        return sum(case["status"] != "ok" for case in cases) if cases else None

    return [
        *training_goals(results),
        none("tests on the card that fail", count("tests", "failed", "did_not_end")),
        *kernel_goals(results),
        none("results that differ from the CPU's", differing("smoke")),
        none("layouts that differ from one card", differing("layouts")),
        none("invalid accesses of memory", count("sanitizer", "invalid_accesses")),
    ]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def section(title: str, lines: list[str]) -> list[str]:
    """A program's output, unchanged, under a title."""
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
