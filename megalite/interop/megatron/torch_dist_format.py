"""Checkpoints of Megatron-LM in the format torch_dist, read without torch.distributed.checkpoint.

    common.pt          args and other values, a torch file      .metadata   a pickle: every tensor's shape and chunks
    __0_0.distcp ...   one torch file after the other, each a chunk of one tensor

`.metadata` is read by an unpickler that accepts an exact list of names, and creates a `Record` for each, an object that
only stores its state. No class or function of torch is called. Each chunk is read by torch's restricted loader. Layers
may be stacked, [L, ...] under one name, or numbered. The gate and up matrices are the two halves of one tensor,
whatever tp was.
"""

import io
import pickle  # for an Unpickler that only finds the classes that are listed here
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
from megalite.checkpoint.format.safetensors_file import WEIGHT_DTYPE_CODES
from megalite.checkpoint.offline import full_box
from megalite.common.text_file import read_small_bytes
from megalite.config.option_parsers import MAX_LAYERS_IN_PATTERN
from megalite.interop.megatron import torch_format
from megalite.interop.tensor_mapping import ExternalModel, FileTensor
from megalite.parallel.spec import Box, intersect, slices_within

RECORD_TYPES: list[str] = torch_format.NAME_TABLE["records"]
_FILE = re.compile(r"__\d+_\d+\.distcp")
# prefixes of entries that are not tensors of the model
_NOT_MODEL = ("optimizer.", "rng_state", "rerun_state_machine_state", "chained_")
_MAX_METADATA_BYTES = 1 << 30


class Chunk(NamedTuple):
    """A stored box of a tensor, and its bytes [offset, offset + length) in a file."""

    box: Box
    file: str
    offset: int
    length: int


class StoredTensor(NamedTuple):
    """The full shape and dtype of a tensor, and its chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def _read_box(directory: Path, load: Callable[..., Tensor], key: str, stored: StoredTensor, box: Box) -> Tensor:
    """Return the values of a box, which `load` reads from the chunks.

    Raises CheckpointError if elements are missing.
    """
    result = torch.empty(box.shape, dtype=stored.dtype)
    filled = 0
    for chunk in stored.chunks:
        overlap = intersect(box, chunk.box)
        if overlap is not None:
            result[slices_within(overlap, box)] = load(key, chunk, stored.dtype)[slices_within(overlap, chunk.box)]
            filled += overlap.numel
    if filled != box.numel:
        raise CheckpointError(f"{directory}: damaged: {key} has a hole: {filled} of {box.numel} elements exist")
    return result


def _load_chunk(directory: Path, key: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """Return the values of a chunk. Raises CheckpointError."""
    path = directory / chunk.file
    try:
        with open(path, "rb") as file:
            file.seek(chunk.offset)
            data = io.BytesIO(file.read(chunk.length))
        values = torch.load(data, map_location="cpu", weights_only=True)
    except (*torch_format.READ_ERRORS, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: {key} cannot be read ({type(error).__name__}); it is damaged") from None
    if not isinstance(values, Tensor) or tuple(values.shape) != chunk.box.shape or values.dtype != dtype:
        raise CheckpointError(f"{path}: {key} is not the tensor that .metadata describes; it is damaged")
    return values


def open_checkpoint(directory: Path, log: Callable[[str], object] = print) -> ExternalModel:
    """Open a checkpoint of either format that can be read: torch_dist or torch.

    `log` receives a line for each pickle that is opened. Raises CheckpointError with all problems.
    """
    common, metadata = directory / "common.pt", directory / ".metadata"
    if not metadata.is_file() and not (directory / "metadata.json").is_file():
        return torch_format.open_torch_checkpoint(directory, log)
    if not common.is_file() or not metadata.is_file():
        remedy = "convert it there with --ckpt-convert-format torch_dist"
        raise CheckpointError(f"{directory}: cannot be read: the supported formats are torch_dist and torch; {remedy}")
    args = torch_format.get_args(torch_format.load_pickle(common, log), common)
    log(f"opening {metadata}: a pickle; only {2 + len(RECORD_TYPES)} listed names in it are accepted, as plain data")
    load = lru_cache(1)(partial(_load_chunk, directory))  # the layers of a stacked tensor are read one after the other
    read_box = partial(_read_box, directory, load)
    tensors: dict[str, FileTensor] = {}
    for key, stored in read_metadata(directory).items():
        name, shape = torch_format.mcore_name(key), stored.shape
        stacked = torch_format.STACKED_LAYERS.match(name)
        if not stacked or not shape:
            read_tensor = partial(read_box, key, stored, full_box(shape))
            tensors[name] = FileTensor(shape, stored.dtype, f"{key} in {directory}", read_tensor)
            continue
        for layer in range(min(shape[0], MAX_LAYERS_IN_PATTERN)):
            box = Box((layer, *(0 for _ in shape[1:])), (layer + 1, *shape[1:]))
            read_layer = lambda key=key, stored=stored, box=box: read_box(key, stored, box)[0]  # noqa: E731
            layer_name = f"decoder.layers.{layer}.{name[stacked.end() :]}"
            tensors[layer_name] = FileTensor(shape[1:], stored.dtype, f"{key}[{layer}] in {directory}", read_layer)
    # The tensors are full, whatever tp was.
    return torch_format.build_external_model(directory, args, common, {(0, 0): tensors})


def read_metadata(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the model. Raises CheckpointError for damage, and for names that are not on the list."""
    path = directory / ".metadata"
    try:
        root = _unpickle(read_small_bytes(path, _MAX_METADATA_BYTES))
        stored = [(index_key.state, info.state) for index_key, info in root.state["storage_data"].items()]
        locations = {
            (index["fqn"], tuple(index["offset"])): location
            for index, location in stored
            if index.get("offset") is not None
        }
        return {
            str(key): _parse_tensor(str(key), value.state, locations, directory)
            for key, value in root.state["state_dict_metadata"].items()
            if "size" in value.state and not str(key).startswith(_NOT_MODEL) and "_extra_state" not in str(key)
        }
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: refused: {error}; a file like this can run code") from None
    except Exception as error:  # any opcode may meet any object here
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error}); it is damaged") from None


def _parse_tensor(
    key: str, state: dict[str, Any], locations: dict[Any, dict[str, Any]], directory: Path
) -> StoredTensor:
    """Return the tensor that a metadata entry describes. Raises CheckpointError for damage."""
    shape, dtype = tuple(int(n) for n in state["size"]), state["properties"].state[0]
    chunks = []
    for chunk in state["chunks"]:
        start, sizes = (tuple(int(n) for n in chunk.state[name]) for name in ("offsets", "sizes"))
        location = locations[key, start]
        if not _FILE.fullmatch(location["relative_path"]) or not (directory / location["relative_path"]).is_file():
            raise CheckpointError(f"{directory}: {key} is in {location['relative_path']!r}, which is not a file of it")
        if location.get("transform_descriptors"):
            compression = location["transform_descriptors"]
            raise CheckpointError(f"{directory}: {key} is compressed ({compression}); save it uncompressed")
        box = Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))
        offset, length = int(location["offset"]), int(location["length"])
        if min(offset, length) < 0 or offset + length > (directory / location["relative_path"]).stat().st_size:
            raise CheckpointError(f"{directory / location['relative_path']}: ends before {key}; it is damaged")
        chunks.append(Chunk(box, location["relative_path"], offset, length))
        if any(not 0 <= a < b <= n for a, b, n in zip(box.start, box.stop, shape, strict=True)):
            raise CheckpointError(f"{directory}: {key} has a chunk outside {shape}; it is damaged")
    return StoredTensor(shape, dtype, tuple(chunks))


def _unpickle(data: bytes) -> Any:
    """Return the contents of .metadata, with `Record` in place of every listed type. Raises UnpicklingError."""

    class Record:  # defined here, so that a file cannot change it for later calls
        state: Any = MappingProxyType({})  # if the file has none

        def __init__(self, *args: object):
            pass

        def __setstate__(self, state: object) -> None:
            self.state = state

    def member(owner: object, name: object) -> Record:
        """Stand in for `getattr`, which Python 3.11.0 to 3.11.3 uses to pickle a member of an enumeration."""
        if owner is not Record:
            raise pickle.UnpicklingError("it names builtins.getattr, which is not on the list of types")
        return Record()

    allowed: dict[str, Any] = {name: Record for name in RECORD_TYPES} | {"builtins.getattr": member}
    allowed |= {"torch.Size": tuple, "collections.OrderedDict": OrderedDict}
    allowed |= {str(dtype): dtype for dtype in WEIGHT_DTYPE_CODES}  # type: ignore[dict-item]

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if f"{module}.{name}" not in allowed:
                raise pickle.UnpicklingError(f"it names {module}.{name}, which is not on the list of types")
            return allowed[f"{module}.{name}"]

    return Unpickler(io.BytesIO(data)).load()
