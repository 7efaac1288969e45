"""The usual questions about a layout, answered with figures, and the usual mistakes, looked for.

    path       does it fit on one device? with its optimizer? on a node? over nodes? with all activations?
    warnings   what is known to go wrong, in the plan at hand
    bound      what limits the best plan, and what would help

Rules of thumb say that they are, and whose: they are no part of the plan.
"""

import math

from megalite.launch.system_checks import VARIABLES
from megalite.planning.bottleneck import describe_bottleneck, format_shares, main_bottleneck, remedy
from megalite.planning.memory import LARGEST_ERROR
from tools.planning.plan_request import Request, problems_of
from tools.planning.search import Found, Layout, Planned, applied, arranged
from tools.planning.token_budget import MOST_EPOCHS, Budget

GIB = 2**30
SMALL_TOKENS = 1024  # of a micro-batch on one tp rank's matmuls: below, weights are read for too little work
MUCH_BUBBLE = 0.15


def critical_batch(parameters: int) -> float:
    """Tokens of a batch beyond which more of them save few steps, for a model that is trained until its size limits it:
    B*/L^(1/0.21) with L = (8.8e13/N)^0.076 (arXiv:2001.08361, eq. 1.1 and 1.4; the idea: arXiv:1812.06162).

    >>> [round(critical_batch(n * 10**9) / 1e6, 1) for n in (1, 7, 70, 405)]
    [3.2, 6.6, 15.1, 28.5]
    """
    return 2e8 / ((8.8e13 / parameters) ** 0.076) ** (1 / 0.21)


def path(request: Request, found: Found) -> list[str]:
    """question: figure -> branch that is taken."""
    c, one = request.cluster, arranged(Layout(), request)
    n, memory = one.num_parameters, c.device.memory_bytes
    weight, gradient, optimizer = one.bytes_per_element()
    state, limit = n * (weight + gradient + optimizer), found.limit
    planned = f"{limit / GIB:.0f} GiB are planned with ({limit / memory:.0%})"
    lines = [f"a device: {memory / GIB:.0f} GiB, of which {planned}"]

    def ask(question: str, size: float, yes: str, no: str) -> bool:
        lines.append(f"{question}: {size / GIB:,.1f} GiB -> {yes if size <= limit else no}")
        return size <= limit

    ask("weights alone on one device", n * weight, "they fit", "divide the model")
    fits = ask("with gradients and optimizer", state, "tp 1 pp 1 would do", "divide the state")
    if not fits and c.world > 1:
        dp = f"optimizer over dp {c.world} (ZeRO-1)"
        size = n * (weight + gradient + optimizer / c.world)
        fits = ask(dp, size, "dp alone would do", "dp alone does not do")
    if not fits and c.devices_per_node > 1:
        tp = max(t for t in range(1, c.devices_per_node + 1) if c.devices_per_node % t == 0 and _divides(t, request))
        ep = math.gcd(request.config.model.num_experts or 1, c.devices_per_node)
        how = f"tp {tp} ep {ep}" if one.has_experts else f"tp {tp}"
        whole = (one.params_by_view["dense"] / tp + one.params_by_view["expert"] / ep) * (weight + gradient)
        shared = n * optimizer / c.world  # with more stages fewer ranks share what one stage has
        do = f"{'tp' if ep == 1 else 'tp and ep'} inside a node would do"
        fits = ask(f"over a node, {how}", whole + shared, do, "pipeline stages over nodes")
        if not fits and c.num_nodes > 1 and shared < limit:
            stages = -(-whole // (limit - shared))
            lines.append(f"fewest stages of {how} for the state: {stages:.0f} -> pp {stages:.0f} or more")
    if found.plans:
        lines += _chosen(found.choices()[0].best)
    return lines


def _divides(tp: int, request: Request) -> bool:
    problems = problems_of(applied(Layout(tp=tp), request.config), tp)
    return not any("tensor_model_parallel_size" in problem for problem in problems)


def _chosen(best: Planned) -> list[str]:
    made, rank = best.made, best.fullest
    held, again = best.memory[rank], best.layout.recompute
    kept = held.activations + held.transient
    how = "recompute nothing" if again == "none" else f"recompute {again}"
    beside = f"{kept / GIB:.1f} GiB beside {(held.peak - kept) / GIB:.1f} GiB of state"
    steps = f"{made.num_microbatches} over {made.pp} stages x {made.vpp} chunks"
    lines = []
    if (matrices := made.model_states[made.fullest_rank].muon) is not None:
        share = f"{best.time.muon_s:.3g} s, {best.time.muon_s / best.time.seconds:.1%} of the step"
        lines = [f"whole matrices of a step: {matrices} -> {share}"]
    return [
        *lines,
        f"activations of the best plan's fullest rank ({rank}): {beside} -> {how}",
        f"micro-batches of a step: {steps} -> bubble {best.time.parts['bubble'] / best.time.seconds:.1%}",
    ]


def warnings(request: Request, best: Planned, limit: float, budget: Budget, data_tokens: int | None) -> list[str]:
    """`limit`: bytes that are planned with."""
    made, c, m = best.made, request.cluster, request.config.model
    lines, fullest = [], best.memory[best.fullest]
    spare, off = limit - best.peak, LARGEST_ERROR * (fullest.activations + fullest.transient)
    if 0 <= spare < off:
        wrong = f"activations of some layouts were {LARGEST_ERROR:.0%} off what runs allocate, {off / GIB:.2f} GiB here"
        free = "what is kept free (--usable-memory) may have to give the rest"
        lines.append(f"it fits by {spare / GIB:.2f} GiB, and {wrong}: {free}")
    if best.layout.tp > c.devices_per_node or c.devices_per_node % best.layout.tp:
        crosses = f"tp {best.layout.tp} crosses nodes of {c.devices_per_node}"
        lines.append(f"{crosses}: each layer waits for the network four times; use a divisor")
    if host := max(held.host_bytes for held in made.model_states):
        takes = f"offload takes {host / GIB:.1f} GiB of host memory per rank"
        lines.append(f"{takes}; its copies and updates are not in the time")
    share = best.time.parts["bubble"] / best.time.seconds
    if share > MUCH_BUBBLE:
        few = f"{made.num_microbatches} micro-batches are few for {made.pp} stages: {share:.0%} of the time idles"
        lines.append(f"{few}; raise --global-batch-size, or use fewer devices for this batch")
    tokens = m.seq_length * best.layout.micro_batch
    if tokens < SMALL_TOKENS:
        small = f"a micro-batch of {tokens} tokens makes small matmuls"
        lines.append(f"{small}; raise --micro-batch-size (rule of thumb: {SMALL_TOKENS} tokens)")
    batch, critical = made.batch_sizes.final * m.seq_length, critical_batch(budget.active)
    if batch > critical:
        beyond = f"a batch of {batch / 1e6:.1f} M tokens is beyond the critical {critical / 1e6:.1f} M"
        lines.append(f"{beyond}: more of it saves few steps (a rule of thumb, arXiv:2001.08361, eq. 1.4)")
    if data_tokens is not None and (epochs := budget.epochs(data_tokens)) > MOST_EPOCHS:
        repeated = f"beyond {MOST_EPOCHS}, repeated tokens are worth less and less (arXiv:2305.16264)"
        over = f"{epochs:.1f} epochs over {data_tokens:,} tokens"
        lines.append(f"{over}: {repeated}; get more data, or train on fewer tokens")
    return lines


def bound(best: Planned, per_node: int) -> tuple[str, str]:
    """(what limits the best plan, with all shares of its step; what would help)."""
    fixed = best.time.fixed_s
    parts = best.time.parts | {"optimizer": best.time.parts["optimizer"] - fixed, "fixed costs": fixed}
    shares = {name: seconds / best.time.seconds for name, seconds in parts.items()}
    limit = main_bottleneck(shares)
    helps = describe_bottleneck(limit, shares[limit], remedy(limit, best.made, per_node))
    return f"bound by {limit}: {format_shares(shares)}", f"what would help: {helps}"


def nccl(request: Request) -> list[str]:
    """Variables of NCCL that are worth knowing on such a cluster."""
    if request.cluster.device.name == "cpu":
        return []
    rows = (row for row in VARIABLES if "hint" in row and (request.cluster.num_nodes > 1 or not row.get("nodes")))
    return [f"{row.get('shown', row['name']):<30}{row['hint']}" for row in rows]


def needs(request: Request, found: Found) -> list[str]:
    """Where no layout fits."""
    if found.least is None:
        return ["change what is refused above"]
    size, layout = found.least
    over = size / found.limit
    text = f"the leanest layout takes {size / 2**30:.1f} GiB of {found.limit / 2**30:.1f}: it needs"
    return [f"{text} about {over:.1f} times the memory: more or larger devices, a smaller model, or shorter sequences"]
