"""What a run leaves unused of its machines, which its start reports as warnings.

A warning names only what the run could use, with the option that does. Idle ranks, cores and matmul units cost speed
for certain. Of a GPU's memory, only what larger micro-batches or less recomputation could use is reported.
"""

import torch

from megalite.common.wording import plural
from megalite.launch.local_launcher import cpu_count
from megalite.launch.process_group import cuda_device
from megalite.launch.rank_info import RankInfo
from megalite.planning.device_peaks import lookup_peak
from megalite.planning.remedies import describe_memory, planned_bytes, with_options, without_recompute
from megalite.planning.run_plan import RunPlan
from megalite.training.logging.device_memory import total_memory

SMALL_MICROBATCH_TOKENS = 8192  # of a rank; larger ones are not proposed
TEMPORARY_SHARE = 0.2  # of a device's memory, left to temporary tensors that the plan does not count


def unused_resources(plan: RunPlan, ranks: RankInfo, device_type: str) -> list[str]:
    """Return a warning for each resource of this rank's machine that the run leaves unused."""
    if device_type == "cpu":
        return unused_cores(ranks, torch.get_num_threads(), cpu_count())
    device = cuda_device(ranks)
    return [
        *unused_gpus(ranks, torch.cuda.device_count()),
        *unused_matmul_units(plan.shape.dtype, torch.cuda.get_device_name(device)),
        *unused_memory(plan, total_memory(device)),
    ]


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
    """Return warnings about a GPU's memory that less recomputation or larger micro-batches would use.

    Args:
        plan: The plan of the run.
        memory_limit: The bytes of a device's memory.
    """
    available = (1 - TEMPORARY_SHARE) * memory_limit
    without = without_recompute(plan)
    if without is not None and planned_bytes(without) < available:
        option = f"--recompute-granularity {plan.config.train.recompute_granularity}"
        peak = describe_memory(without, memory_limit)
        return [f"recomputation is not needed: without {option} {peak}"]
    shape, size = plan.shape, 2 * plan.config.train.micro_batch_size
    num_tokens = size * plan.config.model.seq_length // shape.cp
    if shape.pp > 1 or shape.num_microbatches < 2 or num_tokens > SMALL_MICROBATCH_TOKENS:
        return []
    larger = with_options(plan, micro_batch_size=size)
    if larger is None or planned_bytes(larger) >= memory_limit / 2:
        return []
    free = f"more than half of the GPU's memory stays free, and a step has {shape.num_microbatches:,} micro-batches"
    peak = describe_memory(larger, memory_limit)
    return [f"{free}: with --micro-batch-size {size} it has {larger.shape.num_microbatches:,}, and {peak}"]
