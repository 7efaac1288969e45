"""A run compared with a reference model in plain torch, in fp64 to a relative 1e-10.

Loss, gradient norm and learning rate of every step, and every weight at the end, equal those of the reference with
torch's own optimizers (tests/support/reference_model.py). Each row names an option twice, as a flag and as a fact;
`CHANGED_FACTS` shows that the reference without the fact gives other losses.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import reference_model as reference
import torch
from reference_model import Documents, Model, Rotary, Training, TrainResult, Weights, Yarn, is_matrix
from torch import Tensor
from train_cases import DOCUMENT_FLAGS, run_from

from megalite.config.rope_spec import RopeScaling, RopeSpec
from megalite.kernels.dropout import fold_in, keep_mask
from megalite.kernels.rope import apply_rope, rope_tables
from megalite.nn.parameter import params_with_specs
from megalite.training.evaluation import evaluate
from megalite.training.state import Run
from megalite.training.train_step import train_step

STEPS, BATCH, LR, SEED = 4, 4, 0.01, 7
COMMON = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 20
 --micro-batch-size 2 --global-batch-size {BATCH} --lr {LR} --lr-decay-style constant --seed {SEED}
 --mock-data --tokenizer-type NullTokenizer --vocab-size 21 --make-vocab-size-divisible-by 8 --init-method-std 0.2
 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --adam-eps 1e-3"""
EOD = 20  # NullTokenizer's last id

GPT = Model(
    num_layers=2,
    width=32,
    num_heads=4,
    head_size=8,
    num_kv_groups=4,
    ffn=128,
    vocab_size=21,
    padded_vocab_size=24,
    max_positions=20,
)
LLAMA_FLAGS = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
 --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"""
LLAMA = replace(
    *(GPT,), norm="RMSNorm", activation="swiglu", ffn=64, bias="none", num_kv_groups=2, rotary=Rotary(),
    learned_positions=False, tie_embeddings=False,
)  # fmt: skip
QWEN_FLAGS = f"{LLAMA_FLAGS} --add-qkv-bias --qk-layernorm"
QWEN = replace(LLAMA, bias="qkv", qk_norm=True)
YARN_FLAGS = f"""{LLAMA_FLAGS.replace("type rope", "type yarn")} --rotary-base 100 --rotary-scaling-factor 4
 --yarn-original-max-position-embeddings 10 --yarn-beta-fast 1 --yarn-beta-slow 0.08"""
YARN = Yarn(factor=4.0, original_max_positions=10, beta_fast=1.0, beta_slow=0.08)
PLAIN = Training(learning_rates=(LR,) * STEPS, eps=1e-3)


@dataclass(frozen=True)
class Row:
    """The flags of one run, and the same options for the reference."""

    name: str
    flags: str
    model: Model
    training: Training = PLAIN
    documents: Documents | None = None
    dropout: tuple[float, float] = (0.0, 0.0)  # hidden, attention


def gpt(name: str, flags: str, **facts: Any) -> Row:
    return Row(name, flags, replace(GPT, **facts))


def llama(name: str, flags: str, **facts: Any) -> Row:
    return Row(name, f"{LLAMA_FLAGS} {flags}", replace(LLAMA, **facts))


def yarn(name: str, flags: str, **facts: Any) -> Row:
    return Row(name, f"{YARN_FLAGS} {flags}", replace(LLAMA, rotary=Rotary(100.0, yarn=replace(YARN, **facts))))


def update(name: str, flags: str, rate: Callable[[int], float] = lambda step: LR, **facts: Any) -> Row:
    """Return a row about the update; `rate` is the learning rate after `step` steps, 0 .. STEPS - 1."""
    rates = tuple(map(rate, range(STEPS)))
    return Row(name, flags, GPT, replace(PLAIN, learning_rates=rates, **facts))


def wsd(style: str, height: Callable[[float], float]) -> Row:
    """Return a row with one step of warmup at rate 0, one at the peak, and the first two of three steps of decay."""
    flags = f"""--lr-decay-style WSD --lr-wsd-decay-style {style} --lr-wsd-decay-iters 3 --lr-decay-iters 4
     --lr-warmup-iters 1 --min-lr 1e-3"""
    return update(f"WSD {style}", flags, lambda step: LR * step if step <= 1 else 1e-3 + 9e-3 * height((step - 1) / 3))


UNTIED, SCALING = "--untie-embeddings-and-output-weights", "--use-rope-scaling"
NO_POSITIONS = "--position-embedding-type none --normalization RMSNorm"
BASE, INTERLEAVED = "--rotary-base 500000", "--rotary-interleaved --rotary-percent 0.5"
POSITIONS, ATTENTION = Documents(EOD, reset_positions=True), Documents(EOD, reset_attention=True)
DROPPED = "--hidden-dropout 0.3 --attention-dropout 0.2 --reset-attention-mask"
GROWING = "--start-weight-decay 1 --end-weight-decay 5 --weight-decay-incr-style linear"
APART = "--decoupled-lr 0.03 --decoupled-min-lr 0.02 --lr-decay-style linear"
RATES_APART: dict[str, Any] = {
    "learning_rates": tuple(LR * (1 - step / STEPS) for step in range(STEPS)),
    "vocab_learning_rates": tuple(0.03 - 0.01 * step / STEPS for step in range(STEPS)),
}
# a width of 4 times, 8/3 times and half that of the base model
WIDE, WIDER, NARROW = (f"--use-mup --mup-base-hidden-size {base}" for base in (8, 12, 64))
WIDE_FACTS: dict[str, Any] = {"softmax_scale": 1 / 8, "logit_multiplier": 1 / 4}
WIDER_FACTS: dict[str, Any] = {"softmax_scale": 6**0.5 / 8, "logit_multiplier": 0.7, "embedding_sum_multiplier": 1.5}
WIDE_ADAM = replace(PLAIN, matrix_rate=1 / 4, eps=1e-3 / 4, weight_decay=0.5)
WIDER_ADAM = replace(PLAIN, matrix_rate=3 / 8, eps=1e-3 * 3 / 8)
WIDE_SGD = replace(PLAIN, momentum=0.9, other_rate=4.0, weight_decay=0.3)
NARROW_ADAM = replace(PLAIN, matrix_rate=2.0, eps=2e-3)
QK_DECAY = "--weight-decay 5 --apply-wd-to-qk-layernorm"


ROWS = [
    Row("gpt", "", GPT),
    Row("llama", LLAMA_FLAGS, LLAMA),
    Row("qwen", QWEN_FLAGS, QWEN),
    llama("llama one group", "--num-query-groups 1", num_kv_groups=1),
    gpt("gpt squared relu untied", f"--squared-relu {UNTIED}", activation="squared_relu", tie_embeddings=False),
    gpt("gpt swiglu with biases", "--swiglu --ffn-hidden-size 24", activation="swiglu", ffn=24),
    gpt("gpt no positions RMSNorm", NO_POSITIONS, learned_positions=False, norm="RMSNorm"),
    gpt("gpt q/k norm", "--qk-layernorm", qk_norm=True),
    gpt("softmax off by one", "--softmax-type off-by-one", sink="off-by-one"),
    llama("sinks", "--softmax-type learnable", sink="learnable"),
    gpt("capped scores", "--attn-logit-softcapping 0.5", attention_cap=0.5),
    gpt("capped logits", "--final-logit-softcapping 2", logit_cap=2.0),
    Row(
        "capped, documents, dropout, sinks",
        f"{LLAMA_FLAGS} {DROPPED} --softmax-type learnable --attn-logit-softcapping 0.5 --final-logit-softcapping 2",
        replace(LLAMA, sink="learnable", attention_cap=0.5, logit_cap=2.0),
        documents=ATTENTION,
        dropout=(0.3, 0.2),
    ),
    gpt("norms after each part", "--sandwich-norm", sandwich_norm=True),
    Row(
        "norms after each part, dropout",
        "--sandwich-norm --hidden-dropout 0.2",
        replace(GPT, sandwich_norm=True),
        dropout=(0.2, 0.0),
    ),
    gpt("norms of outputs", "--norm-placement output", sandwich_norm=True, input_norm=False),
    Row(
        "norms of outputs, dropout",
        "--norm-placement attention_output --hidden-dropout 0.2",
        replace(GPT, sandwich_norm=True, input_norm=False),
        dropout=(0.2, 0.0),
    ),
    gpt("multiplied embedding", "--embedding-multiplier 2.5", embedding_multiplier=2.5),
    gpt("scale of the scores", "--softmax-scale 0.7", softmax_scale=0.7),
    llama("geglu", "--activation geglu --ffn-hidden-size 24", activation="geglu", ffn=24),
    llama(
        "norms after each part, less one, tied",
        "--sandwich-norm --apply-layernorm-1p --untie-embeddings-and-output-weights=false --embedding-multiplier 5.5",
        **{"sandwich_norm": True, "zero_centered_gamma": True, "embedding_multiplier": 5.5, "tie_embeddings": True},
    ),
    llama("head size 12", "--kv-channels 12", head_size=12),
    llama("rotary base", BASE, rotary=Rotary(base=500000.0)),
    llama("rotary percent", "--rotary-percent 0.5", rotary=Rotary(fraction=0.5)),
    # wavelengths 6, 167, 4443 and 118k tokens: kept, kept, between, stretched
    llama("rotary scaling", f"{BASE} {SCALING}", rotary=Rotary(500000.0, scaling_factor=8.0)),
    llama(
        "rotary scaling by 32",
        f"{BASE} {SCALING} --rope-scaling-factor 32",
        rotary=Rotary(500000.0, scaling_factor=32.0),
    ),
    gpt("no bias: exact gelu", "--disable-bias-linear", bias="none", activation="gelu_erf"),
    gpt("no fusion: exact gelu", "--no-bias-gelu-fusion", activation="gelu_erf"),
    gpt("openai gelu", "--disable-bias-linear --openai-gelu", bias="none"),
    gpt("named gelu", "--disable-bias-linear --activation gelu", bias="none"),
    llama("interpolated positions", "--rotary-seq-len-interpolation-factor 4", rotary=Rotary(interpolation=4.0)),
    llama("interleaved", INTERLEAVED, rotary=Rotary(fraction=0.5, interleaved=True)),
    llama("every second layer without", "--no-rope-freq 2", rotary=Rotary(layers_without_rope=(1,))),
    llama("the first layer without", "--no-rope-freq [1,0]", rotary=Rotary(layers_without_rope=(0,))),
    llama(
        "a window in the first layer, with its own base",
        "--window-size 3,0 --window-attn-skip-freq 2 --rotary-local-base 100 --rotary-seq-len-interpolation-factor 4",
        **{"rotary": Rotary(interpolation=4.0), "windows": (4, None), "local_rotary": Rotary(100.0)},
    ),
    # channels make 1.6, 0.5, 0.16 and 0.05 turns in 10 tokens: kept, between, between and stretched; ends 0.4 and 2.6
    yarn("yarn", "--no-yarn-correction-range-round-to-int", truncate=False),
    yarn("yarn, whole channels", ""),
    yarn("yarn with both magnitudes", "--mscale 0.7 --mscale-all-dim 0.4", mscale=0.7, mscale_all_dim=0.4),
    gpt("norm weights less one", "--apply-layernorm-1p --qk-layernorm", zero_centered_gamma=True, qk_norm=True),
    Row("RMSNorm weights less one", f"{QWEN_FLAGS} --apply-layernorm-1p", replace(QWEN, zero_centered_gamma=True)),
    gpt("norm epsilon LayerNorm", "--norm-epsilon 1e-2", eps=1e-2),
    Row("norm epsilon q/k", f"{QWEN_FLAGS} --norm-epsilon 1e-2", replace(QWEN, eps=1e-2)),
    Row("documents gpt", DOCUMENT_FLAGS, GPT, documents=Documents(EOD, True, True, True)),
    Row("documents llama", f"{LLAMA_FLAGS} {DOCUMENT_FLAGS}", LLAMA, documents=Documents(EOD, True, True, True)),
    Row("documents: loss", "--eod-mask-loss", GPT, documents=Documents(EOD, mask_loss=True)),
    Row("documents: positions", f"{LLAMA_FLAGS} --reset-position-ids", LLAMA, documents=POSITIONS),
    Row("documents: attention", "--reset-attention-mask", GPT, documents=ATTENTION),
    Row("dropout gpt", "--hidden-dropout 0.2 --attention-dropout 0.3", GPT, dropout=(0.2, 0.3)),
    Row("dropout llama documents", f"{LLAMA_FLAGS} {DROPPED}", LLAMA, documents=ATTENTION, dropout=(0.3, 0.2)),
    update("decay", "--weight-decay 5 --clip-grad 0", weight_decay=5.0, max_grad_norm=0.0),
    update("clip", "--weight-decay 0 --clip-grad 1.9", weight_decay=0.0, max_grad_norm=1.9),
    update("betas", "--adam-beta1 0.7 --adam-beta2 0.9", betas=(0.7, 0.9)),
    update("adam eps", "--adam-eps 0.05", eps=0.05),
    update("sgd", "--optimizer sgd --sgd-momentum 0.8 --weight-decay 0.3", momentum=0.8, weight_decay=0.3),
    update(
        "linear",
        "--lr-decay-style linear --min-lr 1e-3 --lr-decay-iters 2",
        lambda step: LR - 9e-3 * step / 2 if step <= 2 else 1e-3,
    ),
    update(
        "linear, by samples",
        f"--train-samples {STEPS * BATCH} --lr-decay-style linear --lr-decay-samples 24 --lr-warmup-samples 6",
        lambda step: LR * step * BATCH / 6 if step <= 1 else LR * (1 - (step * BATCH - 6) / 18),
    ),
    update(
        "linear, by a fraction of the steps",
        f"--lr-decay-style linear --lr-warmup-fraction {2 / STEPS}",
        lambda step: LR * (step / 2 if step <= 2 else 1 - (step - 2) / (STEPS - 2)),
    ),
    update(
        "warmup, cosine",
        "--lr-decay-style cosine --lr-warmup-iters 2 --lr-warmup-init 2e-3 --min-lr 1e-3 --lr-decay-iters 6",
        lambda step: 2e-3 + 4e-3 * step if step <= 2 else 1e-3 + 4.5e-3 * (1 + math.cos(math.pi * (step - 2) / 4)),
    ),
    update(
        "inverse square root",
        "--lr-decay-style inverse-square-root --lr-warmup-iters 2",
        lambda step: LR * step / 2 if step <= 2 else LR * math.sqrt(2 / step),
    ),
    Row(
        "growing weight decay",
        GROWING,
        GPT,
        replace(PLAIN, weight_decays=tuple(1 + 4 * s / STEPS for s in range(STEPS))),
    ),
    Row("a rate of embedding and head", f"{LLAMA_FLAGS} {APART}", LLAMA, replace(PLAIN, **RATES_APART)),
    Row(
        "a rate of the tied embedding", "--decoupled-lr 0.03", GPT, replace(PLAIN, vocab_learning_rates=(0.03,) * STEPS)
    ),
    Row(
        "norms of query and key decay",
        f"{QWEN_FLAGS} {QK_DECAY}",
        QWEN,
        replace(PLAIN, weight_decay=5.0, qk_norms_decay=True),
    ),
    Row("muP", f"{WIDE} --weight-decay 0.5", replace(GPT, **WIDE_FACTS), WIDE_ADAM),
    Row(
        "muP, untied, with multipliers",
        f"{LLAMA_FLAGS} {WIDER} --mup-base-head-dim 6 --mup-output-mult 0.7 --mup-embedding-mult 1.5",
        replace(LLAMA, **WIDER_FACTS),
        WIDER_ADAM,
    ),
    Row(
        "muP, dropout",
        f"{WIDER} --mup-base-head-dim 6 --mup-output-mult 0.7 --mup-embedding-mult 1.5 --hidden-dropout 0.2",
        replace(GPT, **WIDER_FACTS),
        WIDER_ADAM,
        dropout=(0.2, 0.0),
    ),
    Row(
        "muP, narrower than its base, another power",
        f"{QWEN_FLAGS} {NARROW} --mup-attn-scale-power 0.75",
        replace(QWEN, softmax_scale=8**-0.75, logit_multiplier=2.0),
        NARROW_ADAM,
    ),
    Row(
        "muP with a scale of the scores",
        f"{WIDE} --softmax-scale 0.7",
        replace(GPT, softmax_scale=0.7, logit_multiplier=1 / 4),
        replace(WIDE_ADAM, weight_decay=0.01),
    ),
    Row("muP, sgd", f"{WIDE} --optimizer sgd --weight-decay 0.3", replace(GPT, **WIDE_FACTS), WIDE_SGD),
    Row(
        "muP, a rate of embedding and head",
        f"{WIDE} --optimizer sgd --weight-decay 0.3 --decoupled-lr 0.03",
        replace(GPT, **WIDE_FACTS),
        replace(WIDE_SGD, vocab_learning_rates=(0.03,) * STEPS),
    ),
    wsd("linear", lambda r: 1 - r),
    wsd("exponential", lambda r: 2 * 0.5**r - 1),
    wsd("cosine", lambda r: (1 + math.cos(math.pi * r)) / 2),
    wsd("minus_sqrt", lambda r: 1 - math.sqrt(r)),
]
BY_NAME = {row.name: row for row in ROWS}


@dataclass
class Outcome:
    """The results of a run, and its initial weights and batches."""

    initial: Weights
    batches: list[Tensor]
    trained: TrainResult
    logged: list[float]


def build(flags: str) -> Run:
    length = "" if "--train-samples" in flags else f"--train-iters {STEPS}"
    return run_from(f"{COMMON} {length} {flags}", dtype=torch.float64)


def weights_of(run: Run) -> Weights:
    """Return views of all weights, with the rows that pad the vocabulary."""
    return {spec.name: parameter.data for stage in run.pipeline.stages for spec, parameter in params_with_specs(stage)}


def perturb_(weights: Weights) -> None:
    """Change norms and biases, whose initial constants hide errors: a missing scale of 1, a misplaced bias of 0."""
    generator = torch.Generator().manual_seed(1)
    for name, value in sorted(weights.items()):
        if not is_matrix(name):
            value += 0.3 * torch.randn(value.shape, generator=generator, dtype=value.dtype)


@functools.cache
def train_run(flags: str) -> Outcome:
    run = build(flags)
    perturb_(weights_of(run))
    initial = {name: value.clone() for name, value in weights_of(run).items()}
    dataset = run.train_loader.batches.dataset
    batches = [torch.from_numpy(dataset.samples(np.arange(s * BATCH, (s + 1) * BATCH))) for s in range(STEPS)]
    results = [train_step(run) for _ in range(STEPS)]
    trained = TrainResult([r.loss for r in results], [r.grad_norm for r in results], weights_of(run))
    return Outcome(initial, batches, trained, [r.lr for r in results])


SITES = {"embedding": 0, "attention": 1, "after_attention": 2, "after_mlp": 3}


def drop(step: int, dropout: tuple[float, float], site: str, layer: int, x: Tensor) -> Tensor:
    """Apply the dropout of step 1 .. STEPS.

    The run itself chooses the elements to drop, like the initial weights, by a hash of seed, step, layer, site, number
    of the sample and position (kernels/dropout.py).
    """
    p = dropout[site == "attention"]
    if p == 0:
        return x
    positions = [torch.arange(size) for size in x.shape]
    positions[0] += (step - 1) * BATCH
    axes = [position.view(-1, *[1] * (x.dim() - 1 - i)) for i, position in enumerate(positions)]
    return x * keep_mask(fold_in(SEED, step, layer, SITES[site]), p, *axes) / (1 - p)


@functools.cache
def train_reference(row: Row) -> TrainResult:
    outcome = train_run(row.flags)
    drops = [functools.partial(drop, step, row.dropout) for step in range(1, STEPS + 1)]
    return reference.train(outcome.initial, outcome.batches, row.model, row.training, row.documents, drops)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_run_equals_the_reference_model(row: Row) -> None:
    actual, expected = train_run(row.flags), train_reference(row)
    assert {name: tuple(w.shape) for name, w in actual.initial.items()} == reference.shapes(row.model)
    np.testing.assert_allclose(actual.trained.losses, expected.losses, rtol=1e-10)
    np.testing.assert_allclose(actual.trained.grad_norms, expected.grad_norms, rtol=1e-10)
    np.testing.assert_allclose(
        actual.logged[:-1], row.training.learning_rates[1:], rtol=1e-12
    )  # the log has the rate of the next step
    errors = {
        n: float((actual.trained.weights[n] - w).abs().max() / w.abs().max()) for n, w in expected.weights.items()
    }
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= 1e-9, f"{worst} differs by {errors[worst]:.1e}"


# (row, fact, another value): a fact that a row tests must change the losses of the reference
CHANGED_FACTS: list[tuple[str, str, Any]] = [
    *[("gpt", "model.eps", 1e-6), ("gpt", "model.activation", "squared_relu"), ("gpt", "model.bias", "qkv")],
    *[("gpt", "model.bias", "none"), ("gpt", "model.learned_positions", False), ("gpt", "model.vocab_size", 24)],
    ("llama", "model.rotary", None),
    *[("qwen", "model.qk_norm", False), ("qwen", "model.bias", "none"), ("gpt q/k norm", "model.qk_norm", False)],
    ("gpt squared relu untied", "model.activation", "gelu"),
    ("no bias: exact gelu", "model.activation", "gelu"),
    ("no fusion: exact gelu", "model.activation", "gelu"),
    ("openai gelu", "model.activation", "gelu_erf"),
    ("named gelu", "model.activation", "gelu_erf"),
    *[
        ("a window in the first layer, with its own base", f"model.{fact}", value)
        for fact, value in (("windows", (None, 4)), ("local_rotary", None), ("rotary.interpolation", 1.0))
    ],
    ("multiplied embedding", "model.embedding_multiplier", 1.0),
    ("scale of the scores", "model.softmax_scale", None),
    *[("muP", f"model.{fact}", value) for fact, value in (("softmax_scale", None), ("logit_multiplier", 1.0))],
    *[("muP", "training.matrix_rate", 1.0), ("muP, sgd", "training.other_rate", 1.0)],
    ("muP, dropout", "model.embedding_sum_multiplier", 1.0),
    ("geglu", "model.activation", "swiglu"),
    ("interpolated positions", "model.rotary.interpolation", 1.0),
    ("interleaved", "model.rotary.interleaved", False),
    ("every second layer without", "model.rotary.layers_without_rope", ()),
    ("the first layer without", "model.rotary.layers_without_rope", (1,)),
    *[
        ("yarn", f"model.rotary.yarn.{name}", value)
        for name, value in (("factor", 2.0), ("original_max_positions", 20), ("beta_slow", 0.2))
    ],
    *[("yarn", "model.rotary.yarn.beta_fast", 1.5), ("yarn, whole channels", "model.rotary.yarn.truncate", False)],
    ("yarn with both magnitudes", "model.rotary.yarn.mscale", 1.0),
    ("yarn with both magnitudes", "model.rotary.yarn.mscale_all_dim", 0.0),
    ("rotary base", "model.rotary", Rotary()),
    ("rotary percent", "model.rotary", Rotary()),
    ("rotary scaling", "model.rotary", Rotary(500000.0)),
    ("rotary scaling by 32", "model.rotary", Rotary(500000.0, scaling_factor=8.0)),
    ("norm weights less one", "model.zero_centered_gamma", False),
    ("RMSNorm weights less one", "model.zero_centered_gamma", False),
    ("norm epsilon LayerNorm", "model.eps", 1e-5),
    ("norm epsilon q/k", "model.eps", 1e-5),
    *[("capped scores", "model.attention_cap", cap) for cap in (None, 1.0)],
    *[("capped logits", "model.logit_cap", cap) for cap in (None, 4.0)],
    *[("documents gpt", f"documents.{fact}", False) for fact in ("mask_loss", "reset_positions", "reset_attention")],
    # rotary attention sees differences of positions, so within one document it is the same wherever they begin
    *[("documents llama", f"documents.{fact}", False) for fact in ("mask_loss", "reset_attention")],
    ("documents: loss", "documents.mask_loss", False),
    ("documents: positions", "documents.reset_positions", False),
    ("documents: attention", "documents.reset_attention", False),
    *[("dropout gpt", "dropout", rates) for rates in ((0.0, 0.3), (0.2, 0.0), (0.3, 0.2))],
    ("dropout llama documents", "documents.reset_attention", False),
    *[("gpt", "training.weight_decay", 0.0), ("gpt", "training.max_grad_norm", 0.0), ("gpt", "training.eps", 1e-8)],
    ("decay", "training.weight_decay", 0.01),
    ("clip", "training.max_grad_norm", 0.0),
    *[("betas", "training.betas", betas) for betas in ((0.9, 0.9), (0.7, 0.999))],
    ("adam eps", "training.eps", 1e-3),
    *[("sgd", "training.momentum", momentum) for momentum in (0.9, None)],
    ("sgd", "training.weight_decay", 0.0),
    ("growing weight decay", "training.weight_decays", (1.0,) * STEPS),
    ("a rate of embedding and head", "training.vocab_learning_rates", None),
    ("a rate of the tied embedding", "training.vocab_learning_rates", None),
    ("norms of query and key decay", "training.qk_norms_decay", False),
    *[
        (row.name, "training.learning_rates", PLAIN.learning_rates)
        for row in ROWS
        if row.training.learning_rates != PLAIN.learning_rates
    ],
]


def with_fact(row_part: Any, fact: str, value: Any) -> Any:
    """Return a row, or a part of it, with another value at a path like model.rotary.base."""
    name, _, rest = fact.partition(".")
    return replace(row_part, **{name: with_fact(getattr(row_part, name), rest, value) if rest else value})


@pytest.mark.parametrize("name,fact,value", CHANGED_FACTS, ids=str)
def test_every_reference_fact_changes_the_losses(name: str, fact: str, value: Any) -> None:
    row = BY_NAME[name]
    losses, changed_losses = train_reference(row).losses, train_reference(with_fact(row, fact, value)).losses
    assert max(abs(a - b) / a for a, b in zip(losses, changed_losses, strict=True)) > 1e-6


def test_reference_rows_cover_their_options() -> None:
    """Some steps are clipped and others are not; the number of tokens in the loss differs between micro-batches."""
    norms = np.array(train_run(BY_NAME["clip"].flags).trained.grad_norms)
    assert (norms > 1.9).any() and (norms < 1.9).any()
    ends = [[int((half[:, :-1] == EOD).sum()) for half in tokens.split(2)] for tokens in train_run("").batches]
    assert any(a != b for a, b in ends) and max(map(max, ends)) >= 4


@pytest.mark.parametrize("factor", [None, 8.0])
def test_rotary_tables_have_the_angle_of_each_position(factor: float | None) -> None:
    """Attention uses only differences of angles, so a run does not show where they start."""
    x_SBHK = torch.randn(9, 2, 3, 10, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    scaling = None if factor is None else RopeScaling(factor=factor)
    tables = rope_tables(9, RopeSpec(8, 500000.0, scaling=scaling), dtype=torch.float64)
    rotary = Rotary(500000.0, 0.8, factor)
    expected = reference.rotate(x_SBHK.transpose(0, 1), torch.arange(9).expand(2, 9), rotary).transpose(0, 1)
    torch.testing.assert_close(apply_rope(x_SBHK, *tables), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt", "llama", "documents gpt"])
def test_evaluation_has_no_dropout(name: str) -> None:
    row = BY_NAME[name]
    run = build(f"{row.flags} --hidden-dropout 0.3 --attention-dropout 0.3")
    loss = evaluate(run, run.train_loader, 1)
    tokens = torch.from_numpy(run.train_loader.batches.dataset.samples(np.arange(BATCH)))
    expected = reference.loss_of(weights_of(run), tokens, row.model, row.documents)
    assert loss == pytest.approx(expected.item(), rel=1e-10)


STD = 0.05
WIDE = f"""--num-layers 3 --hidden-size 128 --num-attention-heads 4 --vocab-size 500 --max-position-embeddings 300
 --init-method-std {STD}"""


@pytest.mark.parametrize("style", ["", f"{QWEN_FLAGS} --add-qkv-bias", "--apply-layernorm-1p --qk-layernorm"])
def test_initial_weights_distribution(style: str) -> None:
    """Weights are N(0, std^2), with std / sqrt(2 layers) at the end of a residual branch (GPT-2); norms 1, biases 0."""
    run = build(f"{WIDE} {style}")
    rows = []
    for name, weight in weights_of(run).items():
        if not is_matrix(name):
            is_scale = name.endswith("norm.weight") and "1p" not in style
            assert (weight == (1.0 if is_scale else 0.0)).all(), name
            continue
        std = STD / math.sqrt(2 * 3) if name.endswith(("attention.out", "mlp.down")) else STD
        n = weight.numel()
        assert abs(weight.mean()) < 5 * std / math.sqrt(n), name
        assert abs(weight.std() / std - 1) < 5 / math.sqrt(2 * n), name
        beyond = (weight.abs() > 2 * std).double().mean()
        assert abs(beyond - 0.0455) < 5 * math.sqrt(0.0455 / n), name
        rows.append((weight.T if name.endswith("mlp.down") else weight).reshape(-1, 128) / std)
    drawn = torch.cat(rows)  # no two rows are similar: every tensor and every block of a tensor is drawn separately
    nearest = (torch.nn.functional.normalize(drawn) @ torch.nn.functional.normalize(drawn).T).fill_diagonal_(0)
    assert nearest.abs().max() < 0.75
