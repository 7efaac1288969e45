"""A piece of work of tools/bench/kernels.py: its bytes and FLOPs, who else does it, and the tiles worth trying."""

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.dispatch import TileConfig

Fn = Callable[..., Any]
Tile = dict[str, int]


@dataclass(frozen=True)
class Sizes:
    """N tokens of D columns; a vocabulary of V; attention over samples of S positions, 4 query heads to a group;
    `numel` weights."""

    tokens: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    vocab_size: int = 128256
    sequence: int = 4096
    numel: int = 1 << 30
    head_size: int = 128
    expert_count: int = 8

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def rows(self, width: int = 1) -> Tensor:
        """[N, width x D]"""
        return self.normal(self.tokens, width * self.hidden_size)

    def labels(self) -> Tensor:
        return torch.randint(self.vocab_size, (self.tokens,), device=self.device)


Make = Callable[[Sizes], list[Tensor]]
# the tiles worth trying, the table's own first: (its numbers, the names that hold it, what stands there)
Swept = Iterator[tuple[Tile, dict[str, Any], dict[str, Any]]]


@dataclass(frozen=True)
class Work:
    """The bytes that must move (each input read once, each result written once) and, where matmuls are the limit, the
    FLOPs. `formula` says how they are counted; e is the size of an element."""

    formula: str
    bytes: Callable[[Sizes], float]
    flops: Callable[[Sizes], float] | None = None


def streams(factor: int) -> Work:
    """`factor` tensors of [N, D] are read or written."""
    return Work(f"{factor} N D e", lambda s: factor * s.tokens * s.hidden_size * s.dtype.itemsize)


@dataclass(frozen=True)
class Case:
    """`ours`, `plain` (torch) and `peers` take the tensors of `make`, or of their own entry in `own_inputs`.

    half      "forward": no graph. "backward": alone, over a graph that is kept. "both": one after the other
    direct    who is called as in forward all the same, since it is a function of its own: "ours", "all" or nobody
    axis      the field of Sizes that rows differ in
    wrap      is applied to plain and peers, after torch.compile
    tiles     for a sweep, of the peer `swept`; what they replace is looked up at each call
    compiles  whether torch.compile of `plain` is a peer
    """

    op: str
    half: str
    work: Work
    make: Make
    ours: Fn
    plain: Fn | None
    tiles: Callable[[Sizes], Swept]
    direct: str = ""
    axis: str = "hidden_size"
    wrap: Fn = field(default=lambda fn: fn)
    peers: Mapping[str, Fn] = field(default_factory=dict)
    own_inputs: Mapping[str, Make] = field(default_factory=dict)
    compiles: bool = True
    swept: str = "megalite"

    @property
    def name(self) -> str:
        return f"{self.op} {self.half}"

    def sizes(self, base: Sizes, values: Mapping[str, list[int]]) -> list[Sizes]:
        return [replace(base, **{self.axis: value}) for value in values[self.axis]]

    def sweep(self, s: Sizes) -> Iterator[tuple[Tile, Callable[[], Any]]]:
        """The table's tile and others, each with a call of the work in which it is the table's."""
        ((_, prepare),) = peers_of(self, s, [self.swept])
        launch = prepare()
        for tile, place, values in self.tiles(s):
            yield tile, partial(replaced, place, values, launch)

    def shape(self, s: Sizes) -> str:
        return f"{self.axis} {getattr(s, self.axis)}"


def liger(name: str, *more: Any) -> Fn:
    """Liger-Kernel's function of this name; `more`: its arguments after the tensors."""

    def run(*inputs: Tensor) -> Any:
        import liger_kernel.ops as ops  # type: ignore[import-not-found]

        return getattr(ops, name).apply(*inputs, *more)

    return run


def absent(peers: list[str]) -> list[str]:
    """The packages that peers need and that are not installed."""
    return ["liger_kernel"] if "liger" in peers and importlib.util.find_spec("liger_kernel") is None else []


def peers_of(case: Case, s: Sizes, wanted: list[str]) -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    """The name of each wanted peer that has the work, and a function that makes its inputs and a call of the work."""
    there: dict[str, Callable[[], Fn]] = {"megalite": lambda: case.ours}
    plain = case.plain
    if plain is not None:
        there["torch"] = lambda: case.wrap(plain)
        if case.compiles:
            there["compile"] = lambda: case.wrap(torch.compile(plain, dynamic=False))
    there |= {name: lambda fn=fn: case.wrap(fn) for name, fn in case.peers.items() if not absent([name])}
    for name in wanted:
        if name in there:

            def prepared(name: str = name) -> Callable[[], Any]:
                torch.manual_seed(0)  # the same inputs for all
                inputs = case.own_inputs.get(name, case.make)(s)
                direct = case.direct == "all" or (case.direct == "ours" and name == "megalite")
                return call(there[name](), inputs, "forward" if direct else case.half)

            yield name, prepared


def call(fn: Fn, inputs: list[Tensor], half: str) -> Callable[[], Any]:
    """Forward without a graph, or backward alone over a graph that is kept, or both."""
    if half == "forward":

        def run() -> Any:
            with torch.no_grad():
                return fn(*inputs)

        return run
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]

    def outputs() -> list[Tensor]:
        made = fn(*inputs)
        return [y for y in (made if isinstance(made, tuple) else (made,)) if isinstance(y, Tensor)]

    if half == "both":

        def run_both() -> tuple[Tensor, ...]:
            first = outputs()[0]
            grads = torch.autograd.grad(first if first.dim() == 0 else first.sum(), leaves, allow_unused=True)
            return tuple(leaf.sink.sum if g is None else g for leaf, g in zip(leaves, grads, strict=True))  # type: ignore

        return run_both
    from torch._functorch import config

    config.donated_buffer = False  # torch.compile's backward must run more than once
    kept = outputs()
    above = [torch.randn_like(y) for y in kept]
    return lambda: torch.autograd.grad(kept, leaves, above, retain_graph=True)


def own_first(own: Any, others: Iterable[Any]) -> list[Any]:
    return [own, *(one for one in others if one != own)]


def blocks(
    place: dict[str, Any], name: str, own: TileConfig, columns: int, walks: bool, put: Fn | None = None
) -> Swept:
    """Rows, columns (where a row may be cut), warps and, where a program `walks` over tiles, programs and stages (not
    2, which ask for a tile after all work on the one before). A thread has 4 to 128 elements. `put`: what stands in the
    place, where it is not the tile itself."""
    sizes = ((1, 2, 4), [own.columns]) if own.columns >= columns else ((own.rows,), [512, 1024, 2048, 4096])
    walk = ((1, 2, 3, 4, 6, 8), (1, 3)) if walks else ((own.programs,), (own.stages,))
    tried = (TileConfig(*tile) for tile in itertools.product(*sizes, (2, 4, 8, 16, 32), *walk))
    for tile in own_first(own, (t for t in tried if 4 <= t.rows * t.columns / (32 * t.warps) <= 128)):
        yield asdict(tile), place, {name: put(tile) if put else tile}


def constants(module: Any, tried: Mapping[str, tuple[int, ...]]) -> Swept:
    """Constants of a kernel's module."""
    grid = (dict(zip(tried, values, strict=True)) for values in itertools.product(*tried.values()))
    for tile in own_first({name: vars(module)[name] for name in tried}, grid):
        yield {name.lower(): value for name, value in tile.items()}, vars(module), tile


def entries(table: dict[str, Any], key: str, tried: Mapping[str, tuple[int, ...]]) -> Swept:
    """One entry of a table; `tried` in the order of its numbers."""
    for tile in own_first(tuple(table[key]), itertools.product(*tried.values())):
        yield dict(zip(tried, tile, strict=True)), table, {key: tile}


def replaced(place: dict[str, Any], values: dict[str, Any], launch: Callable[[], Any]) -> Any:
    """What `launch` returns with these values in their place."""
    own = {name: place[name] for name in values}
    place.update(values)
    try:
        return launch()
    finally:
        place.update(own)
