"""Loads as tests want them: all that a checkpoint holds, or pieces of one that is known."""

from __future__ import annotations

import torch

from megalite.checkpoint.format.manifest import Manifest
from megalite.checkpoint.offline import whole
from megalite.checkpoint.run import loader
from megalite.checkpoint.storage.location import Location, step_of
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import Piece

Found = tuple[Location, Manifest]


def newest(
    directory: str | Location, mesh: Mesh, step: int | None = None, *, first: str | Location | None = None
) -> Found | None:
    """The newest checkpoint that loads whole; collective."""

    def everything(folder: Location, manifest: Manifest) -> loader.Wanted:
        held = [(name, kept.shape, getattr(torch, kept.dtype)) for name, kept in manifest.tensors.items()]
        boxes = [(name, whole(shape), dtype) for name, shape, dtype in held]
        return loader.Wanted(
            [Piece(n, b.shape, b, range(b.numel), torch.empty(b.numel, dtype=dtype)) for n, b, dtype in boxes], True
        )

    return loader.load(directory, mesh, everything, step, first=first)


def fill(folder: Location, manifest: Manifest, pieces: list[Piece], mesh: Mesh, *, exact: bool = False) -> None:
    """From this checkpoint alone; collective."""
    found = loader.load(folder.parent, mesh, lambda *_: loader.Wanted(pieces, exact), step_of(folder.name))
    assert found is not None and found[1] == manifest
