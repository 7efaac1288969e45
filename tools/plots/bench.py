"""Pictures of a benchmark: MFU by configuration, scaling, and the parts of a step."""

from collections.abc import Sequence
from typing import Any

from tools.plots.style import MARKERS, SERIES, WIDE, Picture, color, figure, format_number, legend, sanitize, text_color

Summary = dict[str, Any]  # the summary of a configuration, by tools/bench/format_results.py
STEP_PARTS = (  # names in a breakdown, color, label; from left to right
    (("forward",), "blue", "forward"),
    (("backward",), "sky", "backward"),
    (("optimizer",), "green", "optimizer"),
    (("tp", "cp", "dp", "pp"), "orange", "communication"),
    (("idle",), "vermilion", "idle"),
    (("data",), "purple", "data"),
    (("other",), "line", "other"),
)
MAX_ROWS = 40


def pictures(results: Sequence[Summary]) -> list[Picture]:
    """Return the pictures for which there are results."""
    candidates = [mfu(results), breakdown(results), scaling(results)]
    return [picture for picture in candidates if picture is not None]


def _names(rows: Sequence[Summary], width: float) -> list[str]:
    """Return the names of the bars; neighbors with the same name show it once.

    In a narrow picture, each flag has its own line.
    """
    separator = ",\n" if width < WIDE else ", "
    names = [sanitize(row["label"], 70).replace(", ", separator) for row in rows]
    return [name if i == 0 or name != names[i - 1] else "" for i, name in enumerate(names)]


def _height(names: Sequence[str]) -> float:
    max_line_breaks = max(name.count("\n") for name in names)
    return 0.35 + len(names) * (0.3 + 0.14 * max_line_breaks)


def _prepare_bars(axis: Any, names: Sequence[str]) -> None:
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(False)
    axis.spines[["left", "bottom"]].set_visible(False)
    axis.set_xticks([])


def mfu(results: Sequence[Summary]) -> Picture | None:
    """Return the MFU of each configuration, with the range of its runs; tokens/s if no peak is known.

    A configuration without a result has the reason instead.
    """
    rows = [row for row in results if row["status"] != "waiting"][:MAX_ROWS]
    measured = [row for row in rows if "tokens_per_s" in row]
    if not measured:
        return None
    has_mfu = any(row["mfu"] is not None for row in measured)
    key, scale = ("mfu", 100) if has_mfu else ("tokens_per_s", 1)
    systems = list(dict.fromkeys(row["contender"] for row in rows))

    def speed_text(row: Summary) -> str:
        speed = f"{format_number(row['tokens_per_s'])} tokens/s"
        return speed if row["mfu"] is None else f"{100 * row['mfu']:.1f} %   {speed}"

    def draw(width: float) -> Any:
        names = _names(rows, width)
        fig, (axis,) = figure(width, [_height(names)])
        max_value = max((scale * (row[f"{key}_most"] or 0) for row in measured), default=1)
        for i, row in enumerate(rows):
            if row.get(key) is None:
                reason = speed_text(row) if "tokens_per_s" in row else row["status"]
                axis.text(0.01 * max_value, i, f"✕ {reason}", va="center", color=color("vermilion"), fontsize=8)
                continue
            value, lowest, highest = (scale * row[name] for name in (key, f"{key}_least", f"{key}_most"))
            axis.barh(i, value, height=0.66, color=color(SERIES[systems.index(row["contender"]) % len(SERIES)]))
            axis.errorbar(value, i, xerr=[[value - lowest], [highest - value]], color=color("ink"), capsize=2.5, lw=1)
            note = speed_text(row)
            if row["status"] != "ok":
                note += f", then {row['status']}"
            axis.text(highest + 0.015 * max_value, i, note, va="center", color=color("ink"), fontsize=8)
        _prepare_bars(axis, names)
        axis.set_xlabel("MFU" if has_mfu else "tokens/s")
        axis.set_xlim(0, max_value * (1.5 if width == WIDE else 2.4))
        if len(systems) > 1:
            for i, name in enumerate(systems):
                axis.barh(0, 0, color=color(SERIES[i % len(SERIES)]), label=name)
            legend(fig, axis, width)
        return fig

    caption = f"{'MFU' if has_mfu else 'Tokens/s'} by configuration: median, minimum and maximum of its runs."
    if len(results) > MAX_ROWS:
        caption += f" The first {MAX_ROWS} of {len(results)}."
    return Picture("mfu", caption, draw)


def breakdown(results: Sequence[Summary]) -> Picture | None:
    """Return the parts of a step as stacked bars of 100 %, means over ranks."""
    rows = [row for row in results if "breakdown" in row][:MAX_ROWS]
    if not rows:
        return None

    def draw(width: float) -> Any:
        names = _names(rows, width)
        fig, (axis,) = figure(width, [_height(names)])
        min_labeled_percent = 6 if width == WIDE else 14
        ends = [0.0] * len(rows)
        for parts, color_name, label in STEP_PARTS:
            percents = [100 * sum(row["breakdown"]["shares"].get(part, 0.0) for part in parts) for row in rows]
            bars = axis.barh(range(len(rows)), percents, left=ends, height=0.7, color=color(color_name), label=label)
            labels = [f"{percent:.0f}" if percent >= min_labeled_percent else "" for percent in percents]
            axis.bar_label(bars, labels, label_type="center", fontsize=8, color=text_color(color_name))
            ends = [end + percent for end, percent in zip(ends, percents, strict=True)]
        _prepare_bars(axis, names)
        axis.set_xlim(0, 100)
        legend(fig, axis, width)
        return fig

    return Picture("breakdown", "Parts of a step in percent of its time, means over ranks.", draw)


def scaling(results: Sequence[Summary]) -> Picture | None:
    """Return tokens/s over ranks, one line per configuration; dashed lines: perfect scaling."""
    has_systems = len({row["contender"] for row in results}) > 1
    lines: dict[str, list[Summary]] = {}
    for row in results:
        if "efficiency" in row:
            name_parts = row["label"].split(", ")[1:]  # without the number of ranks
            if has_systems:
                name_parts.insert(0, row["contender"])
            lines.setdefault(", ".join(name_parts) or row["contender"], []).append(row)
    if not any(len(rows) > 1 for rows in lines.values()):
        return None

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [3.2])
        for i, (name, rows) in enumerate(lines.items()):
            rows = sorted(rows, key=lambda row: row["ranks"])
            line_color = color(SERIES[i % len(SERIES)])
            ranks, speeds = [row["ranks"] for row in rows], [row["tokens_per_s"] for row in rows]
            below = [row["tokens_per_s"] - row["tokens_per_s_least"] for row in rows]
            above = [row["tokens_per_s_most"] - row["tokens_per_s"] for row in rows]
            axis.errorbar(
                ranks,
                speeds,
                yerr=[below, above],
                label=sanitize(name, 50),
                color=line_color,
                marker=MARKERS[i % len(MARKERS)],
                linewidth=1.5,
                capsize=2.5,
            )
            ideal = [speeds[0] * n / ranks[0] for n in ranks]
            label = "perfect scaling" if i == 0 else None
            axis.plot(ranks, ideal, "--", color=line_color, linewidth=1, label=label)
            for row in rows[1:]:
                axis.annotate(
                    f"{100 * row['efficiency']:.0f} %",
                    (row["ranks"], row["tokens_per_s"]),
                    xytext=(-7, 5),
                    textcoords="offset points",
                    ha="right",
                    fontsize=8,
                )
        axis.set_xlabel("ranks")
        axis.set_ylabel("tokens/s")
        axis.set_xticks(sorted({row["ranks"] for rows in lines.values() for row in rows}))
        axis.yaxis.set_major_formatter(lambda value, _: format_number(value))
        axis.set_ylim(bottom=0)
        axis.margins(x=0.08, y=0.12)
        legend(fig, axis, width)
        return fig

    caption = "Tokens/s over ranks: median, minimum and maximum; dashed: perfect scaling."
    return Picture("scaling", caption, draw)
