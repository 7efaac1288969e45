"""Checkpoints as plain data, without ranks or a model, for tools and conversion.

`Checkpoint` reads any rectangle of a tensor from the stored boxes that it intersects, and verifies the hash of every
block before a value is used. `write_checkpoint` writes a checkpoint one tensor at a time, with one tensor in memory,
and commits it like the checkpoint of a run.
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
from megalite.common.console import ProgressBar
from megalite.parallel.spec import Box, TensorShard


def full_box(shape: tuple[int, ...]) -> Box:
    """Return the box that covers a full tensor of this shape."""
    return Box((0,) * len(shape), shape)


class Checkpoint(reader.CheckpointReader):
    """A reader of the tensors of one checkpoint. Its methods raise CheckpointError."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor."""
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.directory}: has no {name}; it is a checkpoint of another model")
        return self.manifest.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor."""
        self.shape(name)
        return getattr(torch, self.manifest.tensors[name].dtype)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Return the values of `box` (default: the full tensor) in the stored dtype, on the CPU."""
        shape = self.shape(name)
        box = full_box(shape) if box is None else box
        if len(shape) != len(box.shape) or any(b > n for b, n in zip(box.stop, shape, strict=True)):
            raise CheckpointError(f"{self.directory}: {name} has shape {shape}, which ends before {box.stop}")
        values = torch.empty(box.shape, dtype=self.dtype(name))
        self.fill([TensorShard(name, shape, box, range(box.numel), values.view(-1))])
        return values

    def fill(self, shards: Sequence[TensorShard], progress_title: str | None = None) -> None:
        """Write the values of `shards` into their data, converted to the data's dtype."""
        if lines := reader.mismatches(self.manifest, shards):
            raise CheckpointError(f"{self.directory} does not fit this model:\n  " + "\n  ".join(lines))
        try:
            super().fill(shards, progress_title)
        except OSError as error:  # deleted in the meantime
            raise CheckpointError(f"{self.directory}: cannot be read ({error}); use another checkpoint") from error


def open_checkpoint(path: str | Location, *, verified: bool = False) -> Checkpoint:
    """Open the checkpoint at `path`, or the newest one in it that has all its files.

    With `verified`, its contents must be valid too, so all files are read. Skipped checkpoints are reported on stderr.
    Raises CheckpointError.
    """
    return Checkpoint(
        *manifest.find_newest(parse_location(path), reader.verify_checkpoint if verified else manifest.check_file_sizes)
    )


@dataclass(frozen=True)
class TensorProducer:
    """Rectangles of tensors that are computed together.

    `parts` has (tensor name, box) for each, and `values()` yields their values in this order.
    """

    dtype: torch.dtype
    parts: Sequence[tuple[str, Box]]
    values: Callable[[], Iterable[Tensor]]

    @property
    def num_bytes(self) -> int:
        """The size of all its values in bytes."""
        return sum(box.numel for _, box in self.parts) * self.dtype.itemsize


def write_checkpoint(
    directory: Location,
    files: Sequence[Sequence[TensorProducer]],
    shapes: dict[str, tuple[int, ...]],
    state: dict[str, Any],
) -> None:
    """Write a new checkpoint, and leave nothing behind if that fails.

    Args:
        directory: The directory of the checkpoint, named iter_NNNNNNN.
        files: The producers of each file. Their values are computed one producer at a time.
        shapes: The full shape of every tensor. The producers must cover each exactly once.
        state: The values of the manifest that are not tensors, as plain JSON.

    Raises:
        CheckpointError: The checkpoint exists, cannot be written, or its tensors are not covered.
    """
    storage = storage_of(directory)
    step = step_from_name(directory.name)
    if step is None:
        raise CheckpointError(f"{directory}: the name of a checkpoint is iter_ and its step, as in iter_0000500")
    if step in storage.steps_in(directory.parent):
        raise CheckpointError(f"{directory} exists; give another directory")
    _check_cover([producer for producers in files for producer in producers], shapes)
    staging_dir = storage.staging_path(directory)
    try:
        storage.make_staging(staging_dir)
        with ProgressBar(f"writing {directory}", sum(map(len, files)), "tensors") as bar:
            for rank, producers in enumerate(files):
                ordered = sorted(producers, key=lambda producer: -producer.dtype.itemsize)
                rows = write_items(
                    (name, shapes[name], producer.dtype, box) for producer in ordered for name, box in producer.parts
                )
                values = (tensor for producer in bar.track(ordered) for tensor in producer.values())
                manifest.write_rank_file(staging_dir, rank, rows, flatten(rows, values))
        manifest.commit(staging_dir, directory, state, step, len(files))
    except BaseException as error:
        manifest.discard_quietly(staging_dir)
        if isinstance(error, OSError):
            raise CheckpointError(f"{directory}: cannot be written ({error}); give a writable directory") from error
        raise


def _check_cover(producers: Sequence[TensorProducer], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError for missing or duplicate elements, and for two dtypes in one tensor."""
    dtypes: dict[str, torch.dtype] = {}
    num_elements = dict.fromkeys(shapes, 0)
    for producer in producers:
        for name, box in producer.parts:
            if dtypes.setdefault(name, producer.dtype) != producer.dtype:
                raise CheckpointError(
                    f"{name}: its parts are {dtypes[name]} and {producer.dtype}; convert to one dtype"
                )
            num_elements[name] += box.numel
    for name, shape in shapes.items():
        if num_elements[name] != math.prod(shape):
            count = f"{num_elements[name]} of {math.prod(shape)} elements were found"
            raise CheckpointError(f"{name}: {count}; a part is missing or duplicated")
