"""Draw docs/recurrent_context.png: a state that passes through the ranges of four context-parallel ranks.

python -m docs.draw_recurrent_context docs/recurrent_context.png
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.config import cli
from megalite.kernels.delta_rule import Recurrence, delta_rule, recurrence_map
from megalite.kernels.short_conv import short_conv
from megalite.models.families import PRESETS
from megalite.nn.linear import column_parallel_linear
from megalite.nn.map_composition import states_before
from megalite.nn.recurrent_context_parallel import range_recurrence
from megalite.nn.sequence_sharding import shard_sequence
from megalite.parallel.mesh import Axis, Mesh
from megalite.planning.run_plan import make_run_plan
from tools.plots.style import SERIES, Picture, color, figure, legend, save

RANKS, LENGTH, HEAD, VOCAB_SIZE = 4, 256, 0, 256
BORDER = 144  # where the second document starts
FLAGS = f"""--hybrid-layer-pattern K-*- --hidden-size 256 --num-attention-heads 4 --linear-num-key-heads 4
 --linear-num-value-heads 4 --linear-key-head-dim 32 --linear-value-head-dim 32 --seq-length {LENGTH} --mock-data
 --vocab-size {VOCAB_SIZE} --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3"""


class States(NamedTuple):
    """Norms of the state of one head.

    Attributes:
        one_process: After each token, computed token by token.
        from_zero: After each token, with a state of zero before each range.
        composed: Before each range, from the maps of the ranges before it.
        max_error: The largest error of an element of a composed state, relative to the largest element.
    """

    one_process: list[float]
    from_zero: list[float]
    composed: list[float]
    max_error: float


def _norm(state_BHKV: Tensor) -> float:
    return state_BHKV[0, HEAD].norm().item()


@torch.no_grad()
def states(ranges: list[range]) -> States:
    """Return the states of the first layer of a model with its initial weights."""
    config, _ = cli.read(FLAGS.split(), PRESETS)
    plan = make_run_plan(config, 1, VOCAB_SIZE)
    mixer: Any = plan.balance.build_stages(Mesh.single_process(), torch.float32)[0].blocks[0].mixer
    x_SBD = torch.randn(LENGTH, 1, config.model.hidden_size, generator=torch.Generator().manual_seed(1))
    documents = torch.arange(LENGTH)[None].ge(BORDER) * BORDER
    conv_weights, _, gate_weights = mixer.projections()
    projected = column_parallel_linear(x_SBD, [*conv_weights, *gate_weights], mixer.tp)
    convolved = short_conv(torch.cat(projected[: len(conv_weights)], -1), mixer.taps()[0], documents)
    inputs = mixer.recurrence_inputs(convolved, projected[len(conv_weights) :])
    full = Recurrence(mixer.recurrence.scale, mixer.recurrence.normalize_qk, documents)
    starts = {positions.start for positions in ranges}
    state = zero_state = None
    after: list[Tensor] = []
    from_zero: list[float] = []
    for t in range(LENGTH):
        token = slice(t, t + 1)
        zero_state = None if t in starts else zero_state
        (_, state), (_, zero_state) = (
            delta_rule(inputs.tokens(token), full.tokens(token), before) for before in (state, zero_state)
        )
        after.append(state)
        from_zero.append(_norm(zero_state))
    maps = [
        recurrence_map(
            inputs.tokens(slice(positions.start, positions.stop)), range_recurrence(full, documents, positions)
        )
        for positions in ranges
    ]
    composed = states_before(maps, inputs.k.shape[-1], [0] * len(ranges), Axis("cp"))
    expected = [after[positions.start - 1] for positions in ranges[1:]]
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(composed[1:], expected, strict=True)]
    return States([_norm(x) for x in after], from_zero, [_norm(x) for x in composed], max(errors))


def picture() -> Picture:
    """Return the norm of a state after each token in one process, and before each range from the maps of the ranks."""
    sharding = shard_sequence(LENGTH, RANKS, [None])
    by_start = {r.start: (rank, r) for rank in range(RANKS) for r in sharding.contiguous_ranges(rank)}
    ranges = [by_start[start] for start in sorted(by_start)]
    norms = states([positions for _, positions in ranges])

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [3.2])
        top = 1.12 * max(norms.one_process)
        for rank, positions in ranges:
            axis.axvspan(positions.start, positions.stop, color=color(SERIES[rank]), alpha=0.13, linewidth=0)
            middle = (positions.start + positions.stop) / 2
            axis.text(middle, top, f"rank {rank}", ha="center", va="top", fontsize=8, color=color("ink"))
            x = [t + 1 for t in positions]
            label = "a rank alone, from a state of zero: |U|" if rank == 0 and positions.start == 0 else None
            axis.plot(
                [positions.start, *x], [0, *(norms.from_zero[t] for t in positions)], color=color("muted"),
                linestyle="--", linewidth=1, label=label,
            )  # fmt: skip
        axis.plot(range(1, LENGTH + 1), norms.one_process, color=color("ink"), linewidth=1.2, label="one process: |S|")
        axis.plot(
            [positions.start for _, positions in ranges[1:]], norms.composed[1:], "o", color=color("vermilion"),
            label="before a range, composed from maps", zorder=3,
        )  # fmt: skip
        axis.axvline(BORDER, color=color("ink"), linestyle=":", linewidth=1)
        axis.text(BORDER - 1, 0.06 * top, "a document starts", ha="right", fontsize=8, color=color("ink"))
        axis.set_xlim(0, LENGTH)
        axis.set_ylim(0, top)
        axis.set_xlabel("tokens")
        axis.set_ylabel("norm of the state of a head")
        axis.set_title(f"largest error of a composed state: {norms.max_error:.0e} of its largest element", loc="left")
        legend(fig, axis, width)
        return fig

    caption = "The norm of a state after each token, and before each range of four context-parallel ranks."
    return Picture("recurrent_context", caption, draw)


if __name__ == "__main__":
    save(picture(), Path(sys.argv[1]))
