"""Warnings at the start of a run about what it leaves unused of its machine.

A warning names the option with which the run would use the resource. Idle GPUs, cores and tensor cores cost speed for
certain. Free memory of a GPU is reported where larger micro-batches or less recomputation would use it.
"""

import os

import torch

from megalite.common.wording import plural
from megalite.config.problems import options_set
from megalite.launch.local_launcher import cpu_count
from megalite.launch.process_group import cuda_device
from megalite.launch.rank_info import RankInfo
from megalite.planning.bottleneck import recompute_flops
from megalite.planning.device_peaks import lookup_peak
from megalite.planning.memory import USABLE_MEMORY, rank_memory
from megalite.planning.remedies import RECOMPUTE_OPTIONS, with_options, without_recompute
from megalite.planning.run_plan import RunPlan
from megalite.training.logging.device_memory import total_memory

GIB = 2**30
SMALL_MICROBATCH_TOKENS = 8192  # of a rank; larger ones are not proposed
MIN_RECOMPUTE_FLOPS = 0.02  # of the model's FLOPs; less recomputation costs next to nothing


def unused_resources(plan: RunPlan, ranks: RankInfo, device_type: str) -> list[str]:
    """Return a warning for each resource of this rank's machine that the run leaves unused."""
    if device_type == "cpu":
        # a launcher may have bound each of several ranks to cores of its own, and a rank sees only these
        is_bound = ranks.local_world_size > 1 and cpu_count() < (os.cpu_count() or 1)
        return [] if is_bound else unused_cores(ranks, torch.get_num_threads(), cpu_count())
    device = cuda_device(ranks)
    warnings = unused_gpus(ranks, torch.cuda.device_count())
    warnings += unused_matmul_units(plan.shape.dtype, torch.cuda.get_device_name(device))
    return warnings if plan.config.train.skip_train else warnings + unused_memory(plan, total_memory(device))


def unused_gpus(ranks: RankInfo, num_gpus: int) -> list[str]:
    """Return a warning if this machine has GPUs that no rank uses."""
    if num_gpus <= ranks.local_world_size:
        return []
    unused = num_gpus - ranks.local_world_size
    return [
        f"{unused} of {num_gpus} GPUs of this machine are idle: start a rank for each, as with --nproc {num_gpus}, or "
        "name those to use in CUDA_VISIBLE_DEVICES"
    ]


def unused_cores(ranks: RankInfo, num_threads: int, num_cores: int) -> list[str]:
    """Return a warning if the ranks on a CPU use less than half of its cores, as with torchrun's one thread per rank.

    Half of the cores that a system counts may be second threads of the others.
    """
    num_ranks = ranks.local_world_size
    if 2 * num_ranks * num_threads >= num_cores:
        return []
    used = f"{num_ranks} {plural('rank', num_ranks)} x {num_threads} {plural('thread', num_threads)}"
    return [f"{used} leave most of {num_cores} cores idle: set OMP_NUM_THREADS={num_cores // num_ranks}"]


def unused_matmul_units(dtype: torch.dtype, device_name: str) -> list[str]:
    """Return a warning if matmuls run in fp32 on a GPU whose units for half precision are faster."""
    if dtype != torch.float32:
        return []
    fp32 = lookup_peak(device_name, torch.float32).tflops
    option, half = "--bf16", lookup_peak(device_name, torch.bfloat16).tflops
    if half is None:  # before compute capability 8.0
        option, half = "--fp16", lookup_peak(device_name, torch.float16).tflops
    if fp32 is None or half is None:
        return []
    return [
        f"fp32 leaves the tensor cores of {device_name} unused: its data sheet has {fp32:g} TFLOP/s, and "
        f"{half:g} with {option}"
    ]


def unused_memory(plan: RunPlan, memory_limit: float) -> list[str]:
    """Return a warning about a GPU's memory that less recomputation or larger micro-batches would use.

    Args:
        plan: The plan of the run.
        memory_limit: The bytes of a device's memory.
    """
    shape, train = plan.shape, plan.config.train
    without = without_recompute(plan)
    extra_flops = recompute_flops(plan) if without is not None else 0.0
    if without is not None and extra_flops > MIN_RECOMPUTE_FLOPS:
        needed = planned_peak(without)
        if needed < USABLE_MEMORY * memory_limit:
            names = options_set(plan.config, *RECOMPUTE_OPTIONS, "recompute_modules")
            options = " and ".join(f"--{name.replace('_', '-')}" for name in names)
            return [
                f"recomputation of {extra_flops:.0%} of the FLOPs is not needed: without {options} a rank has "
                f"{needed / GIB:.2f} of {memory_limit / GIB:.1f} GiB as planned, and {planned_peak(plan) / GIB:.2f} now"
            ]
    doubled = 2 * train.micro_batch_size
    num_tokens = doubled * plan.config.model.seq_length // shape.cp
    if shape.pp > 1 or shape.num_microbatches < 2 or num_tokens > SMALL_MICROBATCH_TOKENS:
        return []
    larger = with_options(plan, micro_batch_size=doubled)
    if larger is None or (needed := planned_peak(larger)) >= memory_limit / 2:
        return []
    return [
        f"more than half of the GPU's memory stays free, and a step has {shape.num_microbatches:,} micro-batches: with "
        f"--micro-batch-size {doubled} it has {larger.shape.num_microbatches:,}, and a rank has {needed / GIB:.2f} of "
        f"{memory_limit / GIB:.1f} GiB as planned"
    ]


def planned_peak(plan: RunPlan) -> int:
    """Return the planned memory of the fullest rank in bytes, temporary tensors included."""
    return max(rank.peak for rank in rank_memory(plan))
