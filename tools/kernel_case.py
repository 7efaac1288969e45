"""One piece of work of tools/benchmark_kernels.py: its bytes, who else does it, and the tiles worth trying."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.dispatch import Block

Fn = Callable[..., Any]


@dataclass(frozen=True)
class Sizes:
    tokens: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def rows(self, width: int = 1) -> Tensor:
        """[N, width x D]"""
        return self.normal(self.tokens, width * self.hidden_size)


Make = Callable[[Sizes], list[Tensor]]


def same(fn: Fn) -> Fn:
    return fn


@dataclass(frozen=True)
class Case:
    """`factor` N D e bytes move. `ours`, `plain` (torch) and `peers` take the tensors of `make`, or of their own entry
    in `own_inputs`. With `graph` their backward is measured alone, over a graph that is kept. `wrap` is applied to
    plain and peers, after torch.compile. `tiles` gives the table's tile and a launcher that takes any, for a sweep."""

    op: str
    half: str
    factor: int
    make: Make
    ours: Fn
    plain: Fn
    tiles: Callable[[Sizes], tuple[Block, Callable[[Block], Any]]]
    graph: bool = False
    wrap: Fn = same
    peers: Mapping[str, Fn] = field(default_factory=dict)
    own_inputs: Mapping[str, Make] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.op} {self.half}"

    @property
    def formula(self) -> str:
        return f"{self.factor} N D e"

    def bytes_moved(self, s: Sizes) -> int:
        return self.factor * s.tokens * s.hidden_size * s.dtype.itemsize


def peers_of(case: Case, s: Sizes, wanted: list[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and a call of the work, for each peer that is wanted and there."""
    there = {"megalite": case.ours, "torch": case.wrap(case.plain)}
    there["compile"] = case.wrap(torch.compile(case.plain, dynamic=False))
    there |= {name: case.wrap(fn) for name, fn in case.peers.items() if importlib.util.find_spec(PACKAGES[name])}
    for name in wanted:
        if name in there:
            torch.manual_seed(0)  # the same inputs for all
            yield name, call(there[name], case.own_inputs.get(name, case.make)(s), case.graph)


PACKAGES = {"liger": "liger_kernel", "apex": "apex"}


def call(fn: Fn, inputs: list[Tensor], graph: bool) -> Callable[[], Any]:
    """Forward without a graph, or backward alone, over a graph that is kept."""
    if not graph:

        def run() -> Any:
            with torch.no_grad():
                return fn(*inputs)

        return run
    from torch._functorch import config

    config.donated_buffer = False  # torch.compile's backward must run more than once
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    made = fn(*inputs)
    outputs = list(made) if isinstance(made, tuple) else [made]
    above = [torch.randn_like(y) for y in outputs]
    return lambda: torch.autograd.grad(outputs, leaves, above, retain_graph=True)


def candidates(case: Case, s: Sizes) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The table's tile, then others: rows, columns (where a row may be cut), warps and programs around it."""
    own, launch = case.tiles(s)
    whole = own.columns >= s.hidden_size  # one program holds a row
    widths = [own.columns] if whole else [512, 1024, 2048, 4096]
    programs = [own.programs] if case.half == "forward" or own.programs == 1 and not whole else [1, 2, 3, 4, 6, 8]
    tried = [replace(own, rows=r, columns=c, warps=w, programs=p) for r, c, w, p in
             itertools.product((1, 2, 4) if whole else (own.rows,), widths, (2, 4, 8, 16, 32), programs)]  # fmt: skip
    for block in [own, *(b for b in tried if b != own)]:
        label = f"rows {block.rows} columns {block.columns} warps {block.warps} programs {block.programs}"
        yield label + (" (table)" if block == own else ""), lambda block=block: launch(block)
