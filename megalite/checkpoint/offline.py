"""Checkpoints as data, without ranks or a model: read any rectangle, write others. For tools and conversion.

A rectangle is filled from the stored boxes that meet it, and the hash of every block is checked before a value of it
counts. A checkpoint is written tensor by tensor, with one tensor in memory, and committed as a run's.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format import manifest, reader
from megalite.checkpoint.format.safetensors_file import flatten, write_items
from megalite.checkpoint.storage.location import CheckpointError, Location, parse_location, step_from_name
from megalite.checkpoint.storage.storage import storage_of
from megalite.config.console import ProgressBar
from megalite.parallel.spec import Box, TensorShard


def full_box(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


class Checkpoint(reader.CheckpointReader):
    """Reads the tensors of one checkpoint. Methods raise CheckpointError."""

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.folder}: has no {name}; it is a checkpoint of another model")
        return self.manifest.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        self.shape(name)
        return getattr(torch, self.manifest.tensors[name].dtype)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """The values of `box`, by default of the whole tensor, in the stored dtype, on the CPU."""
        shape = self.shape(name)
        box = full_box(shape) if box is None else box
        if len(shape) != len(box.shape) or any(b > n for b, n in zip(box.stop, shape, strict=True)):
            raise CheckpointError(f"{self.folder}: {name} has shape {shape}, which ends before {box.stop}")
        values = torch.empty(box.shape, dtype=self.dtype(name))
        self.fill([TensorShard(name, shape, box, range(box.numel), values.view(-1))])
        return values

    def fill(self, pieces: Sequence[TensorShard], tell: str | None = None) -> None:
        """Write the values of `pieces` into their data, in the data's dtype."""
        if lines := reader.mismatches(self.manifest, pieces):
            raise CheckpointError(f"{self.folder} does not fit this model:\n  " + "\n  ".join(lines))
        try:
            super().fill(pieces, tell)
        except OSError as error:  # deleted meanwhile
            raise CheckpointError(f"{self.folder}: cannot be read ({error}); use another checkpoint") from error


def open_checkpoint(path: str | Location, *, verified: bool = False) -> Checkpoint:
    """The checkpoint `path`, or the newest in it that has all its files; with `verified` also the right contents, all
    of which are then read. Skipped ones are named on stderr. Raises CheckpointError."""
    return Checkpoint(
        *manifest.find_newest(parse_location(path), reader.verify_checkpoint if verified else manifest.check_file_sizes)
    )


@dataclass(frozen=True)
class TensorProducer:
    """Rectangles that are made together: `parts` (name, box), and in their order `values()`."""

    dtype: torch.dtype
    parts: Sequence[tuple[str, Box]]
    values: Callable[[], Iterable[Tensor]]

    @property
    def bytes(self) -> int:
        return sum(box.numel for _, box in self.parts) * self.dtype.itemsize


def write_checkpoint(
    folder: Location,
    files: Sequence[Sequence[TensorProducer]],
    shapes: dict[str, tuple[int, ...]],
    state: dict[str, Any],
) -> None:
    """Write a new checkpoint `folder` (iter_NNNNNNN) whose tensors `shapes` are filled by the items of `files`, each of
    which is made in its turn. Raises CheckpointError, and leaves nothing behind."""
    storage, step = storage_of(folder), step_from_name(folder.name)
    if step is None:
        raise CheckpointError(f"{folder}: the name of a checkpoint is iter_ and its step, as in iter_0000500")
    if step in storage.steps_in(folder.parent):
        raise CheckpointError(f"{folder} exists; give another folder")
    _check_cover([item for items in files for item in items], shapes)
    part = storage.staging_path(folder)
    try:
        storage.make_staging(part)
        with ProgressBar(f"writing {folder}", sum(map(len, files)), "tensors") as bar:
            for number, items in enumerate(files):
                items = sorted(items, key=lambda item: -item.dtype.itemsize)
                rows = write_items((name, shapes[name], item.dtype, box) for item in items for name, box in item.parts)
                values = (one for item in bar.track(items) for one in item.values())
                manifest.write_rank_file(part, number, rows, flatten(rows, values))
        manifest.commit(part, folder, state, step, len(files))
    except BaseException as error:
        manifest.discard_quietly(part)
        if isinstance(error, OSError):
            raise CheckpointError(f"{folder}: cannot be written ({error}); give a writable folder") from error
        raise


def _check_cover(items: Sequence[TensorProducer], shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse missing and double elements, and two dtypes in one tensor."""
    dtypes: dict[str, torch.dtype] = {}
    held = dict.fromkeys(shapes, 0)
    for item in items:
        for name, box in item.parts:
            if dtypes.setdefault(name, item.dtype) != item.dtype:
                raise CheckpointError(f"{name}: its parts are {dtypes[name]} and {item.dtype}; convert to one dtype")
            held[name] += box.numel
    for name, shape in shapes.items():
        if held[name] != math.prod(shape):
            count = f"{held[name]} of {math.prod(shape)} elements were found"
            raise CheckpointError(f"{name}: {count}; a part is missing or double")
