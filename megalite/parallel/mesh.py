"""The device mesh: a grid of ranks (pp, dp, cp, tp), tp innermost, and a second view of a stage's ranks for experts.

    rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank
    rank = ((dp_rank * pp + pp_rank) * cp + cp_rank) * tp + tp_rank      with dp outermost
    rank within the stage = (dp_rank * cp + cp_rank) * tp + tp_rank = (edp_rank * ep + ep_rank) * etp + etp_rank
    dp_cp_rank = dp_rank * cp + cp_rank = dp_replicate_rank * dp_shard + dp_shard_rank

tp neighbors are adjacent ranks, so tensor parallelism stays inside a node. Pipeline stages communicate the least and
are farthest apart, unless dp is outermost. Experts split the same dp * cp * tp ranks differently (arXiv:2504.14960);
the only condition is that ep * etp divides dp * cp * tp.

An axis of size 1 has no group and its collectives are the identity, so one process is not a special case. Axes over the
same ranks are one `Axis` object with one group. A `Mesh` is passed explicitly: there is no module state. An abstract
mesh has sizes and coordinates, but no groups; a recorder may observe its collectives.
"""

import datetime
import errno
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, Unpack

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megalite.config.env_overrides import env_override
from megalite.parallel.cpu.peer_sockets import SharedMemoryError
from megalite.parallel.cpu.shared_memory import CollectiveBackend, SharedMemoryBackend
from megalite.parallel.phase_timer import PhaseTimer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ABSTRACT: Final = "abstract"
AXES: Final = (
    "pp",
    "dp",
    "cp",
    "tp",
    "dp_cp_tp",
    "dp_cp",
    "dp_shard",
    "dp_replicate",
    "edp",
    "ep",
    "etp",
    "ep_etp",
    "edp_shard",
    "edp_replicate",
    "tied_embedding",
)

RECORDS_KEPT = 16  # collectives and messages per axis
SEND, RECEIVE = "send to", "receive from"
# torch 2.15 has a public function for this, and warns about the private one
set_group_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


@dataclass(eq=False)
class CommRecord:
    """A record of one collective or point-to-point message, for the watchdog thread.

    It is also a context manager, which is entered while the call is issued and again while the rank waits for it. All
    ranks of an axis issue the same collectives in the same order, so equal `seq_id`s on different ranks are the same
    collective; message 12 to a peer is the peer's message 12 from this rank.

    Attributes:
        axis: the axis on which it was issued.
        op: name of the operation.
        peer: global rank at the other end of a message; -1 for a collective.
        seq_id: number of the call, counted from 1 over all collectives, and over the messages of one `op` and `peer`.
        num_bytes: size of the tensor.
        dtype: dtype of the tensor.
        start: when the context was last entered (time.monotonic()).
    """

    axis: "Axis"
    op: str
    peer: int
    seq_id: int
    num_bytes: int
    dtype: Any
    start: float = 0.0

    def __enter__(self) -> "CommRecord":
        self.start = time.monotonic()  # first, since the watchdog reads it through blocked_on
        self.axis.comm_log.blocked_on = self
        if self.peer < 0:  # the pipeline times messages itself
            phase = "agreement" if self.axis.name == "world" else "communication"
            self._span = self.axis.phase_timer.span(phase, self.op, self.axis.name)
            self._span.__enter__()
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if self.peer < 0:
            self._span.__exit__(kind, *error)
        if kind is None:  # after an error, blocked_on still shows the call that failed
            self.axis.comm_log.blocked_on = None


@dataclass(eq=False)
class CommLog:
    """The collectives and messages of one rank on one axis.

    Attributes:
        recent: the last RECORDS_KEPT records.
        blocked_on: the call that blocks the rank; None if no call blocks.
        seq_ids: the last sequence number for each (op, peer); the key of collectives is ("", -1).
        p2p_timeout: limit of the wait for a message; None: the timeout that the gloo group was created with.
    """

    recent: deque[CommRecord] = field(default_factory=lambda: deque(maxlen=RECORDS_KEPT))
    blocked_on: CommRecord | None = None
    seq_ids: dict[tuple[str, int], int] = field(default_factory=dict)
    p2p_timeout: datetime.timedelta | None = None


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, seen from this rank.

    Attributes:
        name: name of the axis: one of AXES, or "pp_grad", "world" or "start".
        size: number of ranks along the axis.
        rank: index of this rank along the axis.
        backend: a process group, or a CollectiveBackend with a group (shared memory, or the recorder of
            planning/layer_cost.py). ABSTRACT: collectives raise an error. None: the axis has size 1.
        ranks: global ranks along the axis, in axis order.
        phase_timer: timer of this rank, which measures the waits for collectives.
        comm_log: the collectives and messages that this rank has started on this axis.
    """

    name: str
    size: int = 1
    rank: int = 0
    backend: "ProcessGroup | CollectiveBackend | Literal['abstract'] | None" = None
    ranks: tuple[int, ...] = (0,)
    phase_timer: PhaseTimer = field(default_factory=PhaseTimer, compare=False, repr=False)
    comm_log: CommLog = field(default_factory=CommLog, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.size > 1 and self.backend is None:
            raise ValueError(f"axis {self.name} of size {self.size} has no backend; give a process group, or ABSTRACT")

    @property
    def group(self) -> "ProcessGroup | None":
        """The process group; None exactly if `size` is 1. Raises RuntimeError if the axis is abstract."""
        if self.size == 1:
            return None
        if self.backend == ABSTRACT:
            raise RuntimeError(f"a collective over {self.name}={self.size}, which is only planned; use build_mesh")
        return self.backend.group if isinstance(self.backend, CollectiveBackend) else self.backend

    @property
    def custom_backend(self) -> CollectiveBackend | None:
        """The CollectiveBackend that replaces the group for some collectives, or None."""
        return self.backend if isinstance(self.backend, CollectiveBackend) else None

    def record(self, op: str, x: torch.Tensor, peer: int = -1) -> CommRecord:
        """Record a collective over the axis, or a message to or from the global rank `peer`.

        Returns the record. The caller enters it as a context while it issues the call.
        """
        seq_ids = self.comm_log.seq_ids
        key = (op if peer >= 0 else "", peer)
        seq_ids[key] = seq_ids.get(key, 0) + 1
        record = CommRecord(self, op, peer, seq_ids[key], x.nbytes, x.dtype)
        self.comm_log.recent.append(record)
        return record

    def shard_start(self, shard_size: int) -> int:
        """Return the start of this rank's shard in a dim with `shard_size` elements per rank."""
        return self.rank * shard_size

    def shard_slice(self, shard_size: int) -> slice:
        """Return this rank's shard of a dim with `shard_size` elements per rank."""
        return slice(self.rank * shard_size, (self.rank + 1) * shard_size)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


@dataclass(frozen=True)
class Mesh:
    """All axes of the run, and the device of this rank.

    Attributes:
        pp, dp, cp, tp: pipeline, data, context and tensor parallel ranks.
        dp_cp_tp: all ranks of one pipeline rank; abstract unless MeshSizes.dp_cp_tp is set.
        dp_cp: the ranks over which gradients are summed.
        dp_shard, dp_replicate: split dp_cp into the ranks that shard the optimizer state, and the replicas of these.
        edp, ep, etp: split the ranks of dp x cp x tp for experts: replicas, different experts, shards of each expert.
        ep_etp: the ranks that together have all experts.
        edp_shard, edp_replicate: split edp as dp_shard and dp_replicate split dp_cp.
        pp_grad: the ranks of pp, with a separate group for gradients.
        tied_embedding: the first and the last pipeline rank, for tied embeddings.
        world: all ranks.
        start: all ranks, with the timeout of the startup even if the other groups had to be created with a shorter one
            (`build_mesh`).
        device: the device on which this rank computes.
        phase_timer: the timer of this rank, shared by all axes.
        shared_memory_error: the reason why some ranks of one machine cannot use shared memory although they should, or
            "" if there are none.
    """

    pp: Axis = field(default_factory=lambda: Axis("pp"))
    dp: Axis = field(default_factory=lambda: Axis("dp"))
    cp: Axis = field(default_factory=lambda: Axis("cp"))
    tp: Axis = field(default_factory=lambda: Axis("tp"))
    dp_cp_tp: Axis = field(default_factory=lambda: Axis("dp_cp_tp"))
    dp_cp: Axis = field(default_factory=lambda: Axis("dp_cp"))
    dp_shard: Axis = field(default_factory=lambda: Axis("dp_shard"))
    dp_replicate: Axis = field(default_factory=lambda: Axis("dp_replicate"))
    edp: Axis = field(default_factory=lambda: Axis("edp"))
    ep: Axis = field(default_factory=lambda: Axis("ep"))
    etp: Axis = field(default_factory=lambda: Axis("etp"))
    ep_etp: Axis = field(default_factory=lambda: Axis("ep_etp"))
    edp_shard: Axis = field(default_factory=lambda: Axis("edp_shard"))
    edp_replicate: Axis = field(default_factory=lambda: Axis("edp_replicate"))
    pp_grad: Axis = field(default_factory=lambda: Axis("pp_grad"))
    tied_embedding: Axis = field(default_factory=lambda: Axis("tied_embedding"))
    world: Axis = field(default_factory=lambda: Axis("world"))
    start: Axis = field(default_factory=lambda: Axis("start"))
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    phase_timer: PhaseTimer = field(default_factory=PhaseTimer, compare=False, repr=False)
    shared_memory_error: str = ""

    @classmethod
    def single_process(cls, device: str | torch.device = "cpu") -> "Mesh":
        """Return the mesh of a single process, which does not use torch.distributed."""
        return cls(device=torch.device(device))

    def __repr__(self) -> str:
        """Show the axes of the layout that are larger than 1, the device and this rank."""
        named = ("pp", "dp", "cp", "tp", "ep", "etp")
        sizes = [f"{name}={self.axis(name).size}" for name in named if self.axis(name).size > 1]
        return f"Mesh({', '.join([*sizes, f'device={str(self.device)!r}'])}, {self.describe()} of {self.world.size})"

    def axis(self, name: str) -> Axis:
        """Return the axis in field `name`. Its own `name` may differ: axes over the same ranks share one object."""
        return getattr(self, name)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of every axis in AXES."""
        return {name: self.axis(name).size for name in AXES}

    @property
    def coordinates(self) -> Mapping[str, int]:
        """The index of this rank along every axis in AXES."""
        return {name: self.axis(name).rank for name in AXES}

    @property
    def active_axes(self) -> list[Axis]:
        """All axes that have a group and more than one rank, each once."""
        distinct = {id(axis): axis for axis in map(self.axis, (*AXES, "pp_grad", "world", "start"))}.values()
        return [axis for axis in distinct if axis.size > 1 and axis.backend != ABSTRACT]

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the timeout of collectives on every group, since new groups don't inherit the default group's timeout.

        With TORCH_DISTRIBUTED_DEBUG=DETAIL, groups keep the timeout that they were created with.
        """
        for axis in self.active_axes:
            if not compares_collectives():
                set_group_timeout(timeout, axis.group)
            if axis.custom_backend is not None:
                axis.custom_backend.timeout = timeout
            if dist.get_backend(axis.group) == "gloo":  # with nccl, a wait with a timeout would block the host
                axis.comm_log.p2p_timeout = timeout

    def describe(self) -> str:
        """Return the name of this rank in errors and logs: `rank 5 (pp 1, dp 0, tp 1)`."""
        axes = [name for name in ("pp", "dp", "cp", "tp") if self.axis(name).size > 1]
        coordinates = ", ".join(f"{name} {self.axis(name).rank}" for name in axes)
        return f"rank {self.world.rank}" + (f" ({coordinates})" if coordinates else "")


def stage_coordinates(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Return the coordinates of every rank of a stage on the axes that shard or replicate parameters.

    The ranks are in the order of the axis dp_cp_tp. `sizes` maps axis names to their sizes (absent: 1).

    >>> sizes = {"dp_cp_tp": 4, "tp": 2, "ep": 2, "dp_shard": 2}
    >>> [(rank["dp_cp"], rank["tp"], rank["ep"]) for rank in stage_coordinates(sizes)]
    [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)]
    """
    tp, ep, etp = (sizes.get(name, 1) for name in ("tp", "ep", "etp"))
    dp_shard, edp_shard = (sizes.get(name, 1) for name in ("dp_shard", "edp_shard"))
    coordinates = []
    for rank in range(sizes.get("dp_cp_tp", 1)):
        dp_cp = rank // tp
        edp = rank // (ep * etp)
        coordinates.append(
            {
                "dp_cp_tp": rank,
                "tp": rank % tp,
                "dp_cp": dp_cp,
                "etp": rank % etp,
                "edp": edp,
                "ep": rank // etp % ep,
                "dp_shard": dp_cp % dp_shard,
                "dp_replicate": dp_cp // dp_shard,
                "edp_shard": edp % edp_shard,
                "edp_replicate": edp // edp_shard,
            }
        )
    return coordinates


@dataclass(frozen=True)
class RankOrder:
    """The order of the ranks: which global rank stands where in which pipeline rank. The positions are arithmetic.

    Attributes:
        world: number of ranks, a multiple of `pp` * `cp_tp`.
        pp: number of pipeline ranks.
        cp_tp: cp * tp, the number of adjacent ranks of one dp rank.
        dp_outermost: True for the order with dp outermost.

    >>> [RankOrder(8, pp=2, cp_tp=2, dp_outermost=outermost).stage_ranks(0) for outermost in (False, True)]
    [(0, 1, 2, 3), (0, 1, 4, 5)]
    """

    world: int
    pp: int
    cp_tp: int
    dp_outermost: bool = False

    @property
    def stage_size(self) -> int:
        """The number of ranks of one pipeline rank: dp * cp * tp."""
        return self.world // self.pp

    def position(self, rank: int) -> tuple[int, int]:
        """Return (pipeline rank, rank within the stage) of a global rank."""
        if not self.dp_outermost:
            return divmod(rank, self.stage_size)
        block, rank_in_block = divmod(rank, self.cp_tp)
        dp_rank, pp_rank = divmod(block, self.pp)
        return pp_rank, dp_rank * self.cp_tp + rank_in_block

    def ranks(self, pp_rank: Any, stage_rank: Any) -> Any:
        """Return the global ranks at these positions, which are integers or arrays that broadcast."""
        if not self.dp_outermost:
            return pp_rank * self.stage_size + stage_rank
        dp_rank, rank_in_block = divmod(stage_rank, self.cp_tp)
        return (dp_rank * self.pp + pp_rank) * self.cp_tp + rank_in_block

    def stage_ranks(self, pp_rank: int) -> tuple[int, ...]:
        """Return the global ranks of a pipeline rank, in the order of their rank within the stage."""
        return tuple(self.ranks(pp_rank, np.arange(self.stage_size)).tolist())


def world_axis() -> Axis:
    """Return the axis of all ranks. It uses the default group, so it needs no mesh."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Axis("world")
    world = dist.get_world_size()
    return Axis("world", world, dist.get_rank(), dist.group.WORLD, tuple(range(world)))


def compares_collectives() -> bool:
    """Return True if torch compares each collective across ranks first (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""
    return distributed_c10d.get_debug_level() == distributed_c10d.DebugLevel.DETAIL


class MeshSizes(TypedDict, total=False):
    """Sizes of the axes of a mesh; dp follows from them and the world size.

    Attributes:
        tp, pp, cp: sizes of these axes.
        ep, etp: sizes for experts. ep None: the model has no experts, and the expert axes are abstract unless another
            axis has the same ranks.
        num_optimizer_instances: number of sets of ranks into which dp_cp and edp are split, each with the full
            optimizer state. None: every rank has the full state.
        dp_outermost: True for the rank order with dp outermost.
        dp_cp_tp: True to create a group of all ranks of a stage.
    """

    tp: int
    pp: int
    cp: int
    ep: int | None
    etp: int
    num_optimizer_instances: int | None
    dp_outermost: bool
    dp_cp_tp: bool


def build_mesh(
    *,
    device: torch.device,
    timeout: datetime.timedelta | None = None,
    later_timeout: datetime.timedelta | None = None,
    shared_memory: bool | None = None,
    **sizes: Unpack[MeshSizes],
) -> Mesh:
    """Create every group of the run. Collective over the default group: all ranks pass the same arguments.

    Args:
        device: the device of this rank.
        timeout: timeout of every group; None: torch's default.
        later_timeout: the timeout with which `set_timeout` will be called later. With TORCH_DISTRIBUTED_DEBUG=DETAIL,
            groups are created with it, because torch cannot change it (it compares collectives in a private group).
        shared_memory: True to use shared memory on CPU between ranks of an axis that are all on one machine. None:
            True, unless the environment overrides it (config/env_overrides.py).
        sizes: sizes of the axes.

    Raises:
        ValueError: the world cannot be split into these sizes.
        TypeError: `sizes` has an unknown name.
    """
    use_shared_memory = device.type == "cpu" and (
        env_override("shared_memory", True) if shared_memory is None else shared_memory
    )
    if later_timeout is not None and compares_collectives():
        timeout = later_timeout
    groups = _GroupBuilder(world_axis(), sizes, timeout, use_shared_memory)
    mesh = _build_axes(groups, **sizes)
    if timeout is not None:
        mesh.set_timeout(timeout)
    return replace(mesh, device=device, shared_memory_error=groups.worst_error() if use_shared_memory else "")


def abstract_mesh(
    world: int, rank: int, recorder: Callable[[str], CollectiveBackend] | None = None, **sizes: Unpack[MeshSizes]
) -> Mesh:
    """Return the mesh of rank `rank` of `world`, without groups.

    Args:
        world: the number of ranks.
        rank: the global rank.
        recorder: name of an axis -> backend that gets the collectives over it; None: collectives raise an error.
        sizes: sizes of the axes.

    Raises:
        ValueError: the world cannot be split into these sizes.
        TypeError: `sizes` has an unknown name.
    """
    groups = _GroupBuilder(Axis("world", world, rank, ABSTRACT, tuple(range(world))), sizes, recorder=recorder)
    return _build_axes(groups, **sizes)


class _GroupBuilder:
    """A factory of axes, which creates each group once. If `world` is abstract, all axes are.

    The ranks of an axis through this rank are computed, and those of all others only where they are needed: to create
    groups, which is collective over all ranks.
    """

    def __init__(
        self,
        world: Axis,
        sizes: MeshSizes,
        timeout: datetime.timedelta | None = None,
        use_shared_memory: bool = False,
        recorder: Callable[[str], CollectiveBackend] | None = None,
    ):
        self.phase_timer = PhaseTimer()
        self.recorder = recorder
        self.timeout = timeout
        self.use_shared_memory = use_shared_memory
        self.world = self.start = replace(world, phase_timer=self.phase_timer)
        self.order = rank_order(world.size, sizes)
        self.pp_rank, self.stage_rank = self.order.position(world.rank)
        if compares_collectives() and world.size > 1 and world.backend != ABSTRACT:
            self.start = replace(self.start, name="start", comm_log=CommLog())
            self.world = replace(self.world, backend=self._new_group(world.ranks, "world"))
        self.axes: dict[tuple[tuple[int, ...], ...], Axis] = {}
        self.shared_memory_errnos: list[int] = []  # errno of each axis of this rank that could not share memory

    def worst_error(self) -> str:
        """Return the error message if ranks of one machine failed to share memory on any rank, else "". Collective."""
        worst = torch.tensor(max((code for code in self.shared_memory_errnos if code != errno.EREMOTE), default=0))
        if self.world.size > 1:
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.world.group)
        return os.strerror(int(worst)) if worst else ""

    def stage_axis(self, name: str, stride: int, size: int, *, abstract: bool = False) -> Axis:
        """Return an axis of `size` ranks of a stage, whose ranks within the stage are `stride` apart.

        Collective: all ranks request the same axes in the same order.

        Args:
            name: name of the axis.
            stride: distance of its ranks.
            size: number of its ranks.
            abstract: do not create a group, but use that of another axis with the same ranks if there is one.
        """
        offsets = stride * np.arange(size)
        index = self.stage_rank // stride % size
        ranks = self.order.ranks(self.pp_rank, self.stage_rank - index * stride + offsets)

        def all_lines() -> np.ndarray:
            stage_ranks = np.arange(self.order.stage_size)
            firsts = stage_ranks[stage_ranks // stride % size == 0]
            pp_ranks = np.arange(self.order.pp)
            return self.order.ranks(pp_ranks[:, None, None], firsts[:, None] + offsets).reshape(-1, size)

        return self._axis(name, size, tuple(ranks.tolist()), all_lines, abstract=abstract)

    def pipeline_axis(self, name: str, pp_ranks: Sequence[int], *, own_group: bool = False) -> Axis:
        """Return the axis of the ranks with the same rank within these stages; its size is 1 on ranks of other stages.

        Collective: all ranks request the same axes in the same order.

        Args:
            name: name of the axis.
            pp_ranks: pipeline ranks.
            own_group: create a separate group, so that its communication does not queue behind that of another axis.
        """
        positions = np.array(pp_ranks)
        ranks = self.order.ranks(positions, self.stage_rank).tolist() if self.pp_rank in pp_ranks else [self.world.rank]

        def all_lines() -> np.ndarray:
            return self.order.ranks(positions, np.arange(self.order.stage_size)[:, None])

        return self._axis(name, len(pp_ranks), tuple(ranks), all_lines, own_group=own_group)

    def _axis(
        self,
        name: str,
        size: int,
        ranks: tuple[int, ...],
        all_lines: Callable[[], np.ndarray],
        *,
        abstract: bool = False,
        own_group: bool = False,
    ) -> Axis:
        """Return the axis over `ranks`: the line of `all_lines` [lines, size] with this rank, or if none, only it."""
        axis = Axis(name, len(ranks), ranks.index(self.world.rank), ABSTRACT, ranks, self.phase_timer)
        if len(ranks) == 1:
            axis = replace(axis, backend=None)
        elif self.recorder is not None:
            axis = replace(axis, backend=self.recorder(name))
        if size == 1 or self.world.backend == ABSTRACT:
            return axis
        rank_sets = tuple(sorted(map(tuple, all_lines().tolist())))
        if rank_sets in self.axes and not own_group:
            return self.axes[rank_sets]
        if abstract:
            return axis
        group: Any = self.world.group
        if len(rank_sets) > 1 or own_group:  # creating a group is collective over all ranks
            groups = [self._new_group(line, name) for line in rank_sets]
            group = next(
                (group for group, line in zip(groups, rank_sets, strict=True) if self.world.rank in line), None
            )
        if axis.size == 1:
            return axis
        if self.use_shared_memory and not own_group and name not in ("pp", "dp_cp_tp"):  # collective over the axis
            try:
                group = SharedMemoryBackend.open(group, axis.rank, axis.size)
            except SharedMemoryError as error:  # raised on all ranks of the axis, which then use the process group
                self.shared_memory_errnos.append(error.errno or 0)
        axis = replace(axis, backend=group)
        return axis if own_group else self.axes.setdefault(rank_sets, axis)

    def _new_group(self, ranks: Sequence[int], name: str) -> Any:
        return dist.new_group(list(ranks), timeout=self.timeout, group_desc=name)


def rank_order(world: int, sizes: MeshSizes) -> RankOrder:
    """Return the order of the ranks of a mesh of these sizes.

    Raises:
        ValueError: the world cannot be split into these sizes.
        TypeError: `sizes` has an unknown name.
    """
    if unknown := sizes.keys() - MeshSizes.__optional_keys__:
        raise TypeError(f"a mesh has no {', '.join(sorted(unknown))}")
    tp, pp, cp = (sizes.get(name) or 1 for name in ("tp", "pp", "cp"))
    if world % (tp * pp * cp):
        raise ValueError(f"world size {world} is not a multiple of tp {tp} x pp {pp} x cp {cp}")
    return RankOrder(world, pp, cp * tp, sizes.get("dp_outermost", False))


def _build_axes(groups: _GroupBuilder, **sizes: Unpack[MeshSizes]) -> Mesh:
    """Create all axes, in the same order on all ranks."""
    tp, cp, ep, etp = (sizes.get(name) or 1 for name in ("tp", "cp", "ep", "etp"))
    pp, stage_size = groups.order.pp, groups.order.stage_size
    if stage_size % (ep * etp):
        raise ValueError(f"ep {ep} x etp {etp} does not divide the {stage_size} ranks of a stage")
    axes: dict[str, Any] = {}
    axes["pp"] = groups.pipeline_axis("pp", range(pp))
    axes["dp"] = groups.stage_axis("dp", cp * tp, stage_size // (cp * tp))
    axes["cp"] = groups.stage_axis("cp", tp, cp)
    axes["tp"] = groups.stage_axis("tp", 1, tp)

    def add_data_axes(stride: int, names: tuple[str, str, str], abstract: bool = False) -> None:
        """Add the axis of all ranks `stride` apart, and the replicate and shard axes into which it is split."""
        size = stage_size // stride
        instances = sizes.get("num_optimizer_instances", 1) or size
        if size % instances:
            raise ValueError(f"{instances} instances of the optimizer do not divide {names[0]} {size}")
        shards = size // instances
        for name, axis_stride, axis_size in zip(
            names, (stride, stride * shards, stride), (size, instances, shards), strict=True
        ):
            axes[name] = groups.stage_axis(name, axis_stride, axis_size, abstract=abstract)

    no_experts = sizes.get("ep") is None
    add_data_axes(tp, ("dp_cp", "dp_replicate", "dp_shard"))
    add_data_axes(ep * etp, ("edp", "edp_replicate", "edp_shard"), abstract=no_experts)
    axes["ep"] = groups.stage_axis("ep", etp, ep, abstract=no_experts)
    axes["etp"] = groups.stage_axis("etp", 1, etp, abstract=no_experts)
    axes["ep_etp"] = groups.stage_axis("ep_etp", 1, ep * etp, abstract=no_experts)
    axes["dp_cp_tp"] = groups.stage_axis("dp_cp_tp", 1, stage_size, abstract=not sizes.get("dp_cp_tp"))
    axes["pp_grad"] = groups.pipeline_axis("pp_grad", range(pp), own_group=True)
    ends = (0, pp - 1) if pp > 1 else (0,)
    axes["tied_embedding"] = groups.pipeline_axis("tied_embedding", ends, own_group=True)
    return Mesh(**axes, world=groups.world, start=groups.start, phase_timer=groups.phase_timer)
