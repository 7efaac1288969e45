"""One rank's part of a run, without the others and without memory: built and stepped once on the meta device.

    mesh, stages, buffers, optimizer, schedule    those of the run (training/setup.py), on tensors without data
    collectives and messages                      torch's fake process group, which moves nothing
    the step                                      the run's own, so parts that do not fit fail as they would there

Kernels are a card's, whose launches are counted and not run (planning/meta_mode.py); with --device cpu they are torch's forms,
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
from megalite.launch.rank_info import RankInfo
from megalite.models.gpt import Stage
from megalite.parallel.comm import Pending
from megalite.parallel.mesh import SEND, Mesh, abstract_mesh
from megalite.pipeline.schedule import Action
from megalite.planning.meta_mode import META, MetaMode
from megalite.planning.run_plan import RunPlan
from megalite.training.datasets import DatasetBundle
from megalite.training.logging import log_format as figures
from megalite.training.setup import SetupError, build_run
from megalite.training.state import Run
from megalite.training.train_step import train_step

PACKAGE = Path(megalite.__file__).resolve().parent
NOTE = "bytes: of the tensor that the rank gives, or gets as a message; logs, evaluation and saves are not in a step"
MAX_SIZES = 4
MAX_FRAMES = 3  # lines of code that an error names
REFUSED = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError)


@dataclass(frozen=True, order=True)
class CollectiveCall:
    """A collective over an axis of `ranks` ranks (`peer` -1), or a message to or from the global rank `peer`. `bytes`:
    of the tensor that this rank gives, or gets as a message."""

    axis: str
    op: str
    ranks: int
    peer: int
    dtype: str
    bytes: int


@contextlib.contextmanager
def record_collectives(mesh: Mesh) -> Iterator[Counter[CollectiveCall]]:
    """Counts the collectives and messages that this rank issues inside, on any device; complete on exit."""
    counts: Counter[CollectiveCall] = Counter()
    for axis in mesh.active_axes:
        axis.comm_log.recent = deque()
    yield counts
    for axis in mesh.active_axes:
        for call in axis.comm_log.recent:
            counts[CollectiveCall(axis.name, call.op, axis.size, call.peer, str(call.dtype)[6:], call.num_bytes)] += 1


@dataclass(frozen=True)
class RankDryRun:
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
    record_collectives: Counter[CollectiveCall]

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


def dry_run_rank(plan: RunPlan, sources: DatasetBundle, rank: int) -> RankDryRun:
    """Build the part of `rank` and take one step of the final batch size. Raises SetupError where that fails."""
    config = plan.config
    train = replace(config.train, compile=False, cuda_graph_impl="none")
    plan = plan if train == config.train else replace(plan, config=replace(config, train=train))
    device = "cpu" if config.parallel.device == "cpu" else "cuda"
    with _fake_group(rank, plan.world), MetaMode(device) as shapes:
        try:
            run = build_run(plan.config, RankInfo(rank, plan.world), META, sources=sources, arrangement=plan)
            return _stepped(run, plan, shapes)
        except REFUSED as error:
            raise SetupError(_told(error, plan, rank)) from error


def _stepped(run: Run, plan: RunPlan, shapes: MetaMode) -> RankDryRun:
    run.rerun_mode = "disabled"  # a second computation would not give equal numbers
    run.state.consumed_samples = run.batch_sizes.milestones[-1][0]
    stages = [stage for stage in run.pipeline.stages if isinstance(stage, Stage)]
    post, alive = run.pipeline._start_p2p, [0]

    def post_and_wait(op: str, action: Action, tensor: Tensor) -> Pending:
        pending = post(op, action, tensor)
        if op == SEND:  # the fake group never completes it by itself, and would keep all tensors sent
            pending.wait()
        return pending

    run.pipeline._start_p2p = post_and_wait
    for stage in stages:
        stage.register_forward_hook(lambda *_: alive.append(shapes.live))
    state, main, weights = shapes.live, run.optimizer, run.buffer.weights
    host = main.offloaded.host_bytes + weights.host_bytes
    shapes.peak = state
    with record_collectives(run.mesh) as calls:
        train_step(run)
        run.buffer.wait_param_sync()  # as the next step would
    run.close()
    kept = [n for n in range(len(main.main)) if n not in main.offloaded.state]
    held = [x for n in kept for x in main.state[n].values()] + (
        [] if main.main_is_model else [main.main[n] for n in kept]
    )
    optimizer = sum(x.nbytes for x in held)
    parts = {"weights": weights.nbytes, "gradients": run.buffer.grads.nbytes, "optimizer": optimizer}
    if tables := sum(x.nbytes for stage in stages for x in stage.rope or ()):
        parts["rotary tables"] = tables
    return RankDryRun(
        mesh=run.mesh,
        layers={number: plan.layer_ranges[number] for number in plan.placement.stages_of_rank(run.mesh.pp.rank)},
        parameters=sum(entry.numel for entry in run.buffer.layout.entries),
        parts=parts,
        host=host,
        in_flight=max(alive) - state,
        peak=shapes.peak - host - main.offloaded.disk,
        record_collectives=calls,
    )


def _told(error: Exception, plan: RunPlan, rank: int) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if PACKAGE in Path(f.filename).parents]
    frames = [f for f in frames if Path(f.filename).name != "meta.py"]
    places = [f"{Path(f.filename).relative_to(PACKAGE.parent)}:{f.lineno}" for f in reversed(frames[-MAX_FRAMES:])]
    where = abstract_mesh(plan.world, rank, **plan.mesh_sizes).describe()
    what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return f"{where} cannot take a step in this layout: {what} (in {', of '.join(places)}); change the layout"


def format_rank(plan: RunPlan, sources: DatasetBundle, local_world: int) -> str:
    """The text of a dry run about the rank of --dry-run-rank, on nodes of `local_world` ranks. Raises SetupError."""
    asked, config = plan.config.train.dry_run_rank, plan.config
    assert asked is not None
    done, rank = dry_run_rank(plan, sources, asked), asked
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
    return "\n".join(
        [
            figures.table(rows),
            *([figures.aligned_table(_table(done.record_collectives)), NOTE] if done.record_collectives else []),
        ]
    )


def _size(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.2f} MiB"


def _table(calls: Counter[CollectiveCall]) -> list[tuple[str, ...]]:
    """Rows, the head first. A kind with more than MOST_SIZES sizes of tensors has one row for all of them."""
    kinds: dict[CollectiveCall, dict[int, int]] = {}
    for one, times in sorted(calls.items()):
        kinds.setdefault(replace(one, bytes=0), {})[one.bytes] = times
    rows = [("in a step", "ranks", "dtype", "bytes each", "times", "GiB in all")]
    for kind, times in kinds.items():
        peer = f" {kind.peer:,}" if kind.peer >= 0 else ""
        name = f"{kind.axis}: {kind.op}{peer}"
        parts = [{size: n} for size, n in times.items()] if len(times) <= MAX_SIZES else [times]
        for some in parts:
            each = " - ".join(f"{size:,}" for size in dict.fromkeys((min(some), max(some))))
            total = sum(size * n for size, n in some.items()) / 2**30
            counts = (f"{sum(some.values()):,}", f"{total:,.3f}")
            rows.append((name, f"{kind.ranks:,}", kind.dtype, each, *counts))
    return rows
