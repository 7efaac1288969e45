"""Draw docs/context.png: which tokens each of four context-parallel ranks holds, without documents and with some.

python -m docs.draw_context docs/context.png
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from megalite.nn.sequence_sharding import chunk_workloads, imbalance, shard_sequence
from tools.plots.style import SERIES, Picture, color, figure, save

RANKS, LENGTH = 4, 64
CASES = (
    ("One document of 64 tokens", [64], None),
    ("Four documents of 40, 12, 8 and 4 tokens", [40, 12, 8, 4], None),
    ("One document, a window of 9 keys", [64], 9),
)


def picture() -> Picture:
    """Return the number of keys of each query, as a bar above its position in the color of the rank that holds it."""

    def draw(width: float) -> Any:
        fig, axes = figure(width, [1.5] * len(CASES), share_x=True)
        for axis, (name, lengths, window) in zip(axes, CASES, strict=True):
            first = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)[None]
            places = shard_sequence(LENGTH, RANKS, [window], first)
            keys, work = (
                chunk_workloads(LENGTH, n, [window], first) for n in (LENGTH, LENGTH // places.seq_chunk_size)
            )
            for rank in range(RANKS):
                rows = places.positions(rank)
                share = sum(work[b] for b in places.seq_chunks_by_rank[rank]) / sum(work)
                seen, label = [keys[i] for i in rows], f"rank {rank}: {share:.0%} of the work"
                axis.bar(rows, seen, width=1.0, color=color(SERIES[rank]), label=label)
            axis.set_ylabel("keys per query")
            axis.yaxis.get_major_locator().set_params(integer=True)
            busiest = f"the busiest rank has {imbalance(work, places.seq_chunks_by_rank):.2f} times the mean work"
            axis.set_title(f"{name}: {busiest}", loc="left", color=color("ink"))
            axis.legend(ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes[-1].set_xlabel("position of the query in the sequence; its color is the rank that holds it")
        title = "Which tokens each of four context-parallel ranks holds, and how many keys these attend to"
        fig.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold", color=color("ink"))
        return fig

    return Picture("context", "The queries of each of four context-parallel ranks, and the keys that each sees.", draw)


if __name__ == "__main__":
    save(picture(), Path(sys.argv[1]))
