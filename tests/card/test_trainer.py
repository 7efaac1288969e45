"""The trainer on the simulated card: nothing of host and card meets, a step waits once, the numbers are those of a CPU."""

import os
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from train_cases import run_from

from card import runs
from card.simulator import nccl
from card.simulator.device import simulated
from card.simulator.trace import Launch
from card.simulator.waits import waits_of
from megalite.kernels.adamw import adamw_
from megalite.train import loop, step
from megalite.train.state import Run
from megalite.train.step import parameter_norm

COMMON = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2
 --global-batch-size 4 --train-iters 9 --lr 0.01 --seed 7 --mock-data --tokenizer-type NullTokenizer --vocab-size 94
 --make-vocab-size-divisible-by 8 --eval-iters 1 --kernels torch --attention-kernel torch"""
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
 --untie-embeddings-and-output-weights --ffn-hidden-size 48"""
STEPS = 2
SUMMED = "--check-weight-hash-across-dp-replicas-interval 9"  # the bits of the weights, at every step
ONCE = ["tolist megalite/train/step.py"]  # the agreement


def steps_of(run: Run) -> list[tuple[float, ...]]:
    """(loss, norm of the gradient) of each step; then an evaluation's loss and the norm of the weights."""
    try:
        found: list[tuple[float, ...]] = []
        for _ in range(STEPS):
            result = step.train_step(run)
            found.append((result.loss, result.grad_norm))
        run.buffer.wait_gather()
        loop.check_replicas(run, STEPS)
        return [*found, (loop.evaluate(run, run.valid[0].data, 1), parameter_norm(run))]
    finally:
        run.close()


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
    "bf16, cudnn": f"{LLAMA} --bf16 --attention-kernel auto --hidden-dropout 0 --attention-dropout 0",
    "bf16 moments": f"{SUMMED} --bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "fp16": "--fp16 --loss-scale 128",
    "z-loss": "--bf16 --z-loss-coeff 0.01",
    "documents": f"{LLAMA} --reset-position-ids --reset-attention-mask --eod-mask-loss",
    "window": f"{LLAMA} --window-size 7,0",
}
ALMOST = {"groups": 1e-6, "bf16": 2e-3, "bf16, cudnn": 2e-3, "bf16 moments": 2e-3, "fp16": 2e-3, "z-loss": 2e-3}


@pytest.mark.parametrize("name", FLAGS)
def test_a_step_waits_once_and_computes_what_a_cpu_does(name: str) -> None:
    flags = f"--hidden-dropout 0 --attention-dropout 0 {FLAGS[name]}"
    with simulated() as card:
        here = steps_of(run_from(f"{COMMON} {flags}", device=card.device))
    assert not card.mixed
    assert [str(wait) for wait in waits_of(card.trace) if "step" in wait.within] == ONCE * STEPS
    there = steps_of(run_from(f"{COMMON} {flags}"))
    assert here == [pytest.approx(pair, rel=ALMOST[name]) for pair in there] if name in ALMOST else here == there


LAYOUTS = {
    "tp2 vpp2 pp2": (4, "--num-layers 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
                        "--num-layers-per-virtual-pipeline-stage 1"),
    "dp2": (2, f"{SUMMED} --ddp-bucket-size 3000 --untie-embeddings-and-output-weights"),
    "dp2 without overlap": (2, "--ddp-bucket-size 3000 --no-overlap-grad-reduce --no-overlap-param-gather"),
    "dp2 without shards": (2, "--ddp-bucket-size 3000 --no-use-distributed-optimizer"),
    "tp2 pp2 dp2": (8, f"{LLAMA} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8 "
                       "--ddp-bucket-size 3000 --recompute-granularity full --recompute-method uniform"),
}  # fmt: skip
QUICK = ("tp2 vpp2 pp2", "dp2")


def on_a_card(flags: str) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]], list[str], list[str]]:
    """Of this rank: the numbers there and on a CPU, what was mixed, for what the host waited in steps."""
    there = steps_of(run_from(f"{COMMON} {flags} --no-shared-memory"))
    with runs.on_card(dist.get_rank()) as card:
        here = steps_of(run_from(f"{COMMON} {flags}", device=card.device))
    waits = [str(wait) for wait in waits_of(card.trace) if "step" in wait.within]
    return here, there, [str(mixed) for mixed in card.mixed], waits


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.everything) for name in LAYOUTS]
)
def test_each_rank_waits_once_per_step_under_every_layout(name: str) -> None:
    world, flags = LAYOUTS[name]
    for here, there, mixed, waits in run_ranks(world, on_a_card, f"{flags}", backend=nccl.join):
        assert here == there and not mixed and waits == ONCE * STEPS


def interpreted(flags: str) -> tuple[list[tuple[float, ...]], list[str], list[str], Counter[str]]:
    os.environ.update(TRITON_INTERPRET="1", MEGALITE_KERNELS="triton")
    with simulated() as card:
        here = steps_of(run_from(f"{COMMON} {flags}", device=card.device))
    waits = [str(wait) for wait in waits_of(card.trace) if "step" in wait.within]
    with simulated() as planted:
        w, m, v = (torch.ones(8, device=planted.device) for _ in range(3))
        adamw_(w, torch.ones(8), m, v, lr=0.1, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.0, step=1)
    assert [one.what for one in planted.mixed] == ["_adamw(card, host, card, card, card)"], planted.mixed
    kernels = Counter(fact.name for fact in card.trace if isinstance(fact, Launch) and fact.name.startswith("_"))
    return here, [str(mixed) for mixed in card.mixed], waits, kernels


def test_kernels_in_triton_are_launches_and_wait_for_nothing() -> None:
    small = "--num-layers 1 --global-batch-size 2 --seq-length 8 --vocab-size 30"  # the interpreter takes its time
    flags = f"{LLAMA} --kernels triton --attention-kernel auto --hidden-dropout 0.1 --attention-dropout 0.1 {small}"
    [(here, mixed, waits, kernels)] = run_ranks(1, interpreted, flags)
    assert not mixed and waits == ONCE * STEPS
    turns = 2 * (2 * STEPS + 1)  # queries and keys, there and back in a step and there in an evaluation
    assert kernels["_rotate"] == turns and kernels["_adamw"] and kernels["_squares"], kernels
    there = steps_of(run_from(f"{COMMON} {flags} --kernels torch"))
    assert here == [pytest.approx(pair, rel=1e-4) for pair in there]
