"""Seeded mutations of external files: read, or refused with one clear error; never another exception, never slow."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from megalite.interop.name_mapping import family_names
from megalite.interop.tensor_mapping import (
    ExternalTensor,
    build_mappings,
    build_model_config,
    num_groups,
    numbers_of_layers,
)
from megalite.models.specs import checkpoint_specs

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


SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 20}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 8}
QWEN = {"model_type": "qwen3", "head_dim": 8}
DEEPSEEK = {"model_type": "deepseek_v3", "kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 6, "v_head_dim": 6}
DEEPSEEK |= {"qk_rope_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
DEEPSEEK |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
NEMOTRON = {"model_type": "nemotron_h", "hybrid_override_pattern": "M*-E", "num_hidden_layers": 4, "head_dim": 8}
NEMOTRON |= {"mamba_num_heads": 4, "mamba_head_dim": 6, "ssm_state_size": 5, "n_groups": 2, "n_routed_experts": 4}
NEMOTRON |= {"moe_intermediate_size": 8, "moe_shared_expert_intermediate_size": 8, "time_step_limit": [0.0, math.inf]}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}


def hub(name: str, keys: dict[str, Any] = QWEN) -> Callable[[Path], tuple[Path, Callable[[], list[ExternalTensor]]]]:
    def make(directory: Path) -> tuple[Path, Callable[[], list[ExternalTensor]]]:
        directory.mkdir()
        config = {**SIZES, **keys}
        (directory / "config.json").write_text(json.dumps(config))
        family, options = read_config(config, None, "")
        model = build_model_config(options, "")
        specs, layers = checkpoint_specs(model, 20), numbers_of_layers(model)
        tensors = {}
        for mapping in build_mappings(family_names(family, model), specs, num_groups(model), layers):
            values = torch.ones(mapping.shape)
            if "quantization_config" in config and mapping.external_name.endswith("_proj.weight"):
                blocks = [-(-size // 8) for size in mapping.shape]
                tensors[f"{mapping.external_name}_scale_inv"] = torch.ones(blocks)
                values = values.to(torch.float8_e4m3fn)
            tensors[mapping.external_name] = values
        save_file(tensors, directory / "model.safetensors")
        return directory / name, lambda: list(hugging_face.open_model(directory).tensors)

    return make


TARGETS = {
    "Megatron-LM": legacy,
    ".metadata": dist(".metadata"),
    "distcp": dist("__0_0.distcp"),
    "config.json": hub("config.json", QWEN),
    "safetensors": hub("model.safetensors", QWEN),
    "config.json of DeepSeek": hub("config.json", DEEPSEEK),
    "safetensors of DeepSeek": hub("model.safetensors", DEEPSEEK),
    "config.json of Nemotron-H": hub("config.json", NEMOTRON),
    "safetensors of Nemotron-H": hub("model.safetensors", NEMOTRON),
    "config.json of FP8": hub("config.json", {**DEEPSEEK, **FP8}),
    "safetensors of FP8": hub("model.safetensors", {**DEEPSEEK, **FP8}),
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
