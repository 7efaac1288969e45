"""What the layers of a model are, and the bill of each kind: one block of it, or some that are recomputed as one."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.config.options import ModelConfig
from megalite.models.gpt import Batch, Block, Head
from megalite.nn.attention import Coordinates
from megalite.nn.embedding import Embedding, vocabulary_spec
from megalite.nn.later import Later
from megalite.nn.parameter import Maker
from megalite.nn.recompute import recompute
from megalite.plan.bill import Bill, Recorder
from megalite.plan.meta import META

Kind = ModelConfig  # the model of one layer alone: equal where layers are


@functools.lru_cache(maxsize=64)
def kinds_of(model: ModelConfig) -> tuple[Kind, ...]:
    """Of every layer."""
    made: dict[tuple[int | None, bool], Kind] = {}
    for one in zip(model.windows, model.rotary, strict=True):
        if one not in made:
            window, rotary = one
            made[one] = replace(
                model,
                num_layers=1,
                window_size=None if window is None else (window - 1, 0),
                window_attn_skip_freq=None,
                position_embedding_type=model.position_embedding_type if rotary else "none",
                no_rope_freq=None,
            )
    return tuple(made[one] for one in zip(model.windows, model.rotary, strict=True))


@dataclass(frozen=True)
class Setting:
    """Of a rank. `again`: the parts of a block that are computed again in backward; `split`: weight gradients wait."""

    tp: int
    micro_batch: int
    dtype: torch.dtype
    split: bool = False
    again: tuple[str, ...] = ()

    def maker(self, seen: Recorder) -> Maker:
        return Maker(seen.mesh(self.tp), self.dtype, 0, meta=True)

    def hidden(self, model: ModelConfig) -> Tensor:
        """x_sBD."""
        shape = model.seq_length // self.tp, self.micro_batch, model.hidden_size
        return torch.empty(shape, dtype=self.dtype, device=META)

    def tokens(self, model: ModelConfig) -> Tensor:
        """tokens_SB."""
        return torch.empty(model.seq_length, self.micro_batch, dtype=torch.int64, device=META)


@functools.lru_cache(maxsize=4096)
def layers_bill(kinds: tuple[Kind, ...], setting: Setting, whole: bool = False) -> Bill:
    """`whole`: only the input of the first stays until backward, which computes all of them again."""
    seen, (first, *_) = Recorder(), kinds
    make = setting.maker(seen)
    blocks = [seen.own(Block(make, kind, 0, setting.again)) for kind in kinds]
    later = Later() if setting.split else None
    sample_ids_B = torch.empty(setting.micro_batch, dtype=torch.int64, device=META)
    where = Coordinates(_rope(first), sample_ids_B, 0, None, later)

    def run(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, where)
        return x

    with seen:
        forward = (lambda x: recompute(run, x)) if whole else run
        return seen.read(forward, [setting.hidden(first)], torch.empty_like, later)


def _rope(model: ModelConfig) -> tuple[Tensor, Tensor] | None:
    if not any(model.rotary):
        return None
    size = int(model.head_size * model.rotary_percent) // 2
    cos, sin = (torch.empty(model.seq_length, size, device=META) for _ in range(2))
    return cos, sin


@functools.lru_cache(maxsize=256)
def head_bill(model: ModelConfig, setting: Setting, vocab_size: int, padded: int, z_loss: float) -> Bill:
    """Final norm, output projection and loss, whose gradients are computed in forward."""
    seen = Recorder()
    spec = vocabulary_spec("head", padded, vocab_size, model.hidden_size, 0.0, False)
    head = seen.own(Head(setting.maker(seen), model, spec, None, vocab_size, z_loss))
    tokens = setting.tokens(model)
    batch = Batch(tokens, tokens, None, tokens[0], 0, loss_weight=1.0)
    with seen:
        return seen.read(lambda x: head(x, batch), [setting.hidden(model)], torch.ones_like)


@functools.lru_cache(maxsize=256)
def embedding_bill(model: ModelConfig, setting: Setting, vocab_size: int, padded: int) -> Bill:
    seen = Recorder()
    spec = vocabulary_spec("embedding.word", padded, vocab_size, model.hidden_size, 0.0, False)
    positions = model.positions if model.position_embedding_type == "learned_absolute" else None
    module = seen.own(Embedding(setting.maker(seen), spec, positions=positions, dropout_p=model.hidden_dropout))
    tokens = setting.tokens(model)
    with seen:
        return seen.read(lambda: module(tokens, tokens[0], 0), [], torch.empty_like)


@functools.lru_cache(maxsize=256)
def model_flops(model: ModelConfig, padded_vocab_size: int) -> float:
    """Of forward and backward per token, a multiply-add counted as 2: three times the forward of one rank that
    recomputes nothing, and the head's, which has its backward in its forward. Scores that the mask hides do not count,
    borders of documents do."""
    alone = Setting(1, 1, torch.bfloat16)
    layers = sum(3 * layers_bill((kind,), alone).flops[0] for kind in kinds_of(model))
    head = sum(head_bill(model, alone, padded_vocab_size, padded_vocab_size, 0.0).flops)
    return (layers + head) / model.seq_length
