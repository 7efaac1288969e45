"""The simulated card does what CUDA does: where results are, what the host waits for, what may not meet, in which order."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from card.simulator.device import Card, simulated
from card.simulator.trace import Alloc, Free, HostAccess, HostWait, Launch, RecordStream
from megalite.kernels import cross_entropy


@pytest.fixture
def card() -> Iterator[Card]:
    with simulated() as card:
        yield card


def line_of(fn: Callable[..., Any], after: int = 1) -> str:
    """The place of the `after`-th line of a function, as a trace names it."""
    return f"tests/card/simulator/test_device.py:{fn.__code__.co_firstlineno + after}"


MADE: dict[str, Callable[[torch.device], Tensor]] = {
    "a factory": lambda d: torch.zeros(3, device=d),
    "by name": lambda d: torch.arange(3, device="cuda"),
    "by number": lambda d: torch.empty(3, device=0),
    "like": lambda d: torch.zeros_like(torch.ones(3, device=d)),
    "new": lambda d: torch.ones(3, device=d).new_full((2,), 1.0),
    "tensor": lambda d: torch.tensor([1, 2], device=d),
    "to": lambda d: torch.ones(3).to(d),
    "to with dtype": lambda d: torch.ones(3).to(d, torch.float64),
    "to like": lambda d: torch.ones(3).to(torch.ones((), device=d)),
    "cuda": lambda d: torch.ones(3).cuda(),
    "a view": lambda d: torch.ones(4, 4, device=d).T[1:],
    "a result": lambda d: torch.ones(4, 4, device=d) @ torch.ones(4, 4, device=d),
    "a cast": lambda d: torch.ones(4, device=d).to(torch.bfloat16),
    "with a number": lambda d: 1.0 - torch.ones(4, device=d),
    "with a scalar of the host": lambda d: torch.ones(4, device=d) * torch.tensor(2.0),
    "a module": lambda d: torch.nn.Linear(2, 2).to(d).weight,
    "a module made there": lambda d: torch.nn.Linear(2, 2, device=d).bias,
    "detached": lambda d: torch.ones(4, device=d).requires_grad_().detach(),
    "a gradient": lambda d: torch.autograd.grad((x := torch.ones(4, device=d).requires_grad_()).sum(), x)[0],
    "data": lambda d: torch.nn.Parameter(torch.ones(4, device=d)).data,
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_there_is_there_and_nothing_is_mixed(card: Card, name: str) -> None:
    x = MADE[name](card.device)
    assert (x.device, x.is_cuda, x.is_cpu, x.get_device()) == (torch.device("cuda", 0), True, False, 0)
    assert not card.mixed
    assert x.cpu().device.type == "cpu" and not x.cpu().is_cuda


def test_the_host_is_where_nothing_else_is_said(card: Card) -> None:
    there = torch.ones(3, device=card.device)
    for x in (torch.zeros(3), torch.tensor([1.0]), torch.from_numpy(there.cpu().numpy()), there.to("cpu"), there.cpu()):
        assert x.device.type == "cpu" and not x.is_cuda
    assert torch.zeros_like(there, device="cpu").device.type == "cpu"
    assert there.new_zeros(2, device="cpu").device.type == "cpu"
    assert torch.zeros(3, device="meta").to("meta").device.type == "meta"


def test_all_is_as_before_when_it_ends() -> None:
    before = torch.Tensor.device, torch.zeros, torch.Tensor.to, threading.Thread.run, torch.cuda
    with simulated() as card:
        x = torch.zeros(3, device="cuda")
        made = len(card.trace)
    assert x.device.type == "cpu" and len(card.trace) == made
    assert before == (torch.Tensor.device, torch.zeros, torch.Tensor.to, threading.Thread.run, torch.cuda)
    assert "to" not in torch.Tensor.__dict__ and "device" not in torch.Tensor.__dict__
    x = x + 1
    del x
    assert len(card.trace) == made


WAITS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "item": ("item", lambda x: x[0].item()),
    "float": ("item", lambda x: float(x[0])),
    "int": ("item", lambda x: int(x[0])),
    "bool": ("item", lambda x: bool(x[0] > 0)),
    "if": ("item", lambda x: 1 if (x > 0).any() else 0),
    "tolist": ("tolist", lambda x: x.tolist()),
    "cpu": ("copy to the host", lambda x: x.cpu()),
    "to cpu": ("copy to the host", lambda x: x.to("cpu")),
    "to cpu and cast": ("copy to the host", lambda x: x.to("cpu", torch.float64)),
    "copy back": ("copy to the host", lambda x: torch.empty(4).copy_(x)),
    "nonzero": ("nonzero", lambda x: x.nonzero()),
    "where": ("nonzero", lambda x: torch.where(x > 0)),
    "masked_select": ("masked_select", lambda x: x.masked_select(x > 0)),
    "a mask": ("index", lambda x: x[x > 0]),
    "by a mask": ("index_put_", lambda x: x.__setitem__(x > 0, x[:1])),
    "unique": ("_unique2", lambda x: x.unique()),
    "equal": ("equal", lambda x: torch.equal(x, x)),
    "allclose": ("allclose", lambda x: torch.allclose(x, x)),
    "repeat_interleave": ("repeat_interleave", lambda x: torch.repeat_interleave(x.long())),
    "repeated by": ("repeat_interleave", lambda x: x.repeat_interleave(x.long())),
    "tensor": ("copy to the card", lambda x: torch.tensor([1.0, 2.0], device=x.device)),
    "to the card": ("copy to the card", lambda x: torch.ones(3).to(x.device)),
    "set one": ("copy to the card", lambda x: x.__setitem__(0, 3.0)),
    "set from the host": ("copy to the card", lambda x: x.__setitem__(slice(0, 2), torch.ones(2))),
    "a list as an index": ("an index on the host", lambda x: x[[0, 2]]),
    "an index of the host": ("an index on the host", lambda x: x[torch.tensor([0, 2])]),
    "a number put": ("an index on the host", lambda x: x.__setitem__(x.long() * 0, 3.0)),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_the_host_waits_for_is_noted_with_its_line(card: Card, name: str) -> None:
    kind, work = WAITS[name]
    x = torch.ones(4, device=card.device)
    work(x)
    assert [(read.kind, read.where) for read in card.reads] == [(kind, line_of(work, 0))], card.reads
    assert any(isinstance(fact, HostWait) and fact.stream == 0 for fact in card.trace)
    assert not card.mixed


FREE: dict[str, Callable[[Tensor], Any]] = {
    "fill": lambda x: x.__setitem__(slice(0, 1), 3.0),
    "a masked number": lambda x: x.__setitem__(x > 0, 3.0),
    "a slice": lambda x: x.__setitem__(slice(0, 2), x[2:]),
    "an index of the card": lambda x: x[x.long()],
    "repeat_interleave": lambda x: x.repeat_interleave(2),
    "repeated by": lambda x: x.repeat_interleave(x.long(), output_size=4),
    "iterate": lambda x: [y + 1 for y in x],
    "shape": lambda x: (x.shape, x.numel(), x.is_contiguous(), x.stride()),
    "full": lambda x: torch.full((), 3.0, device=x.device),
    "where of three": lambda x: torch.where(x > 0, x, 0.0),
    "pinned": lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True),
    "back to pinned": lambda x: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True),
    "an assertion": lambda x: torch._assert_async((x > 0).all(), "x"),  # pyright: ignore[reportPrivateImportUsage]
}


@pytest.mark.parametrize("name", FREE)
def test_what_the_host_does_not_wait_for(card: Card, name: str) -> None:
    FREE[name](torch.ones(4, device=card.device))
    assert not card.reads and not card.mixed


MIXED: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "add": ("add(card (4,), host (4,))", lambda x: x + torch.ones(4)),
    "host first": ("add(host (4,), card (4,))", lambda x: torch.ones(4) + x),
    "a scalar of the card": ("add(host (4,), card ())", lambda x: torch.ones(4) + x[0]),
    "matmul": ("mm(card (2, 2), host (2, 2))", lambda x: x.view(2, 2) @ torch.ones(2, 2)),
    "embedding": ("embedding(card (2, 2), host (1,))", lambda x: torch.embedding(x.view(2, 2), torch.tensor([0]))),
    "cat": ("cat(card (4,), host (1,))", lambda x: torch.cat([x, torch.ones(1)])),
    "out": ("add(card (4,), card (4,), host (4,))", lambda x: torch.add(x, x, out=torch.empty(4))),
    "pinned": ("add(card (4,), pinned (4,))", lambda x: x + torch.ones(4).pin_memory()),
    "to the card": ("host to card", lambda x: torch.ones(4).to(x.device, non_blocking=True)),
    "back": ("card to host", lambda x: torch.empty(4).copy_(x, non_blocking=True)),
}


@pytest.mark.parametrize("name", MIXED)
def test_host_and_card_in_one_operation_are_noted_with_their_line(card: Card, name: str) -> None:
    what, work = MIXED[name]
    work(torch.ones(4, device=card.device))
    assert [what in mixed.what for mixed in card.mixed] == [True], card.mixed
    assert card.mixed[0].where == line_of(work, 0)


def test_a_tensor_of_the_card_has_no_numpy(card: Card) -> None:
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        torch.ones(3, device=card.device).numpy()


class Twice(torch.autograd.Function):
    read = False
    devices: list[torch.device] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        Twice.devices.append(dy.device)
        bool((dy > 0).all())
        return dy * torch.full((), 2.0, device=dy.device)


def test_backward_sees_the_card_too(card: Card) -> None:
    x = torch.ones(4, device=card.device).requires_grad_()
    Twice.devices.clear()
    Twice.apply(x).sum().backward()
    assert Twice.devices == [card.device] and x.grad is not None and x.grad.is_cuda
    assert [(r.phase, r.where) for r in card.reads] == [("backward", line_of(Twice.backward, 3))]


def test_a_gradient_that_did_not_come_is_no_stranger(card: Card) -> None:
    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x * 3

        @staticmethod
        def backward(ctx: Any, da: Tensor, db: Tensor) -> Tensor:  # type: ignore[override]
            return da + db  # db is zeros that C++ made

    x = torch.ones(4, device=card.device).requires_grad_()
    Two.apply(x)[0].sum().backward()
    assert not card.mixed


def test_threads_are_in_it(card: Card) -> None:
    def work() -> None:
        found.append(torch.ones(3, device="cuda").sum().item())

    found: list[float] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [3.0] and [r.where for r in card.reads] == [line_of(work)]


def test_memory_is_freed_with_its_last_view_and_its_number_is_not_used_again(card: Card) -> None:
    x = torch.ones(8, device=card.device)
    (alloc,) = (f for f in card.trace if isinstance(f, Alloc))
    assert (alloc.side, alloc.size, alloc.stream) == ("card", 32, 0)
    view = x[2:]
    del x
    assert Free(alloc.memory) not in card.trace
    graph = (view.requires_grad_(False) * torch.ones(6, device=card.device).requires_grad_()).sum()
    del view
    assert Free(alloc.memory) not in card.trace  # autograd has it
    del graph
    assert Free(alloc.memory) in card.trace
    numbers = [f.memory for f in card.trace if isinstance(f, Alloc)]
    torch.ones(8, device=card.device)
    assert [f.memory for f in card.trace if isinstance(f, Alloc)][-1] > max(numbers)


def test_spans_are_the_bytes_that_are_touched(card: Card) -> None:
    x = torch.zeros(4, 4, device=card.device)
    memory = next(f.memory for f in card.trace if isinstance(f, Alloc))
    spans: dict[str, tuple[Any, ...]] = {}
    for name, work in {
        "mul_": lambda: x[1].mul_(2),
        "copy": lambda: x[:, 1].copy_(x[:, 0]),
        "add": lambda: x + x,
    }.items():
        card.trace.clear()
        work()
        (launch,) = (f for f in card.trace if isinstance(f, Launch))
        read, written = ([(s.start, s.stop) for s in of if s.memory == memory] for of in (launch.reads, launch.writes))
        spans[name] = launch.name, read, written
    assert spans == {
        "mul_": ("mul_", [(16, 32)], [(16, 32)]),
        "copy": ("copy", [(0, 52)], [(4, 56)]),  # from its first byte to its last
        "add": ("add", [(0, 64)], []),
    }


def test_streams_are_in_the_facts(card: Card) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.ones(3, device=card.device)
    allocs, launches = ([f for f in card.trace if isinstance(f, kind)] for kind in (Alloc, Launch))
    assert [f.stream for f in (*allocs, *launches)] == [stream.stream_id] * 2
    x.record_stream(torch.cuda.current_stream())
    assert card.trace[-1] == RecordStream(allocs[0].memory, 0)


def test_the_host_touches_what_copies_touch(card: Card) -> None:
    pinned = torch.empty(4, pin_memory=True)
    there = torch.ones(4, device=card.device)
    pinned.copy_(there, non_blocking=True)
    copy = card.trace[-1]
    assert isinstance(copy, Launch) and copy.name == "copy to the host" and len(copy.writes) == 1
    pinned.numpy()
    touched = card.trace[-1]
    assert isinstance(touched, HostAccess) and touched.reads == copy.writes  # too early: nobody has waited


def test_products_of_halves_are_summed_in_fp32(card: Card) -> None:
    a, b = (torch.randn(8, 8, dtype=torch.bfloat16, device=card.device) for _ in range(2))
    kept = torch.ones(8, 8, device=card.device)
    expected = (kept + a.float() @ b.float()).cpu()
    torch.addmm(kept, a, b, out_dtype=torch.float32, out=kept)
    assert torch.allclose(kept.cpu(), expected, rtol=1e-5, atol=1e-5)  # a sum in bf16 is off by 1e-2


@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_attention_of_the_card_runs_as_the_cpus(card: Card, backend: str) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    wanted = SDPBackend.CUDNN_ATTENTION if backend == "cudnn" else SDPBackend.FLASH_ATTENTION
    q = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16, device=card.device).requires_grad_()
    with sdpa_kernel([wanted], set_priority=True):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    assert q.grad is not None and q.grad.is_cuda and not card.mixed and not card.reads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_label_of_no_probability_is_no_question_to_the_card(
    card: Card, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "use_triton", lambda *_: False)
    logits, labels, weights = torch.zeros(4, 32, dtype=dtype), torch.tensor([0, 1, 2, 3]), torch.ones(4)
    logits[1, 1] = logits[2, 2] = -200.0
    there = logits.to(card.device)
    stats = cross_entropy.stats_and_grad_(there, labels.to(card.device), weights.to(card.device), 32, 0.0)
    before = len(card.reads)
    assert (
        torch.equal(stats.cpu(), cross_entropy.stats_and_grad_(logits, labels, weights, 32, 0.0))
        and torch.isfinite(stats).all()
    )
    assert torch.equal(there.cpu(), logits)
    assert before == 3  # the inputs'
