"""Build a run from its configuration; model, data and optimizer get only the values that they need."""

import datetime
import functools
from collections.abc import Callable
from typing import Any

import torch

from megalite.config.env_overrides import env_override
from megalite.config.options import Config
from megalite.config.validation import find_problems
from megalite.data.datasets.base_dataset import Dataset
from megalite.data.datasets.batches import Batches, DocumentBoundaries, MicroBatch, PlaceholderDataset, Prefetcher
from megalite.data.datasets.requests import pack_requests
from megalite.kernels.dispatch import set_kernel_options
from megalite.launch.rank_info import RankInfo
from megalite.models.gpt import Stage
from megalite.models.torch_compile import Backend, compile_blocks
from megalite.nn.activation_offload import ActivationOffload
from megalite.nn.loss_sums import LossSums, head_losses
from megalite.nn.micro_batch import Batch
from megalite.optim.adamw import ApexAdamW
from megalite.optim.distributed_optimizer import DistributedOptimizer
from megalite.optim.loss_scale import LossScaler
from megalite.optim.lr import LrSchedule, OptimSchedules, WeightDecaySchedule
from megalite.optim.sgd import SGD
from megalite.optim.update_rule import UpdateRule, build_rules
from megalite.optim.zero.sharding import half_reduce_dtype
from megalite.optim.zero.sync import BucketSync, ZeroConfig
from megalite.parallel.mesh import Mesh, build_mesh
from megalite.parallel.streams import CudaGraph, cuda_graph_factory, new_stream, on_stream
from megalite.pipeline.cuda_graph import CudaGraphPipeline
from megalite.pipeline.runtime import Pipeline
from megalite.planning.run_plan import RunPlan, make_run_plan
from megalite.training.batch import to_host_batch
from megalite.training.datasets import DatasetBundle, NamedDataset, build_datasets
from megalite.training.expert_balancer import ExpertLoadBalancer
from megalite.training.monitoring.spike_detector import SpikeDetector
from megalite.training.noise_scale import NoiseScale
from megalite.training.plugin_metrics import PluginMetrics
from megalite.training.request_loader import RequestLoader
from megalite.training.state import Loader, Run


class SetupError(Exception):
    """The configuration does not fit the ranks, the data or the machine; the message has a line for each problem."""


def build_schedules(plan: RunPlan) -> OptimSchedules:
    """Build the schedules of learning rates and weight decay, in samples; an iteration counts as a global batch."""
    optim, train = plan.config.optim, plan.config.train

    def to_samples(iters: int | None, samples: int | None) -> float:
        return float(samples) if samples else float((iters or 0) * plan.shape.batch_size)

    if train.train_samples:
        total = float(train.train_samples)
    elif train.rampup_batch_size:
        total = float(plan.shape.total_samples)
    else:
        total = to_samples(train.train_iters, None)
    decay = to_samples(optim.lr_decay_iters, optim.lr_decay_samples) or total
    warm_up = to_samples(optim.lr_warmup_iters, optim.lr_warmup_samples)
    if optim.lr_warmup_fraction is not None:
        warm_up = optim.lr_warmup_fraction * decay
    shape: dict[str, Any] = dict(
        style=optim.lr_decay_style,
        warm_up=warm_up,
        decay=decay,
        warm_up_init=optim.lr_warmup_init,
        wsd=to_samples(optim.lr_wsd_decay_iters, optim.lr_wsd_decay_samples),
        wsd_style=optim.lr_wsd_decay_style,
    )
    lr = LrSchedule(optim.lr or 0.0, optim.min_lr, **shape)  # a run that only evaluates needs no --lr
    decoupled = None
    if optim.decoupled_lr is not None:
        decoupled_min_lr = optim.min_lr if optim.decoupled_min_lr is None else optim.decoupled_min_lr
        decoupled = LrSchedule(optim.decoupled_lr, decoupled_min_lr, **shape)
    if optim.lr_base_batch_size is not None:
        factor = plan.shape.batch_sizes.final / optim.lr_base_batch_size
        lr = lr.scaled(factor)
        if decoupled is not None:
            decoupled = decoupled.scaled(factor)
    start, end = optim.weight_decay, optim.weight_decay
    if optim.start_weight_decay is not None and optim.end_weight_decay is not None:
        start, end = optim.start_weight_decay, optim.end_weight_decay
    return OptimSchedules(lr, WeightDecaySchedule(start, end, optim.weight_decay_incr_style, total), decoupled)


def build_update_rules(config: Config) -> tuple[UpdateRule, UpdateRule | None]:
    """Return the update rule of the optimizer, and the rule for matrices if it has a separate one (Muon), else None."""
    if config.train.skip_train:
        return SGD(momentum=0.0), None  # it has no optimizer state
    if config.optim.optimizer_impl == "apex" and not ApexAdamW.available():
        raise SetupError("optimizer_impl=apex needs apex's CUDA extension amp_C on a CUDA device; use auto")
    return build_rules(config.optim, config.model.width_mult)


def build_loss_scaler(config: Config) -> LossScaler:
    """Build the loss scaler: none without fp16, a constant one with --loss-scale, otherwise a dynamic one."""
    precision = config.precision
    if not precision.fp16:
        return LossScaler()
    if precision.loss_scale is not None:
        return LossScaler(scale=precision.loss_scale)
    return LossScaler(
        precision.initial_loss_scale, True, precision.min_loss_scale, precision.loss_scale_window, precision.hysteresis
    )


def step_timeout(config: Config) -> datetime.timedelta:
    """Return the timeout of collectives after start-up."""
    parallel = config.parallel
    if parallel.distributed_timeout_seconds_after_init is not None:
        return datetime.timedelta(seconds=parallel.distributed_timeout_seconds_after_init)
    return datetime.timedelta(minutes=parallel.distributed_timeout_minutes)


def build_run(
    config: Config,
    ranks: RankInfo,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    sources: DatasetBundle | None = None,
    plan: RunPlan | None = None,
    compile_backend: Backend = "inductor",
    graphs: Callable[[], CudaGraph] | None = None,
) -> Run:
    """Build all parts of a run on this rank; collective.

    Args:
        dtype: The dtype of the weights; by default the plan's (tests use fp64).
        sources: The datasets, if they are open already.
        plan: The plan of the run, if there is one; the configuration is then assumed to be valid.
        compile_backend: The backend of torch.compile, used with --compile.
        graphs: A factory of graphs that replaces CUDA's and turns on graph capture.

    Raises:
        SetupError: if the configuration is invalid, before any memory is allocated.
    """
    model, parallel, train, operations = config.model, config.parallel, config.train, config.operations
    if plan is None and (problems := find_problems(config, ranks.world_size)):
        raise SetupError("\n".join(problems))
    sources = sources or build_datasets(config.data, model.seq_length, train.seed, train.eval_iters)
    plan = plan or make_run_plan(config, ranks.world_size, sources.vocab_size)
    shape = plan.shape
    mesh = build_mesh(
        **shape.mesh_sizes,
        device=device,
        shared_memory=env_override("shared_memory", parallel.shared_memory),
        timeout=datetime.timedelta(minutes=parallel.distributed_timeout_minutes),
        later_timeout=step_timeout(config),
    )
    set_kernel_options(parallel.kernels, parallel.attention_kernel, parallel.linear_attention_kernel)
    stages = plan.balance.build_stages(mesh, dtype or shape.dtype, deferred=True)
    if train.compile:
        compile_blocks(stages, compile_backend)
    sync, pipeline = _build_pipeline(plan, stages, mesh, dtype or shape.dtype, graphs)
    train_loader, valid_loaders, test_loaders = _open_loaders(plan, sources, mesh)
    rule, matrix_rule = build_update_rules(config)
    optimizer = DistributedOptimizer(
        sync, rule, matrix_rule, config.optim.offload_fraction, config.optim.optimizer_offload_dir
    )
    return Run(
        mesh=mesh,
        pipeline=pipeline,
        loss_sums=LossSums(
            head_losses(train.z_loss_coeff), model.layer_losses, mesh.device, model.num_mtp_depths, model.layer_uses
        ),
        expert_balancer=ExpertLoadBalancer(stages, mesh, model),
        sync=sync,
        optimizer=optimizer,
        schedules=build_schedules(plan),
        loss_scaler=build_loss_scaler(config),
        batch_sizes=shape.batch_sizes,
        eval_batch_size=shape.eval_batch_size,
        last_step=shape.num_steps,
        train_loader=train_loader,
        valid_loaders=valid_loaders,
        test_loaders=test_loaders,
        requests=_open_requests(plan, sources, mesh),
        ledger=sources.ledger,
        tokenizer=sources.tokenizer,
        seq_length=model.seq_length,
        clip_grad=config.optim.clip_grad,
        check_finite=train.check_for_nan_in_loss_and_grad,
        vocab_size=sources.vocab_size,
        noise_scale=NoiseScale(optimizer) if config.log.log_noise_scale else None,
        rerun_mode=train.rerun_mode,
        replica_action=(
            operations.check_replicas_action if operations.check_weight_hash_across_dp_replicas_interval else None
        ),
        spikes=SpikeDetector.from_config(train),
        plugin_metrics=PluginMetrics(stages, mesh, 1 + model.numbered_layers[-1][0]),
    )


def _build_pipeline(
    plan: RunPlan, stages: list[Stage], mesh: Mesh, dtype: torch.dtype, graphs: Callable[[], CudaGraph] | None
) -> tuple[BucketSync, Pipeline]:
    """Build the buckets of weights and gradients, and the pipeline, with CUDA graphs if they are enabled."""
    config, parallel, train = plan.config, plan.config.parallel, plan.config.train
    if train.cpu_offloading_num_layers:
        for stage in stages:
            stage.offload = ActivationOffload(
                train.cpu_offloading_num_layers, train.min_offloaded_tensor_size, mesh.device
            )
    stream = None
    if train.cuda_graph_impl != "none" and graphs is None:
        stream, graphs = new_stream(mesh.device), cuda_graph_factory()
    with on_stream(stream):
        sync = BucketSync(
            stages,
            mesh,
            bucket_size=parallel.ddp_bucket_size,
            overlap_grad_reduce=parallel.overlap_grad_reduce,
            overlap_param_gather=parallel.overlap_param_gather,
            half_reduce_dtype=half_reduce_dtype(parallel),
            zero_config=ZeroConfig(
                parallel.effective_zero_stage,
                plan.shape.sharding_policy.unshard_by_chunk,
                parallel.outer_dp_sharding_strategy == "optim",
                parallel.param_cpu_offload,
            ),
            **config.optim.separate_buckets(config.model.width_mult),
        )
    options: dict[str, Any] = dict(
        schedule=parallel.pipeline_schedule,
        dtype=dtype,
        param_sync=sync,
        hidden_size=config.model.hidden_size,
        split_backward=plan.balance.split_backward,
        group_size=parallel.microbatch_group_size_per_virtual_pipeline_stage,
    )
    if graphs is None:
        return sync, Pipeline(stages, mesh, **options)
    pipeline = CudaGraphPipeline(
        stages,
        mesh,
        new_graph=graphs,
        zero_unwritten_grads=sync.zero_unwritten_grads,
        # The first and last micro-batches gather weights and reduce gradients, which a graph does not record.
        eager_first_and_last=mesh.dp_cp.size > 1,
        stream=stream,
        **options,
    )
    return sync, pipeline


def host_batch_options(config: Config, mesh: Mesh) -> dict[str, Any]:
    """Return the keyword arguments of `to_host_batch` that are the same for all batches of a run."""
    return dict(
        positions=config.data.reset_position_ids,
        documents=config.data.reset_attention_mask,
        cp=mesh.cp,
        windows=config.model.attention_windows,
        padding=config.model.has_experts or bool(config.model.layer_losses),
        num_mtp_depths=config.model.num_mtp_depths if mesh.pp.is_last else 0,
    )


def _prepare_host_batch(config: Config, mesh: Mesh, **changes: bool) -> Callable[[MicroBatch], Batch]:
    """Return the function from a micro-batch to a batch in host memory.

    `changes` replace arguments of `to_host_batch` that follow from the options.
    """
    options = {**host_batch_options(config, mesh), **changes}
    return functools.partial(to_host_batch, pin=mesh.device.type == "cuda", **options)


def _open_loaders(
    plan: RunPlan, sources: DatasetBundle, mesh: Mesh
) -> tuple[Loader, list[NamedDataset[Loader]], list[NamedDataset[Loader]]]:
    """Open the loaders of the training, validation and test data.

    Middle pipeline stages read samples only if documents are separated, or if the padding has to be known: by routers,
    and by losses of layers.
    """
    shape = plan.shape
    data, train = plan.config.data, plan.config.train
    separate_documents = data.reset_position_ids or data.reset_attention_mask
    counts_padding = shape.has_experts or bool(plan.config.model.layer_losses)
    is_padded = data.document_packing == "best-fit" or sources.ignored_label is not None
    reads_samples = mesh.pp.is_first or mesh.pp.is_last or separate_documents or (is_padded and counts_padding)
    has_depths = plan.config.model.num_mtp_depths > 0
    boundaries = DocumentBoundaries(sources.eod, data.eod_mask_loss, separate_documents, ids=has_depths)
    prepare = _prepare_host_batch(plan.config, mesh)

    def open_loader(
        dataset: Dataset, micro_batch_size: int, batch_size_at: Callable[[int], int], ignored_label: int | None = None
    ) -> Loader:
        batches = Batches(
            dataset if reads_samples else PlaceholderDataset(plan.config.model.seq_length),
            micro_batch_size,
            mesh.dp.rank,
            mesh.dp.size,
            sources.vocab_size,
            boundaries,
            ignored_label,
        )
        return Prefetcher(batches, prepare, batch_size_at)

    def eval_batch_size_at(sample: int) -> int:
        return shape.eval_batch_size if sample < train.eval_iters * shape.eval_batch_size else 0

    def open_eval_loaders(datasets: list[NamedDataset[Dataset]]) -> list[NamedDataset[Loader]]:
        micro_batch_size = train.eval_micro_batch_size or train.micro_batch_size
        return [
            NamedDataset(
                dataset.name, open_loader(dataset.data, micro_batch_size, eval_batch_size_at), dataset.bytes_per_token
            )
            for dataset in datasets
        ]

    train_loader = open_loader(sources.train, train.micro_batch_size, shape.batch_sizes.at, sources.ignored_label)
    return train_loader, open_eval_loaders(sources.valid), open_eval_loaders(sources.test)


def _open_requests(plan: RunPlan, sources: DatasetBundle, mesh: Mesh) -> RequestLoader | None:
    """Return the loader of --eval-requests, or None without them. Its documents are separated in any run."""
    if sources.requests is None:
        return None
    train = plan.config.train
    return RequestLoader(
        pack_requests(sources.requests),
        _prepare_host_batch(plan.config, mesh, positions=True, documents=True),
        train.eval_micro_batch_size or train.micro_batch_size,
        plan.shape.eval_batch_size,
        mesh.dp.rank,
        mesh.dp.size,
    )
