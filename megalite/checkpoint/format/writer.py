"""Write one checkpoint, file by file, then make it exist.

    .iter_0000500.part/ rank-00000.safetensors + its list   `write_rank`: synced, hashed while it is written
    manifest.json, then COMPLETE (the manifest's sha256)    `commit`: both synced, then the folder
    rename to iter_0000500/, sync the parent                from here on it exists
    latest_checkpointed_iteration.txt                       replaced atomically

Behind a URL nothing can be renamed: the files are written to iter_0000500/ itself, and COMPLETE makes it exist. After a
kill at any moment the checkpoint before is the newest. Files are streamed (tensor_file.py). How the ranks of a run
agree on all this is in run/saver.py.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from megalite.checkpoint.format import tensor_file
from megalite.checkpoint.format.hashing import Stamp
from megalite.checkpoint.format.manifest import Manifest, Stored, Whole, dump, read_stamp
from megalite.checkpoint.format.tensor_file import Row
from megalite.checkpoint.storage.location import CheckpointError, Location
from megalite.checkpoint.storage.protocol import TRACKER, storage_of
from megalite.config.console import complain
from megalite.config.faults import fault
from megalite.parallel.spec import Box


def abandon(part: Location) -> None:
    """Delete the remains of a failed save, if possible: the error that made it fail matters more."""
    with contextlib.suppress(OSError):
        storage_of(part).discard(part)


def list_of(rank: int) -> str:
    """Name of a rank's list of what it has written, which exists once all of that is on disk."""
    return f"rank-{rank:05d}.json"


def write_rank(part: Location, rank: int, rows: Sequence[Row], data: Iterable[Tensor]) -> None:
    """Write this rank's file, then its list. `rows` and the order of `data` are those of tensor_file.plan."""
    name = f"rank-{rank:05d}.safetensors"
    stamp = tensor_file.write(part / name, rows, data)
    listing = {
        "file": name,
        "stamp": [stamp.size, stamp.name, stamp.block, stamp.digests],
        "rows": [[r.name, r.whole, str(r.dtype)[6:], r.key, r.box.start, r.box.stop] for r in rows],
    }
    storage_of(part).put(part / list_of(rank), json.dumps(listing), sync=False)  # swept after a power cut


def commit(part: Location, final: Location, state: dict[str, Any], step: int, world: int) -> None:
    """Make the files of `world` ranks a checkpoint."""
    storage = storage_of(part)
    files: dict[str, Stamp] = {}
    listed: dict[str, tuple[tuple[int, ...], str, list[Stored]]] = {}
    for rank in range(world):
        listing = json.loads(storage.read(part / list_of(rank)))
        files[listing["file"]] = read_stamp(listing["stamp"])
        for name, shape, dtype, key, start, stop in listing["rows"]:
            _, _, parts = listed.setdefault(name, (tuple(shape), dtype, []))
            parts.append(Stored(listing["file"], key, Box(tuple(start), tuple(stop))))
        storage.delete(part / list_of(rank))
    sizes = storage.entries(part)
    for name, stamp in files.items():
        if sizes.get(name) != stamp.size:
            raise CheckpointError(f"{part / name}: {stamp.size} bytes were written, {sizes.get(name, 0)} are there")
    tensors = {name: Whole(shape, dtype, tuple(parts)) for name, (shape, dtype, parts) in listed.items()}
    text = dump(Manifest(tensors, files, state))
    storage.put(part / "manifest.json", text, sync=False)
    storage.put(part / "COMPLETE", hashlib.sha256(text.encode()).hexdigest() + "\n", sync=False)
    fault("ckpt.before_commit", 0, step)
    storage.publish(part, final)
    fault("ckpt.after_commit", 0, step)
    name_newest(final.parent, step)


def name_newest(directory: Location, step: int) -> None:
    """Write the tracker file, for other programs. The checkpoint exists without it, so a failure only warns."""
    try:
        storage_of(directory).put(directory / TRACKER, f"{step}\n", sync=False)
    except OSError as error:
        reason = f"{error.strerror or error}; it does not name step {step}, whose checkpoint is complete"
        complain(f"WARNING: {directory / TRACKER}: {reason}")
