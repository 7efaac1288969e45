"""The rule by which a rank's tensor is a shard of the full one, independent of the program under test.

    a dim that has its full length on the rank    is not sharded
    a shorter dim                                 is sharded over the tp ranks, in order
    rows of token ids                             are sharded over the tp ranks, whatever their number
    rows beyond the end of the full dim           pad the vocabulary and are ignored

A rank's number is (pp, dp, cp, tp) written out, with tp last, or (dp, pp, cp, tp) with --use-tp-pp-dp-mapping. The
parameters of experts are sharded differently: their first dim over ep, the others over etp. The (dp, cp, tp) of a
rank, written out, is its (copy, ep, etp).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankCoordinates:
    """The position of a rank on every axis of the mesh."""

    rank: int
    tp: int
    pp: int
    dp: int
    cp: int = 0
    ep: int = 0
    etp: int = 0


@dataclass(frozen=True)
class Layout:
    """The sizes of the parallel axes, and the order of ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    dp_outermost: bool = False
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def edp(self) -> int:
        """The number of ranks with the same experts; 1 if experts are not sharded."""
        expert_ranks = self.ep * self.etp
        return self.world_size // self.pp // expert_ranks if expert_ranks > 1 else 1

    @property
    def min_ranks(self) -> int:
        """The smallest number of ranks on which every axis above 1 can stay above 1."""
        num_token_axes = sum(size > 1 for size in (self.dp, self.cp, self.tp))
        num_expert_axes = sum(size > 1 for size in (self.edp, self.ep, self.etp))
        return 2 ** ((self.pp > 1) + max(num_token_axes, num_expert_axes))

    def coordinates(self, rank: int) -> RankCoordinates:
        """Return the coordinates of a rank.

        >>> Layout(tp=2, pp=2, dp=3, ep=3).coordinates(9)
        RankCoordinates(rank=9, tp=1, pp=1, dp=1, cp=0, ep=0, etp=0)
        """
        outer, tp = divmod(rank, self.tp)
        outer, cp = divmod(outer, self.cp)
        if self.dp_outermost:
            dp, pp = divmod(outer, self.pp)
        else:
            pp, dp = divmod(outer, self.dp)
        rank_in_stage = (dp * self.cp + cp) * self.tp + tp
        outer, etp = divmod(rank_in_stage, self.etp)
        return RankCoordinates(rank, tp, pp, dp, cp, outer % self.ep, etp)

    def __str__(self) -> str:
        optional = (("cp", self.cp), ("ep", self.ep), ("etp", self.etp))
        sizes = [f"{axis} {size}" for axis, size in optional if size > 1]
        return ", ".join([f"tp {self.tp}", f"pp {self.pp}", f"dp {self.dp}", *sizes])


def is_expert_param(name: str) -> bool:
    """Return True if a parameter belongs to routed experts."""
    return ".experts." in name


def expected_slices(
    shape: Sequence[int],
    full_shape: Sequence[int],
    rank: RankCoordinates,
    layout: Layout,
    *,
    is_expert: bool = False,
    has_token_rows: bool = False,
) -> tuple[slice, ...]:
    """Return the slices of the full tensor that a rank's tensor of `shape` holds, without padding.

    `has_token_rows` is for a parameter with a row per token id. Its shards are padded, so one of them may be as long as
    the full parameter, and others may be padding alone.

    >>> expected_slices((4, 6), (10, 6), RankCoordinates(2, 2, 0, 0), Layout(tp=3))
    (slice(8, 10, None), slice(0, 6, None))
    >>> expected_slices((16, 6), (13, 6), RankCoordinates(0, 0, 0, 0), Layout())
    (slice(0, 13, None), slice(0, 6, None))
    >>> expected_slices((16, 6), (13, 6), RankCoordinates(1, 1, 0, 0), Layout(tp=2), has_token_rows=True)
    (slice(13, 13, None), slice(0, 6, None))

    Raises:
        ValueError: if the rule does not allow this shape.
    """
    if len(shape) != len(full_shape):
        raise ValueError(
            f"{tuple(shape)} on a rank and {tuple(full_shape)} in one process differ in the number of dims"
        )
    slices = []
    for dim, (size, full_size) in enumerate(zip(shape, full_shape, strict=True)):
        axis = "tp"
        if is_expert:
            axis = "ep" if dim == 0 else "etp"
        index, axis_size = getattr(rank, axis), getattr(layout, axis)
        if size >= full_size and not (has_token_rows and dim == 0):
            slices.append(slice(0, full_size))
        elif size * axis_size < full_size:
            raise ValueError(
                f"{tuple(shape)} on each of {axis_size} ranks is less than {tuple(full_shape)} in one process"
            )
        else:
            slices.append(slice(min(index * size, full_size), min((index + 1) * size, full_size)))
    return tuple(slices)
