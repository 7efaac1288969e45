"""The cases of tools/bench/kernels.py: their inputs, bytes and FLOPs, their peers, and the tiles to try in a sweep."""

import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.dispatch import TileConfig

Fn = Callable[..., Any]
Tile = dict[str, int]


@dataclass(frozen=True)
class ProblemSizes:
    """The sizes of a case. Each case uses some of them.

    Attributes:
        tokens: N.
        hidden_size: D.
        vocab_size: V.
        sequence: S, the positions of a sample; attention is over samples of this length.
        numel: weights of an update.
        expert_count: E.
        dtype: of the inputs.
        device: of the inputs.
        head_size: K.
    """

    tokens: int
    hidden_size: int
    vocab_size: int
    sequence: int
    numel: int
    expert_count: int
    dtype: torch.dtype
    device: torch.device
    head_size: int = 128

    def normal(self, *shape: int) -> Tensor:
        """Return normal random numbers of this dtype and device."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def rows(self, width: int = 1) -> Tensor:
        """Return normal random numbers, [N, width x D]."""
        return self.normal(self.tokens, width * self.hidden_size)

    def labels(self) -> Tensor:
        """Return random token IDs, [N]."""
        return torch.randint(self.vocab_size, (self.tokens,), device=self.device)


MakeInputs = Callable[[ProblemSizes], list[Tensor]]


@dataclass(frozen=True)
class TileCandidate:
    """A tile of a sweep, and how to make the kernel's launcher use it."""

    tile: Tile
    namespace: dict[str, Any]  # a module's or a table's entries, which the launcher looks up at each call
    values: dict[str, Any]  # entries to replace there

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Replace the entries within a with block."""
        originals = {name: self.namespace[name] for name in self.values}
        self.namespace.update(self.values)
        try:
            yield
        finally:
            self.namespace.update(originals)


Candidates = Iterator[TileCandidate]  # the current tile comes first


@dataclass(frozen=True)
class WorkModel:
    """The minimum work of a case.

    Attributes:
        formula: how it is counted, for --list; e is the size of an element.
        bytes: the bytes to move if each input is read once and each result is written once.
        flops: the FLOPs of the matmuls; None if the case is limited by memory.
    """

    formula: str
    bytes: Callable[[ProblemSizes], float]
    flops: Callable[[ProblemSizes], float] | None = None


def streams(num_tensors: int) -> WorkModel:
    """Return the work of reading or writing this number of tensors [N, D]."""
    return WorkModel(f"{num_tensors} N D e", lambda s: num_tensors * s.tokens * s.hidden_size * s.dtype.itemsize)


@dataclass(frozen=True)
class KernelCase:
    """The forward or backward of one operation, with its peers.

    Attributes:
        op: the name of the operation.
        direction: "forward" without a graph; "backward" alone, over a retained graph; "both", one after the other.
        work: the minimum work.
        make_inputs: makes the tensors that all functions take, except those in `peer_inputs`.
        megalite_fn: megalite's function.
        torch_fn: the same in plain torch; None if there is none.
        candidates: yields the tiles of a sweep.
        explicit_backward: who computes a backward by a function of its own, which is called like a forward: nobody
            (""), "megalite" or "all".
        axis: the field of ProblemSizes in which rows differ.
        wrap: applied to torch_fn and to the peers, after torch.compile.
        peers: further functions by name.
        peer_inputs: makes the tensors of those functions that take others, by name.
        compiles: True if torch.compile of torch_fn is a peer.
        sweep_peer: the peer whose tiles a sweep varies.
    """

    op: str
    direction: str
    work: WorkModel
    make_inputs: MakeInputs
    megalite_fn: Fn
    torch_fn: Fn | None
    candidates: Callable[[ProblemSizes], Candidates]
    explicit_backward: str = ""
    axis: str = "hidden_size"
    wrap: Fn = field(default=lambda fn: fn)
    peers: Mapping[str, Fn] = field(default_factory=dict)
    peer_inputs: Mapping[str, MakeInputs] = field(default_factory=dict)
    compiles: bool = True
    sweep_peer: str = "megalite"

    @property
    def name(self) -> str:
        """The name of the kernel in tables and files."""
        return f"{self.op} {self.direction}"

    def shape(self, s: ProblemSizes) -> str:
        """Return the size that distinguishes the rows of this case, as text."""
        return f"{self.axis} {getattr(s, self.axis)}"


def liger(name: str, *extra_args: Any) -> Fn:
    """Return Liger-Kernel's autograd function of this name; `extra_args` follow the tensors."""

    def run(*inputs: Tensor) -> Any:
        import liger_kernel.ops as ops  # type: ignore[import-not-found]

        return getattr(ops, name).apply(*inputs, *extra_args)

    return run


def missing_packages(peers: list[str]) -> list[str]:
    """Return the packages that these peers need and that are not installed."""
    return ["liger_kernel"] if "liger" in peers and importlib.util.find_spec("liger_kernel") is None else []


def select_peers(
    case: KernelCase, s: ProblemSizes, names: list[str]
) -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    """Yield those of the named peers that a case has.

    Each comes with a function that makes its inputs, and returns a function that does the work once.
    """
    available: dict[str, Callable[[], Fn]] = {"megalite": lambda: case.megalite_fn}
    torch_fn = case.torch_fn
    if torch_fn is not None:
        available["torch"] = lambda: case.wrap(torch_fn)
        if case.compiles:
            available["compile"] = lambda: case.wrap(torch.compile(torch_fn, dynamic=False))
    for name, fn in case.peers.items():
        if not missing_packages([name]):
            available[name] = lambda fn=fn: case.wrap(fn)

    def prepare(name: str) -> Callable[[], Any]:
        torch.manual_seed(0)  # the same inputs for all peers
        inputs = case.peer_inputs.get(name, case.make_inputs)(s)
        is_explicit = case.explicit_backward in ("all", name)
        return bind_call(available[name](), inputs, "forward" if is_explicit else case.direction)

    for name in names:
        if name in available:
            yield name, partial(prepare, name)


def bind_call(fn: Fn, inputs: list[Tensor], direction: str) -> Callable[[], Any]:
    """Return a function that runs the forward without a graph, the backward over a retained graph, or both."""
    if direction == "forward":

        def run_forward() -> Any:
            with torch.no_grad():
                return fn(*inputs)

        return run_forward
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]

    def outputs() -> list[Tensor]:
        result = fn(*inputs)
        results = result if isinstance(result, tuple) else (result,)
        return [y for y in results if isinstance(y, Tensor)]

    if direction == "both":

        def run_both() -> tuple[Tensor, ...]:
            first = outputs()[0]
            loss = first if first.dim() == 0 else first.sum()
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
            return tuple(
                leaf.main_grad.sum if grad is None else grad  # type: ignore[attr-defined]  # added to its main_grad
                for leaf, grad in zip(leaves, grads, strict=True)
            )

        return run_both
    from torch._functorch import config

    config.donated_buffer = False  # torch.compile's backward must run more than once
    graph_outputs = outputs()
    output_grads = [torch.randn_like(y) for y in graph_outputs]
    return lambda: torch.autograd.grad(graph_outputs, leaves, output_grads, retain_graph=True)


def current_first(current: Any, others: Iterable[Any]) -> list[Any]:
    """Return the current value and then the others."""
    return [current, *(value for value in others if value != current)]


def tile_candidates(
    namespace: dict[str, Any], name: str, current: TileConfig, columns: int, loops: bool, wrap: Fn | None = None
) -> Candidates:
    """Yield tiles in which a thread has 4 to 128 elements.

    Rows and warps vary; in place of rows, columns vary if a row can be split. If the programs of a kernel loop over
    tiles, programs and stages vary, too. Two stages are left out: the next tile is then loaded only after the work on
    the current one.

    Args:
        namespace: the entries of the kernel's module.
        name: the entry that holds the tile.
        current: the tile of today.
        columns: elements of a row.
        loops: True if programs loop over tiles.
        wrap: makes the entry of a tile, if it is not the tile itself.
    """
    if current.block_n >= columns:
        row_counts, column_counts = [1, 2, 4], [current.block_n]
    else:
        row_counts, column_counts = [current.block_m], [512, 1024, 2048, 4096]
    program_counts = [1, 2, 3, 4, 6, 8] if loops else [current.programs_per_sm]
    stage_counts = [1, 3] if loops else [current.num_stages]
    grid = itertools.product(row_counts, column_counts, (2, 4, 8, 16, 32), program_counts, stage_counts)
    tiles = [TileConfig(*values) for values in grid]
    sensible = [tile for tile in tiles if 4 <= tile.block_m * tile.block_n / (32 * tile.num_warps) <= 128]
    for tile in current_first(current, sensible):
        yield TileCandidate(asdict(tile), namespace, {name: wrap(tile) if wrap else tile})


def constant_candidates(module: Any, values: Mapping[str, tuple[int, ...]]) -> Candidates:
    """Yield all combinations of values of the constants of a kernel's module."""
    namespace = vars(module)
    grid = [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]
    for tile in current_first({name: namespace[name] for name in values}, grid):
        yield TileCandidate({name.lower(): value for name, value in tile.items()}, namespace, tile)


def table_candidates(table: dict[str, Any], key: str, values: Mapping[str, tuple[int, ...]]) -> Candidates:
    """Yield all combinations of values for one entry of a table, whose numbers are in the order of `values`."""
    for tile in current_first(tuple(table[key]), itertools.product(*values.values())):
        yield TileCandidate(dict(zip(values, tile, strict=True)), table, {key: tile})
