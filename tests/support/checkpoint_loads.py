"""Saving and loading checkpoints in tests: complete ones, or given shards of a known one."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.format.manifest import Manifest
from megalite.checkpoint.manager import loader, saver
from megalite.checkpoint.offline import full_box
from megalite.checkpoint.storage.location import Location, step_from_name
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import Box, TensorShard

ALONE = Mesh.single_process()
Found = tuple[Location, Manifest]


def newest(
    directory: str | Location, mesh: Mesh, step: int | None = None, *, first: str | Location | None = None
) -> Found | None:
    """Find the newest checkpoint that loads completely. Collective."""

    def everything(folder: Location, manifest: Manifest) -> loader.LoadPlan:
        held = [(name, kept.shape, getattr(torch, kept.dtype)) for name, kept in manifest.tensors.items()]
        boxes = [(name, full_box(shape), dtype) for name, shape, dtype in held]
        pieces = [
            TensorShard(n, b.shape, b, range(b.numel), torch.empty(b.numel, dtype=dtype)) for n, b, dtype in boxes
        ]
        return loader.LoadPlan(pieces, True)

    return loader.load_newest(directory, mesh, everything, step, preferred=first)


def fill(folder: Location, manifest: Manifest, pieces: list[TensorShard], mesh: Mesh, *, exact: bool = False) -> None:
    """Load the shards from this checkpoint only. Collective."""
    found = loader.load_newest(
        folder.parent, mesh, lambda *_: loader.LoadPlan(pieces, exact), step_from_name(folder.name)
    )
    assert found is not None and found[1] == manifest


# ---- what is saved

BACKGROUND = pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])


def whole_piece(values: torch.Tensor, name: str = "model/w") -> TensorShard:
    box = full_box(tuple(values.shape))
    return TensorShard(name, tuple(values.shape), box, range(values.numel()), values.reshape(-1).clone())


def filled(value: float, rows: int = 4, columns: int = 1 << 14, count: int = 3) -> list[TensorShard]:
    """Return shards of matrices that are filled with one value."""
    return [whole_piece(torch.full((rows, columns), value), f"model/{n}") for n in range(count)]


def row(mesh: Mesh, value: float, columns: int = 8) -> TensorShard:
    """Return row `rank` of a matrix with `world` rows, filled with `value`."""
    rank, world = mesh.world.rank, mesh.world.size
    box = Box((rank, 0), (rank + 1, columns))
    return TensorShard("model/w", (world, columns), box, range(columns), torch.full((columns,), value))


def save_steps(directory: str | Location | Path, *steps: int, **sizes: int) -> None:
    """Save a checkpoint for each step, filled with the step's number."""
    for step in steps:
        saver.save(directory, step, filled(float(step), **sizes), {"step": step}, ALONE)


def flip(file: Path, bit: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    file.write_bytes(content)


def reseal(folder: Path, data: object) -> None:
    """Write another manifest, with a matching checksum."""
    (folder / "manifest.json").write_text(data if isinstance(data, str) else json.dumps(data))
    (folder / "COMPLETE").write_text(sha256((folder / "manifest.json").read_bytes()).hexdigest())
