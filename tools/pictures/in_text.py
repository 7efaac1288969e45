"""A schedule as text, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.pipeline.schedule import Action, Op
from megalite.pipeline.simulate import simulate


def draw(rows: Sequence[Sequence[Action]]) -> str:
    """The compute actions on a time grid, F, B and W equally long; digits are micro-batches.

    Forwards of chunk 0, 1, .. are  3 , 3', 3'' ; [3] a backward, whole or of the input alone; (3) of the weights alone.
    """
    pp = len(rows)
    simulation = simulate(rows)
    width = 1 + max(len(_label(s.action, pp)) for s in simulation.spans)
    lines = []
    for rank in range(pp):
        cells = [" " * width] * round(simulation.end)
        for span in simulation.spans:
            if span.rank == rank:
                length = round(span.end - span.start)
                text = _label(span.action, pp).center(width * length, " " if length == 1 else "-")
                at = round(span.start)
                cells[at : at + length] = [text[i * width : (i + 1) * width] for i in range(length)]
        lines.append(f"{rank} |" + "".join(cells).rstrip())
    return "\n".join(lines)


def _label(action: Action, pp: int) -> str:
    before, after = {Op.B: "[]", Op.W: "()"}.get(action.op, ("", ""))
    return f"{before}{action.microbatch}{chr(39) * (action.stage // pp)}{after}"
