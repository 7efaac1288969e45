"""Conversion between config.json of Hugging Face and the options of a model.

Values that cannot be expressed exactly are refused by name. models/families.toml has the meaning of each family's keys.
This module names no family, and has what tables cannot express: groups, rotary positions, which layers have experts,
how these are chosen, and windows, in one of four layouts:

    key j is seen by query i   where i - sliding_window < j <= i, itself included: window_size = sliding_window - 1, 0
    "all" (Mistral)            sliding_window, in all layers; null: in none
    "by layer" (Qwen)          sliding_window where use_sliding_window: in the layers from max_window_layers on, or in
                               those that layer_types names sliding_attention
    "alternate" (GPT-OSS)      sliding_window in the layers that layer_types names, or in layers 0, 2, 4, ...
    "period" (Gemma 3)         sliding_window in the layers that layer_types names, or in all but every
                               sliding_window_pattern-th

The defaults are those of the families' classes in transformers 5.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.common.tables import load_table
from megalite.config.hybrid_pattern import shown_pattern
from megalite.config.option import MODEL, option_spec
from megalite.config.option_parsers import MAX_LAYERS_IN_PATTERN, format_layer_pattern
from megalite.config.options import ModelConfig, build
from megalite.interop.huggingface.hybrid import (
    LINEAR_ATTENTION,
    mixer_width_problem,
    parts_without_letter,
    read_letters,
    read_mamba2,
    write_letters,
    write_mamba2,
)
from megalite.interop.huggingface.quantization import quantization_problems
from megalite.interop.huggingface.rotary import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    STRETCH,
    read_rope,
    unscaled_query_problem,
    write_rope,
)
from megalite.interop.name_mapping import FAMILIES, ModelFamily
from megalite.interop.tensor_mapping import raise_problems

Json = dict[str, Any]
_SCORE_DIVISOR = "query_pre_attn_scalar"
_NUM_SHARED = "n_shared_experts"
_NUM_DENSE = "first_k_dense_replace"
_GROUP_KEYS = ("n_group", "topk_group")
_GROUP_METHOD = "topk_method"
_GROUP_METHODS = {False: "greedy", True: "group_limited_greedy"}  # are there groups -> value of the key
_INTERVAL = "full_attention_interval"
_LINEAR_ATTN, _RECURRENT, _ATTENDING = "linear_attn_config", "kda_layers", "full_attn_layers"
DENSE, SPARSE = "dense", "sparse"  # values of mlp_layer_types
# the options that only layers with attention read, besides those of rotary positions and of latent attention
_ATTENTION_OPTIONS = {
    "num_attention_heads",
    "kv_channels",
    "num_query_groups",
    "softmax_scale",
    "softmax_type",
    "add_qkv_bias",
    "qk_layernorm",
    "qk_layernorm_over_heads",
    "qk_norm_epsilon",
    "window_size",
    "window_attn_skip_freq",
    "no_rope_freq",
    "attn_logit_softcapping",
    "attention_output_gate",
    "multi_latent_attention",
}
_CONSTANTS = load_table(__file__, "constants")
ALIASES: Mapping[str, str] = _CONSTANTS["aliases"]  # model_type -> the family with the same model


def read_config(config: Json, seq_length: int | None, source: str) -> tuple[str, Json]:
    """Return (family, {option: value}) of a config.json. The options include vocab_size.

    Args:
        config: The contents of config.json.
        seq_length: Tokens per sequence in training; by default, as many as the model has positions.
        source: The path of the file, for messages.

    Raises:
        CheckpointError: With all problems.
    """
    model_type = config.get("model_type")
    if isinstance(model_type, str):
        model_type = ALIASES.get(model_type, model_type)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        reason = _CONSTANTS["other_models"].get(model_type) if isinstance(model_type, str) else None
        reason = reason or f"is not one of {', '.join(FAMILIES)}; convert a model of one of these"
        raise CheckpointError(f"{source}: model_type={model_type!r} {reason}")
    family: ModelFamily = FAMILIES.get(model_type)
    config, names, problems = _with_common_keys(config, family)
    options: Json = dict(family.fixed_options)
    problems += _read_sizes(config, family, options)
    problems += _read_activation(config, family, options)
    if family.layer_letters:
        problems += read_letters(config, family, options)
    if family.has_mamba2:
        problems += read_mamba2(config, family, options)
    for option, key in family.nullable_keys.items():
        options[option] = config.get(key, family.optional.get(key) or None)
    options["untie_embeddings_and_output_weights"] = not config.get("tie_word_embeddings", family.tied_by_default)
    problems += _unsupported_values(config, family)
    problems += _read_heads(config, family, options)
    problems += _read_linear_biases(config, family, options)
    problems += _read_scales(config, family, options)
    problems += _read_shared_expert(config, family, options)
    problems += _read_expert_groups(config, family, options)
    if family.depth_prefix and (num_depths := options["mtp_num_layers"]) not in (0, 1):
        problems.append(f"{family.keys['mtp_num_layers'].split()[0]}={num_depths!r} is not 0 or 1")
    pattern = options.get("hybrid_layer_pattern")
    if pattern is not None and "E" not in pattern:
        options = {name: value for name, value in options.items() if not _is_of_experts(name)}
    problems += _single_expert_problems("num_experts_per_tok", options.get("moe_router_topk"), family)
    if options["position_embedding_type"] == "rope":
        problems += read_rope(config, options, family)
    positions = options["max_position_embeddings"]
    options["seq_length"] = seq_length or positions
    if not family.has_attention:  # nothing depends on the number of positions
        options["max_position_embeddings"] = options["seq_length"]
    elif isinstance(positions, int) and seq_length is not None and seq_length > positions:
        problems.append(f"seq_length={seq_length} is above the model's {positions} positions")
    num_layers = options.get("num_layers")  # if it is out of range, `build_model_config` refuses it
    if not family.layer_letters and type(num_layers) is int and 0 < num_layers <= MAX_LAYERS_IN_PATTERN:
        for read in (_read_recurrent_layers, _read_window, _read_experts):
            layer_options, layer_problems = read(config, family, num_layers)
            options |= layer_options
            problems += layer_problems
    raise_problems(_as_in_file(problems, names), f"{source} describes a model that megalite cannot express")
    return family.name, {name: value for name, value in options.items() if value is not None}


def _with_common_keys(config: Json, family: ModelFamily) -> tuple[Json, dict[str, str], list[str]]:
    """Return a config.json with the keys that families share in place of those of `family` alone.

    Also returned are {key: its name in the file} of the replaced keys, and the problems of linear_attn_config.
    """
    config = dict(config)
    names = {key: spelling for key, spelling in family.spellings.items() if spelling in config}
    for key, spelling in names.items():
        config[key] = config.pop(spelling)
    if not family.linear_attn_keys or _LINEAR_ATTN not in config:
        return config, names, []
    linear_attn = config.pop(_LINEAR_ATTN)
    if not isinstance(linear_attn, dict):
        return config, names, [f"{_LINEAR_ATTN}={linear_attn!r} is not a table"]
    for key, name in family.linear_attn_keys.items():
        if name in linear_attn:
            config[key] = linear_attn[name]
            names[key] = f"{_LINEAR_ATTN}.{name}"
    num_layers = config.get("num_hidden_layers")
    if config.get("layer_types") is not None or not linear_attn.keys() & {_RECURRENT, _ATTENDING}:
        return config, names, []
    if type(num_layers) is not int or not 0 < num_layers <= MAX_LAYERS_IN_PATTERN:
        return config, names, []  # refused elsewhere
    recurrent, attending = linear_attn.get(_RECURRENT), linear_attn.get(_ATTENDING)
    kinds = {LINEAR_ATTENTION: recurrent, FULL_ATTENTION: attending}
    numbered = [(n, kind) for kind, numbers in kinds.items() if isinstance(numbers, list) for n in numbers]
    all_numbers = [n for n, _ in numbered]
    if any(type(n) is not int for n in all_numbers) or sorted(all_numbers) != list(range(1, num_layers + 1)):
        rule = f"do not have each layer from 1 to {num_layers} once"
        return config, names, [f"{_RECURRENT} and {_ATTENDING} of {_LINEAR_ATTN} {rule}"]
    config["layer_types"] = [kind for _, kind in sorted(numbered)]
    return config, names, []


def _as_in_file(problems: list[str], names: Mapping[str, str]) -> list[str]:
    """Return the different problems, with keys by their names in the file."""
    for key, name in names.items():
        problems = [re.sub(rf"\b{key}\b", name, problem) for problem in problems]
    return list(dict.fromkeys(problems))


def _with_own_keys(config: Json, family: ModelFamily) -> Json:
    """Return a config.json with the keys of `family` in place of those that families share."""
    for key, spelling in family.spellings.items():
        if key in config:
            config[spelling] = config.pop(key)
    if family.linear_attn_keys:
        numbered = list(enumerate(config["layer_types"], 1))
        config[_LINEAR_ATTN] = {name: config.pop(key) for key, name in family.linear_attn_keys.items()} | {
            _RECURRENT: [number for number, kind in numbered if kind == LINEAR_ATTENTION],
            _ATTENDING: [number for number, kind in numbered if kind == FULL_ATTENTION],
        }
    return config


def _read_sizes(config: Json, family: ModelFamily, options: Json) -> list[str]:
    """Set the options that have a key of their own; return a problem for each key that is missing."""
    problems: list[str] = []
    for option, keys in {**family.keys, "vocab_size": "vocab_size"}.items():
        spellings = keys.split()
        key = next((key for key in spellings if key in config), spellings[0])
        options[option] = config.get(key, family.optional.get(key))
        if option == "mtp_num_layers" and options[option] is None:
            options[option] = 0  # null means none, as in transformers
        if options[option] is None and key != "n_inner":  # null means 4 * hidden_size
            problems.append(f"{key} is missing")
    if options.get("ffn_hidden_size", 0) is None and isinstance(options["hidden_size"], int):
        options["ffn_hidden_size"] = 4 * options["hidden_size"]
    return problems


def _is_of_experts(option: str) -> bool:
    return option == "num_experts" or option.startswith("moe_")


def _read_activation(config: Json, family: ModelFamily, options: Json) -> list[str]:
    """Set `activation` if the family has an MLP; return a problem if the family has no such activation."""
    if not family.activations:
        return []
    activation = config.get(family.activation_key, next(iter(family.activations)))
    options["activation"] = family.activations.get(activation if isinstance(activation, str) else "")
    if options["activation"] is not None:
        return []
    return [f"{family.activation_key}={activation!r} is not {', '.join(family.activations)}"]


def _unsupported_values(config: Json, family: ModelFamily) -> list[str]:
    """Return a problem for each key whose value megalite does not support."""
    problems = [
        f"{key}={config[key]!r} is not {' or '.join(map(repr, allowed))}"
        for key, allowed in family.supported_values.items()
        if config.get(key, allowed[0]) not in allowed and not (allowed[0] in (False, 0) and config[key] is None)
    ]
    problems += [
        f"{key}={config[key]!r} is not null, as {family.name} needs"
        for key in family.null_keys
        if config.get(key) is not None
    ]
    problems += quantization_problems(config)
    own_keys = family.nullable_keys.values()
    return problems + [
        f"{key}: {reason}"
        for key, reason in _CONSTANTS["absent"].items()
        if key not in own_keys and config.get(key) not in (None, {})
    ]


def _read_heads(config: Json, family: ModelFamily, options: Json) -> list[str]:
    """Set the options of query groups and head size; return a problem if the family cannot have this head size."""
    if family.has_latent_attention:
        return _latent_head_problems(config, family, options)
    if family.supports_gqa:
        groups = config.get("num_key_value_heads", family.optional.get("num_key_value_heads") or None)
        if groups is not None and groups != options["num_attention_heads"]:
            options |= {"group_query_attention": True, "num_query_groups": groups}
        options["kv_channels"] = config.get("head_dim", family.optional.get("head_dim") or None)
        return []
    if not family.has_attention:
        return []
    head_dim = config.get("head_dim")
    if head_dim is None:
        return []
    # not a key of this family, but rotary positions would use it
    hidden_size, heads = options["hidden_size"], options["num_attention_heads"]
    if type(hidden_size) is int and type(heads) is int and head_dim * heads == hidden_size:
        return []
    return [f"head_dim={head_dim!r} is not hidden_size / num_attention_heads, which {family.name} uses"]


def _latent_head_problems(config: Json, family: ModelFamily, options: Json) -> list[str]:
    """Return a problem for each key of heads that contradicts those of latent attention."""
    problems = []
    groups, heads = config.get("num_key_value_heads"), options["num_attention_heads"]
    if groups not in (None, heads):
        problems.append(f"num_key_value_heads={groups!r} is not num_attention_heads={heads!r}, as {family.name} needs")
    head_dim, rotated, content = config.get("head_dim"), options["qk_pos_emb_head_dim"], options["qk_head_dim"]
    if family.query_scale_beta and type(rotated) is int and type(content) is int:
        if head_dim not in (None, rotated + content):
            rule = f"qk_nope_head_dim + qk_rope_head_dim = {rotated + content}"
            problems.append(f"head_dim={head_dim!r} is not {rule}, which {family.name} uses")
    elif head_dim not in (None, rotated) and options["position_embedding_type"] != "none":
        problems.append(f"head_dim={head_dim!r} is not qk_rope_head_dim={rotated!r}, which {family.name} uses")
    return problems


def _read_linear_biases(config: Json, family: ModelFamily, options: Json) -> list[str]:
    """Set `add_bias_linear` if keys of the family decide it; return a problem if they differ."""
    biases = {key: config.get(key, False) for key, name in family.derived_keys.items() if name == "add_bias_linear"}
    if not biases:
        return []
    first, *others = biases.values()
    options["add_bias_linear"] = first
    if all(other == first for other in others):
        return []
    values = " with ".join(f"{key}={value}" for key, value in biases.items())
    return [f"{values}: there is one option for both"]


def _read_scales(config: Json, family: ModelFamily, options: Json) -> list[str]:
    """Set the factors of the embedding and of attention scores if the family has them; return the problem, if any."""
    hidden_size = options["hidden_size"]
    if family.scaled_embedding and type(hidden_size) is int and hidden_size > 0:
        options["embedding_multiplier"] = hidden_size**0.5
    default = family.optional.get(_SCORE_DIVISOR)
    if default is None:
        return []
    divisor = config.get(_SCORE_DIVISOR, default)
    if type(divisor) is not int or not 0 < divisor < 1 << 31:
        return [f"{_SCORE_DIVISOR}={divisor!r} is not an integer above 0"]
    if divisor != options["kv_channels"]:
        options["softmax_scale"] = divisor**-0.5
    return []


def _read_shared_expert(config: Json, family: ModelFamily, options: Json) -> list[str]:
    """Set the width of the shared expert if the family counts it in experts; return the problem, if any."""
    default = family.optional.get(_NUM_SHARED)
    if default is None:
        return []
    number, width = config.get(_NUM_SHARED, default), options["moe_ffn_hidden_size"]
    if type(number) is not int or not 0 < number < 1 << 31:
        return [f"{_NUM_SHARED}={number!r} is not an integer above 0"]
    if type(width) is int:
        options["moe_shared_expert_intermediate_size"] = number * width
    return []


def _read_expert_groups(config: Json, family: ModelFamily, options: Json) -> list[str]:
    """Set the options of groups of experts; return the problem if the family chooses experts in another way."""
    if not family.group_score_topk:
        return []
    groups, group_topk = (config.get(key, family.optional.get(key)) for key in _GROUP_KEYS)
    if _GROUP_METHOD in family.optional:
        method = config.get(_GROUP_METHOD, family.optional[_GROUP_METHOD])
        if method not in _GROUP_METHODS.values():
            return [f"{_GROUP_METHOD}={method!r} is not {' or '.join(_GROUP_METHODS.values())}"]
        if method == _GROUP_METHODS[False]:
            groups = None
    if groups in (None, 1):
        return []
    options |= {"moe_router_num_groups": groups, "moe_router_group_topk": group_topk}
    options["moe_router_group_score_topk"] = family.group_score_topk
    return []


def _single_expert_problems(name: str, topk: Any, family: ModelFamily) -> list[str]:
    """Return the problem of a single expert per token in a family with sigmoid routers.

    These divide the scores of the chosen experts by their sum, which makes a single one 1. megalite keeps a single
    score, as Megatron-LM does.
    """
    if topk != 1 or family.fixed_options.get("moe_router_score_function") != "sigmoid":
        return []
    return [f"{name}=1: {family.name} gives a single expert the probability 1, and megalite gives it its score"]


def incompatibilities(model: ModelConfig, family: ModelFamily) -> list[str]:
    """Return the reasons why `family` cannot express `model`.

    The model is written as a config.json and read back, and the differences are the reasons.
    """
    if problem := unwritable_layers(model, family) or _unwritable_depths(model, family):
        return [problem]
    problems = _unwritable_experts(model, family)
    if problems:
        return problems
    if family.query_scale_beta and (problem := unscaled_query_problem(model, family)):
        return [problem]
    if family.has_latent_attention and model.multi_latent_attention and not model.qk_pos_emb_head_dim:
        return [f"qk_pos_emb_head_dim=0, but {family.name} fails in transformers without rotated channels"]
    written = write_config(model, family.name, 1, "", {})
    by_common_key, _, _ = _with_common_keys(written, family)
    written_keys = _keys_of_model(model, family)
    if missing := [option for option, key in written_keys.items() if by_common_key[key.split()[0]] is None]:
        return [f"{option}={getattr(model, option)}, but {family.name} always has this option" for option in missing]
    reread = build(read_config(written, None, family.name)[1]).model
    local, external = _functional_options(model), _functional_options(reread)
    lines, derived_lines = [], []
    for option, effect in local.items():
        if effect == external.get(option, effect):
            continue
        value, reread_value = getattr(model, option), getattr(reread, option)
        if option == "hybrid_layer_pattern" and value is not None:
            lines.append(f"{shown_pattern(value)} is not attention and MLP in turn")
            continue
        if value != reread_value:
            if isinstance(effect, int):
                value, reread_value = effect, external[option]
            lines.append(f"{option}={value} is not {reread_value}")
        else:
            derived_lines.append(f"{option} is {effect}, not {external[option]}")
    needs_even_heads = family.even_heads or not (
        family.supports_gqa or family.has_latent_attention or not family.has_attention
    )
    if needs_even_heads and model.hidden_size % model.num_attention_heads:
        lines.append(f"hidden_size={model.hidden_size} is not a multiple of {model.num_attention_heads} heads")
    return lines or derived_lines  # options that follow from others differ if these do


def unwritable_layers(model: ModelConfig, family: ModelFamily) -> str:
    """Return why `family` does not have the kinds of layers of `model`, or ""."""
    if family.layer_letters:
        if others := parts_without_letter(model, family):
            return f"{family.name} has no layer of {' or '.join(others)}"
    elif any(
        layer.mlp is None or not (layer.has_attention or layer.mixer == family.recurrent_mixer)
        for layer in model.layers
    ):
        mixers = {layer.mixer for layer in model.layers if layer.is_recurrent} - {family.recurrent_mixer}
        if mixers and all(layer.mixer and layer.mlp for layer in model.layers):
            return f"{family.name} has no layer of {' or '.join(sorted(map(str, mixers)))}"
        return f"{shown_pattern(model.with_pattern().hybrid_layer_pattern or '')} is not attention and MLP in turn"
    if family.has_attention and not any(layer.has_attention for layer in model.layers):
        return "no layer has attention, without which transformers fails"
    if family.mixes_layers and not any(layer.is_recurrent for layer in model.layers):
        return f"no layer has {family.recurrent_mixer}, without which transformers fails"
    return mixer_width_problem(model, family)


def _unwritable_depths(model: ModelConfig, family: ModelFamily) -> str:
    """Return why `family` does not have the depths of multi-token prediction of `model`, or ""."""
    if not model.num_mtp_depths:
        return ""
    if not family.has_depths:
        return f"{family.name} has no depths of multi-token prediction, the model has {model.num_mtp_depths}"
    if model.mtp_layers != model.layers[-1:]:
        return f"{shown_pattern(model.hybrid_layer_pattern or '')} has depths unlike the last layer"
    if family.depth_prefix and model.num_mtp_depths > 1:
        return f"mtp_num_layers={model.num_mtp_depths} is not 0 or 1"
    if family.depth_prefix and not model.layers[-1].has_attention:
        return "the depth of multi-token prediction has no attention, because the last layer has none"
    return ""


def _keys_of_model(model: ModelConfig, family: ModelFamily) -> dict[str, str]:
    """Return {option: keys} of a config.json of `model`, in which a pattern without experts has no keys of experts."""
    if not family.layer_letters or model.has_experts:
        return dict(family.keys)
    return {option: key for option, key in family.keys.items() if not _is_of_experts(option)}


def _unwritable_experts(model: ModelConfig, family: ModelFamily) -> list[str]:
    """Return why a config.json of `family` cannot have the experts of `model`."""
    if not model.has_experts:
        return []
    problems = _single_expert_problems("moe_router_topk", model.moe_router_topk, family)
    shared, width = model.moe_shared_expert_intermediate_size, model.expert_ffn_size
    if _NUM_SHARED in family.optional and (shared is None or shared % width):
        problems.append(
            f"moe_shared_expert_intermediate_size={shared} is not a multiple of moe_ffn_hidden_size={width}"
        )
    if family.sparse_layers == "after the first" and list(model.moe_layers) != sorted(model.moe_layers):
        problems.append(f"moe_layer_freq={model.moe_layer_freq} has a layer without experts after one with experts")
    return problems


def _functional_options(model: ModelConfig) -> Json:
    """Return {option: effect} of the options that determine the model's function.

    A config.json must express all of them.
    """
    option_specs = {spec.name: option_spec(spec) for spec in fields(ModelConfig)}
    effects = {
        name: getattr(model, spec.effective_property or name)
        for name, spec in option_specs.items()
        if spec.resume == MODEL
    }
    effects |= {
        "softmax_scale": float(f"{model.attention_scale:.12g}"),  # of an inverse square root, with its rounding
        "window_size": model.attention_windows,
        "add_qkv_bias": model.add_qkv_bias and not model.add_bias_linear,
    }
    effects["rotary_local_base"] = {layer.rope for layer in model.layers if layer.window is not None}
    effects |= dict.fromkeys(STRETCH, model.rope_scaling if model.uses_rope else None)
    irrelevant = {
        name
        for name in effects
        if option_specs[name].acts_through or (name.startswith("rotary_") and not model.uses_rope)
    }
    if not model.has_dense_ffn:
        irrelevant.add("ffn_hidden_size")
    layers = [layer for _, layer in model.numbered_layers]
    if all(layer.mlp is None for layer in layers):
        irrelevant.add("activation")
    if all(layer.mixer is None or layer.is_recurrent for layer in layers):
        irrelevant |= _ATTENTION_OPTIONS & effects.keys()
        if model.position_embedding_type != "learned_absolute":
            effects["position_embedding_type"] = "none"
        if all(layer.mlp is None for layer in layers) and model.normalization == "RMSNorm":
            irrelevant.add("add_bias_linear")  # recurrent layers have no biases
    if model.multi_latent_attention:
        irrelevant.add("kv_channels")
    else:
        irrelevant |= {"q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"}
        irrelevant.add("mla_rotary_interleaved")
    if not model.uses_rope:
        irrelevant.add("mla_rotary_interleaved")
    if not model.num_mtp_depths:
        irrelevant.add("mtp_use_repeated_layer")
    if not model.uses_delta_rule:
        irrelevant |= {name for name in effects if name.startswith("linear_")}
    if not model.uses_mamba2:
        irrelevant |= {name for name in effects if name.startswith("mamba_")}
    if not model.has_experts:
        effects |= dict.fromkeys(name for name in effects if name == "num_experts" or name.startswith("moe_"))
    return {name: effect for name, effect in effects.items() if name not in irrelevant | {"apply_layernorm_1p"}}


def choose_family(model: ModelConfig, requested: str | None, default: str | None) -> str:
    """Return the requested family, or else the default family if it fits, or else the first that fits.

    Raises CheckpointError with the reasons if none fits.
    """
    reasons = {name: incompatibilities(model, FAMILIES.get(name)) for name in FAMILIES}
    if requested is not None:
        raise_problems(reasons[requested], f"family={requested} cannot express this model")
    for name in (requested, default, *FAMILIES):
        if name in reasons and not reasons[name]:
            return name
    rejected = [f"{name}: {'; '.join(lines)}" for name, lines in reasons.items()]
    raise CheckpointError("no family of Hugging Face can express this model:\n  " + "\n  ".join(rejected))


def write_config(model: ModelConfig, name: str, vocab_size: int, dtype: str, tokens: Mapping[str, Any]) -> Json:
    """Return a config.json for all versions of transformers, as close to the model as the family allows.

    `tokens` has bos_token_id and other special tokens.
    """
    family: ModelFamily = FAMILIES.get(name)
    matching_activations = [key for key, local_name in family.activations.items() if local_name == model.activation]
    config: Json = {"architectures": [family.architecture], "model_type": name, "vocab_size": vocab_size}
    keys = _keys_of_model(model, family)
    values = {**{option: getattr(model, option) for option in keys}, "ffn_hidden_size": model.ffn_size}
    values |= {"max_position_embeddings": model.max_positions, "moe_ffn_hidden_size": model.expert_ffn_size}
    values |= {"num_experts": model.num_experts or None, "mtp_num_layers": model.num_mtp_depths}
    values["mamba_num_heads"] = model.mamba_heads
    config |= {key.split()[0]: values[option] for option, key in keys.items()}
    config |= {key: getattr(model, attribute) for key, attribute in family.derived_keys.items()}
    config |= {key: allowed[0] for key, allowed in family.supported_values.items()}
    config |= family.written_keys
    config |= {key: getattr(model, option) for option, key in family.nullable_keys.items()}
    if _SCORE_DIVISOR in family.optional:
        config[_SCORE_DIVISOR] = max(1, round(model.attention_scale**-2))
    if family.activations:
        config[family.activation_key] = (matching_activations or list(family.activations))[0]
    if "tie_word_embeddings" not in family.supported_values:
        config["tie_word_embeddings"] = not model.untie_embeddings_and_output_weights
    if family.layer_letters:
        config |= write_letters(model, family)
    if family.has_mamba2:
        config |= write_mamba2(model, family)
    config |= write_rope(model, family)
    config |= _write_window(model, family)
    if family.recurrent_mixer:
        config["layer_types"] = [LINEAR_ATTENTION if layer.is_recurrent else FULL_ATTENTION for layer in model.layers]
    config |= _write_experts(model, family)
    config = _with_own_keys(config, family)
    # without a number for padding, transformers may take one beyond the vocabulary
    special_tokens: Json = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return config | special_tokens | dict(tokens) | {"torch_dtype": dtype}


def _read_recurrent_layers(config: Json, family: ModelFamily, num_layers: int) -> tuple[Json, list[str]]:
    """Return (options, problems) of the layers with a recurrence in place of attention."""
    if not family.recurrent_mixer:
        return {}, []
    kinds = config.get("layer_types")
    interval = config.get(_INTERVAL, family.optional.get(_INTERVAL))
    if isinstance(kinds, list):  # _read_window reports an invalid one
        is_recurrent = [kind == LINEAR_ATTENTION for kind in kinds]
    elif _INTERVAL not in family.optional:
        is_recurrent = [layer % 4 != 0 or layer == 0 for layer in range(num_layers)]
    elif type(interval) is not int or interval < 1:
        return {}, [f"{_INTERVAL}={interval!r} is not a number of 1 or more layers"]
    else:
        is_recurrent = [(layer + 1) % interval != 0 for layer in range(num_layers)]
        if family.mixes_layers and all(is_recurrent):
            is_recurrent[-1] = False
    if family.mixes_layers and len(set(is_recurrent)) == 1:
        kind = LINEAR_ATTENTION if is_recurrent[0] else FULL_ATTENTION
        return {}, [f"layer_types has only {kind!r}, but {family.name} has layers of both kinds"]
    if not any(is_recurrent):
        return {}, []
    pattern = format_layer_pattern(is_recurrent)
    return {"experimental_attention_variant": family.recurrent_mixer, "linear_attention_freq": pattern}, []


def _read_window(config: Json, family: ModelFamily, num_layers: int) -> tuple[Json, list[str]]:
    """Return (options, problems) of the sliding windows."""
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != num_layers):
        return {}, [f"layer_types is not a list of {num_layers} kinds, one for each layer"]
    if unknown_kinds := {str(kind) for kind in kinds or ()} - (
        {
            FULL_ATTENTION,
            *([SLIDING_ATTENTION] if family.window_layout else []),
            *([LINEAR_ATTENTION] if family.recurrent_mixer else []),
        }
    ):
        return {}, [f"layer_types has {', '.join(map(repr, sorted(unknown_kinds)))}, which {family.name} does not have"]
    by_layer = family.window_layout in ("by layer", "alternate", "period")
    is_used = family.window_layout in ("all", "alternate", "period") or (
        by_layer and config.get("use_sliding_window", False)
    )
    window = config.get("sliding_window", family.optional.get("sliding_window") or None) if is_used else None
    if window is not None and (type(window) is not int or window < 2):
        return {}, [f"sliding_window={window!r} is not a number of 2 or more keys"]
    if kinds is not None:
        has_window = [kind == SLIDING_ATTENTION for kind in kinds]
    elif family.window_layout == "alternate":
        has_window = [window is not None and layer % 2 == 0 for layer in range(num_layers)]
    elif family.window_layout == "period":
        period = config.get("sliding_window_pattern", family.optional["sliding_window_pattern"])
        if type(period) is not int or period < 1:
            return {}, [f"sliding_window_pattern={period!r} is not a number of 1 or more layers"]
        has_window = [window is not None and (layer + 1) % period != 0 for layer in range(num_layers)]
    else:
        first = config.get("max_window_layers", 28) if by_layer else 0
        if type(first) is not int:
            return {}, [f"max_window_layers={first!r} is not a number of layers"]
        has_window = [window is not None and layer >= first for layer in range(num_layers)]
    if window is None and any(has_window):
        return {}, [f"layer_types has {SLIDING_ATTENTION!r}, but there is no sliding_window in use"]
    if window is not None and not by_layer and not all(has_window):
        rule = f"{family.name} has it in all layers or none"
        return {}, [f"layer_types has {FULL_ATTENTION!r} together with sliding_window={window}, but {rule}"]
    if window is None or not any(has_window):
        return {}, []
    pattern = {} if all(has_window) else {"window_attn_skip_freq": format_layer_pattern(has_window)}
    return {"window_size": (window - 1, 0), **pattern}, []


def _write_window(model: ModelConfig, family: ModelFamily) -> Json:
    """Return the keys of the sliding windows."""
    if not family.window_layout:
        return {}
    windows = model.attention_windows
    window = max((window for window in windows if window is not None), default=None)
    if family.window_layout == "all":
        return {"sliding_window": window}
    types = [FULL_ATTENTION if window is None else SLIDING_ATTENTION for window in windows]
    if family.window_layout in ("alternate", "period"):
        # transformers requires a number, even if layer_types uses none
        default: int = family.optional["sliding_window"]
        alternating: Json = {"sliding_window": default if window is None else window, "layer_types": types}
        if family.window_layout == "period":  # older releases read this key instead of layer_types
            alternating["sliding_window_pattern"] = 1 + windows.index(None) if None in windows else len(windows) + 1
        return alternating
    keys: Json = {"use_sliding_window": window is not None, "sliding_window": window}
    if window is not None:
        first = windows.index(window)  # layers before the first with a window
        keys["max_window_layers"] = first if None not in windows[first:] else model.num_layers  # the older key
        keys["layer_types"] = types
    return keys


def _write_experts(model: ModelConfig, family: ModelFamily) -> Json:
    """Return the keys of the layers with experts, of the shared expert, and of groups of experts."""
    keys: Json = {}
    dense = [n for n, layer in enumerate(model.layers) if not layer.has_experts]
    if family.sparse_layers == "by step":
        keys |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
        keys["norm_topk_prob"] = not model.moe_router_pre_softmax
    elif family.sparse_layers == "by layer":
        keys["mlp_layer_types"] = [SPARSE if layer.has_experts else DENSE for layer in model.layers]
    if family.sparse_layers in ("after the first", "by layer") and dense == list(range(len(dense))):
        keys[_NUM_DENSE] = len(dense)
    if _NUM_SHARED in family.optional and model.has_experts:
        keys[_NUM_SHARED] = (model.moe_shared_expert_intermediate_size or 0) // model.expert_ffn_size
    if family.group_score_topk:
        groups = (model.moe_router_num_groups or 1, model.moe_router_group_topk or 1)
        keys |= dict(zip(_GROUP_KEYS, groups, strict=True))
        if _GROUP_METHOD in family.optional:
            keys[_GROUP_METHOD] = _GROUP_METHODS[model.moe_router_num_groups is not None]
    return keys


def _read_experts(config: Json, family: ModelFamily, num_layers: int) -> tuple[Json, list[str]]:
    """Return (options, problems) of the layers with experts."""
    first = config.get(_NUM_DENSE)
    if family.sparse_layers == "after the first" and first is None:
        first = family.optional[_NUM_DENSE]
    if family.sparse_layers == "":
        return {}, []
    if family.sparse_layers != "by step" and first is not None and not (type(first) is int and first >= 0):
        return {}, [f"{_NUM_DENSE}={first!r} is not a number of layers"]
    if family.sparse_layers == "after the first":
        assert type(first) is int
        has_experts = [n >= first for n in range(num_layers)]
        if not any(has_experts):
            return {}, [f"{_NUM_DENSE}={first} leaves no layer with experts; {family.name} has some"]
        return {"moe_layer_freq": _layer_freq(has_experts)}, []
    if family.sparse_layers == "by layer":
        num_dense = first if family.reads_num_dense and type(first) is int else 1
        by_default = [DENSE if n < num_dense else SPARSE for n in range(num_layers)]
        kinds = config.get("mlp_layer_types") or by_default
        if not isinstance(kinds, list) or len(kinds) != num_layers or any(k not in (DENSE, SPARSE) for k in kinds):
            return {}, [f"mlp_layer_types is not a list of {num_layers} kinds, {DENSE} or {SPARSE}"]
        has_experts = [kind == SPARSE for kind in kinds]
        if first is not None and has_experts != [n >= first for n in range(num_layers)]:
            shown = "mlp_layer_types" if config.get("mlp_layer_types") else "its default"
            return {}, [f"{_NUM_DENSE}={first} disagrees with {shown}, {kinds.count(DENSE)} dense layers"]
        if not any(has_experts):
            return {}, ["mlp_layer_types has no layer with experts"]
        return {"moe_layer_freq": _layer_freq(has_experts)}, []
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if type(step) is not int or step < 1 or not isinstance(dense, list) or any(type(n) is not int for n in dense):
        return {}, [f"decoder_sparse_step={step!r}, mlp_only_layers={dense!r} are not a step and a list of layers"]
    has_experts = [(n + 1) % step == 0 and n not in dense for n in range(num_layers)]
    return {
        "moe_layer_freq": _layer_freq(has_experts),
        "moe_router_pre_softmax": not config.get("norm_topk_prob", family.optional.get("norm_topk_prob", False)),
    }, []


def _layer_freq(has_experts: list[bool]) -> str:
    """Return the layers with experts as a value of `moe_layer_freq`."""
    return "1" if all(has_experts) else format_layer_pattern(has_experts, periods=False)
