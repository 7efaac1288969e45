"""Keys and values of earlier positions, so that generation computes each of them once.

The first forward pass has the prompts, padded at their end to one length; each later one a few tokens, at places that
differ between samples. Padding after a sample's last token is never seen: its places are written again before a query
comes that far. Bytes: 2 T B g K times the size of an element for each layer of this rank; of a layer with a window only
the keys that some query can see are read.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.attention import attention
from megalite.kernels.cached_attention import cached_attention
from megalite.models.gpt import Block, Stage


class KeyValueCache:
    """`length`: T, places per sample. Before each forward pass `go_to` says which ones it has."""

    def __init__(self, length: int):
        self.length = length
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def go_to(self, places_SB: Tensor, device: torch.device) -> None:
        """Set the places of the tokens in the next forward pass; on the CPU, so that nothing waits for a card."""
        self.earliest, self.places_SB = int(places_SB.min()), places_SB.to(device)

    @contextlib.contextmanager
    def used_by(self, stage: Stage) -> Iterator[None]:
        """Within the block the layers of `stage` attend to this cache."""
        layers = [block for block in stage.blocks if isinstance(block, Block)]
        for block in layers:
            block.attention.attend = partial(self.attend, block.layer)
        try:
            yield
        finally:
            for block in layers:
                block.attention.attend = attention

    def attend(
        self,
        layer: int,
        q_SBhK: Tensor,
        k_SBgK: Tensor,
        v_SBgK: Tensor,
        *,
        scale: float,
        window: int | None,
        sink_H: Tensor | None,
        **_: Any,
    ) -> Tensor:
        """Store the new keys and values of `layer`, and attend to all up to each query's place, or the last `window` of
        these: o_SBhK. Further arguments of kernels/attention.py are for training."""
        first = layer not in self._layers
        if first:
            shape = (self.length, *k_SBgK.shape[1:])
            self._layers[layer] = (k_SBgK.new_zeros(shape), v_SBgK.new_zeros(shape))
        k_TBgK, v_TBgK = self._layers[layer]
        samples_B = torch.arange(k_SBgK.shape[1], device=k_SBgK.device)
        k_TBgK[self.places_SB, samples_B] = k_SBgK
        v_TBgK[self.places_SB, samples_B] = v_SBgK
        if first:  # nothing came before: the training path, which makes no mask
            return attention(q_SBhK, k_SBgK, v_SBgK, scale=scale, window=window, sink_H=sink_H)
        low = 0 if window is None else max(0, self.earliest - window + 1)
        seen = (k_TBgK[low:], v_TBgK[low:], self.places_SB - low)
        return cached_attention(q_SBhK, *seen, scale=scale, window=window, sink_H=sink_H)
