"""The phases of a run before its first step.

Options, data, machine and directories are checked before there is a process group. Later the log is opened, the run is
described, and its blocks are compiled.
"""

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megalite.checkpoint.storage.local_storage import LocalStorage
from megalite.checkpoint.storage.location import is_url, parse_location
from megalite.checkpoint.storage.storage import storage_of
from megalite.common import environment
from megalite.common.console import print_out
from megalite.common.fault_injection import FAULT_VARIABLE
from megalite.common.optional_packages import MissingPackageError
from megalite.common.safe_open import write_atomically
from megalite.config import env_overrides
from megalite.config.config_file import dump_config, non_default_options
from megalite.config.options import Config, TrainConfig, effective_log_style
from megalite.config.plugins import error_location
from megalite.config.problems import Problem
from megalite.config.validation import find_ineffective, find_problems
from megalite.data.datasets.batches import MicroBatch
from megalite.data.errors import DataError
from megalite.data.files.missing_files import without_data_files
from megalite.kernels.dispatch import KernelError, runs_triton, set_kernel_options
from megalite.launch.local_launcher import cpu_count
from megalite.launch.rank_info import CUDA_VARIABLES, LaunchError, RankInfo, cuda_device
from megalite.models.gpt import Block, Stage
from megalite.models.torch_compile import CompileError, check_compile
from megalite.parallel.comm import all_reduce_
from megalite.parallel.cpu.shared_memory import SHM_DIR, SLOT_BYTES, SLOTS
from megalite.parallel.mesh import Mesh
from megalite.planning.cluster import find_peak
from megalite.planning.layer_kinds import flops_per_token
from megalite.planning.memory import host_bytes
from megalite.planning.run_plan import RunPlan, make_run_plan
from megalite.training.batch import to_device, to_host_batch
from megalite.training.datasets import DatasetBundle, build_datasets
from megalite.training.job.export_hf import export_problems
from megalite.training.logging import log_format as lines
from megalite.training.logging.device_memory import total_memory
from megalite.training.logging.event_log import truncate_metrics_after
from megalite.training.logging.log_format import Speed
from megalite.training.logging.metrics_logger import MetricsLogger, ProgressLog
from megalite.training.logging.plan_summary import format_plan
from megalite.training.logging.run_dir import checkpoint_dirs
from megalite.training.setup import SetupError, host_batch_options
from megalite.training.state import Run


def preflight(config: Config, ranks: RankInfo) -> tuple[RunPlan, DatasetBundle]:
    """Check the configuration, open the data and plan the run.

    Raises:
        SetupError: with all problems of the configuration.
        DataError: if the data cannot be used.
    """
    train = config.train
    if problems := [*find_problems(config, ranks.world_size, complete=True), *export_problems(config)]:
        raise SetupError("\n".join(problems))
    try:
        data = without_data_files(config.data) if train.dry_run_rank is not None else config.data
        sources = build_datasets(data, config.model.seq_length, train.seed, train.eval_iters)
        return make_run_plan(config, ranks.world_size, sources.vocab_size), sources
    except DataError:
        raise
    except ValueError as error:
        raise SetupError(error_location(error) + str(error)) from None


def effects_of_source(command_config: Config, config: Config) -> list[Problem]:
    """Return notes about given options that have no effect with the options of the checkpoint.

    Args:
        command_config: The configuration of the command alone, whose notes have been printed already.
        config: The same, completed by --use-checkpoint-args.
    """
    printed = find_ineffective(command_config)
    return [
        note
        for note in find_ineffective(config, complete=True)
        if note not in printed and note.mentions(command_config.explicit)
    ]


def choose_device(requested: str) -> str:
    """Return the device type for --device, cuda or cpu.

    Raises:
        SetupError: if CUDA is requested but not available.
    """
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if requested == "cuda" and not torch.cuda.is_available():
        raise SetupError("device=cuda but torch sees no GPU; use --device cpu")
    return requested


def check_machine(plan: RunPlan, device: str, ranks: RankInfo) -> None:
    """Raise SetupError or LaunchError if this machine cannot run the plan: backend, kernels, memory, offload disk."""
    config = plan.config
    if device == "cpu" and config.parallel.distributed_backend == "nccl":
        raise SetupError("distributed_backend=nccl needs CUDA devices and there is none; use gloo")
    try:
        set_kernel_options(config.parallel.kernels, config.parallel.attention_kernel)
        runs_triton("cpu" if config.optim.offload_fraction else device)
        if config.train.compile:
            check_compile(device)
        if config.train.cuda_graph_impl != "none" and device != "cuda":
            raise SetupError("cuda_graph_impl=local needs a CUDA device and there is none; drop it")
    except MissingPackageError as error:
        raise LaunchError(str(error)) from None
    except (KernelError, CompileError) as error:
        raise SetupError(str(error)) from None
    state = plan.model_states[plan.fullest_rank]
    required_host_bytes = max(host_bytes(plan))
    if config.optim.offload_fraction and config.optim.optimizer_offload_dir is not None:
        required_disk_bytes = max(rank_state.disk_bytes for rank_state in plan.model_states)
        _check_offload_dir(config.optim.optimizer_offload_dir, required_disk_bytes, ranks)
    memory_per_rank = total_memory(torch.device("cpu")) / ranks.local_world_size
    if device == "cpu":
        required = state.total + state.host_bytes
        available, memory_name = memory_per_rank, "the memory"
    elif required_host_bytes > memory_per_rank:
        offload_options = {
            "optimizer_offload_fraction": config.optim.offload_fraction,
            "cpu_offloading_num_layers": config.train.cpu_offloading_num_layers,
        }
        requested = " and ".join(f"{name}={value:g}" for name, value in offload_options.items() if value)
        remedy = "offload less, or to a disk" if config.optim.offload_fraction > 0 else "offload less"
        raise LaunchError(
            f"{requested}: {required_host_bytes / 2**30:.1f} GiB of host memory per rank, "
            f"and there are {memory_per_rank / 2**30:.1f} GiB; {remedy}"
        )
    else:
        required = state.total
        available, memory_name = total_memory(cuda_device(ranks)), "the GPU's memory"
    if required > available:
        pipeline_rank = f" on pipeline rank {plan.fullest_rank}" if plan.pp > 1 else ""
        raise LaunchError(
            f"weights and optimizer alone take {required / 2**30:.1f} GiB per rank{pipeline_rank}, "
            f"{memory_name} is {available / 2**30:.1f} GiB: "
            "use more ranks (tensor, pipeline or data parallel), --bf16 or a smaller model"
        )


def _check_offload_dir(directory: str, required_bytes: int, ranks: RankInfo) -> None:
    """Raise LaunchError if the directory is not writable, or its disk has less than `required_bytes` per local rank."""
    try:
        free = shutil.disk_usage(directory).free / ranks.local_world_size
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        message = f"optimizer_offload_dir={directory!r}: {error.strerror}; name a directory on a disk of each machine"
        raise LaunchError(message) from None
    if required_bytes > free:
        sizes = f"{required_bytes / 2**30:.3g} GiB per rank, and {free / 2**30:.3g} GiB are free"
        raise LaunchError(f"optimizer_offload_dir={directory!r} is to hold {sizes}: use another disk, or more machines")


def thread_oversubscription_warning(device: str, ranks: RankInfo) -> list[str]:
    """Return a warning if ranks on a CPU have more threads than there are cores, so that they wait for each other."""
    threads, cores = torch.get_num_threads(), cpu_count()
    if device != "cpu" or threads == 1 or threads * ranks.local_world_size <= cores:
        return []
    total = f"{threads} threads"
    if ranks.local_world_size > 1:
        total = f"{ranks.local_world_size} ranks x {threads} threads"
    on_cores = f"{cores} core{'s' * (cores > 1)}"
    suggestion = max(1, cores // ranks.local_world_size)
    return [f"{total} on {on_cores} are many times slower than one per core: set OMP_NUM_THREADS={suggestion}"]


def not_shared(mesh: Mesh) -> list[str]:
    """Return a warning if ranks of one machine should communicate by shared memory, and cannot."""
    if not mesh.not_shared:
        return []
    effect = "ranks of one machine exchange through gloo, which is slower"
    remedy = f"make room there, {SLOTS * SLOT_BYTES >> 20} MiB for each rank of a group, or give --no-shared-memory"
    return [f"{SHM_DIR}: {mesh.not_shared}: {effect}; {remedy}"]


def check_save_writable(config: Config, ranks: RankInfo) -> None:
    """Try to write to --save, on one rank of each machine; raises CheckpointError if that fails."""
    checkpoint = config.checkpoint
    if checkpoint.save is None or config.train.skip_train or ranks.local_rank != 0:
        return
    location = parse_location(checkpoint.save_local or checkpoint.save)
    if isinstance(location, Path):
        storage_of(location).check_writable(location, ranks.rank)


def check_save_of_dry_run(config: Config) -> None:
    """Check that --save and --save-local could be written, without creating anything; raises CheckpointError if not."""
    for root in [] if config.train.skip_train else checkpoint_dirs(config):
        location = parse_location(root)
        if isinstance(location, Path):
            LocalStorage().check_can_create(location)


def open_metrics_logger(
    plan: RunPlan,
    config: Config,
    run: Run,
    sources: DatasetBundle,
    directory: Path,
    ranks: RankInfo,
    warnings: Sequence[str],
) -> MetricsLogger:
    """Open the logs of rank 0 and write the description of the run, warnings and notes.

    Rows of metrics.jsonl after the current step, from an earlier process, are dropped.
    """
    log = replace(config.log, log_style=effective_log_style(config))
    peak = find_peak(run.mesh.device, plan.dtype, log.peak_tflops, ranks.local_world_size)
    speed = Speed(flops_per_token(config.model, plan.padded_vocab), ranks.world_size, peak.tflops, peak.too_low)
    save = config.checkpoint.save
    progress = None
    if log.log_progress and save is not None:
        progress_dir = directory if is_url(save) else Path(save)
        progress = ProgressLog(progress_dir, ranks.world_size, speed.flops_per_token, run.state.consumed_tokens)
    report = MetricsLogger(directory, speed, log, wandb_config=non_default_options(config), progress=progress)
    report.try_write(str(directory), lambda: directory.mkdir(parents=True, exist_ok=True))
    metrics_path, config_path = directory / "metrics.jsonl", directory / "run_config.toml"
    # A run that resumes at its last step repeats the final evaluations.
    keep_evaluations = run.state.step < run.last_step
    report.try_write(str(metrics_path), truncate_metrics_after, metrics_path, run.state.step, keep_evaluations)
    report.try_write(str(config_path), write_atomically, config_path, dump_config(config))
    if progress is not None:
        report.try_write(str(progress.path), progress.starting)
    if report.megatron:
        report.info(lines.megatron_text("sizes", world=ranks.world_size, **run.mesh.sizes))
        report.info(lines.megatron_arguments(config))
    report.info(format_plan(plan, sources, ranks.local_world_size, peak, run.mesh.device.type))
    for warning in warnings:
        report.warning(warning)
    for note in sources.notes:
        report.info(f"note: {note}")
    is_cuda = run.mesh.device.type == "cuda"
    names = [*env_overrides.OVERRIDES.values(), FAULT_VARIABLE]
    if is_cuda:
        names = [*CUDA_VARIABLES, *filter(None, CUDA_VARIABLES.values()), *names]
    variables = environment.format_set_variables(names)
    if variables or is_cuda:
        report.info(f"environment: {variables}")
    return report


def finish_startup(run: Run, config: Config, report: MetricsLogger) -> None:
    """Log Megatron-LM's start-up lines and compile the blocks, before the first step; collective with --compile."""
    if effective_log_style(config) == "megatron" and run.mesh.dp.is_first:  # a line of each model-parallel rank
        number = sum(entry.numel for entry in run.buffer.layout.entries)
        line = lines.megatron_text("parameters", tp=run.mesh.tp.rank, pp=run.mesh.pp.rank, number=number)
        if run.mesh.world.is_first:
            report.info(line)
        else:
            print_out(line)
    report.megatron_timestamp("after model, optimizer, and learning rate scheduler are built")
    report.megatron_timestamp("after dataloaders are built")
    if config.train.compile:  # before the first step, so that the time of no step includes compilation
        seconds = torch.tensor(compile_warmup(run, config), device=run.mesh.device)
        max_seconds = all_reduce_(seconds, run.mesh.world, dist.ReduceOp.MAX)  # waits until every rank has compiled
        report.info(f"compiled in {float(max_seconds):.1f} s")
    if report.megatron:
        report.info("done with setup ...\ntraining ...")
        report.megatron_timestamp("before the start of training step")


def long_evaluation_note(run: Run, train: TrainConfig) -> list[str]:
    """Return a note if evaluations take longer than the training, given that a forward is about a third of a step."""
    steps = run.last_step - run.state.step
    evaluations = 1 + (steps - 1) // train.eval_interval if train.eval_interval else 1
    batches = train.eval_iters * (evaluations * len(run.valid_loaders) + len(run.test_loaders))
    if not 0 < 3 * steps < batches:
        return []
    return [
        f"eval_iters={train.eval_iters}: {batches:,} batches are evaluated for {steps:,} steps of training; "
        "fewer --eval-iters may do, 0 evaluates nothing"
    ]


def compile_warmup(run: Run, config: Config) -> float:
    """Compile by running a block's forward and backward on a micro-batch of the run's shape; returns the seconds.

    All blocks share the compiled code (models/torch_compile.py), and the gradients are dropped. Collective over tp and,
    if weights are resharded, over data parallelism; a rank without blocks does nothing, and neither do its peers. Code
    that only evaluations need is compiled at the first evaluation.
    """
    start = time.perf_counter()
    stages = [
        (chunk, stage)
        for chunk, stage in enumerate(run.pipeline.stages)
        if isinstance(stage, Stage) and len(stage.blocks)
    ]
    if not stages:
        return 0.0
    chunk, stage = stages[0]
    data = config.data
    B, S = config.train.micro_batch_size, run.seq_length
    zeros = np.zeros((B, S + 1), dtype=np.int64)
    document_start = np.zeros((B, S), np.int32) if data.reset_position_ids or data.reset_attention_mask else None
    micro = MicroBatch(zeros, np.arange(B, dtype=np.int64), None, document_start)
    host_batch = to_host_batch(micro, pin=False, **host_batch_options(config, run.mesh))
    batch = stage.with_rope(to_device(host_batch, run.mesh.device, step=1))
    block = stage.blocks[0]
    assert isinstance(block, Block)
    shape = (len(host_batch.tokens_SB) // run.mesh.tp.size, B, run.pipeline.hidden_size)
    x_sBD = torch.zeros(shape, dtype=run.pipeline.dtype, device=run.mesh.device, requires_grad=True)
    with environment.safe_path():  # inductor starts `python -c` to find out which vector instructions work
        y_sBD = stage.run_unit(block, x_sBD, batch)
        torch.autograd.grad(y_sBD, x_sBD, torch.zeros_like(y_sBD))
    run.buffer.reshard(chunk)  # explicitly, because no gradient of a parameter has triggered it
    return time.perf_counter() - start
