"""Layers of one part, and Mamba-2 mixers, in config.json of Hugging Face.

Nemotron-H has a kind for each layer in layers_block_type, or a letter in hybrid_override_pattern, as Megatron-LM's
hybrid models. Each mixer and each MLP is a layer there. All layers of Mamba-2 are of one kind.
"""

import math
from collections.abc import Sequence
from typing import Any

from megalite.config.hybrid_pattern import num_pattern_layers, pattern_of_parts
from megalite.config.option_parsers import MAX_LAYERS_IN_PATTERN
from megalite.config.options import ModelConfig
from megalite.interop.huggingface.rotary import FULL_ATTENTION
from megalite.interop.name_mapping import ModelFamily

Json = dict[str, Any]
LINEAR_ATTENTION = "linear_attention"  # a value of layer_types
_PATTERN = "hybrid_override_pattern"  # a letter for each layer; layer_types has the kind of each
# values of layer_types in files of older releases -> those of transformers 5
_OLDER_KINDS = {"mamba": LINEAR_ATTENTION, "attention": FULL_ATTENTION}
_EXPAND = "expand"  # channels of all heads of a Mamba-2 mixer / hidden_size
_TIME_STEP_LIMIT = "time_step_limit"


def read_letters(config: Json, family: ModelFamily, options: Json) -> list[str]:
    """Set the pattern of the layers and their number; return the problem, if any."""
    num_kinds = config.get("num_hidden_layers")
    if num_kinds is not None and (type(num_kinds) is not int or not 0 < num_kinds <= MAX_LAYERS_IN_PATTERN):
        return [f"num_hidden_layers={num_kinds!r} is not a number of layers"]
    if len(family.layer_letters) == 1:
        if num_kinds is None:
            return ["num_hidden_layers is missing"]
        pattern = next(iter(family.layer_letters.values())) * num_kinds
    else:
        pattern, problem = _find_pattern(config, family)
        if problem:
            return [problem]
        if num_kinds not in (None, len(pattern)):
            return [f"num_hidden_layers={num_kinds}, but there are kinds of {len(pattern)} layers"]
        if len(pattern) > MAX_LAYERS_IN_PATTERN:
            return [f"there are kinds of {len(pattern)} layers, which is more than any model has"]
    options["hybrid_layer_pattern"] = pattern
    options["num_layers"] = num_pattern_layers(pattern)
    return []


def _find_pattern(config: Json, family: ModelFamily) -> tuple[str, str]:
    """Return (letters, problem) of the layers, given by their kinds or by their letters. Both must agree."""
    letters = family.layer_letters
    kinds, pattern = config.get("layer_types"), config.get(_PATTERN)
    if pattern is not None and not (isinstance(pattern, str) and pattern and set(pattern) <= set(letters.values())):
        return "", f"{_PATTERN}={_shortened(pattern)} is not a text of {', '.join(letters.values())}"
    if kinds is None:
        key = family.spellings.get("layer_types", "layer_types")
        return pattern or "", "" if pattern else f"{key} is missing, and so is {_PATTERN}"
    known = [_OLDER_KINDS.get(kind, kind) if isinstance(kind, str) else "" for kind in _as_list(kinds)]
    if not known or not all(kind in letters for kind in known):
        return "", f"layer_types={_shortened(kinds)} is not a list of {', '.join(letters)}"
    text = "".join(letters[kind] for kind in known)
    if pattern not in (None, text):
        return "", f"layer_types and {_PATTERN}={_shortened(pattern)} disagree"
    return text, ""


def write_letters(model: ModelConfig, family: ModelFamily) -> Json:
    """Return the keys of the layers. All releases read the pattern, and some of them not the kinds."""
    keys: Json = {"num_hidden_layers": len(model.layer_parts)}
    if len(family.layer_letters) > 1:
        keys[_PATTERN] = pattern_of_parts(model.layer_parts)
    return keys


def parts_without_letter(model: ModelConfig, family: ModelFamily) -> list[str]:
    """Return the mixers and MLPs of `model` that `family` does not have."""
    letters = set(family.layer_letters.values())
    return sorted({part for part in model.layer_parts if pattern_of_parts([part]) not in letters})


def read_mamba2(config: Json, family: ModelFamily, options: Json) -> list[str]:
    """Set what a model without attention needs besides its Mamba-2 mixers; return their problems."""
    problems = []
    heads, head_dim = options["mamba_num_heads"], options["mamba_head_dim"]
    if not family.has_attention:  # no layer has these heads, but the options need some that tp divides
        options |= {"num_attention_heads": heads, "kv_channels": head_dim}
    if _EXPAND in family.optional:
        expand, hidden_size = config.get(_EXPAND, family.optional[_EXPAND]), options["hidden_size"]
        sizes = (expand, hidden_size, heads, head_dim)
        if all(type(size) is int for size in sizes) and expand * hidden_size != heads * head_dim:
            sizes_in_file = f"num_heads={heads} x head_dim={head_dim}"
            problems.append(f"{_EXPAND}={expand} x hidden_size={hidden_size} is not {sizes_in_file}")
        elif type(expand) is not int:
            problems.append(f"{_EXPAND}={expand!r} is not an integer")
    limit = config.get(_TIME_STEP_LIMIT)
    if limit is not None:
        low, high = [_as_number(value) for value in _as_list(limit)] if len(_as_list(limit)) == 2 else (None, None)
        if low is None or high is None or low > 0 or high != math.inf:
            problems.append(f"{_TIME_STEP_LIMIT}={limit!r} is not [0.0, Infinity]: megalite does not limit time steps")
    return problems


def write_mamba2(model: ModelConfig, family: ModelFamily) -> Json:
    """Return the keys of Mamba-2 mixers that are not options."""
    if _EXPAND not in family.optional:
        return {}
    return {_EXPAND: model.mamba_heads * model.mamba_head_dim // model.hidden_size}


def mixer_width_problem(model: ModelConfig, family: ModelFamily) -> str:
    """Return why `family` does not have the width of the mixers of `model`, or ""."""
    if _EXPAND not in family.optional or model.mamba_heads * model.mamba_head_dim % model.hidden_size == 0:
        return ""
    sizes = f"mamba_num_heads={model.mamba_heads} x mamba_head_dim={model.mamba_head_dim}"
    return f"{sizes} is not a multiple of hidden_size={model.hidden_size}, as {family.name} needs"


def _as_number(value: Any) -> float | None:
    """Return a number of a config.json, where transformers 5 writes infinity as a table, or None."""
    if value == {"__float__": "Infinity"}:
        return math.inf
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _as_list(value: Any) -> Sequence[Any]:
    """Return a list as it is, and anything else as an empty one."""
    return value if isinstance(value, list) else []


def _shortened(value: Any) -> str:
    """Return a value for a message, a long one shortened."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
