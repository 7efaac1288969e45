"""The trainer on the simulated card: nothing of host and card meets, a step waits once, the numbers are those of a CPU."""

from __future__ import annotations

import pytest
import torch

from card.device import Card, simulated
from card.trace import HostRead, Mark
from megalite.config import cli
from megalite.models.families import PRESETS
from megalite.parallel.launch import Ranks
from megalite.train import loop
from megalite.train.setup import build_run
from megalite.train.state import Run, StepResult

COMMON = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2
 --global-batch-size 4 --train-iters 9 --lr 0.01 --seed 7 --mock-data --tokenizer-type NullTokenizer --vocab-size 94
 --make-vocab-size-divisible-by 8 --eval-iters 1 --kernels torch --attention-kernel torch"""
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
 --untie-embeddings-and-output-weights --ffn-hidden-size 48"""
STEPS = 2
AGREEMENT = "megalite/train/step.py"


def build(flags: str, device: torch.device) -> Run:
    return build_run(cli.parse(f"{COMMON} {flags}".split(), PRESETS), Ranks(0, 1), device)


def steps_of(run: Run) -> list[StepResult]:
    try:
        return [loop.train_step(run) for _ in range(STEPS)]
    finally:
        run.close()


def numbers(results: list[StepResult]) -> list[tuple[float, float]]:
    return [(result.loss, result.grad_norm) for result in results]


def reads_within(card: Card, name: str) -> list[list[HostRead]]:
    """Of each time that the program was in `name`: what the host waited for."""
    found: list[list[HostRead]] = []
    depth: list[str] = []
    for fact in card.trace:
        if isinstance(fact, Mark):
            if fact.name == name and name not in depth:
                found.append([])
            depth.append(fact.name) if fact.name else depth.pop()
        elif isinstance(fact, HostRead) and name in depth:
            found[-1].append(fact)
    return found


# flags, and how far losses and norms may be from a CPU's: not at all where the same operations run. On a card groups of
# keys are repeated in fp32, and half precision's weight gradients are never rounded.
FLAGS = {
    "gpt": "",
    "dropout": "--hidden-dropout 0.1 --attention-dropout 0.1",
    "llama": LLAMA,
    "groups": f"{LLAMA} --group-query-attention --num-query-groups 2 --qk-layernorm",
    "full recompute": f"{LLAMA} --recompute-granularity full --recompute-method uniform",
    "selective recompute": "--recompute-granularity selective --recompute-modules core_attn layernorm mlp",
    "bf16": f"{LLAMA} --bf16",
    "bf16 moments": "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "fp16": "--fp16 --loss-scale 128",
    "z-loss": "--bf16 --z-loss-coeff 0.01",
    "documents": f"{LLAMA} --reset-position-ids --reset-attention-mask --eod-mask-loss",
    "window": f"{LLAMA} --window-size 7,0",
}
ALMOST = {"groups": 1e-6, "bf16": 2e-3, "bf16 moments": 2e-3, "fp16": 2e-3, "z-loss": 2e-3}


@pytest.mark.parametrize("name", FLAGS)
def test_a_step_waits_once_and_computes_what_a_cpu_does(name: str) -> None:
    flags = f"--hidden-dropout 0 --attention-dropout 0 {FLAGS[name]}"
    with simulated() as card:
        here = numbers(steps_of(build(flags, card.device)))
    assert not card.mixed
    assert [[(read.kind, read.phase) for read in reads] for reads in reads_within(card, "step")] == [
        [("tolist", "")]
    ] * 2
    assert all(read.where.startswith(AGREEMENT) for reads in reads_within(card, "step") for read in reads)
    there = numbers(steps_of(build(flags, torch.device("cpu"))))
    assert here == [pytest.approx(pair, rel=ALMOST[name]) for pair in there] if name in ALMOST else here == there
