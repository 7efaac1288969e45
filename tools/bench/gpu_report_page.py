"""The Markdown page of tools/gpu_report.py."""

from collections.abc import Iterator
from typing import Any

MAX_FAILURES_SHOWN, MAX_FAILURE_LINES = 20, 15
MAX_CURVE_ROWS = 12  # of the table of a loss curve
BLOCKS = "▁▂▃▄▅▆▇█"  # of a loss curve as text
Results = dict[str, dict[str, Any]]  # by part


def markdown(report: dict[str, Any]) -> str:
    """Return report.md for the content of report.json."""
    facts, results, parts = report["facts"], report["results"], report["parts"]
    dry_run = ": a dry run on CPU at tiny sizes; no figure means anything" if report["dry_run"] else ""
    lines = [f"# GPU report{dry_run}"]
    for text in facts.get("warnings", []):
        lines += ["", f"**Warning:** {text}"]
    fact_rows = [[key, str(value)] for key, value in facts.items() if key not in ("plans", "warnings")]
    measured_goals = [goal for goal in report["figures"] if goal["value"] is not None]
    num_unmeasured = len(report["figures"]) - len(measured_goals)
    goal_rows = [[goal[key] for key in ("what", "shown", "goal", "met")] for goal in measured_goals]
    lines += ["", *table(["", ""], fact_rows)]
    lines += ["", "## Goals", "", *table(["what", "measured", "goal", "reached"], goal_rows)]
    lines += ["", f"{num_unmeasured} further goals were not measured."]
    if levers := list(lever_rows(results)):
        header = ["lever", "value", "tokens/s", "speed", "MFU", "GiB", "first loss"]
        lines += ["", "## Levers", "", *table(header, levers)]
    if gpt2 := results.get("gpt2"):
        lines += ["", "## GPT-2 124M on Python's standard library", *gpt2_lines(gpt2)]
    if tiles := list(tile_rows(results.get("tiles", {}))):
        header = ["kernel", "tile of the table", "fastest tile", "speed", "spread", "measured with"]
        lines += ["", "## Tiles", "", *table(header, tiles)]
    part_rows = [[part["name"], part["status"], f"{part['seconds']:.0f}"] for part in parts]
    lines += ["", "## Parts", "", *table(["part", "status", "seconds"], part_rows)]
    for part in parts:
        if part["status"] not in ("waiting", "running") and part["tail"]:
            lines += section(f"{part['name']}: {part['status']}", part["tail"])
    for failure in results.get("tests", {}).get("failures", [])[:MAX_FAILURES_SHOWN]:
        lines += section(failure["test"], failure["text"].splitlines()[-MAX_FAILURE_LINES:])
    return "\n".join(lines) + "\n"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Format a Markdown table as lines."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def section(title: str, lines: list[str]) -> list[str]:
    """Format a program's unchanged output under a title."""
    return ["", f"### {title}", "", "```", *lines, "```"]


def lever_rows(results: Results) -> Iterator[list[str]]:
    """Yield a row for each combination of values of a lever, with its speed over that of the first one.

    The relative speed is empty if the first one was not measured.
    """
    for part, result in results.items():
        if part != "layouts" and not part.startswith("lever "):
            continue
        first = result["rows"][0].get("tokens_per_s") if result["rows"] else None
        for row in result["rows"]:
            values = ", ".join(f"{name} {value}" for name, value in row["values"].items())
            cells = [part.removeprefix("lever "), values]
            if "tokens_per_s" in row:
                cells.append(f"{row['tokens_per_s']:,.0f}")
                cells.append("" if first is None else f"{row['tokens_per_s'] / first:.3f}")
                cells.append(_percent(row["mfu"]))
                cells += [f"{row['memory'] / 2**30:.1f}", f"{row['first_loss']:.4f}"]
            else:
                cells += [f"{row['status']}: {row['reason']}", "", "", "", ""]
            yield cells


def gpt2_lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the GPT-2 run: its speed, its loss curves and the continued prompts."""
    curve, validation = result["curves"]["train/loss"], dict(result["curves"]["val/valid/loss"])
    speed = "unknown" if result["tokens_per_s"] is None else f"{result['tokens_per_s']:,.0f} tokens/s"
    yield ""
    yield f"{curve[-1][0]} steps; median speed {speed}, MFU {_percent(result['mfu'])}."
    losses = [loss for _, loss in thin_out(curve, 60)]
    low, high = min(losses), max(losses)
    heights = [round((loss - low) / ((high - low) or 1) * (len(BLOCKS) - 1)) for loss in losses]
    yield from ["", f"`{''.join(BLOCKS[height] for height in heights)}` {losses[0]:.3f} to {losses[-1]:.3f}", ""]
    rows = [[str(step), f"{loss:.4f}", ""] for step, loss in thin_out(curve, MAX_CURVE_ROWS)]
    rows += [[str(step), "", f"{loss:.4f}"] for step, loss in validation.items()]
    yield from table(["step", "training loss", "validation loss"], sorted(rows, key=lambda row: int(row[0])))
    for sample in result["samples"]:
        yield from section("a continued prompt", f"{sample['prompt']}{sample['text']}".splitlines())


def thin_out(points: list[Any], max_points: int) -> list[Any]:
    """Return at most `max_points` points at about equal distances, the first and the last included.

    >>> thin_out([0, 1, 2, 3, 4, 5, 6], 3)
    [0, 3, 6]
    """
    if len(points) <= max_points:
        return points
    return [points[round(n * (len(points) - 1) / (max_points - 1))] for n in range(max_points)]


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def tile_rows(sweep: dict[str, Any]) -> Iterator[list[str]]:
    """Yield a row for each kernel and size of a sweep of tiles (kernels.py --sweep)."""
    for best in sweep.get("best", []):
        rows = [row for row in sweep["rows"] if (row["kernel"], row["shape"]) == (best["kernel"], best["shape"])]
        table_row = next((row for row in rows if row["tile"] == best["table"]), None)
        best_row = next((row for row in rows if row["tile"] == best["tile"]), None)
        spreads = [f"quartiles {row['spread']:.1%}" for row in (table_row, best_row) if row]
        gain = "" if best["gain"] is None else f"{1 + best['gain']:.3f}"
        notes = f"{rows[0]['tokens']} tokens, {rows[0]['dtype']}, {sweep['repeats']} calls, {len(rows)} tiles"
        name = f"{best['kernel']}, {best['shape']}"
        yield [name, _format_tile(table_row), _format_tile(best_row), gain, ", ".join(spreads), notes]


def _format_tile(row: dict[str, Any] | None) -> str:
    if row is None:
        return "did not run"
    values = ", ".join(f"{value} {name}" for name, value in row["tile"].items())
    return f"{row['us']:.1f} us, {row['of_copy']:.1%} of the copy rate, {values}"
