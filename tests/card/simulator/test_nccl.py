"""The simulated NCCL: it computes what gloo does, waits as NCCL does, and refuses what NCCL has not."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from card.simulator import nccl
from card.simulator.communicator import Disorder
from card.simulator.trace import Comm, CommWait, Fact, HostWait
from megalite.parallel.comm import all_gather_flat, reduce_scatter_flat

HEADER = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/NCCLUtils.hpp"
KINDS = {"Char": "int8", "Byte": "uint8", "Float": "float32", "Double": "float64", "Int": "int32", "Long": "int64"}
KINDS |= {"Half": "float16", "Bool": "bool", "BFloat16": "bfloat16"}


def test_the_dtypes_are_those_of_the_header_that_comes_with_torch() -> None:
    table = HEADER.read_text().partition("ncclDataType = {")[2].partition("};")[0]
    names = re.findall(r"\{at::k(\w+),", table)
    assert len(names) > 8
    theirs = {getattr(torch, KINDS.get(name, name.lower())) for name in names}
    assert theirs == nccl.DTYPES


def _values() -> dict[str, Any]:
    """On one of two ranks: a result of each collective, and what an early look at it saw."""
    rank = dist.get_rank()
    x = torch.arange(4.0, dtype=torch.bfloat16) + 10 * rank
    seen: dict[str, Any] = {}
    for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
        y = x.clone()
        dist.all_reduce(y, getattr(dist.ReduceOp, name))
        seen[name] = y.tolist()
    flags = torch.tensor([True, rank == 1, False])
    dist.all_reduce(flags)
    out = torch.zeros(8, dtype=torch.bfloat16)
    work = all_gather_flat(out, x, async_op=True)
    x.fill_(-1)  # too late to matter: the input was read
    seen["early"] = out.tolist()
    work.wait()
    part = out[4 * rank : 4 * rank + 2].clone().fill_(0)
    reduce_scatter_flat(part, out[:4].clone())
    from_1 = torch.full((2,), float(rank))
    dist.broadcast(from_1, 1)
    dist.barrier()
    return {**seen, "flags": flags.tolist(), "gathered": out.tolist(), "part": part.tolist(), "root": from_1.tolist()}


def test_the_collectives_compute_what_they_say() -> None:
    first, second = run_ranks(2, _values, backend=nccl.join)
    want = {"SUM": [10, 12, 14, 16], "AVG": [5, 6, 7, 8], "MIN": [0, 1, 2, 3], "MAX": [10, 11, 12, 13]}
    want |= {"PRODUCT": [0, 11, 24, 39], "flags": [True, True, False], "root": [1, 1]}
    want |= {"gathered": [0, 1, 2, 3, 10, 11, 12, 13], "early": [0.0] * 8}
    for name, value in want.items():
        assert first[name] == second[name] == value, name
    assert first["part"] == [0, 2] and second["part"] == [4, 6]


def _messages() -> tuple[list[bool], list[float], list[Fact]]:
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    x = torch.full((3,), rank + 1.0)
    if rank == 0:
        work = dist.isend(x, 1, group=pair)
        before = work.is_completed()
        dist.barrier()  # the other rank posts its receive behind this
        dist.barrier()
        deadline = time.monotonic() + 5
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.01)
        return [before, work.is_completed()], x.tolist(), nccl.facts()
    dist.barrier()
    work = dist.irecv(x, 0, group=pair)
    dist.barrier()
    early = x.tolist()
    work.wait()
    return [early == [2.0] * 3], x.tolist(), nccl.facts()


def test_a_send_is_done_when_its_receive_has_begun_and_what_is_received_is_there_after_the_wait() -> None:
    (sent, _, facts), (unchanged, received, _) = run_ranks(2, _messages, backend=nccl.join)
    assert sent == [False, True] and unchanged == [True] and received == [1.0] * 3
    send = next(fact for fact in facts if isinstance(fact, Comm) and fact.kind == "send")
    assert (send.comm.split()[-1], send.ranks, send.peer, send.dtype, send.count) == ("0-1", (0, 1), 1, "float32", 3)
    barrier = next(i for i, fact in enumerate(facts) if isinstance(fact, Comm) and fact.kind == "barrier")
    assert isinstance(facts[barrier + 1], CommWait) and isinstance(facts[barrier + 2], HostWait)


def _with_device_id() -> str:
    return nccl.use(nccl.Plain(), eager=True)


def _on_one_communicator() -> tuple[list[float], list[tuple[str, str]]]:
    """A sum behind a message that is not received yet: it waits its turn."""
    rank = dist.get_rank()
    x, total = torch.full((2,), rank + 1.0), torch.ones(1)
    message = (dist.irecv if rank else dist.isend)(x, 1 - rank)
    dist.all_reduce(total)
    assert message.is_completed()
    message.wait()
    return [*x.tolist(), *total.tolist()], [(fact.comm, fact.kind) for fact in nccl.facts() if isinstance(fact, Comm)]


def test_with_a_device_id_messages_queue_with_the_sums_of_their_group() -> None:
    first, second = run_ranks(2, _on_one_communicator, backend=_with_device_id)
    assert first[0] == second[0] == [1, 1, 2]
    assert first[1] == [("0 default_pg", "send"), ("0 default_pg", "all_reduce")]
    assert second[1] == [("0 default_pg", "recv"), ("0 default_pg", "all_reduce")]


def _refused() -> list[str]:
    """What each thing that NCCL has not says."""
    long, strided = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 4).T
    op, out = dist.ReduceOp, torch.zeros(3)
    asked = [
        lambda: dist.all_reduce(torch.zeros(2, dtype=torch.uint16)),
        lambda: dist.broadcast(torch.zeros(2, dtype=torch.int16), 0),
        lambda: dist.all_reduce(torch.zeros(2, dtype=torch.float8_e5m2)),
        lambda: dist.all_reduce(long, op.BAND),
        lambda: dist.all_reduce(long, op.BOR),
        lambda: dist.all_reduce(long, op.BXOR),
        lambda: dist.all_reduce(torch.tensor([True]), op.AVG),
        lambda: dist.all_reduce(strided),
        lambda: all_gather_flat(out, torch.zeros(2)),
        lambda: all_gather_flat(out, torch.zeros(2, dtype=torch.float64)),
        lambda: reduce_scatter_flat(torch.zeros(2), out),
        lambda: dist.isend(out, 1 - dist.get_rank(), tag=3),
        lambda: dist.irecv(out),
        lambda: dist.gather(out, [out, out] if dist.get_rank() == 0 else None),
        lambda: dist.all_to_all_single(out, out),
    ]
    said = []
    for ask in asked:
        with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
            ask()
        said.append(str(error.value))
    assert not nccl.facts()
    return said


def test_what_nccl_has_not_is_refused() -> None:
    said, _ = run_ranks(2, _refused, backend=nccl.join)
    words = ["UInt16|uint16", "int16", "Float8", "BAND", "BOR", "BXOR", "AVG", "contiguous", "world_size", "same type"]
    words += ["world size", "tag=3", "recvAnysource", "gather", "all_*to_*all"]
    for text, word in zip(said, words, strict=True):
        assert re.search(word, text), (text, word)


class _Host(nccl.Plain):
    def on_card(self, x: torch.Tensor) -> bool:
        return False


def _host() -> str:
    return nccl.use(_Host())


def _host_tensor() -> str:
    with pytest.raises(RuntimeError) as error:
        dist.all_reduce(torch.zeros(1))
    store = (
        dist.distributed_c10d._get_default_store()
    )  # nothing made the ranks meet: one may still connect to the other
    store.set(f"met{dist.get_rank()}", "")
    store.wait([f"met{rank}" for rank in range(dist.get_world_size())])
    return str(error.value)


def test_a_tensor_of_the_host_is_refused() -> None:
    assert run_ranks(2, _host_tensor, backend=_host) == ["No backend type associated with device type cpu"] * 2


def _differ() -> dict[str, str]:
    rank = dist.get_rank()
    x, y = torch.zeros(4), torch.zeros(8)
    deeds: dict[str, Callable[[dist.ProcessGroup], Any]] = {
        "swapped": lambda g: [dist.all_reduce(what, group=g) for what in ((x, y) if rank else (y, x))],
        "dtype": lambda g: dist.all_reduce(x.double() if rank else x, group=g),
        "both send": lambda g: _done(dist.isend(x, 1 - rank, group=g)),
        "sizes": lambda g: _done(dist.irecv(y, 0, group=g) if rank else dist.isend(x, 1, group=g)),
    }
    said = {}
    for how, deed in deeds.items():
        with pytest.raises(Disorder) as error:
            deed(dist.new_group([0, 1]))
        said[how] = str(error.value)
    return said


def _done(work: Any) -> None:
    work.wait()


def test_ranks_that_differ_are_told_at_once() -> None:
    words = {
        "swapped": ["rank 0: all_reduce(SUM) of 8 float32", "rank 1: all_reduce(SUM) of 4 float32"],
        "dtype": ["of 4 float32", "of 4 float64"],
        "both send": ["send of 4 float32 to", "meets send"],
        "sizes": ["of 4 float32", "of 8 float32"],
    }
    for said in run_ranks(2, _differ, backend=nccl.join):
        for how, text in said.items():
            assert all(word in text for word in [*words[how], "test_nccl.py:"]), text
