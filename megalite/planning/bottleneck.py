"""Names the cause by which a step, a run or a plan loses the most time, and its remedy.

The caller gives shares of time by the names of causes.toml, measured (a run's report, tools/benchmark.py) or predicted
(tools/plan.py). The cause named is the one that is farthest above its `worth`, the share from which it is mentioned; if
none is above, it is the computation itself. A remedy is only what the run at hand can change. The figure of a remedy is
planned, for the same run with another option.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from megalite.common.tables import load_table
from megalite.config.options import Config
from megalite.config.validation import find_problems
from megalite.planning.run_plan import RunPlan


class Bottleneck(NamedTuple):
    """what: the subject of "takes 12 % of a step". worth: the share from which it is mentioned."""

    subject: str
    threshold: float


BOTTLENECKS = {name: Bottleneck(**known) for name, known in load_table(__file__, "bottlenecks").items()}
COMPUTE_CAUSES = ("compute", "kernels", "recompute")


def main_bottleneck(shares: Mapping[str, float]) -> str:
    """The cause to mention. Shares with other names than those of CAUSES are ignored.

    >>> main_bottleneck({"compute": 0.7, "bubble": 0.2, "tp": 0.1})
    'bubble'
    >>> main_bottleneck({"compute": 0.9, "bubble": 0.09})
    'compute'
    """
    above = {name: share / BOTTLENECKS[name].threshold for name, share in shares.items() if name in BOTTLENECKS}
    worst = max(above, key=lambda name: above[name], default="compute")
    return worst if above.get(worst, 0.0) >= 1 else max(COMPUTE_CAUSES, key=lambda name: shares.get(name, 0.0))


def describe_bottleneck(cause: str, share: float, remedy: str, figures: str = "", of: str = "a step") -> str:
    """Say the share of a cause and its remedy. `figures`: more that is known about either.

    >>> describe_bottleneck("evaluation", 0.3, "evaluate less often (--eval-interval)", of="the run")
    'evaluation takes 30.0% of the run: evaluate less often (--eval-interval)'
    """
    known = f" ({figures})" if figures else ""
    return f"{BOTTLENECKS[cause].subject} takes {share:.1%} of {of}{known}: {remedy}"


def remedy(cause: str, plan: RunPlan, per_node: int, background_saves: bool = False) -> str:
    """Return what this run can change about a cause.

    Args:
        per_node: ranks of a node, by which a group of ranks is within one or needs the network.
        background_saves: the run saves in the background already.
    """
    c = plan.config
    larger_batch = "more micro-batches per step (a larger --global-batch-size)"
    match cause:
        case "data":
            files = "put --data-path and --data-cache-path on a faster disk, or " * (
                not c.data.mock_data and c.data.dataset is None
            )
            return f"{files}leave a processor free for the thread that reads"
        case "checkpoint":
            return "save less often" + ", or in the background (--async-save on)" * (not background_saves)
        case "bubble":
            chunks = plan.pp * (plan.vpp + 1) <= c.model.num_layers
            return _use(
                f"{larger_batch[:-1]}, or less dp)" if plan.dp > 1 else larger_batch,
                "--split-backward" * (not c.parallel.split_backward),
                "more chunks (--num-virtual-stages-per-pipeline-rank)" * chunks,
            )
        case "communication":
            shown = "" if c.operations.log_straggler else " (--log-straggler)"
            slower = f"one rank {{}} slower than the others{shown}"
            used = _use(
                larger_batch * (plan.dp > 1),
                *(_nearer_or_smaller(axis, plan, per_node) for axis in OPTIONS),
                _larger_micro_batches(plan) * any(getattr(plan, axis) > 1 for axis in OPTIONS),
                _gradients_in_bf16(plan),
            )
            return f"{used}; or {slower.format('is')}" if used else slower.format("may be")
        case "tp" | "cp":
            return _use(_nearer_or_smaller(cause, plan, per_node), _larger_micro_batches(plan)) or NOTHING
        case "dp":
            return _use(larger_batch, _gradients_in_bf16(plan), _faster_network("dp", plan, per_node))
        case "pp":
            slow = "a stage is slower than its FLOPs say, or messages are slow (megalite bench comm measures them)"
            fewer = f"fewer stages{' or chunks' * (plan.vpp > 1)}"
            return f"{slow}: {_use(fewer, _faster_network('pp', plan, per_node))}"
        case "ranks":
            return "look at its device (megalite cluster)"
        case "optimizer":
            shared = c.parallel.effective_zero_stage > 0
            sharing = "more dp ranks to share the update" if shared else "--use-distributed-optimizer" * (plan.dp > 1)
            return _use("a larger --global-batch-size", sharing)
        case "evaluation":
            fewer = ", or fewer batches (--eval-iters)" * (c.train.eval_iters != 1)
            return f"evaluate less often (--eval-interval){fewer}"
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
            return _use(_larger_micro_batches(plan) or "larger micro-batches, with a larger --global-batch-size")
    return "use faster kernels, more devices, or a smaller model; waits do not limit it"


NOTHING = "nothing that this run can choose changes it"
OPTIONS = {
    "tp": "parallel__tensor_model_parallel_size",
    "cp": "parallel__context_parallel_size",
    "ep": "parallel__expert_model_parallel_size",
}


def _use(*ways: str) -> str:
    """
    >>> _use("a", "", "b"), _use("a", "b", "c"), _use("")
    ('use a or b', 'use a, b, or c', '')
    """
    *some, last = [way for way in ways if way] or [""]
    if len(some) > 1:
        return f"use {', '.join(some)}, or {last}"
    return f"use {' or '.join([*some, last])}" if last else ""


def _is_inside(axis: str, plan: RunPlan, per_node: int) -> bool:
    """Whether no group of this axis needs the network."""
    return len({rank // per_node for rank in plan.mesh_at(0).axis(axis).ranks}) == 1


def _nearer_or_smaller(axis: str, plan: RunPlan, per_node: int) -> str:
    if (size := getattr(plan, axis)) == 1:
        return ""
    if not _is_inside(axis, plan, per_node):
        return f"{axis} within a node"
    return f"a smaller {axis}" * _allows(plan, **{OPTIONS[axis]: size // 2})


def _larger_micro_batches(plan: RunPlan) -> str:
    return "larger micro-batches" * _allows(plan, train__micro_batch_size=2 * plan.config.train.micro_batch_size)


def _gradients_in_bf16(plan: RunPlan) -> str:
    reduces = plan.dp * plan.cp > 1 and plan.config.precision.bf16
    return "--grad-reduce-in-bf16" * (reduces and not plan.config.parallel.grad_reduce_in_bf16)


def _faster_network(axis: str, plan: RunPlan, per_node: int) -> str:
    return "" if _is_inside(axis, plan, per_node) else "a faster network"


def format_shares(shares: Mapping[str, float]) -> str:
    """All shares that are not 0, the largest first."""
    return ", ".join(f"{name} {share:.1%}" for name, share in sorted(shares.items(), key=lambda s: -s[1]) if share)


def oversubscription_note(ranks: int, threads: int, cores: int) -> str:
    """The reason why waits mean nothing if the threads of a machine's ranks share its cores; empty if they do not."""
    if ranks * threads <= cores:
        return ""
    have, number = f"{ranks} rank{'s' * (ranks > 1)}", f"{threads} thread{'s' * (threads > 1)}"
    shared = f"{have} of {number} share {cores} core{'s' * (cores > 1)}"
    return f"{shared}, so a wait for other ranks may be a wait for a core"


def _changed(plan: RunPlan, **options: Any) -> Config:
    """The configuration with other options, named "section__name"."""
    config = plan.config
    for name, value in options.items():
        section, _, option = name.partition("__")
        config = replace(config, **{section: replace(getattr(config, section), **{option: value})})
    return config


def _allows(plan: RunPlan, **options: Any) -> bool:
    return not find_problems(_changed(plan, **options), plan.world)


def with_options(plan: RunPlan, **options: Any) -> RunPlan | None:
    """The same run with other options, named "section__name"; None if they contradict each other."""
    if not _allows(plan, **options):
        return None
    other = replace(plan, config=_changed(plan, **options))
    try:
        _ = other.layer_ranges
    except ValueError:
        return None
    return other


def describe_bubble(plan: RunPlan) -> str:
    """The planned bubble, and the bubble with each of its remedies."""
    larger = f"twice the micro-batches (--global-batch-size {2 * plan.batch_size})"
    remedies = {larger: with_options(plan, train__global_batch_size=2 * plan.batch_size)}
    if not plan.config.parallel.split_backward:
        remedies["--split-backward"] = with_options(plan, parallel__split_backward=True)
    if plan.vpp == 1 and plan.config.model.num_layers >= 2 * plan.pp:
        chunked = with_options(plan, parallel__num_virtual_stages_per_pipeline_rank=2)
        remedies["--num-virtual-stages-per-pipeline-rank 2"] = chunked
    planned = f"{plan.bubble:.1%} as planned with {plan.num_microbatches} micro-batches over {plan.pp} stages"
    return ", ".join([planned, *(f"{other.bubble:.1%} with {name}" for name, other in remedies.items() if other)])
