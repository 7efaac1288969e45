"""Where a measured step went, in shares that sum to 1: its parts, what it lost of the peak, and what it is bound by.

    MFU + bubble + tp + cp + dp + pp + ranks + data + optimizer + recompute + kernels + other = 1

Waits are as measured, means over the ranks. In a pipeline a rank waits for messages: as long as the plan says that it
idles (Arrangement.bubble, by FLOPs) that is the bubble, the rest is pp: messages, and stages that are slower than
planned. Without one, ranks wait for the slowest at the step's agreement. Forward and backward are MFU, the share of
their FLOPs that computes again (recompute), and what they miss of the peak (kernels).

A step is bound by what takes the most of it: exposed communication (network), the wait for tokens (data), or its
computation; that by compute, or by memory where the least that a rank must move to and from its memory takes longer at
the rate of a copy than its FLOPs do at the peak. The figures of a remedy are the plan's, of the same arrangement with
another option, or with twice the micro-batches for what happens once per step.
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
AXES = {"tp": "tensor_model_parallel_size", "cp": "context_parallel_size"}  # that communicate within every layer
WAITS = ("tp", "cp", "dp", "pp")
LOST = ("bubble", *WAITS, "ranks", "data", "optimizer", "recompute", "kernels", "other")
Measured = Mapping[str, Any]  # a run, as tools/benchmark.py: measure returns it


def shares(run: Measured) -> dict[str, float]:
    """Each part's share of a step, as a mean over the ranks, with communication by axis. The shares sum to 1."""
    total = sum(sum(parts.values()) for parts in run["parts"])
    sums: dict[str, float] = {}
    for parts, axes in zip(run["parts"], run["axes"], strict=True):
        for name, seconds in (*parts.items(), *axes.items()):
            sums[name] = sums.get(name, 0.0) + seconds / total
    del sums["communication"]
    return sums


def lost(of: Mapping[str, float], mfu: float, made: RunPlan) -> dict[str, float] | None:
    """The share of the peak that each cause in LOST takes. None where forward and backward have more FLOPs than the
    peak allows, because the peak was measured while the machine was busy."""
    computing, idle = of["forward"] + of["backward"], of["idle"]
    again = again_flops(made)
    losses = dict.fromkeys(LOST, 0.0) | {axis: of.get(axis, 0.0) for axis in WAITS}
    if made.pp > 1:
        losses["bubble"] = min(idle, made.bubble)
        losses["pp"] += idle - losses["bubble"]
    else:
        losses["ranks"] = idle
    losses["recompute"] = computing * again / (1 + again)
    losses |= {name: of[name] for name in ("data", "optimizer", "other")}
    losses["kernels"] = computing - losses["recompute"] - mfu
    return None if losses["kernels"] < 0 else losses


def again_flops(made: RunPlan) -> float:
    """The recomputed FLOPs as a multiple of the model's."""
    plain = replace(made.stage_costs.setting, recompute_modules=())

    def again(kind: LayerKind, whole: bool) -> list[float]:
        return [layers_cost((kind,), made.stage_costs.setting, whole).flops[1] - layers_cost((kind,), plain).flops[1]]

    sums = made.stage_costs.prefix_sums(again)
    twice = sum(float(sums.between(layers.start, layers.stop)[0]) for layers in made.layer_ranges)
    return twice * made.tp / (flops_per_token(made.config.model, made.padded_vocab) * made.tokens_per_microbatch)


def least_traffic(made: RunPlan) -> float:
    """Bytes that a rank at least reads and writes in a step, mean over the pipeline: weights and gradients for each
    micro-batch (read by forward and backward; read and written), what a forward keeps (written and read), and once
    what the optimizer holds."""
    kept = sum(held for held, _ in made.memory_of_stages)

    def mean(name: str) -> float:
        return statistics.mean(getattr(holding, name) for holding in made.model_states)

    each = 2 * mean("weights") + 2 * mean("gradients") + 2 * kept / made.pp
    return made.num_microbatches * each + 2 * mean("optimizer") + mean("gradients") + mean("weights")


def bound(of: Mapping[str, float], run: Measured, mfu: float | None, made: RunPlan) -> dict[str, Any]:
    """`by`: compute, memory, network or data; `shares` of a step, of compute and memory the least; `evidence`."""
    network = sum(of.get(axis, 0.0) for axis in WAITS)
    network += max(0.0, of["idle"] - made.bubble) if made.pp > 1 else 0.0
    computing = of["forward"] + of["backward"] + of["optimizer"]
    known = {"network": network, "data": of["data"]}
    if mfu is not None:
        known["compute"] = mfu * (1 + again_flops(made))
    if rate := run.get("copy_bytes_per_s"):
        known["memory"] = least_traffic(made) / rate / run["step_s"]
    by = "compute" if known.get("compute", 1.0) >= known.get("memory", 0.0) else "memory"
    by = max({by: computing, "network": network, "data": of["data"]}.items(), key=lambda one: one[1])[0]
    words = {
        "compute": "its matmuls would take {:.1%} at the peak",
        "memory": f"its least memory traffic {{:.1%}} at {(rate or 0) / 1e9:.3g} GB/s",
        "network": "exposed messages take {:.1%}",
        "data": "the wait for tokens {:.1%}",
    }
    told = [text.format(known[name]) for name, text in words.items() if name in known]
    return {"by": by, "shares": known, "evidence": ", ".join([f"computing takes {computing:.1%} of a step", *told])}


def efficiency(of: Mapping[str, float], run: Measured, price_per_hour: float | None) -> dict[str, float | None]:
    """The eight figures of a training's efficiency. gpu_utilization: share of a step in which devices compute.
    cost_per_sample: in the currency of the price of one device."""
    samples = run["samples_per_step"] / run["step_s"]
    machines = run["devices"] if run["device"] != "CPU" else 1
    cost = None if price_per_hour is None else price_per_hour * run["devices"] / 3600 / samples
    used = {"gpu_utilization": of["forward"] + of["backward"] + of["optimizer"]}
    used |= {"memory_utilization": run["memory"] / (machines * run["memory_there"]), "samples_per_s": samples}
    times = {f"{part}_time": of[part] for part in ("data", "forward", "backward")}
    times |= {"communication_time": sum(of.get(axis, 0.0) for axis in WAITS)}
    return {**used, "cost_per_sample": cost, **times}


def break_down(
    run: Measured, made: RunPlan, peak_tflops: float | None, price_per_hour: float | None = None
) -> dict[str, Any]:
    """All of it, with one sentence of advice, as JSON has it."""
    of, mfu = shares(run), None
    if peak_tflops:  # of all devices
        mfu = run["flops_per_step"] / run["step_s"] / 1e12 / peak_tflops / run["devices"]
    gone = None if mfu is None else lost(of, mfu, made)
    told: dict[str, Any] = {"shares": of, "mfu": mfu, "lost": gone, "bound": bound(of, run, mfu, made)}
    told["efficiency"] = efficiency(of, run, price_per_hour)
    return told | {"advice": advise(gone or lost(of, 0.0, made) or {}, run, made)}


def advise(lost: Mapping[str, float], run: Measured, plan: RunPlan) -> str:
    """`lost`: shares of a step, by breakdown.LOST. Empty where nothing is lost."""
    if not lost:
        return ""
    if run.get("cores") and (shared := advice.oversubscription_note(run["devices"], run["threads"], run["cores"])):
        return f"none: {shared}"
    limit = advice.main_bottleneck(lost)
    remedy = advice.remedy(limit, plan, run.get("per_node", run["devices"]))  # figures of before have none
    return advice.describe_bottleneck(limit, lost[limit], remedy, figures_of(limit, lost[limit], run, plan))


def figures_of(limit: str, share: float, run: Measured, plan: RunPlan) -> str:
    if limit == "bubble":
        return advice.describe_bubble(plan)
    if limit in ("dp", "optimizer"):
        return f"{share / (2 - share):.1%} with twice the micro-batches, --global-batch-size {2 * plan.batch_size}"
    if limit in AXES:
        size = getattr(plan.config.parallel, AXES[limit])
        half = with_options(plan, **{f"parallel__{AXES[limit]}": size // 2}) if size > 1 else None
        return "" if half is None else f"with {limit} {size // 2} and dp {half.dp} {room(half, run)}"
    if limit == "pp":
        layers = ", ".join(map(str, plan.layers_per_stage))
        return f"stages have {layers} layers, and the planned bubble is {plan.bubble:.1%}"
    if limit == "ranks":
        return slowest(run)
    if limit in ("data", "other"):
        before = 1e3 * run["step_s"]
        return f"{before * (1 - share):.4g} of {before:.4g} ms without it"
    if limit == "recompute":
        nothing: dict[str, Any] = {f"train__recompute_{name}": None for name in ("granularity", "method", "num_layers")}
        without = with_options(plan, **nothing)
        return "" if without is None else f"without it {room(without, run)}"
    computing = statistics.mean((p["forward"] + p["backward"]) / sum(p.values()) for p in run["parts"])
    size = 2 * plan.config.train.micro_batch_size
    larger = with_options(plan, train__micro_batch_size=size)
    then = "" if larger is None else f"; with --micro-batch-size {size} {room(larger, run)}"
    return f"of the {computing:.1%} that they take{then}"


def slowest(run: Measured) -> str:
    busy = [parts["forward"] + parts["backward"] for parts in run["parts"]]
    rank = max(range(len(busy)), key=lambda rank: busy[rank])
    return f"rank {rank} computes {busy[rank] / statistics.mean(busy) - 1:.1%} longer than the mean of them"


def room(plan: RunPlan, run: Measured) -> str:
    """A sentence on how much of its device's memory the fullest rank is planned to hold."""
    most = max(held.total + kept for held, kept in zip(plan.model_states, plan.activation_bytes, strict=True))
    limit = run["memory_there"] / (run["devices"] if run["device"] == "CPU" else 1)
    fits = "" if most < limit else ", which does not fit"
    size = f"{most / GIB:.2f} GiB" if most > GIB / 10 else f"{most / 2**20:.3g} MiB"
    return f"a rank holds {size} of {limit / GIB:.1f} GiB as planned{fits}"
