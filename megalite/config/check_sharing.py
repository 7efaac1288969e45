"""What contradicts itself, or has no effect, in what data-parallel ranks share out (ZeRO)."""

from collections.abc import Iterator

from megalite.config.check_model import any_divisor
from megalite.config.options import Config
from megalite.config.parallel_options import SHARED_OUT
from megalite.config.problem import Problem, Say


def sharing_problems(config: Config, say: Say) -> Iterator[Problem]:
    p, stage = config.parallel, config.parallel.shared_out
    strategy = p.data_parallel_sharding_strategy
    if p.zero_stage is not None and p.use_megatron_fsdp:
        named, other = (
            (3, "use_megatron_fsdp")
            if strategy is None
            else (SHARED_OUT.index(strategy), "data_parallel_sharding_strategy")
        )
        if named != p.zero_stage:
            text = "{=zero_stage} and {=option}, which is stage {named}; give one"
            yield say(text, "use_megatron_fsdp", option=other, named=named)
    if stage and not p.use_distributed_optimizer:
        text = "{=use_distributed_optimizer} and ZeRO stage {stage}, which shares out the optimizer; give one"
        yield say(text, "zero_stage", "use_megatron_fsdp", stage=stage)
    if stage > 1 and config.train.cuda_graph_impl != "none":
        text = "{=cuda_graph_impl} replays memory that stays, and at ZeRO stage {stage} it comes and goes; use "
        yield say(text + "{--zero-stage} 1, or drop it", "use_megatron_fsdp", stage=stage)
    if p.outer_dp_sharding_strategy == "optim" and p.num_distributed_optimizer_instances == 1:
        yield say("{=outer_dp_sharding_strategy} needs {--num-distributed-optimizer-instances} above 1")


def instances_problem(config: Config, dp: int, say: Say) -> Iterator[Problem]:
    """Where `dp` ranks do not split into as many sets."""
    n = config.parallel.num_distributed_optimizer_instances
    if config.parallel.shared_out and dp % n:
        text = "{=num_distributed_optimizer_instances} does not divide data parallel {dp}: use {fit}"
        yield say(text, dp=dp, fit=any_divisor(dp))


def sharing_effects(config: Config, say: Say) -> Iterator[Problem]:
    p = config.parallel
    if p.zero_hold != "auto" and p.shared_out < 3:
        yield say("{=zero_hold} has no effect below ZeRO stage 3")
    if p.num_distributed_optimizer_instances > 1 and not p.shared_out:
        yield say("{=num_distributed_optimizer_instances} has no effect at ZeRO stage 0")
