"""A micro-batch on its way through the layers, and the coordinates of what is drawn there."""

from dataclasses import dataclass

from torch import Tensor

from megalite.kernels.attention import Documents
from megalite.nn.sequence_sharding import SequenceSharding
from megalite.nn.wgrad_store import WeightGradStore
from megalite.parallel.mesh import Axis

RNG_SITE_EMBEDDING, RNG_SITE_ATTENTION, RNG_SITE_HIDDEN_1, RNG_SITE_HIDDEN_2, RNG_SITE_ROUTER = range(
    5
)  # where numbers are drawn


@dataclass(frozen=True)
class Batch:
    """One micro-batch: this rank's S tokens of each of its B samples. A Stage adds rope and in_full_recompute for its blocks.

    labels_SB     None: the last stage returns logits_SBv
    mask_SB       1 where a token counts; None: all do
    sample_ids_B  global sample numbers; step: the training step. Both are coordinates of dropout
    positions_SB  position of each token; None: 0 .. S - 1
    documents     those of whole samples that attention is limited to (kernels/attention.py); None: each sample is one
    num_targets   labels that count, where the loader has counted them; unpadded: tokens that are not padding
    padding_SB    whether a token only fills its sample, so that routers do not count it; None: no sample is filled
    loss_grad     the gradient that the loss will get in backward (nn/loss.py); None: unknown
    token_weight  labels that count per token that is not padding, in the step: gradients are divided by the former, and
                  those of routers' losses are means over the latter
    wgrad_store   where weight gradients wait (nn/wgrad_store.py)
    cp_sharding   how the samples are sharded over cp; None: they are whole
    cp_positions_S  the position in its sample of each of the rank's S tokens; None: 0 .. S - 1
    rope          cos and sin, [S, K / 2] or [S, B, K / 2]; None: no rotary positions
    in_full_recompute  the layers are computed again in backward, as a whole
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
    unpadded: int = 0
    padding_SB: Tensor | None = None
    rope: tuple[Tensor, Tensor] | None = None
    in_full_recompute: bool = False

    def token_positions(self, tp: Axis, s: int) -> int | Tensor:
        """Where the s tokens of a tp rank are: the first position, or each."""
        return tp.shard_start(s) if self.cp_positions_S is None else self.cp_positions_S[tp.shard_slice(s)]
