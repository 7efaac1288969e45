"""Read one checkpoint under any layout: check all of it, or fill pieces from it.

`fill_pieces` finds the blocks that hold something for the pieces; blocks.py reads each of them once and checks its hash
before a value of it counts. Which checkpoint of a directory to read is decided in run/loader.py.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor

from megalite.checkpoint.format.blocks import Want, read_blocks
from megalite.checkpoint.format.manifest import Manifest, check_sizes
from megalite.checkpoint.format.tensor_file import Place, places, views
from megalite.checkpoint.storage.location import CheckpointError, Location
from megalite.checkpoint.storage.protocol import storage_of
from megalite.parallel.rectangles import intersect, offset_in
from megalite.parallel.spec import Box, Piece


def verify(folder: Location, manifest: Manifest, tell: str | None = None) -> None:
    """Check the size of every file and the hash of every block. Raises CheckpointError with the first damaged file and
    the tensors in the block. `tell`: as in read_blocks."""
    check_sizes(folder, manifest)
    blocks = [(name, i) for name, stamp in sorted(manifest.files.items()) for i in range(len(stamp.digests))]
    read_blocks(folder, manifest, blocks, tell=tell)


def differences(manifest: Manifest, pieces: Sequence[Piece], exact: bool = False) -> list[str]:
    """The reasons why `pieces` cannot be filled, one line each. `exact`: another dtype, else converted, is one."""
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
    """Shared by many reads of one checkpoint: the checked headers of its files, and the buffers of read_blocks."""

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

    A block with a wrong hash is not used, but those before it were: after CheckpointError the pieces hold a mixture.
    `scratch`: shared with other calls for this checkpoint.
    """
    scratch = Scratch() if scratch is None else scratch
    wanted: dict[str, dict[str, tuple[Box, list[tuple[Tensor, Box]]]]] = {}  # file -> key -> box, its targets
    for piece in pieces:
        for box, target in views(piece):
            for part in manifest.tensors[piece.name].parts:
                if intersect(box, part.box) is not None:
                    _, targets = wanted.setdefault(part.file, {}).setdefault(part.key, (part.box, []))
                    targets.append((target, box))
    storage = storage_of(folder)
    with storage.reading(folder):
        new = [name for name in wanted if name not in scratch.headers]
        with ThreadPoolExecutor(storage.readers, thread_name_prefix="megalite-load") as pool:
            read = dict(zip(new, pool.map(lambda name: _header(folder / name), new), strict=True))
        headers = scratch.headers | read
        wants: dict[tuple[str, int], list[Want]] = {}
        for name in sorted(wanted):
            block, header, last = manifest.files[name].block, headers[name], 0
            begins = {key: header[key].begin if key in header else 0 for key in wanted[name]}
            for key in sorted(begins, key=lambda key: begins[key]):
                (stored, targets), place = wanted[name][key], header.get(key)
                if place is None or place.shape != stored.shape or place.begin < last:
                    raise CheckpointError(f"{folder / name}: its header and the manifest differ about {key}")
                last = place.end
                want = Want(place, stored, tuple(targets))
                for i in sorted({i for target in targets for i in _blocks_of(target[1], stored, place, block)}):
                    wants.setdefault((name, i), []).append(want)
            for i in range(-(-min(place.begin for place in header.values()) // block) if name in read else 0):
                wants.setdefault((name, i), [])  # to check the header, too
        read_blocks(folder, manifest, sorted(wants), wants, tell, scratch.buffers)
    scratch.headers.update(read)


def _blocks_of(box: Box, stored: Box, place: Place, block: int) -> range:
    """The blocks from the first to the last byte that `box` wants of `stored`."""
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
