"""Pictures of a plan, from the JSON of tools/plan.py: memory by rank, time by layout, and the layers of each rank."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tools.plots.bars import layout_picture
from tools.plots.style import WIDE, Picture, color, figure, format_number, horizontal_bars

GIB = 2**30
MAX_RANKS = 32
MAX_LAYOUTS = 10
MEMORY_COLORS = {
    "weights": "blue",
    "gradients": "sky",
    "optimizer": "green",
    "activations": "orange",
    "buffers": "purple",
}
TIME_PARTS = {  # part of a step: (label, color)
    "compute": ("computation", "blue"),
    "bubble": ("pipeline bubble", "orange"),
    "tp": ("exposed tp", "vermilion"),
    "cp": ("exposed cp", "muted"),
    "pp": ("exposed pp", "purple"),
    "dp": ("exposed dp", "sky"),
    "optimizer": ("optimizer", "green"),
}


def picture(data: Mapping[str, Any]) -> Picture:
    """Return the memory of the best layout's ranks, and the step time of all layouts.

    Raises:
        ValueError: if `data` is not a plan.
    """
    try:
        plans: Sequence[Mapping[str, Any]] = data["plans"][:MAX_LAYOUTS]
        best = plans[0]
        rank_memory = list(enumerate(best["memory"]))
        stride = -(-len(rank_memory) // MAX_RANKS)
        shown = [(rank, row) for rank, row in rank_memory if rank % stride == 0 or rank == len(rank_memory) - 1]
        memory = [[row[part] / GIB for part in MEMORY_COLORS] for _, row in shown]
        device_gib, usable_gib = data["device_memory"] / GIB, data["usable_memory"] / GIB
        has_cp = any(plan["parts"].get("cp") for plan in plans)
        time_parts = {part: style for part, style in TIME_PARTS.items() if part != "cp" or has_cp}
        times = [[max(0.0, float(plan["parts"][part])) for part in time_parts] for plan in plans]
        names = [str(plan["name"]) for plan in plans]
        errors = [[abs(float(end) - float(plan["seconds"])) for end in plan["about_seconds"]] for plan in plans]
        device, speed = str(data["cluster"]["device"]), float(best["tokens_per_s"])
        title = f"{format_number(float(data['parameters']))} parameters on {int(best['world']):,} {device}"
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"not a plan of tools/plan.py --json ({type(error).__name__}: {error})") from None

    def draw_memory(axis: Any, is_narrow: bool) -> None:
        ranks = [f"pp {rank}" if is_narrow else f"pipeline rank {rank}" for rank, _ in shown]
        _stacked_bars(axis, memory, [*MEMORY_COLORS], [*MEMORY_COLORS.values()], ranks)
        axis.axvline(device_gib, color=color("ink"), linewidth=1.2)
        axis.axvline(usable_gib, color=color("ink"), linewidth=1.2, linestyle=(0, (4, 3)))
        axis.set_xlim(0, 1.03 * max(device_gib, *map(sum, memory)))
        lines = "" if is_narrow else f" (dashed: usable memory; solid: all memory of one {device})"
        axis.set_xlabel(f"GiB per rank{lines}")

    def draw_times(axis: Any, is_narrow: bool) -> None:
        labels = [name.replace(" mb", "\nmb") for name in names] if is_narrow else names
        parts, color_names = zip(*time_parts.values(), strict=True)
        _stacked_bars(axis, times, parts, color_names, labels)
        axis.errorbar(
            [sum(seconds) for seconds in times],
            range(len(times)),
            xerr=list(zip(*errors, strict=True)),
            fmt="none",
            ecolor=color("ink"),
            elinewidth=1,
            capsize=2.5,
        )
        whiskers = "" if is_narrow else " (whiskers: the error of most predictions)"
        axis.set_xlabel(f"seconds per step{whiskers}")

    def draw(width: float) -> Any:
        is_narrow = width < WIDE
        heights = [0.9 + 0.24 * len(memory), 0.9 + (0.44 if is_narrow else 0.3) * len(times)]
        fig, (memory_axis, time_axis) = figure(width, heights)
        draw_memory(memory_axis, is_narrow)
        draw_times(time_axis, is_narrow)
        for axis, short_title, details, legend_lines in (
            (memory_axis, "Planned memory", " of each pipeline rank in the first layout below", 1),
            (time_axis, "Predicted time", " of a step by layout, the recommended one first", 2),
        ):
            axis.set_title(
                short_title if is_narrow else f"{short_title}{details}",
                loc="left",
                color=color("ink"),
                pad=52 if is_narrow else 10 + 14 * legend_lines,
            )
        fig.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold", color=color("ink"))
        return fig

    speed_text = f"{best['seconds']:.3f} s per step, MFU {best['mfu']:.1%}, {format_number(speed)} tokens/s"
    return Picture("plan", f"The best layout: {speed_text}.", draw)


def layout(data: Mapping[str, Any]) -> Picture:
    """Return the layers of each pipeline rank in the best layout.

    Raises:
        ValueError: if `data` is not a plan, or has too many pipeline ranks for a picture.
    """
    try:
        best = data["plans"][0]
        layers_per_stage = [int(n) for n in best["layers"]]
        first_ranks = [int(rank) for rank in best["first_ranks"]]
        mesh = {"world": int(best["world"]), "dp": int(best["dp"]), "cp": int(best["cp"])}
        mesh |= {axis: int(best["layout"][axis]) for axis in ("tp", "pp")}
        is_valid = (
            layers_per_stage
            and min(*mesh.values(), len(first_ranks)) >= 1
            and len(first_ranks) == mesh["pp"]
            and len(layers_per_stage) % mesh["pp"] == 0
        )
        if not is_valid:
            raise LookupError(f"{len(layers_per_stage)} stages, {len(first_ranks)} pipeline ranks, {mesh}")
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(f"not a plan of tools/plan.py --json ({type(error).__name__}: {error})") from None
    stops = list(itertools.accumulate(layers_per_stage))
    stages = list(zip([0, *stops], stops, strict=False))
    ellipsis = " …" if mesh["world"] > mesh["pp"] else ""
    layers = layout_picture(stages, mesh, [f"rank {rank:,}{ellipsis}" for rank in first_ranks])
    if layers is None:
        raise ValueError(f"{mesh['pp']} pipeline ranks are too many for a picture")
    return layers


def _stacked_bars(
    axis: Any, rows: Sequence[Sequence[float]], parts: Sequence[str], colors: Sequence[str], names: Sequence[str]
) -> None:
    """Draw one bar per row, with its parts side by side and a legend above."""
    ends = [0.0] * len(rows)
    for i, (part, color_name) in enumerate(zip(parts, colors, strict=True)):
        values = [row[i] for row in rows]
        axis.barh(range(len(rows)), values, left=ends, height=0.7, color=color(color_name), label=part)
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    axis.set_yticks(range(len(rows)), names)
    horizontal_bars(axis, value_grid=True)
    axis.margins(y=0.01)
    is_narrow = axis.figure.get_figwidth() < WIDE
    columns = len(parts)
    if is_narrow:
        columns = 2
    elif len(parts) > 5:
        columns = 3
    axis.legend(ncols=columns, loc="lower right" if is_narrow else "lower left")
    axis.get_legend().set_bbox_to_anchor((1 if is_narrow else 0, 1.0))
