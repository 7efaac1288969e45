"""Overlap of tensor-parallel collectives with matmuls, from the recorded order of events on two ranks."""

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.nn import linear, loss
from megalite.nn.parameter import ParamFactory
from megalite.optim.zero.sync import BucketSync
from megalite.parallel import comm
from megalite.parallel.mesh import build_mesh
from megalite.parallel.spec import ParamSpec

S, B, D = 6, 1, 8
N = S * B
ROWS = (10, 14)  # of two weights on each rank; no two shapes below are equal


class Matmuls(TorchDispatchMode):
    def __init__(self, events: list[str], names: dict[tuple[int, ...], str]):
        super().__init__()
        self.events, self.names = events, names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            self.events.append(self.names[tuple(out.shape)])
        return out


def _watched(start: Any, name: str, events: list[str]) -> Any:
    """Return a `start_all_gather` or `start_reduce_scatter` that records its calls and the waits for its results."""

    class Watched(comm.Pending):
        def __init__(self, pending: comm.Pending):
            self.pending = pending

        def wait(self) -> Tensor:
            events.append(f"{name} waited for")
            return self.pending.wait()

    def call(x: Tensor, axis: Any) -> Any:
        events.append(f"{name} starts")
        pending = start(x, axis)
        assert pending._work is not None  # the real collective is asynchronous
        return Watched(pending)

    return call


def _events(buffered: bool) -> tuple[list[str], list[str], list[str]]:
    """Return the events of column_parallel_linear's and row_parallel_linear's backward, and of the loss's forward."""
    mesh = build_mesh(tp=2, pp=1, device=torch.device("cpu"))
    events: list[str] = []
    for module in (linear, loss):
        for name in ("all_gather", "reduce_scatter"):
            setattr(module, f"start_{name}", _watched(getattr(comm, f"start_{name}"), name, events))
    make, model = ParamFactory(mesh, torch.float32, seed=1), nn.ParameterList()
    for i, rows in enumerate(ROWS):
        model.append(make(ParamSpec(f"w{i}", (2 * rows, D), shards=((0, "tp"),))))
    down, head = make(ParamSpec("down", (D, 24), shards=((1, "tp"),))), make(ParamSpec("h", (36, D), ((0, "tp"),)))
    model.extend([down, head])
    sync = BucketSync([model], mesh) if buffered else None
    names = {(N, D): "dx", **{(rows, D): "dW" for rows in (*ROWS, 18)}, (D, 12): "dW", (N, 12): "dx", (N, 18): "logits"}

    x_sBD = torch.randn(S // 2, B, D, requires_grad=True)
    first_output, second_output = linear.column_parallel_linear(x_sBD, list(model)[:2], mesh.tp)
    y_sBD = linear.row_parallel_linear(torch.randn(S, B, 12, requires_grad=True), down, mesh.tp)
    backward_events = []
    for output in (first_output.sum() + second_output.sum(), y_sBD.sum()):
        events.clear()
        with Matmuls(events, names):
            output.backward()
        backward_events.append([*events])
    events.clear()
    with Matmuls(events, names):
        loss.linear_cross_entropy(x_sBD, head, torch.zeros(S, B, dtype=torch.int64), None, mesh.tp, 36, loss_grad=1.0)
    assert (model[0].grad is None) == (sync is not None)
    return backward_events[0], backward_events[1], [*events]


@pytest.mark.parametrize("buffered", [True, False])
def test_collectives_overlap_matmuls(buffered: bool) -> None:
    for column, row, head in run_ranks(2, _events, buffered):
        assert column == [
            "all_gather starts",  # of the input, which only dW needs
            "dx",
            "dx",
            "reduce_scatter starts",  # of dx
            "all_gather waited for",
            "dW",
            "dW",
            "reduce_scatter waited for",
        ]
        assert row == ["all_gather starts", "all_gather waited for", "dx", "dW"]  # both need the full dy
        begin = head.index("reduce_scatter starts")
        assert head[begin - 1 :] == ["dx", "reduce_scatter starts", "dW", "reduce_scatter waited for"]
