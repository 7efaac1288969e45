"""What the routers of a rank counted in a step, summed over the ranks of its stage, and the biases that follow it.

    count_E, losses   of every layer with experts: int64 counts of choices, and the auxiliary losses' sums over tokens
    bias_e += rate * sign(mean of the counts - count_e)       arXiv:2408.15664, after each step that updates weights

The one all-reduce is in fp64, in which sums of integers are exact below 2^53: so biases have the same bits on all
ranks and under every layout. A bias is state that no gradient trains: `pieces` are its place in a checkpoint.
"""

from collections.abc import Iterable

import torch

from megalite.models.gpt import Stage
from megalite.nn.router import Router
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import Piece


class Balance:
    """routers: of this rank, in the order of layers. counts_LE, losses_L3: of the last step's whole batch; without
    routers [0, 0]."""

    def __init__(self, stages: Iterable[Stage], mesh: Mesh, rate: float):
        self.routers = [module for stage in stages for module in stage.modules() if isinstance(module, Router)]
        self.mesh, self.rate = mesh, rate
        self.counts_LE = self.losses_L3 = torch.zeros(0, 0)

    def begin(self) -> None:
        """Before the first forward of a step, or of its computation once more."""
        for router in self.routers:
            router.counts.zero_()
            router.losses.zero_()

    def agree(self) -> None:
        """Sum what was counted over the ranks of the stage; collective over it where it has experts."""
        if self.routers:
            mine = torch.stack([torch.cat([router.counts.double(), router.losses]) for router in self.routers])
            experts = self.routers[0].routing.experts
            all_reduce_(mine, self.mesh.stage)
            self.counts_LE, self.losses_L3 = mine[:, :experts].long(), mine[:, experts:]

    def update(self) -> None:
        """Move the biases."""
        for router, counts_E in zip(self.routers, self.counts_LE, strict=True):
            if router.bias is not None:
                router.bias += self.rate * (counts_E.sum() - len(counts_E) * counts_E).sign()

    def pieces(self) -> list[tuple[Piece, bool]]:
        """(a bias, whether this rank is the one that saves it); views that loading may write."""
        mine = self.mesh.tp.is_first and self.mesh.data.is_first
        return [(piece, mine) for router in self.routers for piece in router.state_pieces()]
