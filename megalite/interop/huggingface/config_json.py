"""config.json of Hugging Face <-> options of the model. Values that cannot be expressed exactly are refused by name.

models/families.toml has the meaning of each family's keys. This module names no family, and has what tables cannot say:
groups, rotary positions, which layers have experts, and windows, of one of three kinds:

    key j is seen by query i   where i - sliding_window < j <= i, itself included: window_size = sliding_window - 1, 0
    "all" (Mistral)            sliding_window, in all layers; null: in none
    "by layer" (Qwen)          sliding_window where use_sliding_window: in the layers from max_window_layers on, or in
                               those that layer_types names sliding_attention
    "alternate" (GPT-OSS)      sliding_window in the layers that layer_types names, or in layers 0, 2, 4, ...

Defaults are those of the families' classes in transformers 5.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.common.tables import load_table
from megalite.config.option import MODEL, option_spec
from megalite.config.option_parsers import MAX_LAYERS_IN_PATTERN, format_layer_pattern
from megalite.config.options import ModelConfig, build
from megalite.interop.huggingface.rotary import STRETCH, read_rope, write_scaling
from megalite.interop.name_mapping import FAMILIES, ModelFamily
from megalite.interop.tensor_mapping import raise_problems
from megalite.models.gpt import rope_scaling

Json = dict[str, Any]
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
_FACTS = load_table(__file__, "constants")


def read_config(config: Json, seq_length: int | None, where: str) -> tuple[str, Json]:
    """(family, option names to values, vocab_size among them). Raises CheckpointError with all problems. `seq_length`:
    tokens per sequence in training, by default as many as the model has positions."""
    problems: list[str] = []
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = f"is not one of {', '.join(FAMILIES)}; convert a model of one of these"
        raise CheckpointError(f"{where}: model_type={kind!r} {known}")
    family: ModelFamily = FAMILIES.get(kind)
    options: Json = dict(family.fixed_options)

    def get(keys: str) -> Any:
        key = next((key for key in keys.split() if key in config), keys.split()[0])
        value = config.get(key, family.optional.get(key))
        if value is None and key != "n_inner":  # whose null is 4 times the width
            problems.append(f"{key} is missing")
        return value

    options |= {option: get(key) for option, key in {**family.keys, "vocab_size": "vocab_size"}.items()}
    if options["ffn_hidden_size"] is None and isinstance(options["hidden_size"], int):
        options["ffn_hidden_size"] = 4 * options["hidden_size"]
    activation = config.get(family.activation_key, next(iter(family.activations)))
    options["activation"] = family.activations.get(activation if isinstance(activation, str) else "")
    if options["activation"] is None:
        problems.append(f"{family.activation_key}={activation!r} is not {', '.join(family.activations)}")
    options["untie_embeddings_and_output_weights"] = not config.get("tie_word_embeddings", family.tied_by_default)
    for key, allowed in family.supported_values.items():
        if config.get(key, allowed[0]) not in allowed:
            problems.append(f"{key}={config[key]!r} is not {' or '.join(map(repr, allowed))}")
    problems += [f"{key}: {why}" for key, why in _FACTS["absent"].items() if config.get(key) not in (None, {})]
    if family.grouped:
        groups = config.get("num_key_value_heads", family.optional.get("num_key_value_heads") or None)
        if groups is not None and groups != options["num_attention_heads"]:
            options |= {"group_query_attention": True, "num_query_groups": groups}
        options["kv_channels"] = config.get("head_dim", family.optional.get("head_dim") or None)
    elif (size := config.get("head_dim")) is not None:  # not a key of theirs, but rotary positions would use it
        width, heads = options["hidden_size"], options["num_attention_heads"]
        if type(width) is not int or type(heads) is not int or size * heads != width:
            problems.append(f"head_dim={size!r} is not hidden_size / num_attention_heads, which {family.name} uses")
    biases = {key: config.get(key, False) for key, name in family.derived_keys.items() if name == "add_bias_linear"}
    if biases:
        first, *others = biases.values()
        if any(other != first for other in others):
            given = " with ".join(f"{key}={value}" for key, value in biases.items())
            problems.append(f"{given}: there is one option for both")
        options["add_bias_linear"] = first
    if options["position_embedding_type"] == "rope":
        problems += read_rope(config, options, family)
    positions = options["max_position_embeddings"]
    options["seq_length"] = seq_length or positions
    if isinstance(positions, int) and seq_length is not None and seq_length > positions:
        problems.append(f"seq_length={seq_length} is above the model's {positions} positions")
    layers = options["num_layers"]  # if out of range, `model_of` refuses it
    for read in (_read_window, _read_experts) if type(layers) is int and 0 < layers <= MAX_LAYERS_IN_PATTERN else ():
        more, wrong = read(config, family, layers)
        options |= more
        problems += wrong
    raise_problems(problems, f"{where} describes a model that megalite cannot express")
    return family.name, {name: value for name, value in options.items() if value is not None}


def incompatibilities(model: ModelConfig, family: ModelFamily) -> list[str]:
    """The reasons why `family` cannot express `model`: how the model that is read from its config.json differs."""
    written = write_config(model, family.name, 1, "", {})
    if lacking := [option for option, key in family.keys.items() if written[key.split()[0]] is None]:
        return [f"{option}={getattr(model, option)}, but {family.name} has some" for option in lacking]
    again = build(read_config(written, None, family.name)[1]).model
    mine, theirs, lines = _functional_options(model), _functional_options(again), []
    for option in [option for option in mine if mine[option] != theirs.get(option, mine[option])]:
        given, read = getattr(model, option), getattr(again, option)
        if given != read:
            given, read = (mine[option], theirs[option]) if isinstance(mine[option], int) else (given, read)
            lines.append(f"{option}={given} is not {read}")
    if (family.even_heads or not family.grouped) and model.hidden_size % model.num_attention_heads:
        lines.append(f"hidden_size={model.hidden_size} is not a multiple of {model.num_attention_heads} heads")
    return lines


def _functional_options(model: ModelConfig) -> Json:
    """Option -> its effect, of all that a config.json must say, since the model's function depends on them."""
    facts = {f.name: option_spec(f) for f in fields(ModelConfig)}
    effects = {name: getattr(model, f.effective_property or name) for name, f in facts.items() if f.resume == MODEL}
    effects |= {"window_size": model.layer_windows, "add_qkv_bias": model.add_qkv_bias and not model.add_bias_linear}
    rotates = any(model.rope_layers)
    effects |= dict.fromkeys(STRETCH, rope_scaling(model) if rotates else None)
    unused = {name for name in effects if facts[name].acts_through or (name.startswith("rotary_") and not rotates)}
    if all(model.moe_layers):
        unused.add("ffn_hidden_size")
    if not any(model.moe_layers):
        effects |= dict.fromkeys(name for name in effects if name == "num_experts" or name.startswith("moe_"))
    return {name: effect for name, effect in effects.items() if name not in unused | {"apply_layernorm_1p"}}


def choose_family(model: ModelConfig, wanted: str | None, usual: str | None) -> str:
    """`wanted`, or `usual` if it fits, or the first that does. Raises CheckpointError with the reasons."""
    reasons = {name: incompatibilities(model, FAMILIES.get(name)) for name in FAMILIES}
    if wanted is not None:
        raise_problems(reasons[wanted], f"family={wanted} cannot express this model")
    for name in (wanted, usual, *FAMILIES):
        if name in reasons and not reasons[name]:
            return name
    every = [f"{name}: {'; '.join(lines)}" for name, lines in reasons.items()]
    raise CheckpointError("no family of Hugging Face can express this model:\n  " + "\n  ".join(every))


def write_config(model: ModelConfig, name: str, vocab_size: int, dtype: str, tokens: Mapping[str, Any]) -> Json:
    """A config.json for any transformers, as near to the model as the family can; `tokens`: bos_token_id and such."""
    family: ModelFamily = FAMILIES.get(name)
    fitting = [key for key, ours in family.activations.items() if ours == model.activation]
    config: Json = {"architectures": [family.architecture], "model_type": name, "vocab_size": vocab_size}
    values = {**{option: getattr(model, option) for option in family.keys}, "ffn_hidden_size": model.ffn_size}
    values |= {"max_position_embeddings": model.max_positions, "moe_ffn_hidden_size": model.expert_ffn_size}
    values["num_experts"] = model.num_experts or None
    config |= {key.split()[0]: values[option] for option, key in family.keys.items()}
    config |= {key: getattr(model, attribute) for key, attribute in family.derived_keys.items()}
    config |= {key: allowed[0] for key, allowed in family.supported_values.items()}
    config[family.activation_key] = (fitting or list(family.activations))[0]
    config["tie_word_embeddings"] = not model.untie_embeddings_and_output_weights
    if family.scalings:
        config["rope_scaling"] = write_scaling(model, family)
    config |= _write_window(model, family)
    if family.sparse_layers:
        dense = [n for n, has in enumerate(model.moe_layers) if not has]
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
        config["norm_topk_prob"] = not model.moe_router_pre_softmax
    return config | {"bos_token_id": None, "eos_token_id": None} | dict(tokens) | {"torch_dtype": dtype}


def _read_window(config: Json, family: ModelFamily, layers: int) -> tuple[Json, list[str]]:
    """(options, problems)."""
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        return {}, [f"layer_types is not a list of {layers} kinds, one for each layer"]
    if odd := {str(kind) for kind in kinds or ()} - (
        {FULL_ATTENTION, SLIDING_ATTENTION} if family.window_layout else {FULL_ATTENTION}
    ):
        return {}, [f"layer_types has {', '.join(map(repr, sorted(odd)))}, which {family.name} does not have"]
    by_layer = family.window_layout in ("by layer", "alternate")
    used = family.window_layout in ("all", "alternate") or (by_layer and config.get("use_sliding_window", False))
    window = config.get("sliding_window", family.optional.get("sliding_window") or None) if used else None
    if window is not None and (type(window) is not int or window < 2):
        return {}, [f"sliding_window={window!r} is not a number of 2 or more keys"]
    if kinds is not None:
        bits = [kind == SLIDING_ATTENTION for kind in kinds]
    elif family.window_layout == "alternate":
        bits = [window is not None and layer % 2 == 0 for layer in range(layers)]
    else:
        first = config.get("max_window_layers", 28) if by_layer else 0
        if type(first) is not int:
            return {}, [f"max_window_layers={first!r} is not a number of layers"]
        bits = [window is not None and layer >= first for layer in range(layers)]
    if window is None and any(bits):
        return {}, [f"layer_types has {SLIDING_ATTENTION!r}, but there is no sliding_window in use"]
    if window is not None and not by_layer and not all(bits):
        kept = f"{family.name} has it in all layers or none"
        return {}, [f"layer_types has {FULL_ATTENTION!r} beside sliding_window={window}, but {kept}"]
    if window is None or not any(bits):
        return {}, []
    pattern = {} if all(bits) else {"window_attn_skip_freq": format_layer_pattern(bits)}
    return {"window_size": (window - 1, 0), **pattern}, []


def _write_window(model: ModelConfig, family: ModelFamily) -> Json:
    if not family.window_layout:
        return {}
    windows = model.layer_windows
    window = max((window for window in windows if window is not None), default=None)
    if family.window_layout == "all":
        return {"sliding_window": window}
    types = [FULL_ATTENTION if window is None else SLIDING_ATTENTION for window in windows]
    if family.window_layout == "alternate":  # where transformers asks for a number, though layer_types may use none
        return {"sliding_window": family.optional["sliding_window"] if window is None else window, "layer_types": types}
    keys: Json = {"use_sliding_window": window is not None, "sliding_window": window}
    if window is not None:
        full = windows.index(window)  # layers before the first with a window
        keys["max_window_layers"] = full if None not in windows[full:] else model.num_layers  # the older key
        keys["layer_types"] = types
    return keys


def _read_experts(config: Json, family: ModelFamily, layers: int) -> tuple[Json, list[str]]:
    """(options, problems)."""
    if not family.sparse_layers:
        return {}, []
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if type(step) is not int or step < 1 or not isinstance(dense, list) or any(type(n) is not int for n in dense):
        return {}, [f"decoder_sparse_step={step!r}, mlp_only_layers={dense!r} are not a step and a list of layers"]
    bits = [(n + 1) % step == 0 and n not in dense for n in range(layers)]
    freq = "1" if all(bits) else format_layer_pattern(bits, periods=False)
    return {"moe_layer_freq": freq, "moe_router_pre_softmax": not config.get("norm_topk_prob", False)}, []
