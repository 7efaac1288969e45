"""Conversion of OLMo 2 and OLMo Hybrid, beyond what test_convert_hugging_face.py tests of all families."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_cases import MODELS, create_model
from safetensors.torch import load_file, save_file
from test_convert_hugging_face import TOLERANCE, load_transformers, megalite_logits, tool, transformers_logits

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.offline import open_checkpoint
from megalite.config.options import ModelConfig, build
from megalite.interop.huggingface.config_json import choose_family, incompatibilities, read_config
from megalite.interop.name_mapping import FAMILIES
from megalite.models.families import PRESETS

LINEAR, FULL = "linear_attention", "full_attention"
UNROTATED = {"rope_type": "default", "rope_theta": None}


def hybrid_config(**changes: Any) -> dict[str, Any]:
    """Return the config.json of a small OLMo Hybrid."""
    values = {**MODELS["olmo_hybrid"][1], "model_type": "olmo_hybrid", **changes}
    return {key: value for key, value in values.items() if value != "missing"}


def read_model(config: dict[str, Any]) -> ModelConfig:
    return build(read_config(config, None, "it")[1]).model


def published_config() -> dict[str, Any]:
    """Return the defaults of transformers' class, which are the published sizes."""
    from transformers import OlmoHybridConfig

    config = json.loads(OlmoHybridConfig().to_json_string(use_diff=False))
    return {**config, "rope_parameters": UNROTATED}


def test_published_sizes_are_read() -> None:
    model = read_model(published_config())
    assert [layer.mixer for layer in model.layers] == (["gated_delta_net"] * 3 + ["attention"]) * 8
    assert [layer.normalizes_outputs for layer in model.layers] == [False, False, False, True] * 8
    heads = (model.linear_num_key_heads, model.linear_num_value_heads)
    assert heads == (30, 30) and (model.linear_key_head_dim, model.linear_value_head_dim) == (96, 192)
    assert (model.norm_epsilon, model.linear_norm_eps, model.linear_allow_neg_eigval) == (1e-6, 1e-5, True)
    assert model.qk_layernorm_over_heads and not model.uses_rope


def test_preset_equals_the_published_model() -> None:
    preset = build({**PRESETS["olmo-hybrid-7b"]}).model
    published = build(read_config(published_config(), preset.seq_length, "it")[1]).model
    assert replace(published, max_position_embeddings=preset.seq_length) == preset  # the length of pretraining


@pytest.mark.parametrize("num_layers", [1, 3, 4, 9])
def test_layers_without_layer_types_are_those_of_transformers(num_layers: int) -> None:
    from transformers import OlmoHybridConfig

    config = hybrid_config(layer_types=None, num_hidden_layers=num_layers)
    if num_layers == 1:
        with pytest.raises(
            CheckpointError, match="layer_types has only 'full_attention', but olmo_hybrid has layers of"
        ):
            read_model(config)
        return
    kinds = OlmoHybridConfig(num_hidden_layers=num_layers).layer_types
    assert [LINEAR if layer.is_recurrent else FULL for layer in read_model(config).layers] == kinds


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": None},
        {"rope_parameters": {"rope_theta": None}},
        {"rope_parameters": {}},
        {"rope_parameters": None, "rope_theta": None},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 7.0},
        {"rope_parameters": UNROTATED, "rope_theta": 7.0},
        {"rope_parameters": "missing", "rope_theta": 9.0},
        {"rope_parameters": "missing"},
        {"rope_parameters": None, "rope_scaling": UNROTATED},
    ],
    ids=str,
)
def test_positions_are_those_of_transformers(changes: dict[str, Any]) -> None:
    from transformers import OlmoHybridConfig

    config = hybrid_config(**changes)
    base = OlmoHybridConfig(**config).rope_parameters["rope_theta"]
    model = read_model(config)
    assert {layer.rope.base if layer.rope else None for layer in model.layers if layer.has_attention} == {base}


@pytest.mark.parametrize(
    "changes,problem",
    [
        ({"attention_bias": True}, "attention_bias=True is not False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not silu"),
        ({"layer_types": [LINEAR] * 3}, "layer_types has only 'linear_attention', but olmo_hybrid has layers of both"),
        ({"layer_types": [FULL] * 3}, "layer_types has only 'full_attention', but olmo_hybrid has layers of both"),
        ({"layer_types": [LINEAR, FULL, "sliding_attention"]}, "'sliding_attention', which olmo_hybrid does not have"),
        ({"full_attention_interval": 2}, "full_attention_interval=2 is not 4"),
        ({"linear_num_key_heads": "missing"}, "linear_num_key_heads is missing"),
        ({"clip_qkv": 8.0}, "clip_qkv: queries, keys and values are clipped"),
    ],
    ids=str,
)
def test_unsupported_values_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        read_config(hybrid_config(**changes), None, "it")


@pytest.mark.parametrize(
    "changes,family,problem",
    [
        ({"norm_placement": "output"}, "olmo_hybrid", "norm_placement=output is not attention_output"),
        ({"norm_placement": "input"}, "olmo_hybrid", "norm_placement=input is not attention_output"),
        ({"linear_norm_epsilon": 1e-4}, "olmo_hybrid", "linear_norm_epsilon=0.0001 is not 1e-05"),
        ({"linear_norm_epsilon": None}, "olmo_hybrid", "linear_norm_epsilon=None is not 1e-05"),
        ({"linear_attention_freq": None, "experimental_attention_variant": None}, "olmo_hybrid", "without which"),
        ({"experimental_attention_variant": "kda"}, "olmo_hybrid", "olmo_hybrid has no layer of kda"),
        ({"position_embedding_type": "learned_absolute"}, "olmo_hybrid", "learned_absolute is not none"),
        ({"linear_attention_freq": None, "experimental_attention_variant": None}, "olmo2", "_output is not output"),
        ({}, "qwen3_5_text", "linear_allow_neg_eigval=True is not False"),
        ({}, "qwen3_5_text", "norm_placement=attention_output is not input"),
    ],
    ids=str,
)
def test_models_that_a_family_cannot_express_are_refused(changes: dict[str, Any], family: str, problem: str) -> None:
    options = read_config(hybrid_config(linear_num_value_heads=2), None, "it")[1]
    model = build({name: value for name, value in {**options, **changes}.items() if value is not None}).model
    assert any(problem in line for line in incompatibilities(model, FAMILIES.get(family)))


def test_families_are_chosen_by_the_placement_of_norms() -> None:
    options = read_config(hybrid_config(), None, "it")[1]
    assert choose_family(build(options).model, None, None) == "olmo_hybrid"
    for name in ("linear_attention_freq", "experimental_attention_variant"):
        del options[name]
    options |= {"norm_placement": "output", "position_embedding_type": "rope"}
    assert choose_family(build(options).model, None, None) == "olmo2"


def test_files_as_transformers_has_them_in_memory_are_read(tmp_path: Path) -> None:
    """Convolutions are one tensor, and norms have other names. Norms of attention may have a third name."""
    model = create_model("olmo_hybrid", tmp_path / "published")
    model.save_pretrained(tmp_path / "memory", save_original_format=False)
    tensors = load_file(tmp_path / "memory" / "model.safetensors")
    renamed = "model.layers.1.feedforward_layer_norm.weight"
    tensors[renamed] = tensors.pop("model.layers.1.post_attention_layernorm.weight")
    (tmp_path / "saved").mkdir()
    save_file(tensors, tmp_path / "saved" / "model.safetensors")
    (tmp_path / "saved" / "config.json").write_bytes((tmp_path / "memory" / "config.json").read_bytes())
    directories = ("published", "memory", "saved")
    for name in directories:
        assert tool("--from-hf", tmp_path / name, "--save", tmp_path / f"from-{name}") == 0
    published, *others = (open_checkpoint(tmp_path / f"from-{name}") for name in directories)
    for other in others:
        assert published.manifest.tensors.keys() == other.manifest.tensors.keys()
        assert all(torch.equal(published.read(key), other.read(key)) for key in published.manifest.tensors)


def test_convolutions_that_transformers_cuts_in_thirds_are_refused(tmp_path: Path, capsys) -> None:
    model = create_model("olmo_hybrid", tmp_path / "published")
    model.save_pretrained(tmp_path / "hf")  # 19, 19 and 18 of 56 channels
    assert tool("--from-hf", tmp_path / "hf", "--save", tmp_path / "ours") == 3
    assert "q_conv1d.weight in model.safetensors: shape (19, 1, 4), not (16, 1, 4)" in capsys.readouterr().err


def test_half_precision_comes_back_bit_for_bit(tmp_path: Path) -> None:
    create_model("olmo_hybrid", tmp_path / "hf")
    tensors = {name: values.bfloat16() for name, values in load_file(tmp_path / "hf" / "model.safetensors").items()}
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    assert tool("--from-hf", tmp_path / "hf", "--save", tmp_path / "ours", "--check") == 0
    assert tool("--load", tmp_path / "ours", "--to-hf", tmp_path / "back", "--check") == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], values) for name, values in tensors.items())


def test_positive_eigenvalues_are_exported(tmp_path: Path) -> None:
    """The other model of the strength of the update gives other logits, and each is that of transformers."""
    hf_model = create_model("olmo_hybrid", tmp_path / "hf", linear_allow_neg_eigval=False)
    assert tool("--from-hf", tmp_path / "hf", "--save", tmp_path / "ours") == 0
    actual, doubled = megalite_logits(tmp_path / "ours"), create_model("olmo_hybrid", tmp_path / "doubled")
    torch.testing.assert_close(actual, transformers_logits(hf_model), rtol=0, atol=TOLERANCE)
    assert (transformers_logits(doubled) - actual).abs().max() > 100 * TOLERANCE
    assert tool("--load", tmp_path / "ours", "--to-hf", tmp_path / "back") == 0
    exported = load_transformers(tmp_path / "back")
    assert exported.config.linear_allow_neg_eigval is False and exported.model.rotary_emb is None
    torch.testing.assert_close(actual, transformers_logits(exported), rtol=0, atol=TOLERANCE)
