"""Read one checkpoint under any layout: check all of it, or fill pieces from it.

`fill_pieces` finds which blocks of which files hold something for the pieces, and where it goes; blocks.py reads each
of them once and checks its hash before a value of it counts. Which checkpoint of a directory to read is not decided
here (run/loader.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor

from megalite.checkpoint.format.blocks import Want, read_blocks
from megalite.checkpoint.format.manifest import Manifest, check_sizes
from megalite.checkpoint.format.pieces import views
from megalite.checkpoint.format.tensor_file import Place, places
from megalite.checkpoint.storage.location import CheckpointError, Location
from megalite.checkpoint.storage.protocol import storage_of
from megalite.parallel.rectangles import intersect, offset_in
from megalite.parallel.spec import Box, Piece


def verify(folder: Location, manifest: Manifest, tell: str | None = None) -> None:
    """Every file has its size, and every block its hash. Raises CheckpointError that names the first file, and the
    tensors in the block, that are damaged. `tell`: as in read_blocks."""
    check_sizes(folder, manifest)
    blocks = [(name, i) for name, stamp in sorted(manifest.files.items()) for i in range(len(stamp.digests))]
    read_blocks(folder, manifest, blocks, tell=tell)


def differences(manifest: Manifest, pieces: Sequence[Piece], exact: bool = False) -> list[str]:
    """What keeps `pieces` from being filled, one line each; `exact`: another dtype too, which is else converted."""
    lines = []
    for piece in {p.name: p for p in pieces}.values():
        stored, dtype = manifest.tensors.get(piece.name), str(piece.data.dtype)[6:]
        if stored is None:
            lines.append(f"{piece.name}: shape {piece.shape} here, not in the checkpoint")
        elif stored.shape != piece.shape:
            lines.append(f"{piece.name}: shape {piece.shape} here, {stored.shape} in the checkpoint")
        elif exact and stored.dtype != dtype:
            lines.append(f"{piece.name}: {dtype} here, {stored.dtype} in the checkpoint")
    return lines


@dataclass(frozen=True)
class Scratch:
    """What many reads of one checkpoint share: the headers of its files, checked, and the buffers of read_blocks."""

    headers: dict[str, dict[str, Place]] = field(default_factory=dict)
    buffers: list[Tensor] = field(default_factory=list)


def fill_pieces(
    folder: Location,
    manifest: Manifest,
    pieces: Sequence[Piece],
    tell: str | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Write the checkpoint's values into `pieces`, which fit it, and check every block that a value comes from.

    A block whose hash is wrong is not used, but those before it were: after CheckpointError the pieces hold a mixture.
    `scratch`: what calls before have read and made for this checkpoint; this one adds to it.
    """
    scratch = Scratch() if scratch is None else scratch
    headers = scratch.headers
    found: dict[str, dict[str, tuple[Box, list[tuple[Tensor, Box]]]]] = {}  # file -> key -> box, who wants of it
    for piece in pieces:
        for box, target in views(piece):
            for part in manifest.tensors[piece.name].parts:
                if intersect(box, part.box) is not None:
                    _, targets = found.setdefault(part.file, {}).setdefault(part.key, (part.box, []))
                    targets.append((target, box))
    storage = storage_of(folder)
    with storage.reading(folder):
        new = [name for name in found if name not in headers]
        with ThreadPoolExecutor(storage.readers, thread_name_prefix="megalite-load") as pool:
            read = dict(zip(new, pool.map(lambda name: _header(folder / name), new), strict=True))
        wants: dict[tuple[str, int], list[Want]] = {}
        for name in sorted(found):
            path, block = folder / name, manifest.files[name].block
            header, last = read[name] if name in read else headers[name], 0
            for key, (stored, targets) in sorted(
                found[name].items(), key=lambda x: header[x[0]].begin if x[0] in header else 0
            ):
                place = header.get(key)
                if place is None or place.shape != stored.shape or place.begin < last:
                    raise CheckpointError(f"{path}: its header and the manifest differ about {key}")
                last = place.end
                want = Want(place, stored, tuple(targets))
                for i in sorted({i for target in targets for i in _blocks_of(target[1], stored, place, block)}):
                    wants.setdefault((name, i), []).append(want)
            for i in range(-(-min(place.begin for place in header.values()) // block) if name in read else 0):
                wants.setdefault((name, i), [])  # the header, which said where everything is
        read_blocks(folder, manifest, sorted(wants), wants, tell, scratch.buffers)
    headers.update(read)


def _blocks_of(box: Box, stored: Box, place: Place, block: int) -> range:
    """Those between the first and the last byte that `box` wants of `stored`."""
    both = intersect(box, stored)
    assert both is not None
    first, last = offset_in(stored, both.start), offset_in(stored, tuple(n - 1 for n in both.stop))
    item = place.dtype.itemsize
    return range((place.begin + first * item) // block, -(-(place.begin + (last + 1) * item) // block))


def _header(path: Location) -> dict[str, Place]:
    try:
        return places(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: its header cannot be read ({error!r})") from None
