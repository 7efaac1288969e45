"""The pipeline over time: a planned schedule, as a picture or as text, and the measured timeline of a run."""

import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from megalite.pipeline.schedule import COMPUTE_OPS, Action, Op, SplitBackward, build_schedule, peak_in_flight
from megalite.pipeline.simulate import Simulation, simulate
from tools.plots.style import WIDE, Picture, color, figure, horizontal_bars, legend

Bar = tuple[int, Action, float, float]  # pipeline rank, F, B or W, start, end
CHUNK_COLORS = {  # by chunk; white text is readable on each, and each is visible on white and on black
    Op.F: ("#2c7fb8", "#1f6596", "#174d74", "#123b59"),
    Op.B: ("#cc5f0a", "#a64d08", "#833d07", "#632e05"),
    Op.W: ("#12886a", "#0e6d55", "#0b5542", "#084032"),
}
OP_NAMES = {Op.F: "forward", Op.B: "backward", Op.W: "weight gradients"}
MAX_VECTOR_BARS = 1500  # with more bars, a page has them as an image, because shapes would take megabytes
MAX_OUTLINED_BARS = 400
MAX_NAMED_RANKS = 16
MAX_BARS = 200_000


def parse_action(text: str) -> Action:
    """Return the action that is printed as `text`, such as F0.3."""
    if (match := re.fullmatch(r"([A-Z]+)(\d{1,9})\.(\d{1,9})", text)) is None:
        raise ValueError(f"{text!r} is not an action")
    return Action(Op(match[1]), int(match[2]), int(match[3]))


def read_timeline(data: Any) -> tuple[list[Bar], float, Simulation]:
    """Return the measured bars, the seconds of computation in them, and a simulation of the same actions.

    In the simulation, each stage takes its median time, and nothing else takes time.

    Raises:
        ValueError, LookupError, TypeError: if the timeline is damaged.
    """
    actions_by_rank: list[list[Action]] = [[] for _ in range(len(data["ranks"]))]
    bars: list[Bar] = []
    seconds = defaultdict(list)
    for rank in data["ranks"]:
        for span in rank["spans"]:
            action, start, end = parse_action(span["action"]), float(span["start_s"]), float(span["end_s"])
            actions_by_rank[rank["pp_rank"]].append(action)
            if action.op in COMPUTE_OPS:
                bars.append((rank["pp_rank"], action, start, end))
                seconds[action.op, action.stage].append(end - start)
    if data["pp"] != len(actions_by_rank) or not 0 < len(bars) <= MAX_BARS:
        raise ValueError(f"{len(bars)} actions of {len(actions_by_rank)} ranks")
    medians = {key: median(values) for key, values in seconds.items()}
    busy_s = sum(end - start for *_, start, end in bars)
    stages = range(data["pp"] * data["vpp"])
    f, b, w = ([medians.get((op, stage), 0.0) for stage in stages] for op in COMPUTE_OPS)
    return bars, busy_s, simulate(actions_by_rank, list(zip(f, b, w, strict=True)))


def _simulated_bars(simulation: Simulation) -> list[Bar]:
    return [(span.rank, span.action, span.start, span.end) for span in simulation.spans]


def _draw_bars(axis: Any, bars: Sequence[Bar], pp: int, title: str, width: float) -> None:
    """Draw the bars of all pipeline ranks, with the numbers of micro-batches that fit."""
    end = max(bar[3] for bar in bars)
    spans_by_color: defaultdict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    is_vector = len(bars) <= MAX_VECTOR_BARS
    for rank, action, start, stop in bars:
        chunk_colors = CHUNK_COLORS[action.op]
        bar_color = chunk_colors[min(action.stage // pp, len(chunk_colors) - 1)]
        spans_by_color[rank, bar_color].append((start, stop - start))
        label = str(action.microbatch)
        bar_inches = (stop - start) / end * width
        if is_vector and bar_inches > 0.075 * len(label) + 0.02:
            axis.text((start + stop) / 2, rank, label, ha="center", va="center", color="white", fontsize=7)
    for (rank, bar_color), spans in spans_by_color.items():
        axis.broken_barh(
            spans,
            (rank - 0.43, 0.86),
            facecolors=bar_color,
            edgecolor=color("paper"),
            linewidth=0.0 if len(bars) > MAX_OUTLINED_BARS else 0.6,
            rasterized=not is_vector,
        )
    if pp <= MAX_NAMED_RANKS:
        axis.set_yticks(range(pp), [f"pp {r}" if width < WIDE else f"pipeline rank {r}" for r in range(pp)])
    horizontal_bars(axis)
    axis.set_xlim(0, end * 1.005)
    axis.set_title(title, loc="left", color=color("ink"))


def schedule(name: str, pp: int, vpp: int, microbatches: int, split: bool) -> Picture:
    """Return a schedule in which forward, backward and weight gradients take equal times."""
    actions_by_rank = build_schedule(name, pp, microbatches, vpp, split=SplitBackward() if split else None)
    simulation = simulate(actions_by_rank)
    title = _title(name, pp, vpp, microbatches, split)

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [0.9 + 0.3 * pp])
        full_title = f"{title}\n{summary(actions_by_rank, simulation)}"
        _draw_bars(axis, _simulated_bars(simulation), pp, full_title, width)
        _add_legend(fig, axis, width, split, "time, in forwards", vpp > 1)
        return fig

    caption = f"{title}: {summary(actions_by_rank, simulation)}. Numbers are micro-batches."
    return Picture("schedule", caption, draw)


def _title(name: str, pp: int, vpp: int, microbatches: int, split: bool) -> str:
    return f"{name}{', split backward' if split else ''}, pp {pp}, vpp {vpp}, {microbatches} micro-batches"


def _add_legend(fig: Any, axis: Any, width: float, split: bool, unit: str, has_chunks: bool) -> None:
    """Add the legend of colors above `axis`, and the unit of time with the other explanations below it."""
    for op in (Op.F, Op.B, Op.W) if split else (Op.F, Op.B):
        axis.plot([], [], "s", color=CHUNK_COLORS[op][0], label=OP_NAMES[op])
    legend(fig, axis, width)
    label = unit
    if width == WIDE:
        label += "; numbers: micro-batches"
    if has_chunks:
        label += "; darker: a later chunk"
    fig.axes[-1].set_xlabel(label)


def summary(actions_by_rank: Sequence[Sequence[Action]], simulation: Simulation) -> str:
    """Return the bubble and the activations that each rank stores at its peak."""
    peaks = ", ".join(f"{peak_in_flight(actions):.0f}" for actions in actions_by_rank)
    return f"bubble {100 * simulation.bubble:.1f} %, peak activations in flight per rank: {peaks}"


def timeline(data: Any) -> Picture:
    """Return the planned and the measured timeline of a step. Raises the errors of `read_timeline`."""
    bars, busy_s, simulation = read_timeline(data)
    name, microbatches, pp, vpp = (data[key] for key in ("schedule", "microbatches", "pp", "vpp"))
    end = max(bar[3] for bar in bars)
    split = any(action.op is Op.W for _, action, _, _ in bars)
    idle_percent = 100 * (1 - busy_s / (pp * end))

    def draw(width: float) -> Any:
        fig, axes = figure(width, [0.55 + 0.3 * pp] * 2, share_x=True)
        planned = f"planned: {1000 * simulation.end:,.0f} ms, bubble {100 * simulation.bubble:.1f} %"
        measured = f"measured: {1000 * end:,.0f} ms, bubble and other waits {idle_percent:.1f} %"
        _draw_bars(axes[0], _simulated_bars(simulation), pp, planned, width)
        _draw_bars(axes[1], bars, pp, measured, width)
        _add_legend(fig, axes[0], width, split, "seconds", vpp > 1)
        axes[0].set_xlim(0, max(end, simulation.end) * 1.005)
        return fig

    title = _title(name, pp, vpp, microbatches, split)
    caption = f"One step of {title}. Planned: each stage takes its median time, and nothing else takes time."
    return Picture("timeline", f"{caption} Numbers are micro-batches.", draw)


def schedule_text(actions_by_rank: Sequence[Sequence[Action]]) -> str:
    """Return the compute actions on a time grid on which F, B and W take equal times.

    Digits are micro-batches. Forwards of chunk 0, 1, 2 are 3, 3', 3''; [3] is a backward, or its input gradients if it
    is split; (3) are its weight gradients.
    """
    pp = len(actions_by_rank)
    simulation = simulate(actions_by_rank)
    width = 1 + max(len(_label(span.action, pp)) for span in simulation.spans)
    lines = []
    for rank in range(pp):
        cells = [" " * width] * round(simulation.end)
        for span in simulation.spans:
            if span.rank == rank:
                length = round(span.end - span.start)
                text = _label(span.action, pp).center(width * length, " " if length == 1 else "-")
                start = round(span.start)
                cells[start : start + length] = [text[i * width : (i + 1) * width] for i in range(length)]
        lines.append(f"{rank} |" + "".join(cells).rstrip())
    return "\n".join(lines)


def _label(action: Action, pp: int) -> str:
    opening, closing = {Op.B: "[]", Op.W: "()"}.get(action.op, ("", ""))
    chunk = "'" * (action.stage // pp)
    return f"{opening}{action.microbatch}{chunk}{closing}"
