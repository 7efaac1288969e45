"""Presets have the published numbers of parameters, summed over the tensors that are built."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from formulas import head_flops, layer_flops, mean_keys
from train_cases import config_from

from megalite.config.options import ModelConfig, build
from megalite.interop.name_mapping import parse_rules
from megalite.models.families import PRESETS
from megalite.models.specs import model_specs
from megalite.planning.bottleneck import recompute_flops
from megalite.planning.layer_kinds import flops_per_token
from megalite.planning.run_plan import RunPlan, make_run_plan

PUBLISHED = tomllib.loads(Path(__file__).with_name("published.toml").read_text("utf-8"))


def plan_of(name: str) -> RunPlan:
    config = config_from(f"--preset {name} --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data")
    return make_run_plan(config, 1, config.data.vocab_size or 50257)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_equal_the_published_ones(name: str) -> None:
    """Compare all parameters, and the active ones of a token, which are all of them in a dense model."""
    plan = plan_of(name)
    assert [plan.model_states.num_parameters, plan.model_states.num_active_parameters] == (PUBLISHED[name] * 2)[:2]


def test_tiny_moe_has_the_flops_of_tiny() -> None:
    dense, experts = (build(PRESETS[name]).model for name in ("tiny", "tiny-moe"))
    assert experts.expert_ffn_size * experts.moe_router_topk == dense.ffn_size
    assert {**PRESETS["tiny-moe"], **PRESETS["tiny"]}.items() == PRESETS["tiny-moe"].items()


def test_gpt3_has_175_billion_parameters() -> None:
    assert round(plan_of("gpt3-175b").model_states.num_parameters / 1e9) == 175


@pytest.mark.parametrize("tied", [True, False])
def test_stages_partition_the_parameters(tied: bool) -> None:
    model = build({**PRESETS["tiny"], "untie_embeddings_and_output_weights": not tied}).model
    full, halves = model_specs(model, 100), (range(3), range(3, 8))
    first, last = (model_specs(model, 100, stages=halves, stage_index=number) for number in (0, 1))
    assert {**first, **last} == full
    assert first.keys() & last.keys() == ({"embedding.word"} if tied else set())  # it is the head of the last stage
    padded = model_specs(model, 100, padded_vocab_size=128)["embedding.word"]
    assert (padded.shape[0], padded.stored_shape) == (128, full["embedding.word"].shape)


def test_starred_family_rule_is_two_rules() -> None:
    weight, bias = parse_rules("layer.c_attn.* = our.q* + our.kv*[0] (columns)", "h.{n}.")
    assert (weight.external, weight.params) == ("h.{n}.c_attn.weight", ("layers.{n}.q", "layers.{n}.kv[0]"))
    assert (bias.external, bias.params) == ("h.{n}.c_attn.bias", ("layers.{n}.q_bias", "layers.{n}.kv_bias[0]"))
    assert (weight.form, bias.form) == ("columns", "rows")
    (head,) = parse_rules("lm_head.weight = head | embedding.word", "")
    assert (head.params, head.duplicates) == (("head",), ("embedding.word",))


WINDOW = {"window_size": (1023, 0)}


@pytest.mark.parametrize("window", [{}, WINDOW, {**WINDOW, "window_attn_skip_freq": "2"}], ids=str)
@pytest.mark.parametrize("length", [100, 1024, 8192])
def test_model_flops_equal_the_literature(length: int, window: dict[str, Any]) -> None:
    """Compare Llama-3-8B with three times the formulas of a forward; windows count only visible keys."""
    model = build({**PRESETS["llama3-8b"], **window}).model
    expected = 3 * (32 * layer_flops(model, length) + head_flops(model, 128256))
    assert flops_per_token(replace(model, seq_length=length), 128256) == pytest.approx(expected, rel=1e-12)


def latent_layer_flops(model: ModelConfig, length: int) -> float:
    """Return the FLOPs of a forward of latent attention per token (arXiv:2405.04434, eq. 9 to 19)."""
    D, H, rank = model.hidden_size, model.num_attention_heads, model.kv_lora_rank
    N, R, V = model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
    queries = D * H * (N + R)
    if model.q_lora_rank is not None:
        queries = D * model.q_lora_rank + model.q_lora_rank * H * (N + R)
    projections = queries + D * (rank + R) + rank * H * (N + V) + H * V * D
    return 2 * projections + 2 * H * (N + R + V) * mean_keys(model, length)


@pytest.mark.parametrize("preset", ["deepseek-v3", "moonlight-16b"])
@pytest.mark.parametrize("depths", [0, 1, 3])
def test_model_flops_of_latent_attention_and_depths_equal_the_literature(preset: str, depths: int) -> None:
    """A depth adds a layer, a projection from 2 D to D, and a head (arXiv:2412.19437, eq. 21 to 23)."""
    model = build({**PRESETS[preset], **({"mtp_num_layers": depths} if depths else {})}).model
    D, vocab_size, length = model.hidden_size, 131072, 4096
    num_dense = sum(layer.mlp == "mlp" for layer in model.layers)
    expert_width = model.moe_router_topk * model.expert_ffn_size + (model.moe_shared_expert_intermediate_size or 0)
    attention = latent_layer_flops(model, length)
    dense = attention + 2 * 3 * D * model.ffn_size
    sparse = attention + 2 * 3 * D * expert_width + 2 * D * model.num_experts
    head = 2 * D * vocab_size
    forward = num_dense * dense + (model.num_layers - num_dense) * sparse + head
    forward += depths * (sparse + 2 * 2 * D * D + head)
    assert flops_per_token(replace(model, seq_length=length), vocab_size) == pytest.approx(3 * forward, rel=1e-12)


def test_window_keys_are_counted() -> None:
    model = build({**PRESETS["llama3-8b"], **WINDOW}).model
    exact = sum(min(i + 1, 1024) for i in range(8192)) / 8192  # with the half of the diagonal that S / 2 leaves out
    assert mean_keys(model, 8192) == pytest.approx(exact, abs=0.5)


FULL = "--recompute-granularity full --recompute-method"


@pytest.mark.parametrize(
    "flags,layers,depths",
    [("", 0, 0), (f"{FULL} uniform", 4, 2), (f"{FULL} block --recompute-num-layers 3", 3, 0)],
    ids=["none", "uniform", "block"],
)
def test_recomputed_flops_are_forwards_of_layers(flags: str, layers: int, depths: int) -> None:
    """Full recomputation runs the forward of a layer again, and `uniform` also that of each depth."""
    argv = f"""--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mtp-num-layers 2 --vocab-size 128
     --mock-data --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 2 --device cpu {flags}"""
    plan = make_run_plan(config_from(argv), 1, 128)
    model = plan.config.model
    layer, head = layer_flops(model, 32), head_flops(model, 128)
    depth = layer + 2 * 2 * model.hidden_size**2
    total = 3 * (4 * layer + head + 2 * (depth + head))
    assert recompute_flops(plan) == pytest.approx((layers * layer + depths * depth) / total, rel=1e-12)
