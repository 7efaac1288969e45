"""Deferred weight gradients: the sums are equal, and each bucket is reduced after the last of its gradients.

Their bytes are tested in planning/test_layer_cost.py, and those of ranks in planning/test_rank_memory.py.
"""

import pytest
import torch
from layout_cases import COMMON, GPT, LLAMA
from ranks import run_ranks
from train_cases import config_from

from megalite.models.gpt import Stage
from megalite.nn.linear import column_parallel_linear
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.parameter import ParamFactory
from megalite.nn.wgrad_store import WeightGradStore
from megalite.optim.zero.grad_bucket import GradBucket
from megalite.optim.zero.sync import BucketSync
from megalite.parallel.mesh import Mesh, build_mesh

S, B, V = 16, 2, 96


def build_stage(flags: str, mesh: Mesh, **options: int) -> tuple[Stage, BucketSync]:
    model = config_from(f"{COMMON} --num-layers 2 {flags}").model
    stage = Stage(ParamFactory(mesh, torch.float64, seed=3), model, [range(2)], 0, vocab_size=94, padded_vocab_size=V)
    return stage, BucketSync([stage], mesh, **options)


def backward(stage: Stage, seed: int, wgrad_store: WeightGradStore | None) -> None:
    tokens = torch.randint(0, 94, (S, B), generator=torch.Generator().manual_seed(seed))
    batch = Batch(tokens, tokens.flip(0), None, torch.arange(B))
    ctx = ForwardContext(seed, loss_grad=1.0, wgrad_store=wgrad_store)
    stage(None, batch, ctx).backward()


@pytest.mark.parametrize("flags", [GPT, LLAMA, f"{LLAMA} --recompute-granularity full --recompute-method uniform"])
def test_deferred_sums_are_bit_equal_in_equal_order(flags: str) -> None:
    stage, sync = build_stage(flags, Mesh.single_process())
    deferred_stage, deferred_sync = build_stage(flags, Mesh.single_process())
    for seed in (1, 2):
        backward(stage, seed, None)
        wgrad_store = WeightGradStore()
        backward(deferred_stage, seed, wgrad_store)
        names = {main_grad.name for main_grad in wgrad_store.main_grads}  # type: ignore[attr-defined]
        matrices = {
            n
            for n, s in deferred_sync.main_grads.items()
            if n.startswith("layers.") and s._main_grad.dim() > 1 and "bias" not in n
        }
        assert names == matrices
        wgrad_store.compute_all()
        assert not list(wgrad_store.main_grads)
    sync.zero_unwritten_grads()
    deferred_sync.zero_unwritten_grads()
    grads = torch.cat([bucket.full for bucket in sync.grad_buckets])
    deferred_grads = torch.cat([bucket.full for bucket in deferred_sync.grad_buckets])
    assert torch.equal(grads, deferred_grads) and grads.any()


def _order() -> list[str]:
    """Return the reductions and ready gradients of the last backward, on two dp ranks with a bucket per matrix."""
    mesh = build_mesh(tp=1, pp=1, device=torch.device("cpu"))
    (stage, sync), events = build_stage(f"{LLAMA} --num-query-groups 4", mesh, bucket_size=1), list[str]()
    start_reduce, mark_ready = sync._start_reduce, GradBucket.mark_ready

    def record_reduce(bucket: GradBucket) -> None:
        events.append(f"reduce {bucket.names[0]}")
        start_reduce(bucket)

    def record_ready(bucket: GradBucket, entry: int) -> bool:
        events.append(sync.layout.entries[entry].spec.name)
        return mark_ready(bucket, entry)

    sync._start_reduce = record_reduce  # type: ignore[method-assign]
    GradBucket.mark_ready = record_ready  # type: ignore[method-assign]
    first, last = WeightGradStore(), WeightGradStore()
    backward(stage, 1, first)
    backward(stage, 2, last)
    first.compute_all()
    assert not any(event.startswith("reduce") for event in events)
    events.clear()
    sync.set_last_backward(0, last.main_grads)
    last.compute_all()
    sync.finish_grad_sync()
    return events


def test_bucket_is_reduced_after_its_last_weight_gradient() -> None:
    events, other_events = run_ranks(2, _order)
    assert events == other_events
    deferred = [event for event in events if event.startswith("layers.") and "norm" not in event]
    assert len(deferred) == 2 * 5 and deferred[0] == "layers.1.mlp.down" and deferred[-1] == "layers.0.attention.kv"
    for name in deferred:
        assert events.index(f"reduce {name}") > events.index(name)
    reductions = [i for i, event in enumerate(events) if event.startswith("reduce")]
    assert sum(i < events.index(deferred[-1]) for i in reductions) > 8, (
        "most are under way before the last gradient is ready"
    )
    assert events[0].startswith("reduce"), "the head's gradient was ready in forward"


def test_gradient_without_main_grad_goes_to_autograd() -> None:
    x = torch.randn(S, B, 8, requires_grad=True)
    weight, wgrad_store = torch.randn(6, 8, requires_grad=True), WeightGradStore()
    column_parallel_linear(x, [weight], Mesh.single_process().tp, wgrad_store)[0].sum().backward()
    assert weight.grad is not None and not list(wgrad_store.main_grads)
