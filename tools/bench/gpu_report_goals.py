"""Goals for one H100 or H200, what was measured of each, and the page of tools/gpu_report.py."""

import itertools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = tomllib.loads((Path(__file__).parent / "gpu_report.toml").read_text("utf-8"))
NOISE = 0.02  # of a ratio of two medians of one run
# of a kernel's figure: the goal in words, how it is shown, and whether more is better
FIGURES = {
    "of_copy": ("{:.0%} of the copy rate", "{:.1%}", True),
    "tflops": ("{:.0f} TFLOP/s", "{:.0f} TFLOP/s", True),
    "extra_mib": ("at most {:.0f} MiB beside inputs and gradients", "{:.0f} MiB", False),
}
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
    rows = {(part, row["kernel"], row["shape"], row["peer"]): row for part in ("kernels", "peers")
            for row in results.get(part, {}).get("rows", [])}  # fmt: skip
    for goal in TABLE["kernels"]:
        part, peer = goal.get("part", "kernels"), goal.get("peer", "megalite")
        halves = goal.get("halves", ("forward", "backward"))
        for op, size, half in itertools.product(goal["ops"], goal["sizes"], halves):
            kernel = f"{op} {half}"
            name = f"{kernel}, {size}"
            if peer != "megalite":
                name += f", {peer}"
            row = rows.get((part, kernel, size, peer), {})
            if "over" in goal:
                times = [rows[part, kernel, size, other]["us"] for other in goal["over"]
                         if (part, kernel, size, other) in rows]  # fmt: skip
                speed = min(times) / row["us"] if row and times else None
                detail = f" ({row['tflops']:.0f} TFLOP/s)" if row.get("tflops") else ""
                yield Goal(f"{name}: speed over {goal['whom']}", speed, 1 - NOISE, "1.0 x", "{:.2f} x", detail=detail)
                continue
            (text, show, more), bound = FIGURES[goal["figure"]], goal["least"]
            text = text.format(bound) + (f" ({goal['note']})" if "note" in goal else "")
            detail = f" ({row['gb_s']:,.0f} GB/s)" if row and goal["figure"] == "of_copy" else ""
            yield Goal(name, row.get(goal["figure"]), bound, text, show, more, detail)


def training_goals(results: Results) -> Iterator[Goal]:
    for shape, mfu in TABLE["mfu"].items():
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
    ]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def side(told: dict[str, Any]) -> str:
    """Of a lever."""
    speed = f"{told['tokens_per_s']:,.0f} tokens/s" + (f", MFU {told['mfu']:.1%}" if told["mfu"] else "")
    sizes = f"micro-batches {told['micro_batches']} x {told['micro_batch']}, {told['memory'] / 2**30:.1f} GiB"
    return f"{speed}, attention {told['attention']}, {sizes}"


def lever_rows(results: Results) -> Iterator[list[str]]:
    """What a lever is worth, as docs/performance.md has it; why where it was not measured."""
    for result in (results[part] for part in ("levers", "levers-mb4", "levers-moe") if part in results):
        where = "{layers} of {of_layers} layers, sequence {seq_length}, moments {moments}".format_map(result["plan"])
        for row in result["rows"]:
            if "ratio" not in row:
                yield [row["name"], row["status"], "", "", "", ""]
                continue
            spread = f"{min(row['ratios']):.3f} to {max(row['ratios']):.3f}"
            notes = [where, f"{len(row['ratios'])} pairs"]
            notes += [f"{name} {value}" for name, value in row["load"].items()]
            if row["status"] != "ok":
                notes.append(row["status"])
            yield [row["name"], *map(side, row["sides"]), f"{row['ratio']:.3f}", spread, ", ".join(notes)]
    swept = results.get("tiles", {})
    for best in swept.get("best", []):
        tried = [row for row in swept["rows"] if (row["kernel"], row["shape"]) == (best["kernel"], best["shape"])]
        rows = [next((row for row in tried if row["tile"] == best[name]), None) for name in ("table", "tile")]
        cells = ["did not run" if row is None else f"{row['us']:.1f} us, {row['of_copy']:.1%} of the copy rate, "
                 + ", ".join(f"{value} {name}" for name, value in row["tile"].items()) for row in rows]  # fmt: skip
        spread = ", ".join(f"quartiles {row['spread']:.1%}" for row in rows if row)
        gain = "" if best["gain"] is None else f"{1 + best['gain']:.3f}"
        told = f"{tried[0]['tokens']} tokens, {tried[0]['dtype']}, {swept['repeats']} calls, {len(tried)} tiles"
        yield [f"tile of {best['kernel']}, {best['shape']}", *cells, gain, spread, told]


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
    lines += [*table(["what", "measured", "goal", "reached"], figures), ""]
    if levers := list(lever_rows(results)):
        heads = ["lever", "off", "on", "speed on over off", "least and most", "measured with"]
        lines += ["## Levers", "", *table(heads, levers), ""]
    lines += ["## Parts", ""]
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
