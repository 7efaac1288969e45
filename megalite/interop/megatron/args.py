"""Megatron-LM's `args` in a checkpoint -> options of the model; tools/foreign_files.py makes them.

Most names are the same; the activation is several flags there. Names and meanings are those of Megatron-LM at d98e8a64.
"""

import contextlib
from argparse import Namespace
from dataclasses import fields
from typing import Any

from megalite.config.options import ModelConfig, gelu_form
from megalite.config.pattern import LONGEST, read_pattern, write_pattern
from megalite.config.tables import table_beside
from megalite.interop.convert import refuse

_TABLE = table_beside(__file__, "names")
SAME = tuple(f.name for f in fields(ModelConfig) if f.name not in _TABLE["otherwise"])
# activations with a flag of their own there; the others are forms of gelu
FLAGGED = ("swiglu", "squared_relu")


def read_args(args: Namespace, where: str) -> dict[str, Any]:
    """Option names to values. Raises CheckpointError with all values that megalite does not have."""
    problems: list[str] = []
    options: dict[str, Any] = {}
    for name in SAME:
        if name.startswith("moe_") and not getattr(args, "num_experts", None):
            continue
        if (value := getattr(args, name, None)) is not None:
            options[name] = value
        elif name in _TABLE["required"] and not hasattr(args, name):
            problems.append(f"{name} is missing")
    if options.get("num_experts"):
        options["moe_layer_freq"] = str(given(args, "moe_layer_freq", 1)).replace(" ", "")
    if options.get("group_query_attention"):
        options["num_query_groups"] = getattr(args, "num_query_groups", None)
    options["norm_epsilon"] = getattr(args, "norm_epsilon", getattr(args, "layernorm_epsilon", 1e-5))
    options["rotary_base"] = float(getattr(args, "rotary_base", 10000.0))
    options["rotary_seq_len_interpolation_factor"] = float(given(args, "rotary_seq_len_interpolation_factor", 1.0))
    options["activation"] = _activation(args)
    try:
        options |= _read_patterns(args, options.get("num_layers"))
    except ValueError as error:
        problems.append(str(error))
    for name, usual in _TABLE["only"].items():
        if (value := given(args, name, usual)) != usual:
            problems.append(f"{name}={value!r}")
    refuse(problems, f"{where}: args with values that megalite does not have")
    return options


def _read_patterns(args: Namespace, layers: Any) -> dict[str, Any]:
    """The options of which layers have a window and rotary positions. No layer has a window if the left side is -1 or
    every bit of the pattern is 0. ValueError: what is wrong."""
    options: dict[str, Any] = {}
    window, skipped, bare = (given(args, n, None) for n in ("window_size", "window_attn_skip_freq", "no_rope_freq"))
    size = tuple(window) if isinstance(window, (list, tuple)) else (window,)
    if size not in ((None,), (-1, 0), (-1, -1)):
        if len(size) != 2 or type(size[0]) is not int or size[0] < 1 or size[1] != 0:
            raise ValueError(f"window_size={window!r}")
        bits = _bits("window_attn_skip_freq", skipped, layers) if skipped is not None else (True,)
        if any(bits):
            options["window_size"] = size
        if any(bits) and not all(bits):
            options["window_attn_skip_freq"] = write_pattern(bits)
    if bare is not None and bare != 0 and (any(_bits("no_rope_freq", bare, layers)) or type(bare) is int):
        options["no_rope_freq"] = str(bare).replace(" ", "")
    return options


def _bits(name: str, pattern: Any, layers: Any) -> tuple[bool, ...]:
    """A bit for each layer."""
    with contextlib.suppress(ValueError):
        if type(layers) is int and layers <= LONGEST:
            return read_pattern(str(pattern), layers)
    raise ValueError(f"{name}={pattern!r}")


def given(args: Namespace, name: str, default: Any) -> Any:
    """An argument, or `default` where it is missing or None."""
    value = getattr(args, name, None)
    return default if value is None else value


def _activation(args: Namespace) -> str:
    for name in FLAGGED:
        if getattr(args, name, False):
            return name
    flags = {"add_bias_linear": True, "bias_gelu_fusion": True, "openai_gelu": False}
    return gelu_form(**{name: given(args, name, default) for name, default in flags.items()})
