"""What contradicts itself in a configuration, all of it at once, and what has no effect.

A contradiction is one line: `name=value breaks rule; remedy`. Pure, as config.py is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megalite.config import (
    REQUIRED,
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    TrainConfig,
    options,
)
from megalite.pattern import read_pattern

LONGEST_TIMEOUT = 1_000_000
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
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "ddp_bucket_size",
        "distributed_timeout_minutes",
        "distributed_timeout_seconds_after_init",
        "micro_batch_size",
        "global_batch_size",
        "train_iters",
        "train_samples",
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
        "gpu_sniff_test_interval",
        "vocab_size",
        "loss_scale",
        "min_loss_scale",
        "loss_scale_window",
        "hysteresis",
        "rotary_base",
        "rope_scaling_factor",
        "peak_tflops",
    ]
)


def check(config: Config, world_size: int | None = None, *, complete: bool = False) -> list[str]:
    """Every contradiction, each as `name=value breaks rule; remedy`. `world_size` adds what depends on it; `complete`:
    also what --load could still have brought, a vocabulary."""
    problems, c = list(_ranges(config)), config.checkpoint
    unknown = c.use_checkpoint_args and any(getattr(config.model, n, None) == 0 for n in REQUIRED)
    if problems or unknown:  # the checkpoint will say; checked again then
        return problems
    problems += [
        *_model(config.model, config.parallel.tensor_model_parallel_size),
        *_layout(config),
        *_length_and_rate(config.train, config.optim),
        *_optimizer(config.optim),
        *_precision(config.precision),
        *_training(config.train),
        *_checkpoint(c),
        *_graph(config),
        *_machine(config),
        *_operations(config),
        *_data(config.data, complete or (c.load is None and c.pretrained_checkpoint is None)),
    ]
    if world_size is not None:
        problems += _world(config, world_size)
    return problems


def _ranges(config: Config) -> Iterator[str]:
    for section, f in options():
        value = getattr(getattr(config, section), f.name)
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{f.name}={value} is not finite; give a number"
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
            yield f"{f.name}={value} is negative; give 0 or more"
        elif value == 0 and f.name in REQUIRED:
            if section != "model" or not config.checkpoint.use_checkpoint_args:
                yield f"{f.name}=0 is not set; give {'--' + f.name.replace('_', '-')} or a --preset"
        elif value == 0 and f.name in _POSITIVE:
            yield f"{f.name}=0 is too small; give 1 or more"
    if config.optim.lr is None:
        yield "lr is not set; give --lr"


def _model(m: ModelConfig, tp: int) -> Iterator[str]:
    heads = m.num_attention_heads
    if m.kv_channels is None and m.hidden_size % heads:
        yield f"hidden_size={m.hidden_size} is not a multiple of num_attention_heads={heads}; or set --kv-channels"
    elif m.position_embedding_type == "rope" and int(m.head_size * m.rotary_percent) % 2:
        yield f"rotary_percent={m.rotary_percent} rotates an odd number of {m.head_size} channels; make it even"
    if heads % tp:
        yield f"tensor_model_parallel_size={tp} does not divide num_attention_heads={heads}: use {_divisors(heads)}"
    if m.num_query_groups is not None and not m.group_query_attention:
        yield f"num_query_groups={m.num_query_groups} has no effect; add --group-query-attention"
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
    if size[1] != 0:
        yield f"{given} has {size[1]} on the right, where a causal model sees nothing; use {size[0]},0"
    if size[0] < 1:
        why = "leaves a token itself alone" if size[0] == 0 else "is no window"
        yield f"{given} {why}; give at least 1,0, or leave it away"
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
    vpp = 1
    chunk, chunks = p.num_layers_per_virtual_pipeline_stage, p.num_virtual_stages_per_pipeline_rank
    if chunk is not None and chunks is not None:
        yield (
            f"num_layers_per_virtual_pipeline_stage={chunk} and num_virtual_stages_per_pipeline_rank={chunks}: give one"
        )
    if p.pipeline_model_parallel_layout is not None:
        if chunk is not None or chunks is not None:
            yield "pipeline_model_parallel_layout already says the virtual stages; leave the other flag away"
    elif chunk is not None:
        if m.num_layers % (pp * chunk):
            yield (
                f"num_layers_per_virtual_pipeline_stage={chunk} x pp {pp} does not divide num_layers={m.num_layers}"
                "; change one"
            )
        else:
            vpp = m.num_layers // (pp * chunk)
    elif chunks is not None:
        vpp = chunks
    if pp == 1 and (chunk is not None or (chunks or 1) > 1):
        yield "virtual pipeline stages need pipeline_model_parallel_size above 1; drop them or raise it"
    if p.pipeline_model_parallel_layout is None and pp * vpp > m.num_layers:
        yield f"pipeline_model_parallel_size={pp} x {vpp} chunks is above num_layers={m.num_layers}: use fewer"


def _length_and_rate(t: TrainConfig, o: OptimConfig) -> Iterator[str]:
    if t.train_iters is not None and t.train_samples is not None:
        yield "train_iters and train_samples exclude each other; give one"
    if t.train_iters is None and t.train_samples is None:
        yield "train_iters is not set; give --train-iters or --train-samples"
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
    if o.lr_decay_style == "WSD" and not (o.lr_wsd_decay_samples if by_samples else o.lr_wsd_decay_iters):
        yield f"lr_decay_style=WSD needs --lr-wsd-decay-{'samples' if by_samples else 'iters'}"
    wsd = getattr(o, f"lr_wsd_decay_{unit}") or 0
    if o.lr_decay_style == "WSD" and decay and wsd > decay - warm_up:
        yield f"lr_wsd_decay_{unit}={wsd} is longer than what the warm-up leaves, {decay - warm_up:g}; shorten it"


def _optimizer(o: OptimConfig) -> Iterator[str]:
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


def _training(t: TrainConfig) -> Iterator[str]:
    if t.recompute_granularity == "full" and t.recompute_method is None:
        yield "recompute_granularity=full needs --recompute-method uniform or block"
    if t.recompute_granularity != "full" and t.recompute_method is not None:
        yield f"recompute_method={t.recompute_method} has no effect; add --recompute-granularity full"
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


def _data(d: DataConfig, complete: bool) -> Iterator[str]:
    """`complete`: nothing is still to come, a vocabulary from a checkpoint."""
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
    no_file = (None, "GPT2BPETokenizer", "ByteTokenizer", "NullTokenizer")
    if d.tokenizer_type not in no_file and not d.tokenizer_model:
        yield f"tokenizer_type={d.tokenizer_type} needs --tokenizer-model"


def _world(config: Config, world_size: int) -> Iterator[str]:
    p, t = config.parallel, config.train
    tp, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    if world_size % (tp * pp):
        yield f"world size {world_size} is not a multiple of tp {tp} x pp {pp} = {tp * pp}; start a multiple of it"
        return
    dp = world_size // (tp * pp)
    unit = t.micro_batch_size * dp
    sizes = [("global_batch_size", t.global_batch_size)]
    if t.rampup_batch_size is not None and len(t.rampup_batch_size) == 3:
        sizes += [("rampup_batch_size start", t.rampup_batch_size[0]), ("increment", t.rampup_batch_size[1])]
    if (t.global_batch_size or 0) > MOST_MICROBATCHES * unit:
        yield (
            f"global_batch_size={t.global_batch_size} is more than {MOST_MICROBATCHES} micro-batches of {unit}"
            "; raise micro_batch_size or lower it"
        )
    if beyond := [r for r in config.operations.profile_ranks if r >= world_size]:
        yield f"profile_ranks={_numbers(tuple(beyond))} is not among {world_size} ranks; give 0 to {world_size - 1}"
    for name, size in sizes:
        if size is not None and size % unit:
            low, high = size // unit * unit, -(-size // unit) * unit
            yield (
                f"{name}={size} is not a multiple of micro_batch_size {t.micro_batch_size} x data parallel "
                f"{dp} = {unit}: use {f'{low} or ' if low else ''}{high}"
            )
    if t.cuda_graph_impl != "none" and dp > 1 and (t.global_batch_size or 0) < 3 * unit:
        yield (
            f"cuda_graph_impl={t.cuda_graph_impl} replays what is between a step's first and last micro-batch; "
            f"with data parallel {dp} give --global-batch-size {3 * unit} or more, or leave it away"
        )


def without_effect(config: Config) -> list[str]:
    """Options that do nothing, or less than expected, beside the others; Megatron-LM takes them in silence, so they are
    no error."""
    c, t = config.checkpoint, config.train
    notes, window = [], config.model.window_size
    if window is not None and len(window) == 2 and 0 < config.model.seq_length <= window[0] + 1:
        notes.append(f"window_size={_numbers(window)} has no effect on sequences of {config.model.seq_length} tokens")
    if c.save_interval is not None and c.save is None:
        notes.append(f"save_interval={c.save_interval} has no effect without --save")
    if c.save is not None and c.save_interval is None and c.save_interval_mins is None:
        notes.append(f"save={c.save} without --save-interval saves only when the run ends or stops; a crash loses all")
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


def protections_missing(config: Config) -> list[str]:
    """What was asked for to guard or watch the run, and is not done: one line each, to be shown where nobody can miss
    it."""
    o = config.operations
    mode, sniff = o.rerun_mode, o.gpu_sniff_test_interval
    asked = {
        f"rerun_mode={mode}: no step is computed a second time": mode not in (None, "disabled"),
        "check_for_spiky_loss: no loss is compared with those before it": o.check_for_spiky_loss,
        "check_for_large_grads: no gradient norm is compared with those before it": o.check_for_large_grads,
        "log_straggler: nobody looks for slow ranks": o.log_straggler,
        f"gpu_sniff_test_interval={sniff}: no device and no link is tested": sniff is not None,
        "inprocess_restart: a rank that fails ends the run; start it again with --load": o.inprocess_restart,
        "enable_ft_package: nobody watches for ranks that hang but the timeout of collectives": o.enable_ft_package,
        "log_energy: no energy is measured": o.log_energy,
        "run_workload_inspector_server: there is no profiling on demand; use --profile": (
            o.run_workload_inspector_server
        ),
        "otel_enabled: no traces are sent; metrics.jsonl holds the figures": o.otel_enabled,
    }
    return [f"{line} (not done by megalite)" for line, holds in asked.items() if holds]


def _divisors(n: int) -> str:
    found = [str(i) for i in range(1, n + 1) if n % i == 0]
    return ", ".join(found[:-1]) + " or " + found[-1] if len(found) > 1 else found[0]
