"""A checkpoint, and its manifest: of every whole tensor shape, dtype and which file holds which box; hashes of files.

    .iter_0000500.part/ rank-00000.safetensors + its list   `write_rank`: synced, hashed while it is written
    manifest.json, then COMPLETE (the manifest's sha256)    `commit`: both synced, then the folder
    rename to iter_0000500/, sync the parent                from here on it exists
    latest_checkpointed_iteration.txt                       replaced atomically

Behind a URL nothing can be renamed: the files are written to iter_0000500/ itself, and COMPLETE makes it exist. After a
kill at any moment the checkpoint before is the newest. Files are streamed (tensor_file.py). How the ranks of a run
agree on all this is in run/saver.py.

All is checked by `load`: names of files stay in the directory, boxes in their tensors, which they cover exactly once.
"""

import contextlib
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megalite.checkpoint.format import safetensors_file as tensor_file
from megalite.checkpoint.format.safetensors_file import FileChecksum, WriteItem
from megalite.checkpoint.storage.location import CheckpointError, Location, checkpoint_dir
from megalite.checkpoint.storage.storage import TRACKER, storage_of
from megalite.common.fault_injection import inject_fault
from megalite.config.console import print_err
from megalite.parallel.spec import Box

FORMAT = 2
MODEL_PREFIXES = ("model/", "state/")  # begins of names: parameters, and state of the model that is none
_FILE = re.compile(r"rank-\d{5}\.safetensors")
_LARGEST = 1 << 30  # bytes of JSON
_DTYPES = {str(dtype)[6:] for dtype in tensor_file.NAMES}
_MOST = 1 << 56  # steps, samples, tokens
_MOST_DIMS = 6  # of a tensor; a box of n dims has 2^n corners


class StoredBox(NamedTuple):
    """One box of one tensor: `key` in the safetensors file `file`."""

    file: str
    key: str
    box: Box


class TensorMetadata(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]


class Manifest(NamedTuple):
    """`state`: the run's numbers beside tensors, plain JSON."""

    tensors: dict[str, TensorMetadata]
    files: dict[str, FileChecksum]
    state: dict[str, Any]


def load_manifest(folder: Location) -> Manifest:
    """Read and check the manifest of a committed checkpoint, whose sha256 is in COMPLETE."""
    path = folder / "manifest.json"

    def refuse(reason: str) -> CheckpointError:
        return CheckpointError(f"{path}: {reason}; use another checkpoint")

    try:
        storage = storage_of(folder)
        sizes = storage.list_files(folder)
        for name in ("manifest.json", "COMPLETE"):
            if name not in sizes:
                raise refuse(f"cannot be read ({name} is missing, or not a regular file)")
        if max(sizes["manifest.json"], sizes["COMPLETE"]) > _LARGEST:
            raise refuse("it is implausibly large")
        text = storage.read(path)
        complete = storage.read(folder / "COMPLETE").decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(f"cannot be read ({error})") from None
    if hashlib.sha256(text).hexdigest() != complete:
        raise refuse("it is not the one that COMPLETE names")
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise refuse(f"format {data['format']!r} is not {FORMAT}")
        stamp = lambda size, name, block, of: FileChecksum(int(size), str(name), int(block), tuple(map(str, of)))  # noqa: E731
        files = {str(name): stamp(*entry) for name, entry in data["files"].items()}
        tensors = {str(name): _whole(str(name), entry, files) for name, entry in data["tensors"].items()}
        state = _state(dict(data["state"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise refuse(f"is damaged ({error!r})") from None
    return Manifest(tensors, files, state)


def check_file_sizes(folder: Location, manifest: Manifest) -> None:
    """Raises CheckpointError that names the first file that is missing or has another size."""
    try:
        sizes = storage_of(folder).list_files(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error})") from None
    for name, stamp in manifest.files.items():
        if name not in sizes:
            raise CheckpointError(f"{folder / name}: missing, or not a regular file")
        if sizes[name] != stamp.size:
            raise CheckpointError(f"{folder / name}: {sizes[name]} bytes, not {stamp.size}")


ManifestCheck = Callable[[Location, Manifest], object]


def load_complete_manifest(folder: Location, check: ManifestCheck = check_file_sizes) -> Manifest:
    """The manifest of a checkpoint that has all its files; contents are not hashed. Raises CheckpointError."""
    manifest = load_manifest(folder)
    check(folder, manifest)
    return manifest


def find_newest(place: Location, check: ManifestCheck = check_file_sizes) -> tuple[Location, Manifest]:
    """The checkpoint `place`, or the newest in it with a valid manifest that passes `check`, and its manifest. Skipped
    ones are named on stderr. Raises CheckpointError, as `check` does."""
    storage = storage_of(place)
    if "manifest.json" in storage.list_files(place):
        return place, load_complete_manifest(place, check)
    reasons = []
    for folder in (checkpoint_dir(place, step) for step in reversed(storage.steps_in(place))):
        try:
            return folder, load_complete_manifest(folder, check)
        except CheckpointError as error:
            reasons.append(str(error))
            print_err(f"skipping {folder}: {error}")
    hint = "give a --save directory, or one checkpoint in it"
    raise CheckpointError(f"{place} holds no checkpoint that can be read; {hint}. {' '.join(reasons)}".strip())


def _whole(name: str, entry: dict[str, Any], files: dict[str, FileChecksum]) -> TensorMetadata:
    shape = tuple(int(n) for n in entry["shape"])
    if len(shape) > _MOST_DIMS:
        raise ValueError(f"{name} has {len(shape)} dims")
    boxes, covered = [], 0
    for file, key, start, stop in entry["parts"]:
        box = Box(tuple(int(n) for n in start), tuple(int(n) for n in stop))
        if not _FILE.fullmatch(file) or file not in files:
            raise ValueError(f"{name} is in a file {file!r} that is not part of the checkpoint")
        inner = len(box.start) == len(box.stop) == len(shape)
        if not inner or any(not 0 <= a < b <= n for a, b, n in zip(box.start, box.stop, shape, strict=True)):
            raise ValueError(f"{name} has a box outside {shape}")
        covered += box.numel
        boxes.append(StoredBox(str(file), str(key), box))
    if covered != math.prod(shape):
        raise ValueError(f"{name}: its boxes hold {covered} of {math.prod(shape)} elements")
    if len(boxes) > 1 and not covers_exactly_once(shape, [part.box for part in boxes]):
        raise ValueError(f"{name}: two of its boxes hold the same elements")
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name} has the unknown dtype {str(entry['dtype'])[:40]!r}")
    return TensorMetadata(shape, entry["dtype"], tuple(boxes))


def _state(state: dict[str, Any]) -> dict[str, Any]:
    """Checks the entries that a run and tools use without another check."""
    for name, kind in {"progress": dict, "loss_scaler": dict, "config": str, "updates": int, "vocab_size": int}.items():
        if name in state and type(state[name]) is not kind:
            raise ValueError(f"state: {name} is not of type {kind.__name__}")
    numbers = state.get("progress", {}) | {name: state[name] for name in ("updates", "vocab_size") if name in state}
    for name, value in numbers.items():
        if type(value) is not int or not 0 <= value < _MOST:
            raise ValueError(f"state: {name} is {str(value)[:40]!r}, not a number from 0")
    return state


def covers_exactly_once(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether the boxes hold every element of a tensor exactly once, in time n log n. OverflowError from 2^63 elements.
    The differences along every dim of a function that is 1 inside a box are its corners, half of them positive. They
    can be summed up again, so boxes add up to the whole if their corners do."""
    if math.prod(n + 1 for n in shape) >= 1 << 63:
        raise OverflowError(f"a tensor of {shape}")
    strides = np.array([math.prod(n + 1 for n in shape[d + 1 :]) for d in range(len(shape))], np.int64)
    ends = np.array([(box.start, box.stop) for box in boxes], np.int64)  # [boxes, 2, dims]
    whole = np.array([((0,) * len(shape), shape)], np.int64)
    signs: tuple[list[NDArray[np.int64]], ...] = [], []
    for corner in itertools.product((0, 1), repeat=len(shape)):
        for negative, sides in ((sum(corner) % 2, ends), (1 - sum(corner) % 2, whole)):
            signs[negative].append(sides[:, corner, range(len(shape))] @ strides)
    plus, minus = (np.sort(np.concatenate(offsets)) for offsets in signs)
    return np.array_equal(plus, minus)


def discard_quietly(part: Location) -> None:
    """Delete the remains of a failed save, if possible: the error that made it fail matters more."""
    with contextlib.suppress(OSError):
        storage_of(part).discard(part)


def rank_index_name(rank: int) -> str:
    """Name of a rank's list of what it has written, which exists once all of that is on disk."""
    return f"rank-{rank:05d}.json"


def write_rank_file(part: Location, rank: int, rows: Sequence[WriteItem], data: Iterable[Tensor]) -> None:
    """Write this rank's file, then its list, a part of the manifest. `rows` and `data` in the order of `plan`."""
    name, tensors = f"rank-{rank:05d}.safetensors", dict[str, dict[str, Any]]()
    stamp = tensor_file.write_safetensors(part / name, rows, data)
    for row in rows:
        whole = tensors.setdefault(row.algorithm, {"shape": row.full_shape, "dtype": str(row.dtype)[6:], "parts": []})
        whole["parts"].append([name, row.key, row.box.start, row.box.stop])
    listing = {"files": {name: [stamp.size, stamp.algorithm, stamp.block_size, stamp.digests]}, "tensors": tensors}
    storage_of(part).write_text(
        part / rank_index_name(rank), json.dumps(listing), sync=False
    )  # swept after a power cut


def commit(part: Location, final: Location, state: dict[str, Any], step: int, world: int) -> None:
    """Make the files of `world` ranks a checkpoint."""
    storage = storage_of(part)
    files, tensors = dict[str, list[Any]](), dict[str, dict[str, Any]]()
    for rank in range(world):
        listing = json.loads(storage.read(part / rank_index_name(rank)))
        files |= listing["files"]
        for name, whole in listing["tensors"].items():
            tensors.setdefault(name, {**whole, "parts": []})["parts"] += whole["parts"]
        storage.delete(part / rank_index_name(rank))
    sizes = storage.list_files(part)
    for name, (size, *_) in files.items():
        if sizes.get(name) != size:
            raise CheckpointError(f"{part / name}: {size} bytes were written, {sizes.get(name, 0)} are there")
    text = json.dumps({"format": FORMAT, "state": state, "files": files, "tensors": tensors})
    storage.write_text(part / "manifest.json", text, sync=False)
    storage.write_text(part / "COMPLETE", hashlib.sha256(text.encode()).hexdigest() + "\n", sync=False)
    inject_fault("ckpt.before_commit", 0, step)
    storage.publish(part, final)
    inject_fault("ckpt.after_commit", 0, step)
    write_tracker(final.parent, step)


def write_tracker(directory: Location, step: int) -> None:
    """Write the tracker file, for other programs. The checkpoint exists without it, so a failure only warns."""
    try:
        storage_of(directory).write_text(directory / TRACKER, f"{step}\n", sync=False)
    except OSError as error:
        reason = f"{error.strerror or error}; it does not name step {step}, whose checkpoint is complete"
        print_err(f"WARNING: {directory / TRACKER}: {reason}")
