"""Mamba-2 and Nemotron-H: the kinds of layers, what is refused, and files as other releases write them."""

import json
from pathlib import Path
from typing import Any

import pytest
import toml_tables
import torch
from hugging_face_cases import SHAPE, create_model
from safetensors.torch import load_file
from test_convert_hugging_face import (
    TOLERANCE,
    assert_same_bits,
    load_transformers,
    megalite_logits,
    read_tensors,
    transformers_logits,
)
from test_convert_megatron import tool

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.offline import open_checkpoint
from megalite.config.options import ModelConfig, build
from megalite.interop.huggingface.config_json import choose_family, incompatibilities, read_config, write_config
from megalite.interop.name_mapping import FAMILIES
from megalite.interop.tensor_mapping import build_model_config
from megalite.models.families import PRESETS

PUBLISHED = toml_tables.read_table("interop/published_configs")
NANO = {key: value for key, value in PUBLISHED["nemotron-3-nano-30b"].items() if value != "null"}
CODESTRAL = PUBLISHED["mamba-codestral-7b"]
PATTERN = NANO["hybrid_override_pattern"]
KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLDER_KINDS = {**KINDS, "M": "mamba", "*": "attention"}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


# ---- configurations
@pytest.mark.parametrize("names", [KINDS, OLDER_KINDS], ids=["today's names", "older names"])
@pytest.mark.parametrize("key", ["layers_block_type", "layer_types"])
def test_layers_of_nemotron_h_are_read_from_either_key(names: dict[str, str], key: str) -> None:
    expected = read_config(NANO, None, "it")
    assert expected[1]["hybrid_layer_pattern"] == PATTERN
    kinds = {key: [names[letter] for letter in PATTERN]}
    assert read_config({**NANO, **kinds}, None, "it") == expected
    assert (
        read_config({**without(NANO, "hybrid_override_pattern", "num_hidden_layers"), **kinds}, None, "it") == expected
    )


def test_missing_keys_have_transformers_defaults() -> None:
    from transformers import Mamba2Config, NemotronHConfig

    for config in (
        Mamba2Config(hidden_size=4096, num_hidden_layers=2, vocab_size=93),
        NemotronHConfig(hidden_size=4096, layers_block_type=["linear_attention", "full_attention", "moe", "mlp"]),
    ):
        complete = json.loads(config.to_json_string(use_diff=False))
        names = ("hidden_size", "num_hidden_layers", "vocab_size", "layers_block_type", "model_type")
        short = {name: complete[name] for name in names if name in complete}
        assert read_config(short, None, "it") == read_config(complete, None, "it")


@pytest.mark.parametrize(
    "config,changes,problem",
    [
        (CODESTRAL, {"expand": 3}, "expand=3 x hidden_size=4096 is not num_heads=128 x head_dim=64"),
        (CODESTRAL, {"expand": "2"}, "expand='2' is not an integer"),
        (CODESTRAL, {"conv_kernel": 3}, "conv_kernel=3 is not 4"),
        (CODESTRAL, {"use_bias": True}, "use_bias=True is not False"),
        (CODESTRAL, {"use_conv_bias": False}, "use_conv_bias=False is not True"),
        (CODESTRAL, {"hidden_act": "gelu"}, "hidden_act='gelu' is not 'silu'"),
        (CODESTRAL, {"num_hidden_layers": None}, "num_hidden_layers is missing"),
        (CODESTRAL, {"num_hidden_layers": 1 << 30}, "num_hidden_layers=1073741824 is not a number of layers"),
        (CODESTRAL, {"time_step_limit": [0.001, float("inf")]}, r"time_step_limit=\[0.001, inf\] is not \[0.0, Infinity"),
        (CODESTRAL, {"time_step_limit": [0.0, 0.1]}, "megalite does not limit time steps"),
        (CODESTRAL, {"time_step_limit": [0.0]}, "megalite does not limit time steps"),
        (CODESTRAL, {"time_step_limit": "none"}, "megalite does not limit time steps"),
        (CODESTRAL, {"n_groups": 7}, "mamba_num_groups=7 does not divide mamba_num_heads=128"),
        (NANO, {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern='MX' is not a text of M, [*], -, E"),
        (NANO, {"hybrid_override_pattern": "M" * 90}, "num_hidden_layers=52, but there are kinds of 90 layers"),
        (NANO, {"hybrid_override_pattern": None}, "layers_block_type is missing, and so is hybrid_override_pattern"),
        (NANO, {"layers_block_type": ["moe"] * 52}, "layers_block_type and hybrid_override_pattern='MEMEM.*' disagree"),
        (NANO, {"layers_block_type": ["moe", 3]}, r"layers_block_type=\['moe', 3\] is not a list of linear_attention,"),
        (NANO, {"layers_block_type": "moe"}, "layers_block_type='moe' is not a list of"),
        (NANO, {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' is not relu2"),
        (NANO, {"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu' is not 'silu'"),
        (NANO, {"attention_bias": True}, "attention_bias=True is not False"),
        (NANO, {"mlp_bias": True}, "mlp_bias=True is not False"),
        (NANO, {"mamba_proj_bias": True}, "mamba_proj_bias=True is not False"),
        (NANO, {"hidden_dropout": 0.1}, "hidden_dropout=0.1 is not 0.0"),
        (NANO, {"sliding_window": 4096}, "sliding_window=4096 is not null, as nemotron_h needs"),
        (NANO, {"moe_latent_size": 1024}, "moe_latent_size=1024 is not null, as nemotron_h needs"),
        (NANO, {"mamba_d_conv": 4}, "mamba_d_conv=4 is not null"),
        (NANO, {"tie_word_embeddings": True}, "tie_word_embeddings=True is not False"),
        (NANO, {"norm_topk_prob": False}, "norm_topk_prob=False is not True"),
        (NANO, {"n_shared_experts": 2}, "n_shared_experts=2 is not 1"),
        (NANO, {"num_experts_per_tok": 1}, "num_experts_per_tok=1: nemotron_h gives a single expert"),
        (NANO, {"max_position_embeddings": 1024}, "seq_length=2048 is above the model's 1024 positions"),
    ],
)  # fmt: skip
def test_unsupported_values_are_refused_by_name(config: dict[str, Any], changes: dict[str, Any], problem: str) -> None:
    build_model_config(read_config(config, 2048, "it")[1], "it")
    with pytest.raises(CheckpointError, match=problem):
        build_model_config(read_config({**config, **changes}, 2048, "it")[1], "it")


def test_mamba2_has_any_number_of_positions() -> None:
    assert read_config(CODESTRAL, None, "it")[1]["seq_length"] == 2048
    _, options = read_config(CODESTRAL, 1 << 20, "it")
    assert build_model_config(options, "it").max_positions == 1 << 20


def test_keys_of_experts_are_ignored_without_a_layer_of_them() -> None:
    """Transformers writes its defaults of them into every file."""
    config = {**NANO, "hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "n_group": 4, "num_experts_per_tok": 1}
    family, options = read_config(config, None, "it")
    model = build_model_config(options, "it")
    assert (model.num_experts, model.moe_router_num_groups) == (None, None)
    written = write_config(model, family, 93, "float32", {})
    assert "n_routed_experts" not in written and "moe_intermediate_size" not in written
    assert build_model_config(read_config(written, None, "it")[1], "it") == model


@pytest.mark.parametrize(
    "preset,name", [("nemotron-h-8b", "nemotron-h-8b"), ("nemotron-3-nano-30b", "nemotron-3-nano-30b")]
)
def test_presets_equal_the_published_models(preset: str, name: str) -> None:
    config = {key: value for key, value in PUBLISHED[name].items() if value != "null"}
    model = build({**PRESETS[preset]}).model
    written = write_config(model, "nemotron_h", config["vocab_size"], "bfloat16", {})
    assert incompatibilities(model, FAMILIES.get("nemotron_h")) == []
    ignored = {"expand", "partial_rotary_factor", "rope_theta", "time_step_limit", "time_step_min"}
    ignored |= {"max_position_embeddings"}  # that of pretraining
    assert {key: written.get(key) for key in config.keys() - ignored} == without(config, *ignored)


# ---- export
MODEL: dict[str, Any] = {
    **{"hidden_size": 16, "num_attention_heads": 4, "seq_length": 12, "normalization": "RMSNorm", "vocab_size": 93},
    **{"mamba_num_groups": 2, "mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_state_dim": 6},
}
NEMOTRON: dict[str, Any] = {
    **MODEL,
    **{"activation": "squared_relu", "position_embedding_type": "none", "add_bias_linear": False},
    **{"untie_embeddings_and_output_weights": True},
}
EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "moe_ffn_hidden_size": 12, "moe_shared_expert_intermediate_size": 8},
    **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
}


def model_of(pattern: str, options: dict[str, Any], **changes: Any) -> ModelConfig:
    numbers = {"M": 1, "MM": 2, "M-": 1, "M*-": 2, "M*|-": 2, "*-*-": 2, "*E": 1, "M*-/*-": 2, "MG-*": 3, "+-": 1}
    values = {**options, "hybrid_layer_pattern": pattern, "num_layers": numbers[pattern], **changes}
    return build({name: value for name, value in values.items() if value is not ...}).model


@pytest.mark.parametrize(
    "pattern,options,family",
    [
        ("MM", {**MODEL, "position_embedding_type": "none"}, "mamba2"),
        # options without an effect on these layers
        ("MM", {**MODEL, "position_embedding_type": "rope", "activation": "swiglu", "window_size": (3, 0)}, "mamba2"),
        ("M*-", NEMOTRON, "nemotron_h"),
        ("*-*-", NEMOTRON, "nemotron_h"),
        ("*E", {**NEMOTRON, **EXPERTS}, "nemotron_h"),
        ("M*|-", NEMOTRON, "nemotron_h"),  # a pipeline border within a layer
    ],
)
def test_export_finds_the_family_of_a_pattern(pattern: str, options: dict[str, Any], family: str) -> None:
    assert choose_family(model_of(pattern, options), None, None) == family


@pytest.mark.parametrize(
    "pattern,options,changes,family,problem",
    [
        ("M*-", NEMOTRON, {}, "mamba2", "mamba2 has no layer of attention or mlp"),
        ("MM", NEMOTRON, {}, "nemotron_h", "no layer has attention, without which transformers fails"),
        ("MG-*", NEMOTRON, {}, "nemotron_h", "nemotron_h has no layer of gated_delta_net"),
        ("M*-", NEMOTRON, {}, "llama", "hybrid_layer_pattern='M[*]-' is not attention and MLP in turn"),
        ("MM", NEMOTRON, {"mamba_head_dim": 9}, "mamba2", "mamba_num_heads=4 x mamba_head_dim=9 is not a multiple of hid"),
        ("MM", MODEL, {}, "mamba2", "position_embedding_type=learned_absolute is not none"),
        ("MM", NEMOTRON, {"normalization": "LayerNorm"}, "mamba2", "normalization=LayerNorm is not RMSNorm"),
        ("M*-/*-", NEMOTRON, {}, "nemotron_h", "nemotron_h has no depths of multi-token prediction, the model has 1"),
        ("M*-", NEMOTRON, {"activation": "swiglu"}, "nemotron_h", "activation=swiglu is not squared_relu"),
        ("M*-", NEMOTRON, {"untie_embeddings_and_output_weights": False}, "nemotron_h", "output_weights=False is not True"),
        ("M*-", NEMOTRON, {"position_embedding_type": "rope"}, "nemotron_h", "position_embedding_type=rope is not none"),
        ("M*-", NEMOTRON, {"add_bias_linear": True}, "nemotron_h", "add_bias_linear=True is not False"),
        ("M*-", NEMOTRON, {"window_size": (3, 0)}, "nemotron_h", r"window_size=\(3, 0\) is not None"),
        ("*E", {**NEMOTRON, **EXPERTS}, {"moe_router_enable_expert_bias": False}, "nemotron_h", "expert_bias=False is not"),
        (
            "*E", {**NEMOTRON, **EXPERTS}, {"moe_shared_expert_intermediate_size": ...}, "nemotron_h",
            "moe_shared_expert_intermediate_size=None, but nemotron_h always has this option",
        ),
    ],
)  # fmt: skip
def test_export_refuses_what_the_family_lacks(
    pattern: str, options: dict[str, Any], changes: dict[str, Any], family: str, problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem):
        choose_family(model_of(pattern, options, **changes), family, None)


# ---- files
def test_files_as_transformers_has_them_in_memory_are_read(tmp_path: Path) -> None:
    """Their names begin with model., and the matrices of all experts of a layer are one tensor."""
    model = create_model("nemotron_h", tmp_path / "published")
    model.save_pretrained(tmp_path / "saved", save_original_format=False)
    assert "model.layers.4.mixer.experts.up_proj" in load_file(tmp_path / "saved" / "model.safetensors")
    for name in ("published", "saved"):
        assert tool("--from-hf", tmp_path / name, "--save", tmp_path / f"from-{name}", "--check") == 0
    published, saved = (open_checkpoint(tmp_path / f"from-{name}") for name in ("published", "saved"))
    assert published.manifest.tensors.keys() == saved.manifest.tensors.keys()
    assert all(torch.equal(published.read(key), saved.read(key)) for key in published.manifest.tensors)


def test_short_time_steps_are_those_of_the_published_code(tmp_path: Path) -> None:
    """Transformers raises them to time_step_min, unless the file has the value that an export writes."""
    hf_model = create_model("nemotron_h", tmp_path / "hf", time_step_min=0.001)
    with torch.no_grad():
        for name, values in hf_model.named_parameters():
            if name.endswith("dt_bias"):
                values.fill_(-8.0)  # softplus: 0.0003
    hf_model.save_pretrained(tmp_path / "hf")
    assert tool("--from-hf", tmp_path / "hf", "--save", tmp_path / "ours", "--check") == 0
    actual = megalite_logits(tmp_path / "ours")
    assert (transformers_logits(hf_model) - actual).abs().max() > 100 * TOLERANCE
    assert tool("--load", tmp_path / "ours", "--to-hf", tmp_path / "back", "--check") == 0
    exported = transformers_logits(load_transformers(tmp_path / "back"))
    torch.testing.assert_close(actual, exported, rtol=0, atol=TOLERANCE)


NO_ATTENTION = {
    "qwen3_next": {"layer_types": ["linear_attention"] * 4},
    "qwen3_5_text": {"layer_types": ["linear_attention"] * 4},
    "kimi_linear": {"layer_types": ["linear_attention"] * 4},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "moe"]},
}


@pytest.mark.parametrize("name", NO_ATTENTION)
def test_model_without_attention_is_checked(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a cache, transformers fails, so that it is not exported."""
    hf_model = create_model(name, tmp_path / "hf", **NO_ATTENTION[name])
    with pytest.raises(ValueError, match="get_seq_length"):
        hf_model(torch.zeros(1, 3, dtype=torch.int64))
    assert tool("--from-hf", tmp_path / "hf", "--save", tmp_path / "ours", "--check") == 0
    out = capsys.readouterr().out
    assert "all bits equal" in out and "likeliest token the same in 100.00%" in out
    assert tool("--load", tmp_path / "ours", "--to-hf", tmp_path / "back", "--family", name) == 3
    assert "no layer has attention, without which transformers fails" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mamba2", "nemotron_h"])
def test_half_precision_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Decays and biases of experts are in fp32 in a run, and stay as they are in the files."""
    model = create_model(name, tmp_path / "hf").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    assert {x.dtype for x in read_tensors(tmp_path / "bf16").values()} >= {torch.bfloat16}
    assert tool("--from-hf", tmp_path / "bf16", "--save", tmp_path / "ours", "--check") == 0
    assert tool("--load", tmp_path / "ours", "--to-hf", tmp_path / "back", "--check") == 0
    assert_same_bits(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "bf16"))


def test_shape_of_another_width_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create_model("mamba2", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["hidden_size"] == SHAPE["hidden_size"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "state_size": 7}))
    assert tool("--from-hf", tmp_path / "hf", "--save", tmp_path / "ours") == 3
    error = capsys.readouterr().err
    assert "mixer.in_proj.weight in model.safetensors: shape (184, 32), not (192, 32)" in error
