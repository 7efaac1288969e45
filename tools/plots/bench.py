"""Pictures of a benchmark: MFU by configuration, scaling, and what a step is made of."""

from collections.abc import Sequence
from typing import Any

from tools.plots.style import MARKERS, SERIES, WIDE, Picture, clean, figure, ink, legend, short

Figures = dict[str, Any]  # a row, of tools/bench/format_results.py: summarize
STEP = (  # share of a step, its colour, what it is called; in this order from the left
    (("forward",), "blue", "forward"),
    (("backward",), "sky", "backward"),
    (("optimizer",), "green", "optimizer"),
    (("tp", "cp", "dp", "pp"), "orange", "communication"),
    (("idle",), "vermilion", "idle"),
    (("data",), "purple", "data"),
    (("other",), "line", "other"),
)
MOST = 40  # rows that a picture has room for


def pictures(found: Sequence[Figures]) -> list[Picture]:
    """Those that there is something for."""
    made = [mfu(found), breakdown(found), scaling(found)]
    return [picture for picture in made if picture is not None]


def _names(rows: Sequence[Figures], width: float) -> list[str]:
    """The names of the bars. A narrow picture has a line for each flag that varies. Neighbouring bars of one label
    have it once."""
    names = [clean(one["label"], 70).replace(", ", ",\n" if width < WIDE else ", ") for one in rows]
    return [name if n == 0 or name != names[n - 1] else "" for n, name in enumerate(names)]


def _height(names: Sequence[str]) -> float:
    return 0.35 + len(names) * (0.3 + 0.14 * max(name.count("\n") for name in names))


def _bars(axis: Any, names: Sequence[str]) -> None:
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(False)
    axis.spines[["left", "bottom"]].set_visible(False)
    axis.set_xticks([])


def mfu(found: Sequence[Figures]) -> Picture | None:
    """A bar per row, with the least and the most of its runs; where no peak is known, tokens/s. A row without a figure
    says why."""
    rows = [one for one in found if one["status"] != "waiting"][:MOST]
    measured = [one for one in rows if "tokens_per_s" in one]
    if not measured:
        return None
    known = any(one["mfu"] is not None for one in measured)
    key, unit = ("mfu", 100) if known else ("tokens_per_s", 1)
    contenders = list(dict.fromkeys(one["contender"] for one in rows))

    def text_of(one: Figures) -> str:
        speed = f"{short(one['tokens_per_s'])} tokens/s"
        return speed if one["mfu"] is None else f"{100 * one['mfu']:.1f} %   {speed}"

    def draw(width: float) -> Any:
        names = _names(rows, width)
        fig, (axis,) = figure(width, [_height(names)])
        most = max((unit * (one[f"{key}_most"] or 0) for one in measured), default=1)
        for n, one in enumerate(rows):
            if one.get(key) is None:
                why = one["status"] if "tokens_per_s" not in one else text_of(one)
                axis.text(0.01 * most, n, f"✕ {why}", va="center", color=ink("vermilion"), fontsize=8)
                continue
            value, ends = unit * one[key], [unit * one[f"{key}{end}"] for end in ("_least", "_most")]
            colour = ink(SERIES[contenders.index(one["contender"]) % len(SERIES)])
            axis.barh(n, value, height=0.66, color=colour)
            axis.errorbar(value, n, xerr=[[value - ends[0]], [ends[1] - value]], color=ink("ink"), capsize=2.5, lw=1)
            note = text_of(one) + (f", then {one['status']}" if one["status"] != "ok" else "")
            axis.text(ends[1] + 0.015 * most, n, note, va="center", color=ink("ink"), fontsize=8)
        _bars(axis, names)
        axis.set_xlabel("MFU" if known else "tokens/s")
        axis.set_xlim(0, most * (1.5 if width == WIDE else 2.4))
        if len(contenders) > 1:
            for n, name in enumerate(contenders):
                axis.barh(0, 0, color=ink(SERIES[n % len(SERIES)]), label=name)
            legend(fig, axis, width)
        return fig

    what = "MFU" if known else "Tokens/s"
    left = f" The first {MOST} of {len(found)}." if len(found) > MOST else ""
    text = f"{what} by configuration: medians, with the least and the most of their runs.{left}"
    return Picture("mfu", text, draw)


def breakdown(found: Sequence[Figures]) -> Picture | None:
    """Draw the parts of a step, as means over ranks, in bars of 100 %."""
    rows = [one for one in found if "breakdown" in one][:MOST]
    if not rows:
        return None

    def draw(width: float) -> Any:
        names = _names(rows, width)
        fig, (axis,) = figure(width, [_height(names)])
        end = [0.0] * len(rows)
        for parts, colour, label in STEP:
            part = [100 * sum(one["breakdown"]["shares"].get(name, 0.0) for name in parts) for one in rows]
            bars = axis.barh(range(len(rows)), part, left=end, height=0.7, color=ink(colour), label=label)
            told = [f"{share:.0f}" if share >= (6 if width == WIDE else 14) else "" for share in part]
            colour_of_text = "white" if colour in ("blue", "green", "vermilion", "purple") else "black"
            axis.bar_label(bars, told, label_type="center", fontsize=8, color=colour_of_text)
            end = [a + b for a, b in zip(end, part, strict=True)]
        _bars(axis, names)
        axis.set_xlim(0, 100)
        legend(fig, axis, width)
        return fig

    return Picture("breakdown", "What a step is made of, per cent of its time, means over the ranks.", draw)


def scaling(found: Sequence[Figures]) -> Picture | None:
    """Tokens/s over ranks, a line for each row that is alike but for the ranks; dashed: as if nothing were lost."""
    lines: dict[str, list[Figures]] = {}
    several = len({one["contender"] for one in found}) > 1
    for one in found:
        if "efficiency" in one:
            words = one["label"].split(", ")[1:]  # after the ranks
            if several:
                words.insert(0, one["contender"])
            lines.setdefault(", ".join(words) or one["contender"], []).append(one)
    if not any(len(some) > 1 for some in lines.values()):
        return None

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [3.2])
        for n, (name, some) in enumerate(lines.items()):
            some = sorted(some, key=lambda one: one["ranks"])
            ranks, speeds = [one["ranks"] for one in some], [one["tokens_per_s"] for one in some]
            spread = [[one["tokens_per_s"] - one["tokens_per_s_least"] for one in some]]
            spread.append([one["tokens_per_s_most"] - one["tokens_per_s"] for one in some])
            how = dict(color=ink(SERIES[n % len(SERIES)]), marker=MARKERS[n % len(MARKERS)], linewidth=1.5, capsize=2.5)
            axis.errorbar(ranks, speeds, yerr=spread, label=clean(name, 50), **how)
            ideal = [speeds[0] * rank / ranks[0] for rank in ranks]
            axis.plot(ranks, ideal, "--", color=how["color"], linewidth=1, label="nothing lost" if n == 0 else None)
            for one in some[1:]:
                at = (one["ranks"], one["tokens_per_s"])
                how_far = dict(xytext=(-7, 5), textcoords="offset points", ha="right", fontsize=8)
                axis.annotate(f"{100 * one['efficiency']:.0f} %", at, **how_far)
        axis.set_xlabel("ranks")
        axis.set_ylabel("tokens/s")
        axis.set_xticks(sorted({one["ranks"] for some in lines.values() for one in some}))
        axis.yaxis.set_major_formatter(lambda value, _: short(value))
        axis.set_ylim(bottom=0)
        axis.margins(x=0.08, y=0.12)
        legend(fig, axis, width)
        return fig

    caption = "Tokens/s over ranks, with the least and the most; dashed: as if nothing were lost."
    return Picture("scaling", caption, draw)
