"""The specification of parallelism: one table of layouts, and every one trains exactly as one process does.

Per step: loss and gradient norm. At the end: every weight, gathered from the pieces that the ranks own. In float64
to a relative 1e-10, where no mistake can hide behind rounding; in fp32 to 1e-5 for pp and dp and 1e-4 for tp; bf16
within BF16 of its own one-process twin.
"""

import functools
import os
from collections.abc import Hashable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import pytest
import torch
from cover import cover, rarely
from ranks import run_ranks
from train_cases import BORDERS, run_from
from whole import owned, whole_of

from megalite.kernels.dispatch import runs_triton
from megalite.train.step import train_step

STEPS = 3
DTYPES = ("float64", None)
FP64 = 1e-10  # relative bound on losses and gradient norms
BF16 = 0.02  # relative bound on loss and gradient norm; measured 5e-4 and 6e-3

SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank")
COMMON = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
 --micro-batch-size 2 --global-batch-size 16 --train-iters 3 --lr 0.01 --lr-decay-style constant --seed 7 --mock-data
 --tokenizer-type NullTokenizer --vocab-size 94 --make-vocab-size-divisible-by 8 --clip-grad 0.5 --weight-decay 0.1
 --eval-iters 0 --log-interval 1 --init-method-std 0.2 --adam-eps 1e-3"""
GPT = "--hidden-dropout 0 --attention-dropout 0"
LLAMA = """--hidden-dropout 0 --attention-dropout 0 --swiglu --normalization RMSNorm --position-embedding-type rope
 --disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2
 --ffn-hidden-size 48"""
QWEN = LLAMA.replace("--num-query-groups 2", "--num-query-groups 1") + " --add-qkv-bias --qk-layernorm"
YARN = LLAMA.replace("type rope", "type yarn") + " --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8"
PAIRS = LLAMA + BORDERS + " --rotary-interleaved --rotary-percent 0.5 --no-rope-freq [0,1,0,0]"
NEOX = f"""{GPT} --position-embedding-type rope --rotary-percent 0.25 --activation gelu_erf --parallel-residual
 --untie-embeddings-and-output-weights"""
ZLOSS = " --z-loss-coeff 0.1"
WINDOW = " --window-size 4,0 --window-attn-skip-freq 3"
DROP = GPT.replace("dropout 0", "dropout 0.2")
DOCS = DROP + BORDERS
SINKS = " --softmax-type learnable --window-size 4,0"
RATES = """ --decoupled-lr 0.03 --start-weight-decay 0.1 --end-weight-decay 1 --weight-decay-incr-style cosine
 --apply-wd-to-qk-layernorm"""


@dataclass(frozen=True)
class Row:
    """One layout of one model; `world` ranks, what is left over tp x pp is dp."""

    world: int
    model: str
    layout: str
    name: str

    @property
    def words(self) -> list[str]:
        return f"{self.model} {self.layout}".split()

    def value(self, flag: str, default: str) -> str:
        return self.words[self.words.index(flag) + 1] if flag in self.words else default

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """tp, pp, dp with cp, vpp."""
        tp, pp, vpp = (int(self.value(flag, "1")) for flag in SIZES)
        return tp, pp, self.world // (tp * pp), vpp

    @property
    def has_tp(self) -> bool:
        return self.sizes[0] > 1


def row(name: str, world: int, model: str, *, tp: int = 1, pp: int = 1, vpp: int = 1, extra: str = "") -> Row:
    parts = [extra]
    if tp > 1:
        parts.append(f"--tensor-model-parallel-size {tp}")
    if pp > 1:
        parts.append(f"--pipeline-model-parallel-size {pp}")
    if vpp > 1:
        parts.append(f"--num-virtual-stages-per-pipeline-rank {vpp}")
    return Row(world, model, " ".join(parts), name)


NOZERO = "--no-use-distributed-optimizer"
COPIES = "--check-weight-hash-across-dp-replicas-interval 1"
COUNTED = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
ENDS = "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1"
BARE = "--pipeline-model-parallel-layout E|ttttL"
GROUPS = "--microbatch-group-size-per-virtual-pipeline-stage 3"
FULL = "--recompute-granularity full --recompute-method"
PAIRWISE = f"{FULL} uniform --recompute-num-layers 2"
SPLIT = "--split-backward"
GPIPE, BREADTH = "--pipeline-schedule gpipe", "--pipeline-schedule breadth-first"
APART = "--no-overlap-grad-reduce --no-overlap-param-gather"
PARTS = "--recompute-granularity selective --recompute-modules "
CORE = PARTS + "core_attn"
SETS = "--num-distributed-optimizer-instances 2"
OUTER = "--outer-dp-sharding-strategy optim"
ZERO2, ZERO3 = "--zero-stage 2", "--zero-stage 3"
OFFLOAD = "--optimizer-cpu-offload"
PARAMETERS = f"{OFFLOAD} --param-cpu-offload"
HELD_ON_HOST = f"--zero-stage 3 --zero-hold chunk {PARAMETERS} --optimizer-offload-folder ."
HALF = f"{OFFLOAD} --optimizer-offload-fraction 0.5 --ddp-bucket-size 500"
ROWS = [
    row("gpt tp2", 2, GPT, tp=2),
    row("gpt pp2 tied", 2, GPT, pp=2),
    row("gpt dp2", 2, GPT),
    row("gpt dp2 ddp", 2, GPT, extra=NOZERO),
    row("gpt tp2 pp2 tied", 4, GPT, tp=2, pp=2),
    row("gpt tp2 dp2", 4, GPT, tp=2),
    row("gpt pp2 dp2 ddp tied", 4, GPT, pp=2, extra=NOZERO),
    row("gpt pp4 gpipe", 4, GPT, pp=4, extra=GPIPE),
    row("gpt tp2 pp2 dp2", 8, GPT, tp=2, pp=2),
    row("gpt pp2 vpp2 tied", 2, GPT, pp=2, vpp=2),
    row("gpt dropout tp2", 2, DROP, tp=2),
    row("gpt dropout pp2 dp2 vpp2", 4, DROP, pp=2, vpp=2),
    row("gpt dropout tp2 recompute full", 2, DROP, tp=2, extra=PAIRWISE),
    row("gpt selective recompute", 1, GPT, extra="--recompute-granularity selective"),
    row("gpt core recompute tp2", 2, DROP, tp=2, extra=CORE),
    row("gpt norms recompute pp2 vpp2", 2, DROP, pp=2, vpp=2, extra=PARTS + "layernorm"),
    row("gpt feed-forward recompute tp2", 2, GPT, tp=2, extra=PARTS + "mlp"),
    row("neox all parts recompute dp2", 2, NEOX, extra=PARTS + "core_attn layernorm mlp"),
    row("llama norms recompute tp2 pp2", 4, LLAMA, tp=2, pp=2, extra=PARTS + "layernorm core_attn"),
    row("qwen norms and feed-forward recompute tp2 dp2", 4, QWEN, tp=2, extra=PARTS + "layernorm mlp"),
    row("yarn tp2 pp2", 4, YARN, tp=2, pp=2),
    row("interleaved, some layers without, tp2 pp2 vpp2", 4, PAIRS, tp=2, pp=2, vpp=2),
    row("sinks, dropout, tp2", 2, DOCS + SINKS, tp=2),
    row("gpt sgd tp2 dp2", 4, GPT, tp=2, extra="--optimizer sgd"),
    row("llama tp2", 2, LLAMA, tp=2),
    row("llama tp4 groups 2 replicated", 4, LLAMA, tp=4, extra="--global-batch-size 4"),
    row("llama pp2", 2, LLAMA, pp=2),
    row("llama pp2 vpp2", 2, LLAMA, pp=2, vpp=2),
    row("llama tp2 pp2 vpp2", 4, LLAMA, tp=2, pp=2, vpp=2),
    row("llama pp3 uneven layers", 3, LLAMA, pp=3),
    row("llama pp3 dp2 uneven", 6, LLAMA, pp=3),
    row("llama pp4 vpp2, embedding and loss count as layers", 4, LLAMA + " --num-layers 6", pp=4, vpp=2, extra=COUNTED),
    row("gpt pp3 tied, layers of the first and last", 3, GPT, pp=3, extra=ENDS),
    row("gpt dropout pp2 dp2 tied, no layer but the embedding's", 4, DROP, pp=2, extra=BARE),
    row("llama pp2 vpp2, groups of 3 micro-batches", 2, LLAMA, pp=2, vpp=2, extra=GROUPS),
    row("gpt tp2 pp2 dp2, dp outermost", 8, GPT, tp=2, pp=2, extra="--use-tp-pp-dp-mapping"),
    row("llama pp2 dp2 vpp2 ddp, dp outermost", 4, LLAMA, pp=2, vpp=2, extra=f"{NOZERO} --use-tp-pp-dp-mapping"),
    row("llama pp4 fewer micro-batches than pp", 4, LLAMA, pp=4, extra="--micro-batch-size 8"),
    row("llama pp2 vpp2, micro-batches no multiple", 2, LLAMA, pp=2, vpp=2, extra="--global-batch-size 6"),
    row("llama dp4", 4, LLAMA),
    row("llama dp8 tiny buckets", 8, LLAMA, extra="--ddp-bucket-size 500"),
    row("llama tp2 dp2 ddp", 4, LLAMA, tp=2, extra=NOZERO),
    row("llama tp2 pp2 dp2 vpp2", 8, LLAMA, tp=2, pp=2, vpp=2),
    row("llama recompute block tp2 pp2", 4, LLAMA, tp=2, pp=2, extra=f"{FULL} block --recompute-num-layers 1"),
    row("llama micro-batch 1 dp2", 2, LLAMA, extra="--micro-batch-size 1"),
    row("qwen tp2 pp2 one group", 4, QWEN, tp=2, pp=2),
    row("qwen rates tp2 pp2", 4, QWEN + RATES, tp=2, pp=2),
    row("gpt rates pp2 dp2 tied", 4, GPT + RATES, pp=2),
    row("llama z-loss tp2 pp2", 4, LLAMA + ZLOSS, tp=2, pp=2),
    row("neox tp2 pp2", 4, NEOX, tp=2, pp=2),
    row("gpt documents tp2 pp2 vpp2", 4, GPT + BORDERS, tp=2, pp=2, vpp=2),
    row("gpt documents dropout tp2 dp2", 4, DOCS, tp=2),
    row("llama documents tp2 pp2", 4, LLAMA + BORDERS, tp=2, pp=2),
    row("llama window documents tp2 pp2", 4, LLAMA + BORDERS + WINDOW, tp=2, pp=2),
    row("llama documents pp4 recompute", 4, LLAMA + BORDERS, pp=4, extra=f"{FULL} uniform --recompute-num-layers 1"),
    row("gpt split pp2 tied", 2, GPT, pp=2, extra=SPLIT),
    row("gpt split pp4 gpipe", 4, GPT, pp=4, extra=f"{SPLIT} {GPIPE}"),
    row("llama pp2 vpp2 breadth-first", 2, LLAMA, pp=2, vpp=2, extra=BREADTH),
    row("gpt split pp2 vpp2 tied", 2, GPT, pp=2, vpp=2, extra=SPLIT),
    row("llama split pp3 dp2 uneven, tiny buckets", 6, LLAMA, pp=3, extra=f"{SPLIT} --ddp-bucket-size 500"),
    row("gpt split dropout tp2 pp2 dp2 vpp2", 8, DROP, tp=2, pp=2, vpp=2, extra=SPLIT),
    row("qwen split tp2 pp2 one group", 4, QWEN, tp=2, pp=2, extra=f"{SPLIT} --zero-bubble-max-pending-backward 8"),
    row("llama split tp2 pp2 recompute full", 4, LLAMA, tp=2, pp=2, extra=f"{SPLIT} {FULL} uniform"),
    row("neox split pp2 dp2 ddp, all parts recompute", 4, NEOX, pp=2, extra=f"{SPLIT} {NOZERO} {PARTS}layernorm mlp"),
    row("llama split pp4, one micro-batch", 4, LLAMA + ZLOSS, pp=4, extra=f"{SPLIT} --global-batch-size 2"),
    row("llama split pp2 dp2 vpp2 gpipe, no overlap", 4, LLAMA, pp=2, vpp=2, extra=f"{SPLIT} {GPIPE} {APART}"),
    row("split, documents, tp2 pp2 vpp2 breadth-first", 4, DOCS, tp=2, pp=2, vpp=2, extra=f"{SPLIT} {BREADTH}"),
    row("llama split pp2 vpp2, groups of 3, core recompute", 2, LLAMA, pp=2, vpp=2, extra=f"{SPLIT} {GROUPS} {CORE}"),
    row("gpt split dropout pp2 dp2 tied, no layer but the embedding's", 4, DROP, pp=2, extra=f"{SPLIT} {BARE}"),
    row("gpt ZeRO-2 dp2", 2, GPT, extra=ZERO2),
    row("gpt ZeRO-3 dp2", 2, GPT, extra=ZERO3),
    row("llama ZeRO-2 dp4", 4, LLAMA, extra=ZERO2),
    row("llama ZeRO-3 dp4", 4, LLAMA, extra=ZERO3),
    row("qwen ZeRO-3 tp2 dp2 one group", 4, QWEN, tp=2, extra=ZERO3),
    row("gpt ZeRO-2 tp2 dp2 dropout", 4, DROP, tp=2, extra=ZERO2),
    row("gpt ZeRO-2 pp2 dp2 tied", 4, GPT, pp=2, extra=ZERO2),
    row("gpt ZeRO-3 pp2 dp2 tied", 4, GPT, pp=2, extra=ZERO3),
    row("llama ZeRO-2 pp2 dp2 vpp2, 3 micro-batches", 4, LLAMA, pp=2, vpp=2, extra=f"{ZERO2} --global-batch-size 12"),
    row("llama ZeRO-3 pp2 dp2 vpp2, chunks held", 4, LLAMA, pp=2, vpp=2, extra=f"{ZERO3} --zero-hold chunk"),
    row("gpt ZeRO-3 tp2 pp2 dp2 tied vpp2", 8, GPT, tp=2, pp=2, vpp=2, extra=ZERO3),
    row("llama ZeRO-3 pp3 dp2 uneven", 6, LLAMA, pp=3, extra=ZERO3),
    row("llama ZeRO-3 dp2 held for the step", 2, LLAMA, extra=f"{ZERO3} --zero-hold chunk"),
    row("gpt ZeRO-3 pp2 dp2 vpp2 breadth-first", 4, GPT, pp=2, vpp=2, extra=f"{ZERO3} {BREADTH} --zero-hold chunk"),
    row("llama ZeRO-2 pp2 dp2 gpipe", 4, LLAMA, pp=2, extra=f"{ZERO2} {GPIPE}"),
    row("gpt ZeRO-3 dp2 recompute full", 2, DROP, extra=f"{ZERO3} {PAIRWISE}"),
    row("llama ZeRO-3 pp2 dp2 recompute block", 4, LLAMA, pp=2, extra=f"{ZERO3} {FULL} block --recompute-num-layers 1"),
    row("neox ZeRO-3 dp2 all parts recompute", 2, NEOX, extra=f"{ZERO3} {PARTS}core_attn layernorm mlp"),
    row("llama ZeRO-2 split pp2 dp2", 4, LLAMA, pp=2, extra=f"{ZERO2} {SPLIT}"),
    row("gpt ZeRO-3 split pp2 dp2 vpp2 tied dropout", 4, DROP, pp=2, vpp=2, extra=f"{ZERO3} {SPLIT} --zero-hold chunk"),
    row("llama ZeRO-3 split tp2 pp2 dp2 recompute full", 8, LLAMA, tp=2, pp=2, extra=f"{ZERO3} {SPLIT} {FULL} uniform"),
    row("gpt ZeRO-3 dp2 no overlap", 2, GPT, extra=f"{ZERO3} {APART}"),
    row("llama ZeRO-2 dp4 sgd no overlap", 4, LLAMA, extra=f"{ZERO2} --optimizer sgd {APART}"),
    row("qwen rates ZeRO-3 tp2 dp2", 4, QWEN + RATES, tp=2, extra=ZERO3),
    row("gpt documents ZeRO-3 dp2", 2, DOCS, extra=ZERO3),
    row("llama z-loss ZeRO-3 dp2 micro-batch 1", 2, LLAMA + ZLOSS, extra=f"{ZERO3} --micro-batch-size 1"),
    row("gpt ZeRO-2 hybrid 2x2", 4, GPT, extra=f"{ZERO2} {SETS}"),
    row("llama ZeRO-3 hybrid 2x2", 4, LLAMA, extra=f"{ZERO3} {SETS}"),
    row("gpt ZeRO-2 hybrid 2x2 once more pp2 tied", 8, GPT, pp=2, extra=f"{ZERO2} {SETS} {OUTER}"),
    row("llama ZeRO-3 hybrid 2x2 once more", 4, LLAMA, extra=f"{ZERO3} {SETS} {OUTER}"),
    row("gpt ZeRO-1 hybrid 2x2 once more tp2", 8, GPT, tp=2, extra=f"{SETS} {OUTER}"),
    row("gpt ZeRO-1 hybrid 2x2 pp2 tied", 8, GPT, pp=2, extra=SETS),
    row("gpt tp2 dp2, offloaded", 4, DROP, tp=2, extra=OFFLOAD),
    row("gpt split pp2 dp2 tied, half offloaded", 4, GPT, pp=2, extra=f"{SPLIT} {HALF}"),
    row("llama tp2 pp2 vpp2, half offloaded, core recompute", 4, LLAMA, tp=2, pp=2, vpp=2, extra=f"{HALF} {CORE}"),
    row("llama sgd dp2 ddp, offloaded", 2, LLAMA, extra=f"{OFFLOAD} {NOZERO} --optimizer sgd"),
    row("gpt ZeRO-2 dp2, offloaded", 2, GPT, extra=f"{ZERO2} {OFFLOAD}"),
    row("llama ZeRO-3 pp2 dp2, offloaded", 4, LLAMA, pp=2, extra=f"{ZERO3} {OFFLOAD}"),
    row("gpt tp2 dp2 ZeRO-3, parameters offloaded", 4, DROP, tp=2, extra=f"{ZERO3} {PARAMETERS}"),
    row("llama pp2 dp2 vpp2 ZeRO-3 chunks held, parameters offloaded", 4, LLAMA, pp=2, vpp=2, extra=HELD_ON_HOST),
    row("gpt ZeRO-3 hybrid 2x2 once more, half offloaded", 4, GPT, extra=f"{ZERO3} {SETS} {OUTER} {HALF}"),
]


def features(item: Row) -> dict[str, Hashable]:
    """What may disturb what."""
    tp, pp, dp, vpp = (size > 1 for size in item.sizes)
    return {
        **{"tp": tp, "pp": pp, "dp": dp, "vpp": vpp, "split": SPLIT in item.words},
        "schedule": item.value("--pipeline-schedule", "1f1b"),
        "ties": "--untie-embeddings-and-output-weights" not in item.words,
        "documents": "--reset-attention-mask" in item.words,
        "recompute": item.value("--recompute-granularity", "none"),
        "zero": item.value("--zero-stage", "1"),
    }


COVER = cover(ROWS, features)
NAME = attrgetter("name")


@dataclass
class Trained:
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, np.ndarray]


def _parts(flags: str, dtype: str | None) -> tuple[list[float], list[float], list[tuple]]:
    """On one rank: train, then the pieces of the weights that this rank owns."""
    run = run_from(f"{COMMON} {flags}", dtype=None if dtype is None else getattr(torch, dtype))
    results = [train_step(run) for _ in range(STEPS)]
    run.buffer.wait_gather()
    run.close()
    return [r.loss for r in results], [r.grad_norm for r in results], owned(run.optimizer, "model/")


def _assemble(parts: list[tuple]) -> Trained:
    weights = whole_of(piece for _, _, pieces in parts for piece in pieces)
    return Trained(parts[0][0], parts[0][1], {name: whole.numpy() for name, whole in weights.items()})


def _both(flags: str) -> list[tuple]:
    return [_parts(flags, dtype) for dtype in DTYPES]


def _in_triton(flags: str) -> list[tuple]:
    """With the Triton kernels, interpreted; on a rank of its own process that has not chosen its kernels yet."""
    os.environ.update(TRITON_INTERPRET="1", MEGALITE_KERNELS="triton")
    assert runs_triton("cpu")
    return _both(flags)


@functools.cache
def trained(world: int, flags: str) -> dict[str | None, list[tuple]]:
    """What every rank returned, in fp64 and in fp32, from one start of the ranks."""
    ranks = run_ranks(world, _both, flags) if world > 1 else [_both(flags)]
    return {dtype: [rank[i] for rank in ranks] for i, dtype in enumerate(DTYPES)}


@functools.cache
def alone(flags: str, dtype: str | None) -> Trained:
    return _assemble([_parts(flags, dtype)])


def _twin(item: Row) -> str:
    """The flags of the one-process run: the model and what changes the batch or the update, not the layout."""
    words, kept = item.layout.split(), []
    for flag in ("--global-batch-size", "--optimizer"):
        if flag in words:
            kept += [flag, words[words.index(flag) + 1]]
    return f"{item.model} {' '.join(kept)}"


def _far(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))


def _compare(item: Row, dtype: str | None, bound: float, weights_bound: float) -> None:
    flags = f"{item.model} {item.layout}"
    parts = trained(item.world, flags)[dtype] if "bf16" not in flags else run_ranks(item.world, _parts, flags, dtype)
    _same(item, parts, dtype, bound, weights_bound)


def _same(item: Row, parts: list[tuple], dtype: str | None, bound: float, weights_bound: float) -> None:
    """What the ranks of a layout returned equals the one-process twin."""
    got, want = _assemble(parts), alone(_twin(item), dtype)
    for losses, norms, _ in parts:
        assert (losses, norms) == (got.losses, got.grad_norms), "ranks disagree"
    np.testing.assert_allclose(got.losses, want.losses, rtol=bound, err_msg=f"{item.name}: loss")
    np.testing.assert_allclose(got.grad_norms, want.grad_norms, rtol=bound, err_msg=f"{item.name}: grad norm")
    assert got.weights.keys() == want.weights.keys()
    worst = max(want.weights, key=lambda n: _far(got.weights[n], want.weights[n]))
    assert _far(got.weights[worst], want.weights[worst]) <= weights_bound, f"{item.name}: {worst} differs most"
    assert want.losses[0] != want.losses[-1]


@pytest.mark.parametrize("item", rarely(ROWS, COVER, NAME))
def test_layout_equals_one_process_in_fp64(item: Row) -> None:
    _compare(item, "float64", FP64, 1e-9)


@pytest.mark.parametrize("item", rarely(ROWS, COVER, NAME))
def test_layout_equals_one_process_in_fp32(item: Row) -> None:
    _compare(item, None, 1e-4 if item.has_tp else 1e-5, 1e-4)


IN_BF16 = [
    row("gpt tp2 pp2", 4, GPT + " --bf16", tp=2, pp=2),
    row("llama dp2 vpp2 pp2", 4, LLAMA + " --bf16", pp=2, vpp=2),
    row("llama tp2 dp2", 4, LLAMA + " --bf16", tp=2),
    row("llama split pp2 dp2 vpp2", 4, LLAMA + " --bf16", pp=2, vpp=2, extra=SPLIT),
]


@pytest.mark.parametrize("item", IN_BF16, ids=NAME)
def test_bf16_stays_close(item: Row) -> None:
    _compare(item, None, BF16, 0.1)


def test_moments_in_bf16_are_rounded_alike_under_every_layout() -> None:
    """In fp64 only: what is rounded at random magnifies the rounding of fp32."""
    model = LLAMA + " --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    _compare(row("llama bf16 moments", 8, model, tp=2, pp=2), "float64", FP64, 1e-9)
    assert alone(model + " ", "float64").losses[-1] != alone(LLAMA + " ", "float64").losses[-1]


PLACES = {  # of what is offloaded
    "host": OFFLOAD,
    "half on the host": HALF,
    "disk": f"{OFFLOAD} --optimizer-offload-folder .",
    "parameters, too": PARAMETERS,
    "parameters, too, optimizer on disk": f"{PARAMETERS} --optimizer-offload-folder .",
}
OFFLOADED = [
    row("gpt tp2 dp2", 4, f"{GPT} --bf16", tp=2),
    row("llama pp2 dp2 ZeRO-3", 4, f"{LLAMA} {ZERO3}", pp=2),
    row("gpt dp2, some steps skipped", 2, f"{GPT} --fp16 --initial-loss-scale 1e30 --hysteresis 1"),
    row("gpt dp2 ZeRO-2, gradients and moments in bf16", 2, f"{GPT} {ZERO2} --bf16 --exp-avg-dtype bf16"),
]


@pytest.mark.parametrize("item", OFFLOADED, ids=NAME)
def test_what_is_offloaded_changes_no_bit(item: Row) -> None:
    flags = f"{item.model} {item.layout} --ddp-bucket-size 500"
    places = [place for place in PLACES.values() if PARAMETERS not in place or ZERO3 in flags]
    kept, *others = (_bits(run_ranks(item.world, _parts, f"{flags} {more}", None)) for more in ("", *places))
    assert others == [kept] * len(places)


def _bits(ranks: list[tuple]) -> list[tuple[str, list[bytes]]]:
    """NaN is equal to itself."""
    return [(f"{losses} {norms}", [data.numpy().tobytes() for *_, data in pieces]) for losses, norms, pieces in ranks]


def test_a_scaled_loss_has_its_backward_split() -> None:
    """In fp64 only: weights that are fp16 differ by their rounding."""
    item = row("gpt split pp2, scaled loss", 2, GPT, pp=2, extra=f"{SPLIT} --fp16 --initial-loss-scale 1024")
    _compare(item, "float64", FP64, 1e-9)


RULES = {
    "muon": " --optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2",
    "lamb": " --optimizer lamb --make-vocab-size-divisible-by 1",
    "lars": " --optimizer lars --lars-trust-coefficient 0.1",
}
SKIPS = " --fp16 --hysteresis 1 --initial-loss-scale 6.7e153"  # whose squared norm is too large in the first step
WHOLE = [
    row(f"{rule} {name}", world, model + flags, **sizes)
    for rule, flags in RULES.items()
    for name, world, model, sizes in (
        ("tp2", 2, GPT, dict(tp=2)),
        ("dp4 tiny buckets, a step skipped", 4, LLAMA + SKIPS, dict(extra="--ddp-bucket-size 500")),
        ("pp2 vpp2", 2, QWEN + RATES, dict(pp=2, vpp=2)),
        ("tp2 dp2, a matrix cut by both", 4, LLAMA, dict(tp=2)),
        ("tp4 groups 2 replicated", 4, LLAMA + " --global-batch-size 4", dict(tp=4)),
        ("tp2 pp2 dp2 vpp2 tied", 8, GPT, dict(tp=2, pp=2, vpp=2)),
        ("tp2 dp2 ddp, copies compared", 4, LLAMA, dict(tp=2, extra=f"{NOZERO} {COPIES}")),
        ("pp2 dp2, no layer but the embedding's", 4, GPT, dict(pp=2, extra=BARE)),
        ("ZeRO-2 pp2 dp2 tied", 4, GPT, dict(pp=2, extra=ZERO2)),
        ("ZeRO-3 tp2 dp2", 4, LLAMA, dict(tp=2, extra=ZERO3)),
        ("ZeRO-3 hybrid 2x2 once more", 4, QWEN, dict(extra=f"{ZERO3} {SETS} {OUTER}")),
    )
]


@pytest.mark.parametrize("item", rarely(WHOLE, [], NAME, guards=("megalite/optim",)))
def test_optimizers_of_whole_tensors_see_them_whole_under_every_layout(item: Row) -> None:
    """In fp64 only: Newton-Schulz magnifies the rounding of small singular values."""
    ranks = run_ranks(item.world, _parts, f"{item.model} {item.layout}", "float64")
    _same(item, ranks, "float64", FP64, 1e-9)


CP2, CP4, A2A = "--context-parallel-size 2", "--context-parallel-size 4", " --cp-comm-type a2a"
LONG = " --window-size 11,0"  # longer than a rank's part of 16 tokens over 2
ALONE = " --num-attention-heads 6 --kv-channels 8 --group-query-attention --num-query-groups 3"
EXCHANGED = [
    *(
        row(f"{name}, {way}", world, model, extra=f"{cp}{flag}", **sizes)
        for way, flag in (("allgather", ""), ("a2a", A2A))
        for name, world, model, cp, sizes in (
            ("gpt cp2 tied", 2, GPT, CP2, {}),
            ("qwen cp4 one group", 4, QWEN, CP4, {}),
            ("llama tp2 cp2, documents", 4, LLAMA + BORDERS, CP2, dict(tp=2)),
            ("gpt pp2 cp2 vpp2 tied, documents, dropout", 4, DOCS, CP2, dict(pp=2, vpp=2)),
            ("llama cp2, window within a part, documents", 2, LLAMA + BORDERS + WINDOW, CP2, {}),
            ("llama cp4, window beyond a part", 4, LLAMA + BORDERS + LONG, CP4, {}),
            ("gpt tp2 cp2, dropout", 4, DROP, CP2, dict(tp=2)),
            ("llama pp2 cp2 split, documents", 4, LLAMA + BORDERS + ZLOSS, f"{CP2} {SPLIT}", dict(pp=2)),
            ("llama cp2 recompute full, documents", 2, f"{LLAMA} {DOCS}", f"{CP2} {PAIRWISE}", {}),
            ("gpt cp2 core and norms recompute", 2, DROP, f"{CP2} {PARTS}core_attn layernorm mlp", {}),
            ("gpt cp2 norms recompute, window", 2, GPT + LONG, f"{CP2} {PARTS}layernorm", {}),
            ("pairs cp2, positions within documents", 2, PAIRS, CP2, {}),
        )
    ),
    row("gpt cp2 dp2 ddp", 4, GPT, extra=f"{CP2} {NOZERO}"),
    row("llama cp2 dp2 ZeRO-2, documents", 4, LLAMA + BORDERS, extra=f"{CP2} {ZERO2}"),
    row("gpt cp2 dp2 ZeRO-3, dropout", 4, DROP, extra=f"{CP2} {ZERO3}"),
    row("llama cp4 ZeRO-3 hybrid 2x2", 4, LLAMA, extra=f"{CP4} {ZERO3} {SETS}"),
    row("yarn cp2 dp2", 4, YARN, extra=CP2),
    row("llama cp2 dp2, dp outermost, tp2", 8, LLAMA, tp=2, extra=f"{CP2} --use-tp-pp-dp-mapping"),
    row(
        "sinks, windows, dropout, a way for each layer, cp2",
        2,
        DOCS + SINKS,
        extra=f"{CP2}{A2A} allgather a2a allgather",
    ),
    row("gpt cp2, a way for each layer", 2, DROP, extra=f"{CP2}{A2A} p2p allgather a2a"),
    row("three groups cp2, each rank's heads use two, a2a", 2, GPT + ALONE, extra=CP2 + A2A),
    row("qwen tp2 cp2 one group, a2a", 4, QWEN, tp=2, extra=CP2 + A2A),
]
OFTEN = [
    r for r in EXCHANGED if r.name.startswith(("gpt pp2", "llama cp4, w", "three", "gpt cp2 dp2 Z", "llama cp2 rec"))
]


@pytest.mark.parametrize("item", rarely(EXCHANGED, OFTEN, NAME, guards=("megalite/nn", "megalite/kernels")))
def test_a_context_that_ranks_share_trains_as_one_process_does(item: Row) -> None:
    ranks = run_ranks(item.world, _parts, f"{item.model} {item.layout}", "float64")
    _same(item, ranks, "float64", FP64, 1e-9)


FEW = " --num-layers 2 --micro-batch-size 1 --global-batch-size 2 --seq-length 6"  # a program is a Python call there


INTERPRETED = [
    row("gpt dropout", 1, DROP + FEW),
    row("neox window", 1, NEOX + " --window-size 2,0" + FEW),
    row("qwen z-loss tp2", 2, QWEN + ZLOSS + FEW, tp=2),
    row("gpt documents dropout cp2", 2, DOCS + FEW + " --seq-length 8", extra=f"{CP2} --cp-comm-type allgather a2a"),
]


@pytest.mark.parametrize(
    "item", rarely(INTERPRETED, INTERPRETED[2:3], NAME, guards=("megalite/kernels", "megalite/nn/context.py"))
)
def test_triton_kernels_train_as_torch_does(item: Row) -> None:
    ranks = run_ranks(item.world, _in_triton, f"{item.model} {item.layout}", timeout=110)
    for i, dtype in enumerate(DTYPES):
        bounds = (1e-10, 1e-9) if dtype == "float64" else (1e-4, 1e-4)
        _same(item, [rank[i] for rank in ranks], dtype, *bounds)


MOVED = [
    row("gpt split pp2 vpp2, dropout", 2, DROP, pp=2, vpp=2, extra=SPLIT),
    row("llama ZeRO-3 pp2 dp2", 4, LLAMA, pp=2, extra=ZERO3),
    row("gpt dp2, all parts recompute", 2, GPT, extra=f"{PARTS}core_attn layernorm mlp"),
    row("llama cp2, documents", 2, LLAMA + BORDERS, extra=CP2),
    row("neox tp2", 2, NEOX + " --bf16", tp=2),
    row("gpt ZeRO-3 dp2, parameters offloaded", 2, GPT, extra=f"{ZERO3} {PARAMETERS}"),
    row("qwen cp2 a2a ZeRO-3", 2, QWEN, extra=f"{CP2}{A2A} {ZERO3}"),
]


@pytest.mark.parametrize("item", rarely(MOVED, MOVED[:4], NAME, guards=("megalite/nn/activation_offload.py",)))
def test_activations_in_host_memory_change_no_bit(item: Row) -> None:
    flags, more = f"{item.model} {item.layout}", "--cpu-offloading-num-layers 2 --min-offloaded-tensor-size 1"
    kept, moved = (_bits(run_ranks(item.world, _parts, f"{flags} {some}", None)) for some in ("", more))
    assert moved == kept


def test_borders_of_documents_change_the_result() -> None:
    """The rows with documents say nothing unless there are some."""
    assert alone(GPT + BORDERS + " ", "float64").losses[0] != alone(GPT + " ", "float64").losses[0]
    only = [alone(GPT + f" --{flag} ", "float64").losses[0] for flag in BORDERS.replace("--", "").split()]
    assert len({*only, alone(GPT + " ", "float64").losses[0]}) == 4


def test_the_z_loss_changes_the_weights_and_is_no_part_of_the_loss() -> None:
    with_it, without = alone(LLAMA + ZLOSS, "float64"), alone(LLAMA + " ", "float64")
    assert with_it.losses[0] == without.losses[0] and with_it.losses[1] != without.losses[1]
