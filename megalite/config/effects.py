"""Options that do nothing, or less than expected, beside the others; Megatron-LM takes them in silence, so they are no
error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from megalite.config.options import Config, ModelConfig
from megalite.config.problem import Problem, Say


def without_effect(config: Config) -> list[Problem]:
    say = Say(config)
    return [*_of_model(config.model, say), *_of_training(config, say), *_of_files(config, say), *_of_log(config, say)]


def _of_model(m: ModelConfig, say: Say) -> Iterator[Problem]:
    if m.no_weight_decay_cond_type is not None and not m.qk_layernorm:
        yield say("{=no_weight_decay_cond_type} needs {--qk-layernorm}")
    if m.num_query_groups is not None and not m.group_query_attention:
        yield say("{=num_query_groups} has no effect without {--group-query-attention}")
    if m.no_rope_freq is not None and m.position_embedding_type not in ("rope", "yarn"):
        yield say("{=no_rope_freq} has no effect without {--position-embedding-type} rope")
    for f in fields(ModelConfig) if m.position_embedding_type != "yarn" else ():
        if f.name.startswith(("yarn_", "mscale", "rotary_scaling_factor")) and getattr(m, f.name) != f.default:
            yield say("{=option} has no effect without {--position-embedding-type} yarn", option=f.name)
    if m.window_size is not None and len(m.window_size) == 2 and 0 < m.seq_length <= m.window_size[0] + 1:
        yield say("{=window_size} has no effect on sequences of {length} tokens", "seq_length", length=m.seq_length)


def _of_training(config: Config, say: Say) -> Iterator[Problem]:
    o, p, t = config.optim, config.parallel, config.train
    if p.split_backward and p.pipeline_model_parallel_size == 1:
        yield say("{split_backward} has no effect with {=pipeline_model_parallel_size}: there is no bubble to fill")
    if p.zero_bubble_max_pending_backward is not None and not p.split_backward:
        yield say("{=zero_bubble_max_pending_backward} has no effect without {--split-backward}")
    if o.decoupled_min_lr is not None and o.decoupled_lr is None:
        yield say("{=decoupled_min_lr} has no effect without {--decoupled-lr}")
    if p.grad_reduce_in_bf16 and not config.precision.bf16:
        yield say("{grad_reduce_in_bf16} has no effect without {--bf16}")
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


def _of_files(config: Config, say: Say) -> Iterator[Problem]:
    c, d = config.checkpoint, config.data
    if d.dataloader_type == "cyclic":
        yield say("{=dataloader_type}: samples are shuffled within each epoch, not over all epochs together")
    if c.save_interval is not None and c.save is None:
        yield say("{=save_interval} has no effect without {--save}")
    if c.save is not None and c.save_interval is None and c.save_interval_mins is None:
        yield say("{=save} without {--save-interval} saves only when the run ends or stops; a crash loses all")
    for name in ("vocab_file", "merge_file"):
        if getattr(d, name) is not None and d.tokenizer_type not in (None, "GPT2BPETokenizer"):
            yield say("{=option} has no effect with {--tokenizer-type} {kind}", option=name, kind=d.tokenizer_type)


def _of_log(config: Config, say: Say) -> Iterator[Problem]:
    o, log = config.operations, config.log
    if o.use_pytorch_profiler and not o.profile:
        yield say("{use_pytorch_profiler} has no effect without {--profile}")
    if o.manual_gc_interval and not o.manual_gc:
        yield say("{=manual_gc_interval} has no effect without {--manual-gc}")
    if log.log_progress and config.checkpoint.save is None:
        yield say("{log_progress} has no effect without {--save}")
    for name in ("timers", "validation_ppl", "memory", "world_size") if log.tensorboard_dir is None else ():
        if getattr(log, option := f"log_{name}_to_tensorboard"):
            yield say("{option} has no effect without {--tensorboard-dir}", option=option)
