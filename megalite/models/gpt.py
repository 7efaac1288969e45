"""A decoder-only transformer, cut into pipeline stages; GPT-2/3, NeoX, Llama, Mistral and Qwen are settings of it.

    tokens_SB -> Embedding -> Block * layers -> Head -> loss        a Stage holds a range of this line

    Block:  x = x + dropout(attention(norm(x)));  x = x + dropout(mlp(norm(x)))      mlp: or experts
    or, with a parallel residual:  x = x + dropout(attention(norm(x))) + dropout(mlp(norm'(x)))

A stage is an ordinary module: x_sBD in, x_sBD out (or the loss, on the last stage). It does not know the schedule.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megalite.config.options import ModelConfig
from megalite.kernels.dropout import dropout, fold
from megalite.kernels.rope import RopeScaling, Scaling, Yarn, rope_tables
from megalite.nn.attention import Attention
from megalite.nn.embedding import Embedding, vocabulary_spec
from megalite.nn.experts import Experts
from megalite.nn.linear import gather_linear
from megalite.nn.loss import linear_cross_entropy
from megalite.nn.micro_batch import SITE_HIDDEN_1, SITE_HIDDEN_2, Batch
from megalite.nn.mlp import MLP
from megalite.nn.norm import Norm, norm_of
from megalite.nn.parameter import Maker, Use, run_unit, shapes
from megalite.nn.recompute import recompute, without_keeping
from megalite.parallel.spec import ParamSpec


@dataclass(frozen=True)
class Recompute:
    """The activations that are computed again in backward. granularity: None | "selective" (the `modules`, of
    core_attn, layernorm, mlp) | "full", with method "uniform" (in groups of `num_layers` layers) or "block" (the first
    `num_layers` layers of each stage)."""

    granularity: str | None = None
    method: str = "uniform"
    num_layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of each block that are computed again."""
        return self.modules if self.granularity == "selective" else ()

    def groups(self, layers: int) -> list[tuple[slice, bool]]:
        """Consecutive layers of a stage that has `layers`, and whether they are computed again as a whole."""
        n = self.num_layers
        if self.granularity != "full":
            return [(slice(layers), False)]
        if self.method == "uniform":
            return [(slice(i, i + n), True) for i in range(0, layers, n)]
        return [(slice(i, i + 1), i < n) for i in range(layers)]


def rope_scaling(model: ModelConfig) -> Scaling:
    """The stretching of the model's rotary wavelengths, if any."""
    if model.position_embedding_type == "yarn":
        stretch = model.rotary_scaling_factor, model.yarn_original_max_position_embeddings
        borders = model.yarn_beta_fast, model.yarn_beta_slow, model.yarn_correction_range_round_to_int
        return Yarn(*stretch, *borders, model.mscale, model.mscale_all_dim)
    return RopeScaling(factor=model.rope_scaling_factor) if model.use_rope_scaling else None


class Block(nn.Module):
    def __init__(self, make: Maker, model: ModelConfig, layer: int, again: tuple[str, ...] = ()):
        """`again`: the parts that are computed again in backward (Recompute.parts)."""
        super().__init__()
        make = make.of(f"layers.{layer}")
        self.layer, self.seed, self.dropout_p = layer, make.seed, model.hidden_dropout
        self.tp, self.parallel = make.mesh.tp, model.parallel_residual
        self.norms_again, self.mlp_again = "layernorm" in again, ("moe" if model.experts[layer] else "mlp") in again
        self.dropout: Callable[..., Tensor] = dropout  # or compiled (models/compiled.py)
        norm = model.hidden_size, *norm_of(model)
        self.attention_norm = Norm(make, f"layers.{layer}.attention.norm", *norm)
        self.attention = Attention(make, f"layers.{layer}.attention", model, layer, "core_attn" in again)
        self.mlp_norm = Norm(make, f"layers.{layer}.mlp.norm", *norm)
        name = f"layers.{layer}.mlp"
        if model.experts[layer]:
            self.mlp = Experts(make, name, model, layer, "shared_experts" in again)
        else:
            self.mlp = MLP(make, name, model, model.ffn_size, bias=model.add_bias_linear)

    def forward(self, x_sBD: Tensor, where: Batch) -> Tensor:
        if self.training and (self.norms_again or self.mlp_again):
            return self._forward_again(x_sBD, where)
        a_sBD = self.attention(self.attention_norm(x_sBD), where)
        if self.parallel or self._drops():
            h_sBD = self._add(a_sBD, x_sBD, SITE_HIDDEN_1, where)
            n_sBD = self.mlp_norm(x_sBD if self.parallel else h_sBD)
        else:
            h_sBD, n_sBD = self.mlp_norm(a_sBD, x_sBD)
        return self._add(self._feed(n_sBD, where), h_sBD, SITE_HIDDEN_2, where)

    def _feed(self, n_sBD: Tensor, where: Batch) -> Tensor:
        return self.mlp(n_sBD, where) if isinstance(self.mlp, Experts) else self.mlp(n_sBD, where.later)  # an MLP

    def _forward_again(self, x_sBD: Tensor, where: Batch) -> Tensor:
        """The same result, but norms or the feed-forward keep only their inputs for backward."""
        keeping = without_keeping if self.norms_again else lambda make, use: use(make())
        a_sBD = keeping(lambda: self.attention_norm(x_sBD), lambda n_sBD: self.attention(n_sBD, where))
        h_sBD = self._add(a_sBD, x_sBD, SITE_HIDDEN_1, where)
        m_sBD = x_sBD if self.parallel else h_sBD
        if self.mlp_again and self.norms_again:
            y_sBD = recompute(lambda m_sBD: self._feed(self.mlp_norm(m_sBD), where), m_sBD)
        elif self.mlp_again:
            y_sBD = recompute(self._feed, self.mlp_norm(m_sBD), where)
        else:
            y_sBD = without_keeping(lambda: self.mlp_norm(m_sBD), lambda n_sBD: self._feed(n_sBD, where))
        return self._add(y_sBD, h_sBD, SITE_HIDDEN_2, where)

    def _drops(self) -> bool:
        return bool(self.dropout_p and self.training)

    def _add(self, y_sBD: Tensor, x_sBD: Tensor, site: int, where: Batch) -> Tensor:
        if not self._drops():
            return x_sBD + y_sBD
        key = fold(self.seed, where.step, self.layer, site)
        first = where.places_of(self.tp, x_sBD.shape[0])
        return self.dropout(y_sBD, self.dropout_p, key, where.sample_ids_B, first, x_sBD)


class Head(nn.Module):
    """Final norm, then the loss; without labels the logits over this rank's part of the vocabulary.

    `word`: the tied weight, or None. `z_loss`: its coefficient.
    """

    def __init__(self, make: Maker, model: ModelConfig, spec: ParamSpec, word: nn.Parameter | None, z_loss: float):
        super().__init__()
        make = make.of("head")
        self.tp, self.vocab_size, self.z_loss = make.mesh.tp, spec.stored_shape[0], z_loss
        self.norm = Norm(make, "final_norm", model.hidden_size, *norm_of(model))
        self.weight = word if word is not None else make(spec)

    def extra_repr(self) -> str:
        return shapes(self)

    def forward(self, x_sBD: Tensor, batch: Batch) -> Tensor:
        h_sBD = self.norm(x_sBD)
        if batch.labels_SB is None:
            return gather_linear(h_sBD, [self.weight], self.tp)[0]
        args = (batch.labels_SB, batch.mask_SB, self.tp, self.vocab_size)
        return linear_cross_entropy(h_sBD, self.weight, *args, z_loss=self.z_loss, promised=batch.loss_weight)


class Stage(nn.Module):
    """Stage `number` of the model; the first has the embedding, the last the head.

    stages: the layers of each stage. vocab_size: without padding; padded_vocab_size: the rows that the tensors have.
    """

    def __init__(
        self,
        make: Maker,
        model: ModelConfig,
        stages: Sequence[range],
        number: int,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        recompute: Recompute | None = None,
        z_loss: float = 0.0,
    ):
        super().__init__()
        self.recompute = recompute or Recompute()
        self.use: Use = run_unit  # or what gathers a unit's weights for it (optim/param_gather.py)
        self.moved: Callable[..., Use] = lambda use, *_: use  # or what offloads (nn/activation_offload.py)
        mesh = make.mesh
        tied = not model.untie_embeddings_and_output_weights
        sizes, std = (padded_vocab_size, vocab_size, model.hidden_size), model.init_method_std
        word_std = std if model.embedding_init_method_std is None else model.embedding_init_method_std
        word = vocabulary_spec("embedding.word", *sizes, word_std, tied=tied and mesh.pp.size > 1)
        self.embedding = Embedding(make, word, model) if number == 0 else None
        self.blocks = nn.ModuleList(Block(make, model, layer, self.recompute.parts) for layer in stages[number])
        self.head = None
        if number == len(stages) - 1:
            spec = word if tied else vocabulary_spec("head", *sizes, std, tied=False)
            shared = self.embedding.word if tied and self.embedding is not None else None
            self.head = Head(make, model, spec, shared, z_loss)
        self.rope: tuple[Tensor, Tensor] | None = None
        if any(model.rotary) and not make.meta:
            size, by = int(model.head_size * model.rotary_percent), model.rotary_seq_len_interpolation_factor
            waves = model.positions, size, model.rotary_base, rope_scaling(model)
            dtype = torch.float64 if make.dtype == torch.float64 else torch.float32
            self.rope = rope_tables(*waves, interpolation=by, device=mesh.device, dtype=dtype)

    def forward(self, received_sBD: Tensor | None, batch: Batch) -> Tensor:
        """Hidden states x_sBD; on the last stage the summed loss ([2] with a z-loss), or logits without labels."""
        x_sBD = self.hidden(received_sBD, batch)
        return x_sBD if self.head is None else self.use(self.head, x_sBD, batch)

    @property
    def units(self) -> dict[nn.Module, bool]:
        """What is used at once, in order, and whether backward reads its weights: those of the embedding it does not
        need, and the head computes its gradients in forward."""
        ends = [dict.fromkeys([end] if end is not None else [], False) for end in (self.embedding, self.head)]
        return {**ends[0], **dict.fromkeys(self.blocks, True), **ends[1]}

    def hidden(self, received_sBD: Tensor | None, batch: Batch) -> Tensor:
        """x_sBD after the stage's layers, before the head."""
        if self.embedding is not None:
            x_sBD = self.use(self.embedding, batch)
        else:
            assert received_sBD is not None, "only the first stage starts from tokens"
            x_sBD = received_sBD
        where, blocks = self.rotated(batch), list(self.blocks)
        use = self.moved(self.use, len(blocks), [x_sBD, *(where.rope or ())])
        for group, again in self.recompute.groups(len(blocks)):
            runs, again = itertools.count(), again and self.training
            here = replace(where, again=again)

            def run(
                x_sBD: Tensor, blocks: list[nn.Module] = blocks[group], where: Batch = here, runs: Iterator[int] = runs
            ) -> Tensor:
                second = next(runs) > 0  # in backward
                for block in blocks:
                    x_sBD = use(block, x_sBD, where, again=second)
                return x_sBD

            x_sBD = recompute(run, x_sBD) if again else run(x_sBD)
        return x_sBD

    def rotated(self, batch: Batch) -> Batch:
        """The batch with the angles of its positions."""
        if self.rope is None:
            return batch
        own = slice(batch.tokens_SB.shape[0]) if batch.places_S is None else batch.places_S
        chosen = own if batch.positions_SB is None else batch.positions_SB
        return replace(batch, rope=(self.rope[0][chosen], self.rope[1][chosen]))
