"""Foreign weights straight into this rank's pieces, under any layout: no checkpoint of ours in between.

Every rank reads those tensors that it holds a part of, one after the other, so that a whole tensor is all that is in
memory beside the pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megalite.checkpoint.format.pieces import inside, intersect, rectangles
from megalite.checkpoint.progress import ProgressLines
from megalite.interop.convert import Foreign, refuse
from megalite.interop.rules import Specs, split
from megalite.parallel.spec import Box, Piece


def misshapen(pieces: Sequence[Piece], specs: Specs) -> list[str]:
    """What keeps `pieces`, named KIND/NAME, from being filled with tensors of `specs`, one line each."""
    lines = []
    for name, piece in {_bare(piece): piece for piece in pieces}.items():
        there = specs[name].shape if name in specs else None
        if piece.shape != there:
            lines.append(f"{name}: shape {piece.shape} here, {'nothing' if there is None else there} there")
    return lines


def fill_from(
    foreign: Sequence[Foreign], pieces: Sequence[Piece], specs: Specs, where: str, tell: bool = False
) -> None:
    """Write the values of `foreign`, a model of `specs`, into the pieces' data, in the pieces' dtype. `tell`: show how
    far it is, where it takes long.

    Raises CheckpointError: before anything changes where shapes differ, later where a file cannot be read.
    """
    refuse(misshapen(pieces, specs), f"{where} does not fit this model")
    wanted: dict[str, list[Piece]] = {}
    for piece in pieces:
        wanted.setdefault(_bare(piece), []).append(piece)
    progress = ProgressLines(f"loading {where}", len(foreign), "tensors") if tell else None
    for one in foreign:
        if progress is not None:
            progress.add(1)
        if any(_meets(wanted, spec.name, box) for spec, box in one.recipe.parts):
            for spec, box, values in split(one.recipe, one.read()):
                for piece in wanted.get(spec.name, ()):
                    for rectangle, span in rectangles(piece.box, piece.span):
                        both = intersect(rectangle, box)
                        if both is not None:
                            target = piece.data[span.start : span.stop].view(rectangle.shape)
                            target[inside(both, rectangle)] = values[inside(both, box)].to(target)


def _bare(piece: Piece) -> str:
    return piece.name.partition("/")[2]


def _meets(wanted: Mapping[str, Sequence[Piece]], name: str, box: Box) -> bool:
    return any(
        intersect(rectangle, box) is not None
        for piece in wanted.get(name, ())
        for rectangle, _ in rectangles(piece.box, piece.span)
    )
