"""A Hugging Face model directory, read without transformers; write.py writes one.

    config.json -> options; model.safetensors, or the files that model.safetensors.index.json names -> tensors

Nothing is trusted: names of files stay inside the directory, every tensor must be one that the configuration asks for
and has its shape, and no tensor may be missing. Only safetensors is read, since the other formats can run code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.format.tensor_file import DTYPES
from megalite.config.options import ModelConfig
from megalite.interop.convert import Foreign, model_of
from megalite.interop.hugging_face.config_json import Json, read_config
from megalite.interop.rules import Entry, entries, specs_of
from megalite.models.families import HUGGING_FACE, Family

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# that belong to a model and are copied with it; no code among them
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LARGEST_JSON = 1 << 28  # bytes
_MOST_LAYERS = 10_000  # more is a damaged file, and would take long to refuse


def read_json(path: Path) -> Json:
    """A JSON object. Raises CheckpointError."""
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise CheckpointError(f"{path}: implausibly large for a JSON file; it is damaged")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); give the directory of a model") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: not a JSON object; give the directory of a model")
    return data


@dataclass(frozen=True)
class HuggingFaceModel:
    """A directory that was opened: `options` of config.json, and every tensor of it."""

    folder: Path
    family: str
    options: Json
    model: ModelConfig
    vocab_size: int
    dtype: torch.dtype
    tensors: list[Foreign]


def open_model(folder: Path, seq_length: int | None = None) -> HuggingFaceModel:
    """Read the configuration and the headers of all files. Raises CheckpointError listing what is wrong."""
    config = read_json(folder / "config.json")
    family, options = read_config(config, seq_length, str(folder / "config.json"))
    model = model_of(options, str(folder / "config.json"))
    vocab_size = options["vocab_size"]
    whole = {name: value for name, value in options.items() if isinstance(value, int) and not isinstance(value, bool)}
    wrong = [f"{name}={value}" for name, value in whole.items() if not 0 < value < 1 << 31]
    if model.num_layers > _MOST_LAYERS or not isinstance(vocab_size, int):
        wrong += [f"num_layers={model.num_layers}", f"vocab_size={vocab_size!r}"]
    if not wrong and (model.num_attention_heads % model.groups or model.head_size < 1):
        wrong.append(f"num_query_groups={model.groups} with num_attention_heads={model.num_attention_heads}")
    if wrong:
        raise CheckpointError(f"{folder / 'config.json'}: {', '.join(wrong)} cannot be; it is damaged")
    wanted = entries(HUGGING_FACE[family], specs_of(model, vocab_size), model.groups, range(model.num_layers))
    tensors = _tensors(folder, HUGGING_FACE[family], wanted, not model.untie_embeddings_and_output_weights)
    counts = {dtype: sum(t.dtype == dtype for t in tensors) for dtype in {t.dtype for t in tensors}}
    usual = max(counts, key=lambda dtype: counts[dtype])
    return HuggingFaceModel(folder, family, options, model, vocab_size, usual, tensors)


def _files(folder: Path) -> list[str]:
    """Names of the safetensors files, checked against the index. Raises CheckpointError."""
    index = folder / INDEX
    if not index.exists():
        if (folder / SINGLE).is_file():
            return [SINGLE]
        others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        hint = f"; {others[0]} can run code and is not read: save the model as safetensors" if others else ""
        raise CheckpointError(f"{folder}: has neither {SINGLE} nor {INDEX}{hint}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: has no weight_map of names to files; it is damaged")
    files = sorted(set(weight_map.values()))
    for file in files:
        if not file or Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: file {file!r} is not the plain name of a safetensors file; do not use it")
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file}: missing, but {INDEX} names it; fetch the model again")
        found = set(_open(folder / file).keys())
        if lost := sorted(name for name, f in weight_map.items() if f == file and name not in found):
            raise CheckpointError(f"{folder / file}: has no {lost[0]}, but {INDEX} says so; fetch the model again")
    return files


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open  # here, since training does not need the package

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}); fetch the model again") from None


def _tensors(folder: Path, family: Family, wanted: Sequence[Entry], tied: bool) -> list[Foreign]:
    """Every wanted tensor in the order of the files. Raises CheckpointError listing what does not fit."""
    missing = {entry.theirs: entry for entry in wanted}
    heads = {rule.theirs: "embedding.word" for rule in family.rules if rule.ours == ("head",)} if tied else {}
    word = next(entry for entry in wanted if entry.parts[0][0] == "embedding.word")
    problems, found, copies = [], [], []
    for file in _files(folder):
        handle = _open(folder / file)
        for name in sorted(handle.keys()):
            known = name if name in missing or name in heads else family.prefix + name
            entry = word if known in heads else missing.pop(known, None)
            if entry is None:
                if not name.endswith(family.ignored):
                    problems.append(f"{name} in {file}: not a tensor of this model, or twice")
                continue
            part = handle.get_slice(name)
            shape, dtype = tuple(part.get_shape()), DTYPES.get(part.get_dtype())
            if dtype is None:
                problems.append(f"{name} in {file}: {part.get_dtype()} is not a floating-point type of ours")
            elif shape != entry.shape:
                problems.append(f"{name} in {file}: shape {shape}, not {entry.shape}")
            else:
                one = Foreign(entry, dtype, f"{name} in {file}", _Read(handle, name, folder / file))
                (copies if known in heads else found).append(one)
    problems += [f"{name} is missing" for name in missing]
    if problems:
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(f"{folder} does not fit its config.json:\n  " + "\n  ".join(problems[:20]) + more)
    for copy in copies:
        table = next(one for one in found if one.entry is word)
        if not torch.equal(copy.read(), table.read()):
            raise CheckpointError(
                f"{folder}: {copy.place} differs from the embedding that config.json ties it to; "
                "set tie_word_embeddings to false in it"
            )
    return found


@dataclass(frozen=True)
class _Read:
    handle: Any
    name: str
    path: Path

    def __call__(self) -> Tensor:
        from safetensors import SafetensorError

        try:
            return self.handle.get_tensor(self.name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{self.path}: {self.name} cannot be read ({error})") from None


def companions(folder: Path | None) -> dict[str, Path | str]:
    """The files of a directory that go with its model: tokenizer and generation config; name to path."""
    return {} if folder is None else {name: folder / name for name in COMPANIONS if (folder / name).is_file()}


def token_ids(folder: Path | None) -> Json:
    """bos_token_id and the like of a directory's config.json, where there is one."""
    if folder is None or not (folder / "config.json").is_file():
        return {}
    config = read_json(folder / "config.json")
    return {name: config[name] for name in TOKENS if name in config}


def stop_ids(folder: Path) -> list[int]:
    """The ids that end a text: eos_token_id of generation_config.json, else of config.json. Raises CheckpointError."""
    path = folder / "generation_config.json"
    given = read_json(path).get("eos_token_id") if path.is_file() else None
    found = token_ids(folder).get("eos_token_id") if given is None else given
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{folder}: eos_token_id={found!r} is no token id or list of them; mend its JSON files")
    return ids
