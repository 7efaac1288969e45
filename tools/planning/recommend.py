"""Explanations of a plan: the sizing by hand, common mistakes, and what limits the best layout.

    decision_path  whether the model fits on one device, with its optimizer, in a node, over nodes, with all activations
    warnings       what is known to go wrong with the plan
    bottleneck     what limits the best layout, and what would help, as planning/bottleneck.py decides

Rules of thumb are marked as such, with their source. They do not influence the plan.
"""

import math

from megalite.launch.system_checks import VARIABLES
from megalite.planning.bottleneck import BOTTLENECKS, advise, format_shares
from megalite.planning.memory import LARGEST_ERROR
from megalite.planning.model_state import ShardCounts
from megalite.planning.remedies import remedy
from tools.planning.plan_request import Request, plan_problems
from tools.planning.search import Layout, PlannedLayout, SearchResult, apply_layout, plan_for
from tools.planning.token_budget import MAX_USEFUL_EPOCHS, TokenBudget

GIB = 2**30
MIN_MICROBATCH_TOKENS = 1024  # on one tp rank; with fewer, matmuls read the weights for too little work


def critical_batch(parameters: int) -> float:
    """Return the batch size in tokens above which a larger batch saves few steps.

    This is for a model that is trained until its size limits the loss: B*/L^(1/0.21) with L = (8.8e13/N)^0.076
    (arXiv:2001.08361, equations 1.1 and 1.4; the idea is from arXiv:1812.06162).

    >>> [round(critical_batch(n * 10**9) / 1e6, 1) for n in (1, 7, 70, 405)]
    [3.2, 6.6, 15.1, 28.5]
    """
    return 2e8 / ((8.8e13 / parameters) ** 0.076) ** (1 / 0.21)


def decision_path(request: Request, result: SearchResult) -> list[str]:
    """Return the steps of sizing by hand, as "question: size -> decision"."""
    cluster, plan = request.cluster, plan_for(Layout(), request)
    params, memory, limit = plan.model_states.num_parameters, cluster.device.memory_bytes, result.limit
    weight_bytes, grad_bytes, optimizer_bytes = bytes_per_element = plan.shape.bytes_per_element()
    usable = f"{limit / GIB:.0f} GiB may be used ({limit / memory:.0%})"
    lines = [f"memory of a device: {memory / GIB:.0f} GiB; {usable}"]

    def decide(question: str, size: float, if_fits: str, if_not: str) -> bool:
        lines.append(f"{question}: {size / GIB:,.1f} GiB -> {if_fits if size <= limit else if_not}")
        return size <= limit

    decide("weights on one device", params * weight_bytes, "they fit", "shard the model")
    state = params * ShardCounts().bytes_of(*bytes_per_element)
    fits = decide("with gradients and optimizer", state, "tp 1 pp 1 would suffice", "shard the state")
    if not fits and cluster.world > 1:
        zero_1 = params * ShardCounts.for_zero_stage(1, cluster.world).bytes_of(*bytes_per_element)
        question = f"optimizer sharded over dp {cluster.world} (ZeRO-1)"
        fits = decide(question, zero_1, "dp alone would suffice", "dp alone would not suffice")
    if not fits and cluster.devices_per_node > 1:
        tp_sizes = [t for t in range(1, cluster.devices_per_node + 1) if cluster.devices_per_node % t == 0]
        tp = max(t for t in tp_sizes if _is_valid_tp(t, request))
        ep = math.gcd(request.config.model.num_experts or 1, cluster.devices_per_node)
        layout = f"tp {tp} ep {ep}" if plan.shape.has_experts else f"tp {tp}"
        axes = "tp" if ep == 1 else "tp and ep"
        params_per_rank = (
            plan.model_states.params_by_view["dense"] / tp + plan.model_states.params_by_view["expert"] / ep
        )
        model_bytes = params_per_rank * (weight_bytes + grad_bytes)
        # with more stages, fewer ranks shard the optimizer state of a stage
        sharded_bytes = params * optimizer_bytes / cluster.world
        fits = decide(
            f"sharded within a node, {layout}",
            model_bytes + sharded_bytes,
            f"{axes} inside a node would suffice",
            "pipeline stages across nodes",
        )
        if not fits and cluster.num_nodes > 1 and sharded_bytes < limit:
            stages = -(-model_bytes // (limit - sharded_bytes))
            lines.append(f"fewest stages of {layout} for the state: {stages:.0f} -> pp {stages:.0f} or more")
    if result.plans:
        lines += _chosen_layout(result.choices()[0].best)
    return lines


def _is_valid_tp(tp: int, request: Request) -> bool:
    problems = plan_problems(apply_layout(Layout(tp=tp), request.config), tp)
    return not any("tensor_model_parallel_size" in problem for problem in problems)


def _chosen_layout(best: PlannedLayout) -> list[str]:
    """Return the last steps: full matrices of Muon, activations and micro-batches of the best layout."""
    plan, rank, step_s = best.plan, best.fullest, best.time.seconds
    lines = []
    matrices = plan.model_states.fullest.muon
    if matrices is not None:
        lines.append(
            f"full matrices of a step: {matrices} -> {best.time.muon_s:.3g} s, {best.time.muon_s / step_s:.1%}"
        )
    memory = best.memory[rank]
    activations = memory.activations + memory.transient
    sizes = f"{activations / GIB:.1f} GiB, next to {(memory.peak - activations) / GIB:.1f} GiB of state"
    recompute = "nothing" if best.layout.recompute == "none" else best.layout.recompute
    lines.append(f"activations of the best layout's fullest rank ({rank}): {sizes} -> recompute {recompute}")
    microbatches = f"{plan.shape.num_microbatches} over {plan.shape.pp} stages x {plan.shape.vpp} chunks"
    lines.append(f"micro-batches of a step: {microbatches} -> bubble {best.time.parts['bubble'] / step_s:.1%}")
    return lines


def warnings(
    request: Request, best: PlannedLayout, limit: float, budget: TokenBudget, data_tokens: int | None
) -> list[str]:
    """Return what is known to go wrong with a layout.

    Args:
        limit: The bytes of a device's memory to plan with.
        data_tokens: The tokens of the data, if they are known.
    """
    plan, cluster = best.plan, request.cluster
    seq_length = request.config.model.seq_length
    lines = []
    memory = best.memory[best.fullest]
    spare = limit - best.peak
    error = LARGEST_ERROR * (memory.activations + memory.transient)
    if 0 <= spare < error:
        fact = (
            f"activations of some layouts were {LARGEST_ERROR:.0%} off what runs allocate, {error / GIB:.2f} GiB here"
        )
        advice = "the memory that is left free (--usable-memory) may have to provide the rest"
        lines.append(f"it fits by {spare / GIB:.2f} GiB, and {fact}: {advice}")
    if best.layout.tp > cluster.devices_per_node or cluster.devices_per_node % best.layout.tp:
        fact = f"tp {best.layout.tp} crosses nodes of {cluster.devices_per_node}"
        lines.append(f"{fact}: each layer waits for the network four times; use a divisor")
    host_bytes = max(state.host_bytes for state in plan.model_states.by_rank)
    if host_bytes:
        fact = f"offload takes {host_bytes / GIB:.1f} GiB of host memory per rank"
        lines.append(f"{fact}; its copies and updates are not in the time")
    bubble = best.time.parts["bubble"] / best.time.seconds
    if bubble > BOTTLENECKS["bubble"].threshold:
        num_microbatches, pp = plan.shape.num_microbatches, plan.shape.pp
        fact = f"{num_microbatches} micro-batches are few for {pp} stages: {bubble:.0%} of the time idles"
        lines.append(f"{fact}; {remedy('bubble', plan, cluster.devices_per_node)}")
    tokens = seq_length * best.layout.micro_batch
    if tokens < MIN_MICROBATCH_TOKENS:
        fact = f"a micro-batch of {tokens} tokens makes small matmuls"
        lines.append(f"{fact}; raise --micro-batch-size (rule of thumb: {MIN_MICROBATCH_TOKENS} tokens)")
    batch, critical = plan.shape.batch_sizes.final * seq_length, critical_batch(budget.active)
    if batch > critical:
        fact = f"a batch of {batch / 1e6:.1f} M tokens is beyond the critical {critical / 1e6:.1f} M"
        lines.append(f"{fact}: a larger one saves few steps (a rule of thumb, arXiv:2001.08361, eq. 1.4)")
    if data_tokens is not None and budget.epochs(data_tokens) > MAX_USEFUL_EPOCHS:
        fact = f"beyond {MAX_USEFUL_EPOCHS}, repeated tokens are worth less and less (arXiv:2305.16264)"
        epochs = f"{budget.epochs(data_tokens):.1f} epochs over {data_tokens:,} tokens"
        lines.append(f"{epochs}: {fact}; get more data, or train on fewer tokens")
    return lines


def bottleneck(best: PlannedLayout, devices_per_node: int) -> tuple[str, str]:
    """Return what limits a layout, with all shares of its step, and what would help."""
    seconds = dict(best.time.parts)
    seconds["optimizer"] -= best.time.fixed_s
    seconds["fixed costs"] = best.time.fixed_s
    shares = {name: value / best.time.seconds for name, value in seconds.items()}
    advice = advise(shares, best.plan, devices_per_node)
    return f"bound by {advice.cause}: {format_shares(shares)}", f"what would help: {advice.sentence()}"


def nccl_variables(request: Request) -> list[str]:
    """Return the NCCL variables that are worth knowing on the cluster."""
    if request.cluster.device.name == "cpu":
        return []
    lines = []
    for row in VARIABLES:
        if "hint" in row and (request.cluster.num_nodes > 1 or not row.get("nodes")):
            lines.append(f"{row.get('shown', row['name']):<30}{row['hint']}")
    return lines


def what_would_fit(result: SearchResult) -> list[str]:
    """Return a remedy if no layout fits."""
    if result.smallest_too_large is None:
        return ["change what is refused above"]
    size, _ = result.smallest_too_large
    fact = f"the smallest layout takes {size / GIB:.1f} GiB of {result.limit / GIB:.1f}"
    advice = "more or larger devices, a smaller model, or shorter sequences"
    return [f"{fact}: it needs about {size / result.limit:.1f} times the memory: {advice}"]
