"""Names the cause by which a step, a run or a plan loses the most time, and its remedy.

The caller gives shares of time by the names of causes.toml, measured (a run's report, tools/benchmark.py) or predicted
(tools/plan.py). The cause named is the one that is farthest above its `worth`, the share from which it is mentioned; if
none is above, it is the computation itself. The figure of a remedy is planned, for the same run with another option.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from megalite.config.check import check
from megalite.config.tables import table_beside
from megalite.plan.arrangement import Arrangement


class Cause(NamedTuple):
    """what: the subject of "takes 12 % of a step". worth: the share from which it is mentioned."""

    what: str
    worth: float
    remedy: str


CAUSES = {name: Cause(**known) for name, known in table_beside(__file__, "causes").items()}
COMPUTING = ("compute", "kernels", "recompute")


def limit_of(shares: Mapping[str, float]) -> str:
    """The cause to mention. Shares with other names than those of CAUSES are ignored.

    >>> limit_of({"compute": 0.7, "bubble": 0.2, "tp": 0.1}), limit_of({"compute": 0.9, "bubble": 0.09})
    ('bubble', 'compute')
    """
    above = {name: share / CAUSES[name].worth for name, share in shares.items() if name in CAUSES}
    worst = max(above, key=lambda name: above[name], default="compute")
    return worst if above.get(worst, 0.0) >= 1 else max(COMPUTING, key=lambda name: shares.get(name, 0.0))


def sentence(cause: str, share: float, figures: str = "", of: str = "a step") -> str:
    """Say the share of a cause and its remedy. `figures`: more that is known about either.

    >>> sentence("evaluation", 0.3, of="the run")
    'evaluation takes 30.0% of the run: evaluate less often (--eval-interval), or fewer batches (--eval-iters)'
    """
    known = f" ({figures})" if figures else ""
    return f"{CAUSES[cause].what} takes {share:.1%} of {of}{known}: {CAUSES[cause].remedy}"


def in_order(shares: Mapping[str, float]) -> str:
    """All shares that are not 0, the largest first."""
    return ", ".join(f"{name} {share:.1%}" for name, share in sorted(shares.items(), key=lambda s: -s[1]) if share)


def too_few_cores(ranks: int, threads: int, cores: int) -> str:
    """The reason why waits mean nothing if the threads of a machine's ranks share its cores; empty if they do not."""
    if ranks * threads <= cores:
        return ""
    have, number = f"{ranks} rank{'s' * (ranks > 1)}", f"{threads} thread{'s' * (threads > 1)}"
    shared = f"{have} of {number} share {cores} core{'s' * (cores > 1)}"
    return f"{shared}, so a wait for other ranks may be a wait for a core"


def with_options(plan: Arrangement, **options: Any) -> Arrangement | None:
    """The same run with other options, named "section__name"; None if they contradict each other."""
    config = plan.config
    for name, value in options.items():
        section, _, option = name.partition("__")
        config = replace(config, **{section: replace(getattr(config, section), **{option: value})})
    if check(config, plan.world):
        return None
    other = replace(plan, config=config)
    try:
        _ = other.stages
    except ValueError:
        return None
    return other


def about_the_bubble(plan: Arrangement) -> str:
    """The planned bubble, and the bubble with each of its remedies."""
    larger = f"twice the micro-batches (--global-batch-size {2 * plan.batch_size})"
    remedies = {larger: with_options(plan, train__global_batch_size=2 * plan.batch_size)}
    if not plan.config.parallel.split_backward:
        remedies["--split-backward"] = with_options(plan, parallel__split_backward=True)
    if plan.chunks == 1 and plan.config.model.num_layers >= 2 * plan.pp:
        chunked = with_options(plan, parallel__num_virtual_stages_per_pipeline_rank=2)
        remedies["--num-virtual-stages-per-pipeline-rank 2"] = chunked
    planned = f"{plan.bubble:.1%} as planned with {plan.microbatches} micro-batches over {plan.pp} stages"
    return ", ".join([planned, *(f"{other.bubble:.1%} with {name}" for name, other in remedies.items() if other)])
