"""The flat layout owns every element once; updates equal torch's; counts of collectives do not depend on M."""

import datetime
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn

from megalite.optim.adamw import AdamW
from megalite.optim.buffer import ParamBuffer
from megalite.optim.layout import ALIGN, Entry, lay_out
from megalite.optim.sgd import SGD
from megalite.optim.zero1 import Zero1
from megalite.parallel.mesh import Mesh, build_mesh
from megalite.parallel.spec import ParamSpec


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(0, 2), st.booleans(), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 800),
    st.integers(1, 5),
)
def test_every_element_is_owned_exactly_once(rows: list[tuple[int, int, bool, bool]], bucket: int, dp: int) -> None:
    entries = [
        Entry(ParamSpec(f"p{i}", (n,), partial=("tp",) * partial, decay=decay), n, chunk)
        for i, (n, chunk, partial, decay) in enumerate(rows)
    ]
    layout = lay_out(entries, bucket_size=bucket, sizes={"data": dp, "tp": 2})
    slots = [(s, b) for b in layout.buckets for s in b.slots]
    assert sorted(s.entry for s, _ in slots) == list(range(len(entries)))
    assert [b.number for b in layout.buckets] == list(range(len(layout.buckets)))
    for b in layout.buckets:
        assert b.size % (dp * ALIGN) == 0
        assert [i for r in range(dp) for i in b.shard(dp, r)] == list(range(b.size))
        assert all(one.stop <= other.start for one, other in pairwise(b.slots))
    assert sum(b.size for b in layout.buckets) == layout.size
    for s, b in slots:
        entry = entries[s.entry]
        assert s.bucket == b.number and s.stop - s.start == entry.numel and s.start % ALIGN == 0 and s.stop <= b.size
        assert (entry.chunk, entry.spec.partial, entry.spec.decay) == (b.chunk, b.kind.partial, b.kind.decay)
    str(layout)


def _module(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    for name, p in model.named_parameters():
        p.spec = ParamSpec(name, tuple(p.shape), decay=p.dim() > 1)  # type: ignore[attr-defined]
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_updates_equal_torch(dtype: torch.dtype, rule: str) -> None:
    ours, theirs = _module(dtype), _module(dtype)
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    if rule == "adamw":
        reference: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.95), eps=1e-6)
    else:
        reference = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    buffer = ParamBuffer([ours], Mesh.alone(), bucket_size=20)
    optimizer = Zero1(buffer, AdamW((0.8, 0.95), 1e-6) if rule == "adamw" else SGD(0.9))
    for step in range(6):
        x = torch.randn(4, 7, dtype=dtype, generator=torch.Generator().manual_seed(step))
        buffer.on_last_backward(0)
        ours(x).square().sum().backward()
        buffer.finish()
        reference.zero_grad()
        theirs(x).square().sum().backward()
        squares = sum(float(p.grad.double().square().sum()) for p in theirs.parameters())  # type: ignore[union-attr]
        assert float(optimizer.local_norm_sq()) == pytest.approx(squares, rel=1e-6)
        optimizer.step(lr=0.05, weight_decay=0.3, scale=1.0)
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=1e-12 if dtype == torch.float64 else 1e-6
        )


def _counted(micro_batches: int, shard: bool) -> tuple[dict[str, int], int]:
    limit = datetime.timedelta(seconds=20)
    mesh = build_mesh(instances=1 if shard else None, device=torch.device("cpu"), timeout=limit, shared_memory=False)
    calls: dict[str, int] = {}

    def spy(module: object, name: str) -> None:
        real = getattr(module, name)

        def call(*args: object, **kwargs: object) -> object:
            calls[name] = calls.get(name, 0) + 1
            return real(*args, **kwargs)

        setattr(module, name, call)

    from megalite.parallel import comm

    spy(comm.dist, "all_reduce")
    spy(comm, "all_gather_flat")
    model = _module(torch.float32)
    buffer = ParamBuffer([model], mesh, bucket_size=20)
    optimizer = Zero1(buffer, AdamW())
    for m in range(micro_batches):
        if m == micro_batches - 1:
            buffer.on_last_backward(0)
        model(torch.ones(2, 7)).square().sum().backward()
    buffer.finish()
    optimizer.step(lr=0.1, weight_decay=0.0, scale=1.0)
    buffer.gather()
    buffer.wait_gather()
    return calls, len(buffer.layout.buckets)


@pytest.mark.parametrize("micro_batches", [1, 5])
@pytest.mark.parametrize("shard", [True, False])
def test_one_reduction_and_one_gather_per_bucket_and_step(micro_batches: int, shard: bool) -> None:
    for calls, buckets in run_ranks(2, _counted, micro_batches, shard):
        assert buckets > 1
        assert calls == {"all_reduce": buckets} | ({"all_gather_flat": buckets} if shard else {})
