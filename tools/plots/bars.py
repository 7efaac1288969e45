"""Bars of one run: where its time went, the memory of its ranks, and the layers of each rank."""

from collections.abc import Mapping, Sequence
from typing import Any

from megalite.parallel.mesh import RankOrder
from megalite.training.monitoring.hang_diagnosis import format_ranks
from tools.plots.run_data import RunData, as_dict, as_list, finite_number
from tools.plots.style import SERIES, WIDE, Picture, color, figure, format_number, horizontal_bars, legend, text_color

COMPUTE_PHASES = ("forward", "backward", "graph", "optimizer")
MAX_PIPELINE_RANKS = 32  # in a picture
MAX_PHASES = 12
MIN_PHASE_PERCENT = 0.05
MAX_WORLD = 1 << 20
MAX_LAYERS = 100_000
MEMORY_COLORS = {"weights": "blue", "gradients": "sky", "optimizer": "green", "activations": "orange"}


def time_by_phase(run: RunData) -> list[tuple[str, float]]:
    """Return (phase, percent of the time) of the phases that took time, longest first."""
    percents = as_dict(run.report.get("percent"))
    phases = [(name[:20], finite_number(percent) or 0.0) for name, percent in percents.items()]
    phases = [phase for phase in phases if phase[1] >= MIN_PHASE_PERCENT]
    return sorted(phases, key=lambda phase: -phase[1])[:MAX_PHASES]


def time_bars(runs: Sequence[RunData]) -> Picture:
    """Return one bar per phase, side by side for several runs."""
    percents_by_run = [dict(time_by_phase(run)) for run in runs]
    phases = sorted(
        set().union(*percents_by_run), key=lambda phase: -max(percents.get(phase, 0.0) for percents in percents_by_run)
    )
    max_percent = max(percent for percents in percents_by_run for percent in percents.values())
    thickness = 0.8 / len(runs)

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [max(1.2, 0.26 * len(phases) * max(1.0, 0.7 * len(runs)) + 0.3)])
        for i, (run, percents) in enumerate(zip(runs, percents_by_run, strict=True)):
            offset = (i - (len(runs) - 1) / 2) * thickness
            positions = [row + offset for row in range(len(phases))]
            values = [percents.get(phase, 0.0) for phase in phases]
            if len(runs) == 1:
                bar_colors = [color("blue" if phase in COMPUTE_PHASES else "orange") for phase in phases]
            else:
                bar_colors = [color(SERIES[i % len(SERIES)])] * len(phases)
            axis.barh(positions, values, height=0.92 * thickness, color=bar_colors, label=run.label)
            for position, value in zip(positions, values, strict=True):
                if value:
                    axis.text(value + 0.6, position, f"{value:.1f} %", va="center", color=color("ink"), fontsize=8)
        axis.set_yticks(range(len(phases)), phases)
        axis.set_xlim(0, 1.16 * max_percent)
        axis.set_xticks([])
        axis.margins(y=0.01)
        axis.spines["bottom"].set_visible(False)
        horizontal_bars(axis)
        if len(runs) > 1:
            legend(fig, axis, width)
        return fig

    colors = " Blue: computation; orange: everything else." if len(runs) == 1 else ""
    return Picture("time", f"Share of the last process's time, mean over all ranks.{colors}", draw)


def memory(run: RunData) -> Picture | None:
    """Return the planned memory of a rank of each pipeline position, and the measured peaks of its ranks."""
    planned = [as_dict(parts) for parts in as_list(run.run_info.get("memory"))]
    if not planned or len(planned) > MAX_PIPELINE_RANKS:
        return None
    is_cpu = run.run_info.get("device") == "cpu"
    positions = ranks_by_position(run)
    num_ranks = sum(len(ranks) for ranks in positions)
    peaks = run.peaks_gib if len(run.peaks_gib) == num_ranks else []
    measured: list[tuple[float, int]] = []
    if peaks and not is_cpu:
        measured = [(peaks[rank], position) for position, ranks in enumerate(positions) for rank in ranks]

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [0.34 * len(planned) + 1.0])
        ends = [0.0] * len(planned)
        for name, color_name in MEMORY_COLORS.items():
            gib = [(finite_number(parts.get(name)) or 0.0) / 2**30 for parts in planned]
            axis.barh(range(len(planned)), gib, left=ends, height=0.62, color=color(color_name), label=name)
            ends = [end + part for end, part in zip(ends, gib, strict=True)]
        if measured:
            values, rows = zip(*measured, strict=True)
            axis.plot(values, rows, "|", color=color("ink"), markersize=15, markeredgewidth=1.6, label="measured peak")
        axis.set_yticks(range(len(planned)), [_position_name(run, position) for position in range(len(planned))])
        axis.set_xlabel("GiB per rank")
        axis.locator_params(axis="x", nbins=4 if width < WIDE else 8)
        axis.xaxis.set_major_formatter(lambda value, _: format_number(value))
        horizontal_bars(axis, value_grid=True)
        axis.set_xlim(left=0)
        legend(fig, axis, width)
        return fig

    caption = "Bars: the planned memory of a rank."
    if measured:
        caption += " Strokes: the peak of the GPU's allocator on each rank."
    elif peaks:
        rank = max(range(len(peaks)), key=lambda r: peaks[r])
        caption += f" Measured: rank {rank} had {peaks[rank]:.2f} GiB at its peak, with Python and torch."
    return Picture("memory", caption, draw)


def ranks_by_position(run: RunData) -> list[list[int]]:
    """Return the ranks of each pipeline position."""
    mesh = run.mesh
    if mesh["world"] % (mesh["pp"] * mesh["tp"] * mesh["cp"]) or mesh["world"] > MAX_WORLD:
        return []
    dp_outermost = bool(run.run_info.get("dp_outermost"))
    order = RankOrder(mesh["world"], mesh["pp"], mesh["cp"] * mesh["tp"], dp_outermost)
    return [list(order.stage_ranks(position)) for position in range(mesh["pp"])]


def _position_name(run: RunData, position: int) -> str:
    """Return the ranks of a pipeline position, shortened."""
    positions = ranks_by_position(run)
    if position >= len(positions):
        return f"stage {position}"
    noun, _, ranks = format_ranks(positions[position]).partition(" ")
    if len(ranks) > 16:
        ranks = ranks[:10].rpartition(",")[0] + ", …"
    return f"{noun} {ranks}"


def stage_layers(run: RunData) -> list[tuple[int, int]]:
    """Return the (first, end) of the layers of every stage; empty if they are not known."""
    pairs = [pair for pair in as_list(run.run_info.get("layers")) if isinstance(pair, list) and len(pair) == 2]
    stages = [(int(finite_number(first) or 0), int(finite_number(end) or 0)) for first, end in pairs]
    return stages if all(0 <= first <= end <= MAX_LAYERS for first, end in stages) else []


def layout(run: RunData) -> Picture | None:
    """Return the layers of each pipeline rank; None if they are not known."""
    names = [_position_name(run, position) for position in range(run.mesh["pp"])]
    return layout_picture(stage_layers(run), run.mesh, names)


def layout_picture(stages: Sequence[tuple[int, int]], mesh: Mapping[str, int], names: Sequence[str]) -> Picture | None:
    """Return one row per pipeline rank, with the depth of the model to the right; None if there are too many.

    Args:
        stages: The (first, end) of the layers of every stage.
        mesh: The sizes of world, pp, dp, cp and tp.
        names: The names of the rows.
    """
    pp = mesh["pp"]
    if not stages or pp > MAX_PIPELINE_RANKS or len(stages) % pp:
        return None
    depth = stages[-1][1]
    end_width = max(1.0, depth * 0.07)  # of embedding and head, in layers

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [0.4 * pp + 0.75])
        for stage, (first, end) in enumerate(stages):
            row, chunk = stage % pp, stage // pp
            if end > first:
                label = _layer_label(first, end, depth, width)
                _box(axis, row, first, end, ("blue", "sky")[chunk % 2], label)
            if stage == 0:
                _box(axis, row, -end_width, 0, "green", "E")
            if stage == len(stages) - 1:
                _box(axis, row, depth, depth + end_width, "vermilion", "H")
        axis.set_yticks(range(pp), names)
        axis.set_xlim(-end_width, depth + end_width)
        axis.set_ylim(-0.6, pp - 0.4)
        axis.set_xlabel("layers")
        axis.set_xticks(range(0, depth + 1, max(1, depth // 8)))
        horizontal_bars(axis)
        return fig

    sizes = " × ".join(f"{axis} {mesh[axis]}" for axis in ("pp", "dp", "cp", "tp"))
    world = f"{mesh['world']:,} rank{'s' if mesh['world'] > 1 else ''}"
    caption = f"{sizes} = {world}. Layers of each pipeline rank; E is the embedding, H the output head."
    if mesh["world"] > pp:
        caption += " The ranks of a row shard its layers (tp), share sequences (cp) or have replicas (dp)."
    return Picture("layout", caption, draw)


def _box(axis: Any, row: int, start: float, end: float, color_name: str, label: str) -> None:
    axis.barh(
        row, end - start, left=start, height=0.7, color=color(color_name), edgecolor=color("paper"), linewidth=1.5
    )
    axis.text((start + end) / 2, row, label, ha="center", va="center", fontsize=8, color=text_color(color_name))


def _layer_label(first: int, end: int, depth: int, width: float) -> str:
    """Return the numbers of the layers, if they fit into their box."""
    label = str(first) if end == first + 1 else f"{first}-{end - 1}"
    box_inches = (end - first) / depth * (width - 1.2)
    return label if box_inches > 0.075 * len(label) else ""
