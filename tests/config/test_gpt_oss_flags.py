"""Megatron-LM's flags for GPT-OSS, from examples/post_training/modelopt/conf/openai/gpt-oss-20b.sh."""

from pathlib import Path

import pytest
from train_cases import config_from

from megalite.config import cli
from megalite.config.options import ConfigError
from megalite.interop.huggingface.config_json import read_config
from megalite.models.families import PRESETS

GPT_OSS_20B = """--micro-batch-size 1 --bf16 --no-masked-softmax-fusion --untie-embeddings-and-output-weights
 --no-rope-fusion --normalization RMSNorm --num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880
 --num-attention-heads 64 --group-query-attention --num-query-groups 8 --kv-channels 64 --num-experts 32
 --moe-ffn-hidden-size 2880 --moe-router-dtype fp32 --moe-router-topk 4 --moe-aux-loss-coeff 0.0
 --moe-token-dispatcher-type alltoall --moe-router-score-function softmax --moe-router-load-balancing-type aux_loss
 --seq-length 4096 --max-position-embeddings 40960 --make-vocab-size-divisible-by 128 --use-mcore-models
 --rotary-percent 1.0 --rotary-base 150000 --no-bias-gelu-fusion --sequence-parallel --export-force-local-attention
 --no-bias-dropout-fusion --padded-vocab-size 201088 --quick-geglu --glu-linear-offset 1.0 --softmax-type learnable
 --window-attn-skip-freq 2 --enable-gpt-oss --activation-func-clamp-value 7.0 --window-size 127,0"""
TRAINING = "--mock-data --tokenizer-type NullTokenizer --vocab-size 200000 --lr 1e-4 --train-iters 10"


def test_line_of_gpt_oss_starts_as_it_is_and_is_the_published_model() -> None:
    config, _ = cli.read(f"{GPT_OSS_20B} {TRAINING}".split(), PRESETS)
    model = config.model
    published = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "attention_bias": True,
        "tie_word_embeddings": False,
    }
    family, options = read_config(published, 4096, "config.json")
    # Megatron-LM's flag has another original context than the published file, and its line does not set dropout
    differs = {"max_position_embeddings", "yarn_original_max_position_embeddings", "vocab_size"}
    differs |= {"hidden_dropout", "attention_dropout"}
    assert family == "gpt_oss"
    assert {name: value for name, value in options.items() if name not in differs} == {
        name: getattr(model, name) for name in options if name not in differs
    }
    assert model.yarn_original_max_position_embeddings == 131072


@pytest.mark.parametrize(
    "flags,message",
    [
        (
            "--quick-geglu",
            "quick_geglu=True, glu_linear_offset=0.0, activation_func_clamp_value=None: only clamped_swi",
        ),
        (
            "--glu-linear-offset 1.0",
            "quick_geglu=False, glu_linear_offset=1.0, activation_func_clamp_value=None: only ",
        ),
        (
            "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --swiglu",
            "activation=swiglu with quick_geglu=True, which is clamped_swiglu; drop one",
        ),
    ],
)
def test_other_quick_geglu_is_refused(flags: str, message: str) -> None:
    small = "--num-layers 1 --ffn-hidden-size 32 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1"
    with pytest.raises(ConfigError, match="^" + message):
        cli.read(f"{small} {flags} {TRAINING}".split(), PRESETS)


def test_flags_of_gpt_oss_win_over_a_preset() -> None:
    flags = "--preset tiny --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --enable-gpt-oss"
    config, _ = cli.read(f"{flags} --micro-batch-size 1 {TRAINING}".split(), PRESETS)
    assert config.model.activation == "clamped_swiglu" and config.model.position_embedding_type == "yarn"
    with pytest.raises(ConfigError, match="position_embedding_type=rope with enable_gpt_oss=True, which sets yarn; dr"):
        cli.read(f"{flags} --position-embedding-type rope --micro-batch-size 1 {TRAINING}".split(), PRESETS)


def test_hierarchical_context_parallelism_runs_as_allgather() -> None:
    small = "--num-layers 2 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1"
    flags = "--context-parallel-size 2 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 1"
    config, notes = cli.read(f"{small} {flags} {TRAINING}".split(), PRESETS)
    assert {layer.cp_comm_type for layer in config.model.layers} == {"allgather"}
    assert "cp_comm_type=a2a+p2p is replaced by allgather; a2a moves fewer bytes" in notes


SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --vocab-size 100"
SIZES += " --mock-data --lr 1e-4 --train-iters 10"
QUICK_GEGLU = "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0"
FILE_WITH_QUICK_GEGLU = "quick_geglu = true\nglu_linear_offset = 1.0\nactivation_func_clamp_value = 7.0\n"


@pytest.mark.parametrize(
    "text,flags,activation",
    [
        (FILE_WITH_QUICK_GEGLU, "", "clamped_swiglu"),
        (FILE_WITH_QUICK_GEGLU, "--no-quick-geglu", "gelu"),
        (FILE_WITH_QUICK_GEGLU, "--swiglu", "swiglu"),
        (FILE_WITH_QUICK_GEGLU, "--no-quick-geglu --activation gelu_erf", "gelu_erf"),
        ('activation = "swiglu"\n', QUICK_GEGLU, "clamped_swiglu"),
    ],
)
def test_command_line_replaces_the_activation_of_a_file(text: str, flags: str, activation: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    assert config_from(f"{SIZES} --config {tmp_path}/run.toml {flags}").model.activation == activation
