"""Foreign weights straight into a rank's pieces, and a checkpoint of megalite as they want it, tensor by tensor.

A foreign checkpoint is a list of `Foreign`: which tensor, in which dtype, and how to read it. The rest is the same for
all of them: cut it into rectangles of ours. tools/foreign_import.py makes a checkpoint of ours of such a list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.format.pieces import views
from megalite.checkpoint.offline import Checkpoint
from megalite.config.check import check
from megalite.config.console import told
from megalite.config.options import ConfigError, ModelConfig, build
from megalite.interop.rules import Recipe, Specs, join, split
from megalite.parallel.rectangles import inside, intersect
from megalite.parallel.spec import Box, Piece

# what a run needs beside a model, so that what `check` finds is the model's
ANY_RUN: dict[str, Any] = {"micro_batch_size": 1, "train_iters": 1, "lr": 1.0, "mock_data": True, "vocab_size": 1}


@dataclass(frozen=True)
class Foreign:
    """`load()` gives a tensor of recipe.shape and `dtype`; `place` is for people: a file, and a name in it."""

    recipe: Recipe
    dtype: torch.dtype
    place: str
    load: Callable[[], Tensor]

    def read(self) -> Tensor:
        """Its values, all finite. Raises CheckpointError."""
        values = self.load()
        if bad := values.numel() - int(values.isfinite().sum()):
            first = values[~values.isfinite()][0]
            raise CheckpointError(
                f"{self.place}: {bad:,} of {values.numel():,} values are not finite, the first is {first:g}; "
                "training cannot begin with them: give another checkpoint"
            )
        return values


def usual_dtype(foreign: Sequence[Foreign]) -> torch.dtype:
    """That of most tensors."""
    return Counter(one.dtype for one in foreign).most_common(1)[0][0]


def refuse(problems: Sequence[str], what: str) -> None:
    """Raises CheckpointError where there are problems: a line each, after what they are of."""
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise CheckpointError("\n  ".join([f"{what}:", *problems[:20], *more]))


def model_of(options: dict[str, Any], where: str) -> ModelConfig:
    """The model of options that came from a file. Raises CheckpointError for values that no model has."""
    try:
        model = build({name: value for name, value in options.items() if name != "vocab_size"}).model
    except ConfigError as error:
        raise CheckpointError(f"{where}: {'; '.join(error.problems)}; it is damaged") from None
    values = {f.name: getattr(model, f.name) for f in fields(model)}
    large = [f"{name}={value}" for name, value in values.items() if isinstance(value, int) and value >= 1 << 31]
    problems = [f"{', '.join(large)} is out of range"] if large else check(replace(build(ANY_RUN), model=model))
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(problems)}; it is damaged")
    return model


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
    """Write the values of `foreign`, a model of `specs`, into the pieces' data, in the pieces' dtype, under any layout.
    Every rank reads those tensors that it holds a part of. `tell`: show how far it is, where it takes long.

    Raises CheckpointError: before anything changes where shapes differ, later where a file cannot be read.
    """
    refuse(misshapen(pieces, specs), f"{where} does not fit this model")
    wanted: dict[str, list[tuple[Box, Tensor]]] = {}
    for piece in pieces:
        wanted.setdefault(_bare(piece), []).extend(views(piece))
    with told(f"loading {where}", len(foreign), "tensors", not tell) as bar:
        for one in bar.each(foreign):
            _fill(one, wanted)


def _fill(one: Foreign, wanted: Mapping[str, Sequence[tuple[Box, Tensor]]]) -> None:
    if all(intersect(held, box) is None for spec, box in one.recipe.parts for held, _ in wanted.get(spec.name, ())):
        return
    for spec, box, values in split(one.recipe, one.read()):
        for held, target in wanted.get(spec.name, ()):
            if (both := intersect(held, box)) is not None:
                target[inside(both, held)] = values[inside(both, box)].to(target)


def _bare(piece: Piece) -> str:
    return piece.name.partition("/")[2]


@dataclass(frozen=True)
class Ours:
    """Our side of an export: rectangles in `dtype`; None: as stored.

    Where fp32 is wanted of a run in half precision, the main weights are read, which are more exact. `used`: the
    model's specs, for a format that holds values as they are used: a stored difference gets its offset back.
    """

    source: Checkpoint
    dtype: torch.dtype | None = None
    used: Specs | None = None

    def _key(self, name: str) -> str:
        main = f"optimizer.main/{name}"
        return main if self.dtype == torch.float32 and main in self.source.manifest.tensors else f"model/{name}"

    def dtype_of(self, name: str) -> torch.dtype:
        return self.dtype or self.source.dtype(self._key(name))

    def offset(self, name: str) -> float:
        return 0.0 if self.used is None else self.used[name].offset

    def read(self, name: str, box: Box) -> Tensor:
        values = self.source.read(self._key(name), box)
        if offset := self.offset(name):
            values = values + offset
        return values if self.dtype is None else values.to(self.dtype)

    def join(self, recipe: Recipe) -> Tensor:
        return join(recipe, lambda spec, box: self.read(spec.name, box))
