"""The grid of ranks: (pp, dp, cp, tp), tp innermost, and a second view of the ranks of a stage for experts.

    rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank
    rank = ((dp_rank * pp + pp_rank) * cp + cp_rank) * tp + tp_rank      with dp outermost
    rank within the stage = (dp_rank * cp + cp_rank) * tp + tp_rank = (edp_rank * ep + ep_rank) * etp + etp_rank
    dp_cp_rank = dp_rank * cp + cp_rank = dp_replicate_rank * dp_shard + dp_shard_rank

tp neighbours are adjacent ranks, so tensor parallelism stays inside a node. Pipeline stages, which exchange the least,
are farthest apart, unless dp is outermost. Experts split the same dp * cp * tp ranks in their own way
(arXiv:2504.14960); the only condition is that ep * etp divides them. An axis of size 1 has no group and its collectives
are the identity, so one process is not a special case. Axes that run through the same ranks are one axis. A `Mesh` is
passed explicitly: there is no module state. A planned mesh has only sizes and positions.
"""

import datetime
import errno
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megalite.config.environment import env_override
from megalite.parallel.cpu.peer_sockets import NotShared
from megalite.parallel.cpu.shared_memory import CollectiveBackend, SharedMemoryBackend
from megalite.parallel.phase_timer import PhaseTimer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ABSTRACT: Final = "planned"
AXES: Final = ("pp", "dp", "cp", "tp", "dp_cp_tp", "dp_cp", "dp_shard", "dp_replicate") + (
    ("edp", "ep", "etp", "ep_etp", "edp_shard", "edp_replicate", "tied_embedding")
)

RECORDS_KEPT = 16  # calls
SEND, RECEIVE = "send to", "receive from"
# torch 2.15 has a public name for it, and warns about the private one
set_group_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


@dataclass(eq=False)
class CommRecord:
    """One collective, or one message to or from the global rank `peer` (-1 for a collective), recorded for the thread
    that looks for hangs. The rank enters it while it issues the call and while it waits for it. All ranks of an axis do
    the same in the same order: collective 12 of one is that of all, message 12 to a neighbour its message 12 from here.
    """

    axis: "Axis"
    op: str
    peer: int
    seq_id: int
    num_bytes: int
    dtype: Any  # of its tensor

    @property
    def signature(self) -> tuple[str, int, int, int]:
        return self.op, self.peer, self.seq_id, self.num_bytes

    def __enter__(self) -> "CommRecord":
        self.axis.comm_log.blocked_on = self, time.monotonic()
        if self.peer < 0:  # the pipeline has spans of its own for messages
            phase = "agreement" if self.axis.name == "world" else "communication"
            self._span = self.axis.clock.span(phase, self.op, self.axis.name)
            self._span.__enter__()
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if self.peer < 0:
            self._span.__exit__(kind, *error)
        if kind is None:  # after an error it stays, since that is where this rank was
            self.axis.comm_log.blocked_on = None


@dataclass(eq=False)
class CommLog:
    """The calls of one rank on one axis.

    blocked_on      the call that blocks the rank, and since when (time.monotonic)
    p2p_timeout     how long it waits for a message; None: the time-out that gloo was given when it made the group
    """

    recent: deque[CommRecord] = field(default_factory=lambda: deque(maxlen=RECORDS_KEPT))
    blocked_on: tuple[CommRecord, float] | None = None
    seq_ids: dict[tuple[str, int], int] = field(default_factory=dict)
    p2p_timeout: datetime.timedelta | None = None


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh, seen from this rank.

    ranks      global ranks along the axis, in axis order
    comm_log   the collectives and messages that this rank has begun on it
    clock      this rank's clock, which times the waits for collectives
    backend    what carries its collectives: a group, or a CollectiveBackend with a group (memory that its ranks share,
               or a recorder of planning/layer_cost.py). ABSTRACT: nothing, and a collective is an error. None: there is
               no other rank
    """

    name: str
    size: int = 1
    rank: int = 0
    backend: "ProcessGroup | CollectiveBackend | Literal['planned'] | None" = None
    ranks: tuple[int, ...] = (0,)
    clock: PhaseTimer = field(default_factory=PhaseTimer, compare=False, repr=False)
    comm_log: CommLog = field(default_factory=CommLog, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.size > 1 and self.backend is None:
            raise ValueError(f"axis {self.name} of size {self.size} has no transport; give a group, or ABSTRACT")

    @property
    def group(self) -> "ProcessGroup | None":
        """None exactly when `size` is 1. Raises RuntimeError if the axis is only planned."""
        if self.size == 1:
            return None
        if self.backend == ABSTRACT:
            raise RuntimeError(f"a collective over {self.name}={self.size}, which is only planned; use build_mesh")
        return self.backend.group if isinstance(self.backend, CollectiveBackend) else self.backend

    @property
    def custom_backend(self) -> CollectiveBackend | None:
        """The CollectiveBackend that gathers and scatters in place of the group, if there is one."""
        return self.backend if isinstance(self.backend, CollectiveBackend) else None

    def record(self, op: str, x: torch.Tensor, peer: int = -1) -> CommRecord:
        """Record a collective over the axis, or a message to or from the rank `peer`; a context for its issue."""
        numbers, stream = self.comm_log.seq_ids, (op if peer >= 0 else "", peer)
        numbers[stream] = numbers.get(stream, 0) + 1
        call = CommRecord(self, op, peer, numbers[stream], x.nbytes, x.dtype)
        self.comm_log.recent.append(call)
        return call

    def shard_start(self, part: int) -> int:
        """The index at which this rank's part begins in a dim of which every rank has `part` elements."""
        return self.rank * part

    def shard_slice(self, part: int) -> slice:
        """This rank's part of that dim."""
        return slice(self.rank * part, (self.rank + 1) * part)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


@dataclass(frozen=True)
class Mesh:
    """All axes of the run, and the device this rank computes on.

    dp_cp_tp          the ranks of a pipeline position; only planned unless it is asked for
    dp_cp             the ranks over which gradients are summed
    dp_shard, dp_replicate    split dp_cp: ranks that shard the optimizer's state, and copies of such a set of ranks
    edp, ep, etp      the ranks of dp x cp x tp, for experts: copies, different experts, shards of each expert
    ep_etp            the ranks that have all experts together
    edp_shard, edp_replicate    split edp as dp_shard and dp_replicate split dp_cp
    pp_grad           the ranks of pp, with a channel of its own for gradients
    tied_embedding    first and last stage, for tied embeddings
    world             all ranks
    start             the same, with the time-out of the start, also where the groups of others were made with a shorter
                      one (`build_mesh`)
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
    clock: PhaseTimer = field(default_factory=PhaseTimer, compare=False, repr=False)  # shared by all axes
    not_shared: str = ""  # why some ranks of one machine do not exchange through shared memory, as they were to

    @classmethod
    def single_process(cls, device: str | torch.device = "cpu") -> "Mesh":
        """The mesh of a single process: no torch.distributed at all."""
        return cls(device=torch.device(device))

    def __repr__(self) -> str:
        """The axes that a layout names, where they are longer than 1, and which rank this is."""
        named = ("pp", "dp", "cp", "tp", "ep", "etp")
        sizes = [f"{name}={self.axis(name).size}" for name in named if self.axis(name).size > 1]
        return f"Mesh({', '.join([*sizes, f'device={str(self.device)!r}'])}, {self.describe()} of {self.world.size})"

    def axis(self, name: str) -> Axis:
        """The axis of that field; its own `name` may be that of an axis that runs through the same ranks."""
        return getattr(self, name)

    @property
    def sizes(self) -> Mapping[str, int]:
        return {name: self.axis(name).size for name in AXES}

    @property
    def coordinates(self) -> Mapping[str, int]:
        return {name: self.axis(name).rank for name in AXES}

    @property
    def active_axes(self) -> list[Axis]:
        """All axes that this rank shares with others, each once."""
        distinct = {id(axis): axis for axis in map(self.axis, (*AXES, "pp_grad", "world", "start"))}.values()
        return [axis for axis in distinct if axis.size > 1 and axis.backend != ABSTRACT]

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Limit the time of a collective on every group, since new groups do not inherit the default group's limit.
        With TORCH_DISTRIBUTED_DEBUG=DETAIL they keep the one that they were made with."""
        for axis in self.active_axes:
            if not compares_collectives():
                set_group_timeout(timeout, axis.group)
            if axis.custom_backend is not None:
                axis.custom_backend.timeout = timeout
            if dist.get_backend(axis.group) == "gloo":  # with nccl a wait with a limit would block the host
                axis.comm_log.p2p_timeout = timeout

    def describe(self) -> str:
        """This rank's name in errors and logs: `rank 5 (pp 1, dp 0, tp 1)`."""
        where = ", ".join(f"{k} {self.axis(k).rank}" for k in ("pp", "dp", "cp", "tp") if self.axis(k).size > 1)
        return f"rank {self.world.rank}" + (f" ({where})" if where else "")


def stage_coordinates(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Of every rank of a stage, in the order of its axis: where it is on the axes that split or share out parameters.

    >>> sizes = {"dp_cp_tp": 4, "tp": 2, "ep": 2, "dp_shard": 2}
    >>> [(at["dp_cp"], at["tp"], at["ep"]) for at in stage_coordinates(sizes)]
    [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)]
    """
    of = lambda name: sizes.get(name, 1)  # noqa: E731
    positions = []
    for rank in range(of("dp_cp_tp")):
        dp_cp, edp = rank // of("tp"), rank // (of("ep") * of("etp"))
        at = {"dp_cp_tp": rank, "tp": rank % of("tp"), "dp_cp": dp_cp, "etp": rank % of("etp"), "edp": edp}
        at |= {"ep": rank // of("etp") % of("ep")}
        at |= {"dp_shard": dp_cp % of("dp_shard"), "dp_replicate": dp_cp // of("dp_shard")}
        at |= {"edp_shard": edp % of("edp_shard"), "edp_replicate": edp // of("edp_shard")}
        positions.append(at)
    return positions


def rank_grid(world: int, tp: int, pp: int, cp: int = 1, *, dp_outermost: bool = False) -> Tensor:
    """grid[pp, dp, cp, tp] = global rank. `world` must be divisible by tp * pp * cp.

    >>> rank_grid(8, tp=2, pp=2).tolist()
    [[[[0, 1]], [[2, 3]]], [[[4, 5]], [[6, 7]]]]
    >>> rank_grid(8, tp=2, pp=2, dp_outermost=True).tolist()
    [[[[0, 1]], [[4, 5]]], [[[2, 3]], [[6, 7]]]]
    """
    ranks = torch.arange(world)
    return ranks.view(-1, pp, cp, tp).transpose(0, 1) if dp_outermost else ranks.view(pp, -1, cp, tp)


def world_axis() -> Axis:
    """All ranks, in the default group, which exists before a mesh."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Axis("world")
    world = dist.get_world_size()
    return Axis("world", world, dist.get_rank(), dist.group.WORLD, tuple(range(world)))


def compares_collectives() -> bool:
    """Whether torch compares each collective of all ranks before it is done (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""
    return distributed_c10d.get_debug_level() == distributed_c10d.DebugLevel.DETAIL


class MeshSizes(TypedDict, total=False):
    """Sizes of the axes of a mesh; dp is the rest of the world.

    ep, etp    for experts; ep None: there are none, and their axes are only planned unless another axis has the ranks
    num_optimizer_instances  the number of sets of ranks into which dp_cp and edp are split, each with the whole
               optimizer state; None: every rank has the whole state
    dp_cp_tp   whether the ranks of a stage exchange as one
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
    """Make every group of the run; collective over the default group, so all ranks call it in the same way.

    timeout: for each group. later_timeout: what `set_timeout` will be called with; with TORCH_DISTRIBUTED_DEBUG=DETAIL
    groups have it from the beginning, as torch cannot change it (it compares collectives in a group that it keeps to
    itself). shared_memory: whether, on CPU, ranks of a stage that are all on one machine exchange data
    through it (None: yes, unless the environment says otherwise). Raises ValueError if the world cannot be split so.
    """
    use_shared_memory = device.type == "cpu" and (
        env_override("shared_memory", True) if shared_memory is None else shared_memory
    )
    if later_timeout is not None and compares_collectives():
        timeout = later_timeout
    groups = _GroupBuilder(world_axis(), timeout, use_shared_memory)
    mesh = _build_axes(groups, **sizes)
    if timeout is not None:
        mesh.set_timeout(timeout)
    return replace(mesh, device=device, not_shared=groups.worst_error() if use_shared_memory else "")


def abstract_mesh(world: int, rank: int, **sizes: Unpack[MeshSizes]) -> Mesh:
    """The mesh of rank `rank` of `world`, without groups."""
    return _build_axes(_GroupBuilder(Axis("world", world, rank, ABSTRACT, tuple(range(world)))), **sizes)


class _GroupBuilder:
    """Makes axes out of grids of ranks, and each group once. If `world` is planned, all axes are."""

    def __init__(self, world: Axis, timeout: datetime.timedelta | None = None, use_shared_memory: bool = False):
        self.clock, self.timeout, self.memory = PhaseTimer(), timeout, use_shared_memory
        self.world = self.start = replace(world, clock=self.clock)
        if compares_collectives() and world.size > 1 and world.backend != ABSTRACT:
            self.start = replace(self.start, name="start", comm_log=CommLog())
            self.world = replace(self.world, backend=self._new_group(world.ranks, "world"))
        self.axes: dict[tuple[tuple[int, ...], ...], Axis] = {}
        self.not_shared: list[int] = []  # why groups of this rank share no memory

    def worst_error(self) -> str:
        """Return why ranks of one machine share no memory, in words; "" if all that could do. Collective."""
        worst = torch.tensor(max((number for number in self.not_shared if number != errno.EREMOTE), default=0))
        if self.world.size > 1:
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.world.group)
        return os.strerror(int(worst)) if worst else ""

    def axis_along(self, name: str, grid: Tensor, dim: int, *, abstract: bool = False, own_group: bool = False) -> Axis:
        """The axis along `dim` of `grid`; of size 1 for a rank that is not in the grid. `own_group`: with a group of
        its own, so that its work does not queue behind other work. `abstract`: without a group, unless another axis has
        made it.
        All ranks ask for the same axes in the same order."""
        size, rank = grid.shape[dim], self.world.rank
        alone = Axis(name, ranks=(rank,), clock=self.clock)
        if size == 1:
            return alone
        lines = grid.movedim(dim, -1).reshape(-1, size)
        coordinates = [(tuple(lines[i].tolist()), int(j)) for i, j in (lines == rank).nonzero()]
        axis = Axis(name, size, coordinates[0][1], ABSTRACT, coordinates[0][0], self.clock) if coordinates else alone
        if self.world.backend == ABSTRACT:
            return axis
        rank_sets = tuple(sorted(map(tuple, lines.tolist())))
        if rank_sets in self.axes and not own_group:
            return self.axes[rank_sets]
        if abstract:
            return axis
        group: Any = self.world.group
        if len(rank_sets) > 1 or own_group:  # all ranks take part in the making of each
            groups = [self._new_group(ranks, name) for ranks in rank_sets]
            group = next((made for made, ranks in zip(groups, rank_sets, strict=True) if rank in ranks), None)
        if not coordinates:
            return axis
        if self.memory and not own_group and name not in ("pp", "dp_cp_tp"):  # collective over the axis
            try:
                group = SharedMemoryBackend.open(group, axis.rank, size)
            except NotShared as error:  # on all ranks of the axis, which exchange through its group
                self.not_shared.append(error.errno or 0)
        axis = replace(axis, backend=group)
        return axis if own_group else self.axes.setdefault(rank_sets, axis)

    def _new_group(self, ranks: Sequence[int], name: str) -> Any:
        return dist.new_group(list(ranks), timeout=self.timeout, group_desc=name)


def _build_axes(groups: _GroupBuilder, **sizes: Unpack[MeshSizes]) -> Mesh:
    """Make all axes, in the same order on all ranks."""
    if unknown := sizes.keys() - MeshSizes.__optional_keys__:
        raise TypeError(f"a mesh has no {', '.join(sorted(unknown))}")
    tp, pp, cp, ep, etp = (sizes.get(name) or 1 for name in ("tp", "pp", "cp", "ep", "etp"))
    world = groups.world.size
    if world % (tp * pp * cp):
        raise ValueError(f"world size {world} is not a multiple of tp {tp} x pp {pp} x cp {cp}")
    grid = rank_grid(world, tp, pp, cp, dp_outermost=sizes.get("dp_outermost", False))
    dp_cp_tp = grid.flatten(1)
    if dp_cp_tp.shape[1] % (ep * etp):
        raise ValueError(f"ep {ep} x etp {etp} does not divide the {dp_cp_tp.shape[1]} ranks of a stage")
    axes: dict[str, Any] = {
        name: groups.axis_along(name, grid, dim) for dim, name in enumerate(("pp", "dp", "cp", "tp"))
    }

    def add_data_axes(copies: Tensor, names: tuple[str, str, str], **abstract: bool) -> None:
        parts = sizes.get("num_optimizer_instances", 1) or copies.shape[1]
        if copies.shape[1] % parts:
            raise ValueError(f"{parts} instances of the optimizer do not divide {names[0]} {copies.shape[1]}")
        split = copies.unflatten(1, (parts, -1))
        for name, ranks, dim in zip(names, (copies, split, split), (1, 1, 2), strict=True):
            axes[name] = groups.axis_along(name, ranks, dim, **abstract)

    ep_etp, planned = dp_cp_tp.unflatten(1, (-1, ep, etp)), sizes.get("ep") is None
    add_data_axes(grid.flatten(1, 2), ("dp_cp", "dp_replicate", "dp_shard"))
    add_data_axes(ep_etp, ("edp", "edp_replicate", "edp_shard"), abstract=planned)
    axes |= {name: groups.axis_along(name, ep_etp, dim, abstract=planned) for dim, name in ((2, "ep"), (3, "etp"))}
    axes["ep_etp"] = groups.axis_along("ep_etp", ep_etp.flatten(2), 2, abstract=planned)
    axes["dp_cp_tp"] = groups.axis_along("dp_cp_tp", dp_cp_tp, 1, abstract=not sizes.get("dp_cp_tp"))
    axes["pp_grad"] = groups.axis_along("pp_grad", grid, 0, own_group=True)
    axes["tied_embedding"] = groups.axis_along("tied_embedding", grid[[0, -1]] if pp > 1 else grid, 0, own_group=True)
    return Mesh(**axes, world=groups.world, start=groups.start, clock=groups.clock)
