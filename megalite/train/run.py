"""One rank from its place in the world to its exit code: set up, resume, train, leave a status behind."""

from __future__ import annotations

import datetime
import io
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch

from megalite.checkpoint.manifest import CheckpointError, ElsewhereError
from megalite.config import Config, padded_vocab_size
from megalite.config_check import check
from megalite.config_toml import differences, to_toml
from megalite.data.indexed import DataError
from megalite.kernels.attention import describe_attention
from megalite.kernels.dispatch import KernelError, describe_kernels, runs_triton
from megalite.models.compiled import CompileError, check_compile, describe_compile
from megalite.models.flops import num_parameters, train_flops_per_token
from megalite.optim.loss_scale import ScaleExhausted
from megalite.parallel import shared_memory
from megalite.parallel.launch import CUDA_VARIABLES, LaunchError, Ranks, process_group
from megalite.train import foreign
from megalite.train.allocator import keep_freed_memory
from megalite.train.checkpoints import loaded_line, open_saver
from megalite.train.datasets import Sources, open_sources
from megalite.train.export import check_export, export
from megalite.train.hardware import Peak, find_peak
from megalite.train.loop import Plan, StopSignal, train
from megalite.train.metrics import Reporter, Speed, missing_packages
from megalite.train.run_dir import Exit, keep_rows_until, leave_status, run_folder, write_atomically
from megalite.train.setup import (
    SetupError,
    batch_sizes,
    build_run,
    layers_of_stages,
    memory_bytes,
    params_dtype,
    run_length,
    state_bytes,
)
from megalite.train.start import already_saved, begin_branch, start_run
from megalite.train.state import Run
from megalite.train.step import NonFiniteError
from megalite.train.warm_up import warm_up


def choose_device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise SetupError("device=cuda but torch sees no card; use --device cpu")
    return wanted


def check_machine(config: Config, device: str, ranks: Ranks, vocab_size: int) -> None:
    """Refuse what this machine cannot do: a backend without its device, more than its memory."""
    p = config.parallel
    if device == "cpu" and p.distributed_backend == "nccl":
        raise SetupError("distributed_backend=nccl needs CUDA devices and there is none; use gloo")
    try:
        runs_triton(device)
        describe_attention(device)  # MEGALITE_ATTENTION is one of its names
        shared_memory.wanted()  # and so is MEGALITE_SHARED_MEMORY
        if config.train.compile:
            check_compile(device)
        if config.train.cuda_graph_impl != "none" and device != "cuda":
            raise SetupError("cuda_graph_impl=local needs a CUDA device and there is none; leave it away")
    except (KernelError, CompileError, ValueError) as error:
        raise SetupError(str(error)) from None
    needs = memory_of(config, ranks.world, vocab_size)
    if device == "cpu":
        there, what = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks.local_world, "the memory"
    else:
        there, what = torch.cuda.get_device_properties(ranks.local_rank).total_memory, "the card's memory"
    if needs > there:
        raise LaunchError(
            f"weights and optimizer alone take {needs / 2**30:.1f} GiB per rank, {what} is {there / 2**30:.1f} GiB: "
            "use more ranks (tensor, pipeline or data parallel), --bf16 or a smaller model"
        )


def memory_of(config: Config, world: int, vocab_size: int) -> float:
    """Bytes of one rank's weights, gradients and optimizer."""
    p = config.parallel
    shards = p.tensor_model_parallel_size * p.pipeline_model_parallel_size
    half = config.precision.bf16 or config.precision.fp16
    parameters = num_parameters(config.model, vocab_size) // shards
    sharded, states = p.use_distributed_optimizer, state_bytes(config.optim)
    return memory_bytes(parameters, dp=world // shards, half=half, sharded=sharded, states=states)


def pretrain(config: Config, ranks: Ranks) -> int:
    """Returns the exit code of this rank (train/run_dir.py)."""
    folder = run_folder(config)
    try:
        config = foreign.with_source(config)
        sources = preflight(config, ranks)
        if config.train.dry_run:
            if ranks.rank == 0:
                print(describe(config, sources, ranks.world, None), flush=True)
            return Exit.DONE
        device = choose_device(config.parallel.device)
        check_machine(config, device, ranks, sources.vocab_size)
        if device == "cpu":
            keep_freed_memory()
        startup = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
        backend = config.parallel.distributed_backend
        with process_group(ranks, device=device, backend=backend, startup_timeout=startup) as here:
            return _pretrain(config, ranks, here, sources, folder)
    except (SetupError, DataError, LaunchError) as error:
        if ranks.local_rank == 0:  # every rank found the same
            for line in str(error).splitlines():
                print(f"pretrain_gpt.py: {line}", file=sys.stderr, flush=True)
        code = Exit.USAGE if isinstance(error, SetupError) else Exit.PREFLIGHT
        if ranks.rank == 0 and folder.is_dir():  # what a run before left there would be taken for this one's
            leave_status(folder, code.outcome, checkpoint=config.checkpoint.save, reason=str(error))
        return code
    except CheckpointError as error:  # of the directory to save in: another run may have it, so its status stays
        if not isinstance(error, ElsewhereError):
            print(f"pretrain_gpt.py: {error}", file=sys.stderr, flush=True)
        return Exit.PREFLIGHT


def preflight(config: Config, ranks: Ranks) -> Sources:
    """All that can be refused before a process group exists."""
    problems = check(config, ranks.world, complete=True)
    problems += missing_packages(config.log.tensorboard_dir, config.log.wandb_project)
    if problems:
        raise SetupError("\n".join(problems))
    m, p, t = config.model, config.parallel, config.train
    assert m.seq_length
    try:
        sizes = batch_sizes(config, ranks.world // (p.tensor_model_parallel_size * p.pipeline_model_parallel_size))
    except ValueError as error:
        raise SetupError(str(error)) from None
    check_export(config)
    if run_length(config, sizes).steps < 1:
        raise SetupError(f"train_samples={t.train_samples} is below one batch of {sizes.at(0)}; give more")
    sources = open_sources(config.data, m.seq_length, t.seed, t.eval_iters * sizes.final)
    try:
        layers_of_stages(config, sources.vocab_size)
    except ValueError as error:
        raise SetupError(str(error)) from None
    return sources


def _pretrain(config: Config, ranks: Ranks, device: torch.device, sources: Sources, folder: Path) -> int:
    run = build_run(config, ranks, device, sources=sources)
    stop = StopSignal()
    if config.train.exit_signal_handler:
        stop.install()
    report: Reporter | None = None
    outcome, reason = Exit.CRASH, ""
    saver = open_saver(run, config)  # before anything is written there: another run may have the directory
    if ranks.rank == 0 and folder.is_dir():
        leave_status(folder, "running", checkpoint=config.checkpoint.save, reason="")
    try:
        loaded, notes = foreign.start(run, config) or start_run(run, config)
        saved = already_saved(run, saver, loaded)
        notes += begin_branch(run, config, saver, saved)
        if ranks.rank == 0:
            report = _reporter(config, run, sources, folder, ranks)
            if loaded is not None:
                report.say(loaded_line(run, config, loaded))
            for note in notes:
                report.say(f"note: {note}")
        if config.train.compile:  # now, and not in the first step: its time is of the training
            took = warm_up(run, config)
            if report is not None:
                report.say(f"compiled in {took:.1f} s")
        outcome, reason = train(run, plan_of(config), to_toml(config), folder, report, stop, saver, saved)
        if outcome is Exit.DONE and (line := export(run, config, sources.eod)) and report is not None:
            report.say(line)
    except SetupError:
        raise
    except (NonFiniteError, ScaleExhausted) as error:
        outcome, reason = Exit.BAD_RESULT, str(error)
        if ranks.rank == 0:
            print(f"pretrain_gpt.py: {error}", file=sys.stderr, flush=True)
    except CheckpointError as error:
        outcome, reason = Exit.CRASH, str(error)
        if not isinstance(error, ElsewhereError):
            print(f"pretrain_gpt.py: {error}", file=sys.stderr, flush=True)
    except DataError as error:
        outcome, reason = Exit.PREFLIGHT, str(error)
        if run.mesh.pp.is_first and run.mesh.tp.is_first:  # the ranks of a dp position read the same samples
            print(f"pretrain_gpt.py: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        outcome, reason = Exit.INTERRUPTED, "SIGINT"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        print(
            f"{run.mesh.describe()}, step {run.state.step + 1}:\n{traceback.format_exc()}", file=sys.stderr, flush=True
        )
    finally:
        run.close()
        if saver is not None and (lost := saver.close(wait=outcome not in (Exit.CRASH, Exit.PREFLIGHT))):
            reason += f"; {lost}"
        if report is not None:
            for line in saver.news() if saver is not None else []:
                report.say(line)
            report.close()
        if ranks.rank == 0 and folder.is_dir():
            steps = {"step": run.state.step, "tokens": run.state.consumed_tokens}
            leave_status(folder, outcome.outcome, checkpoint=config.checkpoint.save, reason=reason, **steps)
    if outcome in (Exit.CRASH, Exit.PREFLIGHT, Exit.INTERRUPTED):
        sys.stdout.flush()
        os._exit(int(outcome))  # the group may be in the middle of a collective that never ends: do not wait for it
    return outcome


def plan_of(config: Config) -> Plan:
    t, c = config.train, config.checkpoint
    return Plan(
        log_interval=config.log.log_interval,
        eval_interval=t.eval_interval,
        eval_iters=t.eval_iters,
        save_interval=c.save_interval,
        save_every_s=None if c.save_interval_mins is None else 60 * c.save_interval_mins,
        save_optimizer=not c.no_save_optim,
        exit_interval=t.exit_interval,
        exit_after_s=None if t.exit_duration_in_mins is None else 60 * t.exit_duration_in_mins,
        profile_step=config.log.profile_pipeline,
    )


def _reporter(config: Config, run: Run, sources: Sources, folder: Path, ranks: Ranks) -> Reporter:
    m, log = config.model, config.log
    assert m.seq_length
    peak = find_peak(run.mesh.device, params_dtype(config), log.peak_tflops, ranks.local_world)
    padded = padded_vocab_size(run.vocab_size, m.make_vocab_size_divisible_by, run.mesh.tp.size)
    speed = Speed(train_flops_per_token(m, m.seq_length, padded), ranks.world, peak.tflops)
    folder.mkdir(parents=True, exist_ok=True)
    keep_rows_until(folder / "metrics.jsonl", run.state.step, validated=run.state.step < run.last_step)
    write_atomically(folder / "run_config.toml", to_toml(config))
    report = Reporter(
        folder,
        speed,
        style=log.log_style,
        throughput=log.log_throughput,
        tensorboard_dir=log.tensorboard_dir,
        wandb_project=log.wandb_project,
        wandb_name=log.wandb_exp_name,
        wandb_config=differences(config),
    )
    report.say(describe(config, sources, ranks.world, peak, run.mesh.device.type))
    for note in sources.notes:
        report.say(f"note: {note}")
    if run.mesh.device.type == "cuda":
        set_ = [f"{name}={os.environ[name]}" for name in CUDA_VARIABLES if name in os.environ]
        report.say("environment: " + " ".join(set_))
    return report


def describe(config: Config, sources: Sources, world: int, peak: Peak | None, device_type: str | None = None) -> str:
    """The plan as a table: what will run where, and how much of it there is. A dry run has no device and no peak."""
    from rich.console import Console
    from rich.table import Table

    m, p = config.model, config.parallel
    assert m.seq_length
    tp, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    dp = world // (tp * pp)
    sizes = batch_sizes(config, dp)
    length = run_length(config, sizes)
    padded = padded_vocab_size(sources.vocab_size, m.make_vocab_size_divisible_by, tp)
    layers = layers_of_stages(config, padded)
    total = num_parameters(replace(m), sources.vocab_size)
    memory = memory_of(config, world, sources.vocab_size) / 2**30
    counts = [len(r) for r in layers]
    rows = {
        "mesh": f"pp {pp} x dp {dp} x cp 1 x tp {tp} = {world} rank{'s' * (world > 1)}",
        "parameters": f"{total:,} (vocabulary {sources.vocab_size:,}, padded to {padded:,})",
        "layers per stage": " ".join(map(str, counts)),
        "schedule": f"{p.pipeline_schedule}, {len(layers) // pp} chunk{'s' * (len(layers) > pp)} per rank",
        "precision": "bf16" if config.precision.bf16 else "fp16" if config.precision.fp16 else "fp32",
        "weights and optimizer": f"about {memory:.2f} GiB per rank, without activations",
        "steps": f"{length.steps:,} of {sizes.final} x {m.seq_length} tokens: {length.samples * m.seq_length:,} tokens",
        "data": sources.train.describe(length.samples),
    }
    if device_type is not None:
        rows["kernels"] = describe_kernels(device_type)
        rows["attention"] = describe_attention(device_type, m.attention_dropout > 0)
    if windows := [w for w in m.windows if w is not None]:
        rows["window"] = f"{windows[0]:,} keys in {len(windows)} of {m.num_layers} layers"
    if config.train.compile:
        rows["compile"] = describe_compile()
    if config.train.cuda_graph_impl != "none":
        rows["CUDA graph"] = "one micro-batch, recorded at its second and then replayed"
    if peak is not None:
        rows["peak"] = "n/a" if peak.tflops is None else f"{peak.tflops:.3g} TFLOP/s ({peak.source})"
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    text = io.StringIO()
    Console(file=text, width=110, color_system=None).print(table)
    return text.getvalue().rstrip()
