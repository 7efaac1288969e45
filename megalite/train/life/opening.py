"""The beginning of a run, between its parts and its first step: the log is opened, and what it is about told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megalite.checkpoint.storage.location import is_url
from megalite.config import environment
from megalite.config.console import show
from megalite.config.faults import VARIABLE
from megalite.config.options import Config, resolved_style
from megalite.config.run_options import TrainConfig
from megalite.config.toml import differences, to_toml
from megalite.parallel.comm import all_reduce_
from megalite.parallel.launch import CUDA_VARIABLES, OTHER_NAMES, Ranks
from megalite.plan.arrangement import Arrangement
from megalite.plan.kinds import model_flops
from megalite.plan.peak_rates import find_peak
from megalite.train.life.warm_up import warm_up
from megalite.train.sources import Sources
from megalite.train.state import Run
from megalite.train.tell import figures as lines
from megalite.train.tell.figures import Speed
from megalite.train.tell.metrics import Reporter
from megalite.train.tell.overview import describe
from megalite.train.tell.progress_file import ProgressLog
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
    report = Reporter(folder, speed, log, world=ranks.world, wandb_config=differences(config), progress=progress)
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
    set_ = environment.values_of(
        [*((*CUDA_VARIABLES, *OTHER_NAMES.values()) if cuda else ()), *environment.OVERRIDES.values(), VARIABLE]
    )
    if set_ or cuda:
        report.say(f"environment: {set_}")
    return report


def get_ready(run: Run, config: Config, report: Reporter) -> None:
    """What comes between the parts of a run and its first step."""
    if resolved_style(config) == "megatron" and run.mesh.dp.is_first:  # Megatron-LM's line of each model-parallel rank
        number = sum(entry.numel for entry in run.buffer.layout.entries)
        line = lines.megatron_parameters(run.mesh.tp.rank, run.mesh.pp.rank, number)
        report.say(line) if run.mesh.world.is_first else show(line)
    report.moment("after model, optimizer, and learning rate scheduler are built")
    report.moment("after dataloaders are built")
    if config.train.compile:  # now, and not in the first step: its time is of the training
        seconds = torch.tensor(warm_up(run, config), device=run.mesh.device)
        slowest = float(all_reduce_(seconds, run.mesh.world, dist.ReduceOp.MAX))  # waits until every rank has compiled
        report.say(f"compiled in {slowest:.1f} s")
    if report.megatron:
        report.say("done with setup ...\ntraining ...")
        report.moment("before the start of training step")


def many_evaluations(run: Run, t: TrainConfig) -> list[str]:
    """A line where they take longer than the training: forward is about a third of a step."""
    steps = run.last_step - run.state.step
    times = 1 + (steps - 1) // t.eval_interval if t.eval_interval else 1
    batches = t.eval_iters * (times * len(run.valid) + len(run.test))
    if not 0 < 3 * steps < batches:
        return []
    few = "fewer --eval-iters do, 0 evaluates nothing"
    return [f"eval_iters={t.eval_iters}: {batches:,} batches are evaluated for {steps:,} steps of training; {few}"]
