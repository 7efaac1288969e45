"""Curves of one run or several: losses, the figures of a step, and how far two runs are apart."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tools.plots.run_data import Point, Run, differences, thin
from tools.plots.style import MARKERS, SERIES, WIDE, Picture, equal_edge, figure, ink, legend, short

if TYPE_CHECKING:
    from tools.verification.compare_ranks import QuantityDiff


def _numbers(axis: Any, *which: str) -> None:
    for name in which:
        getattr(axis, f"{name}axis").set_major_formatter(lambda value, _: short(value))


DASHES = ("-", "--", ":", "-.")  # of more runs than there are colours
MARKED = 60  # points of a line that are drawn as points, too


def _log(axis: Any) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}" if value < 0.01 else short(value))
    axis.yaxis.set_minor_formatter(lambda value, _: "")


def _line(axis: Any, points: Sequence[Point], x: int, number: int, **how: Any) -> None:
    """`number`: of the run, or the set, which decides the colour."""
    how = {"linewidth": 1.5, "linestyle": DASHES[number // len(SERIES) % len(DASHES)], **how}
    if len(points) == 1:
        how = {"marker": "o", **how}
    colour = ink(SERIES[number % len(SERIES)])
    axis.plot([p[x] for p in points], [p[2] for p in points], color=colour, **how)


def _marks(axis: Any, run: Run, x: int, colour: str, name: str) -> None:
    """Resumes and doubted steps of a run on the lower edge."""
    doubts = [step for step, _ in run.doubts]
    for steps, marker, what in ((run.resumed, "^", "resumed"), (doubts, "X", "doubted")):
        if steps:
            at = [step if x == 0 else run.tokens_at(step) for step in steps]
            times = f", {len(steps)} times" if len(steps) > 1 else ""
            label = f"{name}{what}{times}"
            edge = axis.get_xaxis_transform()
            axis.plot(at, [0.03] * len(at), marker, color=ink(colour), transform=edge, markersize=6, label=label)


def _top(runs: Sequence[Run]) -> float | None:
    """Where the axis of losses ends, if the first steps of a long run or some spikes would press the rest down."""
    series = [run.curve("train/loss") for run in runs] + [points for run in runs for points in run.validation.values()]
    losses = [sorted(y for *_, y in points) for points in series if points]
    usual = max((some[int(0.99 * (len(some) - 1))] for some in losses), default=0.0)
    least, most = (which((which(some) for some in losses), default=0.0) for which in (min, max))
    return usual + 0.15 * (usual - least) if most > usual + 0.3 * (usual - least) else None


def _linear(runs: Sequence[Run]) -> float | None:
    """Tokens per step, if that is the same in all steps of all runs."""
    each = {round(tokens / step, 6) for run in runs for step, tokens, _ in run.curve("train/loss") if step > 0}
    return each.pop() if len(each) == 1 else None


def loss(runs: Sequence[Run]) -> Picture:
    """Over steps, with the tokens of each below; where batches differ, over steps and over tokens."""
    runs = [run for run in runs if run.curve("train/loss") or run.validation]
    each, top = _linear(runs), _top(runs)
    apart = [points for run in runs[1:] if (points := differences(runs[0], run))]
    thick = any(max(y for *_, y in points) < 0.02 for points in apart)  # curves hide each other

    def draw(width: float) -> Any:
        fig, axes = figure(width, [3.4] if each is not None else [3.4, 2.8])
        for x, axis in enumerate(axes):
            for i in range(len(runs)):
                _losses(axis, runs, i, x, 3.2 if thick and i == 0 else 1.4)
            axis.set_ylabel("loss, nats per token")
            axis.set_xlabel(("steps", "tokens")[x])
            axis.set_ylim(top=top)
            _numbers(axis, "x")
            axis.margins(x=0.02)
        if each is not None:
            axes[0].xaxis.set_major_formatter(lambda step, _: f"{short(step)}\n{short(step * each)}" if step else "0")
            axes[0].set_xlabel("steps, and tokens below")
        legend(fig, axes[0], width)
        return fig

    caption = ["Training loss, mean since the line before, and validation losses as dots."]
    if top is not None:
        caption.append("Above the edge lies less than a hundredth of the points.")
    if any(len(run.weighed) < len(run.curve("train/loss")) for run in runs):
        caption.append("The first line after a resume, a mean of one step, is drawn with the next as their mean.")
    if any(run.resumed for run in runs):
        caption.append("Triangle: another process took over.")
    if any(run.doubts for run in runs):
        caption.append("Cross: a step whose loss or gradient was doubted.")
    return Picture("loss", " ".join(caption), draw)


def _losses(axis: Any, runs: Sequence[Run], number: int, x: int, thick: float) -> None:
    """Draw a run's losses, with one colour per run, or per set where there is one run."""
    run, alone = runs[number], len(runs) == 1
    name = "" if alone else f"{run.label}: "
    if points := run.drawn("train/loss"):
        _line(axis, points, x, number, label=f"{name}training {run.last('train/loss'):.3f}", linewidth=thick)
    for i, (which, points) in enumerate(run.validation.items()):
        how: dict[str, Any] = {"linewidth": 0.9}
        if len(points) <= MARKED:
            how |= {"marker": MARKERS[i % len(MARKERS)], "markersize": 4.5, "markeredgecolor": ink("paper")}
        newest = run.curve("train/loss") or points
        at = f" at step {points[-1][0]:,.0f}" if points[-1][0] < newest[-1][0] else ""
        label = f"{name}{'validation' if which == 'valid' else which} {points[-1][2]:.3f}{at}"
        _line(axis, thin(points), x, i + 1 if alone else number, label=label, zorder=3, **how)
    _marks(axis, run, x, "ink" if alone else SERIES[number % len(SERIES)], name)


STRIP = (("train/lr", "learning rate"), ("train/grad_norm", "gradient norm"), ("perf/tokens_per_s_per_gpu", "tokens/s"))


def strip(runs: Sequence[Run]) -> Picture:
    """Learning rate, gradient norm and speed over steps."""

    def draw(width: float) -> Any:
        fig, axes = figure(width, [1.35] * 3, share_x=True)
        for axis, (key, name) in zip(axes, STRIP, strict=True):
            lowest, highest = math.inf, 0.0
            for number, run in enumerate(runs):
                scale = run.devices if key.startswith("perf") else 1
                points = [(step, tokens, scale * y) for step, tokens, y in run.drawn(key)]
                label = run.label if axis is axes[0] and len(runs) > 1 else None
                _line(axis, points, 0, number, linewidth=1.2, label=label)
                lowest = min([lowest, *(y for *_, y in points if y > 0)])
                highest = max([highest, *(y for *_, y in points)])
            if key == "train/grad_norm" and highest > 50 * lowest:
                _log(axis)
                _numbers(axis, "x")
            else:
                axis.set_ylim(bottom=0)
                _numbers(axis, "x", "y")
            axis.set_title(name, loc="left", color=ink("muted"))
            axis.margins(x=0.02)
        if len(runs) > 1:
            legend(fig, axes[0], width)
        axes[-1].set_xlabel("steps")
        return fig

    return Picture("steps", "Learning rate, gradient norm before clipping, and tokens per second of all devices.", draw)


def experts(runs: Sequence[Run]) -> Picture | None:
    """The load of every expert of the first run over steps; None: it has none."""
    steps, loads = zip(*runs[0].loads, strict=True) if runs[0].loads else ((), ())
    if not steps:
        return None

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [2.4])
        by_expert = [thin([(s, s, y) for s, y in zip(steps, some, strict=True)]) for some in zip(*loads, strict=True)]
        order = sorted(range(len(by_expert)), key=lambda expert: by_expert[expert][-1][2])
        for expert in order:
            xs, _, ys = zip(*by_expert[expert], strict=True)
            axis.plot(xs, ys, color=ink("line"), linewidth=1.0)
        for number, (what, expert) in enumerate((("least", order[0]), ("most", order[-1]))):
            _line(axis, by_expert[expert], 0, number, label=f"expert {expert}, with the {what} in the end")
        axis.set_ylim(bottom=0)
        axis.set_xlabel("steps")
        axis.set_ylabel("choices, over their mean")
        _numbers(axis, "x")
        axis.margins(x=0.02)
        legend(fig, axis, width)
        return fig

    told = "Choices of each expert in all layers, in the step of each log line, over their mean"
    return Picture("experts", f"{told}: 1 is even.", draw)


def agreement(runs: Sequence[Run]) -> Picture:
    """Distance of every run's training loss from the first run's."""
    first, *others = runs
    apart = [(other.label, points) for other in others if (points := differences(first, other))]
    drawn = [(name, thin(points)) for name, points in apart]
    equal = any(y == 0 for _, points in apart for *_, y in points)
    least = min((max(y, 1e-30) for _, points in apart for *_, y in points if y > 0), default=1e-8)

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [2.6])
        floor = 10.0 ** math.floor(math.log10(least) - 0.3)
        for number, (name, points) in enumerate(drawn):
            shown = [(step, tokens, max(y, floor)) for step, tokens, y in points]
            wide = 0.7 * (len(drawn) - 1 - number)  # what is drawn first shows below what it is equal to
            how: dict[str, Any] = dict(linewidth=1.1 + wide, marker="o", markersize=3 + wide, clip_on=False)
            _line(axis, shown, 0, number + 1, label=name, **how)
        _log(axis)
        axis.set_ylim(bottom=floor)
        if equal:
            equal_edge(axis, floor)
        axis.set_xlabel("steps")
        axis.set_ylabel(f"apart from {first.label},\nnats per token")
        _numbers(axis, "x")
        legend(fig, axis, width)
        return fig

    told = " Points on the lower edge are equal." if equal else ""
    return Picture("agreement", f"Distance of each run's training loss from that of {first.name}.{told}", draw)


def in_words(points: Sequence[Point]) -> str:
    step, _, most = max(points, key=lambda p: p[2])
    over = f"over {len(points):,} common log line{'s' if len(points) > 1 else ''}"
    return f"equal to the last bit {over}" if most == 0 else f"at most {most:.2e}, at step {step:,.0f}, {over}"


# ---- how far a layout is from one process, step by step, beside what rounding allows (tools/verify.py)

KINDS = {"forward": "hidden states", "loss": "loss", "gradient": "gradients", "norm": "gradient norm"}
KINDS |= {"weight": "weights"}
EQUAL = 1e-17  # where points that are equal to the last bit are drawn


def verified(rows: "Sequence[QuantityDiff]", layout: str, dtype: str) -> Picture:
    """Draw the largest difference of each kind and step: filled where it counts, empty within the tolerance."""
    steps = sorted({row.step for row in rows})

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [3.0])
        floors = [row.distance for row in rows if row.distance > 0 and math.isfinite(row.distance)]
        floor = 10.0 ** math.floor(math.log10(min([*floors, EQUAL * 10])) - 0.3)
        for number, (kind, name) in enumerate(KINDS.items()):
            of_kind = [[row for row in rows if (row.kind, row.step) == (kind, step)] for step in steps]
            worst = [max(some, key=lambda row: (row.differs, row.distance)) for some in of_kind if some]
            points = [(row.step, min(max(row.distance, floor), 1e3), row.differs) for row in worst]
            if not points:
                continue
            colour, marker = ink(SERIES[number]), MARKERS[number]
            along = [x + 0.05 * (number - 2) for x, *_ in points]
            how: dict[str, Any] = dict(color=colour, marker=marker, markersize=5, markerfacecolor=ink("paper"))
            axis.plot(along, [y for _, y, _ in points], linewidth=1.0, label=name, clip_on=False, **how)
            bad = [(x, y) for x, (_, y, differs) in zip(along, points, strict=True) if differs]
            axis.plot([x for x, _ in bad], [y for _, y in bad], marker, color=colour, markersize=7)
        allowed = {row.step: row.tolerance for row in rows if row.kind == "gradient" or row.step == 0}
        edges = [(step + side, allowed[step]) for step in sorted(allowed) for side in (-0.3, 0.3)]
        how = dict(color=ink("ink"), linewidth=1.4, linestyle="--")
        axis.plot([x for x, _ in edges], [y for _, y in edges], label="allowed for gradients", **how)
        _log(axis)
        axis.set_ylim(bottom=floor)
        if equal:
            equal_edge(axis, floor)
        names = ["start" if not step else "eval" if step % 1 else f"{step:g}" for step in steps]
        axis.set_xticks(steps, names)
        steps_named, kinds_named = "", ""
        if width >= WIDE:
            steps_named = " (start: before the first; eval: the evaluation after a step)"
            kinds_named = ", by what is compared"
        axis.set_xlabel(f"training step{steps_named}")
        axis.set_ylabel("relative difference")
        axis.set_title(f"Largest difference from one process{kinds_named}", loc="left", color=ink("ink"))
        legend(fig, axis, width)
        return fig

    any_equal = any(row.distance == 0 for row in rows if row.kind in KINDS)
    equal = " On the lower edge: equal to the last bit." if any_equal else ""
    text = f"{layout} against one process in {dtype}, of each kind what is furthest apart; filled: it differs.{equal}"
    return Picture("verify", text, draw)
