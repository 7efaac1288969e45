"""Megatron-LM's checkpoints of format torch_dist, read without torch.distributed.checkpoint.

    common.pt          args and the like, a torch file          .metadata   a pickle: every tensor's shape and chunks
    __0_0.distcp ...   one torch file after the other, each a chunk of one tensor

`.metadata` is read by an unpickler that knows an exact list of names, and makes for each a `Record`, an object that
only keeps its state; no class or function of torch is called. Each chunk goes through torch's restricted loader. Layers
may be stacked, [L, ...] under one name, or numbered. Gate and up are two halves of one tensor whatever tp was.
"""

import io
import pickle  # for an Unpickler that finds no class but those listed here
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.format.safetensors_file import CODES
from megalite.checkpoint.offline import full_box
from megalite.config.option_parsers import MAX_LAYERS_IN_PATTERN
from megalite.config.text_file import read_small_bytes
from megalite.interop.megatron import torch_format as rank_files
from megalite.interop.tensor_mapping import ExternalModel, FileTensor
from megalite.parallel.spec import Box, intersect, slices_within

RECORD_TYPES: list[str] = rank_files.NAME_TABLE["records"]
_FILE = re.compile(r"__\d+_\d+\.distcp")
_OTHER = ("optimizer.", "rng_state", "rerun_state_machine_state", "chained_")  # entries beside the model
_LARGEST = 1 << 30  # bytes of .metadata


class Chunk(NamedTuple):
    box: Box
    file: str
    offset: int
    length: int


class StoredTensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def _read(folder: Path, load: Callable[..., Tensor], key: str, stored: StoredTensor, box: Box) -> Tensor:
    result = torch.empty(box.shape, dtype=stored.dtype)
    filled = 0
    for chunk in stored.chunks:
        both = intersect(box, chunk.box)
        if both is not None:
            result[slices_within(both, box)] = load(key, chunk, stored.dtype)[slices_within(both, chunk.box)]
            filled += both.numel
    if filled != box.numel:
        raise CheckpointError(f"{folder}: damaged: {key} has a hole: {filled} of {box.numel} elements exist")
    return result


def _load(folder: Path, key: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    path = folder / chunk.file
    try:
        with open(path, "rb") as file:
            file.seek(chunk.offset)
            data = io.BytesIO(file.read(chunk.length))
        values = torch.load(data, map_location="cpu", weights_only=True)
    except (*rank_files.READ_ERRORS, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: {key} cannot be read ({type(error).__name__}); it is damaged") from None
    if not isinstance(values, Tensor) or tuple(values.shape) != chunk.box.shape or values.dtype != dtype:
        raise CheckpointError(f"{path}: {key} is not the tensor that .metadata describes; it is damaged")
    return values


def open_checkpoint(folder: Path, say: Callable[[str], object] = print) -> ExternalModel:
    """Open either of the two formats that can be read. Raises CheckpointError with all problems."""
    common, metadata = folder / "common.pt", folder / ".metadata"
    if not metadata.is_file() and not (folder / "metadata.json").is_file():
        return rank_files.open_torch_checkpoint(folder, say)
    if not common.is_file() or not metadata.is_file():
        known, remedy = "only torch_dist and torch are", "convert it there with --ckpt-convert-format torch_dist"
        raise CheckpointError(f"{folder}: cannot be read: of Megatron-LM's formats {known}; {remedy}")
    args = rank_files.get_args(rank_files.load_pickle(common, say), common)
    say(f"opening {metadata}: a pickle, of which {2 + len(RECORD_TYPES)} listed names are accepted as plain data")
    load = lru_cache(1)(partial(_load, folder))  # stacked layers are read one after the other
    found, read = dict[str, FileTensor](), partial(_read, folder, load)
    for key, stored in read_metadata(folder).items():
        name, shape = rank_files.mcore_name(key), stored.shape
        stacked = rank_files.STACKED_LAYERS.match(name)
        if not stacked or not shape:
            every = partial(read, key, stored, full_box(shape))
            found[name] = FileTensor(shape, stored.dtype, f"{key} in {folder}", every)
            continue
        for n in range(min(shape[0], MAX_LAYERS_IN_PATTERN)):
            box = Box((n, *(0 for _ in shape[1:])), (n + 1, *shape[1:]))
            one = lambda key=key, stored=stored, box=box: read(key, stored, box)[0]  # noqa: E731
            layer = f"decoder.layers.{n}.{name[stacked.end() :]}"
            found[layer] = FileTensor(shape[1:], stored.dtype, f"{key}[{n}] in {folder}", one)
    return rank_files.build_external_model(folder, args, common, {(0, 0): found})  # whole tensors, whatever tp was


def read_metadata(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the model. Raises CheckpointError for damage and for anything that is not on the list."""
    path = folder / ".metadata"
    try:
        root = _unpickle(read_small_bytes(path, _LARGEST))
        stored = [(index.state, info.state) for index, info in root.state["storage_data"].items()]
        places = {(at["fqn"], tuple(at["offset"])): place for at, place in stored if at.get("offset") is not None}
        return {
            str(key): _stored(str(key), value.state, places, folder)
            for key, value in root.state["state_dict_metadata"].items()
            if "size" in value.state and not str(key).startswith(_OTHER) and "_extra_state" not in str(key)
        }
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: refused: {error}; a file like this can run code") from None
    except Exception as error:  # any opcode may meet any object here
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error}); it is damaged") from None


def _stored(key: str, state: dict[str, Any], places: dict[Any, dict[str, Any]], folder: Path) -> StoredTensor:
    shape, dtype = tuple(int(n) for n in state["size"]), state["properties"].state[0]
    chunks = []
    for chunk in state["chunks"]:
        start, sizes = (tuple(int(n) for n in chunk.state[name]) for name in ("offsets", "sizes"))
        place = places[key, start]
        if not _FILE.fullmatch(place["relative_path"]) or not (folder / place["relative_path"]).is_file():
            raise CheckpointError(f"{folder}: {key} is in {place['relative_path']!r}, which is not a file of it")
        if place.get("transform_descriptors"):
            compression = place["transform_descriptors"]
            raise CheckpointError(f"{folder}: {key} is compressed ({compression}); save it uncompressed")
        box = Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))
        begin, length = int(place["offset"]), int(place["length"])
        if min(begin, length) < 0 or begin + length > (folder / place["relative_path"]).stat().st_size:
            raise CheckpointError(f"{folder / place['relative_path']}: ends before {key}; it is damaged")
        chunks.append(Chunk(box, place["relative_path"], begin, length))
        if any(not 0 <= a < b <= n for a, b, n in zip(box.start, box.stop, shape, strict=True)):
            raise CheckpointError(f"{folder}: {key} has a chunk outside {shape}; it is damaged")
    return StoredTensor(shape, dtype, tuple(chunks))


def _unpickle(data: bytes) -> Any:
    class Record:  # local, so that a file cannot change it for later calls
        state: Any = MappingProxyType({})  # if a file gives none

        def __init__(self, *args: object):
            pass

        def __setstate__(self, state: object) -> None:
            self.state = state

    def member(of: object, name: object) -> Record:
        """In place of `getattr`, with which Python 3.11.0 to 3.11.3 writes a member of an enumeration."""
        if of is not Record:
            raise pickle.UnpicklingError("it names builtins.getattr, which is not on the list of types")
        return Record()

    known: dict[str, Any] = {name: Record for name in RECORD_TYPES} | {"builtins.getattr": member}
    known |= {"torch.Size": tuple, "collections.OrderedDict": OrderedDict}
    known |= {str(dtype): dtype for dtype in CODES}  # type: ignore[dict-item]

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if f"{module}.{name}" not in known:
                raise pickle.UnpicklingError(f"it names {module}.{name}, which is not on the list of types")
            return known[f"{module}.{name}"]

    return Unpickler(io.BytesIO(data)).load()
