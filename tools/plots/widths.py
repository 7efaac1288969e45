"""The picture of a coordinate check: sizes of activations over the width of a model (tools/coord_check.py)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tools.plots.style import MARKERS, SERIES, Picture, color, figure, format_number, legend

Sizes = Sequence[
    Mapping[str, Sequence[float]]
]  # for each width: activation -> its size before the first step and after each


def picture(widths: Sequence[int], sizes_by_title: Mapping[str, Sizes]) -> Picture:
    """Return the sizes of activations after the last step over the width, with an axis for each parametrization.

    A model that has diverged has no point.

    Args:
        widths: the hidden sizes.
        sizes_by_title: the title of an axis -> its sizes.
    """

    def draw(width: float) -> Any:
        fig, axes = figure(width, [2.6] * len(sizes_by_title), share_x=True)
        ends = [values[-1] for sizes in sizes_by_title.values() for row in sizes for values in row.values()]
        ends = [value for value in ends if math.isfinite(value)]
        for axis, (title, sizes) in zip(axes, sizes_by_title.items(), strict=True):
            for i, name in enumerate(sizes[0]):
                values = [row[name][-1] for row in sizes]
                line_color = color(SERIES[i % len(SERIES)])
                axis.plot(widths, values, color=line_color, marker=MARKERS[i % len(MARKERS)], markersize=5, label=name)
            axis.set_title(title, loc="left", fontsize=10)
            axis.set_ylabel("root mean square")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_ylim(min(ends) / 1.5, max(ends) * 1.5)  # the same on all axes
            axis.set_xticks(list(widths), [str(width) for width in widths])
            axis.yaxis.set_major_formatter(lambda value, _: format_number(value))
            axis.yaxis.set_minor_formatter(lambda value, _: "")
        axes[-1].set_xlabel("hidden size")
        legend(fig, axes[0], width)
        return fig

    return Picture("widths", "Activations after the last step, on the same tokens, over the width of the model.", draw)
