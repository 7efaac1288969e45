"""The grid of ranks: (pp, dp, cp, tp), tp innermost.

    rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank
    rank = ((dp_rank * pp + pp_rank) * cp + cp_rank) * tp + tp_rank      with dp outermost

tp neighbours are adjacent ranks, so tensor parallelism stays inside a node; pipeline stages, which exchange the
least, are farthest apart, unless dp is to be outermost. Groups come from torch's DeviceMesh; an axis of size 1 has no
group at all and its collectives are the identity, so that one process is not a special case. A `Mesh` is passed
explicitly: there is no module state. A mesh of plans has sizes and positions, but nothing to communicate over.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from megalite.config.environment import override
from megalite.parallel.calls import Call, Calls
from megalite.parallel.clock import Clock
from megalite.parallel.shared_memory import SharedMemory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PLANNED: Final = "planned"

# torch 2.15 names it publicly, and warns of the other name
set_group_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh, seen from this rank.

    ranks      global ranks along the axis, in axis order
    calls      what this rank has begun on it
    clock      of this rank: what waits for a collective says so
    transport  what its collectives travel on: a group; the memory that all its ranks share (on one machine, on CPU),
               which has a group too; PLANNED: nothing, a collective is an error; None: there is no other rank
    """

    name: str
    size: int = 1
    rank: int = 0
    transport: ProcessGroup | SharedMemory | Literal["planned"] | None = None
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
        return self.transport.group if isinstance(self.transport, SharedMemory) else self.transport

    @property
    def shared(self) -> SharedMemory | None:
        return self.transport if isinstance(self.transport, SharedMemory) else None

    def begin(self, op: str, x: torch.Tensor, peer: int = -1) -> Call:
        """Around the issue of a collective over the axis, or of a message to or from the rank `peer`."""
        return self.calls.begin(self, op, x, peer)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


@dataclass(frozen=True)
class Mesh:
    """All axes of the run, and the device this rank computes on."""

    pp: Axis = field(default_factory=lambda: Axis("pp"))
    dp: Axis = field(default_factory=lambda: Axis("dp"))
    cp: Axis = field(default_factory=lambda: Axis("cp"))
    tp: Axis = field(default_factory=lambda: Axis("tp"))
    pp_back: Axis = field(default_factory=lambda: Axis("pp_back"))  # the ranks of pp again: gradients' own channel
    ends: Axis = field(default_factory=lambda: Axis("ends"))  # first and last stage, for tied embeddings
    world: Axis = field(default_factory=lambda: Axis("world"))
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    clock: Clock = field(default_factory=Clock, compare=False, repr=False)  # that of all axes

    @classmethod
    def alone(cls, device: str | torch.device = "cpu") -> Mesh:
        """The mesh of a single process: no torch.distributed at all."""
        return cls(device=torch.device(device))

    @property
    def sizes(self) -> Mapping[str, int]:
        return {axis.name: axis.size for axis in (self.pp, self.dp, self.cp, self.tp)}

    @property
    def position(self) -> Mapping[str, int]:
        return {axis.name: axis.rank for axis in (self.pp, self.dp, self.cp, self.tp)}

    @property
    def axes(self) -> Iterator[Axis]:
        """All that this rank shares with others."""
        every = (self.pp, self.dp, self.cp, self.tp, self.pp_back, self.ends, self.world)
        return (axis for axis in every if axis.size > 1)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """How long a collective of any group may take; torch makes groups with other defaults than the first one's."""
        for axis in self.axes:
            set_group_timeout(timeout, axis.group)
            if dist.get_backend(axis.group) == "gloo":  # nccl would have the host wait
                axis.calls.message_limit = timeout

    def describe(self) -> str:
        """`rank 5 (pp 1, dp 0, tp 1)`: how errors and logs name this rank."""
        where = ", ".join(f"{k} {v}" for k, v in self.position.items() if self.sizes[k] > 1)
        return f"rank {self.world.rank}" + (f" ({where})" if where else "")


def rank_grid(world: int, tp: int, pp: int, cp: int = 1, *, dp_outermost: bool = False) -> list[list[list[list[int]]]]:
    """grid[pp][dp][cp][tp] = global rank. `world` must be divisible by tp * pp * cp.

    >>> rank_grid(8, tp=2, pp=2)
    [[[[0, 1]], [[2, 3]]], [[[4, 5]], [[6, 7]]]]
    >>> rank_grid(8, tp=2, pp=2, dp_outermost=True)
    [[[[0, 1]], [[4, 5]]], [[[2, 3]], [[6, 7]]]]
    """
    dp, unit = world // (tp * pp * cp), cp * tp

    def at(p: int, d: int) -> list[list[int]]:
        first = unit * (d * pp + p if dp_outermost else p * dp + d)
        return [list(range(start, start + tp)) for start in range(first, first + unit, tp)]

    return [[at(p, d) for d in range(dp)] for p in range(pp)]


def world_axis() -> Axis:
    """All ranks, in the default group: what there is before a mesh."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Axis("world")
    world = dist.get_world_size()
    return Axis("world", world, dist.get_rank(), dist.group.WORLD, tuple(range(world)))


def build_mesh(
    *,
    tp: int,
    pp: int,
    cp: int = 1,
    dp_outermost: bool = False,
    device: torch.device,
    timeout: datetime.timedelta | None = None,
    shared_memory: bool | None = None,
) -> Mesh:
    """Make every group of the run; collective over the default group, so all ranks call it in the same way.

    The world size (of the default process group) must be a multiple of tp * pp * cp; what remains is dp.
    Groups made by DeviceMesh and `new_group` do not inherit the default group's timeout: `timeout` is given to each.
    `shared_memory`: whether, on CPU, dp and tp exchange through it where all their ranks are on one machine (None:
    unless the environment says otherwise).
    """
    if not dist.is_initialized():
        if tp * pp * cp != 1:
            raise ValueError(f"one process cannot hold tp={tp} x pp={pp} x cp={cp}")
        return Mesh.alone(device)
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % (tp * pp * cp):
        raise ValueError(f"world size {world} is not a multiple of tp {tp} x pp {pp} x cp {cp}")
    grid = torch.tensor(rank_grid(world, tp, pp, cp, dp_outermost=dp_outermost))
    here, names = [int(i) for i in (grid == rank).nonzero()[0]], ("pp", "dp", "cp", "tp")
    mesh, clock = DeviceMesh(device.type, grid, mesh_dim_names=names), Clock()

    def axis(name: str, dim: int) -> Axis:
        index = [slice(i, i + 1) for i in here]
        index[dim] = slice(None)
        ranks = tuple(int(r) for r in grid[tuple(index)].flatten())
        return Axis(name, len(ranks), here[dim], mesh.get_group(name) if len(ranks) > 1 else None, ranks, clock)

    def extra(name: str, members: list[list[int]]) -> Axis:
        made = Axis(name, clock=clock)
        for ranks in members:  # every rank takes part in making every group
            group: Any = dist.new_group(ranks, timeout=timeout, group_desc=name) if len(ranks) > 1 else None
            if rank in ranks:
                made = Axis(name, len(ranks), ranks.index(rank), group, tuple(ranks), clock)
        return made

    columns = [[int(r) for r in column] for column in grid.flatten(1).T]  # one pipeline each
    made = Mesh(
        *(axis(name, dim) for dim, name in enumerate(names)),
        pp_back=extra("pp_back", columns),
        ends=extra("ends", [[column[0], column[-1]][: len(column)] for column in columns]),
        world=replace(world_axis(), clock=clock),
        device=device,
        clock=clock,
    )
    if timeout is not None:
        made.set_timeout(timeout)
    if device.type == "cpu" and (override("shared_memory", True) if shared_memory is None else shared_memory):
        made = replace(made, dp=_with_memory(made.dp), tp=_with_memory(made.tp))
    return made


def _with_memory(axis: Axis) -> Axis:
    """Collective over the axis."""
    if axis.group is None:
        return axis
    return replace(axis, transport=SharedMemory.open(axis.group, axis.rank, axis.size) or axis.group)
