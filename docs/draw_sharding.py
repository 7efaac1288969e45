"""Draw docs/sharding.png: the model state on each of four ranks at every ZeRO stage, in bf16 with AdamW.

python -m docs.draw_sharding docs/sharding.png
"""

import sys
from pathlib import Path
from typing import Any

import torch

from megalite.planning.model_state import ShardCounts, bytes_per_element
from tools.plots.style import Picture, color, figure, legend, save

RANKS, STAGES = 4, 4
PARTS = (("weights", "blue"), ("gradients", "vermilion"), ("optimizer state", "green"))


def picture() -> Picture:
    """Return the bytes of a parameter on each rank at each ZeRO stage; filled areas are on the rank."""
    sizes = bytes_per_element(torch.bfloat16, (None, None))

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [4.0])
        ticks, names = [], []
        for stage in range(STAGES):
            counts = ShardCounts.for_zero_stage(stage, RANKS)
            num_shards = (counts.weights, counts.gradients, counts.optimizer)
            for rank in range(RANKS):
                row, first = stage * (RANKS + 1) + rank, 0
                ticks.append(row)
                names.append(f"stage {stage}, rank {rank}" if rank == 0 else f"rank {rank}")
                for (name, color_name), size, n in zip(PARTS, sizes, num_shards, strict=True):
                    axis.barh(row, size, left=first, height=0.8, color=color("line"))
                    left, label = first + size * (rank % n) / n, name if stage == rank == 0 else None
                    axis.barh(row, size / n, left=left, height=0.8, color=color(color_name), label=label)
                    first += size
                text = f"{counts.bytes_of(*sizes):g}"
                axis.text(first + 0.2, row, text, va="center", color=color("ink"), fontsize=8)
        axis.set_yticks(ticks, names)
        axis.set_xlabel("bytes per parameter; gray: on another rank")
        axis.set_xticks(range(0, sum(sizes) + 1, 2))
        axis.set_xlim(0, sum(sizes) + 1.2)
        axis.grid(False)
        axis.invert_yaxis()
        legend(fig, axis, width)
        return fig

    return Picture("sharding", "The model state of each of four data-parallel ranks, by ZeRO stage.", draw)


if __name__ == "__main__":
    save(picture(), Path(sys.argv[1]))
