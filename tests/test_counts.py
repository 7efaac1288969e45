"""Performance as counts: collectives and bytes per step and group, activations saved per layer. Nothing is timed."""

import collections
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.autograd.graph import saved_tensors_hooks

from megalite.config import cli
from megalite.kernels.dispatch import chosen
from megalite.models.families import PRESETS
from megalite.models.gpt import Batch
from megalite.nn import recompute
from megalite.parallel.launch import Ranks
from megalite.parallel.mesh import Mesh
from megalite.plan.arrangement import arrange, build_stages
from megalite.plan.kinds import kinds_of, layers_bill
from megalite.train.setup import build_run
from megalite.train.step import train_step

S, B, D, L, M = 16, 2, 32, 4, 4
MODEL = f"""--num-layers {L} --hidden-size {D} --num-attention-heads 4 --seq-length {S} --max-position-embeddings {S}
 --micro-batch-size {B} --train-iters 2 --lr 0.01 --mock-data --vocab-size 64 --eval-iters 0 --hidden-dropout 0
 --attention-dropout 0 --ddp-bucket-size 9000"""
Count = dict[tuple[str, str], tuple[int, int]]  # (operation, group) -> (calls, elements)


def _counted(flags: str) -> tuple[Count, dict[str, Any]]:
    """Collectives of the second step on this rank, by the axis of their group."""
    os.environ["MEGALITE_SHARED_MEMORY"] = "off"  # through shared memory all are one kind of message
    config, _ = cli.read(f"{MODEL} {flags}".split(), PRESETS)
    run = build_run(config, Ranks(dist.get_rank(), dist.get_world_size()), torch.device("cpu"))
    mesh = run.mesh
    # an axis over all ranks shares the world's group, so the world comes first, and its one message is told by its size
    axes = {id(a.group): a.name for a in (mesh.world, mesh.pp, mesh.dp, mesh.tp, mesh.pp_back, mesh.ends) if a.group}
    calls: dict[tuple[str, str], list[int]] = collections.defaultdict(lambda: [0, 0])
    train_step(run)
    run.buffer.wait_gather()  # the gathers of a step are started during the next forward, a few ahead
    from megalite.optim import grad_reduce
    from megalite.parallel import comm
    from megalite.pipeline import runtime

    def spy(owner: Any, name: str, operation: str, which: int) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            agreement = operation == "all_reduce" and args[0].shape == (5,) and args[0].dtype == torch.float64
            entry = calls[operation, "world" if agreement else axes[id(kwargs["group"])]]
            entry[0] += 1
            entry[1] += args[which].numel()
            return real(*args, **kwargs)

        setattr(owner, name, call)

    spy(dist, "all_reduce", "all_reduce", 0)
    spy(dist, "isend", "isend", 0)
    spy(dist, "irecv", "irecv", 0)
    spy(comm, "all_gather_flat", "all_gather", 1)
    assert comm.dist is dist and not {"dist"} & {*vars(runtime), *vars(grad_reduce)}  # all go through comm
    train_step(run)
    run.buffer.wait_gather()
    run.data.close()
    buckets, facts = run.buffer.layout.buckets, {"size": run.buffer.layout.size, "pp": mesh.pp.rank}
    facts |= {"partial": sum(len(b.kind.partial) for b in buckets), "tied": sum(b.kind.tied for b in buckets)}
    facts["buckets"] = len(buckets)
    return {k: (v[0], v[1]) for k, v in calls.items()}, facts


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("shard", [True, False])
def test_data_parallel(m: int, shard: bool) -> None:
    flags = f"--global-batch-size {m * B * 2}" + ("" if shard else " --no-use-distributed-optimizer")
    for calls, facts in run_ranks(2, _counted, flags):
        assert facts["buckets"] > 2
        want = {("all_reduce", "dp"): (facts["buckets"], facts["size"]), ("all_reduce", "world"): (1, 5)}  # on gloo
        if shard:
            want["all_gather", "dp"] = (facts["buckets"], facts["size"] // 2)
        assert calls == want


def test_tensor_parallel() -> None:
    for calls, facts in run_ranks(2, _counted, f"--global-batch-size {M * B} --tensor-model-parallel-size 2"):
        shard = S // 2 * B * D
        # forward: 2 gathers per block and the head's; backward: 2 for the gradients of row-parallel outputs and 2 for
        # the inputs again; the embedding's scatter mirrors into one; the loss gathers two numbers per token (one chunk)
        gathers = M * (L * (2 + 2 + 2) + 1 + 1)
        assert calls["all_gather", "tp"] == (gathers + M, gathers * shard + M * 2 * S * B)
        # scatters (all-reduces on gloo): 2 per block forward and backward, the embedding's, the head's
        scatters = M * (L * (2 + 2) + 1 + 1)
        reduces, elements = calls["all_reduce", "tp"]
        assert reduces == scatters + facts["partial"]
        assert elements >= scatters * S * B * D
        assert set(calls) == {("all_gather", "tp"), ("all_reduce", "tp"), ("all_reduce", "world")}


@pytest.mark.parametrize("vpp", [1, 2])
def test_pipeline_parallel(vpp: int) -> None:
    flags = f"--global-batch-size {M * B} --pipeline-model-parallel-size 2"
    if vpp == 2:
        flags += " --num-virtual-stages-per-pipeline-rank 2"
    activation, borders = S * B * D, 2 * vpp - 1
    for calls, facts in run_ranks(2, _counted, flags):
        sent = vpp if facts["pp"] == 0 else vpp - 1  # borders whose activations this rank sends
        per_micro_batch = {("isend", "pp"): sent, ("irecv", "pp"): borders - sent}
        per_micro_batch |= {("isend", "pp_back"): borders - sent, ("irecv", "pp_back"): sent}
        for key, count in per_micro_batch.items():
            assert calls.get(key, (0, 0)) == (M * count, M * count * activation)
        assert calls["all_reduce", "ends"][0] == facts["tied"] == 1
        assert calls["all_reduce", "world"] == (1, 5)
        assert {k[1] for k in calls} == {"pp", "pp_back", "ends", "world"}


@pytest.mark.parametrize("flags", ["", "--pipeline-schedule gpipe"])
def test_a_split_backward_moves_as_much(flags: str) -> None:
    """The gather of a matmul's input runs before its weight gradient, not before its input's; nothing is added."""
    flags += f" --global-batch-size {M * B * 2} --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"
    whole, split = (run_ranks(8, _counted, f"{flags} {more}") for more in ("", "--split-backward"))
    assert [calls for calls, _ in whole] == [calls for calls, _ in split]
    assert all(calls["all_gather", "tp"][0] > 2 * M * L for calls, _ in split)


GPT = "--hidden-dropout 0.1"
NEOX = "--parallel-residual --position-embedding-type rope --rotary-percent 0.5 --group-query-attention --num-query-groups 1"
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
 --untie-embeddings-and-output-weights --ffn-hidden-size 340"""
QWEN = LLAMA + " --qk-layernorm --add-qkv-bias"


def _saved_per_layer(flags: str, s: int, b: int) -> float:
    """Bytes that one layer keeps for its backward."""

    def saved(layers: int) -> int:
        config, _ = cli.read([*MODEL.split(), *flags.split(), "--num-layers", str(layers)], PRESETS)
        (stage,) = build_stages(arrange(config, 1, 64), Mesh.alone(), torch.bfloat16)
        known = {p.untyped_storage().data_ptr() for p in stage.parameters()}
        known |= {t.untyped_storage().data_ptr() for t in stage.rope or ()}
        kept: dict[int, int] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            if t.untyped_storage().data_ptr() not in known:
                kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        class Inner(saved_tensors_hooks):  # of hooks inside hooks autograd calls the inner ones alone
            def __init__(self, keep: Callable[[Any], Any], restore: Callable[[Any], Any]):
                def keep_and_count(t: torch.Tensor) -> Any:
                    left = keep(t)
                    return left if left is None else pack(left)

                super().__init__(keep_and_count, restore)

        tokens = torch.zeros(s, b, dtype=torch.int64)
        with mock.patch.object(recompute, "saved_tensors_hooks", Inner), saved_tensors_hooks(pack, lambda t: t):
            loss = stage(None, Batch(tokens, tokens, None, torch.arange(b), 1))
        loss.backward()
        return sum(kept.values())

    return (saved(5) - saved(1)) / 4


@pytest.mark.parametrize("style", [GPT, LLAMA, NEOX, QWEN], ids=["gpt", "llama", "neox", "qwen"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_saved_activations_per_layer(style: str, recompute: str) -> None:
    """bf16, no recompute: at most 34 s b h bytes per layer (arXiv:2205.05198, eq. 2, without its attention scores)."""
    s, b, h = 64, 2, 128
    flags = f"""--hidden-size {h} --num-attention-heads 2 --seq-length {s} --max-position-embeddings {s} --bf16
     --attention-dropout 0 --hidden-dropout 0 {style}"""
    if recompute != "none":
        flags += f" --recompute-granularity {recompute}"
    if recompute == "full":
        flags += " --recompute-method uniform"
    per_layer, config = _saved_per_layer(flags, s, b), cli.read([*MODEL.split(), *flags.split()], PRESETS)[0]
    config = replace(config, train=replace(config.train, micro_batch_size=b))
    kind, setting = kinds_of(config.model)[0], arrange(config, 1, 64).layers.setting
    assert layers_bill((kind,), setting, recompute == "full").saved == pytest.approx(per_layer, rel=0.01)
    bound = {"none": 34, "selective": 34, "full": 2.1}[recompute]
    assert 0 < per_layer <= bound * s * b * h, per_layer / (s * b * h)


@pytest.mark.parametrize("style,width", [(GPT, 4 * 128), (LLAMA, 2 * 340)], ids=["gpt", "llama"])
def test_what_a_part_that_is_recomputed_does_not_save(style: str, width: int) -> None:
    """bf16: two outputs of norms; what goes into the activation, `width` wide; of a norm that is recomputed with the
    feed-forward block also its statistics, 4 bytes per token: torch's mean and deviation in bf16, or ours in fp32."""
    s, b, h = 64, 2, 128
    flags = f"""--hidden-size {h} --num-attention-heads 2 --seq-length {s} --max-position-embeddings {s} --bf16
     --attention-dropout 0 --hidden-dropout 0 {style}"""
    all_of_it = _saved_per_layer(flags, s, b)
    for modules, fewer in (
        ("layernorm", 2 * (2 * s * b * h)),
        ("mlp", 2 * s * b * width),
        ("layernorm mlp", 2 * (2 * s * b * h) + 2 * s * b * width + 4 * s * b),
    ):
        more = f" --recompute-granularity selective --recompute-modules {modules}"
        assert all_of_it - _saved_per_layer(flags + more, s, b) == fewer, modules


@pytest.mark.parametrize("style", [GPT, LLAMA], ids=["gpt", "llama"])
def test_no_scores_are_saved(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with dropout of attention weights; where the scores are asked to be explicit, selective recompute saves none.
    Everything else grows with s alone, so what doubling s adds beyond twice the bytes is theirs: 2 c s^2 of c s^2."""
    s, b, heads = 32, 2, 4

    def quadratic(more: str) -> float:
        flags = f"{style} --bf16 --attention-dropout 0.1 --num-attention-heads {heads} {more}"
        sizes = "--seq-length {0} --max-position-embeddings {0}"
        one, two = (_saved_per_layer(f"{flags} {sizes.format(n)}", n, b) for n in (s, 2 * s))
        return (two - 2 * one) / (2 * s * s)

    assert quadratic("") == 0
    softmax, keep, dropped, hidden = 4, 1, 2, 1  # bytes: fp32, bool, bf16; one causal mask for all heads and samples
    chosen.cache_clear()
    monkeypatch.setenv("MEGALITE_ATTENTION", "torch")
    try:
        assert quadratic("") == b * heads * (softmax + keep + dropped) + hidden
        assert quadratic("--recompute-granularity selective") == 0
    finally:
        chosen.cache_clear()
