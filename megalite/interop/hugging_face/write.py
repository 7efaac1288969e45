"""Writes a Hugging Face model directory, without transformers and with one tensor in memory at a time."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megalite.checkpoint.format import tensor_file
from megalite.checkpoint.format.manifest import CheckpointError
from megalite.config.console import Bar
from megalite.config.options import ModelConfig
from megalite.interop.convert import Ours, new_directory
from megalite.interop.hugging_face.config_json import Json, write_config
from megalite.interop.hugging_face.model_files import INDEX, SINGLE, TOKENS, HuggingFaceModel, open_model
from megalite.interop.rules import Recipe, recipes
from megalite.models.families import FAMILIES
from megalite.models.specs import specs_of


def write_model(
    folder: Path,
    ours: Ours,
    model: ModelConfig,
    family: str,
    vocab_size: int,
    *,
    tokens: Json,
    files: Mapping[str, Path | str] | None = None,
    shard_bytes: int = 5 * 10**9,
) -> HuggingFaceModel:
    """Write a directory that `AutoModelForCausalLM.from_pretrained` loads, and open it. The vocabulary has no padding.
    `folder` must be empty or missing. Raises CheckpointError.

    tokens: bos_token_id and the like. files: further files, as the tokenizer's: name to a file to copy, or to a text.
    """
    specs = specs_of(model, vocab_size)
    every = recipes(FAMILIES[family], specs, model.groups, range(model.num_layers))
    wanted = [recipe for recipe in every if not recipe.copy]
    rows = min(ours.source.shape(f"model/{spec.name}")[0] for spec in specs.values() if spec.vocabulary)
    if rows < vocab_size:
        raise CheckpointError(f"vocab_size={vocab_size} is above the {rows} rows of the embedding; give at most those")
    with new_directory(folder) as part:
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


def _write_shards(part: Path, ours: Ours, wanted: Sequence[Recipe], shard_bytes: int) -> torch.dtype:
    """Write the files and their index; returns their widest dtype."""
    planned = [(r, tensor_file.Planned(r.theirs, ours.dtype_of(r.parts[0][0].name), r.shape)) for r in wanted]
    planned.sort(key=lambda pair: -pair[1].dtype.itemsize)
    files = tensor_file.cut([plan.bytes for _, plan in planned], shard_bytes)
    weight_map: dict[str, str] = {}
    with Bar("writing for Hugging Face", len(planned), "tensors") as bar:
        for number, chosen in enumerate(files, start=1):
            name = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            pairs = [planned[i] for i in chosen]
            plans = [plan for _, plan in pairs]
            values = tensor_file.flat(plans, (ours.join(recipe) for recipe, _ in bar.each(pairs)))
            tensor_file.write(part / name, plans, values, align=8)
            weight_map |= {plan.key: name for _, plan in pairs}
    if len(files) > 1:
        total = sum(plan.bytes for _, plan in planned)
        _write_json(part / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return planned[0][1].dtype


def _write_json(path: Path, data: Json) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
