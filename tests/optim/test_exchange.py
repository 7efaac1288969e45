"""Whole matrices, by whoever owns what of them: nothing is lost or doubled on the way, and they come out orthogonal."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.kernels.newton_schulz import CoefficientType, coefficients, newton_schulz
from megalite.optim import exchange
from megalite.optim.bucket_rule import rules_for
from megalite.optim.layout import Entry, lay_out
from megalite.parallel.mesh import plan_mesh, stage_positions
from megalite.parallel.spec import ParamSpec

SPLITS = st.sampled_from([((0, "tp"),), ((1, "tp"),), ()])  # of a matrix's rows, columns, or copied over tp


@st.composite
def specs(draw: st.DrawFn, tp: int) -> ParamSpec:
    shards, lead = draw(SPLITS), draw(st.lists(st.integers(1, 3), max_size=2))
    matrix = [draw(st.integers(1, 5)) * tp, draw(st.integers(1, 40)) * tp]
    moved = tuple((dim + len(lead), axis) for dim, axis in shards)
    return ParamSpec("w", (*lead, *matrix), moved, partial=() if shards else ("tp",))


@given(st.data(), st.sampled_from([1, 2]), st.sampled_from([1, 2, 3, 4]), st.integers(50, 2000))
def test_every_element_comes_home_once_and_goes_back_to_all_that_own_it(
    data: st.DataObject, tp: int, dp: int, bucket_size: int
) -> None:
    instances = data.draw(st.sampled_from([n for n in (1, 2, 4) if dp % n == 0]))
    meshes = [plan_mesh(tp * dp, rank, tp=tp, instances=instances, stage=True) for rank in range(tp * dp)]
    sizes, made = meshes[0].sizes, data.draw(st.lists(specs(tp), min_size=1, max_size=4))
    made += [ParamSpec("bias", (2, 3), stacked=True), ParamSpec("positions", (3, 5), looked_up=True)]  # no matrices
    entries = [Entry(spec, math.prod(spec.local_shape(sizes)), 0) for spec in made]
    layout = lay_out(entries, bucket_size=bucket_size, sizes=sizes, matrices=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "GROUP", data.draw(st.sampled_from([1, 300, 1 << 26])))
        plans = [exchange.exchanges(layout, rules_for(layout, mesh), sizes, mesh.stage.rank) for mesh in meshes]
    assert [mesh.stage.rank for mesh in meshes] == list(range(tp * dp)) and stage_positions(sizes)[-1]["tp"] == tp - 1
    matrices, homes = plans[0][0], Counter[int]()
    specs_in_order = [made[slot.entry] for bucket in layout.buckets for slot in bucket.slots if bucket.kind.matrix]
    copies = [1 if spec.shards else tp for spec in specs_in_order for _ in range(math.prod(spec.shape[:-2]))]
    assert sum(m.numel for m in matrices) == sum(math.prod(spec.shape) for spec in made[:-2])
    for step in zip(*(groups for _, groups in plans), strict=True):
        for a, here in enumerate(step):
            for b, there in enumerate(step):
                assert here.given[b] == there.taken[a] and here.got[b] == there.returned[a]
        for home in step:
            came: dict[int, list[np.ndarray]] = {}  # how often each element comes, and goes
            for which, ranks in enumerate((home.taken, home.returned)):
                for part in (part for ranges in ranks for part in ranges):
                    one = matrices[part.matrix]
                    counts = came.setdefault(part.matrix, [np.zeros(one, int), np.zeros(one, int)])
                    counts[which][tuple(map(slice, part.box.start, part.box.stop))] += 1
            homes.update(came.keys())
            for number, (taken, returned) in came.items():
                assert (taken == 1).all() and (returned == instances * copies[number]).all()
    assert homes == Counter(range(len(matrices)))
    for mesh, (_, groups) in zip(meshes, plans, strict=True):
        rules = rules_for(layout, mesh)
        for bucket in (bucket for bucket in layout.buckets if bucket.kind.matrix):
            owned = np.zeros(len(rules[bucket.kind].owned(bucket)), int)
            for part in (part for group in groups for ranges in group.got for part in ranges):
                if part.bucket == bucket.number:
                    owned[part.start : part.stop] += 1
            parts = [rules[bucket.kind].owned_part(bucket, slot) for slot in bucket.slots]
            assert owned.max(initial=0) <= 1 and owned.sum() == sum(len(part.span) for part in parts)


@pytest.mark.parametrize(
    ("kind", "steps", "least", "most"),
    [("polar_express", 12, 1 - 1e-12, 1 + 1e-12), ("quintic", 5, 0.6, 1.3), ("simple", 5, 0.6, 1.3)],
)
@pytest.mark.parametrize("shape", [(3, 20, 7), (3, 7, 20), (1, 9, 9)])
def test_newton_schulz_keeps_singular_vectors(
    kind: CoefficientType, steps: int, least: float, most: float, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[0, 0] = 0 if shape[1] > shape[2] else x[0, 0]
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    middle = left.mT @ newton_schulz(x, coefficients(kind, steps)) @ right.mT
    values = middle.diagonal(dim1=-2, dim2=-1)
    assert float((middle - torch.diag_embed(values)).abs().max()) < 1e-12
    assert least <= float(values.min()) and float(values.max()) <= most
    assert float(newton_schulz(0 * x, coefficients(kind, steps)).abs().max()) == 0
