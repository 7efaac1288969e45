"""A checkpoint of step 0 made of foreign weights (megalite/interop/convert.py), tensor by tensor.

The rows that pad their vocabulary are left out; ours is stored without padding.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.format.tensor_file import cut
from megalite.checkpoint.offline import Item, write_checkpoint
from megalite.checkpoint.storage.location import Location, folder_of
from megalite.checkpoint.storage.protocol import steps_in
from megalite.interop.convert import Foreign, Specs, split
from megalite.parallel.spec import Box, ParamSpec, intersect

FILE_BYTES = 4 << 30  # of a checkpoint that is made here


def write_import(
    directory: Path, foreign: Sequence[Foreign], specs: Specs, state: dict[str, Any], file_bytes: int = FILE_BYTES
) -> Location:
    """A checkpoint of step 0 from foreign weights; no optimizer states. Raises CheckpointError.

    No checkpoint may exist there yet: a converted model is the start of a run, not a step of one.
    """
    if steps_in(directory):
        raise CheckpointError(f"save={str(directory)!r} already holds checkpoints; give another directory")
    items = []
    for one in foreign:
        boxes = [(spec.stored_name, unpadded(box, specs[spec.name])) for spec, box in one.recipe.parts]
        if parts := [(name, box) for name, box in boxes if box is not None]:
            items.append(Item(one.dtype, parts, lambda one=one: (values for _, _, values in kept(one, specs))))
    files = [[items[i] for i in chosen] for chosen in cut([item.bytes for item in items], file_bytes)]
    folder = folder_of(directory, 0)
    write_checkpoint(folder, files, {spec.stored_name: spec.stored_shape for spec in specs.values()}, state)
    return folder


def kept(one: Foreign, specs: Specs) -> Iterator[tuple[ParamSpec, Box, Tensor]]:
    """Our rectangles and their values in a foreign tensor, without rows that `specs` do not store."""
    for spec, box, values in split(one.recipe, one.read()):
        kept = unpadded(box, specs[spec.name])
        if kept is not None:
            yield spec, kept, values[: kept.shape[0]]


def unpadded(box: Box, spec: ParamSpec) -> Box | None:
    """The part of a rectangle that a checkpoint stores: no rows that pad the vocabulary. None where it is empty."""
    return intersect(box, Box((0,) * len(box.start), spec.stored_shape))
