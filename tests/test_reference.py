"""A run against the definition: loss, gradient norm and learning rate of every step, and at the end every weight, equal
those of a plain torch model with torch's own optimizers (tests/reference_model.py), in fp64 to a relative 1e-10.

test_layouts.py says that all layouts agree with one process; this table says that the one process is right. Each row
names an option twice, as a flag of the run and as a fact about the definition. `OTHERWISE` then shows that the fact
matters in that row: the definition without it gives other losses, so no row passes by not looking.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import reference_model as reference
import torch
from reference_model import Documents, Model, Rotary, Trained, Training, Weights, is_matrix
from torch import Tensor

from megalite import cli
from megalite.models.families import PRESETS
from megalite.parallel.launch import Ranks
from megalite.train.setup import build_run
from megalite.train.state import Run
from megalite.train.step import train_step

STEPS, BATCH, LR = 4, 4, 0.01
COMMON = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 20
 --micro-batch-size 2 --global-batch-size {BATCH} --train-iters {STEPS} --lr {LR} --lr-decay-style constant --seed 7
 --mock-data --tokenizer-type NullTokenizer --vocab-size 40 --make-vocab-size-divisible-by 8 --init-method-std 0.2
 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --adam-eps 1e-3"""
EOD = 40  # NullTokenizer adds it to its vocabulary

GPT = Model(layers=2, width=32, heads=4, head_size=8, groups=4, ffn=128, vocab_size=41, padded=48, positions=20)
LLAMA_FLAGS = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
 --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"""
LLAMA = replace(
    GPT,
    norm="RMSNorm",
    activation="swiglu",
    ffn=64,
    bias="none",
    groups=2,
    rotary=Rotary(),
    learned_positions=False,
    tied=False,
)
QWEN_FLAGS = f"{LLAMA_FLAGS} --add-qkv-bias --qk-layernorm"
QWEN = replace(LLAMA, bias="qkv", qk_norm=True)
BORDERS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
PLAIN = Training(rates=(LR,) * STEPS, eps=1e-3)


def rates(rate: Callable[[int], float]) -> tuple[float, ...]:
    """Of steps 1 .. STEPS."""
    return tuple(rate(step) for step in range(1, STEPS + 1))


def by_steps(flags: str, rate: Callable[[int], float], **more: Any) -> tuple[str, Training]:
    return flags, replace(PLAIN, rates=rates(rate), **more)


@dataclass(frozen=True)
class Row:
    """One run: its flags, and the same said to the definition."""

    name: str
    flags: str
    model: Model
    training: Training = PLAIN
    documents: Documents | None = None


def update(name: str, flags_and_training: tuple[str, Training]) -> Row:
    return Row(name, flags_and_training[0], GPT, flags_and_training[1])


def wsd(style: str, height: Callable[[float], float]) -> Row:
    """Two steps at the peak after one of warm-up, then two of decay, of which the run sees one."""
    flags = f"""--lr-decay-style WSD --lr-wsd-decay-style {style} --lr-wsd-decay-iters 3 --lr-decay-iters 5
     --lr-warmup-iters 1 --min-lr 1e-3"""
    return update(
        f"WSD {style}",
        by_steps(flags, lambda step: LR if step <= 2 else 1e-3 + (LR - 1e-3) * height((step - 2) / 3)),
    )


ROWS = [
    Row("gpt", "", GPT),
    Row("llama", LLAMA_FLAGS, LLAMA),
    Row("qwen", QWEN_FLAGS, QWEN),
    Row("llama one group", LLAMA_FLAGS.replace("groups 2", "groups 1"), replace(LLAMA, groups=1)),
    Row(
        "gpt squared relu untied",
        "--squared-relu --untie-embeddings-and-output-weights",
        replace(GPT, activation="squared_relu", tied=False),
    ),
    Row("gpt swiglu with biases", "--swiglu --ffn-hidden-size 24", replace(GPT, activation="swiglu", ffn=24)),
    Row(
        "gpt no positions RMSNorm",
        "--no-position-embedding --normalization RMSNorm",
        replace(GPT, learned_positions=False, norm="RMSNorm"),
    ),
    Row("gpt q/k norm", "--qk-layernorm", replace(GPT, qk_norm=True)),
    Row("head size 12", f"{LLAMA_FLAGS} --kv-channels 12", replace(LLAMA, head_size=12)),
    Row("rotary base", f"{LLAMA_FLAGS} --rotary-base 500000", replace(LLAMA, rotary=Rotary(base=500000.0))),
    Row("rotary percent", f"{LLAMA_FLAGS} --rotary-percent 0.5", replace(LLAMA, rotary=Rotary(fraction=0.5))),
    # wavelengths 6, 167, 4443 and 118k tokens: kept, kept, between, stretched
    Row(
        "rotary scaling",
        f"{LLAMA_FLAGS} --rotary-base 500000 --use-rope-scaling",
        replace(LLAMA, rotary=Rotary(500000.0, factor=8.0)),
    ),
    Row(
        "rotary scaling by 32",
        f"{LLAMA_FLAGS} --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32",
        replace(LLAMA, rotary=Rotary(500000.0, factor=32.0)),
    ),
    Row("norm weights less one", "--apply-layernorm-1p --qk-layernorm", replace(GPT, one_plus=True, qk_norm=True)),
    Row("RMSNorm weights less one", f"{QWEN_FLAGS} --apply-layernorm-1p", replace(QWEN, one_plus=True)),
    Row("norm epsilon LayerNorm", "--norm-epsilon 1e-2", replace(GPT, eps=1e-2)),
    Row("norm epsilon q/k", f"{QWEN_FLAGS} --norm-epsilon 1e-2", replace(QWEN, eps=1e-2)),
    Row("documents gpt", BORDERS, GPT, documents=Documents(EOD, True, True, True)),
    Row("documents llama", f"{LLAMA_FLAGS} {BORDERS}", LLAMA, documents=Documents(EOD, True, True, True)),
    Row("documents: loss", "--eod-mask-loss", GPT, documents=Documents(EOD, mask_loss=True)),
    Row(
        "documents: positions",
        f"{LLAMA_FLAGS} --reset-position-ids",
        LLAMA,
        documents=Documents(EOD, reset_positions=True),
    ),
    Row("documents: attention", "--reset-attention-mask", GPT, documents=Documents(EOD, reset_attention=True)),
    update("decay", by_steps("--weight-decay 5 --clip-grad 0", lambda step: LR, weight_decay=5.0, clip=0.0)),
    update("clip", by_steps("--weight-decay 0 --clip-grad 1.9", lambda step: LR, weight_decay=0.0, clip=1.9)),
    update("betas", by_steps("--adam-beta1 0.7 --adam-beta2 0.9", lambda step: LR, betas=(0.7, 0.9))),
    update("adam eps", by_steps("--adam-eps 0.05", lambda step: LR, eps=0.05)),
    update(
        "sgd",
        by_steps(
            "--optimizer sgd --sgd-momentum 0.8 --weight-decay 0.3", lambda step: LR, momentum=0.8, weight_decay=0.3
        ),
    ),
    update("linear", by_steps("--lr-decay-style linear --min-lr 1e-3", lambda step: LR - (LR - 1e-3) * step / 4)),
    update(
        "warm-up, cosine",
        by_steps(
            "--lr-decay-style cosine --lr-warmup-iters 2 --lr-warmup-init 2e-3 --min-lr 1e-3 --lr-decay-iters 6",
            lambda step: (
                2e-3 + 8e-3 * step / 2 if step <= 2 else 1e-3 + 9e-3 * (1 + math.cos(math.pi * (step - 2) / 4)) / 2
            ),
        ),
    ),
    update(
        "inverse square root",
        by_steps(
            "--lr-decay-style inverse-square-root --lr-warmup-iters 2",
            lambda step: LR * step / 2 if step <= 2 else LR * math.sqrt(2 / step),
        ),
    ),
    wsd("linear", lambda r: 1 - r),
    wsd("exponential", lambda r: 2 * 0.5**r - 1),
    wsd("cosine", lambda r: (1 + math.cos(math.pi * r)) / 2),
    wsd("minus_sqrt", lambda r: 1 - math.sqrt(r)),
]
BY_NAME = {row.name: row for row in ROWS}


@dataclass
class Outcome:
    """What the run did, and what it began with."""

    initial: Weights
    batches: list[Tensor]
    trained: Trained
    rates: list[float] = field(default_factory=list)


def build(flags: str) -> Run:
    config = cli.parse([*COMMON.split(), *flags.split()], PRESETS)
    return build_run(config, Ranks(0, 1), torch.device("cpu"), dtype=torch.float64)


def weights_of(run: Run) -> Weights:
    """Views of all weights; on one process each is one piece."""
    pieces = [entry.piece for entry in run.optimizer.pieces() if entry.piece.name.startswith("model/")]
    return {p.name.removeprefix("model/"): p.data.view(p.shape) for p in pieces}


def perturb_(weights: Weights) -> None:
    """Norms and biases begin as constants, which hide much: a scale of 1 may be missing, a bias of 0 misplaced."""
    generator = torch.Generator().manual_seed(1)
    for name, value in sorted(weights.items()):
        if not is_matrix(name):
            value += 0.3 * torch.randn(value.shape, generator=generator, dtype=value.dtype)


@functools.cache
def ran(flags: str) -> Outcome:
    run = build(flags)
    perturb_(weights_of(run))
    initial = {name: value.clone() for name, value in weights_of(run).items()}
    dataset = run.data.batches.dataset
    batches = [torch.from_numpy(dataset.samples(np.arange(s * BATCH, (s + 1) * BATCH))) for s in range(STEPS)]
    results = [train_step(run) for _ in range(STEPS)]
    run.close()
    trained = Trained([r.loss for r in results], [r.grad_norm for r in results], weights_of(run))
    return Outcome(initial, batches, trained, [r.lr for r in results])


def defined(row: Row) -> Trained:
    outcome = ran(row.flags)
    return reference.train(outcome.initial, outcome.batches, row.model, row.training, row.documents)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_run_is_what_it_is_defined_as(row: Row) -> None:
    got, want = ran(row.flags), defined(row)
    assert {name: tuple(w.shape) for name, w in got.initial.items()} == reference.shapes(row.model)
    np.testing.assert_allclose(got.trained.losses, want.losses, rtol=1e-10)
    np.testing.assert_allclose(got.trained.grad_norms, want.grad_norms, rtol=1e-10)
    np.testing.assert_allclose(got.rates, row.training.rates, rtol=1e-12)
    far = {n: float((got.trained.weights[n] - w).abs().max() / w.abs().max()) for n, w in want.weights.items()}
    worst = max(far, key=far.__getitem__)
    assert far[worst] <= 1e-9, f"{worst} differs by {far[worst]:.1e}"
