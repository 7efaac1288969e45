"""Seeded mutations of external files: read, or refused with one clear error; never another exception, never slow."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import test_convert_megatron as megatron_files
import test_convert_megatron_dist as dist_files
import torch
from safetensors.torch import save_file
from token_files import mutate

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.interop.huggingface import model_files as hugging_face
from megalite.interop.huggingface.config_json import read_config
from megalite.interop.megatron import torch_dist_format as megatron_dist
from megalite.interop.megatron import torch_format as megatron
from megalite.interop.name_mapping import FAMILIES
from megalite.interop.tensor_mapping import ExternalTensor, build_mappings, build_model_config
from megalite.models.specs import model_specs

ROUNDS = 120


def legacy(directory: Path) -> tuple[Path, Callable[[], list[ExternalTensor]]]:
    megatron_files.write(directory, megatron_files.Case(fused=False), attention_backend=None)
    return next(
        directory.rglob("*.pt")
    ), lambda: megatron.open_torch_checkpoint(directory, log=lambda text: None).tensors


def dist(name: str) -> Callable[[Path], tuple[Path, Callable[[], list[ExternalTensor]]]]:
    def make(directory: Path) -> tuple[Path, Callable[[], list[ExternalTensor]]]:
        target = dist_files.write(directory, dist_files.GPT)
        return target / name, lambda: megatron_dist.open_checkpoint(target, log=lambda text: None).tensors

    return make


def hub(name: str) -> Callable[[Path], tuple[Path, Callable[[], list[ExternalTensor]]]]:
    def make(directory: Path) -> tuple[Path, Callable[[], list[ExternalTensor]]]:
        directory.mkdir()
        sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 20}
        sizes |= {"num_key_value_heads": 2, "head_dim": 8}
        config = {"model_type": "qwen3", "intermediate_size": 24, "max_position_embeddings": 8, **sizes}
        (directory / "config.json").write_text(json.dumps(config))
        model = build_model_config(read_config(config, None, "")[1], "")
        mappings = build_mappings(FAMILIES.get("qwen3"), model_specs(model, 20), model.num_kv_groups, range(2))
        save_file(
            {recipe.external_name: torch.ones(recipe.shape) for recipe in mappings}, directory / "model.safetensors"
        )
        return directory / name, lambda: hugging_face.open_model(directory).tensors

    return make


TARGETS = {
    "Megatron-LM": legacy,
    ".metadata": dist(".metadata"),
    "distcp": dist("__0_0.distcp"),
    "config.json": hub("config.json"),
    "safetensors": hub("model.safetensors"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS)
def test_mutated_files_are_read_or_refused(target: str, tmp_path: Path) -> None:
    path, read = TARGETS[target](tmp_path / "files")
    content = path.read_bytes()
    assert all(tensor.read().shape == tensor.mapping.shape for tensor in read())
    num_refused = 0
    for seed in range(ROUNDS):
        path.write_bytes(mutate(content, random.Random(seed)))
        try:
            for tensor in read():
                assert tensor.read().shape == tensor.mapping.shape
        except CheckpointError:
            num_refused += 1
    assert num_refused > ROUNDS // 4
