"""Break a measured step down into shares that sum to 1, with the resource that limits it and one piece of advice.

    MFU + bubble + tp + cp + dp + pp + ranks + data + optimizer + recompute + kernels + other = 1

Waits are measured, and are means over the ranks. In a pipeline, ranks wait for messages. The planned idle time
(RunPlan.bubble, by FLOPs) counts as bubble, and the rest as pp: messages, and stages that are slower than planned.
Without a pipeline, ranks wait for the slowest one in the all-reduce at the end of a step. Forward and backward consist
of MFU, of recomputation by its share of the FLOPs, and of what kernels lose compared with the peak.

What limits the step, and the advice, are decided in megalite/planning/bottleneck.py.
"""

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megalite.planning import bottleneck
from megalite.planning.bottleneck import COMMUNICATION_AXES, limiting_resource, recompute_flops
from megalite.planning.remedies import planned_figures
from megalite.planning.run_plan import RunPlan
from megalite.training.logging.efficiency import efficiency

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
    if plan.shape.pp > 1:
        losses["bubble"] = min(idle, plan.balance.bubble)
        losses["pp"] += idle - losses["bubble"]
    else:
        losses["ranks"] = idle
    losses["recompute"] = computing * recomputed / (1 + recomputed)
    for name in ("data", "optimizer", "other"):
        losses[name] = shares[name]
    losses["kernels"] = computing - losses["recompute"] - mfu
    return None if losses["kernels"] < 0 else losses


def measured_efficiency(
    shares: Mapping[str, float], run: Measurement, price_per_hour: float | None
) -> dict[str, float | None]:
    """Return the eight efficiency metrics of a training.

    `gpu_utilization` is the share of a step in which devices compute. `cost_per_sample` is in the currency of
    `price_per_hour`, the price of one device.
    """
    num_memories = run["devices"] if run["device"] != "CPU" else 1
    return efficiency(
        shares,
        run["samples_per_step"] / run["step_s"],
        run["memory"] / (num_memories * run["memory_there"]),
        None if price_per_hour is None else price_per_hour * run["devices"],
    )


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
    bound = limiting_resource(shares, plan, run["step_s"], mfu, run.get("copy_bytes_per_s"))
    return {
        "shares": shares,
        "mfu": mfu,
        "lost": losses,
        "bound": asdict(bound),
        "efficiency": measured_efficiency(shares, run, price_per_hour),
        "advice": advise(losses or mfu_losses(shares, 0.0, plan) or {}, run, plan),
    }


def advise(losses: Mapping[str, float], run: Measurement, plan: RunPlan) -> str:
    """Return a sentence on the largest of `losses` and its remedy, or an empty string if nothing is lost."""
    if not losses:
        return ""
    if run.get("cores") and (note := bottleneck.oversubscription_note(run["devices"], run["threads"], run["cores"])):
        return f"none: {note}"
    advice = bottleneck.advise(losses, plan, run.get("per_node", run["devices"]))  # absent from older results
    memory_limit = run["memory_there"] / (run["devices"] if run["device"] == "CPU" else 1)
    measured = measured_details(advice.cause, advice.share, run)
    planned = planned_figures(advice.cause, advice.share, plan, memory_limit)
    return advice.sentence("; ".join(filter(None, [measured, planned])))


def measured_details(cause: str, share: float, run: Measurement) -> str:
    """Return what the measurement says about a cause, or an empty string."""
    if cause == "ranks":
        return slowest_rank(run)
    if cause in ("data", "other"):
        step_ms = 1e3 * run["step_s"]
        return f"{step_ms * (1 - share):.4g} of {step_ms:.4g} ms without it"
    if cause in ("kernels", "compute"):
        computing = statistics.mean((p["forward"] + p["backward"]) / sum(p.values()) for p in run["parts"])
        return f"of the {computing:.1%} that they take"
    return ""


def slowest_rank(run: Measurement) -> str:
    """Return a clause on how much longer than the mean the slowest rank computes."""
    busy = [parts["forward"] + parts["backward"] for parts in run["parts"]]
    rank = max(range(len(busy)), key=lambda rank: busy[rank])
    return f"rank {rank} computes {busy[rank] / statistics.mean(busy) - 1:.1%} longer than the mean of them"
