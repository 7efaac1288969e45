"""The weights of a model with muP for a format that has no multipliers.

Multipliers of logits, embeddings and attention scores become factors of weights: logits c h W^T of the weights c W, or,
if W is also the word embedding, of those of the final norm; and scores s (q k) of those of queries, or of their norm.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.config.options import ModelConfig
from megalite.models.gpt import Stage
from megalite.nn.attention import Attention
from megalite.nn.latent_attention import LatentAttention
from megalite.nn.norm import Norm, QKNormAllHeads
from megalite.nn.parameter import ParamFactory, spec_of
from megalite.parallel.mesh import Mesh

MUP_OPTIONS = (
    "use_mup",
    "mup_base_hidden_size",
    "mup_embedding_mult",
    "mup_output_mult",
    "mup_base_head_dim",
    "mup_attn_scale_power",
)
REMEDY = "keep megalite's own checkpoint"


@dataclass(frozen=True)
class FoldedModel:
    """A model without muP that computes what a model with muP does.

    Attributes:
        model: its options.
        factors: parameter -> the factor of the weights of the model with muP; those without an entry are the same.
        norms: the parameters of norms.
    """

    model: ModelConfig
    factors: Mapping[str, float] = field(default_factory=dict)
    norms: frozenset[str] = frozenset()

    def check(self, zero_centered_norms: bool, dtype: torch.dtype) -> None:
        """Check that the weights have the factors to the last bit, or with the rounding of fp32 if that is their dtype.

        Args:
            zero_centered_norms: the format stores norm weights as their difference from 1.
            dtype: the dtype of the weights.

        Raises:
            CheckpointError: with the parameter and its factor, if they do not.
        """
        for name, factor in self.factors.items():
            folded = f"use_mup=True: its factor {factor:g} of {name}"
            if zero_centered_norms and name in self.norms:
                raise CheckpointError(f"{folded} is lost in a difference from 1, which this family stores; {REMEDY}")
            if dtype == torch.float16:
                raise CheckpointError(
                    f"{folded} may make weights in float16 too small or too large for it; convert with --dtype float32 "
                    f"or bfloat16, or {REMEDY}"
                )
            if dtype.itemsize < 4 and math.frexp(factor)[0] != 0.5:
                kind = str(dtype).removeprefix("torch.")
                raise CheckpointError(
                    f"{folded} is no power of two, so that weights in {kind} would be rounded again; convert with "
                    f"--dtype float32, or {REMEDY}"
                )


def fold_mup(model: ModelConfig) -> FoldedModel:
    """Return the model without muP, and the factors of its weights.

    Raises CheckpointError if depths of multi-token prediction have a norm of hidden states that need a factor.
    """
    if not model.use_mup:
        return FoldedModel(model)
    defaults = {name: getattr(ModelConfig, name) for name in MUP_OPTIONS}
    make_param = ParamFactory(Mesh.single_process(), torch.float32, seed=0, meta=True)
    stage = Stage(make_param, model, [range(len(model.layers))], 0, vocab_size=1, padded_vocab_size=1)
    factors: dict[str, float] = {}

    def multiply(parameters: Iterable[nn.Parameter], factor: float) -> None:
        factors.update((spec_of(parameter).name, factor) for parameter in parameters if factor != 1)

    assert stage.embedding is not None and stage.final_norm is not None and stage.head is not None
    multiply(stage.embedding.parameters(), model.embedding_sum_multiplier)
    if model.untie_embeddings_and_output_weights:
        multiply(stage.head.parameters(), model.logit_multiplier)
    else:
        factor = model.logit_multiplier / model.embedding_sum_multiplier
        multiply(stage.final_norm.parameters(), factor)
        if model.num_mtp_depths and factor != 1:
            raise CheckpointError(
                f"use_mup=True: its factor {factor:g} of the logits of a tied head is one of the final norm, whose "
                f"output the depths of mtp_num_layers={model.num_mtp_depths} normalize; {REMEDY}"
            )
    for block in stage.all_blocks:
        multiply(_query_parameters(block.mixer), model.mup_attention_factor)
    norms = [module for module in stage.modules() if isinstance(module, Norm | QKNormAllHeads)]
    names = frozenset(spec_of(parameter).name for norm in norms for parameter in norm.parameters())
    return FoldedModel(replace(model, **defaults), factors, names)


def _query_parameters(mixer: nn.Module | None) -> Iterator[nn.Parameter]:
    """Yield the parameters that multiply queries, or are added to them, last."""
    if isinstance(mixer, LatentAttention):
        weight = mixer.q if mixer.q_up is None else mixer.q_up
        assert weight is not None
        yield weight
    elif isinstance(mixer, Attention):
        if mixer.qk_norm is not None:
            yield mixer.qk_norm.q
        elif mixer.q_norm is not None:
            yield from mixer.q_norm.parameters()
        else:
            yield mixer.q
            if mixer.q_bias is not None:
                yield mixer.q_bias
