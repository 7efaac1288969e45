"""A checkpoint of megalite as whole tensors, for tools on one process: read any rectangle of it, write a new one.

Reading: whatever layout wrote it, a rectangle is filled from the stored boxes that meet it. Writing: tensor by tensor,
in files of a few GiB, committed as a run's checkpoint is (checkpoint/writer.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalite.checkpoint import manifest as manifests
from megalite.checkpoint import reader, writer
from megalite.checkpoint.manifest import CheckpointError, Manifest
from megalite.checkpoint.pieces import inside, intersect
from megalite.checkpoint.stream import Planned, cut, write_tensors
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import Box

FILE_BYTES = 4 << 30


def open_checkpoint(directory: Path) -> Source:
    """The newest valid checkpoint of a --save directory, or the one that `directory` is. Raises CheckpointError."""
    if (directory / "manifest.json").is_file():
        manifest = manifests.load(directory)
        reader.verify(directory, manifest)
        return Source(directory, manifest)
    found = reader.newest(directory, Mesh.alone())
    if found is None:
        raise CheckpointError(f"load={str(directory)!r} holds no checkpoint; give the --save directory of a run")
    return Source(*found)


class Source:
    """Rectangles of the tensors of a verified checkpoint."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self._files: dict[str, Any] = {}

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
                    if stored.file not in self._files:
                        self._files[stored.file] = safe_open(self.folder / stored.file, framework="pt")
                    values = self._files[stored.file].get_slice(stored.key)[inside(both, stored.box)]
                    result[inside(both, box)] = values
        except (SafetensorError, OSError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{self.folder}: {name} cannot be read ({error}); use another one") from error
        return result


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
    directory: Path,
    items: Sequence[Item],
    shapes: dict[str, tuple[int, ...]],
    state: dict[str, Any],
    file_bytes: int = FILE_BYTES,
) -> Path:
    """A checkpoint of step 0 whose tensors `shapes` are filled by `items`. Raises CheckpointError and leaves nothing.

    No checkpoint may be there yet: a converted model is the begin of a run, not a step of one.
    """
    if any(directory.glob("iter_*")):
        raise CheckpointError(f"save={str(directory)!r} already holds checkpoints; give another directory")
    _check_cover(items, shapes)
    items = sorted(items, key=lambda item: -item.dtype.itemsize)
    final = writer.folder_of(directory, 0)
    part = final.with_name(f".{final.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        files = cut([item.bytes for item in items], file_bytes)
        for number, chosen in enumerate(files):
            _write_file(part, number, [items[i] for i in chosen], shapes)
        writer._commit(directory, part, final, state, 0, len(files))
    except OSError as error:
        raise CheckpointError(f"save={str(directory)!r}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
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


def _write_file(part: Path, number: int, items: Sequence[Item], shapes: dict[str, tuple[int, ...]]) -> None:
    """One file and the list that `writer` makes the manifest of."""
    plan: list[Planned] = []
    rows: list[list[object]] = []
    for item in items:
        for name, box in item.parts:
            key = f"{len(plan):06d}"
            plan.append(Planned(key, item.dtype, box.shape))
            rows.append([f"model/{name}", shapes[name], str(item.dtype)[6:], key, box.start, box.stop])
    file = f"rank-{number:05d}.safetensors"
    size, digest = write_tensors(part / file, plan, (values for item in items for values in item.values()))
    listing = {"file": file, "size": size, "sha256": digest, "rows": rows}
    (part / f"rank-{number:05d}.json").write_text(json.dumps(listing), encoding="utf-8")
