"""The remedies for a bottleneck: what the run at hand can change, and what the plan says of the change.

A remedy names only options that the run can still choose. Figures are planned, for the same run with another option, or
with twice the micro-batches for costs that arise once per step.
"""

from dataclasses import replace
from typing import Any

from megalite.config.options import Config, replace_options
from megalite.config.validation import find_problems
from megalite.planning.run_plan import RunPlan

GIB = 2**30
AXIS_OPTIONS = {"tp": "tensor_model_parallel_size", "cp": "context_parallel_size", "ep": "expert_model_parallel_size"}
RECOMPUTE_OPTIONS = ("recompute_granularity", "recompute_method", "recompute_num_layers")
LARGER_BATCH = "more micro-batches per step (a larger --global-batch-size)"
NO_REMEDY = "nothing that this run can choose changes it"


def remedy(cause: str, plan: RunPlan, ranks_per_node: int, background_saves: bool = False) -> str:
    """Return what this run can change about a cause.

    Args:
        cause: A name in BOTTLENECKS.
        plan: The plan of the run.
        ranks_per_node: The number of ranks of a node, which decides whether a group of ranks needs the network.
        background_saves: The run saves in the background already.
    """
    match cause:
        case "data":
            return _data_remedy(plan.config)
        case "checkpoint":
            return "save less often" if background_saves else "save less often, or in the background (--async-save on)"
        case "bubble":
            return _bubble_remedy(plan)
        case "communication":
            return _communication_remedy(plan, ranks_per_node)
        case "tp" | "cp":
            return _use_any(_smaller_axis(cause, plan, ranks_per_node), _larger_micro_batches(plan)) or NO_REMEDY
        case "dp":
            return _use_any(
                LARGER_BATCH, _gradients_in_half_precision(plan), _faster_network("dp", plan, ranks_per_node)
            )
        case "pp":
            slow = "a stage is slower than its FLOPs say, or messages are slow (megalite bench comm measures them)"
            fewer = "fewer stages or chunks" if plan.shape.vpp > 1 else "fewer stages"
            return f"{slow}: {_use_any(fewer, _faster_network('pp', plan, ranks_per_node))}"
        case "ranks":
            return "look at its device (megalite cluster)"
        case "optimizer":
            return _optimizer_remedy(plan)
        case "evaluation":
            interval = "evaluate less often (--eval-interval)"
            return interval if plan.config.train.eval_iters == 1 else f"{interval}, or fewer batches (--eval-iters)"
        case "start-up":
            return "the run was short; a longer one pays for it"
        case "fixed costs":
            return "use a larger batch, or a larger model"
        case "other":
            slow = "use a larger --log-interval, fewer checks, or a faster disk for logs"
            return f"{slow}; a profile (--profile) shows what it is"
        case "recompute":
            return "recompute less, as far as memory allows"
        case "kernels":
            return _use_any(_larger_micro_batches(plan) or "larger micro-batches, with a larger --global-batch-size")
    return "use faster kernels, more devices, or a smaller model; waits do not limit it"


def _data_remedy(config: Config) -> str:
    reader = "leave a processor free for the thread that reads"
    if config.data.mock_data or config.data.dataset is not None:
        return reader
    return f"put --data-path and --data-cache-path on a faster disk, or {reader}"


def _bubble_remedy(plan: RunPlan) -> str:
    remedies = [LARGER_BATCH]
    if plan.shape.dp > 1:
        remedies = ["more micro-batches per step (a larger --global-batch-size, or less dp)"]
    if not plan.config.parallel.split_backward:
        remedies.append("--split-backward")
    if plan.shape.pp * (plan.shape.vpp + 1) <= plan.config.model.num_layers:
        remedies.append("more chunks (--num-virtual-stages-per-pipeline-rank)")
    return _use_any(*remedies)


def _communication_remedy(plan: RunPlan, ranks_per_node: int) -> str:
    """Return the remedies for exposed communication of an axis that is not known."""
    remedies = [LARGER_BATCH] if plan.shape.dp > 1 else []
    remedies += [_smaller_axis(axis, plan, ranks_per_node) for axis in AXIS_OPTIONS]
    if any(getattr(plan.shape, axis) > 1 for axis in AXIS_OPTIONS):
        remedies.append(_larger_micro_batches(plan))
    remedies.append(_gradients_in_half_precision(plan))
    log_straggler = "" if plan.config.operations.log_straggler else " (--log-straggler)"
    if advice := _use_any(*remedies):
        return f"{advice}; or one rank is slower than the others{log_straggler}"
    return f"one rank may be slower than the others{log_straggler}"


def _optimizer_remedy(plan: RunPlan) -> str:
    sharding = ""
    if plan.config.parallel.effective_zero_stage > 0:
        sharding = "more dp ranks to share the update"
    elif plan.shape.dp > 1:
        sharding = "--use-distributed-optimizer"
    return _use_any("a larger --global-batch-size", sharding)


def _use_any(*remedies: str) -> str:
    """Join the remedies that are not empty to "use ...".

    >>> _use_any("a", "", "b"), _use_any("a", "b", "c"), _use_any("")
    ('use a or b', 'use a, b, or c', '')
    """
    available = [text for text in remedies if text]
    if not available:
        return ""
    if len(available) > 2:
        return f"use {', '.join(available[:-1])}, or {available[-1]}"
    return f"use {' or '.join(available)}"


def _is_within_node(axis: str, plan: RunPlan, ranks_per_node: int) -> bool:
    """Return whether no group of this axis needs the network."""
    return len({rank // ranks_per_node for rank in plan.shape.mesh_at(0).axis(axis).ranks}) == 1


def _smaller_axis(axis: str, plan: RunPlan, ranks_per_node: int) -> str:
    size = getattr(plan.shape, axis)
    if size == 1:
        return ""
    if not _is_within_node(axis, plan, ranks_per_node):
        return f"{axis} within a node"
    return f"a smaller {axis}" if _is_valid(plan, **{AXIS_OPTIONS[axis]: size // 2}) else ""


def _larger_micro_batches(plan: RunPlan) -> str:
    doubled = 2 * plan.config.train.micro_batch_size
    return "larger micro-batches" if _is_valid(plan, micro_batch_size=doubled) else ""


def _gradients_in_half_precision(plan: RunPlan) -> str:
    parallel, precision = plan.config.parallel, plan.config.precision
    if plan.shape.dp * plan.shape.cp == 1:
        return ""
    if precision.bf16 and not parallel.grad_reduce_in_bf16:
        return "--grad-reduce-in-bf16"
    return "--grad-reduce-in-fp16" if precision.fp16 and not parallel.grad_reduce_in_fp16 else ""


def _faster_network(axis: str, plan: RunPlan, ranks_per_node: int) -> str:
    return "" if _is_within_node(axis, plan, ranks_per_node) else "a faster network"


def _is_valid(plan: RunPlan, **values: Any) -> bool:
    """Return whether the run passes the checks of its configuration with other values for some options."""
    return not find_problems(replace_options(plan.config, **values), plan.shape.world)


def with_options(plan: RunPlan, **values: Any) -> RunPlan | None:
    """Return the plan of the same run with other values for some options; None if they contradict each other."""
    if not _is_valid(plan, **values):
        return None
    other = RunPlan(replace(plan.shape, config=replace_options(plan.config, **values)))
    try:
        _ = other.balance.layer_ranges
    except ValueError:
        return None
    return other


def without_recompute(plan: RunPlan) -> RunPlan | None:
    """Return the plan of the same run without recomputation; None if it has none, or cannot be without."""
    if plan.config.train.recompute_granularity is None:
        return None
    return with_options(plan, **dict.fromkeys(RECOMPUTE_OPTIONS, None))


def describe_bubble(plan: RunPlan) -> str:
    """Describe the planned bubble, and the bubble with each of its remedies."""
    shape = plan.shape
    larger_batch = f"twice the micro-batches (--global-batch-size {2 * shape.batch_size})"
    remedies = {larger_batch: with_options(plan, global_batch_size=2 * shape.batch_size)}
    if not plan.config.parallel.split_backward:
        remedies["--split-backward"] = with_options(plan, split_backward=True)
    if shape.vpp == 1 and plan.config.model.num_layers >= 2 * shape.pp:
        chunked = with_options(plan, num_virtual_stages_per_pipeline_rank=2)
        remedies["--num-virtual-stages-per-pipeline-rank 2"] = chunked
    planned = f"{plan.balance.bubble:.1%} as planned with {shape.num_microbatches} micro-batches over {shape.pp} stages"
    others = [f"{other.balance.bubble:.1%} with {name}" for name, other in remedies.items() if other is not None]
    return ", ".join([planned, *others])


def planned_figures(cause: str, share: float, plan: RunPlan, memory_limit: float) -> str:
    """Return what a remedy would gain or need, or an empty string if the plan does not say.

    Args:
        cause: A name in BOTTLENECKS.
        share: The fraction of the time that it takes.
        plan: The plan of the run.
        memory_limit: The bytes of a device's memory.
    """
    if cause == "bubble":
        return describe_bubble(plan)
    if cause in ("dp", "optimizer"):
        return (
            f"{share / (2 - share):.1%} with twice the micro-batches, --global-batch-size {2 * plan.shape.batch_size}"
        )
    if cause in AXIS_OPTIONS:
        option = AXIS_OPTIONS[cause]
        size = getattr(plan.config.parallel, option)
        half = with_options(plan, **{option: size // 2}) if size > 1 else None
        return "" if half is None else f"with {cause} {size // 2} and dp {half.shape.dp} {_memory(half, memory_limit)}"
    if cause == "pp":
        layers = ", ".join(map(str, plan.balance.layers_per_stage))
        return f"stages have {layers} layers, and the planned bubble is {plan.balance.bubble:.1%}"
    if cause == "recompute":
        without = without_recompute(plan)
        return "" if without is None else f"without it {_memory(without, memory_limit)}"
    if cause in ("kernels", "compute"):
        size = 2 * plan.config.train.micro_batch_size
        larger = with_options(plan, micro_batch_size=size)
        return "" if larger is None else f"with --micro-batch-size {size} {_memory(larger, memory_limit)}"
    return ""


def _memory(plan: RunPlan, limit: float) -> str:
    """Return a clause on the planned memory of the fullest rank, without temporary tensors, and the limit."""
    totals = [
        model_state.total + activations
        for model_state, activations in zip(plan.model_states.by_rank, plan.balance.activation_bytes, strict=True)
    ]
    fits = "" if max(totals) < limit else ", which does not fit"
    size = f"{max(totals) / GIB:.2f} GiB" if max(totals) > GIB / 10 else f"{max(totals) / 2**20:.3g} MiB"
    return f"a rank holds {size} of {limit / GIB:.1f} GiB as planned{fits}"
