"""Memory that comes and goes under parameters, in the middle of forward and backward."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megalite.nn.linear import gather_linear
from megalite.nn.recompute import recompute
from megalite.optim.flat_storage import Elastic
from megalite.parallel.mesh import Mesh

CPU = torch.device("cpu")
TP = Mesh.alone().tp
WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch's": nn.functional.linear,
    "ours": lambda x, w: gather_linear(x, [w], TP)[0],
    "ours recomputed": lambda x, w: recompute(lambda y: gather_linear(y, [w], TP)[0], x),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_autograd_saved_is_what_came_back(way: str) -> None:
    """Weights are gathered for forward, go, and are gathered anew for backward."""
    multiply, values = WAYS[way], torch.randn(2, 12, dtype=torch.float64)
    x = torch.randn(5, 2, 4, dtype=torch.float64, requires_grad=True)
    memory = Elastic(24, torch.float64, CPU)
    pair = [nn.Parameter(torch.empty(0, dtype=torch.float64)) for _ in range(2)]
    for weight, begin in zip(pair, (0, 12), strict=True):
        weight.data = memory.flat[begin : begin + 12].view(3, 4)
    twins = [nn.Parameter(v.view(3, 4).clone()) for v in values]

    memory.come().copy_(values.view(-1))
    outputs = [multiply(x, w) for w in pair]
    memory.go()
    assert not memory.is_there
    memory.come().copy_(values.view(-1))
    assert memory.is_there and all(torch.equal(w, twin) for w, twin in zip(pair, twins, strict=True))
    dys = [torch.randn_like(y) for y in outputs]
    mine = torch.autograd.grad(outputs, [x, *pair], dys)
    theirs = torch.autograd.grad([nn.functional.linear(x, t) for t in twins], [x, *twins], dys)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_memory_is_given_back_though_views_live() -> None:
    size = 1 << 27
    memory = Elastic(size, torch.uint8, CPU)
    views = [memory.come()[: size // 2].fill_(1), memory.flat.view(-1, 256)]
    full = _resident()
    memory.go()
    assert full - _resident() > 0.9 * size // 2  # what was written
    assert memory.come().fill_(2).numel() == size
    assert all(bool((view == 2).all()) for view in views) and _resident() - full > 0.9 * size // 2
