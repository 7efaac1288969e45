"""DeepSeek-V2 and V3, Kimi K2, Kimi-Linear, GLM-4.5 and Youtu: configurations, depths of multi-token prediction, FP8 weights."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toml_tables
import torch
from hugging_face_cases import (
    NUM_DEPTHS,
    SEQ_LENGTH,
    SHAPE,
    VOCAB_SIZE,
    copy_model,
    create_model,
    load_in_fp64,
    with_depths,
)
from safetensors.torch import load_file, save_file
from test_convert_hugging_face import (
    MEMORY_BESIDE_TENSORS,
    assert_same_bits,
    conversion_peaks,
    in_fp64,
    read_tensors,
    tokens_BS,
    transformers_logits,
)
from test_convert_megatron import tool
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.offline import open_checkpoint
from megalite.config.option_parsers import parse_layer_pattern
from megalite.config.options import build
from megalite.interop.huggingface.config_json import choose_family, read_config, write_config
from megalite.interop.huggingface.model_files import open_model
from megalite.interop.tensor_mapping import build_model_config, load_external_weights
from megalite.models.families import PRESETS
from megalite.models.gpt import Stage
from megalite.models.specs import checkpoint_specs, model_specs
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.parameter import ParamFactory, model_shards
from megalite.parallel.mesh import Mesh
from tools import convert_checkpoint

PUBLISHED = toml_tables.read_table("interop/published_configs")
for published in PUBLISHED.values():
    published.update({key: None for key, value in published.items() if value == "null"})
ONLY_READ = {
    "glm4_moe_lite": ["partial_rotary_factor"],  # is 1
    "kimi_linear": ["head_dim", "rope_theta"],  # have no effect
    # the residual stream has the precision of the model; there is no limit
    "mamba2": ["residual_in_fp32", "time_step_limit"],
    # nor are there positions, and the width of a mixer is that of its heads
    "nemotron_h": [
        "time_step_limit",
        "time_step_min",
        "sliding_window",
        "rope_theta",
        "partial_rotary_factor",
        "expand",
    ],
}


# ---- configurations
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configuration_is_read_and_written(name: str) -> None:
    config = PUBLISHED[name]
    family, options = read_config(config, None, name)
    model = build_model_config(options, name)
    assert choose_family(model, family, None) == family
    written = write_config(model, family, options["vocab_size"], "bfloat16", {})
    expected = {key: value for key, value in config.items() if key not in ("rope_scaling", "model_type")}
    for key in ONLY_READ.get(family, []):
        expected.pop(key, None)
    assert {key: written[key] for key in expected} == expected
    assert written["model_type"] == {"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"])
    scaling = config.get("rope_scaling") or {}
    assert {key: (written["rope_scaling"] or {}).get(key) for key in scaling} == scaling


def test_published_models_have_their_published_size() -> None:
    """Parameters without those of depths, from the models' pages, in 10^9."""
    sizes = {"deepseek-v2-lite": 15.7, "deepseek-v2": 235.7, "deepseek-v3": 671.0, "moonlight-16b-a3b": 15.96}
    sizes |= {"kimi-k2": 1026.4, "glm-4.5-air": 106.9, "glm-4.5": 352.8, "glm-4.7-flash": 29.9}
    sizes |= {"kimi-linear": 49.1, "mamba-codestral-7b": 7.285, "nemotron-h-8b": 8.1, "nemotron-3-nano-30b": 31.58}
    sizes |= {"qwen3.5-0.8b": 0.7524}
    for name, expected in sizes.items():
        _, options = read_config(PUBLISHED[name], None, name)
        model = build_model_config({**options, "mtp_num_layers": 0}, name)
        count = sum(torch.Size(spec.shape).numel() for spec in model_specs(model, options["vocab_size"]).values())
        assert count / 1e9 == pytest.approx(expected, rel=0.005), name


@pytest.mark.parametrize(
    "preset,name",
    [("moonlight-16b", "moonlight-16b-a3b"), ("deepseek-v3", "deepseek-v3"), ("qwen3.5-0.8b", "qwen3.5-0.8b")],
)
def test_presets_equal_the_published_models(preset: str, name: str) -> None:
    _, options = read_config(PUBLISHED[name], PRESETS[preset]["seq_length"], name)
    published, local = build(options).model, build({**PRESETS[preset]}).model
    # pretraining of DeepSeek-V3 had no scaling, and its depth is an option
    stretched = {"position_embedding_type", "max_position_embeddings", "rotary_scaling_factor", "mscale_all_dim"}
    training = {"moe_layer_freq", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_router_group_score_topk"}
    differing = {
        name
        for name in vars(published)
        if not name.startswith("_") and getattr(published, name) != getattr(local, name, None)
    }
    assert published.moe_layers == local.moe_layers
    assert differing - {"layers"} <= stretched | training | {"mtp_num_layers", "vocab_size"}
    assert published.group_score_topk == local.group_score_topk


def test_layers_of_kimi_linear_are_read_from_either_place() -> None:
    """Published files have a table, and transformers saves keys of its own; without any, layers 4, 8, ... attend."""
    published = PUBLISHED["kimi-linear"]
    _, expected = read_config(published, None, "it")
    linear = published["linear_attn_config"]
    pattern = parse_layer_pattern(expected["linear_attention_freq"], 27)
    assert [n for n, is_recurrent in enumerate(pattern, 1) if is_recurrent] == linear["kda_layers"]
    saved = {key: value for key, value in published.items() if key != "linear_attn_config"}
    saved |= {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}
    kinds = ["linear_attention" if n in linear["kda_layers"] else "full_attention" for n in range(1, 28)]
    assert read_config({**saved, "layer_types": kinds}, None, "it")[1] == expected
    from transformers import KimiLinearConfig

    _, by_default = read_config(saved, None, "it")
    attending = [n for n, kind in enumerate(KimiLinearConfig(**saved).layer_types) if kind == "full_attention"]
    pattern = parse_layer_pattern(by_default["linear_attention_freq"], 27)
    assert [n for n, is_recurrent in enumerate(pattern) if not is_recurrent] == attending == [4, 8, 12, 16, 20, 24]


@pytest.mark.parametrize(
    "changes,problem",
    [
        (
            {"full_attn_layers": [4, 8]},
            "kda_layers and full_attn_layers of linear_attn_config do not have each layer from",
        ),
        ({"full_attn_layers": [3, 4, 8, 12, 16, 20, 24, 27]}, "do not have each layer from 1 to 27 once"),
        ({"kda_layers": [[1]]}, "do not have each layer from 1 to 27 once"),
        ({"kda_layers": None}, "do not have each layer from 1 to 27 once"),
        ({"head_dim": None}, r"linear_attn_config.head_dim is missing$"),
        ({"num_heads": 0}, "linear_num_key_heads=0 is too small"),
    ],
)
def test_layers_that_kimi_linear_does_not_name_are_refused(changes: dict[str, Any], problem: str) -> None:
    config = PUBLISHED["kimi-linear"]
    linear = {**config["linear_attn_config"], **changes}
    with pytest.raises(CheckpointError, match=problem):
        build_model_config(read_config({**config, "linear_attn_config": linear}, None, "it")[1], "it")


@pytest.mark.parametrize(
    "changes,problem",
    [
        ({"linear_attn_config": "x"}, "linear_attn_config='x' is not a table"),
        ({"num_shared_experts": 0}, "num_shared_experts=0 is not an integer above 0"),
        ({"moe_renormalize": False}, "moe_renormalize=False is not True"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1 is not 0"),
    ],
)
def test_messages_have_the_keys_of_the_file(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        read_config({**PUBLISHED["kimi-linear"], **changes}, None, "it")


@pytest.mark.parametrize("num_dense", [0, 2, None])
def test_kimi_linear_has_as_many_dense_layers_as_it_says(num_dense: int | None) -> None:
    config = {**PUBLISHED["kimi-linear"], "first_k_dense_replace": num_dense, "num_nextn_predict_layers": None}
    if num_dense is None:
        del config["first_k_dense_replace"]
    model = build_model_config(read_config(config, None, "it")[1], "it")
    assert model.moe_layers.count(False) == (1 if num_dense is None else num_dense)


def test_text_part_of_published_qwen3_5_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message for a model of images and text has the command that saves its text part."""
    from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = dict(
        vocab_size=93, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=6, max_position_embeddings=48,
    )  # fmt: skip
    images = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=images))
    model.save_pretrained(tmp_path / "published")
    assert tool("--from-hf", tmp_path / "published", "--save", tmp_path / "ours") != 0
    message = capsys.readouterr().err
    assert (
        "AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(DIRECTORY, save_original_format=False)" in message
    )
    AutoModelForCausalLM.from_pretrained(tmp_path / "published").save_pretrained(
        tmp_path / "text", save_original_format=False
    )
    assert tool("--from-hf", tmp_path / "text", "--save", tmp_path / "ours", "--check") == 0
    weights = load_file(tmp_path / "published" / "model.safetensors")
    assert torch.equal(
        open_checkpoint(tmp_path / "ours").read("model/embedding.word"),
        weights["model.language_model.embed_tokens.weight"],
    )


def test_exported_kimi_linear_of_a_small_vocabulary_loads_in_transformers(models, tmp_path: Path) -> None:
    """Its configuration in transformers has token 163839 for padding by default."""
    assert tool("--from-hf", models("kimi_linear")[1], "--save", tmp_path / "ours") == 0
    assert tool("--load", tmp_path / "ours", "--to-hf", tmp_path / "back", "--check") == 0


def test_dense_layers_of_kimi_linear_are_read_as_transformers_saves_them(models, tmp_path: Path) -> None:
    """It renames them as it does experts (with save_pretrained of 5.23)."""
    hf_model, hf_dir = models("kimi_linear")
    hf_model.save_pretrained(tmp_path / "saved")
    assert "model.layers.0.block_sparse_moe.gate_proj.weight" in load_file(tmp_path / "saved" / "model.safetensors")
    for form, source in (("published", hf_dir), ("saved", tmp_path / "saved")):
        assert tool("--from-hf", source, "--save", tmp_path / f"from-{form}", "--check-bits") == 0
    published, saved = (open_checkpoint(tmp_path / f"from-{form}") for form in ("published", "saved"))
    assert published.manifest.tensors.keys() == saved.manifest.tensors.keys()
    assert all(torch.equal(published.read(key), saved.read(key)) for key in published.manifest.tensors)


def test_queries_are_not_scaled_in_the_original_context() -> None:
    """Mistral 4 multiplies queries by 1 + 0.1 log(1 + floor(i / 8192)), which is 1 at the first 8,192 positions."""
    with pytest.raises(CheckpointError, match="seq_length=8193 is above the model's 8192 positions"):
        read_config(MISTRAL, 8193, "config.json")
    family, options = read_config(MISTRAL, None, "config.json")
    assert (options["seq_length"], options["max_position_embeddings"]) == (8192, 8192)
    model = build_model_config(options, "")
    assert write_config(model, family, 93, "bfloat16", {})["max_position_embeddings"] == 1048576
    longer = build({**options, "max_position_embeddings": 9000}).model
    with pytest.raises(
        CheckpointError, match="max_position_embeddings=9000, but mistral4 scales queries after the first"
    ):
        choose_family(longer, "mistral4", None)


def test_missing_keys_have_transformers_defaults() -> None:
    import transformers

    classes = {"deepseek_v3": "DeepseekV3Config", "glm4_moe_lite": "Glm4MoeLiteConfig", "glm4_moe": "Glm4MoeConfig"}
    shape = {**SHAPE, "num_hidden_layers": 4}
    for model_type, cls in classes.items():
        keys = {**shape, "num_key_value_heads": 4}
        expected = build(read_config(getattr(transformers, cls)(**keys).to_dict(), None, "")[1]).model
        actual = build(read_config({**keys, "model_type": model_type}, None, "")[1]).model
        assert actual == expected, model_type


V3 = {**SHAPE, "model_type": "deepseek_v3", "num_hidden_layers": 4}
MISTRAL = {**V3, "model_type": "mistral4", "max_position_embeddings": 1048576, "num_hidden_layers": 2}
MISTRAL_YARN = {"type": "yarn", "factor": 128.0, "original_max_position_embeddings": 8192, "llama_4_scaling_beta": 0.1}
V2 = {**V3, "model_type": "deepseek_v2", "num_experts_per_tok": 2}
GLM_LITE = {**V3, "model_type": "glm4_moe_lite"}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12}
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "biases": ({**V3, "attention_bias": True}, "attention_bias=True is not False"),
    "fewer keys": ({**V3, "num_key_value_heads": 2}, "num_key_value_heads=2 is not num_attention_heads=4"),
    "head size": ({**V3, "head_dim": 8}, "head_dim=8 is not qk_rope_head_dim=64"),
    "probabilities": ({**V3, "norm_topk_prob": False}, "norm_topk_prob=False is not True"),
    "scores": ({**V3, "scoring_func": "softmax"}, "scoring_func='softmax' is not 'sigmoid'"),
    "all dense": ({**V3, "first_k_dense_replace": 4}, "first_k_dense_replace=4 leaves no layer with experts"),
    "dense text": ({**V3, "first_k_dense_replace": "1"}, "first_k_dense_replace='1' is not a number of layers"),
    "no shared": ({**V3, "n_shared_experts": 0}, "n_shared_experts=0 is not an integer above 0"),
    "one expert": ({**V3, "num_experts_per_tok": 1}, "num_experts_per_tok=1: deepseek_v3 gives a single expert the"),
    "linear": ({**V3, "rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not default or yarn"),
    "only scores": ({**V3, "rope_scaling": {**YARN, "mscale_all_dim": 0.7}}, "mscale_all_dim=0.7 and mscale=None"),
    "groups": ({**V2, "topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not greedy or group_limited_greedy"),
    "V2 halves": ({**V2, "rope_interleave": False}, "rope_interleave=False is not True"),
    "kinds": ({**GLM_LITE, "mlp_layer_types": ["dense"]}, "mlp_layer_types is not a list of 4 kinds"),
    "contradiction": ({**GLM_LITE, "first_k_dense_replace": 2}, "first_k_dense_replace=2 disagrees with its default"),
    "no yarn": ({**MISTRAL, "rope_parameters": {"rope_type": "default"}}, "type 'default' is not yarn"),
    "other scale": (
        {**MISTRAL, "rope_parameters": {**MISTRAL_YARN, "llama_4_scaling_beta": 0.2}},
        "llama_4_scaling_beta=0.2 is not 0.1",
    ),
    "fraction": (
        {**MISTRAL, "rope_parameters": {**MISTRAL_YARN, "partial_rotary_factor": 0.25}},
        "partial_rotary_factor=0.25 is not qk_rope_head_dim / 128",
    ),
    "positions": (
        {**MISTRAL, "rope_parameters": {**MISTRAL_YARN, "factor": 64.0}},
        "max_position_embeddings=1048576 is not factor x original_max_position_embeddings = 524288",
    ),
    "int4": ({**V3, "quantization_config": {"quant_method": "gptq"}}, "quantised with quant_method='gptq', not fp8"),
    "format": ({**V3, "quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fmt='e5m2' is not e4m3"),
    "no blocks": ({**V3, "quantization_config": {"quant_method": "fp8"}}, "weight_block_size=None is not the rows"),
}
INDEXED = ("deepseek_v32", "glm_moe_dsa", "glm5_next_text", "hy_v4", "mistral_large4", "deepseek_v4", "axk2")


@pytest.mark.parametrize("case", ERRORS)
def test_configuration_is_refused_by_name(case: str) -> None:
    config, reason = ERRORS[case]
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        read_config(config, None, "config.json")


@pytest.mark.parametrize("model_type", INDEXED)
def test_families_with_an_indexer_are_refused_by_name(model_type: str) -> None:
    from transformers import CONFIG_MAPPING

    assert model_type in CONFIG_MAPPING or model_type == "glm5_next_text"  # a part of glm5_next
    with pytest.raises(CheckpointError, match=f"model_type='{model_type}' .*indexer selects.*convert a"):
        read_config({**V3, "model_type": model_type}, None, "config.json")


EXPORTS: list[tuple[dict[str, Any], str, str]] = [
    ({"qk_norm_epsilon": 1e-4}, "deepseek_v3", "qk_norm_epsilon=0.0001 is not 1e-06"),
    ({"qk_norm_epsilon": None}, "deepseek_v3", "qk_norm_epsilon=None is not 1e-06"),
    ({"mla_rotary_interleaved": False}, "deepseek_v2", "mla_rotary_interleaved=False is not True"),
    ({"moe_shared_expert_intermediate_size": 50}, "deepseek_v3", "=50 is not a multiple of moe_ffn_hidden_size=24"),
    ({"moe_layer_freq": "[1,0]"}, "deepseek_v3", "moe_layer_freq=[1,0] has a layer without experts after one with"),
    ({"moe_router_group_score_topk": 1}, "deepseek_v3", "moe_router_group_score_topk=1 is not 2"),
    (
        {"moe_router_topk": 1, "moe_router_group_topk": 1},
        "deepseek_v3",
        "moe_router_topk=1: deepseek_v3 gives a single",
    ),
    ({"qk_pos_emb_head_dim": 0}, "deepseek_v3", "qk_pos_emb_head_dim=0, but deepseek_v3 fails in transformers"),
    ({"attention_output_gate": True}, "deepseek_v3", "attention_output_gate=True is not False"),
    ({"mtp_num_layers": 2, "mtp_use_repeated_layer": True}, "deepseek_v3", "mtp_use_repeated_layer=True is not False"),
    ({"mtp_num_layers": 1}, "youtu", "youtu has no depths of multi-token prediction, the model has 1"),
    ({}, "llama", "multi_latent_attention=True is not False"),
    ({}, "glm4_moe", "multi_latent_attention=True is not False"),
]


@pytest.mark.parametrize("changes,family,reason", EXPORTS)
def test_export_names_what_a_family_lacks(changes: dict[str, Any], family: str, reason: str) -> None:
    options = {
        **PRESETS["tiny-mla"],
        "num_layers": 2,
        "num_experts": 8,
        "moe_router_topk": 4,
        "moe_ffn_hidden_size": 24,
    }
    options |= {"moe_shared_expert_intermediate_size": 48, "moe_router_score_function": "sigmoid"}
    options |= {"moe_router_enable_expert_bias": True, "moe_router_num_groups": 2, "moe_router_group_topk": 2}
    assert choose_family(build(options).model, None, None) == "deepseek_v3"
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        choose_family(replace(build(options).model, **changes), family, None)


# ---- logits in fp64
LATENT = ["deepseek_v2", "deepseek_v2 lite", "deepseek_v3", "deepseek_v3 moonlight", "deepseek_v3 of halves"]
LATENT += ["glm4_moe", "glm4_moe_lite", "mistral4", "youtu"]


def stage_in_fp64(model_dir: Path) -> Stage:
    """Return the model of a directory in fp64, read without a conversion."""
    source = open_model(model_dir)
    make_param = ParamFactory(Mesh.single_process(), torch.float64, seed=0)
    sizes = dict(vocab_size=VOCAB_SIZE, padded_vocab_size=VOCAB_SIZE)
    stage = Stage(make_param, source.model, [range(source.model.num_layers)], 0, **sizes).eval()
    specs = checkpoint_specs(source.model, VOCAB_SIZE)
    load_external_weights(source.tensors, model_shards(stage, Mesh.single_process()), specs, "it", False)
    return stage


def plain_batch() -> Batch:
    return Batch(tokens_BS().T, None, None, torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("name", LATENT)
def test_logits_equal_transformers_in_fp64(models, name: str) -> None:
    model_dir = models(name)[1]
    model = load_in_fp64(model_dir)
    with in_fp64():
        expected = transformers_logits(model)
    with torch.no_grad():
        actual = stage_in_fp64(model_dir)(None, plain_batch(), ForwardContext())[..., :VOCAB_SIZE].transpose(0, 1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


def test_other_name_of_a_family_is_the_same_model(models, tmp_path: Path, capsys) -> None:
    model_dir = copy_model(models("deepseek_v3 moonlight")[1], tmp_path / "hf")
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    assert tool("--from-hf", model_dir, "--save", tmp_path / "ours", "--check") == 0
    assert tool("--load", tmp_path / "ours", "--to-hf", tmp_path / "back", "--like", model_dir, "--check") == 0
    assert capsys.readouterr().out.count("all bits equal") == 2
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "deepseek_v3"
    assert_same_bits(read_tensors(tmp_path / "back"), read_tensors(model_dir))


PLANTED: dict[str, dict[str, Any]] = {
    "pairs of channels": {"mla_rotary_interleaved": False},
    "epsilon of latents": {"qk_norm_epsilon": 1e-3},
    "groups": {"moe_router_group_score_topk": 1},
    "factor of scores": {"mscale_all_dim": 0.0},
    "factor of experts": {"moe_router_topk_scaling_factor": 1.0},
    "no biases of routers": {"moe_router_enable_expert_bias": False},
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_check_detects_a_wrong_option(models, mistake: str, tmp_path: Path, monkeypatch, capsys) -> None:
    real = convert_checkpoint.saved_model
    monkeypatch.setattr(convert_checkpoint, "saved_model", lambda s: replace(real(s), **PLANTED[mistake]))
    assert tool("--from-hf", models("deepseek_v3")[1], "--save", tmp_path / "ours", "--check") == 1
    out = capsys.readouterr().out
    assert "all bits equal" in out and "logits of 96 random tokens differ by" in out


def test_half_precision_keeps_the_biases_of_routers_in_fp32(models, tmp_path: Path) -> None:
    model_dir = models("deepseek_v3 moonlight")[1]
    assert tool("--from-hf", model_dir, "--save", tmp_path / "ours") == 0
    export_dir = tmp_path / "back"
    assert tool("--load", tmp_path / "ours", "--to-hf", export_dir, "--dtype", "bfloat16", "--check-bits") == 0
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors, original = read_tensors(export_dir), read_tensors(model_dir)
    assert tensors[name].dtype == torch.float32 and torch.equal(tensors[name], original[name])
    assert {t.dtype for n, t in tensors.items() if n != name} == {torch.bfloat16}
    assert json.loads((export_dir / "config.json").read_text())["torch_dtype"] == "bfloat16"


# ---- multi-token prediction
DEPTH_FAMILIES = ["deepseek_v3 moonlight", "glm4_moe", "deepseek_v3 of halves"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@torch.no_grad()
def expected_depths(model_dir: Path, deep_dir: Path) -> list[Tensor]:
    """Return h^k [B, S, D] of arXiv:2412.19437, section 2.2, with the layers of transformers."""
    deep = load_in_fp64(deep_dir)
    tensors = {name: values.double() for name, values in load_file(model_dir / "model.safetensors").items()}
    config, ids = deep.config, tokens_BS()
    num_layers = config.num_hidden_layers - NUM_DEPTHS
    eps = config.rms_norm_eps
    S = ids.shape[1]
    with in_fp64():
        positions = torch.arange(S)[None]
        mask = torch.full((S, S), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        x = deep.model.embed_tokens(ids)
        rope = deep.model.rotary_emb(x, positions)
        for layer in deep.model.layers[:num_layers]:
            x = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rope)
        h = deep.model.norm(x)
        depths = []
        for depth in range(1, NUM_DEPTHS + 1):
            n = num_layers + depth - 1
            weights = {part: tensors[f"model.layers.{n}.{part}.weight"] for part in ("enorm", "hnorm", "eh_proj")}
            embedding = deep.model.embed_tokens(ids.roll(-depth, 1))
            parts = rms_norm(embedding, weights["enorm"], eps), rms_norm(h, weights["hnorm"], eps)
            x = torch.cat(parts, -1) @ weights["eh_proj"].T
            x = deep.model.layers[n](x, attention_mask=mask, position_ids=positions, position_embeddings=rope)
            h = rms_norm(x, tensors[f"model.layers.{n}.shared_head.norm.weight"], eps)
            depths.append(h)
    return depths


@pytest.mark.parametrize("name", DEPTH_FAMILIES)
def test_depths_equal_transformers_layers_and_export_is_bit_exact(name: str, tmp_path: Path, capsys) -> None:
    model_dir, deep_dir = with_depths(name, tmp_path)
    assert open_model(model_dir).model.num_mtp_depths == NUM_DEPTHS
    stage, ids_SB = stage_in_fp64(model_dir), tokens_BS().T
    shifted = torch.stack([ids_SB.roll(-depth, 0) for depth in range(1, NUM_DEPTHS + 1)])
    positions = torch.arange(SEQ_LENGTH)[:, None].expand_as(ids_SB)
    mask = torch.ones(NUM_DEPTHS, *ids_SB.shape)
    batch = Batch(
        ids_SB, ids_SB, None, torch.zeros(2, dtype=torch.int64), mtp_tokens_JSB=shifted, mtp_labels_JSB=shifted,
        mtp_positions_JSB=torch.stack([positions] * NUM_DEPTHS), mtp_mask_JSB=mask,
    )  # fmt: skip
    assert stage.final_norm is not None
    with torch.no_grad():
        h_SBD = stage.final_norm(stage.forward_hidden(None, batch, ForwardContext()))
        depths = stage._forward_mtp(h_SBD, batch, ForwardContext())
    for actual, expected in zip(depths, expected_depths(model_dir, deep_dir), strict=True):
        torch.testing.assert_close(actual.transpose(0, 1), expected, rtol=0, atol=1e-10)
    assert tool("--from-hf", model_dir, "--save", tmp_path / "ours", "--check") == 0
    assert tool("--load", tmp_path / "ours", "--to-hf", tmp_path / "back", "--like", model_dir, "--check") == 0
    assert capsys.readouterr().out.count("all bits equal") == 2
    assert_same_bits(read_tensors(tmp_path / "back"), read_tensors(model_dir))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == NUM_DEPTHS


def _without(pattern: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if re.search(pattern, name)]


DEPTH_FILES: dict[str, tuple[Callable[[dict[str, Tensor]], object], int | str]] = {
    "no copies": (_without(r"\.[34]\.(embed_tokens|shared_head\.head)"), NUM_DEPTHS),
    "no depths": (_without(r"layers\.[34]\."), 0),
    "one depth": (_without(r"layers\.4\."), r"layers.4.input_layernorm.weight is missing"),
    "no projection": (_without(r"3\.eh_proj"), r"layers.3.eh_proj.weight is missing"),
    "another embedding": (
        lambda tensors: tensors["model.layers.4.embed_tokens.weight"].neg_(),
        r"layers.4.embed_tokens.weight in .* differs from model.embed_tokens.weight in .*share the model's embedding",
    ),
    "another head": (
        lambda tensors: tensors["model.layers.3.shared_head.head.weight"].neg_(),
        r"layers.3.shared_head.head.weight in .* differs from lm_head.weight in .*share the model's embedding",
    ),
}


@pytest.fixture(scope="module")
def depth_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_depths("deepseek_v3 moonlight", tmp_path_factory.mktemp("depths"))[0]


def test_conversion_reports_depths_that_the_files_lack(depth_model: Path, tmp_path: Path, capsys) -> None:
    model_dir = copy_model(depth_model, tmp_path / "hf")
    tensors = load_file(model_dir / "model.safetensors")
    _without(r"layers\.[34]\.")(tensors)
    save_file(tensors, model_dir / "model.safetensors")
    assert tool("--from-hf", model_dir, "--save", tmp_path / "here") == 0
    rule = f"config.json has {NUM_DEPTHS} depths of multi-token prediction, the files have none"
    assert f"{model_dir}: {rule}; the checkpoint is without them" in capsys.readouterr().out


def test_null_means_no_depths(depth_model: Path, tmp_path: Path) -> None:
    model_dir = copy_model(depth_model, tmp_path / "hf")
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": None}))
    assert open_model(model_dir).model.num_mtp_depths == 0


@pytest.mark.parametrize("case", DEPTH_FILES)
def test_files_decide_about_depths(depth_model: Path, case: str, tmp_path: Path) -> None:
    """Transformers writes their number into config.json, even for models that it saves without them."""
    change, expected = DEPTH_FILES[case]
    model_dir = copy_model(depth_model, tmp_path / "hf")
    tensors = load_file(model_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, model_dir / "model.safetensors")
    if isinstance(expected, int):
        assert open_model(model_dir).model.num_mtp_depths == expected
        return
    with pytest.raises(CheckpointError, match=expected):
        open_model(model_dir)


def test_depths_are_left_out_if_the_configuration_has_none(depth_model: Path, tmp_path: Path) -> None:
    model_dir = copy_model(depth_model, tmp_path / "hf")
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    tensors = load_file(model_dir / "model.safetensors")
    source = open_model(model_dir)
    names = {tensor.mapping.external_name for tensor in source.tensors}
    assert source.model.num_mtp_depths == 0
    assert names == {name for name in tensors if not re.search(r"layers\.[34]\.", name)}
    del tensors["model.layers.4.eh_proj.weight"]  # a layer without it is no depth, but num_hidden_layers may be wrong
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.4\.enorm\.weight in .*: not a tensor of this model"):
        open_model(model_dir)


# ---- FP8 weights
BLOCK = (8, 16)


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in FP8 and the factors of its blocks of BLOCK elements, where the last blocks may be smaller."""
    M, N = values.shape
    scale = torch.empty(-(-M // BLOCK[0]), -(-N // BLOCK[1]))
    quantized = torch.empty(M, N, dtype=torch.float8_e4m3fn)
    for i, j in ((i, j) for i in range(scale.shape[0]) for j in range(scale.shape[1])):
        part = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
        scale[i, j] = values[part].abs().max() / 448
        quantized[part] = (values[part] / scale[i, j]).to(torch.float8_e4m3fn)
    return quantized, scale


def dequantized(quantized: Tensor, scale: Tensor) -> Tensor:
    """Return the values element by element, in fp64: a product of FP8 and fp32 numbers is exact there."""
    M, N = quantized.shape
    rows, columns = torch.arange(M)[:, None] // BLOCK[0], torch.arange(N)[None] // BLOCK[1]
    return quantized.double() * scale.double()[rows.expand(M, N), columns.expand(M, N)]


def write_fp8(name: str, directory: Path, dtype: str = "bfloat16") -> Path:
    """Write a model with FP8 matrices, and their scales in another file."""
    create_model(name, directory)
    weights, scales = load_file(directory / "model.safetensors"), {}
    for key, values in list(weights.items()):
        is_quantized = re.search(r"_proj(_with_mqa)?\.weight$", key)
        weights[key] = values if key.endswith("bias") else values.to(getattr(torch, dtype))
        if is_quantized:
            weights[key], scales[f"{key}_scale_inv"] = quantize(values)
    (directory / "model.safetensors").unlink()
    files = {"model-00001-of-00002.safetensors": scales, "model-00002-of-00002.safetensors": weights}
    for file, tensors in files.items():
        save_file(tensors, directory / file)
    weight_map = {key: file for file, tensors in files.items() for key in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((directory / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}}
    (directory / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype, "dtype": dtype}))
    return directory


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3"])
def test_fp8_weights_are_read_exactly(name: str, dtype: str, tmp_path: Path, capsys) -> None:
    model_dir = write_fp8(name, tmp_path / "hf", dtype)
    assert tool("--from-hf", model_dir, "--save", tmp_path / "ours", "--check-bits") == 0
    assert tool("--load", tmp_path / "ours", "--to-hf", tmp_path / "back", "--check") == 0
    stored, exported = read_tensors(model_dir), read_tensors(tmp_path / "back")
    assert exported.keys() == {key for key in stored if not key.endswith("_scale_inv")}
    num_quantized = 0
    for key, values in exported.items():
        expected = stored[key]
        if expected.dtype == torch.float8_e4m3fn:
            # one rounding to fp32 and one to the dtype, as DeepSeek's own conversion does
            expected = dequantized(expected, stored[f"{key}_scale_inv"]).float().to(getattr(torch, dtype))
            num_quantized += 1
        assert values.dtype == expected.dtype and torch.equal(values, expected), key
    assert num_quantized > 10
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_logits_of_fp8_weights_are_not_compared(tmp_path: Path, capsys) -> None:
    model_dir = write_fp8("qwen3", tmp_path / "hf")
    capsys.readouterr()
    assert tool("--from-hf", model_dir, "--save", tmp_path / "ours", "--check") == 3
    assert "logits of quantised weights are not compared; give --check-bits" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


def test_fp8_weights_need_memory_for_one_tensor(models, tmp_path: Path) -> None:
    sizes = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=16)
    big = tmp_path / "big"
    create_model("llama", big, **sizes)
    tensors = {name: values.bfloat16() for name, values in load_file(big / "model.safetensors").items()}
    matrices = [name for name in tensors if name.endswith("_proj.weight")]
    for name in matrices:
        tensors[f"{name}_scale_inv"] = torch.rand([-(-size // 128) for size in tensors[name].shape])
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    total = sum(2 * tensors[name].numel() for name in matrices) / 2**20
    largest = max(4 * tensors[name].numel() for name in matrices) / 2**20
    save_file(tensors, big / "model.safetensors")
    del tensors
    config = json.loads((big / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (big / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    peaks = conversion_peaks(models("gpt2")[1], big, tmp_path)
    assert total > 100 and max(peaks) < MEMORY_BESIDE_TENSORS + 4 * largest, peaks


FP8_FILES: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, Tensor]], object], str]] = {
    "no scale": (
        lambda s, w: s.pop(f"{Q}_scale_inv"),
        "q_proj.weight in .*: F8_E4M3 without .*q_proj.weight_scale_inv",
    ),
    "another shape": (
        lambda s, w: s.update({f"{Q}_scale_inv": torch.ones(1, 1)}),
        r"q_proj.weight_scale_inv in .*: shape \(1, 1\), not \(8, 2\) for blocks of 8 x 16",
    ),
    "scale alone": (
        lambda s, w: s.update({"model.layers.9.x_scale_inv": torch.ones(1, 1)}),
        "layers.9.x_scale_inv in .*: not a tensor of this model",
    ),
    "plain weight": (
        lambda s, w: w.update({Q: w[Q].float()}),
        "q_proj.weight_scale_inv in .*: a scale, but .*float32, not",
    ),
    "a norm": (
        lambda s, w: w.update({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}),
        "norm.weight in .*: F8_E4M3 without",
    ),
    "infinite": (lambda s, w: s[f"{Q}_scale_inv"].fill_(torch.inf), "q_proj.weight in .*: .* values are not finite"),
}
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("case", FP8_FILES)
def test_damaged_fp8_files_are_named(case: str, tmp_path: Path, capsys) -> None:
    model_dir = write_fp8("qwen3", tmp_path / "hf")
    change, reason = FP8_FILES[case]
    paths = [model_dir / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    scales, weights = map(load_file, paths)
    change(scales, weights)
    save_file(scales, paths[0])
    save_file(weights, paths[1])
    weight_map = {key: path.name for path, part in zip(paths, (scales, weights), strict=True) for key in part}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert tool("--from-hf", model_dir, "--save", tmp_path / "ours") == 3
    assert re.search(reason, capsys.readouterr().err)
