"""Checkpoints as data, without ranks or a model: read any rectangle, compare, write others. For tools and conversion.

Reading: whatever layout wrote it, a rectangle is filled from the stored boxes that meet it, and the hash of every block
is checked before a value of it counts. Writing: tensor by tensor, committed as a run's checkpoint is
(format/writer.py). One tensor is in memory at a time, so a laptop can do it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.format import reader, writer
from megalite.checkpoint.format.manifest import Manifest
from megalite.checkpoint.format.tensor_file import Planned, Row, flat, header_of
from megalite.checkpoint.progress import show
from megalite.checkpoint.storage.location import CheckpointError, Location, parse, step_of
from megalite.checkpoint.storage.protocol import folder_of, storage_of
from megalite.parallel.spec import Box, Piece


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


class Checkpoint:
    """Rectangles of the tensors of one checkpoint. Methods raise CheckpointError."""

    def __init__(self, folder: Location, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self._scratch = reader.Scratch()

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
        box = whole(shape) if box is None else box
        if len(shape) != len(box.shape) or any(b > n for b, n in zip(box.stop, shape, strict=True)):
            raise CheckpointError(f"{self.folder}: {name} has shape {shape}, which ends before {box.stop}")
        values = torch.empty(box.shape, dtype=self.dtype(name))
        self.fill([Piece(name, shape, box, range(box.numel), values.view(-1))])
        return values

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Write the values of `pieces` into their data, in the data's dtype."""
        if lines := reader.differences(self.manifest, pieces):
            raise CheckpointError(f"{self.folder} does not fit this model:\n  " + "\n  ".join(lines))
        try:
            reader.fill_pieces(self.folder, self.manifest, pieces, scratch=self._scratch)
        except OSError as error:  # it was deleted meanwhile
            raise CheckpointError(f"{self.folder}: cannot be read ({error}); use another checkpoint") from error


def open_checkpoint(path: str | Location, *, verified: bool = False) -> Checkpoint:
    """The checkpoint `path`, or the newest in it that has a whole manifest; with `verified` also the right contents,
    all of which are then read. Raises CheckpointError."""
    path = parse(path)
    storage = storage_of(path)

    def opened(folder: Location) -> Checkpoint:
        manifest = manifests.load(folder)
        if verified:
            reader.verify(folder, manifest)
        return Checkpoint(folder, manifest)

    if "manifest.json" in storage.entries(path):
        return opened(path)
    reasons = []
    for folder in (folder_of(path, step) for step in reversed(storage.steps_in(path))):
        try:
            return opened(folder)
        except CheckpointError as error:
            reasons.append(str(error))
            if verified:
                show(f"skipping {folder}: {error}")
    hint = "give a --save directory, or one checkpoint in it"
    raise CheckpointError(f"{path} holds no checkpoint that can be read; {hint}. {' '.join(reasons)}".strip())


# ---- comparing


@dataclass(frozen=True)
class Difference:
    """How one tensor differs from another. `note`: in its shape, its dtype, or in being there at all. `count` elements
    differ, the first at `index`, where it is `here` and `there`, by at most `largest`."""

    name: str
    note: str = ""
    index: tuple[int, ...] | None = None
    here: float = 0.0
    there: float = 0.0
    largest: float = 0.0
    count: int = 0


def difference(name: str, here: Tensor, there: Tensor) -> Difference | None:
    """Of two tensors of one shape: in any bit, or where their dtypes differ, in any value. NaN equals NaN then."""
    note = "" if here.dtype == there.dtype else f"{str(here.dtype)[6:]} and {str(there.dtype)[6:]}"
    if note:
        x, y = here.double(), there.double()
        far = ~((x == y) | (x.isnan() & y.isnan()))
    else:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[here.dtype.itemsize]
        far = here.contiguous().view(bits) != there.contiguous().view(bits)
    if not far.any():
        return Difference(name, note) if note else None
    first = far.reshape(-1).to(torch.uint8).argmax()
    index = tuple(int(i) for i in torch.unravel_index(first, here.shape)) if here.dim() else ()
    x, y = here[far].double(), there[far].double()
    largest = float((x - y).abs().nan_to_num(math.inf, math.inf).max())
    return Difference(name, note, index, float(x[0]), float(y[0]), largest, len(x))


def compare(a: Checkpoint, b: Checkpoint) -> Iterator[Difference]:
    """What differs between two checkpoints, tensor by tensor."""
    mine, theirs = a.manifest.tensors, b.manifest.tensors
    for name in sorted({*mine, *theirs}):
        if name not in theirs or name not in mine:
            yield Difference(name, f"only in the {'first' if name in mine else 'second'}")
        elif mine[name].shape != theirs[name].shape:
            yield Difference(name, f"shape {mine[name].shape} and {theirs[name].shape}")
        elif (found := difference(name, a.read(name), b.read(name))) is not None:
            yield found


# ---- writing


@dataclass(frozen=True)
class Item:
    """Something that is made at once and gives some rectangles: `parts` (name, box) and, in that order, `values()`."""

    dtype: torch.dtype
    parts: Sequence[tuple[str, Box]]
    values: Callable[[], Iterable[Tensor]]

    @property
    def bytes(self) -> int:
        return sum(box.numel for _, box in self.parts) * self.dtype.itemsize


def write_checkpoint(
    folder: Location, files: Sequence[Sequence[Item]], shapes: dict[str, tuple[int, ...]], state: dict[str, Any]
) -> None:
    """A new checkpoint whose tensors `shapes` are filled by the items of `files`; each is made when its turn comes.

    `folder`: its name is iter_NNNNNNN, and it must not exist. Raises CheckpointError, and leaves nothing.
    """
    storage, step = storage_of(folder), step_of(folder.name)
    if step is None:
        raise CheckpointError(f"{folder}: the name of a checkpoint is iter_ and its step, as in iter_0000500")
    if step in storage.steps_in(folder.parent):
        raise CheckpointError(f"{folder} exists; give another folder")
    _check_cover([item for items in files for item in items], shapes)
    part = storage.part_of(folder)
    try:
        storage.begin(part)
        for number, items in enumerate(files):
            _write_file(part, number, sorted(items, key=lambda item: -item.dtype.itemsize), shapes)
        writer.commit(part, folder, state, step, len(files))
    except BaseException as error:
        writer.abandon(part)
        if isinstance(error, OSError):
            raise CheckpointError(f"{folder}: cannot be written ({error}); give a writable folder") from error
        raise


def _check_cover(items: Sequence[Item], shapes: dict[str, tuple[int, ...]]) -> None:
    """Every element once, and one dtype per tensor."""
    dtypes: dict[str, torch.dtype] = {}
    held = dict.fromkeys(shapes, 0)
    for item in items:
        for name, box in item.parts:
            if dtypes.setdefault(name, item.dtype) != item.dtype:
                raise CheckpointError(f"{name}: its parts are {dtypes[name]} and {item.dtype}; convert to one dtype")
            held[name] += box.numel
    for name, shape in shapes.items():
        if held[name] != math.prod(shape):
            raise CheckpointError(
                f"{name}: {held[name]} of {math.prod(shape)} elements were found; a part is missing or double"
            )


def _write_file(part: Location, number: int, items: Sequence[Item], shapes: dict[str, tuple[int, ...]]) -> None:
    """One file, and the list that `writer` makes the manifest of."""
    plan: list[Planned] = []
    rows: list[Row] = []
    for item in items:
        for name, box in item.parts:
            plan.append(Planned(f"{len(plan):06d}", item.dtype, box.shape))
            rows.append(Row(name, shapes[name], str(item.dtype)[6:], plan[-1].key, box))
    values = (one for item in items for one in item.values())
    writer.write_rank(part, number, header_of(plan), rows, flat(plan, values))


def _shares(items: Sequence[Item], files: int) -> list[list[Item]]:
    """Consecutive items, cut where their bytes pass the next multiple of total / files."""
    shares: list[list[Item]] = [[] for _ in range(files)]
    total, done = max(1, sum(item.bytes for item in items)), 0
    for item in items:
        shares[min(files - 1, (done + item.bytes // 2) * files // total)].append(item)
        done += item.bytes
    return shares


def _write_whole(
    folder: Location, like: Checkpoint, names: Sequence[str], make: Callable[[str], Tensor], state: Any, files: int
) -> None:
    """The tensors `names` of `like`, with the values that `make` gives."""
    shapes = {name: like.shape(name) for name in names}
    items = [Item(like.dtype(n), [(n, whole(shapes[n]))], lambda n=n: [make(n)]) for n in names]
    write_checkpoint(folder, _shares(items, files), shapes, state)


def reshard(source: Checkpoint, folder: Location, files: int, kinds: Sequence[str] | None = None) -> None:
    """The same checkpoint in `files` files. `kinds`: only tensors named KIND/..., as "model" to drop the optimizer."""
    names = [name for name in source.manifest.tensors if kinds is None or name.partition("/")[0] in kinds]
    _write_whole(folder, source, names, source.read, source.manifest.state, files)


def average(sources: Sequence[Checkpoint], folder: Location, files: int = 1) -> None:
    """The mean of the weights of several checkpoints (arXiv:1803.05407), summed in fp64 from main weights where they
    are stored. No optimizer state: the result is for --finetune, --no-load-optim, evaluation and conversion."""
    newest = max(sources, key=lambda s: int(s.manifest.state.get("progress", {}).get("step", 0)))
    weights = {name: w.shape for name, w in newest.manifest.tensors.items() if name.startswith("model/")}
    for source in sources:
        here = {name: w.shape for name, w in source.manifest.tensors.items() if name.startswith("model/")}
        wrong = sorted(n for n in {*here, *weights} if n not in weights or here.get(n) != weights[n])
        if wrong:
            both = f"{source.folder} and {newest.folder}"
            raise CheckpointError(f"{both} are of different models: {', '.join(wrong[:5])}; average those of one")

    def mean(name: str) -> Tensor:
        main = name.replace("model/", "optimizer.main/", 1)
        total = torch.zeros(weights[name], dtype=torch.float64)
        for source in sources:
            total += source.read(main if main in source.manifest.tensors else name)
        return (total / len(sources)).to(newest.dtype(name))

    state = {**newest.manifest.state, "averaged": [source.folder.name for source in sources]}
    _write_whole(folder, newest, list(weights), mean, state, files)
