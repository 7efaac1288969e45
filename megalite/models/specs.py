"""The specs of the parameters of a model or stage, without allocating memory."""

from collections.abc import Sequence

import torch

from megalite.config.options import ModelConfig
from megalite.models.gpt import Stage
from megalite.nn.parameter import ParamFactory, params_with_specs
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import ParamSpec


def model_specs(
    model: ModelConfig, vocab_size: int, *, padded_vocab_size: int | None = None, stages: Sequence[range] | None = None,
    stage_index: int = 0,
) -> dict[str, ParamSpec]:  # fmt: skip
    """Return name -> spec in order of use, for the full model or for stage `stage_index` of `stages`.

    `padded_vocab_size`: rows of embedding and head; default: `vocab_size`. A tied head of a stage without the embedding
    has the embedding's spec.
    """
    make_param = ParamFactory(Mesh.single_process(), torch.float32, seed=0, meta=True)
    rows = padded_vocab_size or vocab_size
    layer_ranges = [range(len(model.layers))] if stages is None else stages
    stage = Stage(make_param, model, layer_ranges, stage_index, vocab_size=vocab_size, padded_vocab_size=rows)
    return {spec.name: spec for spec, _ in params_with_specs(stage)}


def checkpoint_specs(model: ModelConfig, vocab_size: int, padded_vocab_size: int | None = None) -> dict[str, ParamSpec]:
    """Return name -> spec of everything that a checkpoint stores of a model: parameters and router biases."""
    layers = []
    if model.moe_router_enable_expert_bias:
        layers = [number for number, layer in model.numbered_layers if layer.has_experts]
    biases = [ParamSpec(f"layers.{n}.mlp.router.bias", (model.num_experts or 0,), is_parameter=False) for n in layers]
    return {
        **model_specs(model, vocab_size, padded_vocab_size=padded_vocab_size),
        **{spec.name: spec for spec in biases},
    }
