"""Each collective against its definition, forward and backward, and its one-process twin."""

from __future__ import annotations

import datetime

import pytest
import torch
from ranks import run_ranks

from megalite.parallel import comm
from megalite.parallel.mesh import Mesh, build_mesh, rank_grid
from megalite.parallel.rng import initialize_
from megalite.parallel.spec import Normal, ParamSpec

WORLD = 2


def _mesh(tp: int, pp: int = 1) -> Mesh:
    return build_mesh(tp=tp, pp=pp, device=torch.device("cpu"), timeout=datetime.timedelta(seconds=20))


def _input(rank: int, rows: int) -> torch.Tensor:
    return torch.arange(rows * 3, dtype=torch.float64).reshape(rows, 3) * (rank + 1) + rank


def _collective(name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    tp = _mesh(WORLD).tp
    x = _input(tp.rank, rows).requires_grad_()
    y = getattr(comm, name)(x, tp)
    y.backward(_input(tp.rank + 5, y.shape[0]))
    return y.detach(), x.grad  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["copy_in", "reduce_out", "gather_seq", "scatter_seq"])
def test_collective_does_what_its_table_says(name: str) -> None:
    rows = 4
    xs = [_input(r, rows) for r in range(WORLD)]
    out_rows = {"gather_seq": rows * WORLD, "scatter_seq": rows // WORLD}.get(name, rows)
    gs = [_input(r + 5, out_rows) for r in range(WORLD)]
    actions = {
        "identity": lambda ts: ts,
        "all-reduce": lambda ts: [sum(ts)] * WORLD,
        "all-gather": lambda ts: [torch.cat(ts)] * WORLD,
        "reduce-scatter": lambda ts: list(sum(ts).chunk(WORLD)),
    }
    forward, backward = {
        "copy_in": ("identity", "all-reduce"),
        "reduce_out": ("all-reduce", "identity"),
        "gather_seq": ("all-gather", "reduce-scatter"),
        "scatter_seq": ("reduce-scatter", "all-gather"),
    }[name]
    for rank, (y, grad) in enumerate(run_ranks(WORLD, _collective, name, rows)):
        torch.testing.assert_close(y, actions[forward](xs)[rank], rtol=0, atol=0)
        torch.testing.assert_close(grad, actions[backward](gs)[rank], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["copy_in", "reduce_out", "gather_seq", "scatter_seq"])
def test_one_process_is_the_identity(name: str) -> None:
    x = _input(0, 4)
    assert getattr(comm, name)(x, Mesh.alone().tp) is x


def _positions(tp: int, pp: int) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    mesh = _mesh(tp, pp)
    axes = (mesh.pp, mesh.dp, mesh.tp, mesh.pp_back, mesh.ends)
    for axis in axes:
        assert (axis.group is None) == (axis.size == 1)
        assert axis.ranks[axis.rank] == torch.distributed.get_rank()
    return dict(mesh.position), {axis.name: axis.ranks for axis in axes if axis.size > 1}


def test_mesh_places_tp_innermost_and_pp_outermost() -> None:
    got = run_ranks(8, _positions, 2, 2)
    grid = rank_grid(8, tp=2, pp=2)
    for p in range(2):
        for d in range(2):
            for t in range(2):
                rank = grid[p][d][0][t]
                position, ranks = got[rank]
                assert position == {"pp": p, "dp": d, "cp": 0, "tp": t}
                assert ranks["tp"] == tuple(grid[p][d][0])
                assert ranks["dp"] == tuple(grid[p][i][0][t] for i in range(2))
                assert ranks["pp"] == ranks["pp_back"] == ranks["ends"] == tuple(grid[i][d][0][t] for i in range(2))


@pytest.mark.parametrize("shape,dim", [((300, 5), 0), ((6, 260), 1), ((2, 132, 3), 1)])
def test_initial_weights_do_not_depend_on_the_layout(shape: tuple[int, ...], dim: int) -> None:
    spec = ParamSpec("layers.3.mlp.down", shape, shards=((dim, "tp"),), init=Normal(0.5))
    whole = initialize_(torch.empty(shape), spec, Mesh.alone(), seed=7)
    assert 0.4 < whole.std().item() < 0.6
    parts = []
    for rank in range(2):
        mesh = Mesh(tp=type(Mesh.alone().tp)("tp", 2, rank, None, (0, 1)))
        parts.append(initialize_(torch.empty(spec.local_shape({"tp": 2})), spec, mesh, seed=7))
    assert torch.equal(torch.cat(parts, dim), whole)
    assert not torch.equal(whole, initialize_(torch.empty(shape), spec, Mesh.alone(), seed=8))
