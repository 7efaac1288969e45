"""What contradicts itself, or has no effect, in what data-parallel ranks share out (ZeRO) and context-parallel ones."""

from collections.abc import Iterator

from megalite.config.check_model import any_divisor, multiples
from megalite.config.options import Config
from megalite.config.parallel_options import SHARED_OUT
from megalite.config.problem import Problem, Say

EXCHANGES = ("allgather", "a2a", "p2p")


def sharing_problems(config: Config, say: Say) -> Iterator[Problem]:
    p = config.parallel
    strategy = p.data_parallel_sharding_strategy
    if p.zero_stage is not None and p.use_megatron_fsdp:
        other = "use_megatron_fsdp" if strategy is None else "data_parallel_sharding_strategy"
        named = 3 if strategy is None else SHARED_OUT.index(strategy)
        if named != p.zero_stage:
            text = "{=zero_stage} and {=option}, which is stage {named}; give one"
            yield say(text, "use_megatron_fsdp", option=other, named=named)


def context_problems(config: Config, say: Say) -> Iterator[Problem]:
    m, (cp, tp) = config.model, (config.parallel.context_parallel_size, config.parallel.tensor_model_parallel_size)
    names = ("context_parallel_size", "tensor_model_parallel_size")
    for word in dict.fromkeys(m.cp_comm_type):
        if word not in EXCHANGES:
            yield say("{=cp_comm_type} is not available; use allgather or a2a", cp_comm_type=word)
    if len(m.cp_comm_type) not in (1, m.num_layers):
        text = "{=cp_comm_type} has {n} values for {=num_layers}; give one, or one for each layer"
        yield say(text, n=len(m.cp_comm_type))
    if cp == 1:
        return
    if m.seq_length % (2 * cp * tp):
        text = "{=context_parallel_size} x 2{tp} does not divide {=seq_length}: use {fit}"
        yield say(text, names[1], tp=f" x tp {tp}" if tp > 1 else "", fit=multiples(m.seq_length, 2 * cp * tp))
    if "a2a" in m.cp_comm_type and m.num_attention_heads % (tp * cp):
        text = "{=cp_comm_type}: {=num_attention_heads} / tp {tp} is not a multiple of cp {cp}; use allgather"
        yield say(text, *names, cp_comm_type="a2a", tp=tp, cp=cp)


def instances_problem(config: Config, dp: int, say: Say) -> Iterator[Problem]:
    """Where the ranks that share out, dp x cp, do not split into as many sets, or into sets of one."""
    n, cp = config.parallel.num_distributed_optimizer_instances, config.parallel.context_parallel_size
    if config.parallel.param_cpu_offload and dp * cp <= n:
        yield say("{param_cpu_offload} needs 2 or more ranks that share out weights: start more, or leave it out")
    if config.parallel.shared_out and dp * cp % n:
        text = "{=num_distributed_optimizer_instances} does not divide data parallel {dp}{cp}: use {fit}"
        yield say(text, dp=dp, cp=f" x cp {cp}" if cp > 1 else "", fit=any_divisor(dp * cp))


def sharing_effects(config: Config, say: Say) -> Iterator[Problem]:
    p = config.parallel
    if "p2p" in config.model.cp_comm_type and p.context_parallel_size > 1:
        yield say("{=cp_comm_type} is taken as allgather, which moves the same bytes", cp_comm_type="p2p")
