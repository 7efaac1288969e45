"""What contradicts itself in a configuration, all of it at once, and what has no effect.

A contradiction is one line: `name=value breaks rule; remedy`. Pure, as options.py is.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from megalite.config.options import (
    REQUIRED,
    SECTIONS,
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    TrainConfig,
    options,
)
from megalite.config.pattern import read_batch_schedule, read_pattern, read_split
from megalite.config.stage_layers import given_stages

RECOMPUTED = ("core_attn", "layernorm", "mlp")
_OF_EXPERTS = ("moe", "shared_experts")  # Megatron-LM takes these of a dense model, which has none
LONGEST_TIMEOUT = 1_000_000
# what Megatron-LM leaves out in silence, or refuses, with yarn
_NOT_YARN = {
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": 1.0,
    "use_rope_scaling": False,
}
MOST_MICROBATCHES = 100_000  # of one rank and step
_POSITIVE = frozenset(
    [
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "kv_channels",
        "num_query_groups",
        "seq_length",
        "max_position_embeddings",
        "make_vocab_size_divisible_by",
        "nproc",
        "data_parallel_size",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "microbatch_group_size_per_virtual_pipeline_stage",
        "ddp_bucket_size",
        "distributed_timeout_minutes",
        "distributed_timeout_seconds_after_init",
        "micro_batch_size",
        "global_batch_size",
        "train_iters",
        "train_samples",
        "eval_global_batch_size",
        "eval_micro_batch_size",
        "lr_decay_iters",
        "lr_decay_samples",
        "eval_interval",
        "exit_interval",
        "recompute_num_layers",
        "save_interval",
        "save_interval_mins",
        "save_retain_interval",
        "keep_last",
        "log_interval",
        "log_memory_interval",
        "tensorboard_log_interval",
        "tensorboard_queue_size",
        "check_weight_hash_across_dp_replicas_interval",
        "vocab_size",
        "padded_vocab_size",
        "loss_scale",
        "min_loss_scale",
        "loss_scale_window",
        "hysteresis",
        "rotary_base",
        "rope_scaling_factor",
        "rotary_seq_len_interpolation_factor",
        "rotary_scaling_factor",
        "yarn_original_max_position_embeddings",
        "yarn_beta_slow",
        "peak_tflops",
    ]
)


def check(
    config: Config, world_size: int | None = None, *, complete: bool = False, unclear: Iterable[str] = ()
) -> list[str]:
    """Every contradiction, each as `name=value breaks rule; remedy`. `world_size` adds what depends on it; `complete`:
    also what --load could still have brought, a vocabulary; `unclear`: options of which nobody knows what was meant."""
    c, unclear = config.checkpoint, set(unclear)
    wrong = {name: line for name, line in _ranges(config) if name not in unclear}
    unset = c.use_checkpoint_args and {n for n in REQUIRED if getattr(config.model, n, None) == 0}
    unclear |= wrong.keys() | (unset or set())  # the checkpoint will say; checked again then
    config = _made_plausible(config, unclear)
    found = [
        *_model(config.model, config.parallel.tensor_model_parallel_size),
        *_layout(config),
        *_length_and_rate(config.train, config.optim),
        *_optimizer(config.optim),
        *_precision(config.precision),
        *_training(config.train, config.model.seq_length),
        *_checkpoint(c),
        *_graph(config),
        *_machine(config),
        *_data(
            config.data,
            config.parallel.tensor_model_parallel_size,
            complete or (c.load is None and c.pretrained_checkpoint is None),
        ),
        *_operations(config),
        *(_world(config, world_size) if world_size is not None else ()),
    ]
    return [*wrong.values(), *(line for line in found if not concerns(line, unclear))]


def concerns(problem: str, names: Iterable[str]) -> bool:
    """Whether a problem speaks of one of these options, by name or as a flag."""
    both = [form for name in names for form in (re.escape(name), "--" + re.escape(name.replace("_", "-")))]
    return bool(both) and re.search(rf"(?<![\w-])({'|'.join(both)})(?![\w-])", problem) is not None


def _made_plausible(config: Config, unclear: Collection[str]) -> Config:
    """`config` with defaults for what is unclear, so that all else can be checked; what is said of them is dropped."""
    stand_ins = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 1, "seq_length": 1, "micro_batch_size": 1}
    parts: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for section, f in options():
        if f.name in unclear:
            parts[section][f.name] = 1.0 if f.name == "lr" else stand_ins.get(f.name, f.default)
    return replace(config, **{s: replace(getattr(config, s), **values) for s, values in parts.items() if values})


def _ranges(config: Config) -> Iterator[tuple[str, str]]:
    """(option, problem)"""
    for section, f in options():
        value = getattr(getattr(config, section), f.name)
        if isinstance(value, float) and not math.isfinite(value):
            yield f.name, f"{f.name}={value} is not finite; give a number"
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
            if f.name != "eval_iters" or value != -1:  # Megatron-LM's lines say so where nothing is to be evaluated
                yield f.name, f"{f.name}={value} is negative; give 0 or more"
        elif value == 0 and f.name in REQUIRED:
            if section != "model" or not config.checkpoint.use_checkpoint_args:
                yield f.name, f"{f.name}=0 is not set; give {'--' + f.name.replace('_', '-')} or a --preset"
        elif value == 0 and f.name in _POSITIVE:
            yield f.name, f"{f.name}=0 is too small; give 1 or more"
    if config.optim.lr is None and not config.train.skip_train:
        yield "lr", "lr is not set; give --lr"


def _model(m: ModelConfig, tp: int) -> Iterator[str]:
    heads = m.num_attention_heads
    if m.kv_channels is None and m.hidden_size % heads:
        yield f"hidden_size={m.hidden_size} is not a multiple of num_attention_heads={heads}; or set --kv-channels"
    elif m.position_embedding_type in ("rope", "yarn") and int(m.head_size * m.rotary_percent) % 2:
        yield f"rotary_percent={m.rotary_percent} rotates an odd number of {m.head_size} channels; make it even"
    if heads % tp:
        yield f"tensor_model_parallel_size={tp} does not divide num_attention_heads={heads}: use {_divisors(heads)}"
    if heads % m.groups:
        yield f"num_query_groups={m.groups} does not divide num_attention_heads={heads}: use {_divisors(heads)}"
    elif m.groups % tp and tp % m.groups:
        yield f"tensor_model_parallel_size={tp} and num_query_groups={m.groups}: neither divides the other; change one"
    if m.ffn_size < 1:
        yield f"hidden_size={m.hidden_size} is too small for the default width of swiglu; give --ffn-hidden-size"
    if m.ffn_size % tp:
        yield f"tensor_model_parallel_size={tp} does not divide ffn_hidden_size={m.ffn_size}; change one"
    if m.seq_length % tp:
        yield f"tensor_model_parallel_size={tp} does not divide seq_length={m.seq_length}; change one"
    if m.positions < m.seq_length:
        yield f"max_position_embeddings={m.positions} is below seq_length={m.seq_length}; make it at least that"
    yield from _window(m)
    for name in ("hidden_dropout", "attention_dropout"):
        if getattr(m, name) >= 1:
            yield f"{name}={getattr(m, name)} drops everything; use less than 1"
    if not 0 < m.rotary_percent <= 1:
        yield f"rotary_percent={m.rotary_percent} is not in (0, 1]; use 1.0"
    yield from _positions(m)


def _positions(m: ModelConfig) -> Iterator[str]:
    kind, pattern = m.position_embedding_type, m.no_rope_freq
    if kind == "learned_absolute" and not m.add_position_embedding:
        yield "add_position_embedding=False with position_embedding_type=learned_absolute; use none, or rope"
    if pattern is not None:
        try:
            read_pattern(pattern, m.num_layers)
        except ValueError as error:
            yield f"no_rope_freq={pattern} {error}"
    if kind != "yarn":
        return
    for name, plain in _NOT_YARN.items():
        if getattr(m, name) != plain:
            yield f"{name}={getattr(m, name)} with position_embedding_type=yarn, which does not know it; leave it away"
    if m.yarn_beta_fast <= m.yarn_beta_slow:
        yield f"yarn_beta_fast={m.yarn_beta_fast:g} is not above yarn_beta_slow={m.yarn_beta_slow:g}; raise it"
    if m.rotary_base == 1:
        yield "rotary_base=1.0 turns all channels alike; use 10000"


def _numbers(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def _window(m: ModelConfig) -> Iterator[str]:
    size, pattern = m.window_size, m.window_attn_skip_freq
    if size is None:
        if pattern is not None:
            yield f"window_attn_skip_freq={pattern} has no effect; add --window-size"
        return
    given = f"window_size={_numbers(size)}"
    if len(size) != 2:
        yield f"{given} is not two numbers; give LEFT,RIGHT, as 4095,0"
        return
    if size[1] not in (0, -1):
        yield f"{given} has {size[1]} on the right, where a causal model sees nothing; use {size[0]},0"
    if size[0] == 0 or size[0] < -1:
        why = "leaves a token itself alone" if size[0] == 0 else "is no window"
        yield f"{given} {why}; give at least 1,0, or -1,0 for no limit"
    if size[0] == -1:
        return
    if pattern is None:
        return
    try:
        if not any(read_pattern(pattern, m.num_layers)):
            yield f"window_attn_skip_freq={pattern} leaves no layer with the window; leave --window-size away"
    except ValueError as error:
        yield f"window_attn_skip_freq={pattern} {error}"


def _layout(config: Config) -> Iterator[str]:
    m, p = config.model, config.parallel
    pp = p.pipeline_model_parallel_size
    if p.context_parallel_size != 1:
        yield f"context_parallel_size={p.context_parallel_size} is not supported yet; use 1"
    try:
        stages = given_stages(m.num_layers, p)
    except ValueError as error:
        yield str(error)
    else:
        chunks = p.num_virtual_stages_per_pipeline_rank or 1
        if stages is None and pp * chunks > m.num_layers:
            yield f"pipeline_model_parallel_size={pp} x {chunks} chunks is above num_layers={m.num_layers}: use fewer"
    size = p.microbatch_group_size_per_virtual_pipeline_stage
    if size is not None and size < pp:
        yield f"microbatch_group_size_per_virtual_pipeline_stage={size} is below pipeline parallel {pp}; raise it"


def _length_and_rate(t: TrainConfig, o: OptimConfig) -> Iterator[str]:
    if t.train_iters is not None and t.train_samples is not None:
        yield "train_iters and train_samples exclude each other; give one"
    if t.train_iters is None and t.train_samples is None:
        yield "train_iters is not set; give --train-iters or --train-samples"
    if t.skip_train:
        return
    assert o.lr is not None
    by_samples = t.train_samples is not None
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        wrong = f"{name}_iters" if by_samples else f"{name}_samples"
        if getattr(o, wrong):
            right = f"{name}_samples" if by_samples else f"{name}_iters"
            yield f"{wrong}={getattr(o, wrong)} with {'train_samples' if by_samples else 'train_iters'}; use {right}"
    if o.lr_warmup_fraction is not None and (o.lr_warmup_iters or o.lr_warmup_samples):
        yield f"lr_warmup_fraction={o.lr_warmup_fraction} and a warm-up count; give one"
    if o.lr_warmup_fraction is not None and not 0 <= o.lr_warmup_fraction <= 1:
        yield f"lr_warmup_fraction={o.lr_warmup_fraction} is not in [0, 1]; give a fraction of the decay"
    if o.lr_warmup_init > o.lr:
        yield f"lr_warmup_init={o.lr_warmup_init} is above lr={o.lr}; lower it"
    unit = "samples" if by_samples else "iters"
    decay = getattr(o, f"lr_decay_{unit}") or getattr(t, f"train_{unit}")
    warm_up = getattr(o, f"lr_warmup_{unit}")
    if o.lr_warmup_fraction is not None and decay:
        warm_up = o.lr_warmup_fraction * decay
    if decay and warm_up >= decay and o.lr_warmup_fraction is None:
        yield f"lr_warmup_{unit}={warm_up} is not below lr_decay_{unit}={decay}; shorten the warm-up"
    if o.min_lr > o.lr:
        yield f"min_lr={o.min_lr} is above lr={o.lr}; lower it"
    decoupled_min = o.min_lr if o.decoupled_min_lr is None else o.decoupled_min_lr
    if o.decoupled_lr is not None and decoupled_min > o.decoupled_lr:
        name = "min_lr" if o.decoupled_min_lr is None else "decoupled_min_lr"
        yield f"{name}={decoupled_min} is above decoupled_lr={o.decoupled_lr}; give a lower --decoupled-min-lr"
    if o.lr_decay_style == "WSD" and not (o.lr_wsd_decay_samples if by_samples else o.lr_wsd_decay_iters):
        yield f"lr_decay_style=WSD needs --lr-wsd-decay-{'samples' if by_samples else 'iters'}"
    wsd = getattr(o, f"lr_wsd_decay_{unit}") or 0
    if o.lr_decay_style == "WSD" and decay and wsd > decay - warm_up:
        yield f"lr_wsd_decay_{unit}={wsd} is longer than what the warm-up leaves, {decay - warm_up:g}; shorten it"


def _optimizer(o: OptimConfig) -> Iterator[str]:
    start, end, style = o.start_weight_decay, o.end_weight_decay, o.weight_decay_incr_style
    for name in ("start_weight_decay", "end_weight_decay"):
        if style == "constant" and getattr(o, name) is not None:
            yield f"{name}={getattr(o, name)} has no effect on a constant one; add --weight-decay-incr-style linear"
        elif style != "constant" and getattr(o, name) is None:
            yield f"weight_decay_incr_style={style} needs --start-weight-decay and --end-weight-decay"
            break
    if start is not None and end is not None and end < start:
        yield f"end_weight_decay={end} is below start_weight_decay={start}; weight decay only grows"
    for name in ("adam_beta1", "adam_beta2"):
        if getattr(o, name) >= 1:
            yield f"{name}={getattr(o, name)} is not below 1; use 0.9 to 0.999"
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(o, name) == "bf16" and (o.optimizer != "adam" or o.optimizer_impl == "apex"):
            yield f"{name}=bf16 is for the AdamW that is built in; use --optimizer adam, --optimizer-impl auto"


def _precision(p: PrecisionConfig) -> Iterator[str]:
    if p.min_loss_scale > p.initial_loss_scale:
        yield f"min_loss_scale={p.min_loss_scale} is above initial_loss_scale={p.initial_loss_scale}; lower it"
    if p.bf16 and p.fp16:
        yield "bf16 and fp16 exclude each other; give one"


def _training(t: TrainConfig, seq_length: int) -> Iterator[str]:
    if t.iterations_to_skip is not None and min(t.iterations_to_skip, default=1) < 1:
        yield f"iterations_to_skip={_numbers(t.iterations_to_skip)}: steps count from 1; leave others away"
    if t.step_batch_size_schedule is not None:
        given = f"step_batch_size_schedule={t.step_batch_size_schedule!r}"
        if t.rampup_batch_size is not None:
            yield f"{given} and rampup_batch_size exclude each other; give one"
        try:
            last = read_batch_schedule(t.step_batch_size_schedule, seq_length)[-1][1]
            if t.global_batch_size not in (None, last):  # Megatron-LM's own GPT-3 script gives both
                yield f"{given} does not end with global_batch_size={t.global_batch_size}; give {last}, or one of both"
        except ValueError as error:
            yield f"{given} {error}"
    if t.recompute_granularity == "full" and t.recompute_method is None:
        yield "recompute_granularity=full needs --recompute-method uniform or block"
    if t.recompute_granularity != "full" and t.recompute_method is not None:
        yield f"recompute_method={t.recompute_method} has no effect; add --recompute-granularity full"
    for module in t.recompute_modules:
        if module not in RECOMPUTED and module not in _OF_EXPERTS:
            yield f"recompute_modules={module} is no part of a dense block; use {', '.join(RECOMPUTED)}"
    if t.rampup_batch_size is not None and len(t.rampup_batch_size) != 3:
        yield f"rampup_batch_size={t.rampup_batch_size} is not three numbers; give START INCREMENT SAMPLES"
    elif t.rampup_batch_size is not None and t.global_batch_size is not None:
        first, increment, _ = t.rampup_batch_size
        if first > t.global_batch_size or increment < 1 or (t.global_batch_size - first) % increment:
            yield (
                f"rampup_batch_size={first} {increment}: global_batch_size={t.global_batch_size} is not reached from "
                f"{first} in steps of {increment}; choose a divisor of {t.global_batch_size - first}"
            )


def _checkpoint(c: CheckpointConfig) -> Iterator[str]:
    if c.save is not None and c.save_local == c.save:
        yield f"save_local={c.save_local!r} is --save; give another directory, or leave it away"
    if c.save_local is not None and "://" in c.save_local:
        yield f"save_local={c.save_local!r} is a URL; give a directory on a fast disk"
    for name in ("keep_last", "save_retain_interval", "no_save_optim", "save_local"):
        if c.save is None and getattr(c, name):
            yield f"{name}={getattr(c, name)} has no effect; add --save"
    for name in ("ckpt_step", "no_load_optim", "finetune"):
        if c.load is None and getattr(c, name):
            yield f"{name}={getattr(c, name)} has no effect; add --load"
    if c.use_checkpoint_args and c.load is None and c.pretrained_checkpoint is None:
        yield "use_checkpoint_args needs --load or --pretrained-checkpoint"
    if c.finetune and c.no_load_optim:
        yield "no_load_optim has no effect with --finetune, which loads weights only; leave it away"
    if c.override_opt_param_scheduler and c.use_checkpoint_opt_param_scheduler:
        yield "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler exclude each other; give one"
    if c.exit_on_missing_checkpoint and c.load is None:
        yield "exit_on_missing_checkpoint has no effect; add --load"


def _graph(config: Config) -> Iterator[str]:
    """Why micro-batches cannot be repeated as they were recorded."""
    m, p, t, d = config.model, config.parallel, config.train, config.data
    reasons = {
        "needs a CUDA device": p.device == "cpu",
        "needs tensor_model_parallel_size 1": p.tensor_model_parallel_size > 1,
        "needs pipeline_model_parallel_size 1": p.pipeline_model_parallel_size > 1,
        "would repeat one dropout mask; give --hidden-dropout 0 --attention-dropout 0": bool(
            m.hidden_dropout or m.attention_dropout
        ),
        "would repeat one micro-batch's documents; leave --reset-attention-mask away": d.reset_attention_mask,
        "and --compile exclude each other; give one": t.compile,
    }
    rest = " (or leave --cuda-graph-impl away)"
    for why, holds in reasons.items():
        if holds and t.cuda_graph_impl != "none":
            yield f"cuda_graph_impl={t.cuda_graph_impl} {why}{rest}"


def _machine(config: Config) -> Iterator[str]:
    p = config.parallel
    if p.distributed_backend == "mpi":
        yield "distributed_backend=mpi is in no torch wheel; mpirun starts ranks of nccl and gloo too: leave it away"
    if p.distributed_backend == "nccl" and p.device == "cpu":
        yield "distributed_backend=nccl does not run on device=cpu; use gloo"
    for name in ("distributed_timeout_minutes", "distributed_timeout_seconds_after_init"):
        if (getattr(p, name) or 0) > LONGEST_TIMEOUT:
            yield f"{name}={getattr(p, name):g} is longer than any collective; use at most {LONGEST_TIMEOUT}"


def _operations(config: Config) -> Iterator[str]:
    o, log = config.operations, config.log
    for name, value in (
        ("timing_log_level", log.timing_log_level),
        ("empty_unused_memory_level", o.empty_unused_memory_level),
    ):
        if value > 2:
            yield f"{name}={value} is above 2; use 0, 1 or 2"
    if o.profile and o.profile_step_end <= o.profile_step_start:
        yield f"profile_step_end={o.profile_step_end} is not above profile_step_start={o.profile_step_start}; raise it"


def _data(d: DataConfig, tp: int, complete: bool) -> Iterator[str]:
    """`complete`: nothing is still to come, a vocabulary from a checkpoint."""
    if d.split is not None:
        try:
            read_split(d.split)
        except ValueError as error:
            yield f"split={d.split!r} {error}"
    if d.mock_data and d.data_path:
        yield "mock_data and data_path exclude each other; give one"
    per_split = ("train_data_path", "valid_data_path", "test_data_path")
    ways = [n for n in ("data_path", "data_args_path", "per_split_data_args_path", "mock_data") if getattr(d, n)]
    ways += [" ".join(n for n in per_split if getattr(d, n))] if any(getattr(d, n) for n in per_split) else []
    if not ways:
        yield "data_path is not set; give --data-path PREFIX, or --mock-data"
    elif len(ways) > 1 and not (d.mock_data and d.data_path):
        yield f"{' and '.join(ways)} exclude each other; give the data in one way"
    elif ways[0] in per_split[1:]:
        yield f"train_data_path is not set beside {ways[0]}; give it"
    if d.multiple_validation_sets and not (d.valid_data_path or d.per_split_data_args_path):
        yield "multiple_validation_sets needs --valid-data-path"
    if d.validation_set_names and not d.multiple_validation_sets:
        yield f"validation_set_names={' '.join(d.validation_set_names)} has no effect; add --multiple-validation-sets"
    if d.fim_data and d.document_packing != "concatenate":
        yield "fim_data and document_packing=best-fit exclude each other; leave one out"
    if d.fim_data and d.mock_data:
        yield "fim_data has no effect on mock_data; give --data-path"
    if d.document_packing != "concatenate" and d.mock_data:
        yield "document_packing=best-fit has no effect on mock_data; give --data-path"
    for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
        if (getattr(d, name) or 0) > 1:
            yield f"{name}={getattr(d, name)} is no share; use at most 1"
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "fim_data"):
        if getattr(d, name) and d.tokenizer_type is None and complete:
            yield f"{name} needs a tokenizer that knows the end of a document; give --tokenizer-type"
    if d.tokenizer_type is None and d.vocab_size is None and complete:
        yield "vocab_size is not set; give a tokenizer (--tokenizer-type, --tokenizer-model) or --vocab-size"
    if d.tokenizer_type == "NullTokenizer" and d.vocab_size is None:
        yield "tokenizer_type=NullTokenizer needs --vocab-size"
    if d.tokenizer_type == "GPT2BPETokenizer" and not (d.vocab_file and d.merge_file):
        yield "tokenizer_type=GPT2BPETokenizer needs --vocab-file and --merge-file"
    if (d.padded_vocab_size or tp) % tp:
        yield f"tensor_model_parallel_size={tp} does not divide padded_vocab_size={d.padded_vocab_size}; change one"
    for one, other in (("vocab_file", "merge_file"), ("merge_file", "vocab_file")):
        if d.tokenizer_type is None and getattr(d, one) and not getattr(d, other):
            yield f"{one}={getattr(d, one)} is half of GPT-2's tokenizer; give --{other.replace('_', '-')} too"
    no_file = (None, "GPT2BPETokenizer", "ByteTokenizer", "NullTokenizer")
    if d.tokenizer_type not in no_file and not d.tokenizer_model:
        yield f"tokenizer_type={d.tokenizer_type} needs --tokenizer-model"


def _world(config: Config, world_size: int) -> Iterator[str]:
    p, t = config.parallel, config.train
    tp, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    dp = max(1, world_size // (tp * pp))
    if p.data_parallel_size is not None:
        dp = p.data_parallel_size
        if dp * tp * pp != world_size:
            yield (
                f"data_parallel_size={dp} x tp {tp} x pp {pp} is not the world size {world_size}; start {dp * tp * pp} "
                "ranks, or leave it out"
            )
    elif world_size % (tp * pp):
        yield (
            f"world size {world_size} is not a multiple of tp {tp} x pp {pp} = {tp * pp}; start a multiple of it, "
            f"as with --nproc {tp * pp}"
        )
        dp = 1  # what does not divide by the micro-batch is wrong with any
    unit = t.micro_batch_size * dp
    micro = t.eval_micro_batch_size or t.micro_batch_size
    evaluated = t.eval_global_batch_size or t.global_batch_size or unit  # as setup.eval_batch_size
    if (t.eval_global_batch_size or t.eval_micro_batch_size) and evaluated % (micro * dp):
        yield (
            f"eval_global_batch_size={evaluated} is not a multiple of eval_micro_batch_size {micro} x data parallel "
            f"{dp} = {micro * dp}; change one"
        )
    sizes = [("global_batch_size", t.global_batch_size)]
    if t.step_batch_size_schedule is not None:
        with contextlib.suppress(ValueError):  # told already
            steps = read_batch_schedule(t.step_batch_size_schedule, config.model.seq_length)
            sizes += [("step_batch_size_schedule size", size) for _, size in steps]
    if t.rampup_batch_size is not None and len(t.rampup_batch_size) == 3:
        sizes += [("rampup_batch_size start", t.rampup_batch_size[0]), ("increment", t.rampup_batch_size[1])]
    if beyond := [r for r in config.operations.profile_ranks if r >= world_size]:
        yield f"profile_ranks={_numbers(tuple(beyond))} is not among {world_size} ranks; give 0 to {world_size - 1}"
    for name, size in sizes:
        if (size or 0) > MOST_MICROBATCHES * unit:
            yield (
                f"{name}={size} is more than {MOST_MICROBATCHES} micro-batches of {unit}"
                "; raise micro_batch_size or lower it"
            )
        if size is not None and size % unit:
            low, high = size // unit * unit, -(-size // unit) * unit
            yield (
                f"{name}={size} is not a multiple of micro_batch_size {t.micro_batch_size} x data parallel "
                f"{dp} = {unit}: use {f'{low} or ' if low else ''}{high}"
            )
    smallest = min((size for name, size in sizes if size is not None and name != "increment"), default=unit)
    if t.cuda_graph_impl != "none" and dp > 1 and smallest < 3 * unit:
        yield (
            f"cuda_graph_impl={t.cuda_graph_impl} replays what is between a step's first and last micro-batch; "
            f"with data parallel {dp} give --global-batch-size {3 * unit} or more, or leave it away"
        )


def without_effect(config: Config) -> list[str]:
    """Options that do nothing, or less than expected, beside the others; Megatron-LM takes them in silence, so they are
    no error."""
    c, d, m, o, t = config.checkpoint, config.data, config.model, config.optim, config.train
    notes, window = [], m.window_size
    if o.decoupled_min_lr is not None and o.decoupled_lr is None:
        notes.append(f"decoupled_min_lr={o.decoupled_min_lr} has no effect without --decoupled-lr")
    if m.no_weight_decay_cond_type is not None and not m.qk_layernorm:
        notes.append(f"no_weight_decay_cond_type={m.no_weight_decay_cond_type} needs --qk-layernorm")
    if config.parallel.grad_reduce_in_bf16 and not config.precision.bf16:
        notes.append("grad_reduce_in_bf16 has no effect without --bf16")
    if t.step_batch_size_schedule is not None and t.train_iters is not None:
        notes.append(
            "step_batch_size_schedule with train_iters: an iteration of warm-up and decay counts micro_batch_size x "
            "data parallel samples, as in Megatron-LM; --train-samples and --lr-*-samples say what you mean"
        )
    if m.num_query_groups is not None and not m.group_query_attention:
        notes.append(f"num_query_groups={m.num_query_groups} has no effect without --group-query-attention")
    if m.no_rope_freq is not None and m.position_embedding_type not in ("rope", "yarn"):
        notes.append(f"no_rope_freq={m.no_rope_freq} has no effect without --position-embedding-type rope")
    yarn = (f for f in fields(ModelConfig) if f.name.startswith(("yarn_", "mscale", "rotary_scaling_factor")))
    if m.position_embedding_type != "yarn":
        given = [f"{f.name}={getattr(m, f.name)}" for f in yarn if getattr(m, f.name) != f.default]
        notes += [f"{text} has no effect without --position-embedding-type yarn" for text in given]
    if t.recompute_modules != ("core_attn",) and t.recompute_granularity != "selective":
        modules = " ".join(t.recompute_modules)
        notes.append(f"recompute_modules={modules} has no effect without --recompute-granularity selective")
    if window is not None and len(window) == 2 and 0 < config.model.seq_length <= window[0] + 1:
        notes.append(f"window_size={_numbers(window)} has no effect on sequences of {config.model.seq_length} tokens")
    if d.dataloader_type == "cyclic":
        notes.append("dataloader_type=cyclic: samples are shuffled within each epoch, not over all epochs together")
    if c.save_interval is not None and c.save is None:
        notes.append(f"save_interval={c.save_interval} has no effect without --save")
    if c.save is not None and c.save_interval is None and c.save_interval_mins is None:
        notes.append(f"save={c.save} without --save-interval saves only when the run ends or stops; a crash loses all")
    for name in ("vocab_file", "merge_file"):
        if getattr(d, name) is not None and d.tokenizer_type not in (None, "GPT2BPETokenizer"):
            notes.append(f"{name}={getattr(d, name)} has no effect with --tokenizer-type {d.tokenizer_type}")
    if t.recompute_num_layers is not None and t.recompute_granularity != "full":
        notes.append(
            f"recompute_num_layers={t.recompute_num_layers} has no effect without --recompute-granularity full"
        )
    o, log = config.operations, config.log
    if o.use_pytorch_profiler and not o.profile:
        notes.append("use_pytorch_profiler has no effect without --profile")
    if o.manual_gc_interval and not o.manual_gc:
        notes.append(f"manual_gc_interval={o.manual_gc_interval} has no effect without --manual-gc")
    if log.log_progress and c.save is None:
        notes.append("log_progress has no effect without --save")
    board = (name for name in ("timers", "validation_ppl", "memory", "world_size"))
    if log.tensorboard_dir is None:
        asked = [f"log_{name}_to_tensorboard" for name in board if getattr(log, f"log_{name}_to_tensorboard")]
        notes += [f"{name} has no effect without --tensorboard-dir" for name in asked]
    return notes


def _divisors(n: int) -> str:
    found = [str(i) for i in range(1, n + 1) if n % i == 0]
    return ", ".join(found[:-1]) + " or " + found[-1] if len(found) > 1 else found[0]
