"""The choice of the next token: the likeliest, or one drawn with temperature, top-k and top-p.

    p = softmax(logits / temperature);  the k likeliest;  of these the fewest whose sum reaches top_p (arXiv:1904.09751)

A draw is a function of (seed, number of the prompt, position), not of a generator's state: given equal logits it is the
same under every layout, and for a prompt alone or among others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.kernels.dropout import fold


@dataclass(frozen=True)
class Sampling:
    """temperature 0: always the likeliest. top_k 0 and top_p 1: no limit."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234


def uniform(seed: int, prompt: int, position: int) -> float:
    """A number in (0, 1), with 32 bits.

    >>> 0 < uniform(1, 2, 3) < 1 and uniform(1, 2, 3) != uniform(1, 3, 2)
    True
    """
    return (fold(seed, prompt, position) + 0.5) / 2**32


def distribution(logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(probabilities [B, V] in fp64, descending; their tokens). Needs a temperature above 0."""
    values_BV, order_BV = (logits_BV.double() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        values_BV[:, sampling.top_k :] = float("-inf")
    p_BV = values_BV.softmax(-1)
    if sampling.top_p < 1:
        p_BV = p_BV.masked_fill(p_BV.cumsum(-1) - p_BV >= sampling.top_p, 0.0)
    return p_BV / p_BV.sum(-1, keepdim=True), order_BV


def choose(logits_BV: Tensor, sampling: Sampling, places: Sequence[tuple[int, int]]) -> Tensor:
    """The next token of each sample, [B] int64; of equal logits the lowest token. `places`: (prompt, position)."""
    if sampling.temperature < 1e-6:  # too small to divide by
        return logits_BV.argmax(-1)
    p_BV, order_BV = distribution(logits_BV, sampling)
    drawn_B1 = torch.tensor([[uniform(sampling.seed, *place)] for place in places], dtype=torch.float64)
    below_B1 = (p_BV.cumsum(-1) <= drawn_B1).sum(-1, keepdim=True)
    most_B1 = (p_BV > 0).sum(-1, keepdim=True) - 1  # the sum may end below 1 by rounding
    return order_BV.gather(-1, below_B1.minimum(most_B1)).squeeze(-1)
