"""The simulated NCCL: it computes what gloo does, waits as NCCL does, and refuses what NCCL has not."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from card.simulator import nccl
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
    words += ["world size", "tag=3", "recvAnysource", *["No backend type"] * 2]  # what megalite does not use
    for text, word in zip(said, words, strict=True):
        assert re.search(word, text), (text, word)
