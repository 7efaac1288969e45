"""Dry run of a single rank: build its part of a run on the meta device and take one step, without the other ranks.

    mesh, stages, buffers, optimizer, schedule    the run's own (training/setup.py), on tensors without data
    collectives and messages                      torch's fake process group, which transfers nothing
    step                                          the run's own, so that errors of shapes are raised as in the run

Kernels are the GPU's, and their launches are counted but not executed (planning/meta_mode.py). With --device cpu they
are the PyTorch implementations, except attention, which always has the shapes of a fused kernel. Values that the host
reads from the device are 1, so loss and gradient norm are finite and the step updates the weights.
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
from megalite.training.logging import log_format
from megalite.training.setup import SetupError, build_run
from megalite.training.state import Run
from megalite.training.train_step import train_step

PACKAGE = Path(megalite.__file__).resolve().parent
NOTE = "bytes: the tensor that the rank sends, or receives as a message; a step has no logs, evaluations or saves"
MAX_SIZES = 4  # tensor sizes of one kind of collective that are listed separately
MAX_FRAMES = 3  # stack frames that an error message lists
STEP_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError)


@dataclass(frozen=True, order=True)
class CollectiveCall:
    """A collective over an axis, or a message between two ranks."""

    axis: str
    op: str
    ranks: int  # size of the axis
    peer: int  # global rank of the other end of a message; -1 for a collective
    dtype: str
    num_bytes: int  # of the tensor that this rank contributes, or receives as a message


@contextlib.contextmanager
def record_collectives(mesh: Mesh) -> Iterator[Counter[CollectiveCall]]:
    """Count the collectives and messages that this rank starts within the context; the counter is filled on exit."""
    counts: Counter[CollectiveCall] = Counter()
    for axis in mesh.active_axes:
        axis.comm_log.recent = deque()
    yield counts
    for axis in mesh.active_axes:
        for call in axis.comm_log.recent:
            dtype = str(call.dtype).removeprefix("torch.")
            counts[CollectiveCall(axis.name, call.op, axis.size, call.peer, dtype, call.num_bytes)] += 1


@dataclass(frozen=True)
class RankDryRun:
    """One rank's memory, in exact bytes, and its collectives in a step."""

    mesh: Mesh
    layers: dict[int, range]  # layers of each stage of this rank
    parameters: int  # elements of this rank's parameters
    parts: dict[str, int]  # always allocated: flat weights and gradients, the optimizer's tensors, rotary tables
    host: int  # in host memory, not part of `peak`
    in_flight: int  # maximum of the activations that micro-batches keep between forward and backward
    peak: int  # maximum at any time
    calls: Counter[CollectiveCall]

    @property
    def state(self) -> int:
        """The bytes that are always allocated."""
        return sum(self.parts.values())


@contextlib.contextmanager
def _fake_group(rank: int, world: int) -> Iterator[None]:
    if world == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # the import registers the backend "fake"

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Set timeout is now only supported")
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()


def dry_run_rank(plan: RunPlan, sources: DatasetBundle, rank: int) -> RankDryRun:
    """Build the part of the run that `rank` has and take one step of the final batch size.

    Raises:
        SetupError: if building or the step fails; the message says where.
    """
    config = plan.config
    train = replace(config.train, compile=False, cuda_graph_impl="none")
    plan = plan if train == config.train else RunPlan(replace(plan.shape, config=replace(config, train=train)))
    device = "cpu" if config.parallel.device == "cpu" else "cuda"
    with _fake_group(rank, plan.shape.world), MetaMode(device) as shapes:
        try:
            run = build_run(plan.config, RankInfo(rank, plan.shape.world), META, sources=sources, plan=plan)
            return _run_step(run, plan, shapes)
        except STEP_ERRORS as error:
            raise SetupError(_error_message(error, plan, rank)) from error


def _run_step(run: Run, plan: RunPlan, shapes: MetaMode) -> RankDryRun:
    """Take one step and return the memory and the collectives that `shapes` and the mesh have recorded."""
    run.rerun_mode = "disabled"  # a rerun would not give equal results
    run.progress.consumed_samples = run.batch_sizes.milestones[-1][0]
    stages = [stage for stage in run.pipeline.stages if isinstance(stage, Stage)]
    start_p2p = run.pipeline._start_p2p
    bytes_after_forward = [0]

    def start_and_wait(op: str, action: Action, tensor: Tensor) -> Pending:
        pending = start_p2p(op, action, tensor)
        if op == SEND:  # the fake group never completes a send by itself, and would keep all tensors sent
            pending.wait()
        return pending

    run.pipeline._start_p2p = start_and_wait
    for stage in stages:
        stage.register_forward_hook(lambda *_: bytes_after_forward.append(shapes.live))
    state_bytes, host_updater = shapes.live, run.optimizer.host_updater
    host_bytes = host_updater.host_bytes + run.sync.host_bytes
    shapes.peak = state_bytes
    with record_collectives(run.mesh) as calls:
        train_step(run)
        run.sync.wait_param_sync()  # as the next step would
    run.close()
    optimizer_tensors: list[Tensor] = []
    for bucket in run.optimizer.buckets:
        if bucket.is_offloaded:
            continue
        optimizer_tensors += bucket.state.values()
        if bucket.rounds_main:
            optimizer_tensors.append(bucket.main)
    parts = {
        "weights": sum(bucket.nbytes for bucket in run.sync.param_buckets),
        "gradients": sum(bucket.nbytes for bucket in run.sync.grad_buckets),
        "optimizer": sum(tensor.nbytes for tensor in optimizer_tensors),
    }
    if rotary_tables := [table for stage in stages for pair in stage.rope_tables.values() for table in pair]:
        parts["rotary tables"] = sum(table.nbytes for table in rotary_tables)
    return RankDryRun(
        mesh=run.mesh,
        layers={
            number: plan.balance.layer_ranges[number]
            for number in plan.shape.placement.stages_of_rank(run.mesh.pp.rank)
        },
        parameters=sum(entry.numel for entry in run.sync.layout.entries),
        parts=parts,
        host=host_bytes,
        in_flight=max(bytes_after_forward) - state_bytes,
        peak=shapes.peak - host_bytes - host_updater.disk_bytes,
        calls=calls,
    )


def _error_message(error: Exception, plan: RunPlan, rank: int) -> str:
    """Return the message about a failed dry run, with the innermost lines of megalite."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if PACKAGE in Path(frame.filename).parents]
    frames = [frame for frame in frames if Path(frame.filename).name != "meta_mode.py"]
    locations = [
        f"{Path(frame.filename).relative_to(PACKAGE.parent)}:{frame.lineno}" for frame in reversed(frames[-MAX_FRAMES:])
    ]
    position = abstract_mesh(plan.shape.world, rank, **plan.shape.mesh_sizes).describe()
    first_line = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return (
        f"{position} cannot take a step in this layout: {first_line} (in {', of '.join(locations)}); change the layout"
    )


def format_rank(plan: RunPlan, sources: DatasetBundle, local_world: int) -> str:
    """Return the report about the rank of --dry-run-rank, on nodes of `local_world` ranks.

    Raises:
        SetupError: if the dry run fails.
    """
    config = plan.config
    rank = config.train.dry_run_rank
    assert rank is not None
    result = dry_run_rank(plan, sources, rank)
    axes = {name: result.mesh.axis(name) for name in ("pp", "dp", "cp", "tp", "ep", "etp")}
    position = ", ".join(f"{name} {axis.rank} of {axis.size}" for name, axis in axes.items() if axis.size > 1)
    stages = [
        f"{number} (layers {layers.start} to {layers.stop - 1})" if layers else f"{number}"
        for number, layers in result.layers.items()
    ]
    temporary = result.peak - result.state - result.in_flight
    assumed = f"on a {'CPU' if config.parallel.device == 'cpu' else 'GPU'} with fused attention"
    assumed += "; loss and gradient are finite"
    ignored = []
    if config.train.compile:
        ignored.append("--compile")
    if config.train.cuda_graph_impl != "none":
        ignored.append("CUDA graphs")
    if ignored:
        assumed += f"; without {' and '.join(ignored)}"
    rows = {
        f"rank {rank:,}": f"{position}; node {rank // local_world:,}, its rank {rank % local_world} of {local_world}",
        "stages": ", ".join(stages),
        "parameters": f"{result.parameters:,}",
    }
    for name, size in result.parts.items():
        rows[name] = f"{size:,} bytes, {_format_size(size)}"
    if result.host:
        rows["on the host"] = f"{result.host:,} bytes, {_format_size(result.host)}"
    rows["peak"] = (
        f"{_format_size(result.peak)}: model state {_format_size(result.state)}, "
        f"saved activations {_format_size(result.in_flight)}, temporary {_format_size(temporary)}"
    )
    rows["assumed"] = assumed
    tables = [log_format.table(rows)]
    if result.calls:
        tables += [log_format.aligned_table(_call_rows(result.calls)), NOTE]
    return "\n".join(tables)


def _format_size(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.2f} MiB"


def _call_rows(calls: Counter[CollectiveCall]) -> list[tuple[str, ...]]:
    """Return the table of collectives, the head first.

    A kind with more than MAX_SIZES tensor sizes has a single row for all of them.
    """
    counts_by_kind: dict[CollectiveCall, dict[int, int]] = {}  # kind -> num_bytes -> count
    for call, count in sorted(calls.items()):
        counts_by_kind.setdefault(replace(call, num_bytes=0), {})[call.num_bytes] = count
    rows = [("in a step", "ranks", "dtype", "bytes each", "times", "GiB in total")]
    for kind, counts in counts_by_kind.items():
        peer = f" {kind.peer:,}" if kind.peer >= 0 else ""
        name = f"{kind.axis}: {kind.op}{peer}"
        groups = [counts]
        if len(counts) <= MAX_SIZES:
            groups = [{size: count} for size, count in counts.items()]
        for group in groups:
            sizes = " - ".join(f"{size:,}" for size in dict.fromkeys((min(group), max(group))))
            total_gib = sum(size * count for size, count in group.items()) / 2**30
            rows.append((name, f"{kind.ranks:,}", kind.dtype, sizes, f"{sum(group.values()):,}", f"{total_gib:,.3f}"))
    return rows
