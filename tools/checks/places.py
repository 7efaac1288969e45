"""Where a rank's own tensor lies in the whole one, by a rule that reads nothing of the program that is checked.

    a dim that is as long on the rank as in the whole tensor    is the whole dim
    a dim that is shorter                                       is the rank's share of it, in order of tp ranks
    rows beyond the end of the whole dim                        pad the vocabulary, and count for nothing

A rank's number is (pp, dp, cp, tp) written out, tp last, or (dp, pp, cp, tp) with --use-tp-pp-dp-mapping.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A rank's place in the mesh."""

    rank: int
    tp: int
    pp: int
    dp: int
    cp: int = 0


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    dp_outermost: bool = False
    cp: int = 1

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> "Layout":
        """`sizes`: of a mesh's axes."""
        return cls(sizes.get("tp", 1), sizes.get("pp", 1), sizes.get("dp", 1))

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def at(self, rank: int) -> Place:
        """
        >>> Layout(tp=2, pp=2, dp=3).at(7)
        Place(rank=7, tp=1, pp=1, dp=0, cp=0)
        """
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        inner = self.pp if self.dp_outermost else self.dp
        outer, last = divmod(rest, inner)
        pp, dp = (last, outer) if self.dp_outermost else (outer, last)
        return Place(rank, tp, pp, dp, cp)

    def __str__(self) -> str:
        return f"tp {self.tp}, pp {self.pp}, dp {self.dp}" + f", cp {self.cp}" * (self.cp > 1)


def place(shape: Sequence[int], whole: Sequence[int], tp_rank: int, layout: Layout) -> tuple[slice, ...]:
    """The slices of the whole tensor that are a rank's tensor of `shape`. Raises ValueError where the rule fits no dim.

    >>> place((4, 6), (10, 6), 2, Layout(tp=3)), place((16, 6), (13, 6), 0, Layout())
    ((slice(8, 10, None), slice(0, 6, None)), (slice(0, 13, None), slice(0, 6, None)))
    """
    if len(shape) != len(whole):
        raise ValueError(f"{tuple(shape)} on a rank and {tuple(whole)} in one process: other dims")
    slices = []
    for here, there in zip(shape, whole, strict=True):
        if here >= there:
            slices.append(slice(0, there))
        elif here * layout.tp < there:
            raise ValueError(f"{tuple(shape)} on each of {layout.tp} ranks is less than {tuple(whole)} in one process")
        else:
            slices.append(slice(min(tp_rank * here, there), min((tp_rank + 1) * here, there)))
    return tuple(slices)
