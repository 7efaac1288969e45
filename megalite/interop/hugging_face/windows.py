"""Sliding windows in config.json of Hugging Face <-> options of the model.

    key j is seen by query i   where i - sliding_window < j <= i, itself included: window_size = sliding_window - 1, 0
    "all" (Mistral)            sliding_window, in all layers; null: in none
    "by layer" (Qwen)          sliding_window where use_sliding_window: in the layers from max_window_layers on, or in
                               those that layer_types names sliding_attention

models/families.py has the kind of each family. Defaults are those of the families' classes in transformers 5.
"""

from typing import Any

from megalite.config.options import ModelConfig
from megalite.config.pattern import LONGEST, write_pattern
from megalite.models.family import Family

Json = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"


def read_window(config: Json, family: Family, layers: Any) -> tuple[Json, list[str]]:
    """(options, problems). `layers`: num_hidden_layers, as it is in the file."""
    if type(layers) is not int or not 0 < layers <= LONGEST:
        return {}, []  # config_json.py reports it
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        return {}, [f"layer_types is not a list of {layers} kinds, one for each layer"]
    if odd := {str(kind) for kind in kinds or ()} - ({FULL, SLIDING} if family.windows else {FULL}):
        return {}, [f"layer_types has {', '.join(map(repr, sorted(odd)))}, which {family.name} does not have"]
    by_layer = family.windows == "by layer"
    used = family.windows == "all" or (by_layer and config.get("use_sliding_window", False))
    window = config.get("sliding_window", 4096) if used else None
    if window is not None and (type(window) is not int or window < 2):
        return {}, [f"sliding_window={window!r} is not a number of 2 or more keys"]
    if kinds is not None:
        bits = [kind == SLIDING for kind in kinds]
    else:
        first = config.get("max_window_layers", 28) if by_layer else 0
        if type(first) is not int:
            return {}, [f"max_window_layers={first!r} is not a number of layers"]
        bits = [window is not None and layer >= first for layer in range(layers)]
    if window is None and any(bits):
        return {}, [f"layer_types has {SLIDING!r}, but there is no sliding_window in use"]
    if window is not None and not by_layer and not all(bits):
        kept = f"{family.name} has it in all layers or none"
        return {}, [f"layer_types has {FULL!r} beside sliding_window={window}, but {kept}"]
    if window is None or not any(bits):
        return {}, []
    pattern = {} if all(bits) else {"window_attn_skip_freq": write_pattern(bits)}
    return {"window_size": (window - 1, 0), **pattern}, []


def window_misfits(model: ModelConfig, family: Family) -> list[str]:
    """The reasons why `family` cannot express the windows of `model`."""
    if model.window_size is None:
        return []
    if not family.windows:
        return [f"window_size={model.window_size[0]},0: it has no window"]
    if family.windows == "all" and None in model.windows:
        return [f"window_attn_skip_freq={model.window_attn_skip_freq}: it has a window in all layers or in none"]
    return []


def write_window(model: ModelConfig, family: Family) -> Json:
    """The keys for a `family` that can express the model."""
    if not family.windows:
        return {}
    windows = model.windows
    window = max((window for window in windows if window is not None), default=None)
    if family.windows == "all":
        return {"sliding_window": window}
    keys: Json = {"use_sliding_window": window is not None, "sliding_window": window}
    if window is not None:
        full = windows.index(window)  # layers before the first with a window
        keys["max_window_layers"] = full if None not in windows[full:] else model.num_layers  # the older key
        keys["layer_types"] = [FULL if window is None else SLIDING for window in windows]
    return keys
