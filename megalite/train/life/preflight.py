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

from megalite.checkpoint.storage.file_system import LocalStorage
from megalite.checkpoint.storage.location import is_url, parse
from megalite.checkpoint.storage.protocol import storage_of
from megalite.config import environment
from megalite.config.console import show
from megalite.config.faults import VARIABLE
from megalite.config.options import Config, TrainConfig, resolved_style
from megalite.config.packages import MissingPackage
from megalite.config.plugins import place
from megalite.config.problems import Problem
from megalite.config.toml import differences, to_toml
from megalite.config.validation import check, without_effect
from megalite.data.errors import DataError
from megalite.data.files.missing_files import rehearsed
from megalite.data.samples.batches import MicroBatch
from megalite.kernels.dispatch import KernelError, choose, runs_triton
from megalite.launch.local_ranks import cores
from megalite.launch.ranks import CUDA_VARIABLES, LaunchError, Ranks, card_of
from megalite.models.compiled import CompileError, check_compile
from megalite.models.gpt import Block, Stage
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh
from megalite.parallel.shared_memory import FOLDER, SLOT_BYTES, SLOTS
from megalite.plan.arrangement import Arrangement, arrange
from megalite.plan.cluster import find_peak
from megalite.plan.kinds import model_flops
from megalite.plan.memory import on_host
from megalite.train.batch import host_batch, on_device
from megalite.train.life.export_hf import export_problems
from megalite.train.setup import SetupError, batch_marks
from megalite.train.sources import Sources, open_sources
from megalite.train.state import Run
from megalite.train.tell import figures as lines
from megalite.train.tell.device_memory import memory_there
from megalite.train.tell.figures import Speed
from megalite.train.tell.metrics import ProgressLog, Reporter
from megalite.train.tell.overview import describe
from megalite.train.tell.run_dir import keep_rows_until, save_roots, write_atomically


def preflight(config: Config, ranks: Ranks) -> tuple[Arrangement, Sources]:
    """Open the data and arrange the run. Raises SetupError or DataError with all problems at once."""
    t = config.train
    if problems := [*check(config, ranks.world, complete=True), *export_problems(config)]:
        raise SetupError("\n".join(problems))
    try:
        data = rehearsed(config.data) if t.as_rank is not None else config.data
        sources = open_sources(data, config.model.seq_length, t.seed, t.eval_iters)
        return arrange(config, ranks.world, sources.vocab_size), sources
    except DataError:
        raise
    except ValueError as error:
        raise SetupError(place(error) + str(error)) from None


def effects_of_source(asked: Config, config: Config) -> list[Problem]:
    """What is to be said of the options of `asked` that do nothing, now that --use-checkpoint-args has added those of
    the checkpoint, in `config`."""
    said = without_effect(asked)
    return [note for note in without_effect(config, complete=True) if note not in said and note.concerns(asked.given)]


def choose_device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise SetupError("device=cuda but torch sees no card; use --device cpu")
    return wanted


def check_machine(plan: Arrangement, device: str, ranks: Ranks) -> None:
    """Raises SetupError or LaunchError for what this machine cannot do."""
    config = plan.config
    if device == "cpu" and config.parallel.distributed_backend == "nccl":
        raise SetupError("distributed_backend=nccl needs CUDA devices and there is none; use gloo")
    try:
        choose(config.parallel.kernels, config.parallel.attention_kernel)
        runs_triton("cpu" if config.optim.offloaded else device)
        if config.train.compile:
            check_compile(device)
        if config.train.cuda_graph_impl != "none" and device != "cuda":
            raise SetupError("cuda_graph_impl=local needs a CUDA device and there is none; drop it")
    except MissingPackage as error:
        raise LaunchError(str(error)) from None
    except (KernelError, CompileError) as error:
        raise SetupError(str(error)) from None
    needs, host = plan.holdings[plan.worst].state, max(on_host(plan))
    if config.optim.offloaded and config.optim.optimizer_offload_folder is not None:
        _check_folder(config.optim.optimizer_offload_folder, max(held.disk for held in plan.holdings), ranks)
    there = memory_there(torch.device("cpu")) / ranks.local_world
    if device == "cpu":
        needs, has, what = needs + plan.holdings[plan.worst].host, there, "the memory"
    elif host > there:
        has = f"{host / 2**30:.1f} GiB of host memory per rank, and there are {there / 2**30:.1f} GiB"
        options = {"optimizer_offload_fraction": config.optim.offloaded}
        options["cpu_offloading_num_layers"] = config.train.cpu_offloading_num_layers
        given = " and ".join(f"{name}={value:g}" for name, value in options.items() if value)
        raise LaunchError(f"{given}: {has}; offload less{', or to a disk' * (config.optim.offloaded > 0)}")
    else:
        has, what = memory_there(card_of(ranks)), "the card's memory"
    if needs > has:
        where = f" on pipeline rank {plan.worst}" if plan.pp > 1 else ""
        raise LaunchError(
            f"weights and optimizer alone take {needs / 2**30:.1f} GiB per rank{where}, {what} is {has / 2**30:.1f} "
            "GiB: use more ranks (tensor, pipeline or data parallel), --bf16 or a smaller model"
        )


def _check_folder(folder: str, needs: int, ranks: Ranks) -> None:
    try:
        has = shutil.disk_usage(folder).free / ranks.local_world
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        text = f"optimizer_offload_folder={folder!r}: {error.strerror}; name a folder of a disk of each machine"
        raise LaunchError(text) from None
    if needs > has:
        takes = f"{needs / 2**30:.3g} GiB per rank, and {has / 2**30:.3g} GiB are free"
        raise LaunchError(f"optimizer_offload_folder={folder!r} is to hold {takes}: use another disk, or more machines")


def many_threads(device: str, ranks: Ranks) -> list[str]:
    """A warning where ranks on a CPU have more threads than there are cores: these wait for each other busily."""
    threads, n = torch.get_num_threads(), cores()
    if device != "cpu" or threads == 1 or threads * ranks.local_world <= n:
        return []
    of = f"{ranks.local_world} ranks x {threads} threads" if ranks.local_world > 1 else f"{threads} threads"
    fewer = max(1, n // ranks.local_world)
    return [f"{of} on {n} core{'s' * (n > 1)} are many times slower than one per core: set OMP_NUM_THREADS={fewer}"]


def not_shared(mesh: Mesh) -> list[str]:
    """A warning where ranks of one machine were to share memory, and cannot."""
    if not mesh.not_shared:
        return []
    slower = "ranks of one machine exchange through gloo, which is slower"
    remedy = f"make room there, {SLOTS * SLOT_BYTES >> 20} MiB for each rank of a group, or give --no-shared-memory"
    return [f"{FOLDER}: {mesh.not_shared}: {slower}; {remedy}"]


def check_save(config: Config, ranks: Ranks) -> None:
    """Try to write to --save, on one rank of each machine. Raises CheckpointError."""
    c = config.checkpoint
    place = parse(c.save_local or c.save or ".")
    if c.save is not None and not config.train.skip_train and isinstance(place, Path) and ranks.local_rank == 0:
        storage_of(place).probe(place, ranks.rank)


def check_save_of_dry_run(config: Config) -> None:
    """Check that --save and --save-local could be written, and create nothing. Raises CheckpointError."""
    for root in [] if config.train.skip_train else save_roots(config):
        if isinstance(place := parse(root), Path):
            LocalStorage().check_writable(place)


def open_reporter(
    plan: Arrangement, config: Config, run: Run, sources: Sources, folder: Path, ranks: Ranks, warnings: Sequence[str]
) -> Reporter:
    log = replace(config.log, log_style=resolved_style(config))
    peak = find_peak(run.mesh.device, plan.dtype, log.peak_tflops, ranks.local_world)
    speed = Speed(model_flops(config.model, plan.padded_vocab), ranks.world, peak.tflops, peak.too_low)
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
        report.say(lines.megatron("sizes", world=ranks.world, **run.mesh.sizes))
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
        line = lines.megatron("parameters", tp=run.mesh.tp.rank, pp=run.mesh.pp.rank, number=number)
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
    host = host_batch(micro, pin=False, **batch_marks(config, run.mesh))
    where = stage.rotated(on_device(host, run.mesh.device, step=1))
    block = stage.blocks[0]
    assert isinstance(block, Block)
    shape, kind = (len(host.tokens_SB) // run.mesh.tp.size, B, run.pipeline.width), run.pipeline.dtype
    x_sBD = torch.zeros(shape, dtype=kind, device=run.mesh.device, requires_grad=True)
    with environment.safe_path():  # inductor starts `python -c` to find out which vector instructions work
        y_sBD = stage.use(block, x_sBD, where)
        torch.autograd.grad(y_sBD, x_sBD, torch.zeros_like(y_sBD))
    run.buffer.go(chunk)  # no node of a parameter has said that backward is through with it
    return time.perf_counter() - begin
