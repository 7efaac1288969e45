"""Functions that save and load checkpoints in tests: complete ones, or some shards of a known one."""

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

SINGLE_PROCESS = Mesh.single_process()
Checkpoint = tuple[Location, Manifest]


def load_newest(
    directory: str | Location, mesh: Mesh, step: int | None = None, *, preferred: str | Location | None = None
) -> Checkpoint | None:
    """Load the newest checkpoint that can be loaded completely, and return it. Collective."""

    def plan_all_tensors(location: Location, manifest: Manifest) -> loader.LoadPlan:
        tensors = [(name, entry.shape, getattr(torch, entry.dtype)) for name, entry in manifest.tensors.items()]
        boxes = [(name, full_box(shape), dtype) for name, shape, dtype in tensors]
        pieces = [
            TensorShard(n, b.shape, b, range(b.numel), torch.empty(b.numel, dtype=dtype)) for n, b, dtype in boxes
        ]
        return loader.LoadPlan(pieces, True)

    return loader.load_newest(directory, mesh, plan_all_tensors, step, preferred=preferred)


def load_shards(
    location: Location, manifest: Manifest, pieces: list[TensorShard], mesh: Mesh, *, exact: bool = False
) -> None:
    """Load the shards from this checkpoint only. Collective."""
    checkpoint = loader.load_newest(
        location.parent, mesh, lambda *_: loader.LoadPlan(pieces, exact), step_from_name(location.name)
    )
    assert checkpoint is not None and checkpoint[1] == manifest


# ---- shards, and checkpoints of them

BACKGROUND = pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])


def full_shard(values: torch.Tensor, name: str = "model/w") -> TensorShard:
    box = full_box(tuple(values.shape))
    return TensorShard(name, tuple(values.shape), box, range(values.numel()), values.reshape(-1).clone())


def constant_shards(value: float, rows: int = 4, columns: int = 1 << 14, count: int = 3) -> list[TensorShard]:
    """Return the shards of `count` matrices whose elements are all `value`."""
    return [full_shard(torch.full((rows, columns), value), f"model/{n}") for n in range(count)]


def row_shard(mesh: Mesh, value: float, columns: int = 8) -> TensorShard:
    """Return this rank's row of a matrix with one row per rank, filled with `value`."""
    rank, world = mesh.world.rank, mesh.world.size
    box = Box((rank, 0), (rank + 1, columns))
    return TensorShard("model/w", (world, columns), box, range(columns), torch.full((columns,), value))


def save_steps(directory: str | Location | Path, *steps: int, **sizes: int) -> None:
    """Save a checkpoint of each step, with tensors filled with the step's number."""
    for step in steps:
        saver.save(directory, step, constant_shards(float(step), **sizes), {"step": step}, SINGLE_PROCESS)


def invert_bit(file: Path, bit: int = -1) -> None:
    """Invert a bit of a file, counted modulo the size of the file."""
    content = bytearray(file.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    file.write_bytes(content)


def replace_manifest(directory: Path, manifest: object) -> None:
    """Replace the manifest of a checkpoint, and update its checksum."""
    (directory / "manifest.json").write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))
    (directory / "COMPLETE").write_text(sha256((directory / "manifest.json").read_bytes()).hexdigest())
