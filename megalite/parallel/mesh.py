"""The grid of ranks: (pp, dp, cp, tp), tp innermost, and a second view of the ranks of a stage for experts.

    rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank
    rank = ((dp_rank * pp + pp_rank) * cp + cp_rank) * tp + tp_rank      with dp outermost
    rank within the stage = (dp_rank * cp + cp_rank) * tp + tp_rank = (edp_rank * ep + ep_rank) * etp + etp_rank
    data_rank = dp_rank * cp + cp_rank = replica_rank * shard + shard_rank

tp neighbours are adjacent ranks, so tensor parallelism stays inside a node; pipeline stages, which exchange the
least, are farthest apart, unless dp is to be outermost. Experts split the same dp * cp * tp ranks in their own way
(arXiv:2504.14960): all that is asked is that ep * etp divides them. An axis of size 1 has no group at all and its
collectives are the identity, so that one process is not a special case; axes that run through the same ranks are one
axis. A `Mesh` is passed explicitly: there is no module state. A planned one has sizes and positions alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megalite.config.environment import override
from megalite.parallel.calls import Call, Calls
from megalite.parallel.clock import Clock
from megalite.parallel.shared_memory import SharedMemory, Transport
from megalite.parallel.spec import OWNERS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PLANNED: Final = "planned"
AXES: Final = ("pp", "dp", "cp", "tp", "stage", "data", "shard", "replica") + (
    ("edp", "ep", "etp", "expert_shard", "expert_replica", "ends")
)

# torch 2.15 names it publicly, and warns of the other name
set_group_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh, seen from this rank.

    ranks      global ranks along the axis, in axis order
    calls      what this rank has begun on it
    clock      of this rank: what waits for a collective says so
    transport  what its collectives travel on: a group; the memory that all its ranks share (on one machine, on CPU),
               which has a group too, or what only counts them (plan/bill.py); PLANNED: nothing, a collective is an
               error; None: there is no other rank
    """

    name: str
    size: int = 1
    rank: int = 0
    transport: ProcessGroup | Transport | Literal["planned"] | None = None
    ranks: tuple[int, ...] = (0,)
    clock: Clock = field(default_factory=Clock, compare=False, repr=False)
    calls: Calls = field(default_factory=Calls, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.size > 1 and self.transport is None:
            raise ValueError(f"axis {self.name} of size {self.size} has no transport; give a group, or PLANNED")

    @property
    def group(self) -> ProcessGroup | None:
        """None exactly when `size` is 1. Raises RuntimeError where it is only planned."""
        if self.size == 1:
            return None
        if self.transport == PLANNED:
            raise RuntimeError(f"a collective over {self.name}={self.size}, which is only planned; use build_mesh")
        return self.transport.group if isinstance(self.transport, Transport) else self.transport

    @property
    def direct(self) -> Transport | None:
        """What gathers and scatters in place of the group."""
        return self.transport if isinstance(self.transport, Transport) else None

    def begin(self, op: str, x: torch.Tensor, peer: int = -1) -> Call:
        """Around the issue of a collective over the axis, or of a message to or from the rank `peer`."""
        return self.calls.begin(self, op, x, peer)

    def start_of(self, part: int) -> int:
        """Where this rank's part begins in a dim of which every rank has `part` elements."""
        return self.rank * part

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


@dataclass(frozen=True)
class Mesh:
    """All axes of the run, and the device this rank computes on.

    stage             dp x cp x tp: the ranks of a pipeline position; only planned unless it is asked for
    data              dp x cp: the ranks whose summands a gradient has
    shard, replica    data again: ranks that share out what the optimizer keeps, and sets of ranks that do so
    edp, ep, etp      the same ranks as dp x cp x tp, for experts: copies, experts shared out, each expert split
    expert_shard, expert_replica    of edp, as shard and replica of data
    pp_back           the ranks of pp again: gradients' own channel
    ends              first and last stage, for tied embeddings
    """

    pp: Axis = field(default_factory=lambda: Axis("pp"))
    dp: Axis = field(default_factory=lambda: Axis("dp"))
    cp: Axis = field(default_factory=lambda: Axis("cp"))
    tp: Axis = field(default_factory=lambda: Axis("tp"))
    stage: Axis = field(default_factory=lambda: Axis("stage"))
    data: Axis = field(default_factory=lambda: Axis("data"))
    shard: Axis = field(default_factory=lambda: Axis("shard"))
    replica: Axis = field(default_factory=lambda: Axis("replica"))
    edp: Axis = field(default_factory=lambda: Axis("edp"))
    ep: Axis = field(default_factory=lambda: Axis("ep"))
    etp: Axis = field(default_factory=lambda: Axis("etp"))
    expert_shard: Axis = field(default_factory=lambda: Axis("expert_shard"))
    expert_replica: Axis = field(default_factory=lambda: Axis("expert_replica"))
    pp_back: Axis = field(default_factory=lambda: Axis("pp_back"))
    ends: Axis = field(default_factory=lambda: Axis("ends"))
    world: Axis = field(default_factory=lambda: Axis("world"))
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    clock: Clock = field(default_factory=Clock, compare=False, repr=False)  # that of all axes

    @classmethod
    def alone(cls, device: str | torch.device = "cpu") -> Mesh:
        """The mesh of a single process: no torch.distributed at all."""
        return cls(device=torch.device(device))

    def axis(self, name: str) -> Axis:
        """By its name here: an axis that runs through the same ranks as another has that one's."""
        return getattr(self, name)

    def owners(self, home: str) -> tuple[Axis, Axis]:
        """(shard, replica) of what is kept of parameters that are at home there (parallel/spec.py)."""
        shard, replica = OWNERS[home]
        return self.axis(shard), self.axis(replica)

    @property
    def sizes(self) -> Mapping[str, int]:
        return {name: self.axis(name).size for name in AXES}

    @property
    def position(self) -> Mapping[str, int]:
        return {name: self.axis(name).rank for name in AXES}

    @property
    def axes(self) -> list[Axis]:
        """All that this rank shares with others, each once."""
        every = {id(axis): axis for axis in map(self.axis, (*AXES, "pp_back", "world"))}.values()
        return [axis for axis in every if axis.size > 1 and axis.transport != PLANNED]

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """How long a collective of any group may take; torch makes groups with other defaults than the first one's."""
        for axis in self.axes:
            set_group_timeout(timeout, axis.group)
            if dist.get_backend(axis.group) == "gloo":  # nccl would have the host wait
                axis.calls.message_limit = timeout

    def describe(self) -> str:
        """`rank 5 (pp 1, dp 0, tp 1)`: how errors and logs name this rank."""
        where = ", ".join(f"{k} {self.axis(k).rank}" for k in ("pp", "dp", "cp", "tp") if self.axis(k).size > 1)
        return f"rank {self.world.rank}" + (f" ({where})" if where else "")


def stage_positions(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Of every rank of a stage, in the order of its axis: where it is on the axes that split or share out parameters.

    >>> [(at["data"], at["tp"], at["ep"]) for at in stage_positions({"stage": 4, "tp": 2, "ep": 2, "shard": 2})]
    [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)]
    """
    of = lambda name: sizes.get(name, 1)  # noqa: E731
    positions = []
    for rank in range(of("stage")):
        data, edp = rank // of("tp"), rank // (of("ep") * of("etp"))
        at = {"stage": rank, "tp": rank % of("tp"), "data": data, "etp": rank % of("etp"), "edp": edp}
        at |= {"ep": rank // of("etp") % of("ep"), "shard": data % of("shard"), "replica": data // of("shard")}
        at |= {"expert_shard": edp % of("expert_shard"), "expert_replica": edp // of("expert_shard")}
        positions.append(at)
    return positions


def rank_grid(world: int, tp: int, pp: int, cp: int = 1, *, dp_outermost: bool = False) -> list[list[list[list[int]]]]:
    """grid[pp][dp][cp][tp] = global rank. `world` must be divisible by tp * pp * cp.

    >>> rank_grid(8, tp=2, pp=2)
    [[[[0, 1]], [[2, 3]]], [[[4, 5]], [[6, 7]]]]
    >>> rank_grid(8, tp=2, pp=2, dp_outermost=True)
    [[[[0, 1]], [[4, 5]]], [[[2, 3]], [[6, 7]]]]
    """
    return _grid(world, tp, pp, cp, dp_outermost).tolist()


def _grid(world: int, tp: int, pp: int, cp: int, dp_outermost: bool) -> Tensor:
    ranks = torch.arange(world)
    return ranks.view(-1, pp, cp, tp).transpose(0, 1) if dp_outermost else ranks.view(pp, -1, cp, tp)


def world_axis() -> Axis:
    """All ranks, in the default group: what there is before a mesh."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Axis("world")
    world = dist.get_world_size()
    return Axis("world", world, dist.get_rank(), dist.group.WORLD, tuple(range(world)))


class Sizes(TypedDict, total=False):
    """What a mesh is made of; dp is what remains of the world.

    ep, etp    of experts; ep None: there are none, and what no other axis has is only planned
    instances  into how many sets of ranks data splits (and edp), each with the whole of the optimizer's state; None:
               every rank is one
    stage      whether the ranks of a stage exchange as one
    """

    tp: int
    pp: int
    cp: int
    ep: int | None
    etp: int
    instances: int | None
    dp_outermost: bool
    stage: bool


def build_mesh(
    *,
    device: torch.device,
    timeout: datetime.timedelta | None = None,
    shared_memory: bool | None = None,
    **sizes: Unpack[Sizes],
) -> Mesh:
    """Make every group of the run; collective over the default group, so all ranks call it in the same way.

    Raises ValueError where the world does not split so. timeout: of each group, as none inherits the default group's.
    shared_memory: whether, on CPU, ranks of a stage that are all on one machine exchange through it (None: unless the
    environment says otherwise).
    """
    memory = device.type == "cpu" and (override("shared_memory", True) if shared_memory is None else shared_memory)
    made = _lay(_Groups(world_axis(), timeout, memory), **sizes)
    if timeout is not None:
        made.set_timeout(timeout)
    return replace(made, device=device)


def plan_mesh(world: int, rank: int, **sizes: Unpack[Sizes]) -> Mesh:
    """The same as rank `rank` of `world` sees it, without groups."""
    return _lay(_Groups(Axis("world", world, rank, PLANNED, tuple(range(world)))), **sizes)


class _Groups:
    """Makes axes out of grids of ranks, and each group once. `world`: planned, and then all are."""

    def __init__(self, world: Axis, timeout: datetime.timedelta | None = None, memory: bool = False):
        self.clock, self.timeout, self.memory = Clock(), timeout, memory
        self.world = replace(world, clock=self.clock)
        self.made: dict[tuple[tuple[int, ...], ...], Axis] = {}

    def along(self, name: str, grid: Tensor, dim: int, *, planned: bool = False, own: bool = False) -> Axis:
        """The axis `dim` of `grid`; of size 1 for a rank that is not in it. `own`: with a group of its own, for what is
        not to queue behind others. `planned`: without one, unless there is one. All ranks ask for the same axes in the
        same order."""
        size, rank = grid.shape[dim], self.world.rank
        alone = Axis(name, ranks=(rank,), clock=self.clock)
        if size == 1:
            return alone
        lines = grid.movedim(dim, -1).reshape(-1, size)
        mine = [(tuple(lines[i].tolist()), int(j)) for i, j in (lines == rank).nonzero()]
        axis = Axis(name, size, mine[0][1], PLANNED, mine[0][0], self.clock) if mine else alone
        if self.world.transport == PLANNED:
            return axis
        every = tuple(sorted(map(tuple, lines.tolist())))
        if every in self.made and not own:
            return self.made[every]
        if planned:
            return axis
        group = self._group(name, every, own)
        if not mine:
            return axis
        axis = replace(axis, transport=group)
        if own:
            return axis
        if self.memory and name not in ("pp", "stage"):  # collective over the axis
            axis = replace(axis, transport=SharedMemory.open(group, axis.rank, size) or group)
        return self.made.setdefault(every, axis)

    def _group(self, name: str, lines: Sequence[tuple[int, ...]], own: bool) -> Any:
        """This rank's of `lines`, or None; every rank takes part in making every group."""
        if len(lines) == 1 and not own:
            return self.world.group
        made = [dist.new_group(list(ranks), timeout=self.timeout, group_desc=name) for ranks in lines]
        return next((group for group, ranks in zip(made, lines, strict=True) if self.world.rank in ranks), None)


def _lay(groups: _Groups, **sizes: Unpack[Sizes]) -> Mesh:
    """All axes, in one order on all ranks."""
    if unknown := sizes.keys() - Sizes.__optional_keys__:
        raise TypeError(f"a mesh has no {', '.join(sorted(unknown))}")
    tp, pp, cp, ep, etp = (sizes.get(name) or 1 for name in ("tp", "pp", "cp", "ep", "etp"))
    world = groups.world.size
    if world % (tp * pp * cp):
        raise ValueError(f"world size {world} is not a multiple of tp {tp} x pp {pp} x cp {cp}")
    grid = _grid(world, tp, pp, cp, sizes.get("dp_outermost", False))
    stage = grid.flatten(1)
    if stage.shape[1] % (ep * etp):
        raise ValueError(f"ep {ep} x etp {etp} does not divide the {stage.shape[1]} ranks of a stage")
    axes: dict[str, Any] = {name: groups.along(name, grid, dim) for dim, name in enumerate(("pp", "dp", "cp", "tp"))}

    def shared_out(of: Tensor, names: tuple[str, str, str], **planned: bool) -> None:
        parts = sizes.get("instances", 1) or of.shape[1]
        if of.shape[1] % parts:
            raise ValueError(f"{parts} instances of the optimizer do not divide {names[0]} {of.shape[1]}")
        split = of.unflatten(1, (parts, -1))
        for name, where, dim in zip(names, (of, split, split), (1, 1, 2), strict=True):
            axes[name] = groups.along(name, where, dim, **planned)

    experts, planned = stage.unflatten(1, (-1, ep, etp)), sizes.get("ep") is None
    shared_out(grid.flatten(1, 2), ("data", "replica", "shard"))
    shared_out(experts, ("edp", "expert_replica", "expert_shard"), planned=planned)
    axes |= {name: groups.along(name, experts, dim, planned=planned) for dim, name in ((2, "ep"), (3, "etp"))}
    axes["stage"] = groups.along("stage", stage, 1, planned=not sizes.get("stage"))
    axes["pp_back"] = groups.along("pp_back", grid, 0, own=True)
    axes["ends"] = groups.along("ends", grid[[0, -1]] if pp > 1 else grid, 0, own=True)
    return Mesh(**axes, world=groups.world, clock=groups.clock)
