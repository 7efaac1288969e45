"""A checkpoint of megalite as whole tensors, for tools on one process: read any rectangle of it, write a new one.

Reading: whatever layout wrote it, a rectangle is filled from the stored boxes that meet it. Writing: tensor by tensor,
in files of a few GiB, committed as a run's checkpoint is (checkpoint/format/writer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.format import reader, writer
from megalite.checkpoint.format.manifest import Manifest
from megalite.checkpoint.format.pieces import intersect
from megalite.checkpoint.format.planned_files import Planned, cut, flat, header_of
from megalite.checkpoint.format.tensor_file import Row, TensorFile
from megalite.checkpoint.storage.location import CheckpointError, Location
from megalite.checkpoint.storage.protocol import folder_of, storage_of
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import Box

FILE_BYTES = 4 << 30
_OPEN_FILES = 64  # at once; a checkpoint has one for each rank that wrote it


def open_checkpoint(directory: Location) -> Source:
    """The newest valid checkpoint of a --save directory, or the one that `directory` is. Raises CheckpointError."""
    if "manifest.json" in storage_of(directory).entries(directory):
        manifest = manifests.load(directory)
        reader.verify(directory, manifest)
        return Source(directory, manifest)
    found = reader.newest(directory, Mesh.alone())
    if found is None:
        raise CheckpointError(f"load={str(directory)!r} holds no checkpoint; give the --save directory of a run")
    return Source(*found)


class Source:
    """Rectangles of the tensors of a verified checkpoint."""

    def __init__(self, folder: Location, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self._files: dict[str, TensorFile] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        whole = self.manifest.tensors.get(name)
        if whole is None:
            raise CheckpointError(f"{self.folder}: has no {name}; it is a checkpoint of another model")
        return whole.shape

    def dtype(self, name: str) -> torch.dtype:
        self.shape(name)
        return getattr(torch, self.manifest.tensors[name].dtype)

    def read(self, name: str, box: Box) -> Tensor:
        """The values of `box`, in the stored dtype. Raises CheckpointError."""
        if len(self.shape(name)) != len(box.shape) or any(
            b > n for b, n in zip(box.stop, self.shape(name), strict=True)
        ):
            raise CheckpointError(f"{self.folder}: {name} has shape {self.shape(name)}, which ends before {box.stop}")
        result = torch.empty(box.shape, dtype=self.dtype(name))
        try:
            for stored in self.manifest.tensors[name].parts:
                both = intersect(box, stored.box)
                if both is not None:
                    self._open(stored.file).copy(stored.key, stored.box, both, result, box)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{self.folder}: {name} cannot be read ({error}); use another one") from error
        return result

    def _open(self, file: str) -> TensorFile:
        if file not in self._files:
            while len(self._files) >= _OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            self._files[file] = TensorFile(self.folder / file)
        return self._files[file]


@dataclass(frozen=True)
class Item:
    """Something that is read at once and gives some rectangles: `parts` (name, box) and, in that order, `values()`."""

    dtype: torch.dtype
    parts: Sequence[tuple[str, Box]]
    values: Callable[[], Iterable[Tensor]]

    @property
    def bytes(self) -> int:
        return sum(box.numel for _, box in self.parts) * self.dtype.itemsize


def write_checkpoint(
    directory: Location,
    items: Sequence[Item],
    shapes: dict[str, tuple[int, ...]],
    state: dict[str, Any],
    file_bytes: int = FILE_BYTES,
) -> Any:
    """A checkpoint of step 0 whose tensors `shapes` are filled by `items`. Raises CheckpointError and leaves nothing.

    No checkpoint may be there yet: a converted model is the begin of a run, not a step of one.
    """
    storage = storage_of(directory)
    if storage.steps_in(directory):
        raise CheckpointError(f"save={str(directory)!r} already holds checkpoints; give another directory")
    _check_cover(items, shapes)
    items = sorted(items, key=lambda item: -item.dtype.itemsize)
    final = folder_of(directory, 0)
    part = storage.part_of(final)
    try:
        storage.begin(part)
        files = cut([item.bytes for item in items], file_bytes)
        for number, chosen in enumerate(files):
            _write_file(part, number, [items[i] for i in chosen], shapes)
        writer.commit(part, final, state, 0, len(files))
    except BaseException as error:
        writer.abandon(part)
        if isinstance(error, OSError):
            raise CheckpointError(f"save={str(directory)!r}: cannot be written ({error})") from error
        raise
    return final


def _check_cover(items: Sequence[Item], shapes: dict[str, tuple[int, ...]]) -> None:
    """Every element once, and one dtype per tensor."""
    dtypes: dict[str, torch.dtype] = {}
    boxes: dict[str, list[Box]] = {}
    for item in items:
        for name, box in item.parts:
            if dtypes.setdefault(name, item.dtype) != item.dtype:
                raise CheckpointError(f"{name}: its parts are {dtypes[name]} and {item.dtype}; convert to one dtype")
            boxes.setdefault(name, []).append(box)
    for name, shape in shapes.items():
        whole = Box((0,) * len(shape), shape)
        held = sum(box.numel for box in boxes.get(name, []))
        if held != whole.numel:
            raise CheckpointError(f"{name}: {held} of {whole.numel} elements were found; a part is missing or double")


def _write_file(part: Location, number: int, items: Sequence[Item], shapes: dict[str, tuple[int, ...]]) -> None:
    """One file and the list that `writer` makes the manifest of."""
    plan: list[Planned] = []
    rows: list[Row] = []
    for item in items:
        for name, box in item.parts:
            plan.append(Planned(f"{len(plan):06d}", item.dtype, box.shape))
            rows.append(Row(f"model/{name}", shapes[name], str(item.dtype)[6:], plan[-1].key, box))
    values = (one for item in items for one in item.values())
    writer.write_rank(part, number, header_of(plan), rows, flat(plan, values))
