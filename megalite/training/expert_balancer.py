"""What all routers of the model counted in a step, the biases that follow it, and the log's figures.

    count_E, losses   of every layer with experts: int64 counts of choices, and the auxiliary losses' sums over tokens
    bias_e += rate * sign(mean of the counts - count_e)       arXiv:2408.15664, after each step that updates weights

They are summed over the world in the step's one all-reduce (training/train_step.py), in fp64, in which sums of integers are
exact below 2^53: so biases have the same bits on all ranks and under every layout. No gradient trains them.
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

# of LOSSES, in the log
LOSS_NAMES = (*(f"{kind}load_balancing_loss" for kind in ("", "seq_", "global_")), "router_z_loss")


class ExpertLoadBalancer:
    """layers: the numbers of the model's L layers with E experts. routers: of this rank. counts_LE, losses_L3: of the
    last step's whole batch, on every rank."""

    def __init__(self, stages: Iterable[Stage], mesh: Mesh, model: ModelConfig):
        self.routers = [module for stage in stages for module in stage.modules() if isinstance(module, Router)]
        self.mesh, self.rate = mesh, model.moe_router_bias_update_rate
        self.has_losses = any(model.moe_layers) and bool(model.aux_loss_coeffs or model.moe_z_loss_coeff)
        self.layers = [layer for layer, has_experts in enumerate(model.moe_layers) if has_experts]
        self.counts_LE = torch.zeros(len(self.layers), model.num_experts or 0, dtype=torch.int64)
        self.losses_L3 = torch.zeros(len(self.layers), len(AUX_LOSSES), dtype=torch.float64)

    def reset(self) -> None:
        """Before the first forward of a step, or of its computation once more."""
        for router in self.routers:
            for local_sums in (router.expert_counts, router.global_counts, router.loss_sums):
                local_sums.zero_()

    def local_sums(self) -> Tensor:
        """What this rank counted, in fp64: the summand of what `take` is given."""
        L, E = self.counts_LE.shape
        mine = torch.zeros(L, E + len(AUX_LOSSES), dtype=torch.float64, device=self.mesh.device)
        for router in self.routers:
            mine[self.layers.index(router.layer)] = torch.cat([router.expert_counts.double(), router.loss_sums])
        return mine.flatten()

    def set_global_sums(self, summed: Tensor) -> None:
        L, E = self.counts_LE.shape
        counts, self.losses_L3 = summed.view(L, E + len(AUX_LOSSES)).split([E, len(AUX_LOSSES)], 1)
        self.counts_LE = counts.long()

    def metrics(self, tokens: int) -> dict[str, Any]:
        """Of the last step, which had so many tokens, padding aside. The losses, without coefficients, are means over
        tokens and layers, with their values of each layer in `by_layer`; None: that loss is off. moe_expert, moe_rank:
        of the worst layer, the most choices of an expert, or of a rank of ep, over their mean. moe_load: the choices of
        each expert in all layers, over their mean."""
        if not self.layers:
            return {}
        by_expert = self.counts_LE.double().cpu()
        by_rank = by_expert.unflatten(1, (self.mesh.ep.size, -1)).sum(2)
        expert, rank = (float((some.amax(1) / some.mean(1)).max()) for some in (by_expert, by_rank))
        load_E = by_expert.sum(0) / by_expert.sum(0).mean()
        losses = dict(zip(LOSS_NAMES, (self.losses_L3 / max(tokens, 1)).T.cpu().tolist(), strict=True))
        found = {name: sum(of_layers) / len(of_layers) or None for name, of_layers in losses.items()}
        by_layer = {
            f"moe/{name.removeprefix('router_')}_layer_{self.layers[n]}": loss
            for name, mean in found.items()
            for n, loss in enumerate(losses[name] if mean is not None else ())
        }
        return {**found, "moe_expert": expert, "moe_rank": rank, "moe_load": load_E.tolist(), "by_layer": by_layer}

    def update_bias(self) -> None:
        """Move the biases."""
        for router in self.routers:
            counts_E = self.counts_LE[self.layers.index(router.layer)]
            if router.bias is not None:
                router.bias += self.rate * (counts_E.sum() - len(counts_E) * counts_E).sign()

    def state_shards(self) -> list[TensorShard]:
        """The biases, as views that loading may write."""
        return [piece for router in self.routers for piece in router.buffer_shards()]
