"""Megatron-LM's `args` in a checkpoint -> options of the model; tools/megatron_release.py makes them.

Most names are the same; the activation is several flags there. Names and meanings are those of Megatron-LM at d98e8a64.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megalite.config.options import gelu_form
from megalite.config.pattern import write_pattern
from megalite.interop.convert import refuse

# option -> its value in a checkpoint that is older than the flag; ...: it must be there
SAME: Mapping[str, Any] = {
    "num_layers": ...,
    "hidden_size": ...,
    "num_attention_heads": ...,
    "max_position_embeddings": ...,
    "seq_length": ...,
    "ffn_hidden_size": None,
    "kv_channels": None,
    "group_query_attention": False,
    "normalization": "LayerNorm",
    "apply_layernorm_1p": False,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "position_embedding_type": "learned_absolute",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "rotary_scaling_factor": 1.0,
    "yarn_original_max_position_embeddings": None,
    "yarn_beta_fast": None,
    "yarn_beta_slow": None,
    "yarn_correction_range_round_to_int": None,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "untie_embeddings_and_output_weights": False,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "init_method_std": 0.02,
    "embedding_init_method_std": None,
    "qk_layernorm": False,
    "softmax_type": "vanilla",
}
# activations with a flag of their own there; the others are forms of gelu
FLAGGED = ("swiglu", "squared_relu")
# argument -> the values with no effect
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "num_experts": (None, 0),
    "multi_latent_attention": (None, False),
    "mtp_num_layers": (None, 0),
    "apply_residual_connection_post_layernorm": (None, False),
    "quick_geglu": (None, False),
    "glu_linear_offset": (None, 0.0),
    "heterogeneous_layers_config_path": (None,),
    "hybrid_override_pattern": (None,),
}


def read_args(args: Namespace, where: str) -> dict[str, Any]:
    """Option names to values. Raises CheckpointError with all values that megalite does not have."""
    problems: list[str] = []
    options: dict[str, Any] = {}
    for name, default in SAME.items():
        value = getattr(args, name, default)
        if value is ...:
            problems.append(f"{name} is missing")
        elif value is not None:
            options[name] = value
    if options.get("group_query_attention"):
        options["num_query_groups"] = getattr(args, "num_query_groups", None)
    options["norm_epsilon"] = getattr(args, "norm_epsilon", getattr(args, "layernorm_epsilon", 1e-5))
    options["rotary_base"] = float(getattr(args, "rotary_base", 10000.0))
    options["rotary_seq_len_interpolation_factor"] = float(_given(args, "rotary_seq_len_interpolation_factor", 1.0))
    options["activation"] = _activation(args)
    for read in (_read_window, _read_layers_without_rope):
        values, wrong = read(args)
        options |= values
        problems += wrong
    for name, usual in _ONLY.items():
        if getattr(args, name, None) not in usual:
            problems.append(f"{name}={getattr(args, name)!r}")
    refuse(problems, f"{where}: args with values that megalite does not have")
    return options


def _read_window(args: Namespace) -> tuple[dict[str, Any], list[str]]:
    """(options, problems). No layer has a window if the left side is -1 or every bit of the pattern is 0."""
    given, pattern = getattr(args, "window_size", None), getattr(args, "window_attn_skip_freq", None)
    size = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if size in ((None,), (-1, 0), (-1, -1)):
        return {}, []
    if len(size) != 2 or type(size[0]) is not int or size[0] < 1 or size[1] != 0:
        return {}, [f"window_size={given!r}"]
    window: dict[str, Any] = {"window_size": size}
    if pattern is None:
        return window, []
    if type(pattern) is int and pattern > 0:
        return (window | {"window_attn_skip_freq": str(pattern)} if pattern > 1 else {}), []
    bits = _bits(args, pattern)
    if bits is None:
        return {}, [f"window_attn_skip_freq={pattern!r}"]
    if all(bits):
        return window, []
    return (window | {"window_attn_skip_freq": write_pattern(bits)} if any(bits) else {}), []


def _read_layers_without_rope(args: Namespace) -> tuple[dict[str, Any], list[str]]:
    pattern = getattr(args, "no_rope_freq", None)
    if pattern is None or pattern == 0 or (type(pattern) is int and pattern > 0):
        return ({"no_rope_freq": str(pattern)} if pattern else {}), []
    bits = _bits(args, pattern)
    if bits is None:
        return {}, [f"no_rope_freq={pattern!r}"]
    return ({"no_rope_freq": f"[{','.join(str(int(bit)) for bit in bits)}]"} if any(bits) else {}), []


def _bits(args: Namespace, pattern: Any) -> list[bool] | None:
    """A list of 0 and 1, one per layer, as booleans; None for any other pattern."""
    layers = getattr(args, "num_layers", None)
    if not isinstance(pattern, (list, tuple)) or len(pattern) != layers or not set(pattern) <= {0, 1}:
        return None
    return [bool(bit) for bit in pattern]


def _given(args: Namespace, name: str, default: Any) -> Any:
    value = getattr(args, name, None)
    return default if value is None else value


def _activation(args: Namespace) -> str:
    for name in FLAGGED:
        if getattr(args, name, False):
            return name
    flags = {"add_bias_linear": True, "bias_gelu_fusion": True, "openai_gelu": False}
    return gelu_form(**{name: _given(args, name, default) for name, default in flags.items()})
