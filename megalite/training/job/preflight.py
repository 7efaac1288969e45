"""Checks before there is a process group: options, data, machine and directories."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from megalite.checkpoint.storage.local_storage import LocalStorage
from megalite.checkpoint.storage.location import parse_location
from megalite.checkpoint.storage.storage import storage_of
from megalite.common.environment import getenv
from megalite.common.optional_packages import MissingPackageError, missing_package_message
from megalite.common.wording import plural
from megalite.config.options import Config
from megalite.config.plugins import error_location
from megalite.config.problems import Problem
from megalite.config.registry import REGISTRIES
from megalite.config.validation import find_ineffective, find_problems
from megalite.data.errors import DataError
from megalite.data.files.missing_files import without_data_files
from megalite.kernels.dispatch import (
    KernelError,
    describe_option,
    kernel_option,
    runs_fla,
    runs_triton,
    set_kernel_options,
    triton_installed,
)
from megalite.launch.local_launcher import cpu_count
from megalite.launch.process_group import cuda_device
from megalite.launch.rank_info import LaunchError, RankInfo
from megalite.launch.system_checks import variable_problems
from megalite.parallel.cpu.shared_memory import SHM_DIR, SLOT_BYTES, SLOTS
from megalite.parallel.mesh import Mesh
from megalite.planning.layer_kinds import flops_per_token
from megalite.planning.memory import host_bytes
from megalite.planning.run_plan import RunPlan, make_run_plan
from megalite.training.datasets import DatasetBundle, build_datasets
from megalite.training.job.export_hf import export_problems
from megalite.training.logging.device_memory import total_memory
from megalite.training.logging.run_dir import checkpoint_dirs
from megalite.training.setup import SetupError


def preflight(config: Config, ranks: RankInfo) -> tuple[RunPlan, DatasetBundle]:
    """Check the configuration, open the data and plan the run.

    Raises:
        SetupError: with all problems of the configuration.
        DataError: if the data cannot be used.
    """
    train = config.train
    if problems := [*find_problems(config, ranks.world_size, is_complete=True), *export_problems(config)]:
        raise SetupError("\n".join(problems))
    try:
        data = without_data_files(config.data) if train.dry_run_rank is not None else config.data
        sources = build_datasets(data, config.model.seq_length, train.seed, train.eval_iters)
        plan = make_run_plan(config, ranks.world_size, sources.vocab_size)
        if REGISTRIES["mixer"].plugin_components:  # build them, and run them on the meta device
            flops_per_token(config.model, plan.shape.padded_vocab)
        return plan, sources
    except DataError:
        raise
    except ValueError as error:
        raise SetupError(error_location(error) + str(error)) from None


def effects_of_completion(command_config: Config, config: Config) -> list[Problem]:
    """Return notes about given options that have no effect with the options of the checkpoint.

    Args:
        command_config: The configuration of the command alone, whose notes have been printed already.
        config: The same, completed by --use-checkpoint-args.
    """
    printed = find_ineffective(command_config)
    return [
        note
        for note in find_ineffective(config, is_complete=True)
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
        raise SetupError("distributed_backend=nccl needs CUDA devices, and none is available; use gloo")
    try:
        check_kernels(config, device)
        if config.train.compile:
            check_compile(device)
        if config.train.cuda_graph_impl != "none" and device != "cuda":
            raise SetupError("cuda_graph_impl=local needs a CUDA device, and none is available; drop it")
    except MissingPackageError as error:
        raise LaunchError(str(error)) from None
    except KernelError as error:
        raise SetupError(str(error)) from None
    state = plan.model_states.fullest
    required_host_bytes = max(host_bytes(plan))
    if config.optim.offload_fraction and config.optim.optimizer_offload_dir is not None:
        required_disk_bytes = max(rank_state.disk_bytes for rank_state in plan.model_states.by_rank)
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
            f"but only {memory_per_rank / 2**30:.1f} GiB are available; {remedy}"
        )
    else:
        required = state.total
        available, memory_name = total_memory(cuda_device(ranks)), "the GPU's memory"
    if required > available:
        pipeline_rank = f" on pipeline rank {plan.model_states.fullest_rank}" if plan.shape.pp > 1 else ""
        raise LaunchError(
            f"weights and optimizer alone take {required / 2**30:.1f} GiB per rank{pipeline_rank}, "
            f"{memory_name} is {available / 2**30:.1f} GiB: "
            "use more ranks (tensor, pipeline or data parallel), --bf16 or a smaller model"
        )


def check_kernels(config: Config, device_type: str) -> None:
    """Set the options of kernels for this process, and check that these can run.

    Raises KernelError, which says what to set, or MissingPackageError.
    """
    parallel = config.parallel
    set_kernel_options(parallel.kernels, parallel.attention_kernel, parallel.linear_attention_kernel)
    runs_triton("cpu" if config.optim.offload_fraction else device_type)
    if config.model.uses_delta_rule:
        runs_fla(device_type)


def check_compile(device_type: str) -> None:
    """Check that inductor can run: it generates C++ for a CPU and Triton kernels for a GPU.

    Raises SetupError, which says what to set or install, or MissingPackageError.
    """
    if kernel_option("kernels") == "triton":
        raise SetupError(f"compile=True compiles the torch kernels, but {describe_option()}; use auto or torch")
    if device_type == "cuda" and not triton_installed():
        raise MissingPackageError(missing_package_message("compile=True on cuda", "triton"))
    name = getenv("CXX", "clang++" if sys.platform == "darwin" else "g++")  # the only compiler that inductor calls
    remedy = "install one or set CXX to the name of one, without options"
    if shutil.which(name) is None:
        problem = f"{name} is not installed" if name else "CXX is empty"
        raise SetupError(f"compile=True needs a C++ compiler, and {problem}; {remedy}")
    try:
        command = [name, "-x", "c++", "-shared", "-fPIC", "-o", os.devnull, "-"]
        subprocess.run(command, input=b"#include <cmath>\n", capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().partition("\n")[0] or error
        raise SetupError(f"compile=True needs a C++ compiler and {name} does not work ({reason}); {remedy}") from None


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
        sizes = f"{required_bytes / 2**30:.3g} GiB per rank are needed, and {free / 2**30:.3g} GiB are free"
        raise LaunchError(f"optimizer_offload_dir={directory!r}: {sizes}; use another disk, or more machines")


def thread_oversubscription_warning(device: str, ranks: RankInfo) -> list[str]:
    """Return a warning if ranks on a CPU have more threads than there are cores, so that they wait for each other."""
    threads, cores = torch.get_num_threads(), cpu_count()
    if device != "cpu" or threads == 1 or threads * ranks.local_world_size <= cores:
        return []
    total = f"{threads} threads"
    if ranks.local_world_size > 1:
        total = f"{ranks.local_world_size} ranks x {threads} threads"
    on_cores = f"{cores} {plural('core', cores)}"
    suggestion = max(1, cores // ranks.local_world_size)
    return [f"{total} on {on_cores} are many times slower than one per core: set OMP_NUM_THREADS={suggestion}"]


def variable_warnings(device: str, ranks: RankInfo) -> list[str]:
    """Return a warning for each environment variable that slows this run down or breaks it."""
    has_other_nodes = ranks.world_size > ranks.local_world_size
    of_collectives = ("NCCL_", "TORCH_NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS") if ranks.world_size == 1 else ()
    problems = variable_problems(device == "cuda", has_other_nodes)
    return [f"{text}; {remedy}" for text, remedy in problems if not text.startswith(of_collectives)]


def shared_memory_warning(mesh: Mesh) -> list[str]:
    """Return a warning if ranks of one machine should communicate by shared memory, and cannot."""
    if not mesh.shared_memory_error:
        return []
    effect = "ranks of one machine communicate through gloo, which is slower"
    remedy = f"make room there, {SLOTS * SLOT_BYTES >> 20} MiB for each rank of a group, or give --no-shared-memory"
    return [f"{SHM_DIR}: {mesh.shared_memory_error}: {effect}; {remedy}"]


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
