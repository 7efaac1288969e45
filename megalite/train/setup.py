"""Where the parts meet: the only module that sees the whole configuration and hands each part the values it needs."""

from __future__ import annotations

import datetime
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from megalite.config.check import check
from megalite.config.options import Config, padded_vocab_size
from megalite.config.pattern import read_batch_schedule
from megalite.config.stage_layers import given_stages
from megalite.data.samples.batches import Batches, Borders, Prefetcher, Unread
from megalite.data.samples.source import Dataset
from megalite.models.compiled import Backend, compile_blocks
from megalite.models.flops import How, head_flops, layer_flops
from megalite.models.gpt import Recompute, Stage
from megalite.nn.parameter import Maker
from megalite.optim.adamw import AdamW, ApexAdamW
from megalite.optim.buffer import ParamBuffer
from megalite.optim.loss_scale import LossScaler
from megalite.optim.lr import LrSchedule, Rates, WeightDecaySchedule
from megalite.optim.rule import Rule
from megalite.optim.sgd import SGD
from megalite.optim.zero1 import Zero1
from megalite.parallel.launch import Ranks
from megalite.parallel.mesh import Mesh, build_mesh
from megalite.pipeline.graphed import Graph, GraphedPipeline, cuda_graphs, on_stream
from megalite.pipeline.partition import partition
from megalite.pipeline.runtime import Pipeline
from megalite.train.batch import HostBatch, host_batch
from megalite.train.batch_size import BatchSizes
from megalite.train.datasets import NamedSet, Sources, open_sources
from megalite.train.state import EvaluationSet, Run


class SetupError(Exception):
    """The configuration does not fit this world, this data or this machine; nothing was started. One line each."""


@dataclass(frozen=True)
class Length:
    """How long a run is, in steps and samples."""

    steps: int
    samples: int


def params_dtype(config: Config) -> torch.dtype:
    if config.precision.bf16:
        return torch.bfloat16
    return torch.float16 if config.precision.fp16 else torch.float32


def global_batch_size(config: Config, dp: int) -> int:
    """What an iteration counts in samples, for rates and evaluations; with --step-batch-size-schedule as in
    Megatron-LM, which has no other number for it."""
    t = config.train
    return t.global_batch_size or t.micro_batch_size * dp


def eval_batch_size(config: Config, dp: int) -> int:
    return config.train.eval_global_batch_size or global_batch_size(config, dp)


def batch_sizes(config: Config, dp: int) -> BatchSizes:
    """Raises ValueError where a ramp does not lead to the global batch size."""
    t = config.train
    if t.step_batch_size_schedule is not None:
        return BatchSizes(read_batch_schedule(t.step_batch_size_schedule, config.model.seq_length), last_whole=True)
    final = global_batch_size(config, dp)
    if t.rampup_batch_size is None:
        return BatchSizes.constant(final)
    start, increment, samples = t.rampup_batch_size
    return BatchSizes.ramp(final, start, increment, samples)


def run_length(config: Config, sizes: BatchSizes) -> Length:
    if config.train.train_samples is not None:
        steps = sizes.steps_for(config.train.train_samples)
    else:
        assert config.train.train_iters
        steps = config.train.train_iters
    return Length(steps, sizes.consumed_at(steps))


def layers_of_stages(config: Config, padded_vocab: int) -> list[range]:
    """The layers of every stage: as the options say, or balanced with the head's cost counted in layers."""
    m, p = config.model, config.parallel
    counts = given_stages(m.num_layers, p)
    if counts is not None:
        stops = list(itertools.accumulate(counts))
        return [range(stop - n, stop) for stop, n in zip(stops, counts, strict=True)]
    stages = p.pipeline_model_parallel_size * (p.num_virtual_stages_per_pipeline_rank or 1)
    head = head_flops(m, padded_vocab) / layer_flops(m, m.seq_length)
    return partition(m.num_layers, stages, head_cost=head if m.num_layers > stages > 1 else 0.0)


def rates(config: Config, batch: int, length: Length) -> Rates:
    """Everything in samples; iterations count as iterations x `batch`, the global batch size."""
    o, t = config.optim, config.train

    def samples(iters: int | None, count: int | None) -> float:
        return float(count) if count else float((iters or 0) * batch)

    whole = float(t.train_samples or (length.samples if t.rampup_batch_size else (t.train_iters or 0) * batch))
    decay = samples(o.lr_decay_iters, o.lr_decay_samples) or whole
    warm_up = samples(o.lr_warmup_iters, o.lr_warmup_samples)
    if o.lr_warmup_fraction is not None:
        warm_up = o.lr_warmup_fraction * decay
    lr = LrSchedule(
        peak=o.lr or 0.0,  # not given: an evaluation alone
        minimum=o.min_lr,
        style=o.lr_decay_style,
        warm_up=warm_up,
        decay=decay,
        warm_up_init=o.lr_warmup_init,
        wsd=samples(o.lr_wsd_decay_iters, o.lr_wsd_decay_samples),
        wsd_style=o.lr_wsd_decay_style,
    )
    apart = None
    if o.decoupled_lr is not None:
        apart = replace(lr, peak=o.decoupled_lr, minimum=o.min_lr if o.decoupled_min_lr is None else o.decoupled_min_lr)
    start, end = o.weight_decay, o.weight_decay
    if o.start_weight_decay is not None and o.end_weight_decay is not None:
        start, end = o.start_weight_decay, o.end_weight_decay
    return Rates(lr, WeightDecaySchedule(start, end, o.weight_decay_incr_style, whole), apart)


def update_rule(config: Config) -> Rule:
    o = config.optim
    if config.train.skip_train:
        return SGD(momentum=0.0)  # keeps nothing
    moments = {name: getattr(o, name) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    if o.optimizer == "sgd":
        return SGD(o.sgd_momentum)
    if o.optimizer_impl == "apex":
        if not ApexAdamW.available():
            raise SetupError("optimizer_impl=apex needs apex's CUDA extension amp_C on a CUDA device; use auto")
        return ApexAdamW((o.adam_beta1, o.adam_beta2), o.adam_eps)
    dtypes = {name: torch.bfloat16 if value == "bf16" else None for name, value in moments.items()}
    return AdamW((o.adam_beta1, o.adam_beta2), o.adam_eps, **dtypes)


def loss_scaler(config: Config) -> LossScaler:
    p = config.precision
    if not p.fp16:
        return LossScaler()
    if p.loss_scale is not None:
        return LossScaler(scale=p.loss_scale)
    return LossScaler(p.initial_loss_scale, True, p.min_loss_scale, p.loss_scale_window, p.hysteresis)


def recompute_of(config: Config) -> How:
    """Granularity, method, number of layers, parts of a block."""
    t = config.train
    return t.recompute_granularity, t.recompute_method or "uniform", t.recompute_num_layers or 1, t.recompute_modules


def build_stages(config: Config, mesh: Mesh, vocab_size: int, dtype: torch.dtype, meta: bool = False) -> list[Stage]:
    """This rank's chunks of the model."""
    model, t = config.model, config.train
    padded = padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by, mesh.tp.size)
    layers = layers_of_stages(config, padded)
    make = Maker(mesh, dtype, t.seed, meta)
    recompute = Recompute(*recompute_of(config))
    return [
        Stage(
            make,
            model,
            layers,
            s,
            vocab_size=vocab_size,
            padded_vocab_size=padded,
            recompute=recompute,
            z_loss=t.z_loss_coeff,
        )
        for s in range(mesh.pp.rank, len(layers), mesh.pp.size)
    ]


def build_run(
    config: Config,
    ranks: Ranks,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    sources: Sources | None = None,
    compile_backend: Backend = "inductor",
    graphs: Callable[[], Graph] | None = None,
) -> Run:
    """All parts of a run on this rank; collective. Raises SetupError before any memory is taken.

    `dtype`: of the weights, instead of what the configuration says (tests use fp64). `sources`: data that is open
    already. `compile_backend`: of torch.compile, with --compile. `graphs`: instead of CUDA's, with --cuda-graph-impl.
    """
    problems = check(config, ranks.world)
    if problems:
        raise SetupError("\n".join(problems))
    m, p, t = config.model, config.parallel, config.train
    assert m.seq_length and t.micro_batch_size and m.hidden_size
    dp = ranks.world // (p.tensor_model_parallel_size * p.pipeline_model_parallel_size)
    sizes = batch_sizes(config, dp)
    length = run_length(config, sizes)
    per_iteration, evaluated = global_batch_size(config, dp), eval_batch_size(config, dp)
    sources = sources or open_sources(config.data, m.seq_length, t.seed, max(t.eval_iters, 0) * evaluated)
    mesh = build_mesh(
        tp=p.tensor_model_parallel_size,
        pp=p.pipeline_model_parallel_size,
        dp_outermost=p.use_tp_pp_dp_mapping,
        device=device,
        timeout=datetime.timedelta(minutes=p.distributed_timeout_minutes),
    )
    dtype = dtype or params_dtype(config)
    stages = build_stages(config, mesh, sources.vocab_size, dtype)
    if t.compile:
        compile_blocks(stages, compile_backend)
    stream = None
    if t.cuda_graph_impl != "none" and graphs is None:
        stream, graphs = torch.cuda.Stream(device), cuda_graphs()  # pyright: ignore[reportArgumentType]
    with on_stream(stream):
        buffer = ParamBuffer(
            stages,
            mesh,
            bucket_size=p.ddp_bucket_size,
            shard=p.use_distributed_optimizer,
            overlap_grad_reduce=p.overlap_grad_reduce,
            overlap_param_gather=p.overlap_param_gather,
            reduce_in_bf16=p.grad_reduce_in_bf16 and dtype == torch.bfloat16,
            decoupled=config.optim.decoupled_lr is not None,
        )
    options: dict[str, Any] = dict(
        schedule=p.pipeline_schedule,
        group_size=p.microbatch_group_size_per_virtual_pipeline_stage,
        width=m.hidden_size,
        dtype=dtype,
        on_last_backward=buffer.on_last_backward,
    )
    pipeline = Pipeline(stages, mesh, **options)
    if graphs is not None:
        apart = mesh.dp.size > 1  # there is something to gather and to reduce
        graphed = dict(graphs=graphs, begin_all=buffer.begin_all, apart=apart, stream=stream)
        pipeline = GraphedPipeline(stages, mesh, **graphed, **options)

    d = config.data
    reads = mesh.pp.is_first or mesh.pp.is_last or d.reset_position_ids or d.reset_attention_mask

    def batches(dataset: Dataset, ignored_label: int | None, micro_batch_size: int) -> Batches:
        return Batches(
            dataset if reads else Unread(m.seq_length),
            micro_batch_size,
            mesh.dp.rank,
            mesh.dp.size,
            sources.vocab_size,
            Borders(sources.eod, d.eod_mask_loss, d.reset_position_ids or d.reset_attention_mask),
            ignored_label,
        )

    def loader(
        dataset: Dataset,
        size_at: Callable[[int], int],
        ignored_label: int | None = None,
        micro_batch_size: int = t.micro_batch_size,
    ) -> Prefetcher[HostBatch]:
        prepare = functools.partial(
            host_batch,
            pin=device.type == "cuda",
            positions=d.reset_position_ids,
            documents=d.reset_attention_mask,
        )
        return Prefetcher(batches(dataset, ignored_label, micro_batch_size), prepare, size_at)

    def evaluation(sets: list[NamedSet]) -> list[EvaluationSet]:
        end, micro = t.eval_iters * evaluated, t.eval_micro_batch_size or t.micro_batch_size
        size_at = lambda n: evaluated if n < end else 0  # noqa: E731
        return [
            EvaluationSet(one.name, loader(one.dataset, size_at, micro_batch_size=micro), one.bytes_per_token)
            for one in sets
        ]

    if p.distributed_timeout_seconds_after_init is not None:
        after = datetime.timedelta(seconds=p.distributed_timeout_seconds_after_init)
        mesh.set_timeout(after)
    return Run(
        mesh=mesh,
        pipeline=pipeline,
        buffer=buffer,
        optimizer=Zero1(buffer, update_rule(config)),
        rates=rates(config, per_iteration, length),
        loss_scaler=loss_scaler(config),
        batch_sizes=sizes,
        eval_batch_size=evaluated,
        last_step=length.steps,
        data=loader(sources.train, sizes.at, sources.ignored_label),
        valid=evaluation(sources.valid),
        test=evaluation(sources.test),
        ledger=sources.ledger,
        tokenizer=sources.tokenizer,
        seq_length=m.seq_length,
        max_norm=config.optim.clip_grad,
        check_finite=t.check_for_nan_in_loss_and_grad,
        vocab_size=sources.vocab_size,
    )
