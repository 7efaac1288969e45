"""The simulated GPU acts like CUDA: the location of results, waits of the host, and mixed devices."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from simulated_gpu.simulator.device import SimulatedGpu, simulated
from simulated_gpu.simulator.trace import HostWait


@pytest.fixture
def gpu() -> Iterator[SimulatedGpu]:
    with simulated() as gpu:
        yield gpu


def line_of(fn: Callable[..., Any], after: int = 1) -> str:
    """Return file:line of the `after`-th line of a function, as a trace states it."""
    return f"tests/simulated_gpu/simulator/test_device.py:{fn.__code__.co_firstlineno + after}"


CREATED: dict[str, Callable[[torch.device], Tensor]] = {
    "a factory": lambda d: torch.zeros(3, device=d),
    "by name": lambda d: torch.arange(3, device="cuda"),
    "like": lambda d: torch.zeros_like(torch.ones(3, device=d)),
    "new": lambda d: torch.ones(3, device=d).new_full((2,), 1.0),
    "tensor": lambda d: torch.tensor([1, 2], device=d),
    "to": lambda d: torch.ones(3).to(d),
    "cuda": lambda d: torch.ones(3).cuda(),
    "a view": lambda d: torch.ones(4, 4, device=d).T[1:],
    "a result": lambda d: torch.ones(4, 4, device=d) @ torch.ones(4, 4, device=d),
    "with a number": lambda d: 1.0 - torch.ones(4, device=d),
    "with a scalar of the host": lambda d: torch.ones(4, device=d) * torch.tensor(2.0),
    "a module": lambda d: torch.nn.Linear(2, 2).to(d).weight,
    "a gradient": lambda d: torch.autograd.grad((x := torch.ones(4, device=d).requires_grad_()).sum(), x)[0],
}


@pytest.mark.parametrize("name", CREATED)
def test_gpu_tensors_stay_on_the_gpu(gpu: SimulatedGpu, name: str) -> None:
    x = CREATED[name](gpu.device)
    assert (x.device, x.is_cuda, x.is_cpu, x.get_device()) == (torch.device("cuda", 0), True, False, 0)
    assert not gpu.mixed
    assert x.cpu().device.type == "cpu" and not x.cpu().is_cuda


WAITS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "item": ("item", lambda x: x[0].item()),
    "tolist": ("tolist", lambda x: x.tolist()),
    "cpu": ("copy to the host", lambda x: x.cpu()),
    "copy back": ("copy to the host", lambda x: torch.empty(4).copy_(x)),
    "nonzero": ("nonzero", lambda x: x.nonzero()),
    "masked_select": ("masked_select", lambda x: x.masked_select(x > 0)),
    "a mask": ("index", lambda x: x[x > 0]),
    "by a mask": ("index_put_", lambda x: x.__setitem__(x > 0, x[:1])),
    "unique": ("_unique2", lambda x: x.unique()),
    "equal": ("equal", lambda x: torch.equal(x, x)),
    "repeat_interleave": ("repeat_interleave", lambda x: torch.repeat_interleave(x.long())),
    "tensor": ("copy to the GPU", lambda x: torch.tensor([1.0, 2.0], device=x.device)),
    "to the GPU": ("copy to the GPU", lambda x: torch.ones(3).to(x.device)),
    "set one": ("copy to the GPU", lambda x: x.__setitem__(0, 3.0)),
    "set from the host": ("copy to the GPU", lambda x: x.__setitem__(slice(0, 2), torch.ones(2))),
    "a list as an index": ("an index on the host", lambda x: x[[0, 2]]),
    "an index of the host": ("an index on the host", lambda x: x[torch.tensor([0, 2])]),
    "a number put": ("an index on the host", lambda x: x.__setitem__(x.long() * 0, 3.0)),
}


@pytest.mark.parametrize("name", WAITS)
def test_host_synchronization_is_recorded_with_its_line(gpu: SimulatedGpu, name: str) -> None:
    kind, work = WAITS[name]
    x = torch.ones(4, device=gpu.device)
    work(x)
    assert [(read.kind, read.where) for read in gpu.reads] == [(kind, line_of(work, 0))], gpu.reads
    assert any(isinstance(fact, HostWait) and fact.stream == 0 for fact in gpu.trace)
    assert not gpu.mixed


ASYNCHRONOUS: dict[str, Callable[[Tensor], Any]] = {
    "fill": lambda x: x.__setitem__(slice(0, 1), 3.0),
    "a masked number": lambda x: x.__setitem__(x > 0, 3.0),
    "an index of the GPU": lambda x: x[x.long()],
    "repeat_interleave": lambda x: x.repeat_interleave(2),
    "repeated by": lambda x: x.repeat_interleave(x.long(), output_size=4),
    "shape": lambda x: (x.shape, x.numel(), x.is_contiguous(), x.stride()),
    "full": lambda x: torch.full((), 3.0, device=x.device),
    "where of three": lambda x: torch.where(x > 0, x, 0.0),
    "pinned": lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True),
    "back to pinned": lambda x: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True),
    "an assertion": lambda x: torch._assert_async((x > 0).all(), "x"),  # pyright: ignore[reportPrivateImportUsage]
}


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_operations_do_not_synchronize(gpu: SimulatedGpu, name: str) -> None:
    ASYNCHRONOUS[name](torch.ones(4, device=gpu.device))
    assert not gpu.reads and not gpu.mixed


MIXED: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "add": ("add(gpu (4,), host (4,))", lambda x: x + torch.ones(4)),
    "a scalar of the GPU": ("add(host (4,), gpu ())", lambda x: torch.ones(4) + x[0]),
    "matmul": ("mm(gpu (2, 2), host (2, 2))", lambda x: x.view(2, 2) @ torch.ones(2, 2)),
    "embedding": ("embedding(gpu (2, 2), host (1,))", lambda x: torch.embedding(x.view(2, 2), torch.tensor([0]))),
    "out": ("add(gpu (4,), gpu (4,), host (4,))", lambda x: torch.add(x, x, out=torch.empty(4))),
    "pinned": ("add(gpu (4,), pinned (4,))", lambda x: x + torch.ones(4).pin_memory()),
    "to the GPU": ("host to gpu", lambda x: torch.ones(4).to(x.device, non_blocking=True)),
    "back": ("gpu to host", lambda x: torch.empty(4).copy_(x, non_blocking=True)),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_operation_is_recorded_with_its_line(gpu: SimulatedGpu, name: str) -> None:
    what, work = MIXED[name]
    work(torch.ones(4, device=gpu.device))
    assert [what in mixed.what for mixed in gpu.mixed] == [True], gpu.mixed
    assert gpu.mixed[0].where == line_of(work, 0)


def test_gpu_tensor_has_no_numpy(gpu: SimulatedGpu) -> None:
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        torch.ones(3, device=gpu.device).numpy()


def test_dynamo_is_restored() -> None:
    """If Dynamo kept its table of the replaced functions, no factory could be traced in this process."""
    with simulated():
        from torch._dynamo.trace_rules import get_torch_obj_rule_map

        get_torch_obj_rule_map()
    ones = torch.compile(lambda x: x + torch.arange(2), backend="eager", fullgraph=True)(torch.ones(2))
    assert ones.tolist() == [1.0, 2.0]
