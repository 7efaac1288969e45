"""A micro-batch as the layers get it, and the sites of random numbers."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megalite.kernels.attention import Documents
from megalite.nn.sequence_sharding import SequenceSharding
from megalite.nn.wgrad_store import WeightGradStore
from megalite.parallel.mesh import Axis

# where random numbers are drawn; a coordinate of their hash
RNG_SITE_EMBEDDING, RNG_SITE_ATTENTION, RNG_SITE_HIDDEN_1, RNG_SITE_HIDDEN_2, RNG_SITE_ROUTER = range(5)


class MixerCache(Protocol):
    """The state of mixers at earlier positions in generation (generate/generation.py: KVCache).

    length        number of positions per sample
    positions_SB  position of each token of this pass
    num_new_B     number of tokens of each sample in this pass; those after them are padding, to be overwritten later
    states        the state of each layer whose mixer is not attention; the mixer sets and updates it
    """

    length: int
    positions_SB: Tensor
    states: dict[int, Any]

    @property
    def num_new_B(self) -> Tensor: ...

    def attend(self, layer: int, q_SBhK: Tensor, k_SBgK: Tensor, v_SBgK: Tensor, **kwargs: Any) -> Tensor:
        """Add keys and values to those of the layer, and return the attention over all of them."""
        ...


@dataclass(frozen=True)
class Batch:
    """One micro-batch: this rank's S tokens of each of its B samples. A Stage adds rope and in_full_recompute.

    labels_SB     None: the last stage returns logits_SBv
    mask_SB       1 where a token counts; None: all count
    sample_ids_B  global sample numbers, and step, the training step: coordinates of dropout
    positions_SB  position of each token; None: 0 .. S - 1
    documents     documents of the full samples, which limit attention (kernels/attention.py); None: a sample is one
    num_targets   number of labels that count, if the loader has counted them
    num_unpadded  number of tokens that are not padding
    padding_SB    True for padding, which routers do not count; None: there is no padding
    loss_grad     the gradient that the loss will get in backward (nn/loss.py); None: unknown
    token_weight  counted labels per unpadded token in the step: gradients are divided by the number of labels, but the
                  losses of routers are means over unpadded tokens
    wgrad_store   deferred weight gradients (nn/wgrad_store.py); None: none are deferred
    cp_sharding   sharding of the samples over cp; None: they are not sharded
    cp_positions_S  the position in its sample of each of the rank's S tokens; None: 0 .. S - 1
    rope          cos and sin, [S, K / 2] or [S, B, K / 2]; None: no rotary positions
    in_full_recompute  the layers are recomputed in backward as a whole
    cache         what mixers keep of earlier positions in generation; None: the samples are complete
    """

    tokens_SB: Tensor
    labels_SB: Tensor | None
    mask_SB: Tensor | None
    sample_ids_B: Tensor
    step: int
    positions_SB: Tensor | None = None
    documents: Documents | None = None
    loss_grad: float | Tensor | None = None
    token_weight: float | Tensor = 1.0
    wgrad_store: WeightGradStore | None = None
    cp_sharding: SequenceSharding | None = None
    cp_positions_S: Tensor | None = None
    num_targets: int = 0
    num_unpadded: int = 0
    padding_SB: Tensor | None = None
    rope: tuple[Tensor, Tensor] | None = None
    in_full_recompute: bool = False
    cache: MixerCache | None = None

    def token_positions(self, tp: Axis, s: int) -> int | Tensor:
        """Return the positions of the s tokens of a tp rank: the first one if they are consecutive, otherwise each."""
        return tp.shard_start(s) if self.cp_positions_S is None else self.cp_positions_S[tp.shard_slice(s)]
