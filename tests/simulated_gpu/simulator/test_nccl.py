"""The simulated NCCL: it computes what gloo computes, waits like NCCL, and refuses what NCCL lacks."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megalite.parallel.comm import all_gather_into_tensor, reduce_scatter_tensor
from simulated_gpu.simulator import nccl

HEADER = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/NCCLUtils.hpp"
KINDS = {"Char": "int8", "Byte": "uint8", "Float": "float32", "Double": "float64", "Int": "int32", "Long": "int64"}
KINDS |= {"Half": "float16", "Bool": "bool", "BFloat16": "bfloat16"}


def test_nccl_dtypes_equal_torchs_header() -> None:
    table = HEADER.read_text().partition("ncclDataType = {")[2].partition("};")[0]
    names = re.findall(r"\{at::k(\w+),", table)
    assert len(names) > 8
    expected = {getattr(torch, KINDS.get(name, name.lower())) for name in names}
    assert expected == nccl.DTYPES


def _refused() -> None:
    long, strided = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 4).T
    op, out = dist.ReduceOp, torch.zeros(3)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("UInt16|uint16", lambda: dist.all_reduce(torch.zeros(2, dtype=torch.uint16))),
        ("int16", lambda: dist.broadcast(torch.zeros(2, dtype=torch.int16), 0)),
        ("Float8", lambda: dist.all_reduce(torch.zeros(2, dtype=torch.float8_e5m2))),
        ("BAND", lambda: dist.all_reduce(long, op.BAND)),
        ("BOR", lambda: dist.all_reduce(long, op.BOR)),
        ("BXOR", lambda: dist.all_reduce(long, op.BXOR)),
        ("AVG", lambda: dist.all_reduce(torch.tensor([True]), op.AVG)),
        ("contiguous", lambda: dist.all_reduce(strided)),
        ("world_size", lambda: all_gather_into_tensor(out, torch.zeros(2))),
        ("same type", lambda: all_gather_into_tensor(out, torch.zeros(2, dtype=torch.float64))),
        ("world size", lambda: reduce_scatter_tensor(torch.zeros(2), out)),
        ("tag=3", lambda: dist.isend(out, 1 - dist.get_rank(), tag=3)),
        ("recvAnysource", lambda: dist.irecv(out)),
        ("No backend type", lambda: dist.gather(out, [out, out] if dist.get_rank() == 0 else None)),
        ("Split sizes", lambda: dist.all_to_all_single(out, out)),
        ("Split sizes", lambda: dist.all_to_all_single(out, out, [2, 2], [1, 2])),
    ]
    for text, call in calls:
        with pytest.raises((TypeError, ValueError, RuntimeError), match=text):
            call()
    assert not nccl.facts()


def test_unsupported_nccl_operations_are_refused() -> None:
    run_ranks(2, _refused, backend=nccl.join)


def _exchanged(mismatched: bool) -> list[float]:
    """Send r + 1 elements from rank r to the first rank, and one to the other."""
    rank, out = dist.get_rank(), torch.zeros(3 if dist.get_rank() == 0 else 2 + mismatched)
    x, output_splits = torch.arange(rank + 2.0) + 10 * rank, [1, 2] if rank == 0 else [1, 1 + mismatched]
    dist.all_to_all_single(out, x, output_splits, [rank + 1, 1])
    return out.tolist()


def test_uneven_all_to_all_and_mismatched_counts() -> None:
    results = run_ranks(2, _exchanged, False, backend=nccl.join)
    assert results == run_ranks(2, _exchanged, False) == [[0.0, 10.0, 11.0], [1.0, 12.0]]
    with pytest.raises(Exception, match=r"rank 1 expects \[1, 2\] and is given \[1, 1\]"):
        run_ranks(2, _exchanged, True, backend=nccl.join)
