"""The parts that layers are built from, by the names that LayerSpec has for them.

A part is a module. It is created by (make_param, name, model, layer, spec, recomputed) and called with (x_sBD, batch,
ctx); its output y_sBD is added to the residual:

    make_param  creates its parameters on this rank from ParamSpecs (nn/parameter.py)
    name        the prefix of their names: "layers.3.attention"
    model       the configuration of the model
    layer       the number of the layer
    spec        the layer's LayerSpec
    recomputed  the parts whose activations backward recomputes (models/gpt.py: RecomputeConfig)

Mixers are a registry, which plugins extend; docs/plugins.md has the interface.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from megalite.config.layer_spec import LayerSpec
from megalite.config.options import ConfigError, ModelConfig
from megalite.config.registry import REGISTRIES
from megalite.nn.attention import Attention
from megalite.nn.gated_delta_net import GatedDeltaNet
from megalite.nn.kimi_delta_attention import KimiDeltaAttention
from megalite.nn.latent_attention import LatentAttention
from megalite.nn.mamba2 import Mamba2
from megalite.nn.mlp import MLP
from megalite.nn.moe import MoELayer
from megalite.nn.parameter import ParamFactory, spec_of
from megalite.nn.recurrent_heads import exchanges_heads
from megalite.nn.recurrent_mixer import RecurrentMixer
from megalite.nn.sequence_sharding import SequenceSharding

BuildPart = Callable[[ParamFactory, str, ModelConfig, int, LayerSpec, tuple[str, ...]], nn.Module]


def build_attention(
    make_param: ParamFactory, name: str, model: ModelConfig, layer: int, spec: LayerSpec, recomputed: tuple[str, ...]
) -> Attention:
    """Return the attention of a layer."""
    return Attention(make_param, name, model, layer, spec, "core_attn" in recomputed)


def build_latent_attention(
    make_param: ParamFactory, name: str, model: ModelConfig, layer: int, spec: LayerSpec, recomputed: tuple[str, ...]
) -> LatentAttention:
    """Return the multi-latent attention of a layer."""
    recompute: dict[str, bool] = dict(
        recompute_core="core_attn" in recomputed, recompute_up="mla_up_proj" in recomputed
    )
    return LatentAttention(make_param, name, model, layer, spec, **recompute)


def build_gated_delta_net(
    make_param: ParamFactory, name: str, model: ModelConfig, layer: int, spec: LayerSpec, recomputed: tuple[str, ...]
) -> GatedDeltaNet:
    """Return the gated delta net of a layer."""
    return GatedDeltaNet(make_param, name, model, layer, spec, "gdn" in recomputed)


def build_kimi_delta_attention(
    make_param: ParamFactory, name: str, model: ModelConfig, layer: int, spec: LayerSpec, recomputed: tuple[str, ...]
) -> KimiDeltaAttention:
    """Return the Kimi delta attention of a layer."""
    return KimiDeltaAttention(make_param, name, model, layer, spec, "kda" in recomputed)


def build_mamba2(
    make_param: ParamFactory, name: str, model: ModelConfig, layer: int, spec: LayerSpec, recomputed: tuple[str, ...]
) -> Mamba2:
    """Return the Mamba-2 mixer of a layer."""
    return Mamba2(make_param, name, model, layer, spec, "mamba" in recomputed)


def build_mlp(
    make_param: ParamFactory, name: str, model: ModelConfig, layer: int, spec: LayerSpec, recomputed: tuple[str, ...]
) -> MLP:
    """Return the feed-forward block of a dense layer."""
    return MLP(make_param, name, model, model.ffn_size, bias=model.add_bias_linear)


def build_moe(
    make_param: ParamFactory, name: str, model: ModelConfig, layer: int, spec: LayerSpec, recomputed: tuple[str, ...]
) -> MoELayer:
    """Return the router and experts of a layer."""
    return MoELayer(make_param, name, model, layer, "shared_experts" in recomputed)


RECURRENT_MIXERS: dict[str, type[RecurrentMixer]] = {
    "gated_delta_net": GatedDeltaNet,
    "kda": KimiDeltaAttention,
    "mamba2": Mamba2,
}


def resolve_cp_comm_type(
    model: ModelConfig, spec: LayerSpec, tp_size: int, sharding: SequenceSharding, dtype: torch.dtype
) -> str:
    """Return what the mixer of a layer exchanges over cp: "a2a" (heads) or "allgather" (keys and values, or maps)."""
    if spec.mixer not in RECURRENT_MIXERS:
        return "a2a" if spec.cp_comm_type == "a2a" else "allgather"
    shape = RECURRENT_MIXERS[spec.mixer].shape_of(model, tp_size)
    return "a2a" if exchanges_heads(spec.cp_comm_type, shape, sharding, dtype) else "allgather"


MLPS: dict[str, BuildPart] = {"mlp": build_mlp, "moe": build_moe}


def build_mixer(
    make_param: ParamFactory, name: str, model: ModelConfig, layer: int, spec: LayerSpec, recomputed: tuple[str, ...]
) -> nn.Module:
    """Return the mixer of a layer, built in or of a plugin."""
    assert spec.mixer is not None
    return REGISTRIES["mixer"].get(spec.mixer)(make_param, name, model, layer, spec, recomputed)


def check_mixer(mixer: nn.Module, norms: Iterable[nn.Module], prefix: str, name: str) -> None:
    """Check the parameters of mixer `name`, which a plugin may have brought, and of the norms before and after it.

    Raises:
        ConfigError: unless each has a spec with a name of its own below `prefix`, so that a checkpoint can hold it.
    """
    used_names = {spec_of(parameter).name for norm in norms for parameter in norm.parameters()}
    for attribute, parameter in mixer.named_parameters():
        spec = getattr(parameter, "spec", None)
        if spec is None:
            problem = f"has parameter {attribute}, which make_param did not create; use make_param(ParamSpec(...))"
            raise ConfigError([f"mixer={name!r} {problem}"])
        if spec.name.removeprefix(f"{prefix}.") == spec.name:
            rule = "is not NAME.something, where NAME is the argument `name`"
            raise ConfigError([f"mixer={name!r}: parameter {spec.name!r} {rule}; rename it"])
        if spec.name in used_names:
            rule = "is the name of another one, of the mixer or of a norm of its layer"
            raise ConfigError([f"mixer={name!r}: parameter {spec.name!r} {rule}; rename it"])
        used_names.add(spec.name)
