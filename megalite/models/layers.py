"""The parts that layers are built from, by the names that LayerSpec has for them.

A part is built by `build(make_param, name, model, layer, spec, recomputed)` and called with (x_sBD, batch). Its output
has the shape of x_sBD and is added to the residual.
"""

from collections.abc import Callable

from torch import nn

from megalite.config.layer_spec import LayerSpec
from megalite.config.options import ModelConfig
from megalite.nn.attention import Attention
from megalite.nn.mlp import MLP
from megalite.nn.moe import MoELayer
from megalite.nn.parameter import ParamFactory

# (parameters, prefix of their names, model, number of the layer, its spec, what backward recomputes) -> the part
BuildPart = Callable[[ParamFactory, str, ModelConfig, int, LayerSpec, tuple[str, ...]], nn.Module]


def build_attention(
    make_param: ParamFactory, name: str, model: ModelConfig, layer: int, spec: LayerSpec, recomputed: tuple[str, ...]
) -> Attention:
    """Return the attention of a layer."""
    return Attention(make_param, name, model, layer, spec, "core_attn" in recomputed)


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


MIXERS: dict[str, BuildPart] = {"attention": build_attention}
MLPS: dict[str, BuildPart] = {"mlp": build_mlp, "moe": build_moe}
