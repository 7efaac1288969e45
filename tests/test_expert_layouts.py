"""Experts train under every layout as one process does: losses, gradient norms and weights in fp64 to 1e-10, counts of
choices and biases of routers bit for bit, auxiliary losses to 1e-10.

So a gradient norm counts all experts where ep meets tp, which it did not in NVIDIA/Megatron-LM#5916 (rows tp2 dp2 ep2),
and gradients under ep are those of ep 1, twice which they were in pytorch/pytorch#160285 (all rows with ep)."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from cover import rarely
from loads import reseal
from ranks import run_ranks
from test_layouts import BF16, COMMON, DROP, FP64, FULL, LLAMA, NAME, PARTS, Row, row
from train_cases import config_from, run_from
from whole import owned, whole_of

from megalite.checkpoint.storage.location import CheckpointError
from megalite.config.toml import to_toml
from megalite.train.balance import NAMES
from megalite.train.loop import evaluate
from megalite.train.setup import SetupError
from megalite.train.start.origin import start_run
from megalite.train.start.resume import open_saver, save
from megalite.train.step import train_step

STEPS = 3
MIXTRAL = f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
GLOBAL = " --moe-router-load-balancing-type global_aux_loss"
QWEN = f"""{LLAMA} --num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 12 --moe-router-pre-softmax
 --moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --moe-layer-freq 2
 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.1"""
DEEPSEEK = f"""{LLAMA} {DROP} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 12 --moe-layer-freq [0,1,1,1]
 --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 4
 --moe-router-group-topk 2 --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.003
 --moe-shared-expert-intermediate-size 16 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.05"""
OLMOE = f"""{LLAMA} --num-experts 4 --moe-ffn-hidden-size 24 --moe-router-pre-softmax --qk-layernorm
 --qk-layernorm-over-heads"""
EP2, EP4, ETP2 = "--ep 2", "--ep 4", "--expert-tensor-parallel-size 2"
CP2, ZERO2, ZERO3, SPLIT = "--cp 2", "--zero-stage 2", "--zero-stage 3", "--split-backward"
SINKHORN = (
    f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn"
)
OSS = f"""{LLAMA.replace("--disable-bias-linear", "")} --num-experts 4 --moe-ffn-hidden-size 24 --activation clamped_swiglu
 --moe-aux-loss-coeff 0.1 --softmax-type learnable"""
ROWS = [
    row("oss tp2 dp2 ep2, experts split, too", 4, OSS, tp=2, extra=f"{EP2} {ETP2}"),
    row("oss pp2 ep2 dp2 ZeRO-3 split", 4, OSS, pp=2, extra=f"{EP2} {ZERO3} {SPLIT}"),
    row("olmoe 1p tp2 cp2, recompute full", 4, OLMOE + " --apply-layernorm-1p", tp=2, extra=f"{CP2} {FULL} uniform"),
    row("olmoe tp4 ep2, two ranks have the same keys", 4, OLMOE, tp=4, extra=EP2),
    row("olmoe tp2 pp2 split", 4, OLMOE, tp=2, pp=2, extra=SPLIT),
    row("olmoe tp2 dp2 ZeRO-3", 4, OLMOE, tp=2, extra=ZERO3),
    row("sinkhorn tp2 cp2 ep2", 4, SINKHORN, tp=2, extra=f"{EP2} {CP2}"),
    row("mixtral tp2 cp2 ep2, loss of a step so far", 4, MIXTRAL + GLOBAL, tp=2, extra=f"{EP2} {CP2}"),
    row("mixtral ep2", 2, MIXTRAL, extra=EP2),
    row("deepseek ep4, no two ranks have an expert", 4, DEEPSEEK, extra=EP4),
    row("mixtral tp2", 2, MIXTRAL, tp=2),
    row("qwen tp2 ep2", 2, QWEN, tp=2, extra=EP2),
    row("deepseek tp2 dp2 ep2", 4, DEEPSEEK, tp=2, extra=EP2),
    row("qwen tp2 dp2 ep2, experts split, too", 4, QWEN, tp=2, extra=f"{EP2} {ETP2}"),
    row("mixtral tp2, experts split", 2, MIXTRAL, tp=2, extra=ETP2),
    row("deepseek cp2 ep4 dp2", 4, DEEPSEEK, extra=f"{CP2} {EP4}"),
    row("mixtral dp2, experts as all else", 2, MIXTRAL, extra="--no-use-distributed-optimizer"),
    row("deepseek dp4 ep2, micro-batches of 1", 4, DEEPSEEK, extra=f"{EP2} --micro-batch-size 1"),
    row("qwen dp4 ep2 ZeRO-2", 4, QWEN, extra=f"{EP2} {ZERO2}"),
    row("deepseek dp4 ep2 ZeRO-3", 4, DEEPSEEK, extra=f"{EP2} {ZERO3}"),
    row("mixtral ZeRO-3 hybrid 2x2 ep2", 4, MIXTRAL, extra=f"{EP2} {ZERO3} --num-distributed-optimizer-instances 2"),
    row("deepseek ep2, recompute full", 2, DEEPSEEK, extra=f"{EP2} {FULL} uniform"),
    row("mixtral ep2, k = E", 2, MIXTRAL + " --moe-router-topk 4", extra=EP2),
    row("mixtral cp2, experts split", 2, MIXTRAL, extra=f"{CP2} {ETP2}"),
    row("qwen cp2 pp2 dp2 vpp2 ep2 ZeRO-3 split", 8, QWEN, pp=2, vpp=2, extra=f"{EP2} {CP2} {ZERO3} {SPLIT}"),
    row("qwen muon tp2 dp2 ep2, experts split, too", 4, QWEN + " --optimizer muon", tp=2, extra=f"{EP2} {ETP2}"),
    row("mixtral drawn ep2", 2, MIXTRAL + " --moe-router-force-load-balancing", extra=EP2),
    row("mixtral pp2 dp2 ep2 split", 4, MIXTRAL, pp=2, extra=f"{EP2} {SPLIT}"),
    row("qwen pp2 vpp2 dp2 ep2", 4, QWEN, pp=2, vpp=2, extra=EP2),
    row("deepseek split tp2 pp2 vpp2 ep2 tied", 4, DEEPSEEK, tp=2, pp=2, vpp=2, extra=f"{EP2} {SPLIT}"),
    row("qwen ep2, all parts recompute", 2, QWEN, extra=f"{EP2} {PARTS}moe mlp layernorm"),
    row(
        "qwen tp2 ep2, norms and shared block recompute", 2, QWEN, tp=2, extra=f"{EP2} {PARTS}layernorm shared_experts"
    ),
]
FIRST = ("oss tp2", "olmoe 1p", "sinkhorn", "mixtral ep2", "deepseek tp2", "qwen tp2 dp2", "deepseek cp2")
OFTEN = [r for r in ROWS if r.name.startswith((*FIRST, "deepseek split"))]


def _train(flags: str, evaluates: bool = False) -> tuple:
    """On one rank, which may evaluate before each step: losses and norms; pieces of weights; of all layers counts, auxiliary losses, figures of the log, of
    every step; biases of its own routers."""
    run = run_from(f"{COMMON} {flags}", dtype=torch.float64)
    counts, losses, results = [], [], []
    for _ in range(STEPS):
        if evaluates:
            evaluate(run, run.data, 1)
        results.append(train_step(run))
        counts.append(run.balance.counts_LE.tolist())
        losses.append(run.balance.losses_L3.tolist())
    run.buffer.wait_gather()
    biases = {router.name: router.bias.tolist() for router in run.balance.routers if router.bias is not None}
    numbers = [(r.loss, r.grad_norm, *(r.balance[name] or 0 for name in NAMES)) for r in results]
    return numbers, owned(run.optimizer, "model/"), counts, losses, biases


@cache
def alone(flags: str) -> tuple:
    return _train(flags)


def _weights(ranks: list[tuple]) -> dict[str, np.ndarray]:
    return {name: whole.numpy() for name, whole in whole_of(piece for rank in ranks for piece in rank[1]).items()}


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK], ids=["qwen", "deepseek"])
def test_an_evaluation_changes_nothing(model: str) -> None:
    assert repr(_train(model, evaluates=True)) == repr(alone(model))


@pytest.mark.everything(guards=("megalite/nn/experts.py", "megalite/nn/router.py", "megalite/nn/token_exchange.py"))
@pytest.mark.parametrize("precision", ["--bf16", "--fp16 --initial-loss-scale 1024"])
def test_half_precision_trains_as_in_one_process(precision: str) -> None:
    flags = f"{MIXTRAL} {precision} --train-iters 5 --global-batch-size 8"
    one = _go_on(flags, 5)[2]
    for *_, losses in run_ranks(4, _go_on, f"{flags} {EP2} --tp 2", 5):
        assert losses == pytest.approx(one, rel=BF16) and losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("item", rarely(ROWS, OFTEN, NAME, guards=("megalite/nn", "megalite/kernels")))
def test_experts_train_as_in_one_process(item: Row) -> None:
    ranks = run_ranks(item.world, _train, f"{item.model} {item.layout}")
    words = item.layout.split()
    micro = "--micro-batch-size 1" * ("--micro-batch-size" in words)
    numbers, pieces, counts, losses, biases = alone(f"{item.model} {micro}")
    for results, _, *others in ranks:
        np.testing.assert_allclose(results, numbers, rtol=FP64, err_msg=f"{item.name}: loss, gradient norm, figures")
        np.testing.assert_allclose(others[1], losses, rtol=FP64, err_msg=item.name)
        assert others[0] == counts and others[2].items() <= biases.items(), item.name
    assert {name for rank in ranks for name in rank[4]} == biases.keys()
    got, want = _weights(ranks), _weights([(numbers, pieces)])
    assert got.keys() == want.keys()
    for name, whole in want.items():
        np.testing.assert_allclose(got[name], whole, rtol=0, atol=1e-9 * np.abs(whole).max(), err_msg=name)
    tokens, topk = 16 * 16, int(item.model.partition("--moe-router-topk ")[2].split()[0]) if "topk" in item.model else 2
    assert all(sum(layer) == tokens * topk for step in counts for layer in step)


def _go_on(flags: str, steps: int) -> list:
    """On one rank: load, train, save; the biases before and after, and the losses."""
    config = config_from(f"{COMMON} {flags}")
    run = run_from(config)
    saver = open_saver(run, config)
    if config.checkpoint.load:
        start_run(run, config)

    def biases() -> dict[str, list[float]]:
        return {r.name: r.bias.tolist() for r in run.balance.routers if r.bias is not None}

    before = biases()
    losses = [train_step(run).loss for _ in range(steps)]
    if saver is not None:
        save(run, saver, to_toml(config))
        saver.close()
    return [before, biases(), losses]


def test_a_resume_may_change_how_experts_are_shared_out(tmp_path: Path) -> None:
    """Biases are state that no gradient trains: a checkpoint has them once, whatever the layout."""
    folders = [f"--save {tmp_path / name}" for name in "ab"]
    first = run_ranks(4, _go_on, f"{DEEPSEEK} {EP4} {folders[0]}", 2)
    assert all(any(bias) for bias in first[0][1].values())
    load = folders[0].replace("save", "load")
    ranks = run_ranks(4, _go_on, f"{DEEPSEEK} {EP2} {load} {folders[1]} --tp 2", 1)
    alone = _go_on(f"{DEEPSEEK} {load}", 1)
    for before, after, losses in ranks:
        assert before == first[0][1] and after == alone[1] and losses == pytest.approx(alone[2], rel=1e-5)
    without = DEEPSEEK.replace("--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.003", "")
    with pytest.raises(SetupError, match="moe_router_enable_expert_bias"):
        _go_on(f"{without} {load}", 1)


@pytest.mark.parametrize("what", ["experts.down", "router.bias"])
def test_a_checkpoint_that_lacks_an_expert_or_a_bias_is_refused_by_its_name(tmp_path: Path, what: str) -> None:
    run_ranks(2, _go_on, f"{DEEPSEEK} {EP2} --save {tmp_path}", 1)
    (path,) = tmp_path.glob("*/manifest.json")
    manifest = json.loads(path.read_text())
    name = next(name for name in manifest["tensors"] if name.endswith(what))
    parts = manifest["tensors"][name]["parts"]
    if len(parts) > 1:
        del parts[0]
    else:
        del manifest["tensors"][name]
    reseal(path.parent, manifest)
    with pytest.raises((CheckpointError, SetupError), match=name.partition("/")[2]):
        _go_on(f"{DEEPSEEK} --load {tmp_path}", 1)
