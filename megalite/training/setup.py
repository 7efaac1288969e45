"""Builds a run: the only module that sees the whole configuration, and hands each part the values that it needs."""

import datetime
import functools
from collections.abc import Callable
from typing import Any

import torch

from megalite.config.environment import env_override
from megalite.config.options import Config
from megalite.config.validation import find_problems
from megalite.data.datasets.base_dataset import Dataset
from megalite.data.datasets.batches import Batches, DocumentBoundaries, PlaceholderDataset, Prefetcher
from megalite.kernels.dispatch import set_kernel_options
from megalite.launch.rank_info import RankInfo
from megalite.models.gpt import Stage
from megalite.models.torch_compile import Backend, compile_blocks
from megalite.nn.activation_offload import ActivationOffload
from megalite.optim.adamw import ApexAdamW
from megalite.optim.buffer import ParamAndGradBuffer, ZeroConfig
from megalite.optim.distributed_optimizer import DistributedOptimizer
from megalite.optim.loss_scale import LossScaler
from megalite.optim.lr import LrSchedule, OptimSchedules, WeightDecaySchedule
from megalite.optim.sgd import SGD
from megalite.optim.update_rule import UpdateRule, build_rules
from megalite.parallel.mesh import Mesh, build_mesh
from megalite.parallel.streams import CudaGraph, cuda_graph_factory, new_stream, on_stream
from megalite.pipeline.cuda_graph import CudaGraphPipeline
from megalite.pipeline.runtime import Pipeline
from megalite.planning.run_plan import RunPlan, make_run_plan
from megalite.training.batch import to_host_batch
from megalite.training.callbacks import PluginMetrics
from megalite.training.datasets import DatasetBundle, NamedDataset, build_datasets
from megalite.training.expert_balancer import ExpertLoadBalancer
from megalite.training.monitoring.spike_detector import SpikeDetector
from megalite.training.state import Loader, Run


class SetupError(Exception):
    """The configuration does not fit the ranks, the data or the machine; a line for each problem."""


def build_schedules(plan: RunPlan) -> OptimSchedules:
    """The schedules of learning rates and weight decay, over samples; an iteration counts as a global batch."""
    o, t, batch = plan.config.optim, plan.config.train, plan.batch_size

    def samples(iters: int | None, count: int | None) -> float:
        return float(count) if count else float((iters or 0) * batch)

    whole = float(t.train_samples or (plan.total_samples if t.rampup_batch_size else (t.train_iters or 0) * batch))
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
        factor = plan.batch_sizes.final / o.lr_base_batch_size
        lr, apart = lr.scaled(factor), apart and apart.scaled(factor)
    start, end = o.weight_decay, o.weight_decay
    if o.start_weight_decay is not None and o.end_weight_decay is not None:
        start, end = o.start_weight_decay, o.end_weight_decay
    return OptimSchedules(lr, WeightDecaySchedule(start, end, o.weight_decay_incr_style, whole), apart)


def build_update_rules(config: Config) -> tuple[UpdateRule, UpdateRule | None]:
    """And of matrices, where they have another one."""
    if config.train.skip_train:
        return SGD(momentum=0.0), None  # has no states
    if config.optim.optimizer_impl == "apex" and not ApexAdamW.available():
        raise SetupError("optimizer_impl=apex needs apex's CUDA extension amp_C on a CUDA device; use auto")
    return build_rules(config.optim)


def build_loss_scaler(config: Config) -> LossScaler:
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
    ranks: RankInfo,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    sources: DatasetBundle | None = None,
    arrangement: RunPlan | None = None,
    compile_backend: Backend = "inductor",
    graphs: Callable[[], CudaGraph] | None = None,
) -> Run:
    """All parts of a run on this rank; collective. Raises SetupError before any memory is taken.

    `dtype`: of the weights, instead of the configuration's (tests use fp64). `sources`: open already. `arrangement`: of
    a configuration that was checked. `compile_backend`: with --compile. `graphs`: of --cuda-graph-impl, not CUDA's.
    """
    m, p, t, o = config.model, config.parallel, config.train, config.operations
    if arrangement is None and (problems := find_problems(config, ranks.world_size)):
        raise SetupError("\n".join(problems))
    sources = sources or build_datasets(config.data, m.seq_length, t.seed, t.eval_iters)
    plan = arrangement or make_run_plan(config, ranks.world_size, sources.vocab_size)
    limits = dict(timeout=datetime.timedelta(minutes=p.distributed_timeout_minutes), later_timeout=step_timeout(config))
    shared_memory = env_override("shared_memory", p.shared_memory)
    mesh = build_mesh(**plan.mesh_sizes, device=device, shared_memory=shared_memory, **limits)
    set_kernel_options(p.kernels, p.attention_kernel)
    stages = plan.build_stages(mesh, dtype or plan.dtype, deferred=True)
    if t.compile:
        compile_blocks(stages, compile_backend)
    buffer, pipeline = _build_pipeline(plan, stages, mesh, dtype or plan.dtype, graphs)
    data, valid, test = _open_loaders(plan, sources, mesh)
    return Run(
        mesh=mesh,
        pipeline=pipeline,
        expert_balancer=ExpertLoadBalancer(stages, mesh, m),
        buffer=buffer,
        optimizer=DistributedOptimizer(
            buffer, *build_update_rules(config), config.optim.offload_fraction, config.optim.optimizer_offload_dir
        ),
        schedules=build_schedules(plan),
        loss_scaler=build_loss_scaler(config),
        batch_sizes=plan.batch_sizes,
        eval_batch_size=plan.eval_batch_size,
        last_step=plan.num_steps,
        train_loader=data,
        valid_loaders=valid,
        test_loaders=test,
        ledger=sources.ledger,
        tokenizer=sources.tokenizer,
        seq_length=m.seq_length,
        clip_grad=config.optim.clip_grad,
        check_finite=t.check_for_nan_in_loss_and_grad,
        vocab_size=sources.vocab_size,
        rerun_mode=t.rerun_mode,
        replica_action=o.check_replicas_action if o.check_weight_hash_across_dp_replicas_interval else None,
        spikes=SpikeDetector.of(t),
        plugin_metrics=PluginMetrics(stages, mesh, m.num_layers),
    )


def _build_pipeline(
    plan: RunPlan, stages: list[Stage], mesh: Mesh, dtype: torch.dtype, graphs: Callable[[], CudaGraph] | None
) -> tuple[ParamAndGradBuffer, Pipeline]:
    config, p, t, stream = plan.config, plan.config.parallel, plan.config.train, None
    for stage in stages if t.cpu_offloading_num_layers else ():
        stage.offload = ActivationOffload(t.cpu_offloading_num_layers, t.min_offloaded_tensor_size, mesh.device)
    if t.cuda_graph_impl != "none" and graphs is None:
        stream, graphs = new_stream(mesh.device), cuda_graph_factory()
    over_replicas = p.outer_dp_sharding_strategy == "optim"
    with on_stream(stream):
        buffer = ParamAndGradBuffer(
            stages,
            mesh,
            bucket_size=p.ddp_bucket_size,
            overlap_grad_reduce=p.overlap_grad_reduce,
            overlap_param_gather=p.overlap_param_gather,
            reduce_in_bf16=p.grad_reduce_in_bf16 and dtype == torch.bfloat16,
            shared=ZeroConfig(
                p.effective_zero_stage, plan.sharding_policy.unshard_by_chunk, over_replicas, p.param_cpu_offload
            ),
            **config.optim.separate_buckets,
        )
    options: dict[str, Any] = dict(schedule=p.pipeline_schedule, dtype=dtype, param_sync=buffer)
    options |= dict(hidden_size=config.model.hidden_size, split_backward=plan.split_backward)
    options |= dict(group_size=p.microbatch_group_size_per_virtual_pipeline_stage)
    if graphs is None:
        return buffer, Pipeline(stages, mesh, **options)
    eager = mesh.dp_cp.size > 1  # weights are gathered and gradients are reduced
    graphed = dict(new_graph=graphs, zero_unwritten_grads=buffer.zero_unwritten_grads, eager_first_and_last=eager)
    return buffer, CudaGraphPipeline(stages, mesh, **graphed, stream=stream, **options)


def host_batch_options(config: Config, mesh: Mesh) -> dict[str, Any]:
    """What `host_batch` is told of a run."""
    d, windows, padding = config.data, config.model.layer_windows, any(config.model.moe_layers)
    documents = d.reset_attention_mask
    return dict(positions=d.reset_position_ids, documents=documents, cp=mesh.cp, windows=windows, padding=padding)


def _open_loaders(
    plan: RunPlan, sources: DatasetBundle, mesh: Mesh
) -> tuple[Loader, list[NamedDataset[Loader]], list[NamedDataset[Loader]]]:
    """Loaders of training, validation and test data. Between the pipeline's ends samples are read where documents are
    kept apart, or where routers have to know the padding."""
    d, t, seq_length = plan.config.data, plan.config.train, plan.config.model.seq_length
    documents = d.reset_position_ids or d.reset_attention_mask
    padded = d.document_packing == "best-fit" or sources.ignored_label is not None
    reads = mesh.pp.is_first or mesh.pp.is_last or documents or (padded and plan.has_experts)
    borders = DocumentBoundaries(sources.eod, d.eod_mask_loss, documents)
    prepare = functools.partial(to_host_batch, pin=mesh.device.type == "cuda", **host_batch_options(plan.config, mesh))

    def loader(
        dataset: Dataset, micro_batch_size: int, size_at: Callable[[int], int], ignored_label: int | None = None
    ) -> Loader:
        of, dp = dataset if reads else PlaceholderDataset(seq_length), mesh.dp
        batches = Batches(of, micro_batch_size, dp.rank, dp.size, sources.vocab_size, borders, ignored_label)
        return Prefetcher(batches, prepare, size_at)

    def evaluation(sets: list[NamedDataset[Dataset]]) -> list[NamedDataset[Loader]]:
        size, micro = plan.eval_batch_size, t.eval_micro_batch_size or t.micro_batch_size
        size_at = lambda n: size if n < t.eval_iters * size else 0  # noqa: E731
        return [NamedDataset(one.name, loader(one.data, micro, size_at), one.bytes_per_token) for one in sets]

    train = loader(sources.train, t.micro_batch_size, plan.batch_sizes.at, sources.ignored_label)
    return train, evaluation(sources.valid), evaluation(sources.test)
