"""Foreign weights straight into a rank's pieces, and tensors of a megalite checkpoint in foreign form.

A foreign checkpoint is a list of `Foreign`: which tensor, in which dtype, and how to read it. The rest, cutting it into
our rectangles, is the same for all of them. tools/foreign_import.py makes a megalite checkpoint of such a list.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.format.tensor_file import CODES, views
from megalite.checkpoint.offline import Checkpoint
from megalite.config.check import check
from megalite.config.console import told
from megalite.config.options import ConfigError, ModelConfig, build
from megalite.interop.rules import Recipe, Specs, join, split
from megalite.parallel.spec import Box, Piece, inside, intersect

# options of a run beside its model, so that `check` finds the model's problems alone
ANY_RUN: dict[str, Any] = {"micro_batch_size": 1, "train_iters": 1, "lr": 1.0, "mock_data": True, "vocab_size": 1}
MOST_LAYERS, MOST_EXPERTS = 10_000, 300_000  # of all layers; more is a damaged file, and would take long to refuse


@dataclass(frozen=True)
class Found:
    """A tensor in a foreign file: `load()` gives it; `place` names it in messages. `dtype`: text if torch has none."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    place: str
    load: Callable[[], Tensor]


@dataclass(frozen=True)
class Foreign:
    """A foreign tensor: `load()` gives it, in recipe.shape and `dtype`; `place` names it in messages."""

    recipe: Recipe
    dtype: torch.dtype
    place: str
    load: Callable[[], Tensor]

    def read(self) -> Tensor:
        """Its values. Raises CheckpointError unless all are finite."""
        values = self.load()
        if bad := values.numel() - int(values.isfinite().sum()):
            first = values[~values.isfinite()][0]
            raise CheckpointError(
                f"{self.place}: {bad:,} of {values.numel():,} values are not finite, the first is {first:g}; "
                "training cannot begin with them: give another checkpoint"
            )
        return values


def matched(
    ranks: Sequence[tuple[Mapping[str, Found], Sequence[Recipe]]], title: str, remedy: str, problems: Sequence[str] = ()
) -> list[Foreign]:
    """Every tensor once, of the tensors and recipes of each tp rank. Several can hold the same part of ours, as copies
    of a norm do, or a head that is tied to the embedding; then they must be equal. Raises CheckpointError: under
    `title` `problems` and all that is missing, unknown, or has another shape or type, or else what differs, and the
    `remedy`."""
    lines, result = list(problems), list[Foreign]()
    for found, recipes in ranks:
        wanted = {recipe.theirs: recipe for recipe in recipes}
        lines += [f"{name} is missing" for name, r in wanted.items() if not r.copy and name not in found]
        for name, one in found.items():
            if name not in wanted:
                lines.append(f"{one.place}: not a tensor of this model")
            elif not isinstance(one.dtype, torch.dtype) or one.dtype not in CODES:
                lines.append(f"{one.place}: {one.dtype} is not a floating-point type that megalite has")
            elif one.shape != wanted[name].shape:
                lines.append(f"{one.place}: shape {one.shape}, not {wanted[name].shape}")
            else:
                result.append(Foreign(wanted[name], one.dtype, one.place, one.load))
    refuse(lines, title)
    firsts: dict[tuple[tuple[str, Box], ...], Foreign] = {}
    for one in sorted(result, key=lambda one: one.recipe.copy):
        first = firsts.setdefault(tuple((spec.name, box) for spec, box in one.recipe.parts), one)
        if one is not first and not torch.equal(one.read(), first.read()):
            lines.append(f"{one.place} differs from {first.place}, which it repeats; {remedy}")
    refuse(lines, title)
    return list(firsts.values())


def usual_dtype(foreign: Sequence[Foreign]) -> torch.dtype:
    """The dtype of most tensors."""
    return Counter(one.dtype for one in foreign).most_common(1)[0][0]


def refuse(problems: Sequence[str], title: str) -> None:
    """Raises CheckpointError if there are problems: the title, then a line for each."""
    if problems:
        rest = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise CheckpointError("\n  ".join([f"{title}:", *problems[:20], *rest]))


def model_of(options: dict[str, Any], where: str) -> ModelConfig:
    """The model of options from a file. Raises CheckpointError for values that no model can have."""
    try:
        model = build({name: value for name, value in options.items() if name != "vocab_size"}).model
    except ConfigError as error:
        raise CheckpointError(f"{where}: {'; '.join(error.problems)}; it is damaged") from None
    values = {f.name: getattr(model, f.name) for f in fields(model)}
    large = [f"{name}={value}" for name, value in values.items() if isinstance(value, int) and value >= 1 << 31]
    if model.num_layers > MOST_LAYERS or model.num_layers * (model.num_experts or 1) > MOST_EXPERTS:
        large += [f"num_layers={model.num_layers}", f"num_experts={model.num_experts}"]
    problems = [f"{', '.join(large)} is out of range"] if large else check(replace(build(ANY_RUN), model=model))
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(problems)}; it is damaged")
    return model


def fill_from(
    foreign: Sequence[Foreign], pieces: Sequence[Piece], specs: Specs, where: str, tell: bool = False
) -> None:
    """Write the values of `foreign`, a model of `specs`, into the data of pieces, named KIND/NAME, under any layout.
    Every rank reads the tensors that it holds a part of. `tell`: show the progress. Raises CheckpointError, before
    anything changes where shapes differ, later where a file cannot be read."""
    problems: list[str] = []
    wanted: dict[str, list[tuple[Box, Tensor]]] = {}
    for piece in pieces:
        name = piece.name.partition("/")[2]
        wanted.setdefault(name, []).extend(views(piece))
        theirs = specs[name].shape if name in specs else "nothing"
        if piece.shape != theirs:
            problems.append(f"{name}: shape {piece.shape} here, {theirs} there")
    refuse(list(dict.fromkeys(problems)), f"{where} does not fit this model")
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


@contextmanager
def new_directory(folder: Path) -> Iterator[Path]:
    """An empty directory to fill, which becomes `folder` when the block ends, and is deleted after an error. Raises
    CheckpointError if `folder` is not empty or cannot be written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not empty; give a new directory")
    part = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        if folder.exists():
            folder.rmdir()
        os.replace(part, folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error}); give a directory elsewhere") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


@dataclass(frozen=True)
class Ours:
    """Our side of an export: rectangles in `dtype`; None: as stored.

    For fp32 of a run in half precision the main weights are read, which are more exact. `used`: the model's specs, for
    a format that holds values as they are used: a stored difference gets its offset back.
    """

    source: Checkpoint
    dtype: torch.dtype | None = None
    used: Specs | None = None

    def _key(self, name: str) -> str:
        kinds = ("state", "optimizer.main") if self.dtype == torch.float32 else ("state",)
        keys = [key for kind in kinds if (key := f"{kind}/{name}") in self.source.manifest.tensors]
        return keys[0] if keys else f"model/{name}"

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
