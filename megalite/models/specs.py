"""The specs of all parameters of a model, or of a stage of it, without their memory."""

from collections.abc import Sequence

import torch

from megalite.config.options import ModelConfig
from megalite.models.gpt import Stage
from megalite.nn.parameter import Maker, named_specs
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import ParamSpec


def specs_of(
    model: ModelConfig, vocab_size: int, *, padded: int | None = None, stages: Sequence[range] | None = None,
    number: int = 0,
) -> dict[str, ParamSpec]:  # fmt: skip
    """Name -> spec in order of use, for the whole model or for stage `number` of `stages`. `padded`: rows of embedding
    and head; default: `vocab_size`. A tied head of a stage without the embedding has the embedding's spec."""
    make, rows = Maker(Mesh.alone(), torch.float32, seed=0, meta=True), padded or vocab_size
    cut = [range(model.num_layers)] if stages is None else stages
    stage = Stage(make, model, cut, number, vocab_size=vocab_size, padded_vocab_size=rows)
    return {spec.name: spec for spec, _ in named_specs(stage)}


def stored_specs(model: ModelConfig, vocab_size: int, padded: int | None = None) -> dict[str, ParamSpec]:
    """Name -> spec of all that a checkpoint holds of a model: its parameters, and the biases of its routers."""
    layers = [n for n, some in enumerate(model.experts) if some and model.moe_router_enable_expert_bias]
    biases = [ParamSpec(f"layers.{n}.mlp.router.bias", (model.num_experts or 0,), trained=False) for n in layers]
    return {**specs_of(model, vocab_size, padded=padded), **{spec.name: spec for spec in biases}}
