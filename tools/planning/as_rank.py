"""One rank's part of a run, without the others and without memory: built and stepped once on the meta device.

    mesh, stages, buffers, optimizer, schedule    those of the run (train/setup.py), on tensors that are only shapes
    collectives and messages                      torch's fake process group, which moves nothing
    the step                                      the run's own, so what does not fit together fails as it would there

What a host reads of the device is 1: loss and gradient norm are finite, and the step is taken. Kernels are their forms
in torch; attention is the shapes that a fused kernel takes and keeps. Unless --device is cpu, sizes that a kernel
chooses by the device are a card's. Rejected: FakeTensorMode, which refuses what a host reads, needs CUDA for the
backward of a card's tensors, and would have to be asked for data pointers that it has not.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

import megalite
from megalite.kernels.attention import attention, backend
from megalite.kernels.cross_entropy import BLOCK_BYTES
from megalite.kernels.dispatch import stat_dtype
from megalite.kernels.linear_cross_entropy import CHUNK_BYTES
from megalite.models.gpt import Block, Stage
from megalite.parallel.calls import SEND
from megalite.parallel.comm import Pending
from megalite.parallel.launch import Ranks
from megalite.parallel.mesh import Mesh, plan_mesh
from megalite.pipeline.schedule import Action
from megalite.train import figures
from megalite.train.arrangement import Arrangement
from megalite.train.setup import SetupError, build_run
from megalite.train.sources import Sources
from megalite.train.state import Run
from megalite.train.step import train_step

META = torch.device("meta")
PACKAGE = Path(megalite.__file__).resolve().parent
SIZES = (CHUNK_BYTES, BLOCK_BYTES)  # of a kernel's parts, by the device
INNERMOST = 3  # places in the code that an error names
REFUSED = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError)


@dataclass(frozen=True, order=True)
class Issued:
    """A collective over an axis of `ranks` ranks, or a message to or from the global rank `peer` (-1: there is none).
    `bytes`: of the tensor that this rank gives, or gets as a message."""

    axis: str
    op: str
    ranks: int
    peer: int
    dtype: str
    bytes: int


@contextlib.contextmanager
def issued(mesh: Mesh) -> Iterator[Counter[Issued]]:
    """How often this rank issues what inside, on any device; complete when it is left."""
    found: Counter[Issued] = Counter()
    for axis in mesh.axes:
        axis.calls.last = deque()
    yield found
    for axis in mesh.axes:
        for call in axis.calls.last:
            found[Issued(axis.name, call.op, axis.size, call.peer, str(call.dtype)[6:], call.bytes)] += 1


@dataclass(frozen=True)
class Rehearsal:
    """What one rank did. Bytes, exact: of the flat weights and gradients, of what the optimizer keeps beside them, of
    rotary tables; `in_flight`: the most that micro-batches keep after a forward; `peak`: the most that there is at
    once. `parameters`: elements of this rank's parts of them."""

    mesh: Mesh
    layers: dict[int, range]  # of each stage of this rank
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    tables: int
    in_flight: int
    peak: int
    issued: Counter[Issued]

    @property
    def parts(self) -> dict[str, int]:
        """Of the bytes that are there all the time."""
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        return parts | ({"rotary tables": self.tables} if self.tables else {})

    @property
    def state(self) -> int:
        return sum(self.parts.values())


def _known(value: Any) -> Any:
    """What an operation on the meta device sees of an argument. Raises TypeError where it may see more."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_known, value))
    return type(value), value  # 1 and 1.0 are equal


class _Shapes(TorchDispatchMode):
    """Answers what a host reads of the meta device, and counts the bytes of what is alive there. An operation that
    makes tensors, or writes into its first, is done once for its shapes: most of torch's there are slow Python."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._made: dict[Any, list[Any]] = {}  # of an operation and what it was given: shapes; None: the first argument

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1
        if op is torch.ops.aten._to_copy.default and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        result = self._do(op, args, kwargs)
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor) and made.is_meta:
                self._count(made.untyped_storage())
        return result

    def _do(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            key = op, _known(args), _known(tuple(kwargs.items()))
            known = self._made.get(key)
        except TypeError:  # also of what has no hash
            return op(*args, **kwargs)
        if known is not None:
            made = [
                args[0] if one is None else torch.empty_strided(*one[:2], dtype=one[2], device=META) for one in known
            ]
            return made[0] if len(made) == 1 else tuple(made)
        result = op(*args, **kwargs)
        results = result if isinstance(result, tuple) and len(result) > 1 else (result,)
        if key[1] == _known(args) and all(isinstance(x, Tensor) and self._is_new(x, args) for x in results):
            self._made[key] = [None if args and x is args[0] else _known(x) for x in results]
        return result

    def _is_new(self, x: Tensor, args: tuple[Any, ...]) -> bool:
        """Or the first argument, written in place; no view."""
        return x.is_meta and (bool(args and x is args[0]) or x.untyped_storage()._cdata not in self._alive)

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def gone(_: Any) -> None:
            self.live -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


class _Fused(Function):
    """Attention's shapes: kept are q, k, v, o and one log-sum-exp per row and head."""

    @staticmethod
    def forward(ctx: Any, q_SBHK: Tensor, k_SBGK: Tensor, v_SBGK: Tensor) -> Tensor:
        (S, B, H, K), (*others, G, _) = q_SBHK.shape, k_SBGK.shape
        if k_SBGK.shape != v_SBGK.shape or [*others, k_SBGK.shape[-1]] != [S, B, K] or H % G:
            q, k, v = (tuple(x.shape) for x in (q_SBHK, k_SBGK, v_SBGK))
            raise RuntimeError(f"attention of q {q}, k {k}, v {v}, which do not fit together")
        o_SBHK = torch.empty_like(q_SBHK, memory_format=torch.contiguous_format)
        ctx.save_for_backward(q_SBHK, k_SBGK, v_SBGK, o_SBHK, q_SBHK.new_empty(B, H, S, dtype=stat_dtype(q_SBHK)))
        return o_SBHK

    @staticmethod
    def backward(ctx: Any, do_SBHK: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def _attend(q_SBHK: Tensor, k_SBGK: Tensor, v_SBGK: Tensor, **how: Any) -> Tensor:
    if backend(q_SBHK, masked=False, dropout=how["drop"] is not None) == "explicit":  # the scores are kept
        return attention(q_SBHK, k_SBGK, v_SBGK, **how)
    return _Fused.apply(q_SBHK, k_SBGK, v_SBGK)  # type: ignore[return-value]


@contextlib.contextmanager
def _fake_group(rank: int, world: int) -> Iterator[None]:
    if world == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend, too

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Set timeout is now only supported")
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextlib.contextmanager
def _sizes_of(device: str) -> Iterator[None]:
    """Where a kernel chooses a size by the device, that of `device`."""
    for sizes in SIZES:
        sizes["meta"] = sizes[device]
    try:
        yield
    finally:
        for sizes in SIZES:
            del sizes["meta"]


def rehearse(plan: Arrangement, sources: Sources, rank: int) -> Rehearsal:
    """Build the part of `rank` and take one step, of the final batch size. Raises SetupError where it cannot."""
    config = plan.config
    train = replace(config.train, compile=False, cuda_graph_impl="none")
    made = plan if train == config.train else replace(plan, config=replace(config, train=train))
    device = "cpu" if config.parallel.device == "cpu" else "cuda"
    with _fake_group(rank, plan.world), _sizes_of(device), _Shapes() as shapes:
        try:
            run = build_run(made.config, Ranks(rank, plan.world), META, sources=sources, arrangement=made)
            return _stepped(run, plan, shapes)
        except REFUSED as error:
            raise SetupError(_told(error, plan, rank)) from error


def _stepped(run: Run, plan: Arrangement, shapes: _Shapes) -> Rehearsal:
    run.rerun = "disabled"  # what is read twice would not be the same
    run.state.consumed_samples = run.batch_sizes.steps[-1][0]
    stages = [stage for stage in run.pipeline.stages if isinstance(stage, Stage)]
    post, kept = run.pipeline._post, [0]

    def at_once(op: str, action: Action, tensor: Tensor) -> Pending:
        pending = post(op, action, tensor)
        if op == SEND:  # which the fake group never completes by itself, so all that was sent would be kept
            pending.wait()
        return pending

    run.pipeline._post = at_once
    for stage in stages:
        stage.register_forward_hook(lambda *_: kept.append(shapes.live))
        for block in stage.blocks:
            assert isinstance(block, Block)
            block.attention.attend = _attend
    state, main = shapes.live, run.optimizer
    shapes.peak = state
    with issued(run.mesh) as calls:
        train_step(run)
        run.buffer.wait_gather()  # which the next step would do
    run.close()
    held = [x for flats in main.state for x in flats.values()] + ([] if main.same else main.main)
    return Rehearsal(
        mesh=run.mesh,
        layers={number: plan.stages[number] for number in plan.placement.stages(run.mesh.pp.rank)},
        parameters=sum(entry.numel for entry in run.buffer.layout.entries),
        weights=run.buffer.weights.nbytes,
        gradients=run.buffer.grads.nbytes,
        optimizer=sum(x.nbytes for x in held),
        tables=sum(x.nbytes for stage in stages for x in stage.rope or ()),
        in_flight=max(kept) - state,
        peak=shapes.peak,
        issued=calls,
    )


def _told(error: Exception, plan: Arrangement, rank: int) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if PACKAGE in Path(f.filename).parents]
    places = [f"{Path(f.filename).relative_to(PACKAGE.parent)}:{f.lineno}" for f in reversed(frames[-INNERMOST:])]
    where = plan_mesh(plan.world, rank, **plan.sizes).describe()
    what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return f"{where} cannot take a step in this layout: {what} (in {', of '.join(places)}); change the layout"


def tell(plan: Arrangement, sources: Sources, local_world: int) -> str:
    """What a dry run prints of the rank that it is asked for, on nodes of `local_world` ranks. Raises SetupError."""
    asked, config = plan.config.train.as_rank, plan.config
    assert asked is not None
    done, rank = rehearse(plan, sources, asked), asked
    axes = [done.mesh.axis(name) for name in ("pp", "dp", "cp", "tp")]
    device = "a CPU" if config.parallel.device == "cpu" else "a card"
    left_out = ["--compile"] * config.train.compile + ["CUDA graphs"] * (config.train.cuda_graph_impl != "none")
    rows = {
        f"rank {rank:,}": ", ".join(f"{axis.name} {axis.rank} of {axis.size}" for axis in axes if axis.size > 1)
        + f"; node {rank // local_world:,}, its rank {rank % local_world} of {local_world}",
        "stages": ", ".join(f"{n} (layers {r.start} to {r.stop - 1})" if r else f"{n}" for n, r in done.layers.items()),
        "parameters": f"{done.parameters:,}",
        **{name: f"{size:,} bytes, {_gib(size)}" for name, size in done.parts.items()},
        "peak": f"{_gib(done.peak)}: {_gib(done.state)} of these, {_gib(done.in_flight)} that micro-batches keep, and "
        f"{_gib(done.peak - done.state - done.in_flight)} for a moment",
        "assumed": f"on {device} with kernels in their torch forms and fused attention; loss and gradient are finite"
        + (f"; without {' and '.join(left_out)}" if left_out else ""),
    }
    return "\n".join([figures.table(rows), *([figures.columns(_table(done.issued)), NOTE] if done.issued else [])])


NOTE = "bytes: of the tensor that the rank gives, or gets as a message; logs, evaluation and saves are not in a step"


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"


def _table(calls: Counter[Issued]) -> list[tuple[str, ...]]:
    """One row for all sizes of a kind, its head first."""
    kinds: dict[Issued, dict[int, int]] = {}
    for one, times in sorted(calls.items()):
        kinds.setdefault(replace(one, bytes=0), {})[one.bytes] = times
    rows = [("in a step", "ranks", "dtype", "bytes each", "times", "GiB in all")]
    for kind, times in kinds.items():
        peer = f" {kind.peer:,}" if kind.peer >= 0 else ""
        each = " - ".join(f"{size:,}" for size in dict.fromkeys((min(times), max(times))))
        total = sum(size * n for size, n in times.items()) / 2**30
        name = f"{kind.axis}: {kind.op}{peer}"
        rows.append((name, f"{kind.ranks:,}", kind.dtype, each, f"{sum(times.values()):,}", f"{total:,.3f}"))
    return rows
