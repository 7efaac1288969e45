"""Expert load of all routers in a step: global counts, the update of router biases, and metrics.

    count_E           per layer with experts: int64 number of assignments to each expert
    bias_e += rate * sign(mean of the counts - count_e)       arXiv:2408.15664, after each step that updates weights

Counts are summed over the world in the step's single all-reduce (training/train_step.py), in fp64. Sums of integers are
exact below 2^53, so the biases have the same bits on all ranks and under every layout. No gradient trains them.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megalite.config.options import ModelConfig
from megalite.models.gpt import Stage
from megalite.nn.router import Router
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import TensorShard


class ExpertLoadBalancer:
    """The load of experts, summed over all ranks.

    Attributes:
        routers: The routers of this rank.
        layers: The indices of the model's L layers with experts.
        counts_LE: The number of assignments to each of the E experts in the last step's global batch, on every rank.
    """

    def __init__(self, stages: Iterable[Stage], mesh: Mesh, model: ModelConfig):
        blocks: list[Any] = [block for stage in stages for block in stage.all_blocks]
        self.routers: list[Router] = [block.mlp.router for block in blocks if block.spec.has_experts]
        self.mesh = mesh
        self.rate = model.moe_router_bias_update_rate
        self.layers = [number for number, layer in model.numbered_layers if layer.has_experts]
        self.counts_LE = torch.zeros(len(self.layers), model.num_experts or 0, dtype=torch.int64)

    def reset(self) -> None:
        """Zero the routers' counts, before the first forward of a step or of its rerun."""
        for router in self.routers:
            router.expert_counts.zero_()
            router.global_counts.zero_()

    def local_counts(self) -> Tensor:
        """Return this rank's counts, flattened, in fp64; `set_global_counts` takes their sum over ranks."""
        counts_LE = torch.zeros(self.counts_LE.shape, dtype=torch.float64, device=self.mesh.device)
        for router in self.routers:
            counts_LE[self.layers.index(router.layer)] = router.expert_counts.double()
        return counts_LE.flatten()

    def set_global_counts(self, counts: Tensor) -> None:
        """Set counts_LE from the sum of `local_counts` over the world."""
        self.counts_LE = counts.view(self.counts_LE.shape).long()

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last step.

        moe_expert and moe_rank are for the worst layer: the maximum number of assignments to an expert, or to an ep
        rank, over the mean. moe_load is the number of assignments to each expert in all layers, over the mean.
        """
        if not self.layers:
            return {}
        by_expert = self.counts_LE.double().cpu()
        by_rank = by_expert.unflatten(1, (self.mesh.ep.size, -1)).sum(2)
        load_E = by_expert.sum(0) / by_expert.sum(0).mean()
        return {
            "moe_expert": float((by_expert.amax(1) / by_expert.mean(1)).max()),
            "moe_rank": float((by_rank.amax(1) / by_rank.mean(1)).max()),
            "moe_load": load_E.tolist(),
        }

    def update_bias(self) -> None:
        """Move each bias by `rate` toward balance; does nothing for routers without a bias."""
        for router in self.routers:
            counts_E = self.counts_LE[self.layers.index(router.layer)]
            if router.expert_bias is not None:
                router.expert_bias += self.rate * (counts_E.sum() - len(counts_E) * counts_E).sign()

    def state_shards(self) -> list[TensorShard]:
        """Return the biases of this rank, as views that loading may write to."""
        return [shard for router in self.routers for shard in router.buffer_shards()]
