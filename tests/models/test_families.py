"""Presets have the published numbers of parameters, summed over the tensors that are built."""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from formulas import head_flops, layer_flops, mean_keys

from megalite.config.options import Config, build
from megalite.interop.naming import rules
from megalite.models.families import PRESETS
from megalite.models.specs import specs_of
from megalite.plan.kinds import model_flops

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "olmoe-1b-7b": 6_919_161_856,
    "gpt-oss-20b": 20_914_757_184,
}
# 12.9, 3.3, 1.3 and 3.61 billion are published, the last without the embedding's 0.58
ACTIVE = {"mixtral-8x7b": 12_879_925_248, "qwen3-30b-a3b": 3_353_032_704, "olmoe-1b-7b": 1_282_017_280}
ACTIVE |= {"gpt-oss-20b": 4_187_440_704}


def num_parameters(config: Config, vocab_size: int) -> int:
    return sum(math.prod(spec.shape) for spec in specs_of(config.model, vocab_size).values())


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_count_is_the_published_one(name: str) -> None:
    config = build(PRESETS[name])
    assert config.data.vocab_size
    assert num_parameters(config, config.data.vocab_size) == PUBLISHED[name]


@pytest.mark.parametrize("name", sorted(ACTIVE))
def test_a_token_meets_as_many_parameters_as_published(name: str) -> None:
    config = build(PRESETS[name])
    E, vocab_size = config.model.num_experts, config.data.vocab_size
    assert E and vocab_size
    share = {"expert": Fraction(config.model.moe_router_topk, E), "dense": 1}
    specs = specs_of(config.model, vocab_size).values()
    assert sum(math.prod(spec.shape) * share[spec.home] for spec in specs) == ACTIVE[name]


def test_tiny_moe_computes_as_much_as_tiny() -> None:
    dense, experts = (build(PRESETS[name]).model for name in ("tiny", "tiny-moe"))
    assert experts.expert_ffn_size * experts.moe_router_topk == dense.ffn_size
    assert {**PRESETS["tiny-moe"], **PRESETS["tiny"]}.items() == PRESETS["tiny-moe"].items()


def test_gpt3_is_175_billion() -> None:
    config = build(PRESETS["gpt3-175b"])
    assert round(num_parameters(config, 50257) / 1e9) == 175


@pytest.mark.parametrize("tied", [True, False])
def test_the_stages_of_a_model_hold_what_the_model_does(tied: bool) -> None:
    model = build({**PRESETS["tiny"], "untie_embeddings_and_output_weights": not tied}).model
    whole, halves = specs_of(model, 100), (range(3), range(3, 8))
    first, last = (specs_of(model, 100, stages=halves, number=number) for number in (0, 1))
    assert {**first, **last} == whole
    assert first.keys() & last.keys() == ({"embedding.word"} if tied else set())  # the last stage's head is it
    padded = specs_of(model, 100, padded=128)["embedding.word"]
    assert (padded.shape[0], padded.stored_shape) == (128, whole["embedding.word"].shape)


def test_a_line_of_rules_with_stars_is_two_rules() -> None:
    weight, bias = rules("layer.c_attn.* = our.q* + our.kv*[0] (columns)", "h.{n}.")
    assert (weight.theirs, weight.ours) == ("h.{n}.c_attn.weight", ("layers.{n}.q", "layers.{n}.kv[0]"))
    assert (bias.theirs, bias.ours) == ("h.{n}.c_attn.bias", ("layers.{n}.q_bias", "layers.{n}.kv_bias[0]"))
    assert (weight.form, bias.form) == ("columns", "rows")
    (head,) = rules("lm_head.weight = head | embedding.word", "")
    assert (head.ours, head.copied) == (("head",), ("embedding.word",))


WINDOW = {"window_size": (1023, 0)}


@pytest.mark.parametrize("seen", [{}, WINDOW, {**WINDOW, "window_attn_skip_freq": "2"}], ids=str)
@pytest.mark.parametrize("length", [100, 1024, 8192])
def test_flops_are_those_of_the_literature(length: int, seen: dict[str, Any]) -> None:
    """Of Llama-3-8B, three times the forward's; in a window what is seen."""
    model = build({**PRESETS["llama3-8b"], **seen}).model
    want = 3 * (32 * layer_flops(model, length) + head_flops(model, 128256))
    assert model_flops(replace(model, seq_length=length), 128256) == pytest.approx(want, rel=1e-12)


def test_keys_that_a_window_shows_are_counted_one_by_one() -> None:
    model = build({**PRESETS["llama3-8b"], **WINDOW}).model
    exact = sum(min(i + 1, 1024) for i in range(8192)) / 8192  # with the half of the diagonal that S / 2 leaves out
    assert mean_keys(model, 8192) == pytest.approx(exact, abs=0.5)
