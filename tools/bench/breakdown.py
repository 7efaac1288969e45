"""Break a measured step down into shares that sum to 1, find the limiting resource, and give one piece of advice.

    MFU + bubble + tp + cp + dp + pp + ranks + data + optimizer + recompute + kernels + other = 1

Waits are measured, and are means over the ranks. In a pipeline, ranks wait for messages. The planned idle time
(RunPlan.bubble, by FLOPs) counts as bubble, and the rest as pp: messages, and stages that are slower than planned.
Without a pipeline, ranks wait for the slowest one in the all-reduce at the end of a step. Forward and backward consist
of MFU, of recomputation by its share of the FLOPs, and of what kernels lose compared with the peak.

The limiting resource is the one that takes most of a step: exposed communication (network), the wait for tokens (data),
or computation. Computation is limited by memory if the minimum of bytes that a rank must read and write takes longer
at the rate of a copy than its FLOPs take at the peak; otherwise by compute. The figures of a remedy come from the plan
of the same run with another option, or with twice the micro-batches for costs that arise once per step.
"""

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalite.planning import bottleneck as advice
from megalite.planning.bottleneck import with_options
from megalite.planning.layer_kinds import LayerKind, flops_per_token, layers_cost
from megalite.planning.run_plan import RunPlan

GIB = 2**30
COMMUNICATION_AXES = ("tp", "cp", "dp", "pp")
LOSSES: tuple[str, ...] = ("bubble", *COMMUNICATION_AXES, "ranks", "data", "optimizer", "recompute", "kernels", "other")
Measurement = Mapping[str, Any]  # of one run, as systems.measure returns it


def time_shares(run: Measurement) -> dict[str, float]:
    """Return the share of a step that each part takes, with communication by axis.

    The shares are means over the ranks and sum to 1.
    """
    total = sum(sum(parts.values()) for parts in run["parts"])
    sums: dict[str, float] = {}
    for parts, axes in zip(run["parts"], run["axes"], strict=True):
        for name, seconds in (*parts.items(), *axes.items()):
            sums[name] = sums.get(name, 0.0) + seconds / total
    del sums["communication"]
    return sums


def mfu_losses(shares: Mapping[str, float], mfu: float, plan: RunPlan) -> dict[str, float] | None:
    """Return the share of the peak that each cause in LOSSES costs.

    Returns None if forward and backward have more FLOPs than the peak allows. The peak was then measured while the
    machine was busy.
    """
    computing, idle = shares["forward"] + shares["backward"], shares["idle"]
    recomputed = recompute_flops(plan)
    losses = dict.fromkeys(LOSSES, 0.0)
    for axis in COMMUNICATION_AXES:
        losses[axis] = shares.get(axis, 0.0)
    if plan.pp > 1:
        losses["bubble"] = min(idle, plan.bubble)
        losses["pp"] += idle - losses["bubble"]
    else:
        losses["ranks"] = idle
    losses["recompute"] = computing * recomputed / (1 + recomputed)
    for name in ("data", "optimizer", "other"):
        losses[name] = shares[name]
    losses["kernels"] = computing - losses["recompute"] - mfu
    return None if losses["kernels"] < 0 else losses


def recompute_flops(plan: RunPlan) -> float:
    """Return the recomputed FLOPs as a multiple of the model's."""
    setting = plan.stage_costs.setting
    without_recompute = replace(setting, recompute_modules=())

    def extra_backward_flops(kind: LayerKind, full_recompute: bool) -> list[float]:
        flops = layers_cost((kind,), setting, full_recompute).flops[1]
        return [flops - layers_cost((kind,), without_recompute).flops[1]]

    sums = plan.stage_costs.prefix_sums(extra_backward_flops)
    recomputed = sum(float(sums.between(layers.start, layers.stop)[0]) for layers in plan.layer_ranges)
    model_flops = flops_per_token(plan.config.model, plan.padded_vocab) * plan.tokens_per_microbatch
    return recomputed * plan.tp / model_flops


def min_memory_traffic(plan: RunPlan) -> float:
    """Return the bytes that a rank must at least read and write in a step, as a mean over the pipeline.

    For each micro-batch, forward and backward read the weights, gradients are read and written, and saved activations
    are written and read. Once per step, the optimizer reads and writes its state, reads the gradients and writes the
    weights.
    """
    activations = sum(activation_bytes for activation_bytes, _ in plan.memory_of_stages)

    def mean(name: str) -> float:
        return statistics.mean(getattr(model_state, name) for model_state in plan.model_states)

    per_microbatch = 2 * mean("weights") + 2 * mean("gradients") + 2 * activations / plan.pp
    per_step = 2 * mean("optimizer") + mean("gradients") + mean("weights")
    return plan.num_microbatches * per_microbatch + per_step


def limiting_resource(
    shares: Mapping[str, float], run: Measurement, mfu: float | None, plan: RunPlan
) -> dict[str, Any]:
    """Return the limiting resource as `by`: compute, memory, network or data.

    `shares` are those of a step; for compute and memory they are lower bounds. `evidence` is a sentence about them.
    """
    network = sum(shares.get(axis, 0.0) for axis in COMMUNICATION_AXES)
    if plan.pp > 1:
        network += max(0.0, shares["idle"] - plan.bubble)
    computing = shares["forward"] + shares["backward"] + shares["optimizer"]
    known = {"network": network, "data": shares["data"]}
    if mfu is not None:
        known["compute"] = mfu * (1 + recompute_flops(plan))
    if copy_rate := run.get("copy_bytes_per_s"):
        known["memory"] = min_memory_traffic(plan) / copy_rate / run["step_s"]
    by = "compute" if known.get("compute", 1.0) >= known.get("memory", 0.0) else "memory"
    candidates = {by: computing, "network": network, "data": shares["data"]}
    by = max(candidates, key=candidates.__getitem__)
    evidence = [f"computing takes {computing:.1%} of a step"]
    if "compute" in known:
        evidence.append(f"its matmuls would take {known['compute']:.1%} at the peak")
    if copy_rate:
        evidence.append(f"its minimum memory traffic {known['memory']:.1%} at {copy_rate / 1e9:.3g} GB/s")
    evidence.append(f"exposed messages take {known['network']:.1%}")
    evidence.append(f"the wait for tokens {known['data']:.1%}")
    return {"by": by, "shares": known, "evidence": ", ".join(evidence)}


def efficiency(shares: Mapping[str, float], run: Measurement, price_per_hour: float | None) -> dict[str, float | None]:
    """Return the eight efficiency metrics of a training.

    `gpu_utilization` is the share of a step in which devices compute. `cost_per_sample` is in the currency of
    `price_per_hour`, the price of one device.
    """
    samples_per_s = run["samples_per_step"] / run["step_s"]
    num_memories = run["devices"] if run["device"] != "CPU" else 1
    cost = None if price_per_hour is None else price_per_hour * run["devices"] / 3600 / samples_per_s
    return {
        "gpu_utilization": shares["forward"] + shares["backward"] + shares["optimizer"],
        "memory_utilization": run["memory"] / (num_memories * run["memory_there"]),
        "samples_per_s": samples_per_s,
        "cost_per_sample": cost,
        "data_time": shares["data"],
        "forward_time": shares["forward"],
        "backward_time": shares["backward"],
        "communication_time": sum(shares.get(axis, 0.0) for axis in COMMUNICATION_AXES),
    }


def full_breakdown(
    run: Measurement, plan: RunPlan, peak_tflops: float | None, price_per_hour: float | None = None
) -> dict[str, Any]:
    """Return shares, losses, limiting resource, efficiency and advice of a measured step, as JSON values.

    `peak_tflops` is that of one device.
    """
    shares, mfu = time_shares(run), None
    if peak_tflops:
        mfu = run["flops_per_step"] / run["step_s"] / 1e12 / peak_tflops / run["devices"]
    losses = None if mfu is None else mfu_losses(shares, mfu, plan)
    return {
        "shares": shares,
        "mfu": mfu,
        "lost": losses,
        "bound": limiting_resource(shares, run, mfu, plan),
        "efficiency": efficiency(shares, run, price_per_hour),
        "advice": advise(losses or mfu_losses(shares, 0.0, plan) or {}, run, plan),
    }


def advise(losses: Mapping[str, float], run: Measurement, plan: RunPlan) -> str:
    """Return a sentence on the largest of `losses` and its remedy, or an empty string if nothing is lost."""
    if not losses:
        return ""
    if run.get("cores") and (note := advice.oversubscription_note(run["devices"], run["threads"], run["cores"])):
        return f"none: {note}"
    cause = advice.main_bottleneck(losses)
    per_node = run.get("per_node", run["devices"])  # absent from older results
    remedy = advice.remedy(cause, plan, per_node)
    return advice.describe_bottleneck(cause, losses[cause], remedy, remedy_figures(cause, losses[cause], run, plan))


def remedy_figures(cause: str, share: float, run: Measurement, plan: RunPlan) -> str:
    """Return what a remedy would gain or need, or an empty string if the plan does not say."""
    if cause == "bubble":
        return advice.describe_bubble(plan)
    if cause in ("dp", "optimizer"):
        return f"{share / (2 - share):.1%} with twice the micro-batches, --global-batch-size {2 * plan.batch_size}"
    if cause in advice.AXIS_OPTIONS:
        option = advice.AXIS_OPTIONS[cause]
        size = getattr(plan.config.parallel, option)
        half = with_options(plan, **{option: size // 2}) if size > 1 else None
        return "" if half is None else f"with {cause} {size // 2} and dp {half.dp} {memory_headroom(half, run)}"
    if cause == "pp":
        layers = ", ".join(map(str, plan.layers_per_stage))
        return f"stages have {layers} layers, and the planned bubble is {plan.bubble:.1%}"
    if cause == "ranks":
        return slowest_rank(run)
    if cause in ("data", "other"):
        step_ms = 1e3 * run["step_s"]
        return f"{step_ms * (1 - share):.4g} of {step_ms:.4g} ms without it"
    if cause == "recompute":
        options = {f"recompute_{name}": None for name in ("granularity", "method", "num_layers")}
        without = with_options(plan, **options)
        return "" if without is None else f"without it {memory_headroom(without, run)}"
    computing = statistics.mean((p["forward"] + p["backward"]) / sum(p.values()) for p in run["parts"])
    size = 2 * plan.config.train.micro_batch_size
    larger = with_options(plan, micro_batch_size=size)
    then = "" if larger is None else f"; with --micro-batch-size {size} {memory_headroom(larger, run)}"
    return f"of the {computing:.1%} that they take{then}"


def slowest_rank(run: Measurement) -> str:
    """Return a clause on how much longer than the mean the slowest rank computes."""
    busy = [parts["forward"] + parts["backward"] for parts in run["parts"]]
    rank = max(range(len(busy)), key=lambda rank: busy[rank])
    return f"rank {rank} computes {busy[rank] / statistics.mean(busy) - 1:.1%} longer than the mean of them"


def memory_headroom(plan: RunPlan, run: Measurement) -> str:
    """Return a clause on the planned memory of the fullest rank, compared with that of its device."""
    totals = [
        model_state.total + activations
        for model_state, activations in zip(plan.model_states, plan.activation_bytes, strict=True)
    ]
    limit = run["memory_there"] / (run["devices"] if run["device"] == "CPU" else 1)
    fits = "" if max(totals) < limit else ", which does not fit"
    size = f"{max(totals) / GIB:.2f} GiB" if max(totals) > GIB / 10 else f"{max(totals) / 2**20:.3g} MiB"
    return f"a rank holds {size} of {limit / GIB:.1f} GiB as planned{fits}"
