"""Expert load of all routers in a step: global counts and auxiliary losses, the update of router biases, and metrics.

    count_E, losses   per layer with experts: int64 number of assignments to each expert, and the sums of the auxiliary
                      losses over tokens
    bias_e += rate * sign(mean of the counts - count_e)       arXiv:2408.15664, after each step that updates weights

Both are summed over the world in the step's single all-reduce (training/train_step.py), in fp64. Sums of integers are
exact below 2^53, so the biases have the same bits on all ranks and under every layout. No gradient trains them.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megalite.config.options import ModelConfig
from megalite.models.gpt import Stage
from megalite.nn.router import AUX_LOSSES, Router
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import TensorShard

# The names of AUX_LOSSES in the log.
LOSS_NAMES = ("load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss", "router_z_loss")


class ExpertLoadBalancer:
    """The routers' load and auxiliary losses, summed over all ranks.

    Attributes:
        routers: The routers of this rank.
        layers: The indices of the model's L layers with experts.
        counts_LE: The number of assignments to each of the E experts in the last step's global batch, on every rank.
        losses_L4: The sums of the auxiliary losses over the tokens of the same batch.
    """

    def __init__(self, stages: Iterable[Stage], mesh: Mesh, model: ModelConfig):
        self.routers = [module for stage in stages for module in stage.modules() if isinstance(module, Router)]
        self.mesh = mesh
        self.rate = model.moe_router_bias_update_rate
        self.has_losses = model.has_experts and bool(model.aux_loss_coeffs or model.moe_z_loss_coeff)
        self.layers = [n for n, layer in zip(model.layer_numbers, model.layers, strict=True) if layer.has_experts]
        self.counts_LE = torch.zeros(len(self.layers), model.num_experts or 0, dtype=torch.int64)
        self.losses_L4 = torch.zeros(len(self.layers), len(AUX_LOSSES), dtype=torch.float64)

    def reset(self) -> None:
        """Zero the routers' sums, before the first forward of a step or of its rerun."""
        for router in self.routers:
            for sums in (router.expert_counts, router.global_counts, router.loss_sums):
                sums.zero_()

    def local_sums(self) -> Tensor:
        """Return this rank's counts and losses, flattened, in fp64; `set_global_sums` takes their sum over ranks."""
        L, E = self.counts_LE.shape
        sums = torch.zeros(L, E + len(AUX_LOSSES), dtype=torch.float64, device=self.mesh.device)
        for router in self.routers:
            sums[self.layers.index(router.layer)] = torch.cat([router.expert_counts.double(), router.loss_sums])
        return sums.flatten()

    def set_global_sums(self, sums: Tensor) -> None:
        """Set counts_LE and losses_L4 from the sum of `local_sums` over the world."""
        L, E = self.counts_LE.shape
        counts, self.losses_L4 = sums.view(L, E + len(AUX_LOSSES)).split([E, len(AUX_LOSSES)], 1)
        self.counts_LE = counts.long()

    def metrics(self, tokens: int) -> dict[str, Any]:
        """Return the metrics of the last step, whose batch had `tokens` tokens without padding.

        The losses, without coefficients, are means over tokens and layers; None if the loss is disabled. `by_layer` has
        their values in each layer. moe_expert and moe_rank are for the worst layer: the maximum number of assignments
        to an expert, or to an ep rank, over the mean. moe_load is the number of assignments to each expert in all
        layers, over the mean.
        """
        if not self.layers:
            return {}
        by_expert = self.counts_LE.double().cpu()
        by_rank = by_expert.unflatten(1, (self.mesh.ep.size, -1)).sum(2)
        load_E = by_expert.sum(0) / by_expert.sum(0).mean()
        losses = dict(zip(LOSS_NAMES, (self.losses_L4 / max(tokens, 1)).T.cpu().tolist(), strict=True))
        means = {name: sum(layer_losses) / len(layer_losses) or None for name, layer_losses in losses.items()}
        by_layer = {
            f"moe/{name.removeprefix('router_')}_layer_{self.layers[n]}": loss
            for name, layer_losses in losses.items()
            if means[name] is not None
            for n, loss in enumerate(layer_losses)
        }
        return {
            **means,
            "moe_expert": float((by_expert.amax(1) / by_expert.mean(1)).max()),
            "moe_rank": float((by_rank.amax(1) / by_rank.mean(1)).max()),
            "moe_load": load_E.tolist(),
            "by_layer": by_layer,
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
