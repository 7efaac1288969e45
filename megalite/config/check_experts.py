"""Contradictions in the options of experts, and options of these without effect, that option_rules.txt cannot say."""

from collections.abc import Iterator

from megalite.config.check_model import any_divisor, any_of, divisors, multiples
from megalite.config.options import Config, ModelConfig
from megalite.config.problem import Problem, Say

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")


def expert_problems(config: Config, say: Say) -> Iterator[Problem]:
    m, p = config.model, config.parallel
    if not m.num_experts:
        return
    ep, etp, tp = p.expert_model_parallel_size, p.expert_tensor_parallel_size, p.tensor_model_parallel_size
    if m.num_experts % ep:
        text = "{=num_experts} is not a multiple of {=expert_model_parallel_size}: use {fit}"
        yield say(text, fit=any_of([d for d in divisors(m.num_experts) if d < ep]))
    one = m.moe_router_topk == 1 and m.moe_router_score_function == "softmax"
    if one and not m.moe_router_pre_softmax and "sinkhorn" not in m.moe_router_load_balancing_type:
        yield say("{=moe_router_topk}: the softmax over one chosen expert is always 1; give {--moe-router-pre-softmax}")
    if m.expert_ffn_size % etp:
        text = "{=expert_tensor_parallel_size} does not divide {=moe_ffn_hidden_size}: use {fit} for it, or another"
        fit = multiples(m.expert_ffn_size, etp)
        yield say(text, "ffn_hidden_size", moe_ffn_hidden_size=m.expert_ffn_size, fit=fit)
    if m.add_bias_linear and m.hidden_size and m.hidden_size % etp:
        text = "{=expert_tensor_parallel_size} does not divide {=hidden_size}, whose biases it splits: use {fit} for it"
        yield say(text, fit=multiples(m.hidden_size, etp))
    if config.checkpoint.moe_use_upcycling and m.expert_ffn_size != m.ffn_size:
        text = "{=moe_ffn_hidden_size} is not {=ffn_hidden_size}, of which {moe_use_upcycling} makes copies; drop it"
        yield say(text, "hidden_size", moe_ffn_hidden_size=m.expert_ffn_size, ffn_hidden_size=m.ffn_size)
    if (shared := m.moe_shared_expert_intermediate_size or tp) % tp:
        text = "{=tensor_model_parallel_size} does not divide {=moe_shared_expert_intermediate_size}: use {fit} for it"
        yield say(text, fit=multiples(shared, tp))
    try:
        if not any(m.experts):
            yield say("{=moe_layer_freq} leaves no layer with experts; drop {--num-experts}", "num_layers")
    except ValueError as error:
        yield say("{=moe_layer_freq} {error}", "num_layers", error=error)
    yield from _groups(m, say)
    yield from _balancing(m, say)


def _groups(m: ModelConfig, say: Say) -> Iterator[Problem]:
    experts, groups, best = m.num_experts or 0, m.moe_router_num_groups, m.moe_router_group_topk
    if groups is None or best is None:
        return
    if experts % groups:
        yield say("{=moe_router_num_groups} does not divide {=num_experts}: use {fit}", fit=any_divisor(experts))
    elif m.moe_router_topk % best:
        text = "{=moe_router_group_topk} does not divide {=moe_router_topk}: use {fit}"
        yield say(text, fit=any_divisor(m.moe_router_topk))
    elif m.moe_router_topk > best * (experts // groups):
        text = "{=moe_router_topk} is above the {n} experts of {=moe_router_group_topk} groups; lower it or keep more"
        yield say(text, "moe_router_num_groups", "num_experts", n=best * (experts // groups))


def _balancing(m: ModelConfig, say: Say) -> Iterator[Problem]:
    kinds, coeffs = m.moe_router_load_balancing_type, m.moe_aux_loss_coeff
    for kind in dict.fromkeys(kinds):
        if kind not in BALANCING:
            text = "{=moe_router_load_balancing_type} is not available; use {fit}"
            yield say(text, moe_router_load_balancing_type=kind, fit=any_of(BALANCING))
    if "sinkhorn" in kinds:
        rivals = ("moe_aux_loss_coeff", "moe_router_enable_expert_bias", "moe_router_num_groups")
        for rival in rivals:
            if (given := getattr(m, rival)) and given != (0.0,):
                yield say("{=moe_router_load_balancing_type} balances choices itself; drop {--option}", option=rival)
    if len(set(kinds)) < len(kinds):
        yield say("{=moe_router_load_balancing_type} names one twice; give each once")
    if len(kinds) != len(coeffs):
        text = "{=moe_aux_loss_coeff} has {n} for {=moe_router_load_balancing_type}; give one for each"
        yield say(text, n=len(coeffs))
    for coeff in coeffs:
        if not 0 <= coeff < float("inf"):
            yield say("{=moe_aux_loss_coeff} is no finite number of 0 or more; give one", moe_aux_loss_coeff=coeff)


def expert_world_problems(config: Config, world_size: int, say: Say) -> Iterator[Problem]:
    p = config.parallel
    share = p.expert_model_parallel_size * p.expert_tensor_parallel_size
    ranks = world_size // p.pipeline_model_parallel_size
    if not config.model.num_experts or world_size % p.model_parallel_size:
        return
    if ranks % share:
        text = "{expert_model_parallel_size} x {expert_tensor_parallel_size} = {share} does not divide dp x cp x tp = "
        yield say(text + "{ranks}: use {fit}", share=share, ranks=ranks, fit=any_divisor(ranks))
    elif p.shared_out and ranks // share % p.num_distributed_optimizer_instances:
        text = "{=num_distributed_optimizer_instances} does not divide the {n} ranks that hold the same experts: use "
        yield say(text + "{fit}", n=ranks // share, fit=any_divisor(ranks // share))


def expert_effects(config: Config, say: Say) -> Iterator[Problem]:
    m, p = config.model, config.parallel
    if not m.num_experts:
        return
    tp = p.tensor_model_parallel_size
    if p.expert_tensor_parallel_size == 1 < tp and m.expert_ffn_size % tp == 0:
        text = "{=expert_tensor_parallel_size}: each expert is whole on a rank; Megatron-LM's default is "
        yield say(text + "{=tensor_model_parallel_size}, which --expert-tensor-parallel-size {tp} gives", tp=tp)
    kinds = m.moe_router_load_balancing_type
    if "global_aux_loss" in m.balancing:
        text = "{=moe_router_load_balancing_type}: it depends on how dp and accumulation share out a batch, as in "
        yield say(text + "Megatron-LM; seq_aux_loss and {--moe_router_enable_expert_bias} do not")
    if kinds not in (("aux_loss",), ("none",), ("sinkhorn",)) and not m.balancing:
        yield say("{=moe_router_load_balancing_type} has no effect with {=moe_aux_loss_coeff}; give one, as 0.01")
