"""Every contradiction in a configuration, all at once: those of option_rules.txt, and those that need more than its
conditions. Each is a Problem (problem.py). Pure, as options.py is."""

import contextlib
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megalite.config.check_model import any_of, divisors, layout_problems, model_effects, model_problems, multiples
from megalite.config.field import facts_of, flag_of
from megalite.config.options import Config, OptimConfig, Problem, Say, TrainConfig, left_to_checkpoint, options
from megalite.config.pattern import read_batch_schedule, read_split
from megalite.config.registry import KINDS

MOST_MICROBATCHES = 100_000  # of one rank and step
MOST_NEAR = 4096  # how far off another number of ranks is looked for
TERM = re.compile(r"([!?]?)([#*\w]+)(?:(!=|<=|>=|[=<>%~])(.+))?")
ORDER = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "%": operator.mod}
DEFAULTS: Mapping[str, object] = MappingProxyType({f.name: f.default for _, f in options()})
Term = tuple[str, str, str | None, str]  # ! or ? or "", name, relation, other side


def check(
    config: Config, world_size: int | None = None, *, complete: bool = False, unclear: Iterable[str] = ()
) -> list[Problem]:
    """Every contradiction. `world_size`: also those that depend on it. `complete`: what --load could bring is in
    `config` already; without it neither a missing vocabulary is one, nor what --use-checkpoint-args takes from the
    checkpoint. `unclear`: options whose value could not be read."""
    c, unclear = config.checkpoint, set(unclear)
    wrong = {name: problem for name, problem in _ranges(config) if name not in unclear}
    if not complete:
        unclear |= left_to_checkpoint(config)
    unclear |= wrong.keys()
    config = _made_plausible(config, unclear)
    say = Say(config)
    complete = complete or (c.load is None and c.pretrained_checkpoint is None)
    layers = [name for name, of in KINDS["metric"].added.items() if of == "layer"]
    problems = [
        *broken("contradictions", say, complete=complete, layer_metric=layers[0] if layers else ""),
        *model_problems(config.model, say),
        *layout_problems(config, say),
        *(() if config.train.skip_train else _rate(config.train, config.optim, say)),
        *_batches(config.train, config.model.seq_length, say),
        *_texts(config.log.name, config.data.split, say),
        *(_world(config, world_size, say) if world_size is not None else ()),
    ]
    return [*wrong.values(), *(problem for problem in problems if not problem.concerns(unclear))]


def without_effect(config: Config, *, complete: bool = False) -> list[Problem]:
    """Options that do nothing, or less than expected, beside others; no errors, as Megatron-LM accepts them.
    `complete`: as of `check`."""
    unclear = set() if complete else left_to_checkpoint(config)
    say = Say(_made_plausible(config, unclear))
    found = [*broken("without effect", say), *model_effects(config.model, say)]
    return [note for note in found if not note.concerns(unclear)]


@cache
def rules_of(part: str) -> tuple[tuple[list[list[Term]], str], ...]:
    """(conditions, each of which is some terms, and the text) of each rule of a part of the file."""
    file = Path(__file__).with_name("option_rules.txt").read_text(encoding="utf-8")
    rules, text = [], file.partition(f"\n# {part}\n")[2].partition("\n# ")[0]
    for line in filter(None, text.replace("\\\n", "").replace("\n    ", "\t").split("\n")):
        conditions, *text = line.split("\t")
        sign, names, more = re.fullmatch(r"(\W?)([\w,]+)(.*)", conditions).groups()  # pyright: ignore
        for name in names.split(","):
            words = (sign + name + more).split(" ")
            terms = [[TERM.fullmatch(term).groups() for term in word.split("|")] for word in words]  # pyright: ignore
            rules.append((terms, " ".join(text)))
    return tuple(rules)


def broken(part: str, say: Say, **facts: Any) -> Iterator[Problem]:
    """What the rules of this part have to say; `facts`: more that they name."""
    for conditions, text in rules_of(part):
        if all(any(holds(term, say, facts) for term in terms) for terms in conditions):
            named = [name for terms in conditions for _, names, *_ in terms for name in re.findall(r"[a-z]\w*", names)]
            (_, first, _, other), more = conditions[0][0], {}
            if "{divisors}" in text:
                more["divisors"] = any_of(divisors(_value(first, say, facts)))
            elif "{multiples}" in text:
                more["multiples"] = multiples(_value(first, say, facts), _value(other, say, facts))
            yield say(text, *(name for name in named if name in say.values), option=named[0], **more, **facts)


def _value(term: str, say: Say, facts: Mapping[str, Any]) -> Any:
    """Of a number, an option, a property, a fact, a length or a product of these."""
    if len(factors := term.split("*")) > 1:
        values = [_value(factor, say, facts) for factor in factors]
        return None if None in values else math.prod(values)
    if re.match(r"[-\d.]", term):
        return float(term) if "." in term else int(term)
    value = facts[term] if term in facts else say.value(term.removeprefix("#"))
    return len(value) if term[0] == "#" and value is not None else value


def holds(term: Term, say: Say, facts: Mapping[str, Any]) -> bool:
    """Whether a term of a condition holds."""
    sign, name, relation, other = term
    value = _value(name, say, facts)
    if relation is None:
        return sign == "?" or (value not in (DEFAULTS.get(name, False), "", ())) != (sign == "!")
    if relation == "~":
        return (other in str(value)) != (sign == "!")
    if relation in ("=", "!="):
        alike = any(str(value) == one or (one in say.values and value == say.values[one]) for one in other.split(","))
        return alike == (relation == "=")
    bound = _value(other, say, facts)
    return (value is not None and bound is not None and bool(ORDER[relation](value, bound))) != (sign == "!")


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
            if f.name not in left_to_checkpoint(config):
                preset = " or a --preset" * (section == "model")
                yield f.name, Problem(f"{f.name}=0 is not set; give {flag_of(f.name)}{preset}", [f.name])
        elif why := facts.problem(value):
            yield f.name, Problem(f"{f.name}={value or 0} {why}", [f.name])
    if config.optim.lr is None and not config.train.skip_train:
        yield "lr", Problem("lr is not set; give --lr", ["lr"])


def _texts(name: str | None, split: str | None, say: Say) -> Iterator[Problem]:
    if name is not None and not re.fullmatch(r"\w[\w.+=,-]{0,79}", name):
        yield say("{=name!r} cannot name a directory in runs; use at most 80 letters, digits and - _ . + = ,")
    if split is not None:
        try:
            read_split(split)
        except ValueError as error:
            yield say("{=split!r} {error}", error=error)


def _rate(t: TrainConfig, o: OptimConfig, say: Say) -> Iterator[Problem]:
    unit = "iters" if t.train_samples is None else "samples"
    wsd_name, decay_name = f"lr_wsd_decay_{unit}", f"lr_decay_{unit}"
    decay = getattr(o, decay_name) or getattr(t, f"train_{unit}")
    warm_up = getattr(o, f"lr_warmup_{unit}")
    if o.lr_warmup_fraction is not None and decay:
        warm_up = o.lr_warmup_fraction * decay
    elif decay and warm_up >= decay:
        text = f"{{=lr_warmup_{unit}}} is not below {{=option}}; shorten the warm-up"
        yield say(text, f"train_{unit}", option=decay_name, **{decay_name: decay})
    if o.lr_decay_style != "WSD":
        return
    if (wsd := getattr(o, wsd_name)) and decay and wsd > decay - warm_up:
        text = "{=option} is longer than what the warm-up leaves, {left:g}; shorten it"
        yield say(text, decay_name, f"train_{unit}", f"lr_warmup_{unit}", option=wsd_name, left=decay - warm_up)


def _batches(t: TrainConfig, seq_length: int, say: Say) -> Iterator[Problem]:
    if t.iterations_to_skip is not None and min(t.iterations_to_skip, default=1) < 1:
        yield say("{=iterations_to_skip}: steps count from 1; remove the others")
    if t.step_batch_size_schedule is not None:
        try:
            last = read_batch_schedule(t.step_batch_size_schedule, seq_length)[-1][1]
            if t.global_batch_size not in (None, last):  # Megatron-LM's own GPT-3 script gives both
                text = "{=step_batch_size_schedule!r} does not end with {=global_batch_size}; give {last}"
                yield say(text + ", or one of both", last=last)
        except ValueError as error:
            yield say("{=step_batch_size_schedule!r} {error}", "seq_length", error=error)
    if t.rampup_batch_size is not None and len(t.rampup_batch_size) == 3 and t.global_batch_size is not None:
        first, increment, _ = t.rampup_batch_size
        way = t.global_batch_size - first
        if way < 0 or increment < 1 or way % increment:
            text = "{rampup_batch_size}={first} {increment}: {=global_batch_size} is not reached in such steps; "
            yield say(text + "choose a divisor of {way}", first=first, increment=increment, way=way)


def _world(config: Config, world_size: int, say: Say) -> Iterator[Problem]:
    p = config.parallel
    unit, cp, dp = p.model_parallel_size, p.context_parallel_size, p.data_parallel_size
    if dp is None:
        dp = 1 if world_size % unit else world_size // unit  # what does not divide by the micro-batch is wrong with any
    by_cp = f" x cp {cp}" * (cp > 1)
    shape = f"tp {p.tensor_model_parallel_size} x pp {p.pipeline_model_parallel_size}{by_cp}"
    facts = dict(world=world_size, last=world_size - 1, unit=unit, shape=shape, ranks=dp * unit)
    facts |= dict(dp=dp, by_cp=by_cp, sharing=dp * cp, evaluated=config.train.eval_batch_size(dp))
    share = p.expert_model_parallel_size * p.expert_tensor_parallel_size
    per_stage = world_size // p.pipeline_model_parallel_size
    facts |= dict(share=share, per_stage=per_stage, alike=per_stage // share)
    micro = config.train.eval_micro_batch_size or config.train.micro_batch_size
    beyond = ",".join(str(rank) for rank in config.operations.profile_ranks if rank >= world_size)
    yield from broken("of a world", say, **facts, eval_micro=micro, eval_unit=micro * dp, beyond=beyond)
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
    unit = t.micro_batch_size * dp
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
            text = "{option}{part}={size} is not a multiple of {micro_batch_size} {micro} x data parallel {dp} = {unit}"
            ranks = _ranks_for(size, dp, config)
            text += ": use {fit}" + (", or start {ranks} ranks" if ranks else "")
            yield say(text, fit=multiples(size, unit), ranks=ranks, **words)
    smallest = min((size for _, part, size in sizes if size is not None and part != " increment"), default=unit)
    if t.cuda_graph_impl != "none" and dp > 1 and smallest < 3 * unit:
        text = "{=cuda_graph_impl} replays what is between a step's first and last micro-batch; with data parallel "
        yield say(text + "{dp} give {--global-batch-size} {least} or more, or drop it", dp=dp, least=3 * unit)
