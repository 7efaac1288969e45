"""The likelihood of continuations under a model that is loaded for generation, under any tp x pp.

All samples of a batch go through the stages together, padded at the end to one length. A mixer is causal, so that
padding changes nothing. Only the logits that predict a continuation are computed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.generate.generation import SetupError, TextGenerator, forward_stages, gather_positions, logits_at
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.parallel.comm import broadcast_

MAX_LOGITS = 1 << 26  # logits in memory at a time


class Continuation(NamedTuple):
    """Tokens of a text, and the number of the last ones that are scored."""

    tokens: Sequence[int]
    num_labels: int


class Score(NamedTuple):
    """The score of a continuation.

    log_likelihood  the sum of the log-probabilities of its tokens, nats
    is_greedy       each of its tokens is the likeliest; of equal ones, the lowest is
    """

    log_likelihood: float
    is_greedy: bool


@torch.no_grad()
def score_continuations(model: TextGenerator, continuations: Sequence[Continuation], batch_size: int) -> list[Score]:
    """Return the score of each continuation, the same on all ranks. Collective over mesh.pp and mesh.tp.

    Args:
        model: the model.
        continuations: what is scored.
        batch_size: the number of texts that are computed together.

    Raises:
        SetupError: a text is empty or longer than the model's positions, or nothing precedes its continuation.
    """
    max_positions = model.model_config.max_positions
    for number, (tokens, num_labels) in enumerate(continuations):
        if not 0 < num_labels < len(tokens) <= max_positions + 1:
            raise SetupError(
                f"text {number} has {len(tokens)} tokens with {num_labels} to score; the model has {max_positions} "
                "positions: give at least a token before the first that is scored, and shorten the text"
            )
    longest_first = sorted(range(len(continuations)), key=lambda i: -len(continuations[i].tokens))
    scores: dict[int, Score] = {}
    for start in range(0, len(longest_first), batch_size):
        indices = longest_first[start : start + batch_size]
        scores.update(zip(indices, _score_batch(model, [continuations[i] for i in indices]), strict=True))
    return [scores[i] for i in range(len(continuations))]


def _score_batch(model: TextGenerator, continuations: Sequence[Continuation]) -> list[Score]:
    """Return the scores of continuations that are computed together; the first has the longest text."""
    mesh = model.mesh
    B = len(continuations)
    inputs = [list(tokens[:-1]) for tokens, _ in continuations]
    S = -(-len(inputs[0]) // mesh.tp.size) * mesh.tp.size
    tokens_SB = torch.tensor([ids + [0] * (S - len(ids)) for ids in inputs]).T.to(mesh.device)
    # padding may be beyond the last position
    positions_S = torch.arange(S, device=mesh.device).clamp(max=model.model_config.max_positions - 1)
    batch = Batch(
        tokens_SB, None, None, torch.zeros(B, dtype=torch.int64, device=mesh.device), positions_S[:, None].expand(S, B)
    )
    h_sBD = forward_stages(model, batch, ForwardContext())
    totals_2B = torch.zeros(2, B, dtype=torch.float64, device=mesh.device)  # log-likelihood, labels that are not greedy
    if h_sBD is not None:
        samples = [b for b, (_, num_labels) in enumerate(continuations) for _ in range(num_labels)]
        positions = [p for tokens, n in continuations for p in range(len(tokens) - 1 - n, len(tokens) - 1)]
        labels = [token for tokens, n in continuations for token in tokens[-n:]]
        index_3N = torch.tensor([positions, samples, labels], device=mesh.device)
        _add_label_scores_(totals_2B, model, h_sBD, *index_3N)
    broadcast_(totals_2B, mesh.pp, mesh.pp.size - 1)
    return [Score(total, num_others == 0) for total, num_others in totals_2B.T.tolist()]


def _add_label_scores_(
    totals_2B: Tensor, model: TextGenerator, h_sBD: Tensor, positions_N: Tensor, samples_N: Tensor, labels_N: Tensor
) -> None:
    """Add to each sample's totals the log-probabilities of its labels, and the number that are not the likeliest.

    `positions_N` and `samples_N` say where each label is predicted. Collective over mesh.tp.
    """
    head = model.stage.head
    assert head is not None
    size = max(1, MAX_LOGITS // head.vocab_size)
    h_SBD = gather_positions(head, h_sBD)
    for start in range(0, len(labels_N), size):
        chunk = slice(start, start + size)
        samples_n, labels_n = samples_N[chunk], labels_N[chunk]
        logits_nV = logits_at(head, h_SBD, positions_N[chunk], samples_n)[:, : head.vocab_size]
        dtype = torch.promote_types(logits_nV.dtype, torch.float32)
        log_probs_n = logits_nV.to(dtype).log_softmax(-1).gather(1, labels_n[:, None])[:, 0]
        totals_2B[0].index_add_(0, samples_n, log_probs_n.to(torch.float64))
        totals_2B[1].index_add_(0, samples_n, (logits_nV.argmax(-1) != labels_n).to(torch.float64))
