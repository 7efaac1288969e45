"""Where a rank's own tensor lies in the whole one, by a rule that reads nothing of the program that is checked.

    a dim that is as long on the rank as in the whole tensor    is the whole dim
    a dim that is shorter                                       is the rank's share of it, in order of tp ranks
    rows beyond the end of the whole dim                        pad the vocabulary, and count for nothing

A rank's number is (pp, dp, cp, tp) written out, tp last, or (dp, pp, cp, tp) with --use-tp-pp-dp-mapping. Parameters
of experts alone are shared out otherwise: their first dim over ep, others over etp, where the (dp, cp, tp) of a rank,
written out, is its (copy, ep, etp).
"""

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """A rank's place in the mesh."""

    rank: int
    tp: int
    pp: int
    dp: int
    cp: int = 0
    ep: int = 0
    etp: int = 0


class Layout(NamedTuple):
    tp: int = 1
    pp: int = 1
    dp: int = 1
    dp_outermost: bool = False
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def edp(self) -> int:
        """Ranks that have the same experts; 1 where no rank has others than another."""
        shared = self.ep * self.etp
        return self.world // self.pp // shared if shared > 1 else 1

    @property
    def least(self) -> int:
        """Ranks of the smallest layout in which every axis that is above 1 is above 1."""
        tokens, experts = (self.dp, self.cp, self.tp), (self.edp, self.ep, self.etp)
        return 2 ** ((self.pp > 1) + max(sum(size > 1 for size in axes) for axes in (tokens, experts)))

    def at(self, rank: int) -> Place:
        """
        >>> Layout(tp=2, pp=2, dp=3, ep=3).at(9)
        Place(rank=9, tp=1, pp=1, dp=1, cp=0, ep=0, etp=0)
        """
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        inner = self.pp if self.dp_outermost else self.dp
        outer, last = divmod(rest, inner)
        pp, dp = (last, outer) if self.dp_outermost else (outer, last)
        over_experts, etp = divmod((dp * self.cp + cp) * self.tp + tp, self.etp)
        return Place(rank, tp, pp, dp, cp, over_experts % self.ep, etp)

    def __str__(self) -> str:
        more = (("cp", self.cp), ("ep", self.ep), ("etp", self.etp))
        return f"tp {self.tp}, pp {self.pp}, dp {self.dp}" + "".join(f", {a} {n}" for a, n in more if n > 1)


def of_experts(name: str) -> bool:
    """Whether a parameter is of experts alone."""
    return ".experts." in name


def place(
    shape: Sequence[int], whole: Sequence[int], at: Place, layout: Layout, experts: bool = False
) -> tuple[slice, ...]:
    """The slices of the whole tensor that are a rank's tensor of `shape`. Raises ValueError where the rule fits no dim.

    >>> place((4, 6), (10, 6), Place(2, 2, 0, 0), Layout(tp=3)), place((16, 6), (13, 6), Place(0, 0, 0, 0), Layout())
    ((slice(8, 10, None), slice(0, 6, None)), (slice(0, 13, None), slice(0, 6, None)))
    """
    if len(shape) != len(whole):
        raise ValueError(f"{tuple(shape)} on a rank and {tuple(whole)} in one process: other dims")
    slices = []
    for dim, (here, there) in enumerate(zip(shape, whole, strict=True)):
        axis = "tp" if not experts else "etp" if dim else "ep"
        rank, ranks = getattr(at, axis), getattr(layout, axis)
        if here >= there:
            slices.append(slice(0, there))
        elif here * ranks < there:
            raise ValueError(f"{tuple(shape)} on each of {ranks} ranks is less than {tuple(whole)} in one process")
        else:
            slices.append(slice(min(rank * here, there), min((rank + 1) * here, there)))
    return tuple(slices)
