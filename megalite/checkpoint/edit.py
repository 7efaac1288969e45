"""Checkpoints as data, without ranks or a model: read whole tensors, compare, write others. For tools.

One tensor is in memory at a time, so a laptop can do it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.format import reader, tensor_file, writer
from megalite.checkpoint.format.manifest import Manifest, Whole
from megalite.checkpoint.storage.location import CheckpointError, Location, parse, step_of
from megalite.checkpoint.storage.protocol import folder_of, storage_of
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import Box, Piece

_ALONE = Mesh.alone()


def dtype_of(whole: Whole) -> torch.dtype:
    dtype = getattr(torch, whole.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"dtype {whole.dtype!r} is unknown; use another checkpoint")
    return dtype


def read_whole(folder: Location, manifest: Manifest, name: str) -> Tensor:
    """One tensor of the checkpoint, on the CPU. Raises CheckpointError."""
    whole = manifest.tensors[name]
    values = torch.empty(math.prod(whole.shape), dtype=dtype_of(whole))
    box = Box((0,) * len(whole.shape), whole.shape)
    reader.fill(folder, manifest, [Piece(name, whole.shape, box, range(box.numel), values)], _ALONE, exact=True)
    return values.view(whole.shape)


def open_one(path: str | Location) -> tuple[Any, Manifest]:
    """`path` itself, or the newest checkpoint in it whose manifest is whole; contents are not hashed."""
    path = parse(path)
    storage = storage_of(path)
    if "manifest.json" in storage.entries(path):
        return path, manifests.load(path)
    reasons = []
    for step in reversed(storage.steps_in(path)):
        folder = folder_of(path, step)
        try:
            return folder, manifests.load(folder)
        except CheckpointError as error:
            reasons.append(str(error))
    hint = "give a --save directory, or one checkpoint in it"
    raise CheckpointError(f"{path}: no checkpoint that can be read; {hint}. {' '.join(reasons)}".strip())


@dataclass(frozen=True)
class Difference:
    """How one tensor differs: `what` for people; `first` index and both values there; largest absolute difference."""

    name: str
    what: str
    first: tuple[int, ...] | None = None
    here: float = 0.0
    there: float = 0.0
    largest: float = 0.0
    count: int = 0


def compare(a: tuple[Location, Manifest], b: tuple[Location, Manifest]) -> Iterator[Difference]:
    """What differs between two checkpoints, tensor by tensor. NaN equals NaN."""
    mine, theirs = a[1].tensors, b[1].tensors
    for name in sorted({*mine, *theirs}):
        if name not in theirs or name not in mine:
            yield Difference(name, f"only in the {'first' if name in mine else 'second'}")
        elif mine[name].shape != theirs[name].shape:
            yield Difference(name, f"shape {mine[name].shape} and {theirs[name].shape}")
        else:
            x, y = read_whole(*a, name), read_whole(*b, name)
            note = "" if x.dtype == y.dtype else f"{mine[name].dtype} and {theirs[name].dtype}"
            x, y = x.double(), y.double()
            far = ~((x == y) | (x.isnan() & y.isnan()))
            if far.any():
                flat = int(far.reshape(-1).to(torch.uint8).argmax())
                first = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), x.shape)) if x.dim() else ()
                largest = float((x - y).abs().nan_to_num(math.inf).where(far, 0).max())
                yield Difference(name, note, first, float(x[first]), float(y[first]), largest, int(far.sum()))
            elif note:
                yield Difference(name, note)


Source = Callable[[], Tensor]


def write_checkpoint(
    folder: Location,
    tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype, Source]],
    state: dict[str, Any],
    files: int,
) -> None:
    """A new checkpoint from (name, shape, dtype, what makes it) in `files` files of about the same size. Each tensor is
    made when its turn comes. `folder`: its name is iter_NNNNNNN; it must not exist. Raises CheckpointError, OSError."""
    storage, step = storage_of(folder), step_of(folder.name)
    if step is None:
        raise CheckpointError(f"{folder}: the name of a checkpoint is iter_ and its step, as in iter_0000500")
    if step in storage.steps_in(folder.parent):
        raise CheckpointError(f"{folder} exists; give another folder")
    part = storage.part_of(folder)
    storage.begin(part)
    try:
        for rank, some in enumerate(_shares(tensors, files)):
            pieces = {}
            for name, shape, dtype, source in some:
                box = Box((0,) * len(shape), shape)
                shaped = torch.empty(0, dtype=dtype)  # of which the plan reads the dtype
                pieces[name] = (Piece(name, shape, box, range(box.numel), shaped), source)
            header, rows, ordered = tensor_file.plan([piece for piece, _ in pieces.values()])

            def made(ordered: list[Piece] = ordered, pieces: dict[str, Any] = pieces) -> Iterator[Tensor]:
                for piece in ordered:
                    values = pieces[piece.name][1]()
                    if tuple(values.shape) != piece.shape or values.dtype != piece.data.dtype:
                        raise CheckpointError(f"{piece.name}: made {tuple(values.shape)}, {piece.shape} wanted")
                    yield values.contiguous().reshape(-1)

            writer.write_rank(part, rank, header, rows, made())
        writer.commit(part, folder, state, step, files)
    except BaseException:
        writer.abandon(part)
        raise


def _shares(tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype, Source]], files: int) -> list[list[Any]]:
    """Consecutive tensors, cut where their bytes pass the next multiple of total / files."""
    sizes = [math.prod(shape) * torch.empty((), dtype=dtype).element_size() for _, shape, dtype, _ in tensors]
    shares: list[list[Any]] = [[] for _ in range(files)]
    total, done = max(1, sum(sizes)), 0
    for entry, size in zip(tensors, sizes, strict=True):
        shares[min(files - 1, (done + size // 2) * files // total)].append(entry)
        done += size
    return shares


def reshard(
    source: tuple[Location, Manifest], folder: Location, files: int, kinds: Sequence[str] | None = None
) -> None:
    """The same checkpoint in `files` files. `kinds`: only tensors named KIND/..., as "model" to drop the optimizer."""
    path, manifest = source
    names = [name for name in manifest.tensors if kinds is None or name.partition("/")[0] in kinds]
    entries = [
        (name, manifest.tensors[name].shape, dtype_of(manifest.tensors[name]), _reader(path, manifest, name))
        for name in names
    ]
    write_checkpoint(folder, entries, manifest.state, files)


def _reader(path: Location, manifest: Manifest, name: str) -> Source:
    return lambda: read_whole(path, manifest, name)


def average(sources: Sequence[tuple[Location, Manifest]], folder: Location, files: int = 1) -> None:
    """The mean of the weights of several checkpoints (arXiv:1803.05407), summed in fp64 from main weights where they
    are stored. No optimizer state: the result is for --finetune, --no-load-optim, evaluation and conversion."""
    newest = max(sources, key=lambda s: int(s[1].state.get("progress", {}).get("step", 0)))
    weights = {name: whole for name, whole in newest[1].tensors.items() if name.startswith("model/")}
    for path, manifest in sources:
        here = {n: w.shape for n, w in manifest.tensors.items() if n.startswith("model/")}
        wrong = sorted(n for n in {*here, *weights} if n not in weights or here.get(n) != weights[n].shape)
        if wrong:
            raise CheckpointError(f"{path} and {newest[0]} are of different models: {', '.join(wrong[:5])}")

    def mean(name: str) -> Source:
        def make() -> Tensor:
            total = torch.zeros(weights[name].shape, dtype=torch.float64)
            for path, manifest in sources:
                main = name.replace("model/", "optimizer.main/", 1)
                total += read_whole(path, manifest, main if main in manifest.tensors else name)
            return (total / len(sources)).to(dtype_of(weights[name]))

        return make

    entries = [(name, whole.shape, dtype_of(whole), mean(name)) for name, whole in weights.items()]
    state = {**newest[1].state, "averaged": [path.name for path, _ in sources]}
    write_checkpoint(folder, entries, state, files)
