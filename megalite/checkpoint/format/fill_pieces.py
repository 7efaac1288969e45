"""Fill pieces from a checkpoint of any layout: which blocks hold something for them, and where it goes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from megalite.checkpoint.format.blocks import Want, read_blocks
from megalite.checkpoint.format.manifest import Manifest
from megalite.checkpoint.format.pieces import intersect, offset_in, rectangles
from megalite.checkpoint.format.tensor_file import Place, places
from megalite.checkpoint.storage.location import CheckpointError, Location
from megalite.checkpoint.storage.protocol import storage_of
from megalite.parallel.spec import Box, Piece


def fill_pieces(folder: Location, manifest: Manifest, pieces: Sequence[Piece], tell: str | None = None) -> None:
    """Write the checkpoint's values into `pieces`, which fit it, and check every block that a value comes from.

    A block whose hash is wrong is not used, but those before it were: after CheckpointError the pieces hold a mixture.
    """
    found: dict[str, dict[str, tuple[Box, list[tuple[Tensor, Box]]]]] = {}  # file -> key -> box, who wants of it
    for piece in pieces:
        for box, span in rectangles(piece.box, piece.span):
            target = piece.data.detach()[span.start : span.stop].view(box.shape)
            for part in manifest.tensors[piece.name].parts:
                if intersect(box, part.box) is not None:
                    _, targets = found.setdefault(part.file, {}).setdefault(part.key, (part.box, []))
                    targets.append((target, box))
    with ThreadPoolExecutor(storage_of(folder).readers, thread_name_prefix="megalite-load") as pool:
        headers = dict(zip(found, pool.map(lambda name: _header(folder / name), found), strict=True))
    wants: dict[tuple[str, int], list[Want]] = {}
    for name in sorted(found):
        path, block, header = folder / name, manifest.files[name].block, headers[name]
        last = 0
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
        for i in range(-(-min(place.begin for place in header.values()) // block)):
            wants.setdefault((name, i), [])  # the header, which said where everything is
    read_blocks(folder, manifest, sorted(wants), wants, tell)


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
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{path}: its header cannot be read ({error!r})") from None
