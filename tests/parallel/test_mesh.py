"""The dense and the expert view of the ranks: coordinates, neighbors, groups, thousands of ranks."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from megalite.parallel.comm import all_reduce_, start_all_gather
from megalite.parallel.cpu.shared_memory import CollectiveBackend
from megalite.parallel.mesh import AXES, Mesh, abstract_mesh, build_mesh

CPU = torch.device("cpu")
DENSE, EXPERT = ("pp", "dp", "cp", "tp"), ("pp", "edp", "ep", "etp")
WIDE = ("pp", "dp_replicate", "dp_shard", "tp")
EXPERT_WIDE = ("pp", "edp_replicate", "edp_shard", "ep", "etp")


@st.composite
def shapes(draw: st.DrawFn, max_ranks: int = 48, experts: int = 0) -> tuple[int, dict[str, Any]]:
    """Draw (world, sizes) of at most `max_ranks` ranks.

    Args:
        draw: The function of hypothesis.
        max_ranks: The maximum number of ranks.
        experts: ep and etp divide this number, which is ignored if it is 0.
    """
    small = st.integers(1, 3)
    pp, dp, cp, tp = (draw(small) for _ in range(4))
    dp = min(dp, max_ranks // (pp * cp * tp)) or 1
    stage, data = dp * cp * tp, dp * cp
    ep = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == experts % n == 0]))
    etp = draw(st.sampled_from([n for n in range(1, stage // ep + 1) if stage // ep % n == experts % n == 0]))
    fits = [n for n in range(1, data + 1) if data % n == 0 and stage // (ep * etp) % n == 0]
    instances, outermost = draw(st.sampled_from([*fits, None])), draw(st.booleans())
    return pp * stage, dict(
        tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, num_optimizer_instances=instances, dp_outermost=outermost
    )


def _meshes(world: int, sizes: dict[str, Any]) -> Iterator[Mesh]:
    return (abstract_mesh(world, rank, **sizes) for rank in range(world))


@settings(max_examples=40)
@given(shapes())
def test_rank_coordinates_equal_the_formulas(shape: tuple[int, dict[str, Any]]) -> None:
    world, sizes = shape
    for rank, mesh in enumerate(_meshes(world, sizes)):
        size_of, coordinate = mesh.sizes, mesh.coordinates
        assert all(size_of[name] == sizes[name] for name in ("tp", "pp", "cp", "ep", "etp"))
        block = (coordinate["dp"] * size_of["cp"] + coordinate["cp"]) * size_of["tp"] + coordinate["tp"]
        outer, inner, size = (
            (coordinate["dp"], coordinate["pp"], size_of["pp"])
            if sizes["dp_outermost"]
            else (coordinate["pp"], coordinate["dp"], size_of["dp"])
        )
        assert rank == ((outer * size + inner) * size_of["cp"] + coordinate["cp"]) * size_of["tp"] + coordinate["tp"]
        assert block == (coordinate["edp"] * size_of["ep"] + coordinate["ep"]) * size_of["etp"] + coordinate["etp"]
        assert (
            coordinate["dp_cp"]
            == coordinate["dp"] * size_of["cp"] + coordinate["cp"]
            == coordinate["dp_replicate"] * size_of["dp_shard"] + coordinate["dp_shard"]
        )
        assert coordinate["edp"] == coordinate["edp_replicate"] * size_of["edp_shard"] + coordinate["edp_shard"]
        instances = sizes["num_optimizer_instances"] or size_of["dp_cp"]
        assert (size_of["dp_cp"], size_of["dp_replicate"]) == (size_of["dp"] * size_of["cp"], instances)
        assert size_of["edp_replicate"] == (sizes["num_optimizer_instances"] or size_of["edp"])


@settings(max_examples=40)
@given(shapes())
def test_axis_ranks_differ_only_in_that_axis(shape: tuple[int, dict[str, Any]]) -> None:
    """The ranks of an axis have equal coordinates on all other axes of its view, and are ordered by their own."""
    world, sizes = shape
    meshes = list(_meshes(world, sizes))
    for view in (DENSE, EXPERT, WIDE, EXPERT_WIDE, ("pp", "dp_cp", "tp")):
        coordinates = [tuple(mesh.coordinates[name] for name in view) for mesh in meshes]
        assert len(set(coordinates)) == world
        for i, name in enumerate(view):
            for mesh, coordinate in zip(meshes, coordinates, strict=True):
                neighbors = {
                    other[i]: r
                    for r, other in enumerate(coordinates)
                    if other[:i] + other[i + 1 :] == coordinate[:i] + coordinate[i + 1 :]
                }
                axis = mesh.axis(name)
                assert axis.ranks == tuple(neighbors[j] for j in range(axis.size)), (name, coordinate)
    for mesh in meshes:
        ends = [mesh.pp.ranks[0], mesh.pp.ranks[-1]]
        assert mesh.pp_grad.ranks == mesh.pp.ranks
        assert list(mesh.tied_embedding.ranks) == (
            ends if mesh.pp.size > 1 and mesh.world.rank in ends else [mesh.world.rank]
        )


def _sums(sizes: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], dict[str, float], dict[str, str]]:
    """Return for each axis: its ranks, the sum of 2^rank over its group, and the axis that has the group."""
    mesh = build_mesh(device=CPU, **sizes)
    names = sorted({*DENSE, *EXPERT, *WIDE, *EXPERT_WIDE, "dp_cp", "ep_etp", "tied_embedding", "pp_grad"})
    shared = {name: mesh.axis(name) for name in names if mesh.axis(name).size > 1}
    number = torch.tensor(float(2**mesh.world.rank))
    sums = {name: float(all_reduce_(number.clone(), axis)) for name, axis in shared.items()}
    assert {id(axis) for axis in shared.values()} | {id(mesh.world)} == {id(axis) for axis in mesh.active_axes}
    return {name: axis.ranks for name, axis in shared.items()}, sums, {n: axis.name for n, axis in shared.items()}


@pytest.mark.parametrize(
    ("sizes", "shared_groups"),
    [
        (
            dict(tp=2, cp=2, ep=2, etp=2),
            {"etp": "tp", "edp": "dp", "ep": "cp", "dp_shard": "dp_cp", "ep_etp": "ep_etp"},
        ),
        (dict(tp=2, ep=4, num_optimizer_instances=2), {"dp_cp": "dp"}),
        (
            dict(pp=2, tp=2, ep=2, num_optimizer_instances=None),
            {"dp_cp": "dp", "dp_replicate": "dp", "ep": "tp", "edp": "dp"},
        ),
    ],
    ids=["experts as tp x cp", "over tp and dp, two instances", "no shards"],
)
def test_equal_ranks_share_one_group(sizes: dict[str, Any], shared_groups: dict[str, str]) -> None:
    for ranks, sums, names in run_ranks(8, _sums, sizes):
        assert ranks and sums == {name: float(sum(2**r for r in members)) for name, members in ranks.items()}
        assert {name: names[name] for name in shared_groups} == shared_groups
        # equal ranks share one group, except the pipeline's messages and its ends, which have their own
        for name in ranks.keys() - {"pp_grad", "tied_embedding"}:
            assert all(
                names[n] == names[name] for n in ranks.keys() - {"pp_grad", "tied_embedding"} if ranks[n] == ranks[name]
            )
        assert all(names[name] == name for name in ("pp_grad", "tied_embedding") if name in ranks)


def _without_experts() -> tuple[set[str], int, str]:
    mesh = build_mesh(tp=2, device=CPU)
    with pytest.raises(RuntimeError) as excinfo:
        all_reduce_(torch.ones(1), mesh.edp)
    return {axis.name for axis in mesh.active_axes}, mesh.sizes["edp"], str(excinfo.value)


def test_expert_axes_without_experts_have_no_groups() -> None:
    for names, size, text in run_ranks(4, _without_experts):
        assert (names, size) == ({"dp", "tp", "world"}, 4)
        assert text == "a collective over edp=4, which is only planned; use build_mesh"


def test_printed_mesh_shows_axes_larger_than_1() -> None:
    assert repr(Mesh.single_process()) == "Mesh(device='cpu', rank 0 of 1)"
    text = "Mesh(pp=2, dp=2, tp=2, ep=4, device='cpu', rank 5 (pp 1, dp 0, tp 1) of 8)"
    assert repr(abstract_mesh(8, 5, tp=2, pp=2, ep=4)) == text


def test_collectives_of_an_abstract_mesh_go_to_its_recorder() -> None:
    calls: list[tuple[str, int]] = []

    class Recorder(CollectiveBackend):
        def __init__(self, axis: str):
            self.group, self.axis = self, axis

        def start_all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Any:
            calls.append((self.axis, out.numel()))
            return SimpleNamespace(wait=lambda: None)

        start_reduce_scatter = start_all_to_all = start_all_gather  # type: ignore[assignment]

    mesh, plan = (abstract_mesh(24, 5, recorder, tp=2, cp=3, pp=2, ep=6) for recorder in (Recorder, None))
    assert (mesh.sizes, mesh.coordinates) == (plan.sizes, plan.coordinates)
    for name in AXES:
        start_all_gather(torch.ones(5), mesh.axis(name)).wait()
    assert calls == [(name, 5 * size) for name, size in mesh.sizes.items() if size > 1]
    with pytest.raises(RuntimeError, match="a collective over tp=2, which is only planned"):
        start_all_gather(torch.ones(5), plan.tp)


def test_unknown_axis_is_refused() -> None:
    with pytest.raises(TypeError, match="a mesh has no dp, ttp"):
        abstract_mesh(4, 0, ttp=2, dp=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (dict(tp=3), "world size 8 is not a multiple of tp 3 x pp 1 x cp 1"),
        (dict(pp=2, ep=8), "ep 8 x etp 1 does not divide the 4 ranks of a stage"),
        (dict(tp=2, num_optimizer_instances=3), "3 instances of the optimizer do not divide dp_cp 4"),
        (dict(ep=4, num_optimizer_instances=4), "4 instances of the optimizer do not divide edp 2"),
    ],
)
def test_indivisible_world_is_refused(sizes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        abstract_mesh(8, 0, **sizes)


@pytest.mark.parametrize(
    "sizes", [dict(tp=8, pp=16, cp=2, ep=8), dict(tp=2, cp=2, ep=64, etp=1, num_optimizer_instances=4)], ids=str
)
def test_each_group_of_thousands_of_ranks_is_created_once(
    sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, rank, calls, original = 16_384, 11_111, [], dist.new_group
    monkeypatch.setattr(
        dist, "new_group", lambda ranks, **options: (calls.append((options, ranks)), original(ranks, **options))[1]
    )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh = build_mesh(device=CPU, shared_memory=False, **sizes)
        assert mesh.describe().startswith(f"rank {rank} (")
        plan = abstract_mesh(world, rank, **sizes)
        assert all(axis.ranks == plan.axis(axis.name).ranks for axis in mesh.active_axes if axis is not mesh.world)
    finally:
        dist.destroy_process_group()
    own = [options["group_desc"] for options, ranks in calls if rank in ranks]
    assert sorted(own) == sorted(axis.name for axis in mesh.active_axes if axis.size < world or axis.name != "world")
    shared = [tuple(ranks) for options, ranks in calls if options["group_desc"] not in ("pp_grad", "tied_embedding")]
    assert len(shared) == len(set(shared))
