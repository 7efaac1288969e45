"""What the plan says of the remedies for a measured step: the figures of megalite/plan/advice.py's sentence.

They are of the same arrangement with another option, or with twice the micro-batches for what happens once per step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from megalite.plan import advice
from megalite.plan.advice import with_options
from megalite.plan.arrangement import Arrangement

GIB = 2**30
AXES = {"tp": "tensor_model_parallel_size", "cp": "context_parallel_size"}  # that communicate within every layer
Measured = Mapping[str, Any]


def advise(lost: Mapping[str, float], run: Measured, plan: Arrangement) -> str:
    """`lost`: shares of a step, by breakdown.LOST. Empty where nothing is lost."""
    if not lost:
        return ""
    if run.get("cores") and (shared := advice.too_few_cores(run["devices"], run["threads"], run["cores"])):
        return f"none: {shared}"
    limit = advice.limit_of(lost)
    return advice.sentence(limit, lost[limit], figures_of(limit, lost[limit], run, plan))


def figures_of(limit: str, share: float, run: Measured, plan: Arrangement) -> str:
    if limit == "bubble":
        return advice.about_the_bubble(plan)
    if limit in ("dp", "optimizer"):
        return f"{share / (2 - share):.1%} with twice the micro-batches, --global-batch-size {2 * plan.batch_size}"
    if limit in AXES:
        size = getattr(plan.config.parallel, AXES[limit])
        half = with_options(plan, **{f"parallel__{AXES[limit]}": size // 2}) if size > 1 else None
        return "" if half is None else f"with {limit} {size // 2} and dp {half.dp} {room(half, run)}"
    if limit == "pp":
        return f"stages have {', '.join(map(str, plan.counts))} layers, and the planned bubble is {plan.bubble:.1%}"
    if limit == "ranks":
        return slowest(run)
    if limit in ("data", "other"):
        before = 1e3 * run["step_s"]
        return f"{before * (1 - share):.4g} of {before:.4g} ms without it"
    if limit == "recompute":
        nothing: dict[str, Any] = {f"train__recompute_{name}": None for name in ("granularity", "method", "num_layers")}
        without = with_options(plan, **nothing)
        return "" if without is None else f"without it {room(without, run)}"
    return larger_micro_batches(run, plan)


def larger_micro_batches(run: Measured, plan: Arrangement) -> str:
    computing = statistics.mean((p["forward"] + p["backward"]) / sum(p.values()) for p in run["parts"])
    size = 2 * plan.config.train.micro_batch_size
    larger = with_options(plan, train__micro_batch_size=size)
    then = "" if larger is None else f"; with --micro-batch-size {size} {room(larger, run)}"
    return f"of the {computing:.1%} that they take{then}"


def slowest(run: Measured) -> str:
    busy = [parts["forward"] + parts["backward"] for parts in run["parts"]]
    rank = max(range(len(busy)), key=lambda rank: busy[rank])
    return f"rank {rank} computes {busy[rank] / statistics.mean(busy) - 1:.1%} longer than the mean of them"


def room(plan: Arrangement, run: Measured) -> str:
    """What the fullest rank holds by the plan, of the memory of its device."""
    most = max(held.state + kept for held, kept in zip(plan.holdings, plan.activations, strict=True))
    limit = run["memory_there"] / (run["devices"] if run["device"] == "CPU" else 1)
    fits = "" if most < limit else ", which does not fit"
    size = f"{most / GIB:.2f} GiB" if most > GIB / 10 else f"{most / 2**20:.3g} MiB"
    return f"a rank holds {size} of {limit / GIB:.1f} GiB as planned{fits}"
