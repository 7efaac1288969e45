"""Contradictions in the options of the training, and options of it without effect."""

from collections.abc import Iterator
from dataclasses import fields

from megalite.config.options import Config, OptimConfig, TrainConfig
from megalite.config.pattern import read_batch_schedule
from megalite.config.problem import Problem, Say

RECOMPUTED = ("core_attn", "layernorm", "mlp")
QUINTIC = 5  # steps that belong together (kernels/newton_schulz.py)
_OF_EXPERTS = ("moe", "shared_experts")  # Megatron-LM takes these of a dense model, which has none


def training_problems(config: Config, say: Say) -> Iterator[Problem]:
    t, p, c = config.train, config.precision, config.checkpoint
    if t.train_iters is not None and t.train_samples is not None:
        yield say("{train_iters} and {train_samples} exclude each other; give one")
    if t.train_iters is None and t.train_samples is None:
        yield say("{train_iters} is not set; give {--train-iters} or {--train-samples}")
    if not t.skip_train:
        yield from _rate(t, config.optim, say)
    yield from _optimizer(config.optim, say)
    if p.min_loss_scale > p.initial_loss_scale:
        yield say("{=min_loss_scale} is above {=initial_loss_scale}; lower it")
    if p.bf16 and p.fp16:
        yield say("{bf16} and {fp16} exclude each other; give one")
    yield from _batches(t, config.model.seq_length, say)
    yield from _recomputation(t, say)
    yield from _graph(config, say)
    if t.spike_action == "rollback" and (c.save is None or c.no_save_optim):
        yield say("{=spike_action} needs checkpoints of all of the run; add {--save}, without {--no-save-optim}")


def training_effects(config: Config, say: Say) -> Iterator[Problem]:
    o, p, t = config.optim, config.parallel, config.train
    if p.split_backward and p.pipeline_model_parallel_size == 1:
        yield say("{split_backward} has no effect with {=pipeline_model_parallel_size}: there is no bubble to fill")
    for field in fields(o):
        if field.name.startswith("muon_") and getattr(o, field.name) != field.default and not o.is_muon:
            yield say("{=option} has no effect without {--optimizer} muon", option=field.name)
    if o.optimizer_cpu_offload and p.device == "cpu":
        yield say("{optimizer_cpu_offload} saves nothing with {=device}, where all memory is the host's")
    if o.optimizer_offload_fraction != 1 and not o.optimizer_cpu_offload:
        yield say("{=optimizer_offload_fraction} has no effect without {--optimizer-cpu-offload}")
    if o.optimizer_offload_folder is not None and not o.offloaded:
        yield say("{=optimizer_offload_folder} has no effect without {--optimizer-cpu-offload}")
    if t.min_offloaded_tensor_size != 1 << 20 and not t.cpu_offloading_num_layers:
        yield say("{=min_offloaded_tensor_size} has no effect without {--cpu-offloading-num-layers}")
    if o.lars_trust_coefficient != 0.001 and o.optimizer != "lars":
        yield say("{=lars_trust_coefficient} has no effect without {--optimizer} lars")
    if t.step_batch_size_schedule is not None and t.train_iters is not None:
        yield say(
            "{step_batch_size_schedule} with {train_iters}: an iteration of warm-up and decay counts {micro_batch_size}"
            " x data parallel samples, as in Megatron-LM; {--train-samples} and --lr-*-samples say what you mean"
        )
    if t.spike_action != "log" and not (t.check_for_spiky_loss or t.check_for_large_grads):
        yield say("{=spike_action} has no effect without {--check-for-spiky-loss} or {--check-for-large-grads}")
    if t.recompute_modules != ("core_attn",) and t.recompute_granularity != "selective":
        text = "{=recompute_modules} has no effect without {--recompute-granularity} selective"
        yield say(text, recompute_modules=" ".join(t.recompute_modules))
    if t.recompute_num_layers is not None and t.recompute_granularity != "full":
        yield say("{=recompute_num_layers} has no effect without {--recompute-granularity} full")


def _rate(t: TrainConfig, o: OptimConfig, say: Say) -> Iterator[Problem]:
    assert o.lr is not None
    unit, other = ("iters", "samples") if t.train_samples is None else ("samples", "iters")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if getattr(o, f"{name}_{other}"):
            yield say(f"{{=option}} with {{train_{unit}}}; use {{{name}_{unit}}}", option=f"{name}_{other}")
    if o.lr_warmup_fraction is not None and (o.lr_warmup_iters or o.lr_warmup_samples):
        yield say("{=lr_warmup_fraction} and a warm-up count; give one", "lr_warmup_iters", "lr_warmup_samples")
    if o.lr_warmup_fraction is not None and not 0 <= o.lr_warmup_fraction <= 1:
        yield say("{=lr_warmup_fraction} is not in [0, 1]; give a fraction of the decay")
    if o.lr_warmup_init > o.lr:
        yield say("{=lr_warmup_init} is above {=lr}; lower it")
    if o.min_lr > o.lr:
        yield say("{=min_lr} is above {=lr}; lower it")
    decoupled_min = "min_lr" if o.decoupled_min_lr is None else "decoupled_min_lr"
    if o.decoupled_lr is not None and getattr(o, decoupled_min) > o.decoupled_lr:
        yield say("{=option} is above {=decoupled_lr}; give a lower {--decoupled-min-lr}", option=decoupled_min)
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


def _optimizer(o: OptimConfig, say: Say) -> Iterator[Problem]:
    start, end, style = o.start_weight_decay, o.end_weight_decay, o.weight_decay_incr_style
    for name in ("start_weight_decay", "end_weight_decay"):
        if style == "constant" and getattr(o, name) is not None:
            yield say("{=option} has no effect on a constant one; add {--weight-decay-incr-style} linear", option=name)
        elif style != "constant" and getattr(o, name) is None:
            yield say("{=weight_decay_incr_style} needs {--start-weight-decay} and {--end-weight-decay}")
            break
    if start is not None and end is not None and end < start:
        yield say("{=end_weight_decay} is below {=start_weight_decay}; weight decay only grows")
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(o, name) == "bf16" and (o.optimizer != "adam" or o.optimizer_impl == "apex"):
            text = "{=option} is for the AdamW that is built in; use {--optimizer} adam, {--optimizer-impl} auto"
            yield say(text, option=name)
    if o.optimizer_impl == "apex" and o.sees_whole_tensors:
        yield say("{=optimizer_impl} is an AdamW, and {=optimizer} is not; use auto")
    if o.optimizer_cpu_offload and o.sees_whole_tensors:
        yield say("{optimizer_cpu_offload} with {=optimizer}: whole tensors are not updated there; use adam or sgd")
    if o.optimizer_cpu_offload and o.optimizer_impl == "apex":
        yield say("{=optimizer_impl} updates on a card, and {optimizer_cpu_offload} on the host; use auto")
    if o.is_muon and o.muon_coefficient_type == "quintic" and o.muon_num_ns_steps % QUINTIC:
        text = "{=muon_num_ns_steps} is no multiple of quintic's {n}; use {n}, or {--muon-coefficient-type} simple"
        yield say(text, n=QUINTIC)


def _batches(t: TrainConfig, seq_length: int, say: Say) -> Iterator[Problem]:
    if t.iterations_to_skip is not None and min(t.iterations_to_skip, default=1) < 1:
        yield say("{=iterations_to_skip}: steps count from 1; remove the others")
    if t.step_batch_size_schedule is not None:
        if t.rampup_batch_size is not None:
            yield say("{=step_batch_size_schedule!r} and {rampup_batch_size} exclude each other; give one")
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


def _recomputation(t: TrainConfig, say: Say) -> Iterator[Problem]:
    if t.recompute_granularity == "full" and t.recompute_method is None:
        yield say("{=recompute_granularity} needs {--recompute-method} uniform or block")
    if t.recompute_granularity != "full" and t.recompute_method is not None:
        yield say("{=recompute_method} has no effect; add {--recompute-granularity} full")
    for name in ("recompute_granularity", "compile", "cuda_graph_impl") if t.cpu_offloading_num_layers else ():
        if getattr(t, name) in ("full", True, "local"):
            yield say("{=cpu_offloading_num_layers} and {=option} exclude each other; give one", option=name)
    for module in t.recompute_modules:
        if module not in RECOMPUTED and module not in _OF_EXPERTS:
            text = "{=recompute_modules} is not a part of a dense block; use {known}"
            yield say(text, recompute_modules=module, known=", ".join(RECOMPUTED))


def _graph(config: Config, say: Say) -> Iterator[Problem]:
    """Reasons why a recorded micro-batch cannot be replayed for the others."""
    m, p, t, d = config.model, config.parallel, config.train, config.data
    reasons = {
        "needs a CUDA {device}": p.device == "cpu",
        "needs {tensor_model_parallel_size} 1": p.tensor_model_parallel_size > 1,
        "needs {pipeline_model_parallel_size} 1": p.pipeline_model_parallel_size > 1,
        "needs {context_parallel_size} 1": p.context_parallel_size > 1,
        "would repeat one dropout mask; give {--hidden-dropout} 0 {--attention-dropout} 0": bool(
            m.hidden_dropout or m.attention_dropout
        ),
        "would repeat one micro-batch's documents; drop {--reset-attention-mask}": d.reset_attention_mask,
        "and {--compile} exclude each other; give one": t.compile,
    }
    for why, holds in reasons.items():
        if holds and t.cuda_graph_impl != "none":
            yield say(f"{{=cuda_graph_impl}} {why} (or drop {{--cuda-graph-impl}})")
