"""The exchange of full matrices for Muon: no element is lost or doubled, and results are orthogonal."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.kernels.newton_schulz import CoefficientType, coefficients, newton_schulz
from megalite.optim import matrix_exchange as exchange
from megalite.optim.zero.layout import ParamEntry, build_layout
from megalite.optim.zero.sharding import bucket_shardings
from megalite.parallel.mesh import abstract_mesh
from megalite.parallel.spec import ParamSpec


@st.composite
def specs(draw: st.DrawFn, tp: int) -> ParamSpec:
    shards = draw(st.sampled_from([((0, "tp"),), ((1, "tp"),), ()]))  # rows, columns, or replicated over tp
    lead = draw(st.lists(st.integers(1, 3), max_size=2))
    matrix = [draw(st.integers(1, 5)) * tp, draw(st.integers(1, 40)) * tp]
    if draw(st.booleans()):  # experts, each split or not
        split = (((0, "ep"),), ((0, "ep"), (2, "etp")), ((1, "etp"),))[draw(st.integers(0, 2))]
        return ParamSpec("e", (4, 2 * matrix[0], 2 * matrix[1]), split, mesh_view="expert")
    moved = tuple((dim + len(lead), axis) for dim, axis in shards)
    return ParamSpec("w", (*lead, *matrix), moved, partial_grad_axes=() if shards else ("tp",))


@given(st.data(), st.sampled_from([1, 2]), st.sampled_from([1, 2, 3, 4]), st.integers(50, 2000))
def test_every_element_reaches_the_owner_rank_once_and_returns(
    data: st.DataObject, tp: int, dp: int, bucket_size: int
) -> None:
    instances = data.draw(st.sampled_from([n for n in (1, 2, 4) if dp % n == 0]))
    shares = st.sampled_from([n for n in (1, 2, 4) if tp * dp % (n * instances) == 0])
    shape = dict(tp=tp, ep=data.draw(shares), num_optimizer_instances=instances, dp_cp_tp=True)
    shape["etp"] = data.draw(st.sampled_from([n for n in (1, 2) if tp * dp % (n * shape["ep"] * instances) == 0]))
    meshes = [abstract_mesh(tp * dp, rank, **shape) for rank in range(tp * dp)]
    sizes, drawn_specs = meshes[0].sizes, data.draw(st.lists(specs(tp), min_size=1, max_size=4))
    drawn_specs += [
        ParamSpec("bias", (2, 3), stacked=True),
        ParamSpec("positions", (3, 5), is_lookup=True),
    ]  # no matrices
    entries = [ParamEntry(spec, math.prod(spec.local_shape(sizes)), 0) for spec in drawn_specs]
    layout = build_layout(entries, bucket_size=bucket_size, sizes=sizes, matrices=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "GROUP_NUMEL", data.draw(st.sampled_from([1, 300, 1 << 26])))
        plans = [
            exchange.build_exchanges(layout, bucket_shardings(layout, mesh), sizes, mesh.dp_cp_tp.rank)
            for mesh in meshes
        ]
    matrices, owned_matrices = plans[0][0], Counter[int]()
    placed = [(b.key, drawn_specs[slot.entry]) for b in layout.buckets for slot in b.slots if b.key.is_matrix]
    rules = bucket_shardings(layout, meshes[0])
    copies = [rules[kind].num_owners for kind, spec in placed for _ in range(math.prod(spec.shape[:-2]))]
    assert sum(m.numel for m in matrices) == sum(math.prod(spec.shape) for spec in drawn_specs[:-2])
    for step in zip(*(groups for _, groups in plans), strict=True):
        for a, b in np.ndindex(len(step), len(step)):
            assert step[a].send[b] == step[b].receive[a] and step[a].receive_back[b] == step[b].send_back[a]
        for owner in step:
            counts_of: dict[int, list[np.ndarray]] = {}  # how often each element is received, and sent back
            for which, ranks in enumerate((owner.receive, owner.send_back)):
                for part in (part for ranges in ranks for part in ranges):
                    matrix = matrices[part.matrix]
                    counts = counts_of.setdefault(part.matrix, [np.zeros(matrix, int), np.zeros(matrix, int)])
                    counts[which][tuple(map(slice, part.box.start, part.box.stop))] += 1
            owned_matrices.update(counts_of.keys())
            for number, (received, returned) in counts_of.items():
                assert (received == 1).all() and (returned == copies[number]).all()
    assert owned_matrices == Counter(range(len(matrices)))
    for mesh, (_, groups) in zip(meshes, plans, strict=True):
        rules = bucket_shardings(layout, mesh)
        returned_parts = [part for group in groups for ranges in group.receive_back for part in ranges]
        for bucket in (bucket for bucket in layout.buckets if bucket.key.is_matrix):
            parts = [slot.overlap(rules[bucket.key].owned_range(bucket)) for slot in bucket.slots]
            owned = [i for part in parts for i in range(part.start, part.start + len(part.span))]
            assert owned == sorted(
                i for r in returned_parts if r.bucket == bucket.index for i in range(r.start, r.stop)
            )


@pytest.mark.parametrize(
    ("kind", "steps", "min_value", "max_value"),
    [("polar_express", 12, 1 - 1e-12, 1 + 1e-12), ("quintic", 5, 0.6, 1.3), ("simple", 5, 0.6, 1.3)],
)
@pytest.mark.parametrize("shape", [(3, 20, 7), (3, 7, 20), (1, 9, 9)])
def test_newton_schulz_keeps_singular_vectors(
    kind: CoefficientType, steps: int, min_value: float, max_value: float, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    middle = left.mT @ newton_schulz(x, coefficients(kind, steps)) @ right.mT
    values = middle.diagonal(dim1=-2, dim2=-1)
    assert float((middle - torch.diag_embed(values)).abs().max()) < 1e-12
    assert min_value <= float(values.min()) and float(values.max()) <= max_value
    assert not newton_schulz(0 * x, coefficients(kind, steps)).any()
