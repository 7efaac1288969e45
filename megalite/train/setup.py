"""Builds a run: the only module that sees the whole configuration, and hands each part the values that it needs."""

import datetime
import functools
from collections.abc import Callable
from typing import Any

import torch

from megalite.config.environment import override
from megalite.config.options import Config
from megalite.config.validation import check
from megalite.data.samples.batches import Batches, Borders, Prefetcher, Unread
from megalite.data.samples.source import Dataset
from megalite.kernels.dispatch import choose
from megalite.launch.ranks import Ranks
from megalite.models.compiled import Backend, compile_blocks
from megalite.models.gpt import Stage
from megalite.nn.activation_offload import Offload
from megalite.optim.adamw import ApexAdamW
from megalite.optim.buffer import ParamBuffer, Shared
from megalite.optim.loss_scale import LossScaler
from megalite.optim.lr import LrSchedule, Rates, WeightDecaySchedule
from megalite.optim.rule import Rule, rules_of
from megalite.optim.sgd import SGD
from megalite.optim.zero1 import Zero1
from megalite.parallel.mesh import Mesh, build_mesh
from megalite.parallel.streams import CudaGraph, cuda_graphs, new_stream, on_stream
from megalite.pipeline.graphed import GraphedPipeline
from megalite.pipeline.runtime import Pipeline
from megalite.plan.arrangement import Arrangement, arrange
from megalite.train.balance import Balance
from megalite.train.batch import host_batch
from megalite.train.moments import Figures
from megalite.train.sources import NamedSet, Sources, open_sources
from megalite.train.state import Loader, Run
from megalite.train.watch.spikes import Spikes


class SetupError(Exception):
    """The configuration does not fit the ranks, the data or the machine; a line for each problem."""


def rates(made: Arrangement) -> Rates:
    """The schedules of learning rates and weight decay, over samples; an iteration counts as a global batch."""
    o, t, batch = made.config.optim, made.config.train, made.batch_size

    def samples(iters: int | None, count: int | None) -> float:
        return float(count) if count else float((iters or 0) * batch)

    whole = float(t.train_samples or (made.samples if t.rampup_batch_size else (t.train_iters or 0) * batch))
    decay = samples(o.lr_decay_iters, o.lr_decay_samples) or whole
    warm_up = samples(o.lr_warmup_iters, o.lr_warmup_samples)
    if o.lr_warmup_fraction is not None:
        warm_up = o.lr_warmup_fraction * decay
    shape: dict[str, Any] = dict(style=o.lr_decay_style, warm_up=warm_up, decay=decay, warm_up_init=o.lr_warmup_init)
    shape |= dict(wsd=samples(o.lr_wsd_decay_iters, o.lr_wsd_decay_samples), wsd_style=o.lr_wsd_decay_style)
    lr = LrSchedule(o.lr or 0.0, o.min_lr, **shape)  # not given: an evaluation alone
    least = o.min_lr if o.decoupled_min_lr is None else o.decoupled_min_lr
    apart = None if o.decoupled_lr is None else LrSchedule(o.decoupled_lr, least, **shape)
    if o.lr_base_batch_size is not None:
        factor = made.batch_sizes.final / o.lr_base_batch_size
        lr, apart = lr.times(factor), apart and apart.times(factor)
    start, end = o.weight_decay, o.weight_decay
    if o.start_weight_decay is not None and o.end_weight_decay is not None:
        start, end = o.start_weight_decay, o.end_weight_decay
    return Rates(lr, WeightDecaySchedule(start, end, o.weight_decay_incr_style, whole), apart)


def update_rules(config: Config) -> tuple[Rule, Rule | None]:
    """And of matrices, where they have another one."""
    if config.train.skip_train:
        return SGD(momentum=0.0), None  # has no states
    if config.optim.optimizer_impl == "apex" and not ApexAdamW.available():
        raise SetupError("optimizer_impl=apex needs apex's CUDA extension amp_C on a CUDA device; use auto")
    return rules_of(config.optim)


def loss_scaler(config: Config) -> LossScaler:
    p = config.precision
    if not p.fp16:
        return LossScaler()
    if p.loss_scale is not None:
        return LossScaler(scale=p.loss_scale)
    return LossScaler(p.initial_loss_scale, True, p.min_loss_scale, p.loss_scale_window, p.hysteresis)


def step_timeout(config: Config) -> datetime.timedelta:
    """The time limit of a collective once the start is over."""
    p = config.parallel
    if p.distributed_timeout_seconds_after_init is not None:
        return datetime.timedelta(seconds=p.distributed_timeout_seconds_after_init)
    return datetime.timedelta(minutes=p.distributed_timeout_minutes)


def build_run(
    config: Config,
    ranks: Ranks,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    sources: Sources | None = None,
    arrangement: Arrangement | None = None,
    compile_backend: Backend = "inductor",
    graphs: Callable[[], CudaGraph] | None = None,
) -> Run:
    """All parts of a run on this rank; collective. Raises SetupError before any memory is taken.

    `dtype`: of the weights, instead of the configuration's (tests use fp64). `sources`: open already. `arrangement`: of
    a configuration that was checked. `compile_backend`: with --compile. `graphs`: of --cuda-graph-impl, not CUDA's.
    """
    m, p, t, o = config.model, config.parallel, config.train, config.operations
    if arrangement is None and (problems := check(config, ranks.world)):
        raise SetupError("\n".join(problems))
    sources = sources or open_sources(config.data, m.seq_length, t.seed, t.eval_iters)
    made = arrangement or arrange(config, ranks.world, sources.vocab_size)
    limits = dict(timeout=datetime.timedelta(minutes=p.distributed_timeout_minutes), later_timeout=step_timeout(config))
    shared_memory = override("shared_memory", p.shared_memory)
    mesh = build_mesh(**made.sizes, device=device, shared_memory=shared_memory, **limits)
    choose(p.kernels, p.attention_kernel)
    stages = made.build_stages(mesh, dtype or made.dtype, deferred=True)
    if t.compile:
        compile_blocks(stages, compile_backend)
    buffer, pipeline = _build_pipeline(made, stages, mesh, dtype or made.dtype, graphs)
    data, valid, test = _open_loaders(made, sources, mesh)
    return Run(
        mesh=mesh,
        pipeline=pipeline,
        balance=Balance(stages, mesh, m),
        buffer=buffer,
        optimizer=Zero1(buffer, *update_rules(config), config.optim.offloaded, config.optim.optimizer_offload_folder),
        rates=rates(made),
        loss_scaler=loss_scaler(config),
        batch_sizes=made.batch_sizes,
        eval_batch_size=made.eval_batch_size,
        last_step=made.steps,
        data=data,
        valid=valid,
        test=test,
        ledger=sources.ledger,
        tokenizer=sources.tokenizer,
        seq_length=m.seq_length,
        max_norm=config.optim.clip_grad,
        check_finite=t.check_for_nan_in_loss_and_grad,
        vocab_size=sources.vocab_size,
        rerun=t.rerun_mode,
        check_copies=o.check_replicas_action if o.check_weight_hash_across_dp_replicas_interval else None,
        spikes=Spikes.of(t),
        figures=Figures(stages, mesh, m.num_layers),
    )


def _build_pipeline(
    made: Arrangement, stages: list[Stage], mesh: Mesh, dtype: torch.dtype, graphs: Callable[[], CudaGraph] | None
) -> tuple[ParamBuffer, Pipeline]:
    config, p, t, stream = made.config, made.config.parallel, made.config.train, None
    for stage in stages if t.cpu_offloading_num_layers else ():
        stage.moved = Offload(t.cpu_offloading_num_layers, t.min_offloaded_tensor_size, mesh.device)
    if t.cuda_graph_impl != "none" and graphs is None:
        stream, graphs = new_stream(mesh.device), cuda_graphs()
    over_replicas = p.outer_dp_sharding_strategy == "optim"
    with on_stream(stream):
        buffer = ParamBuffer(
            stages,
            mesh,
            bucket_size=p.ddp_bucket_size,
            overlap_grad_reduce=p.overlap_grad_reduce,
            overlap_param_gather=p.overlap_param_gather,
            reduce_in_bf16=p.grad_reduce_in_bf16 and dtype == torch.bfloat16,
            shared=Shared(p.shared_out, made.sharing.by_chunk, over_replicas, p.param_cpu_offload),
            **config.optim.apart,
        )
    options: dict[str, Any] = dict(schedule=p.pipeline_schedule, split=made.split, dtype=dtype, store=buffer)
    options |= dict(width=config.model.hidden_size, group_size=p.microbatch_group_size_per_virtual_pipeline_stage)
    if graphs is None:
        return buffer, Pipeline(stages, mesh, **options)
    apart = mesh.data.size > 1  # weights are gathered and gradients are reduced
    graphed = dict(graphs=graphs, begin_all=buffer.begin_all, apart=apart, stream=stream)
    return buffer, GraphedPipeline(stages, mesh, **graphed, **options)


def batch_marks(config: Config, mesh: Mesh) -> dict[str, Any]:
    """What `host_batch` is told of a run."""
    d, windows, padding = config.data, config.model.windows, any(config.model.experts)
    documents = d.reset_attention_mask
    return dict(positions=d.reset_position_ids, documents=documents, cp=mesh.cp, windows=windows, padding=padding)


def _open_loaders(
    made: Arrangement, sources: Sources, mesh: Mesh
) -> tuple[Loader, list[NamedSet[Loader]], list[NamedSet[Loader]]]:
    """Loaders of training, validation and test data. Between the pipeline's ends samples are read where documents are
    kept apart, or where routers have to know the padding."""
    d, t, seq_length = made.config.data, made.config.train, made.config.model.seq_length
    documents = d.reset_position_ids or d.reset_attention_mask
    padded = d.document_packing == "best-fit" or sources.ignored_label is not None
    reads = mesh.pp.is_first or mesh.pp.is_last or documents or (padded and made.has_experts)
    borders = Borders(sources.eod, d.eod_mask_loss, documents)
    prepare = functools.partial(host_batch, pin=mesh.device.type == "cuda", **batch_marks(made.config, mesh))

    def loader(
        dataset: Dataset, micro_batch_size: int, size_at: Callable[[int], int], ignored_label: int | None = None
    ) -> Loader:
        of, dp = dataset if reads else Unread(seq_length), mesh.dp
        batches = Batches(of, micro_batch_size, dp.rank, dp.size, sources.vocab_size, borders, ignored_label)
        return Prefetcher(batches, prepare, size_at)

    def evaluation(sets: list[NamedSet[Dataset]]) -> list[NamedSet[Loader]]:
        size, micro = made.eval_batch_size, t.eval_micro_batch_size or t.micro_batch_size
        size_at = lambda n: size if n < t.eval_iters * size else 0  # noqa: E731
        return [NamedSet(one.name, loader(one.data, micro, size_at), one.bytes_per_token) for one in sets]

    train = loader(sources.train, t.micro_batch_size, made.batch_sizes.at, sources.ignored_label)
    return train, evaluation(sources.valid), evaluation(sources.test)
