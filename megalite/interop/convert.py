"""Foreign weights to a checkpoint of megalite and back, one tensor in memory at a time, and the check of both sides.

A foreign checkpoint is a list of `Foreign`: which tensor, in which dtype, and how to read it. The rest is the same for
all of them: cut it into rectangles of ours and leave the padding of their vocabulary out; ours is not stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.whole import FILE_BYTES, Item, Source, write_checkpoint
from megalite.config.check import check
from megalite.config.options import ConfigError, ModelConfig, build
from megalite.config.toml import parse_toml
from megalite.interop.rules import Recipe, Specs, join, split, unpadded
from megalite.parallel.spec import Box, ParamSpec

# what a run needs beside a model, so that what `check` finds is the model's
ANY_RUN: dict[str, Any] = {"micro_batch_size": 1, "train_iters": 1, "lr": 1.0, "mock_data": True, "vocab_size": 1}


@dataclass(frozen=True)
class Foreign:
    """`read()` gives a tensor of recipe.shape and `dtype`; `place` is for people: a file, and a name in it."""

    recipe: Recipe
    dtype: torch.dtype
    place: str
    read: Callable[[], Tensor]


def usual_dtype(foreign: Sequence[Foreign]) -> torch.dtype:
    """That of most tensors."""
    return Counter(one.dtype for one in foreign).most_common(1)[0][0]


def refuse(problems: Sequence[str], what: str) -> None:
    """Raises CheckpointError where there are problems: a line each, after what they are of."""
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise CheckpointError("\n  ".join([f"{what}:", *problems[:20], *more]))


def model_of(options: dict[str, Any], where: str) -> ModelConfig:
    """The model of options that came from a foreign file. Raises CheckpointError for wrong types."""
    try:
        return build({name: value for name, value in options.items() if name != "vocab_size"}).model
    except ConfigError as error:
        raise CheckpointError(f"{where}: {'; '.join(error.problems)}; it is damaged") from None


def items_of(foreign: Sequence[Foreign], specs: Specs) -> list[Item]:
    """What to write into tensors of `specs`; rows that pad their vocabulary are left out."""
    items = []
    for one in foreign:
        boxes = [(spec.name, unpadded(box, specs[spec.name])) for spec, box in one.recipe.parts]
        parts = [(name, box) for name, box in boxes if box is not None]
        if parts:
            items.append(Item(one.dtype, parts, lambda one=one: (values for _, _, values in _kept(one, specs))))
    return items


def _kept(one: Foreign, specs: Specs) -> Iterator[tuple[ParamSpec, Box, Tensor]]:
    """Our rectangles and their values in a foreign tensor, without rows that `specs` do not store."""
    for spec, box, values in split(one.recipe, one.read()):
        kept = unpadded(box, specs[spec.name])
        if kept is not None:
            yield spec, kept, values[: kept.shape[0]]


def write_import(
    directory: Path, foreign: Sequence[Foreign], specs: Specs, state: dict[str, Any], file_bytes: int = FILE_BYTES
) -> Path:
    """A checkpoint of step 0 from foreign weights; no optimizer states. Raises CheckpointError."""
    shapes = {name: spec.stored_shape for name, spec in specs.items()}
    return write_checkpoint(directory, items_of(foreign, specs), shapes, state, file_bytes)


def saved_model(source: Source) -> ModelConfig:
    """The model that a checkpoint's configuration describes. Raises CheckpointError."""
    where = f"{source.folder}: its configuration"
    try:
        model = build(parse_toml(str(source.manifest.state["config"]), str(source.folder))).model
    except (KeyError, ConfigError) as error:
        raise CheckpointError(f"{where} cannot be read ({error}); use another checkpoint") from None
    values = {f.name: getattr(model, f.name) for f in fields(model)}
    large = [f"{name}={value}" for name, value in values.items() if isinstance(value, int) and value >= 1 << 31]
    problems = large or check(replace(build(ANY_RUN), model=model))
    if problems:
        raise CheckpointError(f"{where} is damaged ({'; '.join(problems)}); use another checkpoint")
    return model


@dataclass(frozen=True)
class Ours:
    """Our side of an export: rectangles in `dtype`; None: as stored.

    Where fp32 is wanted of a run in half precision, the main weights are read, which are more exact. `used`: the
    model's specs, for a format that holds values as they are used: a stored difference gets its offset back.
    """

    source: Source
    dtype: torch.dtype | None = None
    used: Specs | None = None

    def _key(self, name: str) -> str:
        main = f"optimizer.main/{name}"
        return main if self.dtype == torch.float32 and main in self.source.manifest.tensors else f"model/{name}"

    def dtype_of_name(self, name: str) -> torch.dtype:
        return self.dtype or self.source.dtype(self._key(name))

    def dtype_of(self, recipe: Recipe) -> torch.dtype:
        return self.dtype_of_name(recipe.parts[0][0].name)

    def offset(self, name: str) -> float:
        return 0.0 if self.used is None else self.used[name].offset

    def read(self, name: str, box: Box) -> Tensor:
        values = self.source.read(self._key(name), box)
        if offset := self.offset(name):
            values = values + offset
        return values if self.dtype is None else values.to(self.dtype)

    def join(self, recipe: Recipe) -> Tensor:
        return join(recipe, lambda spec, box: self.read(spec.name, box))


@dataclass(frozen=True)
class TensorDifference:
    """`count` elements of our rectangle differ, the first at `index` of our tensor; largest: by how much at most."""

    place: str
    index: tuple[int, ...]
    theirs: float
    ours: float
    count: int
    largest: float

    def __str__(self) -> str:
        more = f"{self.count:,} elements of it differ, by at most {self.largest:g}"
        return f"{self.place}{list(self.index)}: {self.theirs!r} there, {self.ours!r} here; {more}"


@dataclass(frozen=True)
class Verdict:
    tensors: int
    elements: int
    differing: list[TensorDifference]

    def __str__(self) -> str:
        if not self.differing:
            return f"check: {self.tensors} tensors, {self.elements:,} elements, all bits equal"
        largest = max(self.differing, key=lambda d: d.largest)
        lines = [f"check: {len(self.differing)} parts of {self.tensors} tensors differ"]
        return "\n".join([*lines, f"first: {self.differing[0]}", f"largest: {largest}"])


def compare(foreign: Iterable[Foreign], ours: Ours, specs: Specs) -> Verdict:
    """Every foreign tensor against ours, bit by bit; `specs` tell which rows pad the vocabulary and do not count."""
    tensors, elements, differing = 0, 0, []
    for one in foreign:
        tensors += 1
        for spec, kept, theirs in _kept(one, specs):
            mine = ours.read(spec.name, kept)
            elements += theirs.numel()
            different = _bits(theirs) != _bits(mine) if theirs.dtype == mine.dtype else torch.ones_like(mine).bool()
            if different.any():
                at = tuple(int(i) for i in different.nonzero()[0])
                index = tuple(i + start for i, start in zip(at, kept.start, strict=True))
                gap = (theirs.double() - mine.double()).abs().max()
                values_there = float(theirs[at]), float(mine[at])
                place = f"{one.place}, {spec.name}"
                differing.append(TensorDifference(place, index, *values_there, int(different.sum()), float(gap)))
    return Verdict(tensors, elements, differing)


def _bits(values: Tensor) -> Tensor:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(kinds[values.dtype.itemsize])
