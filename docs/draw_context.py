"""Draws docs/context.png: which tokens each of four context-parallel ranks holds, without documents and with some.

python -m docs.draw_context docs/context.png
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from megalite.nn.places import place, unequal, work_of
from tools.pictures.canvas import SERIES, Picture, figure, ink, save

RANKS, LENGTH = 4, 64
CASES = (("one document", [64], None), ("four documents", [40, 12, 8, 4], None), ("window of 9", [64], 9))


def picture() -> Picture:
    """The keys that each query sees, as a bar above its position, in the colour of the rank that has the query."""

    def draw(width: float) -> Any:
        fig, axes = figure(width, [1.5] * len(CASES), share_x=True)
        for axis, (name, lengths, window) in zip(axes, CASES, strict=True):
            first = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)[None]
            places = place(LENGTH, RANKS, [window], first)
            keys, work = (work_of(LENGTH, n, [window], first) for n in (LENGTH, LENGTH // places.size))
            for rank in range(RANKS):
                rows = places.rows(rank)
                share = sum(work[b] for b in places.blocks[rank]) / sum(work)
                axis.bar(
                    rows, [keys[i] for i in rows], width=1.0, color=ink(SERIES[rank]), label=f"rank {rank}: {share:.0%}"
                )
            axis.set_ylabel("keys seen")
            axis.set_title(f"{name}; most work / mean {unequal(work, places.blocks):.2f}", loc="left", color=ink("ink"))
            axis.legend(ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes[-1].set_xlabel("position of the query")
        return fig

    return Picture("context", "The queries of each of four context-parallel ranks, and the keys that each sees.", draw)


if __name__ == "__main__":
    save(picture(), Path(sys.argv[1]))
