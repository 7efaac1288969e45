"""Every contradiction in a configuration, all at once: those of option_rules.txt, and those that need more than its
conditions. Each is a Problem (problem.py). Pure, as options.py is."""

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields, replace

from megalite.config.check_experts import expert_effects, expert_problems, expert_world_problems
from megalite.config.check_model import layout_problems, model_effects, model_problems
from megalite.config.check_sharing import context_problems, instances_problem, sharing_effects, sharing_problems
from megalite.config.check_training import training_problems
from megalite.config.field import facts_of, flag_of
from megalite.config.option_rules import broken
from megalite.config.options import Config, DataConfig, ModelConfig, options
from megalite.config.pattern import read_batch_schedule, read_split
from megalite.config.problem import Problem, Say

MOST_MICROBATCHES = 100_000  # of one rank and step
MOST_NEAR = 4096  # how far off another number of ranks is looked for


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
    say, m = Say(config), config.model
    complete = complete or (c.load is None and c.pretrained_checkpoint is None)
    problems = [
        *broken("contradictions", say, complete=complete),
        *model_problems(m, config.parallel.tensor_model_parallel_size, say),
        *layout_problems(config, say),
        *training_problems(config, say),
        *sharing_problems(config, say),
        *context_problems(config, say),
        *expert_problems(config, say),
        *_data(config.data, say),
        *_run_name(config.log.name, say),
        *(_world(config, world_size, say) if world_size is not None else ()),
    ]
    return [*wrong.values(), *(problem for problem in problems if not problem.concerns(unclear))]


def without_effect(config: Config) -> list[Problem]:
    """Options that do nothing, or less than expected, beside others; no errors, as Megatron-LM accepts them."""
    say = Say(config)
    effects = [*model_effects(config.model, say), *sharing_effects(config, say), *expert_effects(config, say)]
    return [*broken("without effect", say), *effects]


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


def _run_name(name: str | None, say: Say) -> Iterator[Problem]:
    if name is not None and not re.fullmatch(r"\w[\w.+=,-]{0,79}", name):
        yield say("{=name!r} cannot name a directory in runs; use at most 80 letters, digits and - _ . + = ,")


def _data(d: DataConfig, say: Say) -> Iterator[Problem]:
    if d.split is not None:
        try:
            read_split(d.split)
        except ValueError as error:
            yield say("{=split!r} {error}", error=error)
    per_split = " ".join(n for n in ("train_data_path", "valid_data_path", "test_data_path") if getattr(d, n))
    ways = [n for n in ("data_path", "data_args_path", "per_split_data_args_path", "mock_data") if getattr(d, n)]
    ways += [per_split] if per_split else []
    if len(ways) > 1 and not (d.mock_data and d.data_path):
        text = "{named} exclude each other; give the data in one way"
        yield say(text, *" ".join(ways).split(), named=" and ".join(ways))


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
    yield from expert_world_problems(config, world_size, say)
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
