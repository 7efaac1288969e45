"""How far a layout is from one process, step by step, beside what rounding allows (tools/verify.py)."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tools.pictures.canvas import MARKERS, SERIES, Picture, equal_edge, figure, ink, legend

if TYPE_CHECKING:
    from tools.checks.agreement import Row

KINDS = {
    "forward": "hidden states",
    "loss": "loss",
    "gradient": "gradients",
    "norm": "gradient norm",
    "weight": "weights",
}
EQUAL = 1e-17  # where points that are equal to the last bit are drawn


def picture(rows: "Sequence[Row]", layout: str, dtype: str) -> Picture:
    """Draw the largest difference of each kind and step: filled where it counts, empty within the tolerance."""
    steps = sorted({row.step for row in rows})

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [3.0])
        floors = [row.apart for row in rows if row.apart > 0 and math.isfinite(row.apart)]
        floor = 10.0 ** math.floor(math.log10(min([*floors, EQUAL * 10])) - 0.3)
        for number, (kind, name) in enumerate(KINDS.items()):
            of_kind = [[row for row in rows if (row.kind, row.step) == (kind, step)] for step in steps]
            worst = [max(some, key=lambda row: (row.differs, row.apart)) for some in of_kind if some]
            points = [(row.step, min(max(row.apart, floor), 1e3), row.differs) for row in worst]
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
        axis.plot([x for x, _ in edges], [y for _, y in edges], label="allowed, of gradients", **how)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
        axis.yaxis.set_minor_formatter(lambda value, _: "")
        axis.set_ylim(bottom=floor)
        if equal:
            equal_edge(axis, floor)
        names = ["start" if not step else "eval" if step % 1 else f"{step:g}" for step in steps]
        axis.set_xticks(steps, names)
        axis.set_xlabel("steps")
        axis.set_ylabel("furthest apart, relative")
        legend(fig, axis, width)
        return fig

    equal = " On the lower edge: equal to the last bit." * any(row.apart == 0 for row in rows if row.kind in KINDS)
    text = f"{layout} against one process in {dtype}, of each kind what is furthest apart; filled: it differs.{equal}"
    return Picture("verify", text, draw)
