"""Every contradiction in a configuration, all at once. Each is a Problem (problem.py). Pure, as options.py is."""

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields, replace

from megalite.config.check_files import checkpoint_problems, data_problems, files_effects
from megalite.config.check_model import layout_problems, model_effects, model_problems
from megalite.config.check_sharing import context_problems, instances_problem, sharing_effects, sharing_problems
from megalite.config.check_training import training_effects, training_problems
from megalite.config.field import facts_of, flag_of
from megalite.config.options import Config, ModelConfig, options
from megalite.config.pattern import read_batch_schedule
from megalite.config.problem import Problem, Say

MOST_MICROBATCHES = 100_000  # of one rank and step
MOST_NEAR = 4096  # how far off another number of ranks is looked for
NEEDS = {  # option -> the one without which it has no effect
    "num_query_groups": "group_query_attention",
    "cp_comm_type": "context_parallel_size",
    "zero_bubble_max_pending_backward": "split_backward",
    "decoupled_min_lr": "decoupled_lr",
    "grad_reduce_in_bf16": "bf16",
    "data_parallel_sharding_strategy": "use_megatron_fsdp",
    "save_interval": "save",
    "use_pytorch_profiler": "profile",
    "manual_gc_interval": "manual_gc",
    "log_progress": "save",
    **{f"log_{x}_to_tensorboard": "tensorboard_dir" for x in ("timers", "validation_ppl", "memory", "world_size")},
}


def check(
    config: Config, world_size: int | None = None, *, complete: bool = False, unclear: Iterable[str] = ()
) -> list[Problem]:
    """Every contradiction. `world_size`: also those that depend on it. `complete`: also a vocabulary that is missing,
    which --load could bring. `unclear`: options whose value could not be read."""
    c, unclear = config.checkpoint, set(unclear)
    wrong = {name: problem for name, problem in _ranges(config) if name not in unclear}
    if c.use_checkpoint_args:  # the checkpoint will say; checked again then
        unclear |= {f.name for f in fields(ModelConfig) if facts_of(f).required and not getattr(config.model, f.name)}
    unclear |= wrong.keys()
    config = _made_plausible(config, unclear)
    say, tp = Say(config), config.parallel.tensor_model_parallel_size
    problems = [
        *model_problems(config.model, tp, say),
        *layout_problems(config, say),
        *training_problems(config, say),
        *sharing_problems(config, say),
        *context_problems(config, say),
        *checkpoint_problems(c, say),
        *_machine(config, say),
        *data_problems(config.data, tp, complete or (c.load is None and c.pretrained_checkpoint is None), say),
        *(_world(config, world_size, say) if world_size is not None else ()),
    ]
    return [*wrong.values(), *(problem for problem in problems if not problem.concerns(unclear))]


def without_effect(config: Config) -> list[Problem]:
    """Options that do nothing, or less than expected, beside others; no errors, as Megatron-LM accepts them."""
    say = Say(config)
    given = {f.name for _, f in options() if say.values[f.name] != f.default}
    effects = [*model_effects(config.model, say), *training_effects(config, say)]
    effects += [*files_effects(config, say), *sharing_effects(config, say)]
    for name, needed in NEEDS.items():
        if name in given and needed not in given:
            shown = "{option}" if say.values[name] is True else "{=option}"
            effects.append(say(f"{shown} has no effect without {{--{needed}}}", option=name))
    return effects


def _made_plausible(config: Config, unclear: Collection[str]) -> Config:
    """`config` with defaults for what is unclear, so that all else can be checked."""
    for section, f in options():
        if f.name in unclear:
            stand_in = facts_of(f).stand_in
            value = f.default if stand_in is None else stand_in
            config = replace(config, **{section: replace(getattr(config, section), **{f.name: value})})
    return config


def _ranges(config: Config) -> Iterator[tuple[str, Problem]]:
    """(option, the problem that its own facts have with its value)"""
    values = Say(config).values
    for section, f in options():
        value, facts = values[f.name], facts_of(f)
        if value == 0 and facts.required:
            if section != "model" or not config.checkpoint.use_checkpoint_args:
                preset = " or a --preset" * (section == "model")
                yield f.name, Problem(f"{f.name}=0 is not set; give {flag_of(f.name)}{preset}", [f.name])
        elif why := facts.problem(value):
            yield f.name, Problem(f"{f.name}={value or 0} {why}", [f.name])
    if config.optim.lr is None and not config.train.skip_train:
        yield "lr", Problem("lr is not set; give --lr", ["lr"])


def _machine(config: Config, say: Say) -> Iterator[Problem]:
    p, o = config.parallel, config.operations
    if config.log.name is not None and config.log.run_dir is not None:
        yield say("{name} and {run_dir} exclude each other; give one")
    if config.log.name is not None and not re.fullmatch(r"\w[\w.+=,-]{0,79}", config.log.name):
        yield say("{=name!r} cannot name a directory in runs; use at most 80 letters, digits and - _ . + = ,")
    written = {"run_dir": config.log.run_dir, "data_cache_path": config.data.data_cache_path}
    for name, value in {**written, "export_hf": config.checkpoint.export_hf}.items():
        if value is not None and "://" in value:
            yield say("{=option!r} is a URL; give a local directory", option=name)
    if p.distributed_backend == "mpi":
        yield say(
            "{=distributed_backend} is in no torch wheel; mpirun starts ranks of nccl and gloo as well: remove it"
        )
    if p.distributed_backend == "nccl" and p.device == "cpu":
        yield say("{=distributed_backend} does not run on {=device}; use gloo")
    if config.train.as_rank is not None and not config.train.dry_run:
        yield say("{=as_rank} is for a dry run, which it needs; add {--dry-run}")
    if o.profile and o.profile_step_end <= o.profile_step_start:
        yield say("{=profile_step_end} is not above {=profile_step_start}; raise it")


def _world(config: Config, world_size: int, say: Say) -> Iterator[Problem]:
    p = config.parallel
    unit, cp = p.model_parallel_size, p.context_parallel_size
    dp, sizes = max(1, world_size // unit), ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    shape = f"tp {p.tensor_model_parallel_size} x pp {p.pipeline_model_parallel_size}"
    if cp > 1:
        shape, sizes = f"{shape} x cp {cp}", (*sizes, "context_parallel_size")
    if p.data_parallel_size is not None:
        dp = p.data_parallel_size
        if (ranks := dp * unit) != world_size:
            text = "{=data_parallel_size} x {shape} is not the world size {world}; start {ranks} ranks, or "
            yield say(text + "leave it out", *sizes, shape=shape, world=world_size, ranks=ranks)
    elif world_size % unit:
        text = "world size {world} is not a multiple of {shape} = {unit}; start a multiple of it, as with "
        yield say(text + "{--nproc} {unit}", *sizes, world=world_size, shape=shape, unit=unit)
        dp = 1  # what does not divide by the micro-batch is wrong with any
    if config.operations.max_restarts and config.checkpoint.save is None:
        yield say("{=max_restarts} has no effect; add {--save}", max_restarts=config.operations.max_restarts)
    if beyond := tuple(r for r in config.operations.profile_ranks if r >= world_size):
        text = "{=profile_ranks} is not among {world} ranks; give 0 to {last}"
        yield say(text, profile_ranks=beyond, world=world_size, last=world_size - 1)
    if config.train.as_rank is not None and config.train.as_rank >= world_size:
        yield say("{=as_rank} is not among {world} ranks; give 0 to {last}", world=world_size, last=world_size - 1)
    yield from instances_problem(config, dp, say)
    yield from _batch_sizes(config, dp, say)


def _ranks_for(size: int, dp: int, config: Config) -> str:
    """The nearest numbers of ranks, below and above, that share a batch of `size` evenly; "" where there are none."""
    if config.parallel.data_parallel_size is not None:
        return ""
    fits: Callable[[int], bool] = lambda n: size % (config.train.micro_batch_size * n) == 0  # noqa: E731
    near = (range(dp - 1, max(0, dp - MOST_NEAR), -1), range(dp + 1, min(4 * dp, dp + MOST_NEAR) + 1))
    nearest = [next(filter(fits, side), None) for side in near]
    return " or ".join(str(n * config.parallel.model_parallel_size) for n in nearest if n is not None)


def _batch_sizes(config: Config, dp: int, say: Say) -> Iterator[Problem]:
    t = config.train
    unit, evaluated = t.micro_batch_size * dp, t.eval_batch_size(dp)
    micro = t.eval_micro_batch_size or t.micro_batch_size
    if (t.eval_global_batch_size or t.eval_micro_batch_size) and evaluated % (micro * dp):
        text = "{=eval_global_batch_size} is not a multiple of {eval_micro_batch_size} {micro} x data parallel {dp} = "
        text += "{unit}; change one"
        yield say(text, eval_global_batch_size=evaluated, micro=micro, dp=dp, unit=micro * dp)
    sizes = [("global_batch_size", "", t.global_batch_size)]
    if t.step_batch_size_schedule is not None:
        with contextlib.suppress(ValueError):  # told already
            steps = read_batch_schedule(t.step_batch_size_schedule, config.model.seq_length)
            sizes += [("step_batch_size_schedule", " size", size) for _, size in steps]
    if t.rampup_batch_size is not None and len(t.rampup_batch_size) == 3:
        first, increment, _ = t.rampup_batch_size
        sizes += [("rampup_batch_size", " start", first), ("rampup_batch_size", " increment", increment)]
    for name, part, size in sizes:
        words = {"option": name, "part": part, "size": size, "unit": unit, "dp": dp, "micro": t.micro_batch_size}
        if (size or 0) > MOST_MICROBATCHES * unit:
            text = "{option}{part}={size} is more than {most} micro-batches of {unit}"
            yield say(text + "; raise {micro_batch_size} or lower it", most=MOST_MICROBATCHES, **words)
        if size is not None and size % unit:
            low, high = size // unit * unit, -(-size // unit) * unit
            text = "{option}{part}={size} is not a multiple of {micro_batch_size} {micro} x data parallel {dp} = {unit}"
            ranks = _ranks_for(size, dp, config)
            text += ": use {fit}" + (", or start {ranks} ranks" if ranks else "")
            yield say(text, fit=f"{low} or {high}" if low else high, ranks=ranks, **words)
    smallest = min((size for _, part, size in sizes if size is not None and part != " increment"), default=unit)
    if t.cuda_graph_impl != "none" and dp > 1 and smallest < 3 * unit:
        text = "{=cuda_graph_impl} replays what is between a step's first and last micro-batch; with data parallel "
        yield say(text + "{dp} give {--global-batch-size} {least} or more, or drop it", dp=dp, least=3 * unit)
