"""A model with muP in Hugging Face's format: its multipliers are factors of weights, and transformers computes the same.

megalite's logits are those of the checkpoint, with muP.
"""

import re
from pathlib import Path

import pytest
import torch
from hugging_face_cases import causal_lm_class
from safetensors.torch import load_file
from torch import Tensor
from train_cases import config_from, run_from

from megalite.checkpoint.manager import saver
from megalite.checkpoint.offline import open_checkpoint
from megalite.config.config_file import dump_config
from megalite.interop.fold_mup import fold_mup
from megalite.training.checkpointing.save import shards_to_save
from megalite.training.job.export_hf import export_problems
from megalite.training.train_step import train_step
from tools import convert_checkpoint
from tools.verification import conversion

VOCAB_SIZE = 60
COMMON = f"""--num-layers 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 4 --lr 0.02
 --seed 7 --mock-data --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE - 1} --train-iters 2 --eval-iters 0
 --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.3"""
SIZES = "--hidden-size 64 --num-attention-heads 4"
GPT = f"{SIZES} --position-embedding-type learned_absolute"
LLAMA = f"""{SIZES} --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
 --untie-embeddings-and-output-weights --ffn-hidden-size 96"""
TIED_LLAMA = LLAMA.replace("--untie-embeddings-and-output-weights", "")
MLA = f"""{LLAMA} --multi-latent-attention --kv-lora-rank 16 --q-lora-rank 16 --qk-head-dim 12 --v-head-dim 16
 --qk-pos-emb-head-dim 4 --qk-layernorm --num-experts 4 --moe-ffn-hidden-size 32 --moe-layer-freq [0,1]
 --moe-router-score-function sigmoid --moe-shared-expert-intermediate-size 32 --moe-router-enable-expert-bias
 --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk 2 --mtp-num-layers 1 --qk-norm-epsilon 1e-6"""
WIDE = "--use-mup --mup-base-hidden-size 16"


def write_checkpoint(directory: Path, flags: str) -> Path:
    """Train two steps, so that no norm and bias has its initial value, save, and return the checkpoint's directory."""
    argv = f"{COMMON} {flags}"
    run = run_from(argv)
    for _ in range(2):
        train_step(run)
    run.sync.wait_param_sync()
    state = {"config": dump_config(config_from(argv)), "vocab_size": run.vocab_size}
    return saver.save(directory, 2, shards_to_save(run), state, run.mesh)


def to_hf(checkpoint: Path, target: Path, *flags: str) -> int:
    return convert_checkpoint.main(["--load", str(checkpoint), "--to-hf", str(target), "--check", *flags])


def logits(checkpoint: Path, hf_dir: Path, model_type: str) -> tuple[Tensor, Tensor]:
    """Return the logits of megalite and of transformers in fp32."""
    source = open_checkpoint(checkpoint)
    tokens_BS = torch.randint(0, VOCAB_SIZE - 1, (2, 16), generator=torch.Generator().manual_seed(5))
    local = conversion.megalite_logits(source, convert_checkpoint.saved_model(source), tokens_BS, VOCAB_SIZE - 1)
    model = causal_lm_class(model_type).from_pretrained(hf_dir, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        return local, model.eval()(tokens_BS).logits


@pytest.mark.parametrize(
    "flags, model_type",
    [
        (f"{GPT} {WIDE} --mup-embedding-mult 2", "gpt2"),
        (f"{LLAMA} {WIDE} --mup-embedding-mult 4 --mup-output-mult 0.5", "llama"),
        (f"{TIED_LLAMA} {WIDE} --mup-embedding-mult 2 --add-qkv-bias", "qwen2"),
        (f"{LLAMA} {WIDE} --qk-layernorm --group-query-attention --num-query-groups 2 --mup-base-head-dim 4", "qwen3"),
        (f"{MLA} {WIDE}", "deepseek_v3"),
    ],
)
def test_transformers_computes_what_mup_does(flags: str, model_type: str, tmp_path: Path, capsys) -> None:
    checkpoint = write_checkpoint(tmp_path / "run", flags)
    assert to_hf(checkpoint, tmp_path / "hf", "--family", model_type) == 0, capsys.readouterr().err
    assert "all bits equal" in capsys.readouterr().out
    local, external = logits(checkpoint, tmp_path / "hf", model_type)
    assert local.abs().max() > 0.1
    torch.testing.assert_close(local, external, rtol=0, atol=2e-5)
    factors = fold_mup(convert_checkpoint.saved_model(open_checkpoint(checkpoint))).factors
    assert {0.25} <= {factor for name, factor in factors.items() if "attention" in name} or "qwen3" in model_type


def test_other_widths_are_folded_in_fp32_only(tmp_path: Path, capsys) -> None:
    """A factor of 1/3 would round weights in bf16 once more."""
    flags = f"{LLAMA} --bf16 --use-mup --mup-base-hidden-size 24 --mup-base-head-dim 16"
    checkpoint = write_checkpoint(tmp_path / "run", flags)
    assert to_hf(checkpoint, tmp_path / "hf") == 3
    assert "factor 0.375 of head is no power of two" in capsys.readouterr().err
    assert to_hf(checkpoint, tmp_path / "hf", "--dtype", "float32") == 0, capsys.readouterr().err
    head = load_file(tmp_path / "hf" / "model.safetensors")["lm_head.weight"]
    stored = open_checkpoint(checkpoint).read("optimizer.main/head")
    torch.testing.assert_close(head, stored[: len(head)] * 0.375, rtol=1e-6, atol=0)
    (problem,) = export_problems(config_from(f"{COMMON} {flags} --export-hf {tmp_path / 'other'}"))
    assert "convert with --dtype float32" in problem


def test_weights_in_fp16_are_not_folded(tmp_path: Path) -> None:
    """A factor of 1/4, also a power of two, makes small weights subnormal, with fewer bits."""
    flags = f"{LLAMA} --fp16 --use-mup --mup-base-hidden-size 8 --mup-base-head-dim 16"
    (problem,) = export_problems(config_from(f"{COMMON} {flags} --export-hf {tmp_path / 'other'}"))
    assert "in float16 too small or too large for it; convert with --dtype float32 or bfloat16" in problem


@pytest.mark.parametrize(
    "flags, message",
    [
        (f"{TIED_LLAMA} {WIDE} --mtp-num-layers 1", r"factor 0\.25 of the logits of a tied head .* mtp_num_layers=1"),
        (
            f"{TIED_LLAMA} {WIDE} --activation geglu --apply-layernorm-1p --embedding-multiplier 8 --sandwich-norm",
            "factor 0.25 of final_norm.weight is lost in a difference from 1",
        ),
    ],
)
def test_factors_without_a_weight_are_refused(flags: str, message: str, tmp_path: Path) -> None:
    config = config_from(f"{COMMON} {flags} --export-hf {tmp_path / 'hf'}")
    (problem,) = export_problems(config)
    assert re.search(message, problem), problem
