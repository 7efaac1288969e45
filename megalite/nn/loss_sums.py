"""The sums of a step's losses by name, which forward and backward add to on the device.

    head losses   "loss" and "z_loss" of the LMHead, means over the labels that count. Every tp rank adds the same sum
                  over its samples, and one of them counts.
    layer losses  of routers and of plugins' mixers (nn/layer_loss.py), means over the tokens that are not padding.
                  Every rank adds the sum over its own tokens, in backward: neither recomputation nor evaluation counts.

All ranks have the same losses in the same order. The sums of a step are part of its all-reduce
(training/train_step.py); log, TensorBoard, metrics and report get them by name.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.parallel.mesh import Mesh


def head_losses(z_loss: float) -> tuple[str, ...]:
    """Return the names of the losses of a head with this coefficient of the z-loss."""
    return ("loss", "z_loss") if z_loss else ("loss",)


class LossSums:
    """Sums of losses over tokens, in nats and fp64. The tensor stays the same, so that CUDA graphs can add to it.

    Attributes:
        head_losses: The names of the head's losses.
        layer_losses: (name, number of the layer) of each loss of a layer.
        values: The sums: of the head's losses, then of the layers'.
    """

    def __init__(
        self, head_losses: Sequence[str], layer_losses: Sequence[tuple[str, int]], device: torch.device
    ) -> None:
        self.head_losses = tuple(head_losses)
        self.layer_losses = tuple(layer_losses)
        self.values = torch.zeros(len(head_losses) + len(layer_losses), dtype=torch.float64, device=device)
        self._head_index = {name: index for index, name in enumerate(self.head_losses)}
        self._layer_index = {key: index for index, key in enumerate(self.layer_losses, len(self.head_losses))}

    def zero_(self) -> None:
        """Forget all losses, before the first forward of a step or of its rerun."""
        self.values.zero_()

    def add_head_loss(self, name: str, value: Tensor) -> None:
        """Add the sum of a loss of the head over a micro-batch."""
        self.values[self._head_index[name]] += value.detach()

    def add_layer_loss(self, name: str, layer: int, value: Tensor) -> None:
        """Add the sum of a loss of a layer over this rank's tokens of a micro-batch."""
        self.values[self._layer_index[name, layer]] += value.detach()

    def local_values(self, mesh: Mesh) -> Tensor:
        """Return this rank's part of the sums over all ranks: losses that tp ranks share are those of one rank."""
        values = self.values.clone()
        if not mesh.tp.is_first:
            values[: len(self.head_losses)] = 0.0
        return values

    def means(self, global_sums: Sequence[float], labels: float, tokens: float) -> dict[str, float]:
        """Return the mean of each loss in nats: of the head over labels, of layers over tokens and layers.

        Args:
            global_sums: The sums of `local_values` over all ranks.
            labels: The number of labels that count.
            tokens: The number of tokens without padding.
        """
        num_head = len(self.head_losses)
        means = {
            name: total / labels if labels else 0.0 * total  # NaN and inf remain visible
            for name, total in zip(self.head_losses, global_sums[:num_head], strict=True)
        }
        by_name = defaultdict[str, list[float]](list)
        for (name, _), mean in self.layer_means(global_sums, tokens).items():
            by_name[name].append(mean)
        return means | {name: sum(layer_means) / len(layer_means) for name, layer_means in by_name.items()}

    def layer_means(self, global_sums: Sequence[float], tokens: float) -> dict[tuple[str, int], float]:
        """Return (name, number of the layer) -> mean over tokens, of the losses of layers; arguments as for `means`."""
        layer_sums = global_sums[len(self.head_losses) :]
        return {key: total / max(tokens, 1) for key, total in zip(self.layer_losses, layer_sums, strict=True)}
