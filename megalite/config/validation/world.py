"""Contradictions between the options and the number of ranks, the world size."""

import contextlib
from collections.abc import Iterator

from megalite.config.option_parsers import parse_batch_schedule
from megalite.config.options import Config
from megalite.config.problems import Problem, comma_separated, divisors, join_or, nearest_multiples

MAX_MICRO_BATCHES = 100_000  # of one rank and step
MAX_DISTANCE = 4096  # maximum difference to a data-parallel size that is suggested instead
LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def world_problems(config: Config, world_size: int) -> Iterator[Problem]:
    dp = _data_parallel_size(config, world_size)
    yield from _layout_problems(config, world_size, dp)
    yield from _rank_problems(config, world_size)
    yield from _sharding_problems(config, dp)
    yield from _expert_problems(config, world_size)
    yield from _batch_size_problems(config, dp)
    if config.log.log_noise_scale and dp == 1:
        yield Problem(
            "log_noise_scale compares the gradients of data-parallel ranks, and there is one; start more ranks, or "
            "leave it out",
            options=("log_noise_scale", *LAYOUT, "data_parallel_size"),
        )


def _data_parallel_size(config: Config, world_size: int) -> int:
    """Return the data-parallel size; 1 if the world size is wrong.

    With 1, the batch is still checked: a size that the micro-batch size does not divide is wrong for any world size.
    """
    parallel = config.parallel
    if parallel.data_parallel_size is not None:
        return parallel.data_parallel_size
    return 1 if world_size % parallel.model_parallel_size else world_size // parallel.model_parallel_size


def _layout_problems(config: Config, world_size: int, dp: int) -> Iterator[Problem]:
    parallel = config.parallel
    unit, cp = parallel.model_parallel_size, parallel.context_parallel_size
    by_cp = f" x cp {cp}" if cp > 1 else ""
    shape = f"tp {parallel.tensor_model_parallel_size} x pp {parallel.pipeline_model_parallel_size}{by_cp}"
    if parallel.data_parallel_size is None:
        if world_size % unit:
            yield Problem(
                f"world size {world_size} is not a multiple of {shape} = {unit}; start a multiple of it, as with "
                f"--nproc {unit}",
                options=(*LAYOUT, "data_parallel_size", "nproc"),
            )
    elif dp * unit != world_size:
        yield Problem(
            f"data_parallel_size={dp} x {shape} is not the world size {world_size}; start {dp * unit} ranks, or leave "
            "it out",
            options=(*LAYOUT, "data_parallel_size"),
        )


def _rank_problems(config: Config, world_size: int) -> Iterator[Problem]:
    operations, dry_run_rank = config.operations, config.train.dry_run_rank
    beyond = [rank for rank in operations.profile_ranks if rank >= world_size]
    if operations.max_restarts and not config.checkpoint.save:
        yield Problem(
            f"max_restarts={operations.max_restarts} has no effect; add --save", options=("max_restarts", "save")
        )
    if beyond:
        yield Problem(
            f"profile_ranks={comma_separated(beyond)} is not among {world_size} ranks; give 0 to {world_size - 1}",
            options=("profile_ranks",),
        )
    if dry_run_rank is not None and dry_run_rank >= world_size:
        yield Problem(
            f"dry_run_rank={dry_run_rank} is not among {world_size} ranks; give 0 to {world_size - 1}",
            options=("dry_run_rank",),
        )


def _sharding_problems(config: Config, dp: int) -> Iterator[Problem]:
    parallel, train = config.parallel, config.train
    cp, instances = parallel.context_parallel_size, parallel.num_distributed_optimizer_instances
    if parallel.param_cpu_offload and dp * cp <= instances:
        yield Problem(
            "param_cpu_offload needs 2 or more ranks that shard weights: start more, or leave it out",
            options=("param_cpu_offload",),
        )
    micro_batch_size = train.eval_micro_batch_size or train.micro_batch_size
    batch_size, unit = train.eval_batch_size(dp), micro_batch_size * dp
    is_eval_size_set = train.eval_global_batch_size is not None or train.eval_micro_batch_size is not None
    if is_eval_size_set and batch_size % unit:
        yield Problem(
            f"eval_global_batch_size={batch_size} is not a multiple of eval_micro_batch_size {micro_batch_size} x data "
            f"parallel {dp} = {unit}; change one",
            options=("eval_global_batch_size", "eval_micro_batch_size"),
        )
    if parallel.effective_zero_stage and dp * cp % instances:
        by_cp = f" x cp {cp}" if cp > 1 else ""
        yield Problem(
            f"num_distributed_optimizer_instances={instances} does not divide data parallel {dp}{by_cp}: use "
            f"{join_or(divisors(dp * cp))}",
            options=("num_distributed_optimizer_instances",),
        )


def _expert_problems(config: Config, world_size: int) -> Iterator[Problem]:
    parallel = config.parallel
    instances = parallel.num_distributed_optimizer_instances
    per_replica = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    per_stage = world_size // parallel.pipeline_model_parallel_size
    if not config.model.num_experts or world_size % parallel.model_parallel_size:
        return
    if per_stage % per_replica:
        yield Problem(
            f"expert_model_parallel_size x expert_tensor_parallel_size = {per_replica} does not divide dp x cp x tp = "
            f"{per_stage}: use {join_or(divisors(per_stage))}",
            options=("expert_model_parallel_size", "expert_tensor_parallel_size", "num_experts"),
        )
        return
    replicas = per_stage // per_replica
    if parallel.effective_zero_stage and replicas % instances:
        yield Problem(
            f"num_distributed_optimizer_instances={instances} does not divide the {replicas} ranks that hold the same "
            f"experts: use {join_or(divisors(replicas))}",
            options=("num_distributed_optimizer_instances", "num_experts"),
        )


def _batch_size_problems(config: Config, dp: int) -> Iterator[Problem]:
    train = config.train
    micro_batch_size = train.micro_batch_size
    unit = micro_batch_size * dp
    sizes = _batch_sizes(config)
    for name, part, size in sizes:
        if size > MAX_MICRO_BATCHES * unit:
            yield Problem(
                f"{name}{part}={size} is more than {MAX_MICRO_BATCHES} micro-batches of {unit}; raise micro_batch_size "
                "or lower it",
                options=(name, "micro_batch_size"),
            )
        if size % unit:
            ranks = _nearest_world_sizes(size, dp, config)
            or_ranks = f", or start {ranks} ranks" if ranks else ""
            yield Problem(
                f"{name}{part}={size} is not a multiple of micro_batch_size {micro_batch_size} x data parallel {dp} = "
                f"{unit}: use {nearest_multiples(size, unit)}{or_ranks}",
                options=(name, "micro_batch_size"),
            )
    smallest = min((size for _, part, size in sizes if part != " increment"), default=unit)
    if train.cuda_graph_impl != "none" and dp > 1 and smallest < 3 * unit:
        yield Problem(
            f"cuda_graph_impl={train.cuda_graph_impl} replays what is between a step's first and last micro-batch; "
            f"with data parallel {dp} give --global-batch-size {3 * unit} or more, or drop it",
            options=("cuda_graph_impl", "global_batch_size"),
        )


def _batch_sizes(config: Config) -> list[tuple[str, str, int]]:
    """Return (option, part of its value, size) for every global batch size and the increment of a ramp-up."""
    train = config.train
    sizes: list[tuple[str, str, int]] = []
    if train.global_batch_size is not None:
        sizes.append(("global_batch_size", "", train.global_batch_size))
    if train.step_batch_size_schedule is not None:
        with contextlib.suppress(ValueError):  # batch_size_problems reports it
            steps = parse_batch_schedule(train.step_batch_size_schedule, config.model.seq_length)
            sizes += [("step_batch_size_schedule", " size", size) for _, size in steps]
    if train.rampup_batch_size is not None and len(train.rampup_batch_size) == 3:
        first, increment, _ = train.rampup_batch_size
        sizes += [("rampup_batch_size", " start", first), ("rampup_batch_size", " increment", increment)]
    return sizes


def _nearest_world_sizes(size: int, dp: int, config: Config) -> str:
    """Return the nearest numbers of ranks, below and above, that divide a batch of `size`, as text; "" without any."""
    parallel, micro_batch_size = config.parallel, config.train.micro_batch_size
    if parallel.data_parallel_size is not None:
        return ""
    below = range(dp - 1, max(0, dp - MAX_DISTANCE), -1)
    above = range(dp + 1, min(4 * dp, dp + MAX_DISTANCE) + 1)
    nearest = []
    for candidates in (below, above):
        fitting = next((n for n in candidates if size % (micro_batch_size * n) == 0), None)
        if fitting is not None:
            nearest.append(fitting * parallel.model_parallel_size)
    return join_or(nearest) if nearest else ""
