"""Megatron-LM's checkpoints of one file per (tp, pp) rank, read without Megatron-LM; tools/megatron_release.py writes.

    DIR/latest_checkpointed_iteration.txt        a number, or "release"
    DIR/iter_0000500/mp_rank_00/model_optim_rng.pt            mp_rank_TT, or mp_rank_TT_PPP where pp > 1
        args, checkpoint_version, model (or model0, model1, .. with virtual stages): name -> tensor

The files are pickles. They are opened with torch's restricted loader and an exact list of names: tensors, plain
containers, argparse.Namespace; what else Megatron-LM is known to put in (random states, enumerations) becomes an
`Inert`, an object without any content. Anything else is refused by name, and no code of a file runs. Tensors stay
on disk until they are read. A layer's number counts within its stage; stages are numbered on, virtual ones in turn.
"""

import pickle  # its error only; torch's restricted loader does the reading
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.format.tensor_file import CODES
from megalite.checkpoint.storage.location import TRACKER, is_megatron
from megalite.config.options import ModelConfig
from megalite.interop.convert import Foreign, model_of, refuse, usual_dtype
from megalite.interop.megatron.args import read_args
from megalite.interop.megatron.names import LAYER, MEGATRON, SYNONYMS, WORD
from megalite.interop.rules import recipes
from megalite.models.specs import specs_of

FILES = ("model_optim_rng.pt", "model_rng.pt")
# what the restricted loader raises for bytes that are no file of its own, as mutated files have shown
DAMAGED = (OSError, ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError)
DAMAGED += (RuntimeError, TypeError, ValueError)
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")


class Inert:
    """Stands for an object that is not needed: made of anything, holds nothing, calls nothing."""

    def __init__(self, *args: object, **kwargs: object):
        pass

    def __setstate__(self, state: object) -> None:
        pass


class InertMember(Inert):
    """Stands for `getattr`, by which Python 3.11.0 to 3.11.3 writes a member of an enumeration. Raises UnpicklingError
    for an attribute of anything that is not inert."""

    def __init__(self, of: object, name: object):
        if of is not Inert:
            raise pickle.UnpicklingError("global getattr")


INERT = (
    "_codecs.encode",
    "_io.BytesIO",
    "pathlib.PosixPath",
    "signal.Signals",
    "types.SimpleNamespace",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.dtypes.UInt32DType",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "megatron.core.enums.ModelType",
    "megatron.model.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
)


@dataclass(frozen=True)
class MegatronModel:
    """A checkpoint that was opened: `padded_vocab_size` rows in embedding and head, `args` as they were saved.

    shards(name within its layer, layer), or of what is outside the layers (name, -1): the tensor of each tp rank.
    KeyError.
    """

    folder: Path
    options: dict[str, Any]
    model: ModelConfig
    padded_vocab_size: int
    dtype: torch.dtype
    tensors: list[Foreign]
    args: Namespace
    shards: Callable[[str, int], list[Tensor]]


def load_pickle(path: Path) -> dict[str, Any]:
    """The dictionary of a .pt file; tensors stay on disk. Raises CheckpointError, naming what is not on the list."""
    allowed = [Namespace, *((Inert, name) for name in INERT), (InertMember, "builtins.getattr")]
    try:
        with torch.serialization.safe_globals(allowed):
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"(?:GLOBAL|global) (?:`)?([\w.]+)", str(error))
        what = f"it names {name[1]}, which is not on the list of types" if name else "it is not a plain file of tensors"
        raise CheckpointError(f"{path}: refused: {what}; a file like this can run code") from None
    except DAMAGED as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); it is damaged, or of torch before 1.6") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, not the dictionary of a checkpoint")
    return found


def folder_of(directory: Path) -> Path:
    """The folder of the newest iteration, or `directory` where that holds the ranks. Raises CheckpointError."""
    tracker = directory / TRACKER
    if not tracker.is_file():
        return directory
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text != "release" and not (text.isascii() and text.isdigit()):
        raise CheckpointError(f"{tracker}: {text[:40]!r} is neither a number nor release; give the iteration's folder")
    return directory / (text if text == "release" else f"iter_{int(text):07d}")


def holds(directory: Path) -> bool:
    """Whether it has a checkpoint of Megatron-LM in it."""
    return any(is_megatron(folder) for folder in (*directory.glob("iter_*"), directory / "release"))


def find(directory: Path, step: int | None = None) -> Path | None:
    """The folder of the checkpoint of Megatron-LM that `directory` is or holds, the one that its tracker file names or
    that of `step`; None where it holds none. Raises CheckpointError where the named one is missing."""
    if is_megatron(directory):
        if step is not None and directory.name != f"iter_{step:07d}":
            raise CheckpointError(f"{directory} is not the checkpoint of step {step}; give the folder above it")
        return directory
    iterations = [p.name for p in sorted(directory.glob("iter_*")) if is_megatron(p)]
    folder = folder_of(directory) if step is None else directory / f"iter_{step:07d}"
    if is_megatron(folder):
        return folder
    if not iterations:
        return None
    where = f"{directory / TRACKER} names" if step is None and folder != directory else f"{directory} holds"
    near = ", ".join(iterations[-3:])
    raise CheckpointError(f"{where} no such checkpoint, but the directory has {near}; give --ckpt-step, or the folder")


def true_vocab_size(args: Namespace, rows: int, tokenizer: int | None = None) -> int | None:
    """How many of the embedding's `rows` are tokens, as our converter has written it, or as `tokenizer` has them, or as
    --vocab-size gave it; None where nothing does: Megatron-LM itself keeps the padded size alone."""
    found = (getattr(args, "true_vocab_size", None), tokenizer, getattr(args, "vocab_size", None))
    return next((n for n in found if type(n) is int and 0 < n <= rows), None)


def rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """(tp rank, pp rank) -> file. Raises CheckpointError where one is missing."""
    found: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _RANK.fullmatch(path.name)
        file = next((path / name for name in FILES if (path / name).is_file()), None)
        if match is not None:
            if file is None:
                raise CheckpointError(f"{path}: has no {FILES[0]}; the checkpoint is incomplete: copy it again")
            found[int(match[1]), int(match[2] or 0)] = file
    if not found:
        raise CheckpointError(f"{folder}: has no folder mp_rank_00; give the directory of a checkpoint")
    tp, pp = (1 + max(key[i] for key in found) for i in (0, 1))
    for t in range(tp):
        for p in range(pp):
            if (t, p) not in found:
                raise CheckpointError(f"{folder}: tp rank {t}, pp rank {p} of {tp} x {pp} is missing; copy it again")
    return found


def open_megatron(directory: Path, say: Any = print) -> MegatronModel:
    """Read args and the names of all tensors. Raises CheckpointError listing what is wrong."""
    folder = folder_of(directory)
    files = rank_files(folder)
    tp, pp = (1 + max(key[i] for key in files) for i in (0, 1))
    loaded: dict[tuple[int, int], dict[str, Any]] = {}
    for key, path in files.items():
        say(f"opening {path}: a pickle, of which tensors and {1 + len(INERT)} listed types are accepted")
        loaded[key] = load_pickle(path)
    first = loaded[0, 0]
    args, version = first.get("args"), first.get("checkpoint_version", 0)
    if not isinstance(args, Namespace):
        raise CheckpointError(f"{files[0, 0]}: has no args; it is not a checkpoint of Megatron-LM")
    if not isinstance(version, (int, float)) or version < 2:
        old = f"checkpoint_version={version!r} is below 2, when qkv had another order"
        raise CheckpointError(f"{files[0, 0]}: {old}; save it again with a newer Megatron-LM")
    options = read_args(args, str(files[0, 0]))
    model = model_of(options, str(files[0, 0]))
    stages = {key: _stages(file, str(files[key])) for key, file in loaded.items()}
    if model.groups % tp or model.num_attention_heads % model.groups:
        raise CheckpointError(f"{folder}: num_query_groups={model.groups} does not split over tp={tp}")
    rows = stages[0, 0][0].get(WORD)
    if rows is None or rows.dim() != 2:
        raise CheckpointError(f"{files[0, 0]}: has no word embeddings; it is not the first stage of a GPT")
    padded = rows.shape[0] * tp
    tensors = _tensors(model, stages, files, padded, tp, pp)
    usual, shards = usual_dtype(tensors), _shards(stages, tp, pp)
    return MegatronModel(folder, options, model, padded, usual, tensors, args, shards)


def _shards(stages: dict[tuple[int, int], list[dict[str, Tensor]]], tp: int, pp: int) -> Callable[..., list[Tensor]]:
    """Of MegatronModel: the stages in the order of the depth, each rank's chunks in turn."""
    depth = [(p, chunk) for chunk in range(len(stages[0, 0])) for p in range(pp)]
    layers: list[tuple[int, int, int]] = []
    for p, chunk in depth:
        numbers = {int(found[1]) for name in stages[0, p][chunk] if (found := LAYER.match(name))}
        layers += [(p, chunk, n) for n in sorted(numbers)]

    def shards(name: str, layer: int) -> list[Tensor]:
        if layer < 0:
            p, chunk = next((at for at in depth if name in stages[0, at[0]][at[1]]), depth[-1])
        else:
            p, chunk, n = layers[layer]
            name = f"decoder.layers.{n}.{name}"
        return [stages[t, p][chunk][name] for t in range(tp)]

    return shards


def _stages(file: Mapping[str, Any], where: str) -> list[dict[str, Tensor]]:
    """The virtual stages of one rank, each as Megatron core's names -> tensors."""
    names = ["model"] if "model" in file else [f"model{i}" for i in range(len(file)) if f"model{i}" in file]
    if not names:
        raise CheckpointError(f"{where}: has no model; give the checkpoint of a model")
    return [_named(_flat(file[name], where), where) for name in names]


def _flat(node: Any, where: str, prefix: str = "", depth: int = 0) -> dict[str, Any]:
    if not isinstance(node, Mapping) or depth > 8:
        raise CheckpointError(f"{where}: {prefix or 'model'} is not a dictionary of tensors")
    result: dict[str, Any] = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        result |= _flat(value, where, name + ".", depth + 1) if isinstance(value, Mapping) else {name: value}
    return result


def _named(flat: dict[str, Any], where: str) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for name, value in flat.items():
        if name.endswith(MEGATRON.ignored):
            continue
        for old, new in SYNONYMS:
            name = name.replace(old, new)
        if not isinstance(value, Tensor) or value.dtype not in CODES:
            raise CheckpointError(f"{where}: {name} is not a floating-point tensor")
        if name in result:
            raise CheckpointError(f"{where}: {name} stands there under two names")
        result[name] = value
    return result


def _tensors(
    model: ModelConfig,
    stages: dict[tuple[int, int], list[dict[str, Tensor]]],
    files: dict[tuple[int, int], Path],
    padded: int,
    tp: int,
    pp: int,
) -> list[Foreign]:
    """Every tensor of every rank once. Raises CheckpointError listing what does not fit."""
    problems, found = [], []
    depth = [(p, chunk) for chunk in range(max(len(rank) for rank in stages.values())) for p in range(pp)]
    held = [[stages[t, p][chunk] if chunk < len(stages[t, p]) else {} for t in range(tp)] for p, chunk in depth]
    ranges: list[range] = []
    for (p, _), here in zip(depth, held, strict=True):
        begin = ranges[-1].stop if ranges else 0
        count = max((1 + int(m[1]) for names in here for name in names if (m := LAYER.match(name))), default=0)
        if begin + count > model.num_layers:
            raise CheckpointError(f"{files[0, p]}: layer {begin + count} is above num_layers={model.num_layers}")
        ranges.append(range(begin, begin + count))
    for number, ((p, _), layers, here) in enumerate(zip(depth, ranges, held, strict=True)):
        specs = specs_of(model, padded, stages=ranges, number=number)
        for t, names in enumerate(here):
            wanted = {r.theirs: r for r in recipes(MEGATRON, specs, model.groups, layers, tp=tp, rank=t)}
            for name, values in names.items():
                place = f"{name} in {files[t, p]}"
                recipe = wanted.get(name)
                if recipe is None:
                    problems.append(f"{place}: not a tensor of this model on this stage")
                elif tuple(values.shape) != recipe.shape:
                    problems.append(f"{place}: shape {tuple(values.shape)}, not {recipe.shape}")
                elif recipe.copy:  # of the first stage's embedding, on the last
                    if not torch.equal(values, stages[t, 0][0][WORD]):
                        problems.append(f"{place}: differs from the embedding that it is tied to")
                elif t > 0 and not any(spec.shards for spec, _ in recipe.parts):  # a replica
                    if not torch.equal(values, here[0].get(name, values.new_zeros(0))):
                        problems.append(f"{place}: differs from tp rank 0's copy")
                else:
                    found.append(Foreign(recipe, values.dtype, place, lambda values=values: values))
    if ranges[-1].stop != model.num_layers:
        problems.append(f"the files hold {ranges[-1].stop} of num_layers={model.num_layers} layers")
    refuse(problems, "the files do not fit their args")
    return found
