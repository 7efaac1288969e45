"""The layout of a checkpoint on disk, and its manifest.

The manifest has the shape, dtype and stored boxes of every tensor, and the hashes of the files.

    .iter_0000500.part/ rank-00000.safetensors + its index  `write_rank_file`: synced, hashed while it is written
    manifest.json, then COMPLETE (the manifest's sha256)    `commit`: both synced, then the directory
    rename to iter_0000500/, sync the parent                the checkpoint exists from this point on
    latest_checkpointed_iteration.txt                       replaced atomically

Nothing can be renamed behind a URL. The files are written to iter_0000500/ itself, and writing COMPLETE makes the
checkpoint exist. If a run is killed at any time, the previous checkpoint is still the newest. Files are streamed
(safetensors_file.py). manager/saver.py coordinates the ranks of a run.

`load_manifest` checks everything that it reads: file names stay in the directory, and boxes lie inside their tensors
and cover them exactly once.
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
from megalite.common.console import print_err
from megalite.common.fault_injection import inject_fault
from megalite.parallel.spec import Box

FORMAT = 2
MODEL_PREFIXES = ("model/", "state/")  # name prefixes: parameters, and model state that is not a parameter
_FILE = re.compile(r"rank-\d{5}\.safetensors")
_MAX_JSON_BYTES = 1 << 30
_DTYPE_NAMES = {str(dtype).removeprefix("torch.") for dtype in tensor_file.DTYPE_CODES}
_MAX_COUNT = 1 << 56  # limit of steps, samples and tokens
_MAX_DIMS = 6  # per tensor; a box of n dims has 2^n corners


class StoredBox(NamedTuple):
    """One stored box of a tensor: the entry `key` of the safetensors file `file`."""

    file: str
    key: str
    box: Box


class TensorMetadata(NamedTuple):
    """The full shape and dtype of a tensor, and the boxes in which it is stored."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]


class Manifest(NamedTuple):
    """The contents of manifest.json.

    `state` holds the values of the run that are not tensors, as plain JSON.
    """

    tensors: dict[str, TensorMetadata]
    files: dict[str, FileChecksum]
    state: dict[str, Any]


def load_manifest(directory: Location) -> Manifest:
    """Read and check the manifest of a committed checkpoint.

    Raises:
        CheckpointError: The manifest is missing or damaged, or its sha256 is not the one in COMPLETE.
    """
    path = directory / "manifest.json"

    def refuse(reason: str) -> CheckpointError:
        return CheckpointError(f"{path}: {reason}; use another checkpoint")

    try:
        storage = storage_of(directory)
        sizes = storage.list_files(directory)
        for name in ("manifest.json", "COMPLETE"):
            if name not in sizes:
                raise refuse(f"cannot be read ({name} is missing, or not a regular file)")
        if max(sizes["manifest.json"], sizes["COMPLETE"]) > _MAX_JSON_BYTES:
            raise refuse("it is implausibly large")
        text = storage.read(path)
        complete = storage.read(directory / "COMPLETE").decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(f"cannot be read ({error})") from None
    if hashlib.sha256(text).hexdigest() != complete:
        raise refuse("it is not the one that COMPLETE names")
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise refuse(f"format {data['format']!r} is not {FORMAT}")
        files = {str(name): _parse_checksum(*entry) for name, entry in data["files"].items()}
        tensors = {str(name): _parse_tensor(str(name), entry, files) for name, entry in data["tensors"].items()}
        state = _check_state(dict(data["state"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise refuse(f"is damaged ({error!r})") from None
    return Manifest(tensors, files, state)


def _parse_checksum(size: Any, algorithm: Any, block_size: Any, digests: Any) -> FileChecksum:
    return FileChecksum(int(size), str(algorithm), int(block_size), tuple(map(str, digests)))


def check_file_sizes(directory: Location, manifest: Manifest) -> None:
    """Raise CheckpointError naming the first file that is missing or has a different size."""
    try:
        sizes = storage_of(directory).list_files(directory)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read ({error})") from None
    for name, checksum in manifest.files.items():
        if name not in sizes:
            raise CheckpointError(f"{directory / name}: missing, or not a regular file")
        if sizes[name] != checksum.size:
            raise CheckpointError(f"{directory / name}: {sizes[name]} bytes, not {checksum.size}")


ManifestCheck = Callable[[Location, Manifest], object]


def load_complete_manifest(directory: Location, check: ManifestCheck = check_file_sizes) -> Manifest:
    """Return the manifest of a checkpoint after running `check` on it.

    The default check is that all files exist with their sizes; it does not hash contents. Raises CheckpointError.
    """
    manifest = load_manifest(directory)
    check(directory, manifest)
    return manifest


def find_newest(location: Location, check: ManifestCheck = check_file_sizes) -> tuple[Location, Manifest]:
    """Return (directory, manifest) of the checkpoint `location`, or of the newest valid checkpoint in it.

    A checkpoint is valid if its manifest can be read and passes `check`. Skipped checkpoints are reported on stderr.
    Raises CheckpointError if none is valid.
    """
    storage = storage_of(location)
    if "manifest.json" in storage.list_files(location):
        return location, load_complete_manifest(location, check)
    reasons = []
    for directory in (checkpoint_dir(location, step) for step in reversed(storage.steps_in(location))):
        try:
            return directory, load_complete_manifest(directory, check)
        except CheckpointError as error:
            reasons.append(str(error))
            print_err(f"skipping {directory}: {error}")
    hint = "give a --save directory, or one checkpoint in it"
    raise CheckpointError(f"{location} holds no checkpoint that can be read; {hint}. {' '.join(reasons)}".strip())


def _parse_tensor(name: str, entry: dict[str, Any], files: dict[str, FileChecksum]) -> TensorMetadata:
    """Check one tensor entry of the manifest and return it. Raises ValueError."""
    shape = tuple(int(n) for n in entry["shape"])
    if len(shape) > _MAX_DIMS:
        raise ValueError(f"{name} has {len(shape)} dims")
    boxes, covered = [], 0
    for file, key, start, stop in entry["parts"]:
        box = Box(tuple(int(n) for n in start), tuple(int(n) for n in stop))
        if not _FILE.fullmatch(file) or file not in files:
            raise ValueError(f"{name} is in a file {file!r} that is not part of the checkpoint")
        has_same_rank = len(box.start) == len(box.stop) == len(shape)
        if not has_same_rank or any(not 0 <= a < b <= n for a, b, n in zip(box.start, box.stop, shape, strict=True)):
            raise ValueError(f"{name} has a box outside {shape}")
        covered += box.numel
        boxes.append(StoredBox(str(file), str(key), box))
    if covered != math.prod(shape):
        raise ValueError(f"{name}: its boxes hold {covered} of {math.prod(shape)} elements")
    if len(boxes) > 1 and not covers_exactly_once(shape, [stored.box for stored in boxes]):
        raise ValueError(f"{name}: two of its boxes hold the same elements")
    if entry["dtype"] not in _DTYPE_NAMES:
        raise ValueError(f"{name} has the unknown dtype {str(entry['dtype'])[:40]!r}")
    return TensorMetadata(shape, entry["dtype"], tuple(boxes))


def _check_state(state: dict[str, Any]) -> dict[str, Any]:
    """Check the types and ranges of the entries that the trainer and tools use unchecked, and return `state`."""
    for name, expected_type in {
        "progress": dict,
        "loss_scaler": dict,
        "config": str,
        "updates": int,
        "vocab_size": int,
    }.items():
        if name in state and type(state[name]) is not expected_type:
            raise ValueError(f"state: {name} is not of type {expected_type.__name__}")
    counts = state.get("progress", {}) | {name: state[name] for name in ("updates", "vocab_size") if name in state}
    for name, value in counts.items():
        if type(value) is not int or not 0 <= value < _MAX_COUNT:
            raise ValueError(f"state: {name} is {str(value)[:40]!r}, not a number of 0 or more")
    return state


def covers_exactly_once(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Return True if the boxes cover every element of a tensor exactly once.

    The time is O(n log n) for n boxes. Consider the indicator function of a box. Its finite differences along every dim
    are nonzero only at the corners of the box, half of them positive. Summing the differences restores the function, so
    boxes add up to the full tensor exactly if their corners do.

    Raises:
        OverflowError: The tensor has about 2^63 elements or more.
    """
    if math.prod(n + 1 for n in shape) >= 1 << 63:
        raise OverflowError(f"a tensor of {shape}")
    strides = np.array([math.prod(n + 1 for n in shape[d + 1 :]) for d in range(len(shape))], np.int64)
    ends = np.array([(box.start, box.stop) for box in boxes], np.int64)  # [boxes, 2, dims]
    full = np.array([((0,) * len(shape), shape)], np.int64)
    signs: tuple[list[NDArray[np.int64]], ...] = [], []
    for corner in itertools.product((0, 1), repeat=len(shape)):
        for negative, sides in ((sum(corner) % 2, ends), (1 - sum(corner) % 2, full)):
            signs[negative].append(sides[:, corner, range(len(shape))] @ strides)
    plus, minus = (np.sort(np.concatenate(offsets)) for offsets in signs)
    return np.array_equal(plus, minus)


def discard_quietly(staging_dir: Location) -> None:
    """Delete the remains of a failed save if possible. OSError is suppressed, as the error of the save matters more."""
    with contextlib.suppress(OSError):
        storage_of(staging_dir).discard(staging_dir)


def rank_index_name(rank: int) -> str:
    """Return the file name of a rank's index. The index exists once everything that it lists is on disk."""
    return f"rank-{rank:05d}.json"


def write_rank_file(staging_dir: Location, rank: int, rows: Sequence[WriteItem], data: Iterable[Tensor]) -> None:
    """Write this rank's safetensors file, then its index, which becomes a part of the manifest.

    `rows` and `data` have the order of `plan_write`.
    """
    file_name = f"rank-{rank:05d}.safetensors"
    tensors: dict[str, dict[str, Any]] = {}
    checksum = tensor_file.write_safetensors(staging_dir / file_name, rows, data)
    for row in rows:
        dtype = str(row.dtype).removeprefix("torch.")
        entry = tensors.setdefault(row.name, {"shape": row.full_shape, "dtype": dtype, "parts": []})
        entry["parts"].append([file_name, row.key, row.box.start, row.box.stop])
    file_entry = [checksum.size, checksum.algorithm, checksum.block_size, checksum.digests]
    index = json.dumps({"files": {file_name: file_entry}, "tensors": tensors})
    # not synced: after a power cut the staging directory is removed anyway
    storage_of(staging_dir).write_text(staging_dir / rank_index_name(rank), index, sync=False)


def commit(staging_dir: Location, final: Location, state: dict[str, Any], step: int, world_size: int) -> None:
    """Turn the staging directory with the files of `world_size` ranks into the checkpoint `final`.

    Merges the ranks' indexes into manifest.json, writes COMPLETE, publishes the directory and updates the tracker file.

    Raises:
        CheckpointError: A file does not have the size that was written.
    """
    storage = storage_of(staging_dir)
    files: dict[str, list[Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    for rank in range(world_size):
        index = json.loads(storage.read(staging_dir / rank_index_name(rank)))
        files |= index["files"]
        for name, entry in index["tensors"].items():
            tensors.setdefault(name, {**entry, "parts": []})["parts"] += entry["parts"]
        storage.delete(staging_dir / rank_index_name(rank))
    sizes = storage.list_files(staging_dir)
    for name, (size, *_) in files.items():
        if sizes.get(name) != size:
            raise CheckpointError(
                f"{staging_dir / name}: {size} bytes were written, but the file has {sizes.get(name, 0)}"
            )
    text = json.dumps({"format": FORMAT, "state": state, "files": files, "tensors": tensors})
    storage.write_text(staging_dir / "manifest.json", text, sync=False)
    storage.write_text(staging_dir / "COMPLETE", hashlib.sha256(text.encode()).hexdigest() + "\n", sync=False)
    inject_fault("ckpt.before_commit", 0, step)
    storage.publish(staging_dir, final)
    inject_fault("ckpt.after_commit", 0, step)
    write_tracker(final.parent, step)


def write_tracker(directory: Location, step: int) -> None:
    """Write the tracker file for other programs. A failure only warns, as the checkpoint exists without it."""
    try:
        storage_of(directory).write_text(directory / TRACKER, f"{step}\n", sync=False)
    except OSError as error:
        reason = f"{error.strerror or error}; it does not name step {step}, whose checkpoint is complete"
        print_err(f"WARNING: {directory / TRACKER}: {reason}")
