"""The sums of a step's losses by name, which forward and backward add to on the device.

    head losses   "loss" and "z_loss" of the LMHead, means over the labels that count. Every tp rank adds the same sum
                  over its samples, and one of them counts.
    depth losses  "mtp_1_loss" ... of multi-token prediction. They are means over the labels of the depth, which are
                  fewer, so their numbers are summed, too.
    layer losses  of routers and of plugins' mixers (nn/layer_loss.py), means over the tokens that are not padding.
                  Every rank adds the sum over its own tokens, in backward: neither recomputation nor evaluation counts.

All ranks have the same losses in the same order. The sums of a step are part of its all-reduce
(training/train_step.py); log, TensorBoard, metrics and report get them by name.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megalite.parallel.mesh import Mesh


def head_losses(z_loss: float) -> tuple[str, ...]:
    """Return the names of the losses of a head with this coefficient of the z-loss."""
    return ("loss", "z_loss") if z_loss else ("loss",)


def depth_loss(depth: int) -> str:
    """Return the name of the loss of a depth of multi-token prediction."""
    return f"mtp_{depth}_loss"


class LossSums:
    """Sums of losses over tokens, in nats and fp64. The tensor stays the same, so that CUDA graphs can add to it.

    Attributes:
        head_losses: The names of the head's losses.
        layer_losses: (name, number of the layer) of each loss of a layer.
        num_depths: The number of depths of multi-token prediction.
        values: The sums: of the head's losses, of the depths', of the labels of each depth, and of the layers' losses.
    """

    def __init__(
        self,
        head_losses: Sequence[str],
        layer_losses: Sequence[tuple[str, int]],
        device: torch.device,
        num_depths: int = 0,
        layer_uses: Mapping[int, int] | None = None,
    ) -> None:
        """Start with sums of 0. `layer_uses`: the uses in a forward of each layer that a forward uses several times."""
        self.head_losses = tuple(head_losses)
        self.layer_losses = tuple(layer_losses)
        self.num_depths = num_depths
        self._layer_uses = layer_uses or {}
        self._num_head_sums = len(self.head_losses) + 2 * num_depths
        self.values = torch.zeros(self._num_head_sums + len(layer_losses), dtype=torch.float64, device=device)
        self._head_index = {name: index for index, name in enumerate(self.head_losses)}
        self._layer_index = {key: index for index, key in enumerate(self.layer_losses, self._num_head_sums)}

    def zero_(self) -> None:
        """Forget all losses, before the first forward of a step or of its rerun."""
        self.values.zero_()

    def add_head_loss(self, name: str, value: Tensor) -> None:
        """Add the sum of a loss of the head over a micro-batch."""
        self.values[self._head_index[name]] += value.detach()

    def add_depth_loss(self, depth: int, value: Tensor, mask_SB: Tensor) -> None:
        """Add the sum of the loss of a depth, from 1, over the labels of a micro-batch that `mask_SB` counts."""
        index = len(self.head_losses) + depth - 1
        self.values[index] += value.detach()
        self.values[index + self.num_depths] += mask_SB.sum(dtype=torch.float64)

    def add_layer_loss(self, name: str, layer: int, value: Tensor) -> None:
        """Add the sum of a loss of a layer over this rank's tokens of a micro-batch."""
        self.values[self._layer_index[name, layer]] += value.detach()

    def local_values(self, mesh: Mesh) -> Tensor:
        """Return this rank's part of the sums over all ranks: losses that tp ranks share are those of one rank."""
        values = self.values.clone()
        if not mesh.tp.is_first:
            values[: self._num_head_sums] = 0.0
        return values

    def means(self, global_sums: Sequence[float], labels: float, tokens: float) -> dict[str, float]:
        """Return the mean of each loss in nats: of head and depths over their labels, of layers over tokens and layers.

        Args:
            global_sums: The sums of `local_values` over all ranks.
            labels: The number of labels that count, without those of depths.
            tokens: The number of tokens without padding.
        """
        num_head = len(self.head_losses)
        depth_sums = global_sums[num_head : num_head + self.num_depths]
        depth_labels = global_sums[num_head + self.num_depths : self._num_head_sums]
        means = {
            name: _mean(total, labels) for name, total in zip(self.head_losses, global_sums[:num_head], strict=True)
        }
        for depth, (total, count) in enumerate(zip(depth_sums, depth_labels, strict=True), 1):
            means[depth_loss(depth)] = _mean(total, count)
        by_name = defaultdict[str, list[float]](list)
        for (name, _), mean in self.layer_means(global_sums, tokens).items():
            by_name[name].append(mean)
        return means | {name: sum(layer_means) / len(layer_means) for name, layer_means in by_name.items()}

    def layer_means(self, global_sums: Sequence[float], tokens: float) -> dict[tuple[str, int], float]:
        """Return (name, number of the layer) -> mean over tokens, of the losses of layers; arguments as for `means`."""
        layer_sums = global_sums[self._num_head_sums :]
        return {
            (name, layer): total / (max(tokens, 1) * self._layer_uses.get(layer, 1))
            for (name, layer), total in zip(self.layer_losses, layer_sums, strict=True)
        }


class RequestSums:
    """Sums of the losses of an evaluation's requests over the tokens of their continuations, in nats and fp64.

    Attributes:
        values: The sum of the losses that belong to no request, and then the sum of each request.
    """

    def __init__(self, num_requests: int, device: torch.device) -> None:
        self.values = torch.zeros(1 + num_requests, dtype=torch.float64, device=device)

    def add(self, loss_SB: Tensor, request_ids_SB: Tensor) -> None:
        """Add the losses of a micro-batch, whose labels belong to these requests; -1 stands for none."""
        self.values.index_add_(0, request_ids_SB.flatten() + 1, loss_SB.flatten().to(torch.float64))

    def local_values(self, mesh: Mesh) -> Tensor:
        """Return this rank's part of the sums over all ranks: of tp ranks, which have the same sums, one counts."""
        return self.values[1:].clone() if mesh.tp.is_first else torch.zeros_like(self.values[1:])


def _mean(total: float, count: float) -> float:
    """Return the mean of `count` values; without any, 0, or NaN if the sum is not finite."""
    return total / count if count else 0.0 * total
