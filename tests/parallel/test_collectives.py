"""The self-test of the collectives before the first step, which names a wrong one with its group.

Other tests cover collectives over axes without a group, messages that time out, and initial weights.
"""

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks, wait_for_file

from megalite.common.fault_injection import FaultInjector
from megalite.launch.rank_info import LaunchError
from megalite.parallel import comm, self_test
from megalite.parallel.cpu.shared_memory import SharedMemoryBackend
from megalite.parallel.mesh import ABSTRACT, RECEIVE, Axis, Mesh, build_mesh
from megalite.parallel.rng import initialize_
from megalite.parallel.spec import ParamSpec


def _mesh(tp: int, pp: int) -> Mesh:
    return build_mesh(tp=tp, pp=pp, device=torch.device("cpu"), timeout=datetime.timedelta(seconds=30))


def _self_test_error(mesh: Mesh) -> str:
    try:
        self_test.check_collectives(mesh)
    except LaunchError as error:
        return str(error)
    return ""


def _inject_wrong_value(case: str, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one operation give wrong values on rank 1."""
    if case == "memory":
        read = SharedMemoryBackend.start_all_gather

        def wrong_all_gather(self: SharedMemoryBackend, out: torch.Tensor, x: torch.Tensor) -> Any:
            transfer = read(self, out, x)
            transfer.wait()
            out[3] += 1
            return comm.Pending(out)

        monkeypatch.setattr(SharedMemoryBackend, "start_all_gather", wrong_all_gather)
    elif case == "all_reduce":
        original_all_reduce = dist.all_reduce

        def all_reduce(x: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            work = original_all_reduce(x, *args, group=group, **kwargs)
            if x.dtype == torch.int32 and group is mesh.tp.group:
                x[5] += 2
            return work

        monkeypatch.setattr(dist, "all_reduce", all_reduce)
    elif case == "broadcast":
        original_broadcast = dist.broadcast
        wrong_broadcast = lambda x, src, group: original_broadcast(x if src == 1 else x.clone(), src, group)  # noqa: E731
        monkeypatch.setattr(dist, "broadcast", wrong_broadcast)
    elif case == "message":
        original_isend = dist.isend
        monkeypatch.setattr(dist, "isend", lambda x, to, **options: original_isend(x * 2, to, **options))
    else:  # the sum omits rank 1's part
        monkeypatch.setattr(self_test, "inject_fault", lambda point, rank, step, x: x.zero_())


def _all_cases() -> dict[str, str]:
    mesh, errors = _mesh(tp=2, pp=2), {}
    errors["sound"] = _self_test_error(mesh)
    for case in EXPECTED:
        with pytest.MonkeyPatch.context() as monkeypatch:
            if mesh.world.rank == 1:
                _inject_wrong_value(case, mesh, monkeypatch)
            errors[case] = _self_test_error(mesh)
    assert mesh.tp.custom_backend is not None and mesh.dp.custom_backend is not None or mesh.dp.size == 1
    return errors


EXPECTED = {  # case -> (rank, part of its error message)
    "memory": [(1, "all_gather over tp (ranks [0, 1]): on rank 1 1 of 1024 values are wrong, in rank 0's part, the first")],
    "all_reduce": [(1, "all_reduce over tp (ranks [0, 1]): on rank 1 1 of 1024 values are wrong, the first is ")],
    "broadcast": [(1, "broadcast of rank 0 over tp (ranks [0, 1]): on rank 1 1024 of 1024")],
    "message": [(3, f"message from rank 1 over {pp} (ranks [1, 3]): on rank 3 1024 of 1024") for pp in ("pp", "pp_grad")],
    "left out": [(0, "all_gather over tp (ranks [0, 1]): on rank 0 512 of 1024 values are wrong, in rank 1's part")],
}  # fmt: skip


def test_wrong_value_is_detected_on_every_axis() -> None:
    errors = run_ranks(4, _all_cases)
    assert [rank_errors["sound"] for rank_errors in errors] == [""] * 4
    for case, messages in EXPECTED.items():
        assert (
            errors[0][case].startswith("collectives give wrong values:\n")
            and len({rank_errors[case] for rank_errors in errors}) == 1
        ), case
        assert all(message in errors[rank][case] for rank, message in messages), case
    assert "is 443922, not 443921" in errors[1]["memory"] and "reduce_scatter over tp" in errors[0]["left out"]


def _all_to_all_errors() -> list[str]:
    errors = []
    for sizes in (dict(tp=2, pp=2), dict(tp=2, pp=1), dict(tp=1, pp=1)):  # the ranks of tp, all, all of dp
        mesh = build_mesh(**sizes, device=torch.device("cpu"), timeout=datetime.timedelta(seconds=30), dp_cp_tp=True)
        owner, name, x_index = (
            (SharedMemoryBackend, "start_all_to_all", 2)
            if mesh.dp_cp_tp.custom_backend
            else (dist, "all_to_all_single", 1)
        )
        original = getattr(owner, name)
        with pytest.MonkeyPatch.context() as monkeypatch:
            errors.append(_self_test_error(mesh))
            if dist.get_rank() == 1:

                def wrong_all_to_all(
                    *args: Any, original: Any = original, x_index: int = x_index, **options: Any
                ) -> Any:  # x in reverse
                    return original(*args[:x_index], args[x_index].flip(0), *args[x_index + 1 :], **options)

                monkeypatch.setattr(owner, name, wrong_all_to_all)
            errors.append(_self_test_error(mesh))
    return errors


def test_wrong_all_to_all_is_detected() -> None:
    for errors in run_ranks(4, _all_to_all_errors):
        assert errors[::2] == [""] * 3
        assert (
            "all_to_all over tp (ranks [0, 1]): on rank 0 512 of 1024 values are wrong, in rank 1's part" in errors[1]
        )
        assert all("all_to_all over" in error and "(ranks [0, 1, 2, 3]): on rank 0" in error for error in errors[3::2])


def test_single_rank_has_nothing_to_check() -> None:
    self_test.check_collectives(Mesh.single_process())


def _odd_ring_errors() -> list[str]:
    errors = [_self_test_error(_mesh(tp, pp)) for tp, pp in ((1, 1), (1, 3), (3, 1))]
    self_test.inject_fault = FaultInjector({"MEGALITE_FAULT": "init.collectives:1:0:bitflip"})
    return [*errors, _self_test_error(_mesh(1, 3))]


def test_odd_ring_detects_one_bit() -> None:
    for *no_errors, error in run_ranks(3, _odd_ring_errors):
        assert no_errors == ["", "", ""]
        assert "all_reduce over world (ranks [0, 1, 2]): on rank 0 1 of 1023 values are wrong, the first is" in error


def test_collective_over_an_axis_without_group_is_an_error() -> None:
    """From the sizes alone it would be the identity, and one rank's summand would pass for the sum."""
    with pytest.raises(ValueError, match="axis tp of size 2 has no backend"):
        Axis("tp", 2)
    axis, x = Axis("tp", 2, 1, ABSTRACT), torch.ones(4)
    for collective in (
        *(
            comm.start_all_gather,
            comm.start_reduce_scatter,
            comm.reduce_scatter_sequence,
            comm.all_reduce_,
            comm.broadcast_,
        ),
        lambda x, axis: comm.start_all_gather_into(x.repeat(2), x, axis),
        lambda x, axis: comm.start_reduce_scatter_into(x[:2], x, axis),
    ):
        with pytest.raises(RuntimeError, match="tp=2, which is only planned"):
            collective(x, axis)
    assert comm.all_reduce_(x, Axis("tp", 1, 0, ABSTRACT)) is x


def timeout_message(done_path: str) -> str:
    mesh = _mesh(tp=1, pp=2)
    mesh.set_timeout(datetime.timedelta(seconds=1))
    if mesh.pp.rank == 1:
        wait_for_file(Path(done_path))
        return ""
    with pytest.raises(RuntimeError) as excinfo:
        comm.start_p2p(torch.zeros(4), mesh.pp, 1, RECEIVE).wait()
    Path(done_path).touch()
    return str(excinfo.value)


def test_message_has_the_timeout_of_collectives(tmp_path: Path) -> None:
    """The group is created again, since gloo reads the timeout of messages only when it creates a group."""
    assert "Timed out waiting 1000ms" in run_ranks(2, timeout_message, str(tmp_path / "over"))[0]


@given(rows=st.integers(1, 300), padding=st.integers(0, 40), columns=st.integers(1, 33))
@settings(max_examples=60)
def test_initial_weights_are_independent_of_padding(rows: int, padding: int, columns: int) -> None:
    unpadded, padded = (ParamSpec("embedding.word", (n, columns), shards=((0, "tp"),)) for n in (rows, rows + padding))
    expected, actual = (
        initialize_(torch.empty(spec.shape), spec, Mesh.single_process(), seed=7) for spec in (unpadded, padded)
    )
    assert torch.equal(expected, actual[:rows])
