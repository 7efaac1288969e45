"""The end of a start, after the run is built: open the log, describe the run, and compile its blocks."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megalite.checkpoint.storage.location import is_url
from megalite.common import environment
from megalite.common.console import print_out
from megalite.common.fault_injection import FAULT_VARIABLE
from megalite.common.safe_open import write_atomically
from megalite.config import env_overrides
from megalite.config.config_file import dump_config, non_default_options
from megalite.config.layer_spec import LayerSpec
from megalite.config.options import Config, TrainConfig, effective_log_style
from megalite.data.datasets.batches import MicroBatch
from megalite.launch.process_group import CUDA_VARIABLES
from megalite.launch.rank_info import RankInfo
from megalite.models.gpt import Stage
from megalite.nn.micro_batch import ForwardContext
from megalite.parallel.comm import all_reduce_
from megalite.planning.bottleneck import recompute_flops
from megalite.planning.device_peaks import find_peak
from megalite.planning.layer_kinds import flops_per_token
from megalite.planning.run_plan import RunPlan
from megalite.training.batch import to_device, to_host_batch
from megalite.training.datasets import DatasetBundle
from megalite.training.logging import log_format
from megalite.training.logging.event_log import truncate_metrics_after
from megalite.training.logging.log_format import Speed
from megalite.training.logging.metrics_logger import MetricsLogger, ProgressLog
from megalite.training.logging.plan_summary import format_plan
from megalite.training.setup import host_batch_options
from megalite.training.state import Run

COLLECTIVE_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_")  # of variables that the log of a run with GPUs has


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
    peak = find_peak(run.mesh.device, plan.shape.dtype, log.peak_tflops, ranks.local_world_size)
    speed = Speed(
        flops_per_token(config.model, plan.shape.padded_vocab),
        ranks.world_size,
        peak.tflops,
        peak.too_low,
        recomputed=recompute_flops(plan) if plan.shape.recompute.granularity is not None else 0.0,
    )
    save = config.checkpoint.save
    progress = None
    if log.log_progress and save is not None:
        progress_dir = directory if is_url(save) else Path(save)
        progress = ProgressLog(progress_dir, ranks.world_size, speed.flops_per_token, run.progress.consumed_tokens)
    tracked_config = non_default_options(config)
    # The directory may have the trackers' ids of another run, which this one does not continue.
    resumes = run.progress.step > 0 and (ranks.is_restart or (save is not None and save == config.checkpoint.load))
    logger = MetricsLogger(directory, speed, log, tracked_config=tracked_config, resumes=resumes, progress=progress)
    logger.try_write(str(directory), lambda: directory.mkdir(parents=True, exist_ok=True))
    metrics_path, config_path = directory / "metrics.jsonl", directory / "run_config.toml"
    # A run that resumes at its last step repeats the final evaluations.
    keep_evaluations = run.progress.step < run.last_step
    logger.try_write(str(metrics_path), truncate_metrics_after, metrics_path, run.progress.step, keep_evaluations)
    logger.try_write(str(config_path), write_atomically, config_path, dump_config(config))
    if progress is not None:
        logger.try_write(str(progress.path), progress.log_start)
    if logger.megatron_style:
        logger.info(log_format.megatron_text("sizes", world=ranks.world_size, **run.mesh.sizes))
        logger.info(log_format.megatron_arguments(config))
    logger.info(format_plan(plan, sources, ranks.local_world_size, peak, run.mesh.device.type))
    for warning in warnings:
        logger.warning(warning)
    for note in sources.notes:
        logger.info(f"note: {note}")
    is_cuda = run.mesh.device.type == "cuda"
    if (variables := variables_of_run(is_cuda)) or is_cuda:
        logger.info(f"environment: {variables}")
    return logger


def variables_of_run(is_cuda: bool) -> str:
    """Return "NAME=value ..." for the set variables that change a run: megalite's own, and with GPUs those of NCCL."""
    names = [*env_overrides.OVERRIDES.values(), FAULT_VARIABLE]
    if is_cuda:
        of_collectives = environment.set_variables(COLLECTIVE_PREFIXES)
        names = [*CUDA_VARIABLES, *filter(None, CUDA_VARIABLES.values()), *names, *of_collectives]
    return environment.format_set_variables(dict.fromkeys(names))


def finish_startup(run: Run, config: Config, logger: MetricsLogger) -> None:
    """Log Megatron-LM's start-up lines and compile the blocks, before the first step; collective with --compile."""
    if effective_log_style(config) == "megatron" and run.mesh.dp.is_first:  # a line of each model-parallel rank
        number = sum(entry.numel for entry in run.sync.layout.entries)
        line = log_format.megatron_text("parameters", tp=run.mesh.tp.rank, pp=run.mesh.pp.rank, number=number)
        if run.mesh.world.is_first:
            logger.info(line)
        else:
            print_out(line)
    logger.megatron_timestamp("after model, optimizer, and learning rate scheduler are built")
    logger.megatron_timestamp("after dataloaders are built")
    if config.train.compile:  # before the first step, so that the time of no step includes compilation
        seconds = torch.tensor(compile_warmup(run, config), device=run.mesh.device)
        max_seconds = all_reduce_(seconds, run.mesh.world, dist.ReduceOp.MAX)  # waits until every rank has compiled
        logger.info(f"compiled in {float(max_seconds):.1f} s")
    if logger.megatron_style:
        logger.info("done with setup ...\ntraining ...")
        logger.megatron_timestamp("before the start of training step")


def long_evaluation_note(run: Run, train: TrainConfig) -> list[str]:
    """Return a note if evaluations take longer than the training, given that a forward is about a third of a step."""
    steps = run.last_step - run.progress.step
    evaluations = 1 + (steps - 1) // train.eval_interval if train.eval_interval else 1
    batches = train.eval_iters * (evaluations * len(run.valid_loaders) + len(run.test_loaders))
    if not 0 < 3 * steps < batches:
        return []
    return [
        f"eval_iters={train.eval_iters}: {batches:,} batches are evaluated for {steps:,} steps of training; "
        "fewer --eval-iters may suffice; 0 turns evaluations off"
    ]


def compile_warmup(run: Run, config: Config) -> float:
    """Compile by running forward and backward of each kind of block on a micro-batch of the run; returns the seconds.

    Blocks share the compiled code (models/torch_compile.py), and the gradients are dropped. Collective over tp and,
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
    data = config.data
    B, S = config.train.micro_batch_size, run.seq_length
    zeros = np.zeros((B, S + 1), dtype=np.int64)
    document_start = np.zeros((B, S), np.int32) if data.reset_position_ids or data.reset_attention_mask else None
    micro = MicroBatch(zeros, np.arange(B, dtype=np.int64), None, document_start)
    host_batch = to_host_batch(micro, pin=False, **host_batch_options(config, run.mesh))
    batch = to_device(host_batch, run.mesh.device)
    shape = (len(host_batch.tokens_SB) // run.mesh.tp.size, B, run.pipeline.hidden_size)
    x_sBD = torch.zeros(shape, dtype=run.pipeline.dtype, device=run.mesh.device, requires_grad=True)
    compiled = set[LayerSpec]()
    for chunk, stage in stages:
        ctx = ForwardContext(step=1, rope=stage.rope_of(batch))
        blocks: Any = stage.blocks
        for block in blocks:
            if block.spec in compiled:
                continue
            compiled.add(block.spec)
            with environment.safe_path():  # inductor starts `python -c` to find out which vector instructions work
                y_sBD = stage.run_unit(block, x_sBD, batch, ctx)
                torch.autograd.grad(y_sBD, x_sBD, torch.zeros_like(y_sBD))
        run.sync.reshard(chunk)  # explicitly, because no gradient of a parameter has triggered it
    return time.perf_counter() - start
