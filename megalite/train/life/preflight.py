"""Checks before a process group exists: contradictions of options, data, machine, directory."""

import shutil
import tempfile
from pathlib import Path

import torch

from megalite.checkpoint.storage.location import parse
from megalite.checkpoint.storage.protocol import storage_of
from megalite.config.check import check
from megalite.config.options import Config
from megalite.config.packages import MissingPackage
from megalite.data.errors import DataError
from megalite.data.files.missing_files import rehearsed
from megalite.kernels.dispatch import KernelError, choose, runs_triton
from megalite.launch.local_ranks import cores
from megalite.launch.ranks import LaunchError, Ranks, card_of
from megalite.models.compiled import CompileError, check_compile
from megalite.plan.arrangement import Arrangement, arrange
from megalite.plan.memory import on_host
from megalite.train.life.export_hf import export_problems
from megalite.train.setup import SetupError
from megalite.train.sources import Sources, open_sources
from megalite.train.tell.device_memory import memory_there


def preflight(config: Config, ranks: Ranks) -> tuple[Sources, Arrangement]:
    """Open the data and arrange the run. Raises SetupError or DataError with all problems at once."""
    t = config.train
    if problems := [*check(config, ranks.world, complete=True), *export_problems(config)]:
        raise SetupError("\n".join(problems))
    try:
        data = rehearsed(config.data) if t.as_rank is not None else config.data
        sources = open_sources(data, config.model.seq_length, t.seed, t.eval_iters)
        return sources, arrange(config, ranks.world, sources.vocab_size)
    except DataError:
        raise
    except ValueError as error:
        raise SetupError(str(error)) from None


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


def check_save(config: Config, ranks: Ranks) -> None:
    """Try to write to --save, on one rank of each machine. Raises CheckpointError."""
    c = config.checkpoint
    place = parse(c.save_local or c.save or ".")
    if c.save is not None and not config.train.skip_train and isinstance(place, Path) and ranks.local_rank == 0:
        storage_of(place).probe(place, ranks.rank)
