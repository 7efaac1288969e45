"""The sizes of a small model with the same kinds of layers, ratios of heads, groups and tp, and routing."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

from megalite.config.hybrid_pattern import DEPTH, MLP_LETTERS, RECURRENT_LETTERS, without_borders
from megalite.config.option_parsers import format_layer_pattern, parse_layer_pattern
from megalite.config.options import Config, ModelConfig
from tools.verification.kv_sharing import KVSharing
from tools.verification.reference_sharding import Layout
from tools.verification.shrink_stages import SmallStages

MIN_HEAD_SIZE = 4
SEQ_LENGTH = 16
MAX_LATENT_SIZES = {  # of multi-latent attention; all are different, so that sizes that are mixed up do not fit
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
}


def shrink_model(config: Config, requested: Layout, layout: Layout, stages: SmallStages) -> ModelConfig:
    model, tp, cp = config.model, layout.tp, layout.cp
    num_heads, num_groups = _shrink_heads(config, requested, layout)
    head_size = _shrink_head_size(model, num_heads)
    hidden_size = 8 * MIN_HEAD_SIZE if model.kv_channels else num_heads * head_size

    def width(size: int, multiple: int) -> int:
        """Scale a feed-forward size with the hidden size; at least 3 columns per rank."""
        return multiple * max(3, round(size / model.hidden_size * hidden_size / multiple))

    seq_length = min(model.seq_length, _round_up(SEQ_LENGTH, 2 * cp * tp if cp > 1 else tp))
    window_size = model.window_size
    if window_size is not None and 0 < window_size[0] < model.seq_length - 1:
        window_size = (max(1, min(window_size[0], seq_length // 4)), window_size[1])
    changes: dict[str, Any] = dict(
        num_layers=len(stages.layers),
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        kv_channels=head_size if model.kv_channels else None,
        num_query_groups=num_groups if model.group_query_attention else None,
        ffn_hidden_size=width(model.ffn_size, tp),
        seq_length=seq_length,
        max_position_embeddings=seq_length if model.max_positions == model.seq_length else 2 * seq_length,
        make_vocab_size_divisible_by=min(model.make_vocab_size_divisible_by, 8),
        window_size=window_size,
        cp_comm_type=("auto",),
        yarn_original_max_position_embeddings=min(model.yarn_original_max_position_embeddings, seq_length // 2),
        init_method_std=max(model.init_method_std, hidden_size**-0.5),
    )
    if model.use_mup:
        changes["mup_base_hidden_size"] = max(1, round(hidden_size / model.width_mult))
    if model.multi_latent_attention:
        sizes = {name: getattr(model, name) for name in MAX_LATENT_SIZES}
        changes |= {name: min(size, MAX_LATENT_SIZES[name]) for name, size in sizes.items() if size is not None}
    if stages.pattern is not None:
        _, depth, depths = (model.hybrid_layer_pattern or "").partition(DEPTH)
        changes["hybrid_layer_pattern"] = stages.pattern + depth + depths
        changes |= _shrink_letter_options(config, requested, stages.pattern)
    else:
        for name in ("window_attn_skip_freq", "no_rope_freq", "linear_attention_freq"):
            changes[name] = _shrink_pattern(getattr(model, name), model.num_layers, stages.layers)
        if cp > 1:
            comm_types = _resolved_comm_types(config, requested)
            changes["cp_comm_type"] = tuple(comm_types[i] for i in stages.layers)
    if cp == 1:
        changes["cp_comm_type"] = ("auto",)
    if model.uses_delta_rule:
        changes |= _shrink_delta_rule(config, requested, layout)
    if model.uses_mamba2:
        changes |= _shrink_mamba2(config, requested, layout)
    if model.num_experts:
        moe_layers = str([int(layer.has_experts) for layer in model.layers])
        if model.hybrid_layer_pattern is None:
            changes["moe_layer_freq"] = _shrink_pattern(moe_layers, model.num_layers, stages.layers)
        changes["moe_ffn_hidden_size"] = width(model.expert_ffn_size, layout.etp)
        if model.moe_shared_expert_intermediate_size is not None:
            changes["moe_shared_expert_intermediate_size"] = width(model.moe_shared_expert_intermediate_size, tp)
        changes |= _shrink_experts(model, requested, layout)
    return replace(model, **changes)


def _resolved_comm_types(config: Config, requested: Layout) -> list[str]:
    """Return what each layer of the run exchanges over cp; a small one might choose otherwise."""
    model = config.model
    # they import torch
    from megalite.models.layers import resolve_cp_comm_type
    from megalite.planning.layer_kinds import single_document_sharding

    sharding = single_document_sharding(model, requested.cp)
    if sharding is None:
        return ["auto"] * len(model.layers)
    import torch

    dtype = torch.bfloat16 if config.precision.bf16 or config.precision.fp16 else torch.float32
    return [resolve_cp_comm_type(model, layer, requested.tp, sharding, dtype) for layer in model.layers]


def _shrink_letter_options(config: Config, requested: Layout, pattern: str) -> dict[str, Any]:
    """Return the options with a value for each letter of the small pattern.

    Each combination of the run's mixers occurs, as far as the small pattern has mixers for them.
    """
    model = config.model
    comm_types_of_layers = _resolved_comm_types(config, requested)
    mixers = [(layer, kind) for layer, kind in zip(model.layers, comm_types_of_layers, strict=True) if layer.mixer]
    kinds = {(layer.window is not None, layer.rope is None, kind) for layer, kind in mixers if not layer.is_recurrent}
    kinds_in_turn = cycle(sorted(kinds, reverse=True))  # with a window first: one mixer alone has it
    recurrent_kinds = {
        letter: cycle(sorted({kind for layer, kind in mixers if layer.mixer == mixer}))
        for letter, mixer in RECURRENT_LETTERS.items()
    }
    without_kind = {*MLP_LETTERS, *RECURRENT_LETTERS}
    letters = []
    for letter in without_borders(pattern):
        if letter in RECURRENT_LETTERS:
            letters.append((False, False, next(recurrent_kinds[letter])))
        else:
            letters.append((False, False, "auto") if letter in MLP_LETTERS else next(kinds_in_turn))
    changes: dict[str, Any] = {"window_attn_skip_freq": None, "no_rope_freq": None, "cp_comm_type": ("auto",)}
    windows, without_rope, comm_types = zip(*letters, strict=True)
    small_mixers = [
        kind for kind, letter in zip(letters, without_borders(pattern), strict=True) if letter not in without_kind
    ]
    if len({has_window for has_window, *_ in small_mixers}) == 2:
        changes["window_attn_skip_freq"] = format_layer_pattern(windows, periods=False)
    if model.no_rope_freq is not None and any(without_rope):
        changes["no_rope_freq"] = format_layer_pattern(without_rope, periods=False)
    if requested.cp > 1:
        changes["cp_comm_type"] = comm_types
    return changes


def _shrink_heads(config: Config, requested: Layout, layout: Layout) -> tuple[int, int]:
    """Return (number of attention heads, number of groups)."""
    model, tp = config.model, layout.tp
    sharing = KVSharing.from_config(config, requested.tp)
    if sharing is not None:
        small = sharing.shrink(tp)
        num_groups, num_heads = small.groups, small.heads * tp
    else:
        num_groups = tp if model.num_kv_groups == requested.tp else 2 * tp
        num_heads = min(model.num_attention_heads // model.num_kv_groups, 4) * num_groups
    if "a2a" in _resolved_comm_types(config, requested):  # every cp rank gets heads
        factor = layout.cp // math.gcd(layout.cp, num_heads // tp)
        num_groups *= factor
        num_heads *= factor
    return num_heads, num_groups


def _ranks_with_heads(config: Config, requested: Layout, layout: Layout, *mixers: str) -> int:
    """Return the number of ranks over which the heads of these mixers are sharded: tp, and cp if it exchanges heads."""
    comm_types = _resolved_comm_types(config, requested)
    used_types = {kind for layer, kind in zip(config.model.layers, comm_types, strict=True) if layer.mixer in mixers}
    return layout.tp * layout.cp if "a2a" in used_types else layout.tp


def _shrink_delta_rule(config: Config, requested: Layout, layout: Layout) -> dict[str, Any]:
    """Return as few key and value heads as keep whether heads are shared, and whether ranks share a key head.

    The first outputs of a document may be small. With a small epsilon, their norm would magnify the rounding of fp64
    beyond what the comparison allows.
    """
    model, tp = config.model, layout.tp
    keys = model.linear_num_key_heads
    small_keys = tp if keys >= requested.tp else max(1, tp * keys // requested.tp)
    num_ranks = _ranks_with_heads(config, requested, layout, "gated_delta_net", "kda")
    if model.linear_num_value_heads == keys:
        small_keys = small_values = _round_up(small_keys, num_ranks)
    else:
        small_values = _round_up(2 * small_keys, math.lcm(num_ranks, small_keys))
    return {
        "linear_num_key_heads": small_keys,
        "linear_num_value_heads": small_values,
        "linear_key_head_dim": MIN_HEAD_SIZE,
        "linear_value_head_dim": MIN_HEAD_SIZE,
        "norm_epsilon": max(model.norm_epsilon, 0.01),
    }


def _shrink_mamba2(config: Config, requested: Layout, layout: Layout) -> dict[str, Any]:
    """Return as few groups and heads as keep whether a rank has several groups, and a group several heads."""
    model = config.model
    groups = layout.tp if model.mamba_num_groups == requested.tp else 2 * layout.tp
    heads_per_group = min(model.mamba_heads // model.mamba_num_groups, 2)
    num_ranks = _ranks_with_heads(config, requested, layout, "mamba2")
    return {
        "mamba_num_groups": groups,
        "mamba_num_heads": _round_up(groups * heads_per_group, math.lcm(groups, num_ranks)),
        "mamba_head_dim": MIN_HEAD_SIZE,
        "mamba_state_dim": MIN_HEAD_SIZE + 1,
        "norm_epsilon": max(model.norm_epsilon, 0.01),  # as for gated delta nets
    }


def _shrink_head_size(model: ModelConfig, num_heads: int) -> int:
    """Return the smallest head size with an even number of rotated channels, above 0.

    If the hidden size follows from it, that is a multiple of 16 like the original, because torch draws normal numbers
    in groups of 16.
    """
    multiple = 1 if model.kv_channels else math.gcd(model.hidden_size, 16)
    for head_size in range(MIN_HEAD_SIZE, model.head_size):
        num_rotated = int(head_size * model.rotary_percent)
        if num_rotated and num_rotated % 2 == 0 and num_heads * head_size % multiple == 0:
            return head_size
    return model.head_size


def _shrink_experts(model: ModelConfig, requested: Layout, layout: Layout) -> dict[str, int]:
    """Return as few experts as keep the routing.

    Kept is whether a token goes to one, some or all of the experts and of the groups of experts, and whether a rank has
    one or several experts.
    """
    num_experts, topk = model.num_experts or 0, model.moe_router_topk
    num_groups, group_topk = model.moe_router_num_groups, model.moe_router_group_topk
    if num_groups is None or group_topk is None:
        experts_per_rank = 2 if requested.ep < num_experts else 1
        small_experts = _round_up(max(min(num_experts, 4), experts_per_rank * layout.ep), layout.ep)
        small_topk = small_experts if topk == num_experts else min(topk, 3)
        return {"num_experts": small_experts, "moe_router_topk": small_topk}
    small_group_topk = min(group_topk, 2)
    small_groups = small_group_topk if group_topk == num_groups else min(2 * small_group_topk, num_groups)
    topk_per_group = topk // group_topk
    small_topk_per_group = min(topk_per_group, 2)
    experts_per_group = small_topk_per_group + (topk_per_group < num_experts // num_groups)
    return {
        "num_experts": _round_up(small_groups * experts_per_group, math.lcm(small_groups, layout.ep)),
        "moe_router_topk": small_topk_per_group * small_group_topk,
        "moe_router_num_groups": small_groups,
        "moe_router_group_topk": small_group_topk,
    }


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _shrink_pattern(pattern: str | None, num_layers: int, layers: Sequence[int]) -> str | None:
    """Return the pattern of the layers that are kept; if it has both kinds of layers, the result has both too."""
    if pattern is None or len(layers) == num_layers:
        return pattern
    if pattern.strip().isdigit():
        return str(min(int(pattern), len(layers)))
    flags = parse_layer_pattern(pattern, num_layers)
    small = [int(flags[layer]) for layer in layers]
    if len(set(flags)) == 2 and len(set(small)) == 1 and len(small) > 1:
        small[-2] = 1 - small[-2]
    return str(small).replace(" ", "")
