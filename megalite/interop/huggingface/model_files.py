"""A Hugging Face model directory, read and written without transformers, with one tensor in memory at a time.

    config.json -> options; model.safetensors, or else the files that model.safetensors.index.json names -> tensors

Nothing is trusted: names of files stay inside the directory, and the tensors must be exactly those that the
configuration asks for, in their shapes. Only safetensors is read, since the other formats can run code.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format import safetensors_file as tensor_file
from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.format.safetensors_file import DTYPES
from megalite.common.tables import load_table
from megalite.config.console import ProgressBar
from megalite.config.options import ModelConfig
from megalite.config.text_file import TextFileError, read_small_text
from megalite.interop import tensor_mapping as convert
from megalite.interop.huggingface.config_json import Json, read_config, write_config
from megalite.interop.name_mapping import FAMILIES, TensorNames
from megalite.models.specs import model_specs

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"
AUXILIARY_FILES: list[str] = load_table(__file__, "constants")["companions"]
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
MAX_JSON_BYTES = 1 << 28


def read_json(path: Path) -> Json:
    """A JSON object. Raises CheckpointError."""
    try:
        data = json.loads(read_small_text(path, "the directory of a model", MAX_JSON_BYTES))
    except TextFileError as error:
        raise CheckpointError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); give the directory of a model") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: not a JSON object; give the directory of a model")
    return data


def open_model(folder: Path, seq_length: int | None = None) -> convert.ExternalModel:
    """Read the configuration and the headers of all files. Raises CheckpointError with all problems."""
    path = folder / "config.json"
    family, options = read_config(read_json(path), seq_length, str(path))
    model, vocab_size = convert.build_model_config(options, str(path)), options["vocab_size"]
    if type(vocab_size) is not int or not 0 < vocab_size < 1 << 31:
        raise CheckpointError(f"{path}: vocab_size={vocab_size!r} is out of range; it is damaged")
    tensors = _tensors(folder, FAMILIES.get(family), model, vocab_size)
    return convert.ExternalModel(folder, family, options, model, vocab_size, tensors)


def _files(folder: Path) -> dict[str, Any]:
    """The safetensors files by name, opened, checked with the index. Raises CheckpointError.

    As in transformers, model.safetensors comes before an index. It is refused where the index names other files that
    are there, too: one of the two is older, and nothing says which.
    """
    index, single = folder / INDEX, folder / SINGLE
    if (folder / ADAPTER).exists():
        remedy = "add them to that model (merge_and_unload of peft), save it, and give the result"
        raise CheckpointError(f"{folder}: {ADAPTER} says that these are changes to another model's weights; {remedy}")
    if not index.exists() and not single.is_file():
        raise CheckpointError(f"{folder}: has neither {SINGLE} nor {INDEX}; {_other_formats(folder)}")
    weight_map = _weight_map(index) if index.exists() else {}
    if single.is_file():
        others = sorted(file for file in set(weight_map.values()) - {SINGLE} if (folder / file).exists())
        if others:
            both = f"has {SINGLE}, but {INDEX} names {others[0]}"
            raise CheckpointError(f"{folder}: {both}; delete what is not meant, transformers would read {SINGLE}")
        return {SINGLE: _open(single)}
    files: dict[str, Any] = {}
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file}: missing, but {INDEX} names it; fetch the model again")
        files[file] = _open(folder / file)
        stored = set(files[file].keys())
        if lost := sorted(name for name, f in weight_map.items() if f == file and name not in stored):
            raise CheckpointError(f"{folder / file}: has no {lost[0]}, but {INDEX} lists it; fetch the model again")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> the plain name of its file. Raises CheckpointError."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: has no weight_map of names to files; it is damaged")
    for file in sorted(set(weight_map.values())):
        if not file or Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            wrong = f"{file!r} is not the plain name of a safetensors file"
            raise CheckpointError(f"{index}: {wrong}; do not use this model")
    return weight_map


def _other_formats(folder: Path) -> str:
    """What to do with a directory that has weights under other names, if any."""
    others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if named := sorted(p.name for p in folder.glob("*.safetensors")):
        return f"{named[0]} is not read under this name: give all files and their index, or rename it if it is alone"
    if others:
        return f"{others[0]} can run code and is not read: save the model as safetensors"
    return "give the directory of a model"


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open  # here, since training does not need the package

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a complete safetensors file ({error}); fetch the model again") from None


def _tensors(folder: Path, naming: TensorNames, model: ModelConfig, vocab_size: int) -> list[convert.ExternalTensor]:
    """Every tensor of the model, in the order of the files. Raises CheckpointError with all problems."""
    handles = _files(folder)
    there = {start + name for handle in handles.values() for name in handle.keys() for start in ("", naming.prefix)}  # noqa: SIM118
    specs, layers = model_specs(model, vocab_size), range(model.num_layers)
    wanted = convert.build_mappings(naming, specs, model.num_kv_groups, layers, found=there)
    title = f"{folder} does not fit its config.json"
    convert.check_wrapped(
        [name for handle in handles.values() for name in handle.keys()],  # noqa: SIM118
        {recipe.external_name for recipe in wanted}
        | {recipe.external_name.removeprefix(naming.prefix) for recipe in wanted},
        title,
    )
    found, problems, known = dict[str, convert.FileTensor](), [], {recipe.external_name for recipe in wanted}
    for file, handle in handles.items():
        for name in sorted(handle.keys()):
            theirs = name if name in known else naming.prefix + name
            if theirs in found:
                problems.append(f"{name} in {file}: a second one, beside {found[theirs].place}")
            elif theirs in known or not name.endswith(naming.ignored):
                part = handle.get_slice(name)
                shape, code = tuple(part.get_shape()), part.get_dtype()
                load = partial(_read, handle, name, folder / file)
                found[theirs] = convert.FileTensor(shape, DTYPES.get(code) or code, f"{name} in {file}", load)
    return convert.match_tensors([(found, wanted)], title, "set tie_word_embeddings to false in it", problems)


def _read(handle: Any, name: str, path: Path) -> Tensor:
    from safetensors import SafetensorError

    try:
        return handle.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {name} cannot be read ({error}); fetch the model again") from None


def auxiliary_files(folder: Path | None) -> dict[str, Path | str]:
    """The files of a directory that are copied with its model, name to path."""
    return {} if folder is None else {name: folder / name for name in AUXILIARY_FILES if (folder / name).is_file()}


def special_token_ids(folder: Path | None) -> Json:
    """bos_token_id and the like of a directory's config.json, where there is one."""
    if folder is None or not (folder / "config.json").is_file():
        return {}
    config = read_json(folder / "config.json")
    return {name: config[name] for name in TOKENS if name in config}


def stop_ids(folder: Path) -> list[int]:
    """The ids that end a text: eos_token_id of generation_config.json, else of config.json. Raises CheckpointError."""
    path = folder / "generation_config.json"
    given = read_json(path).get("eos_token_id") if path.is_file() else None
    given = special_token_ids(folder).get("eos_token_id") if given is None else given
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(i) is int for i in ids):
        raise CheckpointError(f"{folder}: eos_token_id={given!r} is neither a token id nor a list of them; correct it")
    return ids


def write_model(
    folder: Path,
    ours: convert.ExportSource,
    model: ModelConfig,
    family: str,
    vocab_size: int,
    *,
    tokens: Json,
    files: Mapping[str, Path | str] | None = None,
    shard_bytes: int = 5 * 10**9,
) -> convert.ExternalModel:
    """Write a directory that `AutoModelForCausalLM.from_pretrained` loads, and open it. The vocabulary has no padding.
    `folder` must be empty or missing. Raises CheckpointError. `tokens`: bos_token_id and the like. `files`: further
    files, as the tokenizer's: name to a file to copy, or to a text."""
    specs = model_specs(model, vocab_size)
    every = convert.build_mappings(FAMILIES.get(family), specs, model.num_kv_groups, range(model.num_layers))
    wanted = [recipe for recipe in every if not recipe.is_duplicate]
    rows = min(ours.source.shape(f"model/{spec.name}")[0] for spec in specs.values() if spec.is_vocab)
    if rows < vocab_size:
        raise CheckpointError(f"vocab_size={vocab_size} is above the {rows} rows of the embedding; give at most those")
    with convert.atomic_directory(folder) as part:
        widest = _write_shards(part, ours, wanted, shard_bytes)
        config = write_config(model, family, vocab_size, str(widest)[6:], tokens)
        _write_json(part / "config.json", config)
        for name, content in (files or {}).items():
            if isinstance(content, Path):
                shutil.copyfile(content, part / name)
            else:
                (part / name).write_text(content, encoding="utf-8")
        if not (part / "generation_config.json").exists():
            _write_json(part / "generation_config.json", {name: config.get(name) for name in TOKENS[:2]})
    return open_model(folder)


def _write_shards(
    part: Path, ours: convert.ExportSource, wanted: Sequence[convert.TensorMapping], shard_bytes: int
) -> torch.dtype:
    """Write the files and their index; returns their widest dtype."""
    planned = [
        (r, tensor_file.PlannedTensor(r.external_name, ours.dtype_of(r.parts[0][0].name), r.shape)) for r in wanted
    ]
    planned.sort(key=lambda pair: -pair[1].dtype.itemsize)
    files = tensor_file.split_by_size([plan.bytes for _, plan in planned], shard_bytes)
    weight_map: dict[str, str] = {}
    with ProgressBar("writing for Hugging Face", len(planned), "tensors") as bar:
        for number, chosen in enumerate(files, start=1):
            name = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            pairs = [planned[i] for i in chosen]
            plans = [plan for _, plan in pairs]
            values = tensor_file.flatten(plans, (ours.join(recipe) for recipe, _ in bar.track(pairs)))
            tensor_file.write_safetensors(part / name, plans, values, align=8)
            weight_map |= {plan.key: name for _, plan in pairs}
    if len(files) > 1:
        total = sum(plan.bytes for _, plan in planned)
        _write_json(part / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return planned[0][1].dtype


def _write_json(path: Path, data: Json) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
