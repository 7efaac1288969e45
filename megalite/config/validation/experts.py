"""Contradictions in the options of mixture-of-experts models."""

from collections.abc import Iterator

from megalite.config.option import flag_name
from megalite.config.options import Config
from megalite.config.problems import (
    Problem,
    comma_separated,
    does_not_divide,
    is_above,
    nearest_multiples,
    options_set,
    requires,
    shown,
)


def expert_problems(config: Config) -> Iterator[Problem]:
    if not config.model.num_experts:
        return
    yield from _expert_size_problems(config)
    yield from _balancing_problems(config)
    yield from _group_problems(config)
    model = config.model
    if model.moe_shared_expert_gate and model.moe_shared_expert_intermediate_size is None:
        yield requires("moe_shared_expert_gate", "moe_shared_expert_intermediate_size", also=("num_experts",))


def _expert_size_problems(config: Config) -> Iterator[Problem]:
    model, parallel = config.model, config.parallel
    num_experts = model.num_experts or 0
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    expert_tp = parallel.expert_tensor_parallel_size
    shared, expert_ffn = model.moe_shared_expert_intermediate_size, model.expert_ffn_size
    if model.add_bias_linear and shared is not None:
        yield Problem(
            f"add_bias_linear=True with moe_shared_expert_intermediate_size={shared}: the shared block has no biases; "
            "give --disable-bias-linear",
            options=("num_experts", "add_bias_linear", "moe_shared_expert_intermediate_size"),
        )
    if num_experts % ep:
        yield does_not_divide("expert_model_parallel_size", ep, "num_experts", num_experts)
    if expert_ffn % expert_tp:
        yield does_not_divide(
            "expert_tensor_parallel_size",
            expert_tp,
            "moe_ffn_hidden_size",
            expert_ffn,
            remedy=f"use {nearest_multiples(expert_ffn, expert_tp)} for it, or another",
            also=("num_experts", "ffn_hidden_size"),
        )
    if model.add_bias_linear and model.hidden_size % expert_tp:
        yield Problem(
            f"expert_tensor_parallel_size={expert_tp} does not divide hidden_size={model.hidden_size}, whose biases it "
            f"splits: use {nearest_multiples(model.hidden_size, expert_tp)} for it",
            options=("expert_tensor_parallel_size", "hidden_size", "add_bias_linear", "num_experts"),
        )
    if shared is not None and shared % tp:
        yield does_not_divide(
            "tensor_model_parallel_size",
            tp,
            "moe_shared_expert_intermediate_size",
            shared,
            remedy=f"use {nearest_multiples(shared, tp)} for it",
            also=("num_experts",),
        )
    if config.checkpoint.moe_use_upcycling and expert_ffn != model.ffn_size:
        yield Problem(
            f"moe_ffn_hidden_size={expert_ffn} is not ffn_hidden_size={model.ffn_size}, whose weights "
            "moe_use_upcycling copies; drop it",
            options=("moe_ffn_hidden_size", "ffn_hidden_size", "moe_use_upcycling", "num_experts", "hidden_size"),
        )


def _balancing_problems(config: Config) -> Iterator[Problem]:
    model = config.model
    num_experts, topk = model.num_experts or 0, model.moe_router_topk
    kinds, coefficients = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    softmax_after_topk = model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax
    if topk == 1 and softmax_after_topk and "sinkhorn" not in kinds:
        yield Problem(
            f"moe_router_topk={topk}: the softmax over one chosen expert is always 1; give --moe-router-pre-softmax",
            options=(
                "moe_router_topk",
                "moe_router_score_function",
                "moe_router_pre_softmax",
                "moe_router_load_balancing_type",
                "num_experts",
            ),
        )
    if topk > num_experts:
        yield is_above("moe_router_topk", topk, "num_experts", num_experts)
    if "sinkhorn" in kinds:
        for name in options_set(config, "moe_aux_loss_coeff", "moe_router_enable_expert_bias", "moe_router_num_groups"):
            yield Problem(
                f"moe_router_load_balancing_type={comma_separated(kinds)} balances choices itself; drop "
                f"{flag_name(name)}",
                options=("moe_router_load_balancing_type", name, "num_experts"),
            )
    if len(coefficients) != len(kinds):
        yield Problem(
            f"moe_aux_loss_coeff={comma_separated(coefficients)} is not one for each of "
            f"moe_router_load_balancing_type={comma_separated(kinds)}; give as many",
            options=("moe_aux_loss_coeff", "moe_router_load_balancing_type", "num_experts"),
        )


def _group_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of group-limited routing, in which a token's experts are in a limited number of groups."""
    model = config.model
    num_experts, topk = model.num_experts or 0, model.moe_router_topk
    groups, group_topk = model.moe_router_num_groups, model.moe_router_group_topk
    score_topk = model.moe_router_group_score_topk
    if groups is None:
        for name in options_set(config, "moe_router_group_topk", "moe_router_group_score_topk"):
            yield requires(shown(config, name), "moe_router_num_groups", also=("num_experts",))
        return
    if group_topk is None:
        yield requires(f"moe_router_num_groups={groups}", "moe_router_group_topk", also=("num_experts",))
        return
    if num_experts % groups:
        yield does_not_divide(
            "moe_router_num_groups", groups, "num_experts", num_experts, also=("moe_router_group_topk",)
        )
    elif topk % group_topk and score_topk is None:
        also = ("num_experts", "moe_router_num_groups", "moe_router_group_score_topk")
        yield does_not_divide("moe_router_group_topk", group_topk, "moe_router_topk", topk, also=also)
    elif score_topk is not None and score_topk > num_experts // groups:
        yield Problem(
            f"moe_router_group_score_topk={score_topk} is above the {num_experts // groups} experts in each of "
            f"moe_router_num_groups={groups} groups; lower it",
            options=("moe_router_group_score_topk", "moe_router_num_groups", "num_experts"),
        )
    elif topk * groups > group_topk * num_experts:
        yield Problem(
            f"moe_router_topk={topk} is above the experts in moe_router_group_topk={group_topk} of "
            f"moe_router_num_groups={groups} groups; lower it or keep more",
            options=("moe_router_topk", "moe_router_group_topk", "moe_router_num_groups", "num_experts"),
        )
    if group_topk > groups:
        yield is_above("moe_router_group_topk", group_topk, "moe_router_num_groups", groups, also=("num_experts",))
