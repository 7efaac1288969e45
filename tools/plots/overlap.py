"""The picture of `megalite plan overlap`: exposed communication over the global batch."""

from collections.abc import Mapping, Sequence
from typing import Any

from tools.plots.style import MARKERS, SERIES, Picture, color, figure, legend


def picture(title: str, curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Picture:
    """Return the exposed communication in percent of a step, one line per curve.

    Args:
        title: The layout.
        curves: Name of a curve -> its points by growing batch: global_batch, exposed (a share), and fits (whether the
            batch fits into memory). A marker is hollow where it does not.
    """

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [3.4])
        for i, (name, points) in enumerate(curves.items()):
            batches = [point["global_batch"] for point in points]
            percents = [100 * point["exposed"] for point in points]
            line_color = color(SERIES[i])
            axis.plot(batches, percents, color=line_color, marker=MARKERS[i], linewidth=1.5, label=name)
            too_large = [(x, y) for x, y, point in zip(batches, percents, points, strict=True) if not point["fits"]]
            for x, y in too_large:
                axis.plot(x, y, color=line_color, marker=MARKERS[i], markerfacecolor=color("paper"))
        all_batches = sorted({point["global_batch"] for points in curves.values() for point in points})
        axis.set_xscale("log", base=2)
        axis.set_xticks(all_batches, [f"{batch:,}" for batch in all_batches])
        axis.minorticks_off()
        axis.set_ylim(0, max(1.0, axis.get_ylim()[1]))  # also if nothing is exposed
        axis.set_xlabel("samples in a global batch (hollow: does not fit into memory)")
        axis.set_ylabel("exposed communication, % of a step")
        axis.set_title(title, loc="left", color=color("ink"))
        legend(fig, axis, width)
        return fig

    return Picture("overlap", "Exposed communication over the global batch, as planned.", draw)
