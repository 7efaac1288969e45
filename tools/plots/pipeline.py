"""The pipeline over time: a schedule as planned, drawn or as text; and a run's measured timeline beside its plan."""

import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from megalite.pipeline.schedule import Action, Op, SplitBackward, build_schedule, peak_in_flight
from megalite.pipeline.simulate import COMPUTE_OPS, Simulation, simulate
from tools.plots.style import WIDE, Picture, as_rows, figure, ink, legend

Bar = tuple[int, Action, float, float]  # pipeline rank, F, B or W, start, end
COLOURS = {  # of chunk 0, 1, ..; white text stands on each, and each stands on white and on black
    Op.F: ("#2c7fb8", "#1f6596", "#174d74", "#123b59"),
    Op.B: ("#cc5f0a", "#a64d08", "#833d07", "#632e05"),
    Op.W: ("#12886a", "#0e6d55", "#0b5542", "#084032"),
}
NAMES = {Op.F: "forward", Op.B: "backward", Op.W: "gradients of weights"}
MANY = 1500  # bars above which a page gets them as an image: as shapes they would be megabytes
NUMBERED = "; numbers: micro-batches"
LONGEST = 200_000  # bars that are drawn at all


def read_action(text: str) -> Action:
    """F0.3, as it prints."""
    if (match := re.fullmatch(r"([A-Z]+)(\d{1,9})\.(\d{1,9})", text)) is None:
        raise ValueError(f"{text!r} is not an action")
    return Action(Op(match[1]), int(match[2]), int(match[3]))


def read_timeline(data: Any) -> tuple[list[Bar], float, Simulation]:
    """The bars of what each rank did, the seconds of work in them, and a simulation in which each stage takes its
    median and nothing else costs time. Raises ValueError, LookupError or TypeError where it is damaged."""
    rows: list[list[Action]] = [[] for _ in range(len(data["ranks"]))]
    spans, took = [], defaultdict(list)
    for rank in data["ranks"]:
        for span in rank["spans"]:
            action, start, stop = read_action(span["action"]), float(span["start_s"]), float(span["end_s"])
            rows[rank["pp_rank"]].append(action)
            if action.op in COMPUTE_OPS:
                spans.append((rank["pp_rank"], action, start, stop))
                took[action.op, action.stage].append(stop - start)
    if data["pp"] != len(rows) or not 0 < len(spans) <= LONGEST:
        raise ValueError(f"{len(spans)} actions of {len(rows)} ranks")
    cost = {key: median(some) for key, some in took.items()}
    work = sum(stop - start for *_, start, stop in spans)
    stages = range(data["pp"] * data["vpp"])
    f, b, w = ([cost.get((op, stage), 0.0) for stage in stages] for op in COMPUTE_OPS)
    return spans, work, simulate(rows, list(zip(f, b, w, strict=True)))


def _bars(axis: Any, spans: Sequence[Bar], pp: int, title: str, width: float) -> None:
    end = max(s[3] for s in spans)
    together: defaultdict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for rank, action, start, stop in spans:
        colours = COLOURS[action.op]
        together[rank, colours[min(action.stage // pp, len(colours) - 1)]].append((start, stop - start))
        room = (stop - start) / end * width
        if room > 0.075 * len(str(action.microbatch)) + 0.02 and len(spans) <= MANY:
            middle = (start + stop) / 2
            axis.text(middle, rank, str(action.microbatch), ha="center", va="center", color="white", fontsize=7)
    thin = 0.0 if len(spans) > 400 else 0.6
    for (rank, colour), some in together.items():
        how = dict(facecolors=colour, edgecolor=ink("paper"), linewidth=thin, rasterized=len(spans) > MANY)
        axis.broken_barh(some, (rank - 0.43, 0.86), **how)
    if pp <= 16:
        axis.set_yticks(range(pp), [f"pp {r}" if width < WIDE else f"pipeline rank {r}" for r in range(pp)])
    as_rows(axis)
    axis.set_xlim(0, end * 1.005)
    axis.set_title(title, loc="left", color=ink("ink"))


def schedule(name: str, pp: int, vpp: int, microbatches: int, split: bool) -> Picture:
    rows = build_schedule(name, pp, microbatches, vpp, split=SplitBackward() if split else None)
    result = simulate(rows)
    title = f"{name}{', split backward' if split else ''}, pp {pp}, vpp {vpp}, {microbatches} micro-batches"

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [0.9 + 0.3 * pp])
        spans = [(s.rank, s.action, s.start, s.end) for s in result.spans]
        _bars(axis, spans, pp, f"{title}\n{told(rows, result)}", width)
        _legend(fig, axis, width, split, "time in forwards", vpp > 1)
        return fig

    return Picture("schedule", f"{title}: {told(rows, result)}. Numbers are micro-batches.", draw)


def _legend(made: Any, axis: Any, width: float, split: bool, unit: str, chunks: bool) -> None:
    """Above `axis` what the colours are, below it the rest. `unit`: of time."""
    for op in (Op.F, Op.B, Op.W) if split else (Op.F, Op.B):
        axis.plot([], [], "s", color=COLOURS[op][0], label=NAMES[op])
    legend(made, axis, width)
    numbered = NUMBERED if width == WIDE else ""
    darker = "; darker: a later chunk" if chunks else ""
    made.axes[-1].set_xlabel(f"{unit}{numbered}{darker}")


def told(rows: Sequence[Sequence[Action]], result: Simulation) -> str:
    held = ", ".join(f"{peak_in_flight(row):.0f}" for row in rows)
    return f"bubble {100 * result.bubble:.1f} %, activations held per rank: {held}"


def timeline(data: Any) -> Picture:
    """Raises as `read_timeline`."""
    spans, work, ideal = read_timeline(data)
    name, microbatches, pp, vpp = (data[key] for key in ("schedule", "microbatches", "pp", "vpp"))
    end = max(s[3] for s in spans)
    split = any(action.op is Op.W for _, action, _, _ in spans)
    waits = 100 * (1 - work / (pp * end))

    def draw(width: float) -> Any:
        fig, axes = figure(width, [0.55 + 0.3 * pp] * 2, share_x=True)
        planned = [(s.rank, s.action, s.start, s.end) for s in ideal.spans]
        _bars(axes[0], planned, pp, f"planned: {1000 * ideal.end:,.0f} ms, bubble {100 * ideal.bubble:.1f} %", width)
        _bars(axes[1], spans, pp, f"measured: {1000 * end:,.0f} ms, bubble and waits {waits:.1f} %", width)
        _legend(fig, axes[0], width, split, "seconds", vpp > 1)
        axes[0].set_xlim(0, max(end, ideal.end) * 1.005)
        return fig

    what = f"{name}{', split backward' if split else ''}, pp {pp}, vpp {vpp}, {microbatches} micro-batches"
    caption = f"One step of {what}. Planned: each stage takes its median, and nothing else costs time."
    return Picture("timeline", f"{caption} Numbers are micro-batches.", draw)


def as_text(rows: Sequence[Sequence[Action]]) -> str:
    """The compute actions on a time grid, F, B and W equally long; digits are micro-batches.

    Forwards of chunk 0, 1, .. are  3 , 3', 3'' ; [3] a backward, whole or of the input alone; (3) of the weights alone.
    """
    pp = len(rows)
    simulation = simulate(rows)
    width = 1 + max(len(_label(s.action, pp)) for s in simulation.spans)
    lines = []
    for rank in range(pp):
        cells = [" " * width] * round(simulation.end)
        for span in simulation.spans:
            if span.rank == rank:
                length = round(span.end - span.start)
                text = _label(span.action, pp).center(width * length, " " if length == 1 else "-")
                at = round(span.start)
                cells[at : at + length] = [text[i * width : (i + 1) * width] for i in range(length)]
        lines.append(f"{rank} |" + "".join(cells).rstrip())
    return "\n".join(lines)


def _label(action: Action, pp: int) -> str:
    before, after = {Op.B: "[]", Op.W: "()"}.get(action.op, ("", ""))
    chunk = "'" * (action.stage // pp)
    return f"{before}{action.microbatch}{chunk}{after}"
