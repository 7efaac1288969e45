"""The vocabulary-parallel word embedding, learned positions, and the dropout after them.

Each tp rank has the rows of its part of the vocabulary and looks up the tokens in it (zero for the others). The sum
over tp is one reduce-scatter, so the result is split along the sequence: tokens_SB -> x_sBD.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megalite.config.options import ModelConfig
from megalite.kernels.dropout import dropout, fold_in
from megalite.kernels.weight_grad import accumulate_embedding_grad_
from megalite.nn.micro_batch import RNG_SITE_EMBEDDING, Batch, ForwardContext
from megalite.nn.parameter import MainGrad, ParamFactory, main_grad_of, shapes
from megalite.parallel.comm import reduce_scatter_sequence
from megalite.parallel.spec import Normal, ParamSpec


def vocab_spec(name: str, padded: int, vocab_size: int, hidden_size: int, std: float, tied: bool) -> ParamSpec:
    """Return the spec of the word embedding or the head, [V, D].

    It has `padded` rows; the first `vocab_size` are vocabulary. A tied head at the other end of the pipeline has the
    same spec as the embedding.
    """
    shape = (padded, hidden_size)
    shards = ((0, "tp"),)
    return ParamSpec(name, shape, shards=shards, init=Normal(std), is_vocab=True, tied=tied, vocab_rows=vocab_size)


class _EmbeddingLookup(Function):
    """A lookup in a weight with a main gradient; backward touches only the rows that were looked up."""

    @staticmethod
    def forward(ctx: Any, index_SB: Tensor, weight_vD: Tensor, main_grad: MainGrad) -> Tensor:
        ctx.main_grad = main_grad
        ctx.save_for_backward(index_SB)
        return F.embedding(index_SB, weight_vD)

    @staticmethod
    def backward(ctx: Any, dx_SBD: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        (index_SB,) = ctx.saved_tensors
        grad_vD, overwrite = ctx.main_grad.accumulator()
        accumulate_embedding_grad_(grad_vD, index_SB.flatten(), dx_SBD.flatten(0, 1), overwrite=overwrite)
        return None, None, None


def embedding_lookup(index_SB: Tensor, weight_vD: Tensor) -> Tensor:
    """Return weight[index], [S, B, D]."""
    main_grad = main_grad_of(weight_vD)
    if main_grad is None:
        return F.embedding(index_SB, weight_vD)
    return _EmbeddingLookup.apply(index_SB, weight_vD, main_grad)  # type: ignore[return-value]


class Embedding(nn.Module):
    """Word embedding times a multiplier, learned positions if the model has them, muP's multiplier, and dropout."""

    def __init__(self, make_param: ParamFactory, spec: ParamSpec, model: ModelConfig):
        super().__init__()
        make_param = make_param.for_unit("embedding")
        self.tp = make_param.mesh.tp
        self.dropout_p = model.hidden_dropout
        self.seed = make_param.seed
        self.word = make_param(spec)
        # rounded to the dtype of the weights, as in transformers
        self.multiplier = float(torch.tensor(model.embedding_multiplier, dtype=make_param.dtype))
        self.sum_multiplier = model.embedding_sum_multiplier
        self.position = None
        if model.position_embedding_type == "learned_absolute":
            shape = model.max_positions, model.hidden_size
            position = ParamSpec(
                "embedding.position",
                shape,
                partial_grad_axes=("tp",),
                init=spec.init,
                is_lookup=True,
                tied=spec.tied and model.num_mtp_depths > 0,
            )
            self.position = make_param(position)

    def extra_repr(self) -> str:
        return shapes(self)

    def forward(self, batch: Batch, ctx: ForwardContext, mtp_depth: int = 0) -> Tensor:
        """Return x_sBD. Without `positions_SB`, the learned positions are those in the sample.

        `mtp_depth`: the depth of multi-token prediction whose input this is, a coordinate of dropout; 0: the model.
        """
        tp, rows, tokens_SB = self.tp, self.word.shape[0], batch.tokens_SB
        if tp.size == 1:
            x_sBD = embedding_lookup(tokens_SB, self.word)
        else:
            local_SB = tokens_SB - tp.shard_start(rows)
            other_shard_SB = (local_SB < 0) | (local_SB >= rows)
            x_SBD = embedding_lookup(local_SB.masked_fill(other_shard_SB, 0), self.word)
            x_sBD = reduce_scatter_sequence(x_SBD.masked_fill(other_shard_SB.unsqueeze(-1), 0), tp)
        if self.multiplier != 1:
            x_sBD = x_sBD * self.multiplier
        if self.position is not None:
            shard, positions_SB = tp.shard_slice(x_sBD.shape[0]), batch.positions_SB
            if positions_SB is None and batch.cp_positions_S is not None:
                positions_SB = batch.cp_positions_S.unsqueeze(1)
            if positions_SB is None:
                x_sBD = x_sBD + self.position[shard].unsqueeze(1)
            else:
                x_sBD = x_sBD + embedding_lookup(positions_SB[shard], self.position)
        if self.sum_multiplier != 1:
            x_sBD = x_sBD * self.sum_multiplier
        if self.dropout_p and self.training:
            key = fold_in(self.seed, ctx.step, -1 - mtp_depth, RNG_SITE_EMBEDDING)
            positions = batch.token_positions(tp, x_sBD.shape[0])
            x_sBD = dropout(x_sBD, self.dropout_p, key, batch.sample_ids_B, positions)
        return x_sBD
