"""The inputs of layers in a forward pass, a micro-batch and a context, and the sites of random numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from megalite.config.rope_spec import RopeSpec
from megalite.kernels.attention import Documents
from megalite.nn.loss_sums import LossSums, RequestSums
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
    states        what mixers keep, by layer; a mixer sets and updates the state of its layer
    """

    length: int
    positions_SB: Tensor
    states: dict[int, Any]

    @property
    def num_new_B(self) -> Tensor: ...

    def append(self, layer: int, *new: Tensor) -> tuple[bool, tuple[Tensor, ...]]:
        """Store tensors [S, B, ...] of the new tokens; return if they are the first ones, and those of all tokens."""
        ...

    def first_visible(self, window: int | None) -> int:
        """Return the first position that a query of this pass sees."""
        ...

    def attend(self, layer: int, q_SBhK: Tensor, k_SBgK: Tensor, v_SBgK: Tensor, **kwargs: Any) -> Tensor:
        """Add keys and values to those of the layer, and return the attention over all of them."""
        ...


@dataclass(frozen=True)
class Batch:
    """The data of one micro-batch: this rank's S tokens of each of its B samples.

    labels_SB     None: the last stage returns logits_SBv
    mask_SB       1 where a token counts; None: all count
    sample_ids_B  global sample numbers: coordinates of dropout
    positions_SB  position of each token; None: 0 .. S - 1
    documents     documents of the full samples, which limit attention (kernels/attention.py); None: a sample is one
    cp_sharding   sharding of the samples over cp; None: they are not sharded
    cp_positions_S  the position in its sample of each of the rank's S tokens; None: 0 .. S - 1
    num_targets   number of labels that count, if the loader has counted them
    num_unpadded  number of tokens that are not padding
    padding_SB    True for padding, which routers do not count; None: there is no padding
    request_ids_SB  the request that each label belongs to, or -1 for none; None: losses are not summed by request

    For the depths k = 1 .. n of multi-token prediction, on the ranks that have them:

    mtp_tokens_JSB     inputs, k tokens ahead
    mtp_positions_JSB  their learned positions
    mtp_labels_JSB     labels, k + 1 tokens ahead
    mtp_mask_JSB       1 where a label counts: it is in the sample, in the document of its position, and not masked
    mtp_padding_JSB    True where the input is padding or after the sample; None: as `padding_SB`
    """

    tokens_SB: Tensor
    labels_SB: Tensor | None
    mask_SB: Tensor | None
    sample_ids_B: Tensor
    positions_SB: Tensor | None = None
    documents: Documents | None = None
    cp_sharding: SequenceSharding | None = None
    cp_positions_S: Tensor | None = None
    num_targets: int = 0
    num_unpadded: int = 0
    padding_SB: Tensor | None = None
    request_ids_SB: Tensor | None = None
    mtp_tokens_JSB: Tensor | None = None
    mtp_positions_JSB: Tensor | None = None
    mtp_labels_JSB: Tensor | None = None
    mtp_mask_JSB: Tensor | None = None
    mtp_padding_JSB: Tensor | None = None

    def mtp_input(self, depth: int) -> "Batch":
        """Return the batch whose embeddings are the input of `depth`."""
        assert self.mtp_tokens_JSB is not None and self.mtp_positions_JSB is not None
        return replace(self, tokens_SB=self.mtp_tokens_JSB[depth - 1], positions_SB=self.mtp_positions_JSB[depth - 1])

    def mtp_batch(self, depth: int) -> "Batch":
        """Return the batch of the layers and of the loss of `depth`. A token's position is that of the model."""
        assert self.mtp_labels_JSB is not None and self.mtp_mask_JSB is not None
        padding = self.mtp_padding_JSB
        return replace(
            self,
            labels_SB=self.mtp_labels_JSB[depth - 1],
            mask_SB=self.mtp_mask_JSB[depth - 1],
            padding_SB=self.padding_SB if padding is None else padding[depth - 1],
        )

    def token_positions(self, tp: Axis, s: int) -> int | Tensor:
        """Return the positions of the s tokens of a tp rank: the first one if they are consecutive, otherwise each."""
        return tp.shard_start(s) if self.cp_positions_S is None else self.cp_positions_S[tp.shard_slice(s)]


@dataclass(frozen=True)
class ForwardContext:
    """The state of a forward pass besides its data. A pipeline adds wgrad_store; a Stage, rope and in_full_recompute.

    step          number of the training step: a coordinate of dropout
    loss_grad     the gradient that the loss will get in backward (nn/loss.py); None: there is no backward, or it is
                  unknown
    token_weight  counted labels per unpadded token in the step: gradients are divided by the number of labels, but the
                  losses of layers are means over unpadded tokens
    wgrad_store   deferred weight gradients (nn/wgrad_store.py); None: none are deferred
    rope          cos and sin of the tokens' positions, [S, R / 2] or [S, B, R / 2]
    in_full_recompute  the layers are recomputed in backward as a whole
    cache         the state of mixers at earlier positions in generation; None: the samples are complete
    loss_sums     the sums of losses for the log (nn/loss_sums.py); None: they are not kept
    request_sums  the sums of losses by request; the head then computes no other loss; None: it does
    """

    step: int = 0
    loss_grad: float | Tensor | None = None
    token_weight: float | Tensor = 1.0
    wgrad_store: WeightGradStore | None = None
    rope: Mapping[RopeSpec, tuple[Tensor, Tensor]] = field(default_factory=dict)
    in_full_recompute: bool = False
    cache: MixerCache | None = None
    loss_sums: LossSums | None = None
    request_sums: RequestSums | None = None
