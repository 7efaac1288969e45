"""A mixer: a causal convolution over the last four tokens of each channel, in place of attention.

megalite train --plugin examples/plugins/mixer.py --hybrid-layer-pattern 'S-S-*-S-' --preset tiny --vocab-size 300 \
  --mock-data --train-iters 20 --eval-iters 2 --micro-batch-size 2 --global-batch-size 8 --save runs/short

S is the letter of this mixer in the pattern. It does not separate documents, so --reset-attention-mask is refused.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megalite
from megalite.nn.linear import column_parallel_linear, row_parallel_linear
from megalite.nn.micro_batch import Batch, ForwardContext, MixerCache
from megalite.parallel.spec import Normal, ParamSpec

WIDTH = 4


@megalite.register("mixer", "short_convolution")
class ShortConvolution(nn.Module):
    """x_sBD -> up, gathered over the sequence -> convolution of each channel -> down, scattered over the sequence."""

    letter = "S"

    def __init__(
        self, make_param: Any, name: str, model: Any, layer: int, spec: Any, recomputed: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.layer = layer
        self.tp = make_param.mesh.tp
        D = model.hidden_size
        std = model.init_method_std
        self.up = make_param(ParamSpec(f"{name}.up", (D, D), shards=((0, "tp"),), init=Normal(std)))
        self.kernel = make_param(
            ParamSpec(f"{name}.kernel", (WIDTH, D), shards=((1, "tp"),), init=Normal(0.5), is_lookup=True)
        )
        self.down = make_param(
            ParamSpec(f"{name}.down", (D, D), shards=((1, "tp"),), init=Normal(model.output_init_std))
        )

    def forward(self, x_sBD: Tensor, batch: Batch, ctx: ForwardContext) -> Tensor:
        """Return y_sBD."""
        (u_SBf,) = column_parallel_linear(x_sBD, [self.up], self.tp, ctx.wgrad_store)
        S = len(u_SBf)
        if ctx.cache is None:
            earlier = F.pad(u_SBf, (0, 0, 0, 0, WIDTH - 1, 0))  # rows 0 .. WIDTH - 2 are before the first token
            taps = [earlier[i : i + S] for i in range(WIDTH)]
        else:
            taps = self._cached_taps(u_SBf, ctx.cache)
        y_SBf = sum(self.kernel[i] * tap for i, tap in enumerate(taps))
        return row_parallel_linear(y_SBf, self.down, self.tp, wgrad_store=ctx.wgrad_store)

    def _cached_taps(self, u_SBf: Tensor, cache: MixerCache) -> list[Tensor]:
        """Store the inputs of new tokens, and return the inputs WIDTH - 1 .. 0 positions before each of them."""
        _, B, f = u_SBf.shape
        state = cache.states.get(self.layer)
        if state is None:
            state = cache.states[self.layer] = u_SBf.new_zeros(cache.length + WIDTH - 1, B, f)
        samples_B = torch.arange(B, device=u_SBf.device)
        state[cache.positions_SB + WIDTH - 1, samples_B] = u_SBf
        return [state[cache.positions_SB + i, samples_B] for i in range(WIDTH)]
