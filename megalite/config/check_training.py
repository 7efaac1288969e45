"""Contradictions in the options of the training that option_rules.txt cannot say."""

from collections.abc import Iterator

from megalite.config.options import Config, OptimConfig, TrainConfig
from megalite.config.pattern import read_batch_schedule
from megalite.config.problem import Problem, Say

RECOMPUTED = ("core_attn", "layernorm", "mlp")
_OF_EXPERTS = ("moe", "shared_experts")  # taken of a dense model, too, as by Megatron-LM


def training_problems(config: Config, say: Say) -> Iterator[Problem]:
    t = config.train
    if not t.skip_train:
        yield from _rate(t, config.optim, say)
    yield from _batches(t, config.model.seq_length, say)
    for module in t.recompute_modules:
        known = RECOMPUTED + _OF_EXPERTS + ("moe_act",) * bool(config.model.num_experts)  # which is always so
        if module not in known:
            text = "{=recompute_modules} is not a part of a dense block; use {known}"
            yield say(text, recompute_modules=module, known=", ".join(RECOMPUTED))


def _rate(t: TrainConfig, o: OptimConfig, say: Say) -> Iterator[Problem]:
    unit, other = ("iters", "samples") if t.train_samples is None else ("samples", "iters")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if getattr(o, f"{name}_{other}"):
            yield say(f"{{=option}} with {{train_{unit}}}; use {{{name}_{unit}}}", option=f"{name}_{other}")
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
    wsd = getattr(o, wsd_name)
    if not wsd:
        yield say("{=lr_decay_style} needs {--option}", option=wsd_name)
    elif decay and wsd > decay - warm_up:
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
    if t.rampup_batch_size is not None and len(t.rampup_batch_size) != 3:
        yield say("{=rampup_batch_size} is not three numbers; give START INCREMENT SAMPLES")
    elif t.rampup_batch_size is not None and t.global_batch_size is not None:
        first, increment, _ = t.rampup_batch_size
        way = t.global_batch_size - first
        if way < 0 or increment < 1 or way % increment:
            text = "{rampup_batch_size}={first} {increment}: {=global_batch_size} is not reached in such steps; "
            yield say(text + "choose a divisor of {way}", first=first, increment=increment, way=way)
