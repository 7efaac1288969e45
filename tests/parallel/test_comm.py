"""What a layer and a message do with collectives; that each gives the right values: test_self_test.py."""

import datetime
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks, wait_for

from megalite.parallel import comm
from megalite.parallel.mesh import PLANNED, RECEIVE, Axis, Mesh, build_mesh
from megalite.parallel.rng import initialize_
from megalite.parallel.spec import ParamSpec

CPU = torch.device("cpu")


def _sent(rank: int, rows: int) -> torch.Tensor:
    return torch.arange(rows * 3, dtype=torch.float64).reshape(rows, 3) * (rank + 1) + rank


def _scatter_seq() -> tuple[torch.Tensor, torch.Tensor]:
    tp = build_mesh(tp=2, pp=1, device=CPU, timeout=datetime.timedelta(seconds=20)).tp
    x = _sent(tp.rank, 4).requires_grad_()
    y = comm.scatter_seq(x, tp)
    y.backward(_sent(tp.rank + 5, 2))
    return y.detach(), x.grad  # type: ignore[return-value]


def test_scatter_seq_is_a_reduce_scatter_whose_gradient_is_an_all_gather() -> None:
    parts, grad = (_sent(0, 4) + _sent(1, 4)).chunk(2), torch.cat([_sent(5, 2), _sent(6, 2)])
    for part, (y, dx) in zip(parts, run_ranks(2, _scatter_seq), strict=True):
        assert torch.equal(y, part) and torch.equal(dx, grad)


def test_alone_there_is_nothing_to_exchange() -> None:
    x, tp = _sent(0, 4), Mesh.alone().tp
    assert (
        x is comm.scatter_seq(x, tp) is comm.start_all_gather(x, tp).wait() is comm.start_reduce_scatter(x, tp).wait()
    )


def test_a_collective_over_an_axis_without_other_ranks_behind_it_is_an_error() -> None:
    """Sizes alone would make it the identity, and a sum of one summand would pass for the whole."""
    with pytest.raises(ValueError, match="axis tp of size 2 has no transport"):
        Axis("tp", 2)
    axis, x = Axis("tp", 2, 1, PLANNED), torch.ones(4)
    for collective in (
        *(comm.start_all_gather, comm.start_reduce_scatter, comm.scatter_seq, comm.all_reduce_, comm.broadcast_),
        lambda x, axis: comm.start_all_gather_into(x.repeat(2), x, axis),
        lambda x, axis: comm.start_reduce_scatter_into(x[:2], x, axis),
    ):
        with pytest.raises(RuntimeError, match="tp=2, which is only planned"):
            collective(x, axis)
    assert comm.all_reduce_(x, Axis("tp", 1, 0, PLANNED)) is x


def late_message(over: str) -> str:
    mesh = build_mesh(tp=1, pp=2, device=CPU, timeout=datetime.timedelta(minutes=1))
    mesh.set_timeout(datetime.timedelta(seconds=1))
    if mesh.pp.rank == 1:
        wait_for(Path(over))
        return ""
    with pytest.raises(RuntimeError) as error:
        comm.start_message(torch.zeros(4), mesh.pp, 1, RECEIVE).wait()
    Path(over).touch()
    return str(error.value)


def test_a_message_takes_no_longer_than_a_collective_may(tmp_path: Path) -> None:
    """gloo asks how long messages may take when it makes the group, and never again."""
    assert "Timed out waiting 1000ms" in run_ranks(2, late_message, str(tmp_path / "over"))[0]


@given(rows=st.integers(1, 300), padding=st.integers(0, 40), columns=st.integers(1, 33))
@settings(max_examples=60)
def test_initial_weights_do_not_depend_on_the_padding(rows: int, padding: int, columns: int) -> None:
    bare, padded = (ParamSpec("embedding.word", (n, columns), shards=((0, "tp"),)) for n in (rows, rows + padding))
    want, got = (initialize_(torch.empty(spec.shape), spec, Mesh.alone(), seed=7) for spec in (bare, padded))
    assert torch.equal(want, got[:rows])
