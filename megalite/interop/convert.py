"""Foreign weights to a checkpoint of megalite and back, one tensor in memory at a time, and the check of both sides.

A foreign checkpoint is a list of `Foreign`: which tensor, in which dtype, and how to read it. The rest is the same for
all of them: cut it into rectangles of ours and leave the padding of their vocabulary out; ours is not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.format.tensor_file import cut
from megalite.checkpoint.offline import Checkpoint, Difference, Item, difference, write_checkpoint
from megalite.checkpoint.storage.location import Location, folder_of
from megalite.checkpoint.storage.protocol import steps_in
from megalite.config.check import check
from megalite.config.options import ConfigError, ModelConfig, build
from megalite.config.toml import parse_toml
from megalite.interop.rules import Entry, Specs, join, split, trimmed
from megalite.parallel.spec import Box

FILE_BYTES = 4 << 30  # of a checkpoint that is made here
# what a run needs beside a model, so that what `check` finds is the model's
ANY_RUN: dict[str, Any] = {"micro_batch_size": 1, "train_iters": 1, "lr": 1.0, "mock_data": True, "vocab_size": 1}


@dataclass(frozen=True)
class Foreign:
    """`read()` gives a tensor of entry.shape and `dtype`; `place` is for people: a file, and a name in it."""

    entry: Entry
    dtype: torch.dtype
    place: str
    read: Callable[[], Tensor]


def model_of(options: dict[str, Any], where: str) -> ModelConfig:
    """The model of options that came from a foreign file. Raises CheckpointError for wrong types."""
    try:
        return build({name: value for name, value in options.items() if name != "vocab_size"}).model
    except ConfigError as error:
        raise CheckpointError(f"{where}: {'; '.join(error.problems)}; it is damaged") from None


def items_of(foreign: Sequence[Foreign], vocab_size: int) -> list[Item]:
    """What to write; rows that pad their vocabulary are left out."""
    items = []
    for one in foreign:
        boxes = [(name, trimmed(name, box, vocab_size)) for name, box in one.entry.parts]
        parts = [(name, box) for name, box in boxes if box is not None]
        if parts:
            items.append(Item(one.dtype, [(f"model/{n}", b) for n, b in parts], lambda o=one: _values(o, vocab_size)))
    return items


def _values(one: Foreign, vocab_size: int) -> Iterator[Tensor]:
    for name, box, values in split(one.entry, one.read()):
        kept = trimmed(name, box, vocab_size)
        if kept is not None:
            yield values if kept == box else values[: kept.shape[0]]


def write_import(
    directory: Path,
    foreign: Sequence[Foreign],
    specs: Specs,
    vocab_size: int,
    state: dict[str, Any],
    file_bytes: int = FILE_BYTES,
) -> Location:
    """A checkpoint of step 0 from foreign weights; no optimizer states. Raises CheckpointError.

    No checkpoint may exist there yet: a converted model is the start of a run, not a step of one.
    """
    if steps_in(directory):
        raise CheckpointError(f"save={str(directory)!r} already holds checkpoints; give another directory")
    items = items_of(foreign, vocab_size)
    files = [[items[i] for i in chosen] for chosen in cut([item.bytes for item in items], file_bytes)]
    folder = folder_of(directory, 0)
    write_checkpoint(folder, files, {f"model/{name}": spec.shape for name, spec in specs.items()}, state)
    return folder


def saved_model(source: Checkpoint) -> ModelConfig:
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

    source: Checkpoint
    dtype: torch.dtype | None = None
    used: Specs | None = None

    def _key(self, name: str) -> str:
        main = f"optimizer.main/{name}"
        return main if self.dtype == torch.float32 and main in self.source.manifest.tensors else f"model/{name}"

    def dtype_of_name(self, name: str) -> torch.dtype:
        return self.dtype or self.source.dtype(self._key(name))

    def dtype_of(self, entry: Entry) -> torch.dtype:
        return self.dtype_of_name(entry.parts[0][0])

    def offset(self, name: str) -> float:
        return 0.0 if self.used is None else self.used[name].offset

    def rows(self, name: str) -> int:
        return self.source.shape(self._key(name))[0]

    def read(self, name: str, box: Box) -> Tensor:
        values = self.source.read(self._key(name), box)
        if offset := self.offset(name):
            values = values + offset
        return values if self.dtype is None else values.to(self.dtype)

    def join(self, entry: Entry) -> Tensor:
        return join(entry, self.read)


@dataclass(frozen=True)
class Verdict:
    """`differing`: rectangles of ours, by the name of theirs and ours."""

    tensors: int
    elements: int
    differing: list[Difference]

    def __str__(self) -> str:
        if not self.differing:
            return f"check: {self.tensors} tensors, {self.elements:,} elements, all bits equal"
        largest = max(self.differing, key=lambda d: d.largest)
        lines = [f"check: {len(self.differing)} parts of {self.tensors} tensors differ"]
        return "\n".join([*lines, f"first: {_told(self.differing[0])}", f"largest: {_told(largest)}"])


def _told(d: Difference) -> str:
    more = f"{d.count:,} elements of it differ, by at most {d.largest:g}"
    return f"{d.name}{list(d.index or ())}: {d.there!r} there, {d.here!r} here; {d.note and d.note + ', '}{more}"


def compare(foreign: Iterable[Foreign], ours: Ours, vocab_size: int) -> Verdict:
    """Every foreign tensor against ours, bit by bit; rows that pad the vocabulary do not count."""
    tensors, elements, differing = 0, 0, []
    for one in foreign:
        tensors += 1
        for name, box, values in split(one.entry, one.read()):
            kept = trimmed(name, box, vocab_size)
            if kept is None:
                continue
            theirs = values[: kept.shape[0]]
            elements += theirs.numel()
            found = difference(f"{one.place}, {name}", ours.read(name, kept), theirs)
            if found is not None:
                at = zip(found.index or (), kept.start, strict=False)  # no index where only dtypes differ
                differing.append(replace(found, index=tuple(i + start for i, start in at)))
    return Verdict(tensors, elements, differing)
