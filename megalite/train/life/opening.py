"""The beginning of a run, before its first step: opens the log, describes the run, compiles."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megalite.checkpoint.storage.location import is_url
from megalite.config import environment
from megalite.config.console import show
from megalite.config.faults import VARIABLE
from megalite.config.options import Config, resolved_style
from megalite.config.run_options import TrainConfig
from megalite.config.toml import differences, to_toml
from megalite.data.samples.batches import MicroBatch
from megalite.launch.ranks import CUDA_VARIABLES, Ranks
from megalite.models.gpt import Block, Stage
from megalite.parallel.comm import all_reduce_
from megalite.plan.arrangement import Arrangement
from megalite.plan.cluster import find_peak
from megalite.plan.kinds import model_flops
from megalite.train.batch import host_batch, on_device
from megalite.train.setup import batch_marks
from megalite.train.sources import Sources
from megalite.train.state import Run
from megalite.train.tell import figures as lines
from megalite.train.tell.figures import Speed
from megalite.train.tell.metrics import ProgressLog, Reporter
from megalite.train.tell.overview import describe
from megalite.train.tell.run_dir import keep_rows_until, write_atomically


def open_reporter(
    plan: Arrangement, config: Config, run: Run, sources: Sources, folder: Path, ranks: Ranks, warnings: Sequence[str]
) -> Reporter:
    log = replace(config.log, log_style=resolved_style(config))
    peak = find_peak(run.mesh.device, plan.dtype, log.peak_tflops, ranks.local_world)
    speed = Speed(model_flops(config.model, plan.padded_vocab), ranks.world, peak.tflops)
    save = config.checkpoint.save
    progress = None
    if log.log_progress and save is not None:
        where = folder if is_url(save) else Path(save)
        progress = ProgressLog(where, ranks.world, speed.flops_per_token, run.state.consumed_tokens)
    report = Reporter(folder, speed, log, wandb_config=differences(config), progress=progress)
    report.attempt(str(folder), lambda: folder.mkdir(parents=True, exist_ok=True))
    rows, validated = folder / "metrics.jsonl", run.state.step < run.last_step
    report.attempt(str(rows), keep_rows_until, rows, run.state.step, validated)
    report.attempt(str(folder / "run_config.toml"), write_atomically, folder / "run_config.toml", to_toml(config))
    if progress is not None:
        report.attempt(str(progress.path), progress.starting)
    if report.megatron:
        report.say(lines.megatron_sizes(ranks.world, run.mesh.sizes))
        report.say(lines.megatron_arguments(config))
    report.say(describe(plan, sources, ranks.local_world, peak, run.mesh.device.type))
    for warning in warnings:
        report.warn(warning)
    for note in sources.notes:
        report.say(f"note: {note}")
    cuda = run.mesh.device.type == "cuda"
    names = (*CUDA_VARIABLES, *filter(None, CUDA_VARIABLES.values()))
    set_ = environment.values_of([*(names if cuda else ()), *environment.OVERRIDES.values(), VARIABLE])
    if set_ or cuda:
        report.say(f"environment: {set_}")
    return report


def get_ready(run: Run, config: Config, report: Reporter) -> None:
    """Between the building of a run and its first step. Collective with --compile."""
    if resolved_style(config) == "megatron" and run.mesh.dp.is_first:  # Megatron-LM's line of each model-parallel rank
        number = sum(entry.numel for entry in run.buffer.layout.entries)
        line = lines.megatron_parameters(run.mesh.tp.rank, run.mesh.pp.rank, number)
        report.say(line) if run.mesh.world.is_first else show(line)
    report.moment("after model, optimizer, and learning rate scheduler are built")
    report.moment("after dataloaders are built")
    if config.train.compile:  # before the first step, so that no step's time has the compiler in it
        seconds = torch.tensor(warm_up(run, config), device=run.mesh.device)
        slowest = float(all_reduce_(seconds, run.mesh.world, dist.ReduceOp.MAX))  # waits until every rank has compiled
        report.say(f"compiled in {slowest:.1f} s")
    if report.megatron:
        report.say("done with setup ...\ntraining ...")
        report.moment("before the start of training step")


def many_evaluations(run: Run, t: TrainConfig) -> list[str]:
    """A note where evaluations take longer than the training: forward is about a third of a step."""
    steps = run.last_step - run.state.step
    times = 1 + (steps - 1) // t.eval_interval if t.eval_interval else 1
    batches = t.eval_iters * (times * len(run.valid) + len(run.test))
    if not 0 < 3 * steps < batches:
        return []
    remedy = "fewer --eval-iters may do, 0 evaluates nothing"
    return [f"eval_iters={t.eval_iters}: {batches:,} batches are evaluated for {steps:,} steps of training; {remedy}"]


def warm_up(run: Run, config: Config) -> float:
    """Compile by one block's forward and backward on a micro-batch of the run's shape; gradients are dropped. Seconds.

    All blocks share the compiled code (models/compiled.py). Collective over tp and, where weights come and go, over
    data; a rank without blocks does nothing, and neither do its peers. Code for evaluation alone is compiled by the
    first evaluation.
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
    host = host_batch(micro, pin=False, **batch_marks(config, run.mesh))
    where = stage.coordinates(on_device(host, run.mesh.device, step=1))
    block = stage.blocks[0]
    assert isinstance(block, Block)
    shape, kind = (len(host.batch.tokens_SB) // run.mesh.tp.size, B, run.pipeline.width), run.pipeline.dtype
    x_sBD = torch.zeros(shape, dtype=kind, device=run.mesh.device, requires_grad=True)
    y_sBD = stage.use(block, x_sBD, where)
    torch.autograd.grad(y_sBD, x_sBD, torch.zeros_like(y_sBD))
    run.buffer.go(chunk)  # no node of a parameter has said that backward is through with it
    return time.perf_counter() - begin
