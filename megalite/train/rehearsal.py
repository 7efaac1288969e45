"""One rank's part of a run, without the others and without memory: built and stepped once on the meta device.

    mesh, stages, buffers, optimizer, schedule    those of the run (train/setup.py), on tensors without data
    collectives and messages                      torch's fake process group, which moves nothing
    the step                                      the run's own, so parts that do not fit fail as they would there

Kernels are a card's, whose launches are counted and not run (plan/meta.py); with --device cpu they are torch's forms,
except attention, which always has the shapes of a fused kernel. Values that the host reads from the device are 1: loss
and gradient norm are finite, and the step is taken.
"""

import contextlib
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

import megalite
from megalite.launch.ranks import Ranks
from megalite.models.gpt import Stage
from megalite.parallel.comm import Pending
from megalite.parallel.mesh import SEND, Mesh, plan_mesh
from megalite.pipeline.schedule import Action
from megalite.plan.arrangement import Arrangement
from megalite.plan.meta import META, Meta
from megalite.train.setup import SetupError, build_run
from megalite.train.sources import Sources
from megalite.train.state import Run
from megalite.train.step import train_step
from megalite.train.tell import figures

PACKAGE = Path(megalite.__file__).resolve().parent
NOTE = "bytes: of the tensor that the rank gives, or gets as a message; logs, evaluation and saves are not in a step"
MOST_SIZES = 4
INNERMOST = 3  # lines of code that an error names
REFUSED = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError)


@dataclass(frozen=True, order=True)
class Issued:
    """A collective over an axis of `ranks` ranks (`peer` -1), or a message to or from the global rank `peer`. `bytes`:
    of the tensor that this rank gives, or gets as a message."""

    axis: str
    op: str
    ranks: int
    peer: int
    dtype: str
    bytes: int


@contextlib.contextmanager
def issued(mesh: Mesh) -> Iterator[Counter[Issued]]:
    """Counts the collectives and messages that this rank issues inside, on any device; complete on exit."""
    counts: Counter[Issued] = Counter()
    for axis in mesh.axes:
        axis.calls.last = deque()
    yield counts
    for axis in mesh.axes:
        for call in axis.calls.last:
            counts[Issued(axis.name, call.op, axis.size, call.peer, str(call.dtype)[6:], call.bytes)] += 1


@dataclass(frozen=True)
class Rehearsal:
    """One rank's memory and calls. Exact bytes: `parts` are held all the time, by name, flat weights and gradients, the
    optimizer's own tensors and rotary tables; `in_flight`: the most that micro-batches keep after a forward; `peak`:
    the most at any time. `parameters`: elements that this rank holds."""

    mesh: Mesh
    layers: dict[int, range]  # of each stage of this rank
    parameters: int
    parts: dict[str, int]
    host: int  # of this, nothing is in `peak`
    in_flight: int
    peak: int
    issued: Counter[Issued]

    @property
    def state(self) -> int:
        return sum(self.parts.values())


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


def rehearse(plan: Arrangement, sources: Sources, rank: int) -> Rehearsal:
    """Build the part of `rank` and take one step of the final batch size. Raises SetupError where that fails."""
    config = plan.config
    train = replace(config.train, compile=False, cuda_graph_impl="none")
    made = plan if train == config.train else replace(plan, config=replace(config, train=train))
    device = "cpu" if config.parallel.device == "cpu" else "cuda"
    with _fake_group(rank, plan.world), Meta(device) as shapes:
        try:
            run = build_run(made.config, Ranks(rank, plan.world), META, sources=sources, arrangement=made)
            return _stepped(run, plan, shapes)
        except REFUSED as error:
            raise SetupError(_told(error, plan, rank)) from error


def _stepped(run: Run, plan: Arrangement, shapes: Meta) -> Rehearsal:
    run.rerun = "disabled"  # a second computation would not give equal numbers
    run.state.consumed_samples = run.batch_sizes.steps[-1][0]
    stages = [stage for stage in run.pipeline.stages if isinstance(stage, Stage)]
    post, alive = run.pipeline._post, [0]

    def at_once(op: str, action: Action, tensor: Tensor) -> Pending:
        pending = post(op, action, tensor)
        if op == SEND:  # the fake group never completes it by itself, and would keep all tensors sent
            pending.wait()
        return pending

    run.pipeline._post = at_once
    for stage in stages:
        stage.register_forward_hook(lambda *_: alive.append(shapes.live))
    state, main, weights = shapes.live, run.optimizer, run.buffer.weights
    host = main.host.bytes + weights.host_bytes
    shapes.peak = state
    with issued(run.mesh) as calls:
        train_step(run)
        run.buffer.wait_gather()  # as the next step would
    run.close()
    kept = [n for n in range(len(main.main)) if n not in main.host.kept]
    held = [x for n in kept for x in main.state[n].values()] + ([] if main.same else [main.main[n] for n in kept])
    optimizer = sum(x.nbytes for x in held)
    parts = {"weights": weights.nbytes, "gradients": run.buffer.grads.nbytes, "optimizer": optimizer}
    if tables := sum(x.nbytes for stage in stages for x in stage.rope or ()):
        parts["rotary tables"] = tables
    return Rehearsal(
        mesh=run.mesh,
        layers={number: plan.stages[number] for number in plan.placement.stages(run.mesh.pp.rank)},
        parameters=sum(entry.numel for entry in run.buffer.layout.entries),
        parts=parts,
        host=host,
        in_flight=max(alive) - state,
        peak=shapes.peak - host - main.host.disk,
        issued=calls,
    )


def _told(error: Exception, plan: Arrangement, rank: int) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if PACKAGE in Path(f.filename).parents]
    frames = [f for f in frames if Path(f.filename).name != "meta.py"]
    places = [f"{Path(f.filename).relative_to(PACKAGE.parent)}:{f.lineno}" for f in reversed(frames[-INNERMOST:])]
    where = plan_mesh(plan.world, rank, **plan.sizes).describe()
    what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return f"{where} cannot take a step in this layout: {what} (in {', of '.join(places)}); change the layout"


def tell(plan: Arrangement, sources: Sources, local_world: int) -> str:
    """The text of a dry run about the rank of --as-rank, on nodes of `local_world` ranks. Raises SetupError."""
    asked, config = plan.config.train.as_rank, plan.config
    assert asked is not None
    done, rank = rehearse(plan, sources, asked), asked
    axes = {name: done.mesh.axis(name) for name in ("pp", "dp", "cp", "tp", "ep", "etp")}
    place = (f"{name} {axis.rank} of {axis.size}" for name, axis in axes.items() if axis.size > 1)
    device = "a CPU" if config.parallel.device == "cpu" else "a card"
    left_out = ["--compile"] * config.train.compile + ["CUDA graphs"] * (config.train.cuda_graph_impl != "none")
    rows = {
        f"rank {rank:,}": ", ".join(place)
        + f"; node {rank // local_world:,}, its rank {rank % local_world} of {local_world}",
        "stages": ", ".join(f"{n} (layers {r.start} to {r.stop - 1})" if r else f"{n}" for n, r in done.layers.items()),
        "parameters": f"{done.parameters:,}",
        **{name: f"{size:,} bytes, {_size(size)}" for name, size in done.parts.items()},
        **({"on the host": f"{done.host:,} bytes, {_size(done.host)}"} if done.host else {}),
        "peak": f"{_size(done.peak)}: {_size(done.state)} of these, {_size(done.in_flight)} that micro-batches keep, "
        f"and {_size(done.peak - done.state - done.in_flight)} for a moment",
        "assumed": f"on {device} with fused attention; loss and gradient are finite"
        + (f"; without {' and '.join(left_out)}" if left_out else ""),
    }
    return "\n".join([figures.table(rows), *([figures.columns(_table(done.issued)), NOTE] if done.issued else [])])


def _size(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.2f} MiB"


def _table(calls: Counter[Issued]) -> list[tuple[str, ...]]:
    """Rows, the head first. A kind with more than MOST_SIZES sizes of tensors has one row for all of them."""
    kinds: dict[Issued, dict[int, int]] = {}
    for one, times in sorted(calls.items()):
        kinds.setdefault(replace(one, bytes=0), {})[one.bytes] = times
    rows = [("in a step", "ranks", "dtype", "bytes each", "times", "GiB in all")]
    for kind, times in kinds.items():
        peer = f" {kind.peer:,}" if kind.peer >= 0 else ""
        name = f"{kind.axis}: {kind.op}{peer}"
        parts = [{size: n} for size, n in times.items()] if len(times) <= MOST_SIZES else [times]
        for some in parts:
            each = " - ".join(f"{size:,}" for size in dict.fromkeys((min(some), max(some))))
            total = sum(size * n for size, n in some.items()) / 2**30
            counts = (f"{sum(some.values()):,}", f"{total:,.3f}")
            rows.append((name, f"{kind.ranks:,}", kind.dtype, each, *counts))
    return rows
