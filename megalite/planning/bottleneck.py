"""The bottleneck of a step, a run or a plan, and the advice about it. All commands that print advice take it from here.

The caller gives fractions of the time by the names of BOTTLENECKS, either measured (the report of a run,
tools/benchmark.py) or predicted (tools/plan.py). The main bottleneck is the cause whose fraction exceeds its threshold
by the largest factor; if none exceeds it, the computation itself is the bottleneck. What the run can change about it is
in remedies.py.

The limiting resource of a measured step is the one that takes most of it: exposed communication (network), the wait for
tokens (data), or computation. Computation is limited by memory if the minimum of bytes that a rank must read and write
takes longer at the rate of a copy than its FLOPs take at the peak; otherwise by compute.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megalite.planning.layer_kinds import LayerKind, flops_per_token, layers_cost, mtp_layer_cost
from megalite.planning.remedies import remedy
from megalite.planning.run_plan import RunPlan


@dataclass(frozen=True)
class Bottleneck:
    """A cause of lost time.

    Attributes:
        subject: The subject of "takes 12 % of a step".
        threshold: The fraction of the time from which the cause is reported; infinite for never.
    """

    subject: str
    threshold: float = float("inf")


BOTTLENECKS: Mapping[str, Bottleneck] = {
    "data": Bottleneck("waiting for tokens", 0.05),
    "checkpoint": Bottleneck("waiting for saves", 0.05),
    "bubble": Bottleneck("the bubble of the pipeline", 0.1),
    "communication": Bottleneck("exposed communication", 0.2),
    "tp": Bottleneck("exposed communication of tp", 0.2),
    "cp": Bottleneck("exposed communication of cp", 0.2),
    "dp": Bottleneck("the sum of gradients and the gather of weights, once per step,", 0.2),
    "pp": Bottleneck("waiting between stages, beyond the bubble,", 0.2),
    "ranks": Bottleneck("waiting for the slowest rank", 0.2),
    "optimizer": Bottleneck("the update, once per step,", 0.15),
    "evaluation": Bottleneck("evaluation", 0.15),
    "start-up": Bottleneck("the start", 0.5),
    "fixed costs": Bottleneck("the cost of any step, however small,", 0.15),
    "other": Bottleneck("work outside all parts of a step", 0.15),
    "recompute": Bottleneck("recomputing activations"),
    "kernels": Bottleneck("computing below the peak of the device"),
    "compute": Bottleneck("computing"),
}
COMPUTE_CAUSES = ("compute", "kernels", "recompute")  # reported only if no other cause exceeds its threshold
COMMUNICATION_AXES = ("tp", "cp", "dp", "pp")


def main_bottleneck(shares: Mapping[str, float]) -> str:
    """Return the cause to report. Names that are not in BOTTLENECKS are ignored.

    >>> main_bottleneck({"compute": 0.7, "bubble": 0.2, "tp": 0.1})
    'bubble'
    >>> main_bottleneck({"compute": 0.9, "bubble": 0.09})
    'compute'
    """
    excess = {name: share / BOTTLENECKS[name].threshold for name, share in shares.items() if name in BOTTLENECKS}
    worst = max(excess, key=lambda name: excess[name], default="compute")
    if excess.get(worst, 0.0) >= 1:
        return worst
    return max(COMPUTE_CAUSES, key=lambda name: shares.get(name, 0.0))


@dataclass(frozen=True)
class Advice:
    """The main bottleneck, and what the run can change about it.

    Attributes:
        cause: A name in BOTTLENECKS.
        share: The fraction of the time that it takes.
        remedy: The remedy.
    """

    cause: str
    share: float
    remedy: str

    def sentence(self, details: str = "", total: str = "a step") -> str:
        """Return the advice as a sentence. `details` is what else is known about the cause or the remedy.

        >>> Advice("evaluation", 0.3, "evaluate less often (--eval-interval)").sentence(total="the run")
        'evaluation takes 30.0% of the run: evaluate less often (--eval-interval)'
        """
        parenthesis = f" ({details})" if details else ""
        return f"{BOTTLENECKS[self.cause].subject} takes {self.share:.1%} of {total}{parenthesis}: {self.remedy}"


def advise(shares: Mapping[str, float], plan: RunPlan, ranks_per_node: int, background_saves: bool = False) -> Advice:
    """Return the advice for a run that loses these fractions of its time.

    Args:
        shares: The fractions by the names of BOTTLENECKS; others are ignored.
        plan: The plan of the run.
        ranks_per_node: The number of ranks of a node, which decides whether a group of ranks needs the network.
        background_saves: The run saves in the background already.
    """
    cause = main_bottleneck(shares)
    return Advice(cause, shares[cause], remedy(cause, plan, ranks_per_node, background_saves))


def format_shares(shares: Mapping[str, float]) -> str:
    """Format all shares that are not 0, the largest first."""
    largest_first = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share:.1%}" for name, share in largest_first if share)


def oversubscription_note(num_ranks: int, num_threads: int, num_cores: int) -> str:
    """Return why waits mean nothing if the threads of a machine's ranks share its cores; "" if they do not."""
    if num_ranks * num_threads <= num_cores:
        return ""
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    threads = f"{num_threads} thread{'s' if num_threads > 1 else ''}"
    cores = f"{num_cores} core{'s' if num_cores > 1 else ''}"
    return f"{ranks} of {threads} share {cores}, so a wait for other ranks may be a wait for a core"


def recompute_flops(plan: RunPlan) -> float:
    """Return the recomputed FLOPs as a multiple of the model's."""
    setting = plan.balance.stage_costs.setting
    without_recompute = replace(setting, recompute_modules=())

    def extra_backward_flops(kind: LayerKind, full_recompute: bool) -> list[float]:
        flops = layers_cost((kind,), setting, full_recompute).flops[1]
        return [flops - layers_cost((kind,), without_recompute).flops[1]]

    sums = plan.balance.stage_costs.prefix_sums(extra_backward_flops)
    recomputed = sum(float(sums.between(layers.start, layers.stop)[0]) for layers in plan.balance.layer_ranges)
    model = plan.config.model
    if model.num_mtp_depths:
        flops = mtp_layer_cost(model, setting, plan.shape.recompute.recomputes_mtp).flops[1]
        recomputed += model.num_mtp_depths * (flops - mtp_layer_cost(model, without_recompute).flops[1])
    model_flops = flops_per_token(plan.config.model, plan.shape.padded_vocab) * plan.shape.tokens_per_microbatch
    return recomputed * plan.shape.tp / model_flops


def min_memory_traffic(plan: RunPlan) -> float:
    """Return the bytes that a rank must at least read and write in a step, as a mean over the pipeline.

    For each micro-batch, forward and backward read the weights, gradients are read and written, and saved activations
    are written and read. Once per step, the optimizer reads and writes its state, reads the gradients and writes the
    weights.
    """
    activations = sum(activation_bytes for activation_bytes, _ in plan.balance.memory_of_stages)

    def mean(name: str) -> float:
        return statistics.mean(getattr(model_state, name) for model_state in plan.model_states.by_rank)

    per_microbatch = 2 * mean("weights") + 2 * mean("gradients") + 2 * activations / plan.shape.pp
    per_step = 2 * mean("optimizer") + mean("gradients") + mean("weights")
    return plan.shape.num_microbatches * per_microbatch + per_step


@dataclass(frozen=True)
class LimitingResource:
    """The resource that limits a step.

    Attributes:
        by: compute, memory, network or data.
        shares: The fraction of a step for each of them that is known; a lower bound for compute and memory.
        evidence: A sentence about these.
    """

    by: str
    shares: Mapping[str, float]
    evidence: str


def limiting_resource(
    shares: Mapping[str, float], plan: RunPlan, step_s: float, mfu: float | None, copy_bytes_per_s: float | None
) -> LimitingResource:
    """Return the resource that limits a measured step.

    Args:
        shares: The fractions of the step by phase, and by axis of exposed communication.
        plan: The plan of the run.
        step_s: The duration of the step.
        mfu: The model FLOPs utilization; None if the peak of the device is unknown.
        copy_bytes_per_s: The rate of a copy in the device's memory; None if it is unknown.
    """
    network = sum(shares.get(axis, 0.0) for axis in COMMUNICATION_AXES)
    if plan.shape.pp > 1:
        network += max(0.0, shares["idle"] - plan.balance.bubble)
    computing = shares["forward"] + shares["backward"] + shares["optimizer"]
    known = {"network": network, "data": shares["data"]}
    if mfu is not None:
        known["compute"] = mfu * (1 + recompute_flops(plan))
    if copy_bytes_per_s:
        known["memory"] = min_memory_traffic(plan) / copy_bytes_per_s / step_s
    by = "compute" if known.get("compute", 1.0) >= known.get("memory", 0.0) else "memory"
    candidates = {by: computing, "network": network, "data": shares["data"]}
    by = max(candidates, key=candidates.__getitem__)
    evidence = [f"computing takes {computing:.1%} of a step"]
    if "compute" in known:
        evidence.append(f"its matmuls would take {known['compute']:.1%} at the peak")
    if copy_bytes_per_s:
        evidence.append(f"its minimum memory traffic {known['memory']:.1%} at {copy_bytes_per_s / 1e9:.3g} GB/s")
    evidence.append(f"exposed messages take {known['network']:.1%}")
    evidence.append(f"the wait for tokens {known['data']:.1%}")
    return LimitingResource(by, known, ", ".join(evidence))
