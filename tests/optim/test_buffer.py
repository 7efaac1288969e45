"""Buckets: gradients are added once and in one order, weights are gathered before they are read."""

import datetime
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

from megalite.optim.distributed_optimizer import DistributedOptimizer
from megalite.optim.update_rule import ParamUpdate
from megalite.optim.zero import param_bucket
from megalite.optim.zero.sync import BucketSync
from megalite.parallel import comm
from megalite.parallel.mesh import Axis, Mesh, build_mesh
from megalite.parallel.spec import ParamSpec

SIZE = 128  # elements; each of two dp ranks owns half


class Scale(nn.Module):
    """y = x * weight."""

    def __init__(self, name: str, value: float = 1.0, dtype: torch.dtype = torch.float32, **facts: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.full((SIZE,), value, dtype=dtype))
        self.weight.spec = ParamSpec(name, (SIZE,), **facts)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _mesh(tp: int = 1, pp: int = 1, shard: bool = True) -> Mesh:
    limit = datetime.timedelta(seconds=20)  # over gloo, whose calls are counted
    sizes = dict(tp=tp, pp=pp, num_optimizer_instances=1 if shard else None)
    return build_mesh(**sizes, device=torch.device("cpu"), timeout=limit, shared_memory=False)


def _spy(module: Any, name: str, seen: list[tuple[Any, Tensor]]) -> None:
    """Record (group, tensor) of every call; the calls go through."""
    real = getattr(module, name)

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((kwargs.get("group"), x))
        return real(x, *args, **kwargs)

    setattr(module, name, call)


def _grads(sync: BucketSync) -> dict[str, float]:
    """Return the value of each parameter's (uniform) gradient in this rank's shard."""
    values = {}
    for bucket in sync.grad_buckets:
        for slot in bucket.layout.slots:
            grad = bucket.owned_slice(slot).select(bucket.owned)
            if grad.numel():
                assert (grad == grad[0]).all()
                values[sync.layout.entries[slot.entry].spec.name] = float(grad[0])
    return values


def test_parameters_and_gradients_are_views_of_buckets() -> None:
    model = nn.Sequential(Scale("a", 2.0), Scale("b", 3.0))
    sync = BucketSync([model], Mesh.single_process())
    a, b = model[0].weight, model[1].weight
    assert [p.spec.name for p in model.parameters()] == ["a", "b"]  # type: ignore[attr-defined]
    for flat in [bucket.full for bucket in sync.param_buckets]:
        flat.mul_(2)
    assert a.detach().unique().tolist() == [4.0] and b.detach().unique().tolist() == [6.0]
    for _ in range(3):
        model(torch.ones(SIZE)).sum().backward()
    assert a.grad is None and b.grad is None
    sync.finish_grad_sync()
    assert _grads(sync) == {"a": 18.0, "b": 12.0}
    model[1](torch.ones(SIZE)).sum().backward()
    sync.finish_grad_sync()
    assert _grads(sync) == {"a": 0.0, "b": 1.0}  # a: no gradient, and nothing left of the previous step


def test_every_bucket_has_its_own_memory() -> None:
    """A bucket can be freed without the others: no read crosses buckets."""
    model = nn.Sequential(Scale("a", 2.0), Scale("b", 3.0), Scale("c", 4.0))
    sync = BucketSync([model], Mesh.single_process(), bucket_size=1)
    flats = [bucket.full for bucket in (*sync.param_buckets, *sync.grad_buckets)]
    assert len({flat.untyped_storage().data_ptr() for flat in flats}) == len(flats) == 6
    for buckets in (sync.param_buckets, sync.grad_buckets):
        assert sum(bucket.nbytes for bucket in buckets) == 4 * sync.layout.size
    freed = sync.param_buckets[0].full.untyped_storage()
    freed.resize_(0)  # c's
    y = model[:2](torch.ones(SIZE))
    y.sum().backward()
    sync.finish_grad_sync()
    assert y.unique().tolist() == [6.0] and _grads(sync) == {"a": 3.0, "b": 2.0, "c": 0.0}


def test_mixed_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dtypes \['torch.bfloat16', 'torch.float32'\]"):
        BucketSync([nn.Sequential(Scale("a"), Scale("b", dtype=torch.bfloat16))], Mesh.single_process())


def _different_parameters(shard: bool) -> dict[str, float]:
    """Rank 0 uses a, rank 1 uses b, no rank uses c. If reductions started as buckets fill, a's would meet b's."""
    mesh = _mesh(shard=shard)
    parts = [Scale("a"), Scale("b"), Scale("c")]
    sync = BucketSync([nn.ModuleList(parts)], mesh, bucket_size=1)
    sync.set_last_backward(0)
    (parts[mesh.dp.rank](torch.ones(SIZE)).sum() * (3 if mesh.dp.rank == 0 else 5)).backward()
    sync.finish_grad_sync()
    return _grads(sync)


@pytest.mark.parametrize("shard", [True, False])
def test_ranks_may_have_gradients_for_different_parameters(shard: bool) -> None:
    expected = {"a": 3.0, "b": 5.0, "c": 0.0}
    assert run_ranks(2, _different_parameters, shard) == [expected, expected]


def _in_half_precision(dtype: torch.dtype, rounds: bool, shard: bool, shared: bool) -> tuple[Tensor, Tensor, list[int]]:
    """Return the gradients, this rank's local sum of three, and the bytes of each all-reduce over gloo."""
    limit = datetime.timedelta(seconds=20)
    instances = 1 if shard else None
    mesh = build_mesh(
        num_optimizer_instances=instances, device=torch.device("cpu"), timeout=limit, shared_memory=shared
    )
    assert (mesh.dp.custom_backend is not None) == shared
    model, seen = Scale("a", dtype=dtype), list[tuple[Any, Tensor]]()
    sync = BucketSync([model], mesh, half_reduce_dtype=dtype if rounds else None)
    _spy(dist, "all_reduce", seen)
    inputs = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(mesh.dp.rank)).to(dtype)
    for i in range(3):
        if i == 2:
            sync.set_last_backward(0)
        model(inputs[i]).sum().backward()
    sync.finish_grad_sync()
    return sync.grad_buckets[0].owned.clone(), inputs.float().sum(0), [x.nbytes for _, x in seen if x.nbytes > 64]


@pytest.mark.parametrize("shared", [False, True], ids=["gloo", "shared memory"])
@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_reduction_in_half_precision_moves_half_the_bytes(dtype: torch.dtype, shard: bool, shared: bool) -> None:
    if shared and not shard:
        return  # all-reduces never go through shared memory
    exact = run_ranks(2, _in_half_precision, dtype, False, shard, shared)
    rounded = run_ranks(2, _in_half_precision, dtype, True, shard, shared)
    own = [total for _, total, _ in rounded]
    join = torch.cat if shard else (lambda parts: parts[0])
    actual, expected = (join([grads for grads, _, _ in ranks])[:SIZE] for ranks in (rounded, exact))
    assert torch.equal(expected, own[0] + own[1])
    assert actual.dtype == torch.float32 and not torch.equal(actual, expected)
    # each rank's sum is rounded once, and their sum once more: half a unit in the last of 8 or 11 bits each
    assert (
        (actual - expected).abs() <= torch.finfo(dtype).eps / 2 * (own[0].abs() + own[1].abs() + expected.abs())
    ).all()
    if not shard:
        assert torch.equal(rounded[0][0], rounded[1][0])
    bytes_moved = [[moved for _, _, moved in ranks] for ranks in (exact, rounded)]
    assert shared or bytes_moved == [[[4 * SIZE]] * 2, [[2 * SIZE]] * 2]


def _reductions_by_dtype() -> list[tuple[bool, list[torch.dtype]]]:
    """Return whether each bucket's sum over two ranks is exact, and the dtypes of its reduction, in a bf16 model."""
    results: list[tuple[bool, list[torch.dtype]]] = []
    mesh, seen = _mesh(), list[tuple[Any, Tensor]]()
    parts = [Scale("a", dtype=torch.bfloat16), Scale("b", keep_fp32=True)]
    sync = BucketSync([nn.ModuleList(parts)], mesh, half_reduce_dtype=torch.bfloat16)
    _spy(dist, "all_reduce", seen)
    for bucket in sync.grad_buckets:
        seen.clear()
        main_grad, _ = sync.main_grads[bucket.names[0]].accumulator()
        main_grad.copy_(torch.randn(SIZE, generator=torch.Generator().manual_seed(mesh.dp.rank)))
        exact = sum(torch.randn(SIZE, generator=torch.Generator().manual_seed(rank)) for rank in range(2))
        assert isinstance(exact, Tensor)
        sync._start_reduce(bucket)
        bucket.finish_reduce()
        owned = bucket.sharding.owned_range(bucket.layout)
        results.append((torch.equal(bucket.owned, exact[owned.start : owned.stop]), [x.dtype for _, x in seen]))
    return results


def test_gradients_of_fp32_weights_are_never_reduced_in_bf16() -> None:
    expected = [(True, [torch.float32]), (False, [torch.bfloat16])]
    assert run_ranks(2, _reductions_by_dtype) == [expected] * 2


def _count_reductions(overlap: bool) -> tuple[list[int], int]:
    """Count the reductions that have started after the first backward, the last backward and the finish."""
    mesh, seen, counts = _mesh(), [], []
    model = nn.Sequential(Scale("a"), Scale("b"), Scale("c"))
    sync = BucketSync([model], mesh, bucket_size=1, overlap_grad_reduce=overlap)
    _spy(dist, "all_reduce", seen)
    model(torch.ones(SIZE)).sum().backward()
    counts.append(len(seen))
    sync.set_last_backward(0)
    model(torch.ones(SIZE)).sum().backward()
    counts.append(len(seen))
    sync.finish_grad_sync()
    counts.append(len(seen))
    assert _grads(sync) == {"a": 4.0, "b": 4.0, "c": 4.0}
    return counts, len(sync.layout.buckets)


@pytest.mark.parametrize("overlap", [True, False])
def test_overlapped_reductions_start_in_the_last_backward(overlap: bool) -> None:
    for counts, buckets in run_ranks(2, _count_reductions, overlap):
        assert buckets == 3
        assert counts == [0, buckets if overlap else 0, buckets]


class _LateAllGather:
    """An all-gather whose result appears only in `wait`, as on a slow network."""

    def __init__(self, output: Tensor, shard: Tensor, axis: Axis):
        self.output, self.arrived = output, torch.empty_like(output)
        self.work = comm.start_all_gather_into(self.arrived, shard, axis)

    def wait(self) -> None:
        self.work.wait()
        self.output.copy_(self.arrived)


class Half:
    """The update rule w <- w / 2, which shows whether weights are updated."""

    state_dtypes: Mapping[str, torch.dtype | None] = {}

    def update_(self, u: ParamUpdate) -> None:
        u.param.mul_(0.5)
        if u.model_param is not None:
            u.model_param.copy_(u.param)


class InList(Scale):
    """The module with its weight in a ParameterList, which is never called itself."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.all = nn.ParameterList([self.weight])
        del self.weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.all[0]


def _late_weights(dtype: torch.dtype, overlap: bool, training: bool, kind: type[Scale]) -> tuple[float, float, bool]:
    mesh = _mesh()
    param_bucket.start_all_gather_into = _LateAllGather  # type: ignore[assignment]
    model = nn.Sequential(kind("a", 4.0, dtype), kind("b", 6.0, dtype)).train(training)
    sync = BucketSync([model], mesh, bucket_size=1, overlap_param_gather=overlap)
    optimizer = DistributedOptimizer(sync, Half())
    optimizer.step(lr=0.0, weight_decay=0.0, scale=1.0)
    sync.start_param_sync()
    waits = sync.param_buckets[-1].full.unique().numel() > 1  # the other rank's half is still the old one
    with torch.set_grad_enabled(training):
        x = model[0](torch.ones(SIZE, dtype=dtype))  # no wait_param_sync: the modules' own hooks do it
        y = model(torch.ones(SIZE, dtype=dtype))
    return float(x.detach().unique()), float(y.detach().unique()), waits


WAYS = [(torch.float32, True, True, Scale), (torch.float32, True, False, Scale), (torch.float32, False, True, Scale)]
WAYS += [(torch.bfloat16, True, True, Scale), (torch.float32, True, True, InList), (torch.float32, True, False, InList)]


@pytest.mark.parametrize("way", WAYS)
def test_forward_waits_for_its_weights(way: tuple[torch.dtype, bool, bool, type[Scale]]) -> None:
    assert run_ranks(2, _late_weights, *way) == [(2.0, 6.0, way[1])] * 2


def _extra_sums(axis: str, shard: bool) -> tuple[dict[str, float], dict[str, list[int]]]:
    """Return gradients and the elements moved per axis, for dp 2 with tp 2 or pp 2; rank r's loss is (r + 1) * sum."""
    mesh = _mesh(tp=2 if axis == "tp" else 1, pp=2 if axis == "pp" else 1, shard=shard)
    facts: dict[str, Any] = {"partial_grad_axes": ("tp",)} if axis == "tp" else {"tied": True}
    model = nn.Sequential(Scale("whole"), Scale("extra", **facts))
    sync = BucketSync([model], mesh)
    seen: list[tuple[Any, Tensor]] = []
    _spy(dist, "all_reduce", seen)
    sync.set_last_backward(0)
    (model(torch.ones(SIZE)).sum() * (mesh.world.rank + 1)).backward()
    sync.finish_grad_sync()
    moved: dict[str, list[int]] = {}
    for group, x in seen:
        moved.setdefault(next(a.name for a in (mesh.dp, mesh.tp, mesh.tied_embedding) if a.group is group), []).append(
            x.numel()
        )
    return _grads(sync), moved


@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_partial_and_tied_gradients_are_summed_once(axis: str, shard: bool) -> None:
    results = run_ranks(4, _extra_sums, axis, shard)
    for rank, (grads, moved) in enumerate(results):
        same_dp = [r for r in range(4) if (r % 2 == rank % 2 if axis == "tp" else r // 2 == rank // 2)]
        expected = {"whole": float(sum(r + 1 for r in same_dp)), "extra": 10.0}
        assert grads == expected
        assert moved == {"dp": [SIZE, SIZE], "tp" if axis == "tp" else "tied_embedding": [SIZE // 2 if shard else SIZE]}
