"""A run before its first step: contradictions of options, data, machine and directory are found before a process group
exists; then the log is opened, the run described, and its blocks compiled."""

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
from megalite.common.fault_injection import FAULT_VARIABLE
from megalite.common.optional_packages import MissingPackageError
from megalite.config import environment
from megalite.config.config_file import dump_config, non_default_options
from megalite.config.console import print_out
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
from megalite.training.logging.log_format import Speed
from megalite.training.logging.metrics_logger import MetricsLogger, ProgressLog
from megalite.training.logging.plan_summary import format_plan
from megalite.training.logging.run_dir import checkpoint_dirs, truncate_metrics_after, write_atomically
from megalite.training.setup import SetupError, host_batch_options
from megalite.training.state import Run


def preflight(config: Config, ranks: RankInfo) -> tuple[RunPlan, DatasetBundle]:
    """Open the data and arrange the run. Raises SetupError or DataError with all problems at once."""
    t = config.train
    if problems := [*find_problems(config, ranks.world_size, complete=True), *export_problems(config)]:
        raise SetupError("\n".join(problems))
    try:
        data = without_data_files(config.data) if t.dry_run_rank is not None else config.data
        sources = build_datasets(data, config.model.seq_length, t.seed, t.eval_iters)
        return make_run_plan(config, ranks.world_size, sources.vocab_size), sources
    except DataError:
        raise
    except ValueError as error:
        raise SetupError(error_location(error) + str(error)) from None


def effects_of_source(asked: Config, config: Config) -> list[Problem]:
    """What is to be said of the options of `asked` that do nothing, now that --use-checkpoint-args has added those of
    the checkpoint, in `config`."""
    said = find_ineffective(asked)
    return [note for note in find_ineffective(config, complete=True) if note not in said and note.mentions(asked.given)]


def choose_device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise SetupError("device=cuda but torch sees no card; use --device cpu")
    return wanted


def check_machine(plan: RunPlan, device: str, ranks: RankInfo) -> None:
    """Raises SetupError or LaunchError for what this machine cannot do."""
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
    needs, host = plan.model_states[plan.fullest_rank].total, max(host_bytes(plan))
    if config.optim.offload_fraction and config.optim.optimizer_offload_dir is not None:
        _check_folder(config.optim.optimizer_offload_dir, max(held.disk_bytes for held in plan.model_states), ranks)
    there = total_memory(torch.device("cpu")) / ranks.local_world_size
    if device == "cpu":
        needs, has, what = needs + plan.model_states[plan.fullest_rank].host_bytes, there, "the memory"
    elif host > there:
        has = f"{host / 2**30:.1f} GiB of host memory per rank, and there are {there / 2**30:.1f} GiB"
        options = {"optimizer_offload_fraction": config.optim.offload_fraction}
        options["cpu_offloading_num_layers"] = config.train.cpu_offloading_num_layers
        given = " and ".join(f"{name}={value:g}" for name, value in options.items() if value)
        raise LaunchError(f"{given}: {has}; offload less{', or to a disk' * (config.optim.offload_fraction > 0)}")
    else:
        has, what = total_memory(cuda_device(ranks)), "the card's memory"
    if needs > has:
        where = f" on pipeline rank {plan.fullest_rank}" if plan.pp > 1 else ""
        raise LaunchError(
            f"weights and optimizer alone take {needs / 2**30:.1f} GiB per rank{where}, {what} is {has / 2**30:.1f} "
            "GiB: use more ranks (tensor, pipeline or data parallel), --bf16 or a smaller model"
        )


def _check_folder(folder: str, needs: int, ranks: RankInfo) -> None:
    try:
        has = shutil.disk_usage(folder).free / ranks.local_world_size
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        text = f"optimizer_offload_dir={folder!r}: {error.strerror}; name a folder of a disk of each machine"
        raise LaunchError(text) from None
    if needs > has:
        takes = f"{needs / 2**30:.3g} GiB per rank, and {has / 2**30:.3g} GiB are free"
        raise LaunchError(f"optimizer_offload_dir={folder!r} is to hold {takes}: use another disk, or more machines")


def thread_oversubscription_warning(device: str, ranks: RankInfo) -> list[str]:
    """A warning where ranks on a CPU have more threads than there are cores: these wait for each other busily."""
    threads, n = torch.get_num_threads(), cpu_count()
    if device != "cpu" or threads == 1 or threads * ranks.local_world_size <= n:
        return []
    of = f"{ranks.local_world_size} ranks x {threads} threads" if ranks.local_world_size > 1 else f"{threads} threads"
    fewer = max(1, n // ranks.local_world_size)
    return [f"{of} on {n} core{'s' * (n > 1)} are many times slower than one per core: set OMP_NUM_THREADS={fewer}"]


def not_shared(mesh: Mesh) -> list[str]:
    """A warning where ranks of one machine were to share memory, and cannot."""
    if not mesh.not_shared:
        return []
    slower = "ranks of one machine exchange through gloo, which is slower"
    remedy = f"make room there, {SLOTS * SLOT_BYTES >> 20} MiB for each rank of a group, or give --no-shared-memory"
    return [f"{SHM_DIR}: {mesh.not_shared}: {slower}; {remedy}"]


def check_save_writable(config: Config, ranks: RankInfo) -> None:
    """Try to write to --save, on one rank of each machine. Raises CheckpointError."""
    c = config.checkpoint
    place = parse_location(c.save_local or c.save or ".")
    if c.save is not None and not config.train.skip_train and isinstance(place, Path) and ranks.local_rank == 0:
        storage_of(place).check_writable(place, ranks.rank)


def check_save_of_dry_run(config: Config) -> None:
    """Check that --save and --save-local could be written, and create nothing. Raises CheckpointError."""
    for root in [] if config.train.skip_train else checkpoint_dirs(config):
        if isinstance(place := parse_location(root), Path):
            LocalStorage().check_can_create(place)


def open_metrics_logger(
    plan: RunPlan,
    config: Config,
    run: Run,
    sources: DatasetBundle,
    folder: Path,
    ranks: RankInfo,
    warnings: Sequence[str],
) -> MetricsLogger:
    log = replace(config.log, log_style=effective_log_style(config))
    peak = find_peak(run.mesh.device, plan.dtype, log.peak_tflops, ranks.local_world_size)
    speed = Speed(flops_per_token(config.model, plan.padded_vocab), ranks.world_size, peak.tflops, peak.too_low)
    save = config.checkpoint.save
    progress = None
    if log.log_progress and save is not None:
        where = folder if is_url(save) else Path(save)
        progress = ProgressLog(where, ranks.world_size, speed.flops_per_token, run.state.consumed_tokens)
    report = MetricsLogger(folder, speed, log, wandb_config=non_default_options(config), progress=progress)
    report.try_write(str(folder), lambda: folder.mkdir(parents=True, exist_ok=True))
    rows, validated = folder / "metrics.jsonl", run.state.step < run.last_step
    report.try_write(str(rows), truncate_metrics_after, rows, run.state.step, validated)
    report.try_write(str(folder / "run_config.toml"), write_atomically, folder / "run_config.toml", dump_config(config))
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
    cuda = run.mesh.device.type == "cuda"
    names = (*CUDA_VARIABLES, *filter(None, CUDA_VARIABLES.values()))
    set_ = environment.format_set_variables([*(names if cuda else ()), *environment.OVERRIDES.values(), FAULT_VARIABLE])
    if set_ or cuda:
        report.info(f"environment: {set_}")
    return report


def finish_startup(run: Run, config: Config, report: MetricsLogger) -> None:
    """Between the building of a run and its first step. Collective with --compile."""
    if (
        effective_log_style(config) == "megatron" and run.mesh.dp.is_first
    ):  # Megatron-LM's line of each model-parallel rank
        number = sum(entry.numel for entry in run.buffer.layout.entries)
        line = lines.megatron_text("parameters", tp=run.mesh.tp.rank, pp=run.mesh.pp.rank, number=number)
        report.info(line) if run.mesh.world.is_first else print_out(line)
    report.megatron_timestamp("after model, optimizer, and learning rate scheduler are built")
    report.megatron_timestamp("after dataloaders are built")
    if config.train.compile:  # before the first step, so that no step's time has the compiler in it
        seconds = torch.tensor(compile_warmup(run, config), device=run.mesh.device)
        slowest = float(all_reduce_(seconds, run.mesh.world, dist.ReduceOp.MAX))  # waits until every rank has compiled
        report.info(f"compiled in {slowest:.1f} s")
    if report.megatron:
        report.info("done with setup ...\ntraining ...")
        report.megatron_timestamp("before the start of training step")


def long_evaluation_note(run: Run, t: TrainConfig) -> list[str]:
    """A note where evaluations take longer than the training: forward is about a third of a step."""
    steps = run.last_step - run.state.step
    times = 1 + (steps - 1) // t.eval_interval if t.eval_interval else 1
    batches = t.eval_iters * (times * len(run.valid_loaders) + len(run.test_loaders))
    if not 0 < 3 * steps < batches:
        return []
    remedy = "fewer --eval-iters may do, 0 evaluates nothing"
    return [f"eval_iters={t.eval_iters}: {batches:,} batches are evaluated for {steps:,} steps of training; {remedy}"]


def compile_warmup(run: Run, config: Config) -> float:
    """Compile by one block's forward and backward on a micro-batch of the run's shape; gradients are dropped. Seconds.

    All blocks share the compiled code (models/torch_compile.py). Collective over tp and, where weights come and go, over
    data; a rank without blocks does nothing, nor do its peers. The first evaluation compiles what it alone needs.
    """
    begin = time.perf_counter()
    stages = [(n, s) for n, s in enumerate(run.pipeline.stages) if isinstance(s, Stage) and len(s.blocks)]
    if not stages:
        return 0.0
    chunk, stage = stages[0]
    t, d, S = config.train, config.data, run.seq_length
    B = t.micro_batch_size
    zeros = np.zeros((B, S + 1), dtype=np.int64)
    first = np.zeros((B, S), np.int32) if d.reset_position_ids or d.reset_attention_mask else None
    micro = MicroBatch(zeros, np.arange(B, dtype=np.int64), None, first)
    host = to_host_batch(micro, pin=False, **host_batch_options(config, run.mesh))
    where = stage.with_rope(to_device(host, run.mesh.device, step=1))
    block = stage.blocks[0]
    assert isinstance(block, Block)
    shape, kind = (len(host.tokens_SB) // run.mesh.tp.size, B, run.pipeline.width), run.pipeline.dtype
    x_sBD = torch.zeros(shape, dtype=kind, device=run.mesh.device, requires_grad=True)
    with environment.safe_path():  # inductor starts `python -c` to find out which vector instructions work
        y_sBD = stage.run_unit(block, x_sBD, where)
        torch.autograd.grad(y_sBD, x_sBD, torch.zeros_like(y_sBD))
    run.buffer.reshard(chunk)  # no node of a parameter has said that backward is through with it
    return time.perf_counter() - begin
