"""Contradictions in the options of the model: positions, attention, widths, and values per layer."""

import math
from collections.abc import Iterator

from megalite.config.hybrid_pattern import (
    first_letters,
    num_parts,
    num_pattern_layers,
    parse_depth_pattern,
    shown_pattern,
)
from megalite.config.layer_spec import ATTENTION_MIXERS, RECURRENT_MIXERS
from megalite.config.option import flag_name
from megalite.config.options import QUICK_GEGLU_OPTIONS, Config
from megalite.config.problems import (
    Problem,
    comma_separated,
    divisors,
    does_not_divide,
    join_or,
    nearest_multiples,
    options_set,
    requires,
    shown,
    value_of,
)
from megalite.config.registry import REGISTRIES

# option -> (values that an error message suggests, other values that Megatron-LM and megalite accept)
LIST_VALUES = {
    "cp_comm_type": (("auto", "allgather", "a2a"), ("p2p", "a2a+p2p")),
    "moe_router_load_balancing_type": (("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"), ()),
    "recompute_modules": (("core_attn", "layernorm", "mlp"), ("moe", "shared_experts")),
}
# option -> (smallest, largest) value; beyond them half precision or fp32 rounds results to 0 or infinity
SCALE_RANGES = {
    "attn_logit_softcapping": (0.01, 1e4),
    "final_logit_softcapping": (0.01, 1e4),
    "softmax_scale": (1e-4, 1e4),
    "embedding_multiplier": (1e-4, 1e4),
    "mup_embedding_mult": (1e-4, 1e4),
    "mup_output_mult": (1e-4, 1e4),
    "mup_base_head_dim": (1e-4, 1e4),
}


def position_problems(config: Config) -> Iterator[Problem]:
    model = config.model
    kind = model.position_embedding_type
    if model.enable_gpt_oss and kind != "yarn":
        yield Problem(
            f"position_embedding_type={kind} with enable_gpt_oss=True, which sets yarn; drop one",
            options=("position_embedding_type", "enable_gpt_oss"),
        )
    if model.max_positions < model.seq_length:
        yield Problem(
            f"max_position_embeddings={model.max_position_embeddings} is below seq_length={model.seq_length}; "
            "make it at least that",
            options=("max_position_embeddings", "seq_length"),
        )
    if not 0 < model.rotary_percent <= 1:
        yield Problem(f"rotary_percent={model.rotary_percent} is not in (0, 1]; use 1.0", options=("rotary_percent",))
    if kind == "learned_absolute" and not model.add_position_embedding:
        yield Problem(
            f"add_position_embedding=False with position_embedding_type={kind}; use none, or rope",
            options=("add_position_embedding", "position_embedding_type"),
        )
    if kind != "yarn":
        return
    rope_only = ("rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor", "use_rope_scaling")
    for name in options_set(config, *rope_only):
        yield Problem(
            f"{shown(config, name)} with position_embedding_type=yarn, which does not take it; remove it",
            options=(name, "position_embedding_type"),
        )
    if model.yarn_beta_fast < model.yarn_beta_slow:  # Kimi K2 has equal ones
        yield Problem(
            f"yarn_beta_fast={model.yarn_beta_fast:g} is below yarn_beta_slow={model.yarn_beta_slow:g}; raise it",
            options=("position_embedding_type", "yarn_beta_fast", "yarn_beta_slow"),
        )
    if model.rotary_base == 1:
        yield Problem(
            f"rotary_base={model.rotary_base} rotates all channels by the same angle; use 10000",
            options=("position_embedding_type", "rotary_base"),
        )


def window_length_problems(config: Config) -> Iterator[Problem]:
    window = config.model.window_size
    if window is not None and len(window) != 2:
        yield Problem(
            f"{shown(config, 'window_size')} is not two numbers; give LEFT,RIGHT, as 4095,0", options=("window_size",)
        )


def attention_problems(config: Config) -> Iterator[Problem]:
    model = config.model
    heads, groups = model.num_attention_heads, model.num_kv_groups
    tp = config.parallel.tensor_model_parallel_size
    if model.qk_layernorm_over_heads and not (model.qk_layernorm and model.normalization == "RMSNorm"):
        yield Problem(
            "qk_layernorm_over_heads needs --qk-layernorm and --normalization RMSNorm",
            options=("qk_layernorm_over_heads", "qk_layernorm", "normalization"),
        )
    if heads % tp:
        yield does_not_divide("tensor_model_parallel_size", tp, "num_attention_heads", heads)
    is_yarn = model.position_embedding_type == "yarn"
    if (model.rope_type == "yarn" and not is_yarn) or (
        model.rope_type == "rope" and is_yarn and model.multi_latent_attention
    ):
        yield Problem(
            f"rope_type={model.rope_type} with position_embedding_type={model.position_embedding_type}; use "
            f"--position-embedding-type {model.rope_type}, or drop it",
            options=("rope_type", "position_embedding_type"),
        )
    if model.multi_latent_attention:
        yield from _latent_attention_problems(config)
        return
    if heads % groups:
        yield does_not_divide("num_query_groups", groups, "num_attention_heads", heads)
    elif groups % tp and tp % groups:
        yield Problem(
            f"tensor_model_parallel_size={tp} and num_query_groups={groups}: neither divides the other; change one",
            options=("tensor_model_parallel_size", "num_query_groups", "num_attention_heads"),
        )


def _latent_attention_problems(config: Config) -> Iterator[Problem]:
    """Yield the options that multi-latent attention does not have, and sizes that do not fit."""
    model = config.model
    option = "multi_latent_attention"
    rotated = model.qk_pos_emb_head_dim
    if model.group_query_attention:
        yield Problem(
            f"{shown(config, 'num_query_groups')} with {option}=True, where every head has a key and value of its own; "
            "drop --group-query-attention",
            options=("num_query_groups", "group_query_attention", option),
        )
    if rotated % 2 and model.allows_rope:
        yield Problem(
            f"qk_pos_emb_head_dim={rotated} is odd, but channels rotate in pairs; use {nearest_multiples(rotated, 2)}",
            options=("qk_pos_emb_head_dim",),
        )
    for name, reason in (
        ("rotary_percent", "rotates all channels of --qk-pos-emb-head-dim"),
        ("rotary_interleaved", "has --mla-rotary-interleaved for that"),
        ("add_qkv_bias", "has no biases in these projections"),
        ("qk_layernorm_over_heads", "normalizes the latents"),
    ):
        if any(options_set(config, name)):
            yield Problem(f"{shown(config, name)} with {option}=True, which {reason}; drop it", options=(name, option))


def tensor_parallel_size_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of the sizes that tensor parallelism splits, except the number of heads."""
    model = config.model
    tp = config.parallel.tensor_model_parallel_size
    needs_default_width = model.has_dense_ffn or not model.moe_ffn_hidden_size
    if model.ffn_size < 1 and needs_default_width:
        yield Problem(
            f"hidden_size={model.hidden_size} is too small for the default width of swiglu; give --ffn-hidden-size",
            options=("hidden_size", "ffn_hidden_size"),
        )
    divided = [("seq_length", model.seq_length)]
    if model.has_dense_ffn:
        divided.insert(0, ("ffn_hidden_size", model.ffn_size))
    for name, size in divided:
        if size % tp:
            remedy = f"use {nearest_multiples(size, tp)} for it, or another tp"
            yield does_not_divide("tensor_model_parallel_size", tp, name, size, remedy)


def hybrid_pattern_error(config: Config) -> Problem | None:
    """Return the problem that makes the layers of a pattern unknown, or None."""
    model = config.model
    if model.hybrid_layer_pattern is None:
        return None
    pattern = shown_pattern(model.hybrid_layer_pattern)
    try:
        num_layers = num_pattern_layers(model.hybrid_layer_pattern)
    except ValueError as error:
        return Problem(f"{pattern} {error}", options=("hybrid_layer_pattern",))
    if model.num_layers in (0, num_layers):
        return None
    letters = num_parts(model.hybrid_layer_pattern)
    also_letters = f", or {letters} letters" if letters != num_layers else ""
    return Problem(
        f"num_layers={model.num_layers} disagrees with {pattern}, which has {num_layers} layers{also_letters}; drop it",
        options=("num_layers", "hybrid_layer_pattern"),
    )


def _scale_problems(config: Config) -> Iterator[Problem]:
    for name, (low, high) in SCALE_RANGES.items():
        value = getattr(config.model, name)
        if value is not None and math.isfinite(value) and value > 0 and not low <= value <= high:
            rule = f"is outside {low:g} to {high:g}, which every dtype can hold"
            yield Problem(f"{name}={value:g} {rule}; give a value between them", options=(name,))


def _clamped_swiglu_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of Megatron-LM's flags for the activation of GPT-OSS, which go together."""
    model = config.model
    if not any(options_set(config, *QUICK_GEGLU_OPTIONS)):
        return
    if (model.quick_geglu, model.glu_linear_offset, model.activation_func_clamp_value) != (True, 1.0, 7.0):
        values = ", ".join(shown(config, name) for name in QUICK_GEGLU_OPTIONS)
        yield Problem(
            f"{values}: only clamped_swiglu is available; give --quick-geglu "
            "--glu-linear-offset 1.0 --activation-func-clamp-value 7.0, or none of them",
            options=QUICK_GEGLU_OPTIONS,
        )
    elif model.activation != "clamped_swiglu":
        yield Problem(
            f"activation={model.activation} with quick_geglu=True, which is clamped_swiglu; drop one",
            options=("activation", *QUICK_GEGLU_OPTIONS),
        )


def _mtp_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of multi-token prediction."""
    model = config.model
    depths = model.num_mtp_depths
    options = ("mtp_num_layers", "hybrid_layer_pattern")
    if depths >= model.seq_length:
        yield Problem(
            f"mtp_num_layers={depths} is not below seq_length={model.seq_length}, so the last depth has no label; use "
            "1 to 3",
            options=(*options, "seq_length"),
        )
    if model.hybrid_layer_pattern is not None and model.mtp_num_layers not in (None, depths):
        pattern = shown_pattern(model.hybrid_layer_pattern)
        yield Problem(
            f"mtp_num_layers={model.mtp_num_layers} disagrees with {pattern}, which has {depths} depths, each after a "
            "/; drop it, or append depths as in /*-",
            options=options,
        )


def model_problems(config: Config) -> Iterator[Problem]:
    yield from _mtp_problems(config)
    yield from _clamped_swiglu_problems(config)
    yield from _scale_problems(config)
    yield from _norm_problems(config)
    yield from _hybrid_model_problems(config)
    yield from _head_size_problems(config)
    yield from _list_value_problems(config)
    yield from _pattern_problems(config)
    yield from _delta_rule_problems(config)
    yield from _mamba2_problems(config)
    yield from _window_problems(config)
    yield from _balancing_loss_problems(config)


def _hybrid_model_problems(config: Config) -> Iterator[Problem]:
    """Yield the contradictions between a layer pattern and other options."""
    model = config.model
    if model.hybrid_layer_pattern is None:
        return
    pattern = shown_pattern(model.hybrid_layer_pattern)
    if any(options_set(config, "moe_layer_freq")):
        yield Problem(
            f"{shown(config, 'moe_layer_freq')} is for models without hybrid_layer_pattern, where each E is a layer "
            "with experts; drop it",
            options=("moe_layer_freq", "hybrid_layer_pattern"),
        )
    parts = [part for stage in model.pattern_stages for part in stage]
    parts += parse_depth_pattern(model.hybrid_layer_pattern)
    if model.has_experts and not model.num_experts:
        yield requires(f"{pattern} with E", "num_experts")
    if model.num_experts and not model.has_experts:
        yield Problem(
            f"num_experts={model.num_experts} needs a layer with experts, but {pattern} has no E; drop it",
            options=("num_experts", "hybrid_layer_pattern"),
        )
    mixers = {part.mixer for part in parts if part.mixer is not None}
    if model.multi_latent_attention and "attention" in mixers:
        yield Problem(
            f"{pattern} has *, attention without latents, with multi_latent_attention=True; use + for each *",
            options=("hybrid_layer_pattern", "multi_latent_attention"),
        )
    if "latent_attention" in mixers and not model.multi_latent_attention:
        yield requires(f"{pattern} with +", "multi_latent_attention")
    if model.experimental_attention_variant is not None:
        yield Problem(
            f"experimental_attention_variant={model.experimental_attention_variant} with {pattern}, whose letters name "
            "the mixer of each layer; drop it",
            options=("experimental_attention_variant", "hybrid_layer_pattern"),
        )
    plugin_mixers = sorted(mixers.difference(ATTENTION_MIXERS, RECURRENT_MIXERS))
    for option in options_set(config, "reset_attention_mask", "eval_requests"):
        for name in plugin_mixers:
            if not getattr(REGISTRIES["mixer"].get(name), "supports_documents", False):
                yield Problem(
                    f"{shown(config, option)}: mixer {name!r} of {pattern} does not separate documents; drop it",
                    options=(option, "hybrid_layer_pattern"),
                )
    if config.parallel.context_parallel_size > 1:
        for name in plugin_mixers:
            if not getattr(REGISTRIES["mixer"].get(name), "supports_context_parallel", False):
                yield Problem(
                    f"context_parallel_size={config.parallel.context_parallel_size}: mixer {name!r} of {pattern} does "
                    "not support it; use tensor parallelism",
                    options=("context_parallel_size", "hybrid_layer_pattern"),
                )
    if model.parallel_residual and any(part.mixer is None or part.mlp is None for part in parts):
        yield Problem(
            f"parallel_residual=True adds a mixer and an MLP to the same input, but {pattern} has layers with only one "
            "of them; drop it",
            options=("parallel_residual", "hybrid_layer_pattern"),
        )


def _norm_problems(config: Config) -> Iterator[Problem]:
    """Yield the contradictions between the placement of norms and other options."""
    placement = config.model.norm_placement
    if placement == "input":
        return
    if config.model.sandwich_norm:
        yield Problem(
            f"norm_placement={placement} with sandwich_norm=True, which normalizes inputs and outputs; drop one",
            options=("norm_placement", "sandwich_norm"),
        )


def _delta_rule_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of gated delta nets and Kimi delta attention, and of their heads."""
    model = config.model
    variant = model.experimental_attention_variant
    if variant is not None and model.hybrid_layer_pattern is None and model.linear_attention_freq is None:
        yield Problem(
            f"experimental_attention_variant={variant} in no layer; give --linear-attention-freq, as 4 for attention "
            "in every fourth layer",
            options=("experimental_attention_variant", "linear_attention_freq"),
        )
    if not model.uses_delta_rule:
        return
    tp = config.parallel.tensor_model_parallel_size
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if model.uses_kda and keys != values:
        yield Problem(
            f"linear_num_key_heads={keys} and linear_num_value_heads={values}: Kimi delta attention has as many key as "
            "value heads; make them equal",
            options=("linear_num_key_heads", "linear_num_value_heads"),
        )
    elif values % keys:
        yield does_not_divide("linear_num_key_heads", keys, "linear_num_value_heads", values)
    if values % tp:
        yield does_not_divide("tensor_model_parallel_size", tp, "linear_num_value_heads", values)
    elif keys % tp and tp % keys:
        yield Problem(
            f"tensor_model_parallel_size={tp} and linear_num_key_heads={keys}: neither divides the other; change one",
            options=("tensor_model_parallel_size", "linear_num_key_heads"),
        )


def _mamba2_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of the heads and groups of Mamba-2 mixers."""
    model = config.model
    if not model.uses_mamba2:
        return
    channels, head_dim = 2 * model.hidden_size, model.mamba_head_dim
    if model.mamba_num_heads is None and channels % head_dim:
        yield Problem(
            f"mamba_head_dim={head_dim} does not divide 2 * hidden_size={channels}; use {join_or(divisors(channels))}, "
            "or set --mamba-num-heads",
            options=("mamba_head_dim", "hidden_size", "mamba_num_heads"),
        )
        return
    tp, groups = config.parallel.tensor_model_parallel_size, model.mamba_num_groups
    if model.mamba_heads % groups:
        yield does_not_divide("mamba_num_groups", groups, "mamba_num_heads", model.mamba_heads)
    if groups % tp:
        yield does_not_divide("tensor_model_parallel_size", tp, "mamba_num_groups", groups)


def _head_size_problems(config: Config) -> Iterator[Problem]:
    model = config.model
    heads = model.num_attention_heads
    if model.multi_latent_attention:
        return
    has_rope = model.position_embedding_type in ("rope", "yarn")
    if model.kv_channels is None and model.hidden_size % heads:
        unit = 2 * heads if has_rope else heads  # channels rotate in pairs
        yield Problem(
            f"hidden_size={model.hidden_size} is not a multiple of num_attention_heads={heads}: use "
            f"{nearest_multiples(model.hidden_size, unit)}, or set --kv-channels",
            options=("hidden_size", "num_attention_heads", "kv_channels"),
        )
    elif has_rope and int(model.head_size * model.rotary_percent) % 2:
        yield Problem(
            f"rotary_percent={model.rotary_percent} rotates an odd number of {model.head_size} channels; make it even",
            options=("rotary_percent",),
        )


def _list_value_problems(config: Config) -> Iterator[Problem]:
    model = config.model
    has_experts = bool(model.num_experts)
    mixer_modules = {
        "mla_up_proj": model.multi_latent_attention,
        "gdn": model.uses_gated_delta_net,
        "kda": model.uses_kda,
        "mamba": model.uses_mamba2,
    }
    for name, (proposed, accepted) in LIST_VALUES.items():
        if name.startswith("moe") and not has_experts:
            continue
        suggested, known = [*proposed], {*proposed, *accepted}
        if name == "recompute_modules":
            suggested += [module for module, is_in_model in mixer_modules.items() if is_in_model]
            known |= {*suggested, "moe_act"} if has_experts else {*suggested}  # that of experts is always recomputed
        for value in dict.fromkeys(value_of(config, name)):
            if value not in known:
                yield Problem(f"{name}={value} is not available; use {join_or(suggested)}", options=(name,))


def _pattern_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of options that have a bit for each layer."""
    model = config.model
    has_window = model.window_attn_skip_freq is not None and bool(model.window_size) and model.window_size[0] != -1
    if model.hybrid_layer_pattern is not None:
        yield from _letter_value_problems(config, has_window)
        return
    for name, per_layer, needs_a_layer, condition, cause in (
        ("no_rope_freq", "rope_layers", False, "with rotary positions", "position_embedding_type"),
        ("moe_layer_freq", "moe_layers", bool(model.num_experts), "with experts", "num_experts"),
        (
            "linear_attention_freq",
            "recurrent_layers",
            model.experimental_attention_variant is not None,
            "without attention",
            "experimental_attention_variant",
        ),
        ("window_attn_skip_freq", "layer_windows", has_window, "with the window", "window_size"),
    ):
        try:
            layers = getattr(model, per_layer)
        except ValueError as error:
            yield Problem(f"{shown(config, name)} {error}", options=(name, "num_layers"))
            continue
        if needs_a_layer and not any(layers) and getattr(model, name) is not None:
            yield Problem(
                f"{shown(config, name)} leaves no layer {condition}; drop {flag_name(cause)}",
                options=(name, "num_layers", cause),
            )


def _letter_value_problems(config: Config, has_window: bool) -> Iterator[Problem]:
    """Yield the problems of options that have a bit for each letter of a pattern, which Megatron-LM counts as a layer.

    Only the bits of mixers have an effect. A number may hit nothing but MLPs: every second letter of *-*- is one.
    """
    model = config.model
    pattern = shown_pattern(model.hybrid_layer_pattern or "")
    mixer_numbers = [layer.number for stage in model.pattern_stages for layer in stage if layer.mixer is not None]
    positions = first_letters(model.hybrid_layer_pattern or "")
    mixer_positions = [positions[number] for number in mixer_numbers]
    for name, per_layer, is_active in (
        ("no_rope_freq", "rope_layers", model.allows_rope),
        ("window_attn_skip_freq", "layer_windows", has_window),
    ):
        if getattr(model, name) is None:
            continue
        try:
            values = getattr(model, per_layer)
        except ValueError as error:
            reason = f"{error}; each letter of {pattern} counts as a layer"
            yield Problem(f"{shown(config, name)} {reason}", options=(name, "hybrid_layer_pattern"))
            continue
        mixer_values = [values[number] for number in mixer_numbers]
        if is_active and all(mixer_values):
            yield Problem(
                f"{shown(config, name)} changes no mixer, because each letter of {pattern} counts as a layer, and its "
                f"mixers are at {comma_separated(mixer_positions)} of 0 to {model.num_layer_values - 1}; give a list "
                "that changes one of them, or drop it",
                options=(name, "hybrid_layer_pattern"),
            )
        elif name == "window_attn_skip_freq" and is_active and not any(mixer_values):
            yield Problem(
                f"{shown(config, name)} leaves no mixer of {pattern} with the window; drop --window-size",
                options=(name, "window_size", "hybrid_layer_pattern"),
            )


def _window_problems(config: Config) -> Iterator[Problem]:
    window = config.model.window_size
    if window is None or len(window) != 2:
        return
    left, right = window
    if right not in (0, -1):
        yield Problem(
            f"window_size={left},{right} has {right} on the right, where a causal model does not attend; use {left},0",
            options=("window_size",),
        )
    if left == 0 or left < -1:
        reason = "lets a token attend only to itself" if left == 0 else "is not a window"
        yield Problem(
            f"window_size={left},{right} {reason}; give at least 1,0, or -1,0 for no limit", options=("window_size",)
        )


def _balancing_loss_problems(config: Config) -> Iterator[Problem]:
    model = config.model
    if not model.num_experts:
        return
    kinds = model.moe_router_load_balancing_type
    if len(set(kinds)) < len(kinds):
        yield Problem(
            f"moe_router_load_balancing_type={comma_separated(kinds)} names one twice; give each once",
            options=("moe_router_load_balancing_type",),
        )
    for coefficient in model.moe_aux_loss_coeff:
        if not 0 <= coefficient < float("inf"):
            yield Problem(
                f"moe_aux_loss_coeff={coefficient} is not a finite number of 0 or more; give one",
                options=("moe_aux_loss_coeff",),
            )
