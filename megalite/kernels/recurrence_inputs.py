"""The inputs and the properties of linear recurrences (kernels/delta_rule.py)."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from megalite.kernels.dispatch import power_of_two, size_for_device

# tokens of a chunk; shorter ones have fewer products, but take more operations
CHUNK = {"cpu": 32, "cuda": 64}
GROUP_CHUNKS = {"cpu": 16, "cuda": 8}
L2_NORM_EPS = 1e-6  # that of Qwen3-Next and flash-linear-attention


class RecurrenceInputs(NamedTuple):
    """The inputs of S tokens: q_SBGK, k_SBGK, v_SBHV, log_decay [S, B, H] or [S, B, H, K], beta_SBH or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None

    def tokens(self, span: slice) -> "RecurrenceInputs":
        """Return the inputs of some tokens."""
        return RecurrenceInputs(*(None if x is None else x[span] for x in self))  # type: ignore[arg-type]

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """[B, H, K, V]."""
        return self.v.shape[1], self.v.shape[2], self.k.shape[3], self.v.shape[3]

    @property
    def is_channel_decay(self) -> bool:
        return self.log_decay.dim() == 4


@dataclass(frozen=True)
class Recurrence:
    """The properties of a recurrence, and the documents of its tokens.

    scale         factor of q
    normalize_qk  divide each q and k by sqrt(|x|^2 + 1e-6) first
    documents_BS  a number for each token that differs between documents, like a document's first position; None: each
                  sample is one document
    previous_B    that number of the token before the first one, to whose document the initial state belongs; None:
                  there is no initial state, or it belongs to the document of the first token
    chunk_size    tokens of a chunk, rounded up to a power of two; None: that of the device (CHUNK)
    """

    scale: float = 1.0
    normalize_qk: bool = False
    documents_BS: Tensor | None = None
    previous_B: Tensor | None = None
    chunk_size: int | None = None

    def tokens(self, span: slice) -> "Recurrence":
        """Return the same for some tokens, whose first is `span.start`."""
        if self.documents_BS is None:
            return self
        previous_B = self.previous_B if span.start == 0 else self.documents_BS[:, span.start - 1]
        return replace(self, documents_BS=self.documents_BS[:, span], previous_B=previous_B)

    def chunk_size_of(self, inputs: RecurrenceInputs) -> int:
        """Return the number of tokens of a chunk."""
        default = size_for_device(CHUNK, inputs.v.device)
        return power_of_two(min(self.chunk_size or default, len(inputs.v)))

    def groups(self, inputs: RecurrenceInputs) -> list[slice]:
        """Return the tokens of each group of chunks."""
        size = size_for_device(GROUP_CHUNKS, inputs.v.device) * self.chunk_size_of(inputs)
        length = len(inputs.v)
        return [slice(start, min(start + size, length)) for start in range(0, length, size)]
