"""The reduce-scatters that run on a card, executed on gloo, where all-reduces take their place otherwise.

Rows as in test_layouts.py, with `reduce_scatter_is_native` forced on every rank: the gradients of a bucket, summed
into the owned part of the same memory, and the sums over the sequence of tensor parallelism. What is trained is what
one process trains, in float64 to a relative 1e-10.
"""

import os
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from ranks import run_ranks
from test_layouts import GPT, LLAMA, Row, _assemble, _far, _parts, _twin, alone, row
from torch import Tensor

from megalite.optim import grad_reduce
from megalite.parallel import comm

NOZERO = "--no-use-distributed-optimizer"
ROWS = [
    row("gpt dp2", 2, GPT),
    row("llama tp2 dp2 tiny buckets", 4, LLAMA, tp=2, extra="--ddp-bucket-size 500"),
    row("llama tp2 dp2 ddp", 4, LLAMA, tp=2, extra=NOZERO),
]


def _native(flags: str) -> tuple[tuple[list[float], list[float], list[tuple]], dict[str, int]]:
    """Train on one rank, a process of its own; how often each collective began: of buckets, of sequences, and the
    all-reduces in their place."""
    counts = {"buckets": 0, "sequences": 0, "all-reduces": 0}

    def spy(owner: Any, name: str, what: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[what] += bool(kwargs.get("async_op"))
            return real(*args, **kwargs)

        setattr(owner, name, call)

    os.environ["MEGALITE_SHARED_MEMORY"] = "off"
    spy(comm, "reduce_scatter_flat", "sequences")
    real_into = comm.start_reduce_scatter_into

    def into(out: Tensor, x: Tensor, axis: Any) -> Any:
        counts["sequences"] -= 1
        counts["buckets"] += 1
        return real_into(out, x, axis)

    grad_reduce.start_reduce_scatter_into = into  # type: ignore[attr-defined]
    spy(dist, "all_reduce", "all-reduces")
    comm.reduce_scatter_is_native = lambda device: True  # type: ignore[attr-defined]
    return _parts(flags, "float64"), counts


@pytest.mark.parametrize("item", ROWS, ids=lambda item: item.name)
def test_the_native_reduce_scatter_trains_as_one_process_does(item: Row) -> None:
    results = run_ranks(item.world, _native, f"{item.model} {item.layout}")
    for _, counts in results:
        assert (counts["buckets"] > 0) == (NOZERO not in item.layout)
        assert (counts["all-reduces"] > 0) == (NOZERO in item.layout)
        assert (counts["sequences"] > 0) == item.has_tp
    got, want = _assemble([parts for parts, _ in results]), alone(_twin(item), "float64")
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-10)
    np.testing.assert_allclose(got.grad_norms, want.grad_norms, rtol=1e-10)
    worst = max(want.weights, key=lambda name: _far(got.weights[name], want.weights[name]))
    assert _far(got.weights[worst], want.weights[worst]) <= 1e-9, worst
