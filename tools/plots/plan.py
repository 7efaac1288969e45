"""Pictures of a plan, made from the JSON of tools/plan.py: what its ranks hold, and where a step's time goes."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tools.plots.bars import layout_of
from tools.plots.style import WIDE, Picture, as_rows, figure, ink, short

GIB = 2**30
MOST_RANKS, MOST_PLANS = 32, 10
HELD = ("weights", "gradients", "optimizer", "activations", "buffers")
COLOURS = ("blue", "sky", "green", "orange", "purple")
TIME = {  # part of a step: its name for a reader
    "compute": "computation",
    "bubble": "pipeline bubble",
    "tp": "tp messages",
    "pp": "pp messages",
    "dp": "dp messages",
    "optimizer": "update",
}
TIME_COLOURS = ("blue", "orange", "vermilion", "purple", "sky", "green")


def picture(data: Mapping[str, Any]) -> Picture:
    """Raises ValueError where `data` is no plan."""
    try:
        plans: Sequence[Mapping[str, Any]] = data["plans"][:MOST_PLANS]
        best, ranks = plans[0], list(enumerate(plans[0]["memory"]))
        step = -(-len(ranks) // MOST_RANKS)  # all, or as many as there is room for, evenly
        memory = [(rank, row) for rank, row in ranks if rank % step == 0 or rank == len(ranks) - 1]
        limit, usable = data["device_memory"] / GIB, data["usable_memory"] / GIB
        held = [[row[part] / GIB for part in HELD] for _, row in memory]
        times = [[max(0.0, float(plan["parts"][part])) for part in TIME] for plan in plans]
        names = [str(plan["name"]) for plan in plans]
        abouts = [[abs(float(end) - float(plan["seconds"])) for end in plan["about_seconds"]] for plan in plans]
        device, speed = str(data["cluster"]["device"]), float(best["tokens_per_s"])
        title = f"{short(float(data['parameters']))} parameters on {int(best['world']):,} {device}"
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"no plan of tools/plan.py --json ({type(error).__name__}: {error})") from None

    def draw(width: float) -> Any:
        narrow = width < WIDE
        heights = [0.9 + 0.24 * len(held), 0.9 + (0.44 if narrow else 0.3) * len(times)]
        fig, (above, below) = figure(width, heights)
        _bars(above, held, HELD, COLOURS, [f"pp {n}" if narrow else f"pipeline rank {n}" for n, _ in memory])
        above.axvline(limit, color=ink("ink"), linewidth=1.2)
        above.axvline(usable, color=ink("ink"), linewidth=1.2, linestyle=(0, (4, 3)))
        above.set_xlim(0, 1.03 * max(limit, *map(sum, held)))
        limits = f"dashed: planned with; solid: all memory of one {device}"
        above.set_xlabel("GiB per rank" if narrow else f"GiB per rank ({limits})")
        _bars(
            below,
            times,
            [*TIME.values()],
            TIME_COLOURS,
            [name.replace(" mb", "\nmb") if narrow else name for name in names],
        )
        ends = [sum(parts) for parts in times]
        how: dict[str, Any] = dict(fmt="none", ecolor=ink("ink"), elinewidth=1, capsize=2.5)
        below.errorbar(ends, range(len(ends)), xerr=list(zip(*abouts, strict=True)), **how)
        whiskers = "" if narrow else " (whiskers: error of most published steps)"
        below.set_xlabel(f"seconds per step{whiskers}")
        for axis, what, more, lines in (
            (above, "Planned memory", " of each pipeline rank in the first layout below", 1),
            (below, "Predicted time", " of a step by layout, the recommended one first", 2),
        ):
            name = what if narrow else f"{what}{more}"
            axis.set_title(name, loc="left", color=ink("ink"), pad=52 if narrow else 10 + 14 * lines)
        fig.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold", color=ink("ink"))
        return fig

    caption = f"The best plan: {best['seconds']:.3f} s a step, MFU {best['mfu']:.1%}, {short(speed)} tokens/s."
    return Picture("plan", caption, draw)


def layout(data: Mapping[str, Any]) -> Picture:
    """Which ranks of the best plan hold which layers. Raises ValueError where `data` is no plan, or one of more
    pipeline ranks than have room."""
    try:
        best = data["plans"][0]
        counts, firsts = [int(n) for n in best["layers"]], [int(rank) for rank in best["first_ranks"]]
        mesh = {"world": int(best["world"]), "dp": int(best["dp"]), "cp": int(best["cp"])}
        mesh |= {axis: int(best["layout"][axis]) for axis in ("tp", "pp")}
        if not counts or min(*mesh.values(), len(firsts)) < 1 or len(firsts) != mesh["pp"] or len(counts) % mesh["pp"]:
            raise LookupError(f"{len(counts)} stages, {len(firsts)} pipeline ranks, {mesh}")
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(f"no plan of tools/plan.py --json ({type(error).__name__}: {error})") from None
    stops = list(itertools.accumulate(counts))
    stages = list(zip([0, *stops], stops, strict=False))
    more = " …" if mesh["world"] > mesh["pp"] else ""
    made = layout_of(stages, mesh, [f"rank {rank:,}{more}" for rank in firsts])
    if made is None:
        raise ValueError(f"{mesh['pp']} pipeline ranks are more than there is room for")
    return made


def _bars(
    axis: Any, rows: Sequence[Sequence[float]], parts: Sequence[str], colours: Sequence[str], names: Sequence[str]
) -> None:
    end = [0.0] * len(rows)
    for i, (part, colour) in enumerate(zip(parts, colours, strict=True)):
        some = [row[i] for row in rows]
        axis.barh(range(len(rows)), some, left=end, height=0.7, color=ink(colour), label=part)
        end = [a + b for a, b in zip(end, some, strict=True)]
    axis.set_yticks(range(len(rows)), names)
    as_rows(axis, values=True)
    axis.margins(y=0.01)
    narrow = axis.figure.get_figwidth() < WIDE
    columns = 2 if narrow else 3 if len(parts) > 5 else len(parts)
    axis.legend(ncols=columns, loc="lower right" if narrow else "lower left")
    axis.get_legend().set_bbox_to_anchor((1 if narrow else 0, 1.0))
