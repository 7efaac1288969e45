"""Parameters of both mesh views under every layout: each element is counted once in norms, and saved once.

NVIDIA/Megatron-LM#5916 is a norm that missed experts where expert and tensor parallelism meet, #3672 a scale that
depended on the layout.
"""

import datetime
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from full_tensors import OwnedShard, assemble, box_view, owned_shards
from hypothesis import given, settings
from parallel.test_mesh import shapes
from ranks import run_ranks
from torch import Tensor, nn

from megalite.nn.parameter import ParamFactory
from megalite.optim.distributed_optimizer import DistributedOptimizer
from megalite.optim.sgd import SGD
from megalite.optim.zero.sync import BucketSync
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh, abstract_mesh, build_mesh
from megalite.parallel.rng import initialize_
from megalite.parallel.spec import MESH_VIEWS, Normal, ParamSpec

E, F, D = 12, 12, 5  # experts and a width that every size below divides, and another width
TIED = "word"
SPECS = [
    ParamSpec(TIED, (24, D), shards=((0, "tp"),), is_vocab=True),
    ParamSpec("norm", (D,), partial_grad_axes=("tp",), weight_decay=False),
    ParamSpec("router", (E, D), partial_grad_axes=("tp",)),
    ParamSpec("up", (2, F, D), shards=((1, "tp"),), stacked=True),
    ParamSpec("down", (D, F), shards=((1, "tp"),)),
    ParamSpec("experts.gate_up", (E, 2, F, D), mesh_view="expert", shards=((0, "ep"), (2, "etp")), init_block=1),
    ParamSpec(
        "experts.bias",
        (E, D),
        mesh_view="expert",
        shards=((0, "ep"),),
        partial_grad_axes=("etp",),
        weight_decay=False,
        init_block=1,
    ),
    ParamSpec("experts.scale", (D,), mesh_view="expert", partial_grad_axes=("ep", "etp")),
]


RARELY = pytest.mark.nightly(guards=("megalite/optim",))


def _full(spec: ParamSpec) -> Tensor:
    """Return a parameter whose elements all differ and have squares that are exact in fp64."""
    first = 1 + sum(int(np.prod(s.shape)) for s in SPECS[: [s.name for s in SPECS].index(spec.name)])
    return torch.arange(first, first + int(np.prod(spec.shape)), dtype=torch.float64).view(spec.shape)


def _optimizer(mesh: Mesh) -> DistributedOptimizer:
    """Return the optimizer of a model on the first stage, with the tied word embedding on the last one, too."""
    names = {spec.name for spec in SPECS} if mesh.pp.is_first else {TIED} if mesh.pp.is_last else {"norm"}
    make, stage = ParamFactory(mesh, torch.float64, seed=1), nn.Module()
    for spec in SPECS:
        if spec.name in names:
            name = spec.name if mesh.pp.is_first or mesh.pp.is_last else f"{spec.name}.{mesh.pp.rank}"
            parameter = make(replace(spec, name=name, tied=mesh.pp.size > 1 and spec.name == TIED))
            stage.register_parameter(spec.name.replace(".", "_"), parameter)
    return DistributedOptimizer(BucketSync([stage], mesh, bucket_size=40), SGD(0.9))


def _fill(optimizer: DistributedOptimizer, share: bool) -> None:
    """Set gradients and weights to this rank's part of `_full`.

    With `share` the gradient is a summand: the part divided by the number of ranks that the reduction sums.
    """
    sync, mesh = optimizer.sync, optimizer.sync.mesh
    for p in sync.parameters:
        spec = p.spec  # type: ignore[attr-defined]
        if "." in spec.name and not spec.name.startswith("experts"):
            p.data.zero_()  # it belongs to a stage between the ends; its gradient is 0 from the start
            continue
        part = box_view(_full(spec), spec.box(mesh.sizes, mesh.coordinates))
        axes = (
            [MESH_VIEWS[spec.mesh_view][0], *spec.partial_grad_axes, *["tied_embedding"] * spec.tied] if share else []
        )
        p.data.copy_(part)
        main_grad = sync.main_grads[spec.name]
        if share:
            main_grad.accumulator()  # otherwise the gradients are those of a step that has ended
        share_of_rank = part / float(np.prod([mesh.sizes[axis] for axis in axes]))
        main_grad.bucket.param_view(main_grad.slot).copy_(share_of_rank.view(-1))


TOTAL = sum(float(_full(spec).square().sum()) for spec in SPECS)
ELEMENTS = sum(int(np.prod(spec.shape)) for spec in SPECS)


@settings(max_examples=40)
@given(shapes(24, E))
def test_owned_elements_cover_the_model(shape: tuple[int, dict[str, Any]]) -> None:
    world, sizes = shape
    grads, weights, count, pieces = 0.0, 0.0, 0.0, list[OwnedShard]()
    for rank in range(world):
        optimizer = _optimizer(abstract_mesh(world, rank, **sizes))
        _fill(optimizer, share=False)
        grads += float(optimizer.local_norm_sq())
        weights += float(optimizer.local_weight_norm_sq())
        for bucket in optimizer.sync.grad_buckets:  # a 1 for every element of the model
            grad = bucket.owned
            grad.copy_((grad != 0).double())
        count += float(optimizer.local_norm_sq())
        pieces += owned_shards(optimizer, "model/")
    assert (count, grads, weights) == pytest.approx((ELEMENTS, TOTAL, TOTAL), rel=1e-12)
    saved = assemble(pieces)
    assert all(torch.equal(saved[f"model/{spec.name}"], _full(spec)) for spec in SPECS)


def _step(sizes: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Return the squared norm after a reduction between ranks, and the largest error of each updated weight."""
    mesh = build_mesh(device=torch.device("cpu"), timeout=datetime.timedelta(seconds=30), **sizes)
    optimizer = _optimizer(mesh)
    sync = optimizer.sync
    _fill(optimizer, share=True)
    sync.finish_grad_sync()
    norm = float(all_reduce_(optimizer.local_norm_sq(), mesh.world))
    optimizer.step(lr=0.5, weight_decay=0.0, scale=1.0)
    sync.start_param_sync()
    sync.wait_param_sync()
    errors = {}
    for p in sync.parameters:
        spec = p.spec  # type: ignore[attr-defined]
        part = box_view(_full(spec), spec.box(mesh.sizes, mesh.coordinates))
        errors[spec.name] = float((p.detach() - part / 2).abs().max())
    return norm, errors


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (4, dict(tp=2, ep=2, etp=1)),
        (4, dict(tp=2, ep=1, etp=2, num_optimizer_instances=None)),
        (8, dict(tp=2, cp=2, ep=2, etp=2)),
        pytest.param(8, dict(tp=2, pp=2, ep=4), marks=RARELY),
        pytest.param(8, dict(tp=1, cp=2, ep=2, num_optimizer_instances=2), marks=RARELY),
    ],
    ids=str,
)
def test_gradients_of_both_mesh_views_are_summed_and_updated(world: int, sizes: dict[str, Any]) -> None:
    for norm, errors in run_ranks(world, _step, sizes):
        assert norm == pytest.approx(TOTAL, rel=1e-12)
        assert errors and max(errors.values()) < 1e-9, errors


@pytest.mark.parametrize("sizes", [dict(ep=2), dict(etp=3), dict(ep=4, etp=3), dict(ep=12), dict(ep=3, etp=4)], ids=str)
@pytest.mark.parametrize("block", [1, 5, 128])
def test_two_sharded_dims_are_initialized_equally_under_every_layout(sizes: dict[str, Any], block: int) -> None:
    spec = ParamSpec(
        "e", (E, 2, F, D), mesh_view="expert", shards=((0, "ep"), (2, "etp")), init_block=block, init=Normal(0.5)
    )
    full = initialize_(torch.empty(spec.shape), spec, Mesh.single_process(), seed=7)
    assert 0.45 < full.std().item() < 0.55 and full.unique().numel() > 0.99 * full.numel()
    for rank in range(world := sizes.get("ep", 1) * sizes.get("etp", 1)):
        mesh = abstract_mesh(world, rank, **{"ep": 1, **sizes})
        part = initialize_(torch.empty(spec.local_shape(mesh.sizes)), spec, mesh, seed=7)
        assert torch.equal(part, box_view(full, spec.box(mesh.sizes, mesh.coordinates)))


def test_rank_initializes_only_its_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, real = [], torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: (drawn.append(shape), real(*shape, **options))[1])
    mesh, (spec,) = abstract_mesh(8, 5, ep=4, etp=2), [spec for spec in SPECS if spec.name == "experts.gate_up"]
    initialize_(torch.empty(spec.local_shape(mesh.sizes)), spec, mesh, seed=7)
    assert drawn == [(1, 2, F, D)] * (E // 4)
