"""A Hugging Face model directory, read and written without transformers, with one tensor in memory at a time.

    config.json -> options; model.safetensors, or else the files that model.safetensors.index.json names -> tensors

The files are not trusted. File names must stay inside the directory, and the tensors must be exactly those that the
configuration implies, in their shapes. Only safetensors is read, because the other formats can run code.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format import safetensors_file as tensor_file
from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.format.safetensors_file import WEIGHT_DTYPES
from megalite.common.console import ProgressBar
from megalite.common.tables import load_table
from megalite.common.text_file import TextFileError, read_small_text
from megalite.config.options import ModelConfig
from megalite.interop import tensor_mapping
from megalite.interop.huggingface.config_json import Json, read_config, write_config
from megalite.interop.huggingface.quantization import SCALE_SUFFIX, BlockQuantization, dequantized, read_quantization
from megalite.interop.name_mapping import FAMILIES, ModelFamily, TensorNames, family_names
from megalite.models.specs import checkpoint_specs

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"
AUXILIARY_FILES: list[str] = load_table(__file__, "constants")["companions"]
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
MAX_JSON_BYTES = 1 << 28


def read_json(path: Path) -> Json:
    """Return a JSON object from a file. Raises CheckpointError."""
    try:
        data = json.loads(read_small_text(path, "the directory of a model", MAX_JSON_BYTES))
    except TextFileError as error:
        raise CheckpointError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); give the directory of a model") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: not a JSON object; give the directory of a model")
    return data


def open_model(directory: Path, seq_length: int | None = None) -> tensor_mapping.ExternalModel:
    """Read the configuration and the headers of all files.

    `seq_length` is the number of tokens per sequence in training; by default, as many as the model has positions.
    Raises CheckpointError with all problems.
    """
    path = directory / "config.json"
    config = read_json(path)
    family, options = read_config(config, seq_length, str(path))
    handles = _files(directory)
    num_missing_depths = 0
    naming: ModelFamily = FAMILIES.get(family)
    if options.get("mtp_num_layers") and not _has_depths(handles, naming, options["num_layers"]):
        is_named = any(key in config for key in naming.keys["mtp_num_layers"].split())
        num_missing_depths = options["mtp_num_layers"] if is_named else 0
        options["mtp_num_layers"] = 0
    model, vocab_size = tensor_mapping.build_model_config(options, str(path)), options["vocab_size"]
    if type(vocab_size) is not int or not 0 < vocab_size < 1 << 31:
        raise CheckpointError(f"{path}: vocab_size={vocab_size!r} is out of range; it is damaged")
    quantization = read_quantization(config)
    tensors = _tensors(directory, handles, family_names(family, model), model, vocab_size, quantization)
    return tensor_mapping.ExternalModel(
        directory,
        family,
        options,
        model,
        vocab_size,
        tensors,
        is_quantized=quantization is not None,
        num_missing_depths=num_missing_depths,
    )


def _has_depths(handles: Mapping[str, Any], naming: TensorNames, num_layers: int) -> bool:
    """Return True if the files have depths of multi-token prediction: layers after the last one, or of another name.

    transformers names depths in config.json, also for models that it has saved without them.
    """
    if naming.depth_prefix:
        first_depth = re.compile(re.escape(naming.depth_prefix))
    else:
        first_depth = re.compile(rf"(?:.*\.)?layers\.{num_layers}\.")
    return any(first_depth.match(name) for handle in handles.values() for name in handle.keys())  # noqa: SIM118


def _files(directory: Path) -> dict[str, Any]:
    """Return the opened safetensors files by name, and check them with the index. Raises CheckpointError.

    As in transformers, model.safetensors takes precedence over an index. It is refused if the index names other files
    that exist, too: one of the two is older, and nothing says which.
    """
    index, single = directory / INDEX, directory / SINGLE
    if (directory / ADAPTER).exists():
        remedy = "add them to that model (merge_and_unload of peft), save it, and give the result"
        raise CheckpointError(
            f"{directory}: {ADAPTER} shows that these are changes to another model's weights; {remedy}"
        )
    if not index.exists() and not single.is_file():
        raise CheckpointError(f"{directory}: has neither {SINGLE} nor {INDEX}; {_other_formats(directory)}")
    weight_map = _weight_map(index) if index.exists() else {}
    if single.is_file():
        others = sorted(file for file in set(weight_map.values()) - {SINGLE} if (directory / file).exists())
        if others:
            problem = f"has {SINGLE}, but {INDEX} names {others[0]}"
            raise CheckpointError(f"{directory}: {problem}; delete the wrong files; transformers would read {SINGLE}")
        return {SINGLE: _open(single)}
    files: dict[str, Any] = {}
    for file in sorted(set(weight_map.values())):
        if not (directory / file).is_file():
            raise CheckpointError(f"{directory / file}: missing, but {INDEX} names it; fetch the model again")
        files[file] = _open(directory / file)
        stored = set(files[file].keys())
        if missing := sorted(name for name, f in weight_map.items() if f == file and name not in stored):
            raise CheckpointError(
                f"{directory / file}: has no {missing[0]}, but {INDEX} lists it; fetch the model again"
            )
    return files


def _weight_map(index: Path) -> dict[str, str]:
    """Return the index as {tensor: plain name of its file}. Raises CheckpointError."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: has no weight_map of names to files; it is damaged")
    for file in sorted(set(weight_map.values())):
        if not file or Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            problem = f"{file!r} is not the plain name of a safetensors file"
            raise CheckpointError(f"{index}: {problem}; do not use this model")
    return weight_map


def _other_formats(directory: Path) -> str:
    """Return the advice to the user for a directory that has weights under other names, if any."""
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    safetensors_files = sorted(path.name for path in directory.glob("*.safetensors"))
    if safetensors_files:
        remedy = "give all files and their index, or rename it if it is the only file"
        return f"{safetensors_files[0]} is not read under this name: {remedy}"
    if others:
        return f"{others[0]} can run code and is not read: save the model as safetensors"
    return "give the directory of a model"


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open  # imported here, because training does not need the package

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a complete safetensors file ({error}); fetch the model again") from None


def _tensors(
    directory: Path,
    handles: Mapping[str, Any],
    naming: TensorNames,
    model: ModelConfig,
    vocab_size: int,
    quantization: BlockQuantization | None,
) -> list[tensor_mapping.ExternalTensor]:
    """Return every tensor of the model, in the order of the files. Raises CheckpointError with all problems."""
    stored = [name for handle in handles.values() for name in handle.keys()]  # noqa: SIM118
    possible_names = {prefix + name for name in stored for prefix in ("", naming.prefix)}
    specs, layers = checkpoint_specs(model, vocab_size), tensor_mapping.numbers_of_layers(model)
    groups = tensor_mapping.num_groups(model)
    mappings = tensor_mapping.build_mappings(naming, specs, groups, layers, stored_names=possible_names)
    expected = {mapping.external_name for mapping in mappings}
    unused_depths = _unused_depths(stored, naming, model)
    title = f"{directory} does not fit its config.json"
    tensor_mapping.check_wrapped(stored, expected | {name.removeprefix(naming.prefix) for name in expected}, title)
    tensors: dict[str, tensor_mapping.FileTensor] = {}
    problems = []
    for file, handle in handles.items():
        for name in sorted(handle.keys()):
            if name.startswith(unused_depths):
                continue
            full_name = name if name.removesuffix(SCALE_SUFFIX) in expected else naming.prefix + name
            if full_name in tensors:
                problems.append(f"{name} in {file}: a duplicate of {tensors[full_name].location}")
            elif full_name in expected or not (
                name.endswith(naming.ignored) or name.startswith(naming.ignored_prefixes)
            ):
                header = handle.get_slice(name)
                shape, code = tuple(header.get_shape()), header.get_dtype()
                load = partial(_read, handle, name, directory / file)
                tensors[full_name] = tensor_mapping.FileTensor(
                    shape, WEIGHT_DTYPES.get(code) or code, f"{name} in {file}", load
                )
    if quantization is not None:
        tensors, scale_problems = dequantized(tensors, quantization)
        tensor_mapping.raise_problems(problems + scale_problems, title)
    remedy = "set tie_word_embeddings to false in it"
    return tensor_mapping.match_tensors([(tensors, mappings)], title, remedy, problems)


def _unused_depths(stored: Sequence[str], naming: TensorNames, model: ModelConfig) -> tuple[str, ...]:
    """Return the prefixes of the names of depths in the files of a model whose config.json has none.

    A layer after the last one is a depth if it has the projection of one, unless depths have a prefix of their own.
    transformers leaves them out, too.
    """
    if model.num_mtp_depths or not naming.has_depths:
        return ()
    if naming.depth_prefix:
        return (naming.depth_prefix,)
    projections = (re.fullmatch(r"((?:.*\.)?layers\.(\d+)\.)eh_proj\.weight", name) for name in stored)
    return tuple(match[1] for match in projections if match and int(match[2]) >= model.num_layers)


def _read(handle: Any, name: str, path: Path) -> Tensor:
    from safetensors import SafetensorError

    try:
        return handle.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {name} cannot be read ({error}); fetch the model again") from None


def auxiliary_files(directory: Path | None) -> dict[str, Path | str]:
    """Return the files of a directory that are copied along with its model, as {name: path}."""
    return (
        {}
        if directory is None
        else {name: directory / name for name in AUXILIARY_FILES if (directory / name).is_file()}
    )


def special_token_ids(directory: Path | None) -> Json:
    """Return bos_token_id, eos_token_id and pad_token_id of a directory's config.json, if there is one."""
    if directory is None or not (directory / "config.json").is_file():
        return {}
    config = read_json(directory / "config.json")
    return {name: config[name] for name in TOKENS if name in config}


def stop_ids(directory: Path) -> list[int]:
    """Return the token ids that end a text.

    These are the eos_token_id of generation_config.json, or else of config.json. Raises CheckpointError.
    """
    path = directory / "generation_config.json"
    eos = read_json(path).get("eos_token_id") if path.is_file() else None
    if eos is None:
        eos = special_token_ids(directory).get("eos_token_id")
    if eos is None:
        return []
    ids = eos if isinstance(eos, list) else [eos]
    if not all(type(i) is int for i in ids):
        raise CheckpointError(f"{directory}: eos_token_id={eos!r} is neither a token id nor a list of them; correct it")
    return ids


def write_model(
    directory: Path,
    source: tensor_mapping.ExportSource,
    model: ModelConfig,
    family: str,
    vocab_size: int,
    *,
    tokens: Json,
    files: Mapping[str, Path | str] | None = None,
    shard_bytes: int = 5 * 10**9,
) -> tensor_mapping.ExternalModel:
    """Write a directory that `AutoModelForCausalLM.from_pretrained` loads, and open it.

    The vocabulary is written without padding.

    Args:
        directory: The directory, which must be empty or missing.
        source: The checkpoint to export.
        model: The configuration of the model.
        family: The family whose format is written.
        vocab_size: The number of tokens.
        tokens: bos_token_id and other special tokens for config.json.
        files: Additional files, such as those of the tokenizer: name -> a file to copy, or a text.
        shard_bytes: The maximum size of a file with weights.

    Raises:
        CheckpointError: The directory cannot be written, or `vocab_size` is above the rows of the embedding.
    """
    specs = checkpoint_specs(model, vocab_size)
    all_mappings = tensor_mapping.build_mappings(
        family_names(family, model), specs, tensor_mapping.num_groups(model), tensor_mapping.numbers_of_layers(model)
    )
    mappings = [mapping for mapping in all_mappings if mapping.is_written]
    rows = min(source.checkpoint.shape(f"model/{spec.name}")[0] for spec in specs.values() if spec.is_vocab)
    if rows < vocab_size:
        raise CheckpointError(f"vocab_size={vocab_size} is above the {rows} rows of the embedding; give at most those")
    with tensor_mapping.atomic_directory(directory) as staging_dir:
        widest_dtype = _write_shards(staging_dir, source, mappings, shard_bytes)
        config = write_config(model, family, vocab_size, str(widest_dtype).removeprefix("torch."), tokens)
        _write_json(staging_dir / "config.json", config)
        for name, content in (files or {}).items():
            if isinstance(content, Path):
                shutil.copyfile(content, staging_dir / name)
            else:
                (staging_dir / name).write_text(content, encoding="utf-8")
        if not (staging_dir / "generation_config.json").exists():
            _write_json(staging_dir / "generation_config.json", {name: config.get(name) for name in TOKENS[:2]})
    return open_model(directory)


def _write_shards(
    staging_dir: Path,
    source: tensor_mapping.ExportSource,
    mappings: Sequence[tensor_mapping.TensorMapping],
    shard_bytes: int,
) -> torch.dtype:
    """Write the files and their index, and return the widest dtype of a weight."""
    planned = [
        (
            mapping,
            tensor_file.PlannedTensor(mapping.external_name, source.dtype_of(mapping.parts[0][0].name), mapping.shape),
        )
        for mapping in mappings
    ]
    planned.sort(key=lambda pair: -pair[1].dtype.itemsize)
    files = tensor_file.split_by_size([plan.num_bytes for _, plan in planned], shard_bytes)
    weight_map: dict[str, str] = {}
    with ProgressBar("writing for Hugging Face", len(planned), "tensors") as bar:
        for number, indices in enumerate(files, start=1):
            name = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            pairs = [planned[i] for i in indices]
            plans = [plan for _, plan in pairs]
            values = tensor_file.flatten(plans, (source.join(mapping) for mapping, _ in bar.track(pairs)))
            tensor_file.write_safetensors(staging_dir / name, plans, values, align=8)
            weight_map |= {plan.key: name for _, plan in pairs}
    if len(files) > 1:
        total_bytes = sum(plan.num_bytes for _, plan in planned)
        _write_json(staging_dir / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    return next(plan.dtype for mapping, plan in planned if mapping.parts[0][0].is_parameter)


def _write_json(path: Path, data: Json) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
