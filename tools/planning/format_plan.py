"""A plan as tables, as JSON, and as the command that runs it."""

import dataclasses
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalite.common.console import as_typed
from megalite.planning.cluster import Cluster
from megalite.planning.memory import RankMemory
from megalite.planning.run_plan import RunPlan
from megalite.training.logging.log_format import aligned_table
from megalite.training.logging.plan_summary import format_parameters
from tools.planning.plan_request import LAYOUT_OPTIONS, RECOMPUTE_DETAILS, Request, drop_flags, to_flags
from tools.planning.published_runs import TOLERANCE
from tools.planning.search import MIN_FREE_MEMORY, Layout, PlannedLayout, RowChoice, SearchResult, apply_layout
from tools.planning.token_budget import TokenBudget

GIB = 2**30
SLURM_SCRIPT = Path(__file__).resolve().parents[2] / "examples/launch/slurm.sh"
COMM_AXES = ("tp", "cp", "pp", "dp")
MEMORY_PARTS = {  # the name in the table and in the plan's JSON: the field of RankMemory
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "buffers": "transient",
}
LINE_WIDTH = 116
MAX_MEMORY_ROWS = 8  # pipeline ranks in the table of memory
MAX_REASONS = 6


def wrap(line: str, indent: str = "") -> list[str]:
    """Wrap a sentence at LINE_WIDTH without breaking flags or names; lines after the first are indented."""
    return textwrap.wrap(line, LINE_WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def error_band(predicted: float) -> tuple[float, float]:
    """Return the range of most measured values for a prediction, by published steps (published_runs.py)."""
    return predicted / (1 + TOLERANCE), predicted / (1 - TOLERANCE)


def summary_lines(result: SearchResult, num_shown: int) -> list[str]:
    """Return the lines below the table of layouts: what was searched, and how many rows are about as fast."""
    accuracy = f"about: published steps were mostly within {TOLERANCE:.0%} of their prediction; shares are exposed time"
    if result.num_candidates == 1:
        return [accuracy]
    choices, fastest = result.choices(), result.plans[0]
    num_ties = sum(choice.best.time.seconds <= result.tie_threshold_s for choice in choices)
    axes = "tp, pp, cp, ep" if fastest.plan.shape.has_experts else "tp, pp, cp"
    lines = [
        f"{result.num_candidates:,} layouts: {result.num_impossible:,} cannot be built, "
        f"{result.num_too_large:,} do not fit, {result.num_simulated:,} of the others were simulated; "
        f"one row per combination of {axes} and ZeRO stage, here {num_shown} of {len(choices)}",
        accuracy,
        f"within that error of the fastest ({fastest.layout}, {fastest.time.seconds:.3f} s): {num_ties} of the rows; "
        f"the simplest of them stands first, or if it leaves less than {MIN_FREE_MEMORY:.0%} of the memory free, "
        "the simplest that leaves more and takes no longer",
    ]
    if result.num_unexplored:
        lines.append(f"{result.num_unexplored:,} more may be faster than the fastest, by their bounds; not simulated")
    return [part for line in lines for part in wrap(line)]


def layout_table(choices: Sequence[RowChoice]) -> str:
    """Return the table of layouts: seconds of a step, the shares of its parts, and the memory of the fullest rank."""
    has_cp = any(choice.best.plan.shape.cp > 1 for choice in choices)
    axes = [axis for axis in COMM_AXES if axis != "cp" or has_cp]
    rows: list[tuple[str, ...]] = [
        ("layout", "dp", "s/step", "about", "MFU", "tokens/s", "bubble", *axes, "update", "GiB")
    ]
    for choice in choices:
        layout, time = choice.best, choice.best.time
        shares = {name: f"{max(0.0, seconds) / time.seconds:.1%}" for name, seconds in time.parts.items()}
        low, high = error_band(time.seconds)
        rows.append(
            (
                str(layout.layout),
                str(layout.plan.shape.dp),
                f"{time.seconds:.3f}",
                f"{low:.2f}-{high:.2f}",
                f"{time.mfu:.1%}",
                f"{time.tokens_per_s:,.0f}",
                *(shares[name] for name in ("bubble", *axes, "optimizer")),
                f"{layout.peak / GIB:.1f}",
            )
        )
    return aligned_table(rows)


def memory_rows(memory: Sequence[RankMemory], plan: RunPlan) -> list[tuple[str, ...]]:
    """Return a table of GiB on a rank of each pipeline position; of many, the first and last ones and the fullest."""
    ranks: Sequence[int] = range(len(memory))
    fullest = max(ranks, key=lambda rank: memory[rank].peak)
    if len(ranks) > MAX_MEMORY_ROWS:
        ranks = sorted({0, 1, fullest, ranks[-2], ranks[-1]})
    rows: list[tuple[str, ...]] = [("GiB per rank", "layers", *MEMORY_PARTS, "peak")]
    for rank in ranks:
        layers = sum(plan.balance.layers_per_stage[stage] for stage in plan.shape.placement.stages_of_rank(rank))
        sizes = [getattr(memory[rank], field) for field in MEMORY_PARTS.values()]
        name = f"pipeline rank {rank}"
        if rank == fullest:
            name += "  <- largest"
        rows.append((name, str(layers), *(f"{size / GIB:.2f}" for size in (*sizes, memory[rank].peak))))
    return rows


def run_argv(request: Request, layout: Layout, steps: int) -> list[str]:
    """Return the flags of the run. A layout that the request names is part of its argv already."""
    argv = [*request.argv]
    if not request.is_single_layout:
        argv += to_flags(apply_layout(layout, request.config), (*LAYOUT_OPTIONS, *RECOMPUTE_DETAILS))
    if request.config.train.train_samples is None:
        argv = [*drop_flags(argv, ["train_iters"]), "--train-iters", str(steps)]
    return argv


def launch_script(request: Request, layout: Layout, steps: int) -> str:
    """Return the header of a SLURM script and its command, with one flag and its values per line."""
    cluster = request.cluster
    lines: list[list[str]] = []
    for arg in run_argv(request, layout, steps):
        if arg.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(shlex.quote(arg))
    flags = " \\\n    ".join(" ".join(line) for line in lines)
    if cluster.device.name == "cpu":
        return as_typed(f"python pretrain_gpt.py --nproc {cluster.world} --device cpu \\\n    {flags}")
    has_script = SLURM_SCRIPT.is_file()  # a wheel has no examples
    header = [
        f"#SBATCH --nodes={cluster.num_nodes}",
        f"#SBATCH --ntasks-per-node={1 if has_script else cluster.devices_per_node}",
        f"#SBATCH --gpus-per-node={cluster.devices_per_node}",
    ]
    program = "sbatch examples/launch/slurm.sh RUN_DIR" if has_script else "srun megalite train"
    return "\n".join([*header, "", f"{program} \\\n    {flags}"])


def refusal_lines(result: SearchResult) -> list[str]:
    """Return the reasons for which layouts are left out, most frequent first."""
    reasons = result.refused.most_common(MAX_REASONS)
    lines = [f"{count:>6} x {result.examples[kind]}" for kind, count in reasons]
    num_others = len(result.refused) - MAX_REASONS
    if num_others > 0:
        lines.append(f"       and {num_others} other reasons")
    if result.num_too_large and result.smallest_too_large is not None:
        size, layout = result.smallest_too_large
        reason = f"take more than {result.limit / GIB:.2f} GiB; the smallest of them {size / GIB:.2f} GiB: {layout}"
        lines.append(f"{result.num_too_large:>6} x {reason}")
    return lines


def budget_lines(
    budget: TokenBudget,
    plan: RunPlan,
    speed: float,
    cluster: Cluster,
    price: float | None,
    data_tokens: int | None,
    is_predicted: bool = False,
) -> list[str]:
    """Return the length and cost of a whole run.

    Args:
        speed: Tokens per second.
        price: Dollars per device hour; None: the example price of the device.
        data_tokens: The tokens of the data, if they are known.
        is_predicted: Print the error of predictions with the time.
    """
    devices = cluster.world
    if price is None:
        price = cluster.device.price_per_hour
    sizes, seq_length = plan.shape.batch_sizes, plan.config.model.seq_length
    per_parameter = "per parameter that a token uses" if plan.shape.has_experts else "per parameter"
    after_growth = ", once the batch has grown" if len(sizes.milestones) > 1 else ""
    hours = budget.device_hours(speed, devices)
    time = f"{_format_days(budget.days(speed))} at {speed:,.0f} tokens/s"
    if is_predicted:
        low, high = error_band(budget.days(speed))
        time += f" ({_format_days(low)} to {_format_days(high)} by an error of {TOLERANCE:.0%})"
    rows = {
        "parameters": format_parameters(plan),
        "tokens": f"{budget.tokens:,} ({_rounded(budget.tokens / budget.active, 1)} {per_parameter})",
        "FLOPs by 6 N D": f"{budget.flops_6nd:.3e}",
        "FLOPs counted": f"{budget.exact_flops:.3e} ({budget.exact_flops / budget.flops_6nd:.2f} of the rule's)",
        "steps": f"{budget.steps(sizes, seq_length):,} of {sizes.final * seq_length:,} tokens{after_growth}",
        "time": time,
        "device hours": f"{_rounded(hours)} on {devices:,} devices",
        "cost": f"{_rounded(hours * price)} $ at {price:g} $ per device hour (set yours with --price-per-gpu-hour)",
    }
    if data_tokens is not None:
        rows["epochs"] = f"{budget.epochs(data_tokens):.2f} over {data_tokens:,} tokens"
    return [f"{name:<15} {text}" for name, text in rows.items()]


def _rounded(value: float, digits: int = 0) -> str:
    """Format a number, with two significant digits if it would be rounded to 0."""
    return f"{value:,.{digits}f}" if value >= 10 ** (1 - digits) or value == 0 else f"{value:.2g}"


def _format_days(days: float) -> str:
    hours, minutes, seconds = days * 24, days * 24 * 60, days * 24 * 60 * 60
    if days >= 1:
        return f"{days:,.1f} days"
    if hours >= 1:
        return f"{hours:.1f} hours"
    if minutes >= 1:
        return f"{minutes:.1f} minutes"
    return f"{seconds:.2g} s"


def as_json(planned: PlannedLayout) -> dict[str, Any]:
    """Return a planned layout as JSON, in bytes and seconds."""
    plan, time = planned.plan, planned.time
    return {
        "layout": dataclasses.asdict(planned.layout),
        "name": str(planned.layout),
        "world": plan.shape.world,
        "dp": plan.shape.dp,
        "cp": plan.shape.cp,
        "first_ranks": [*plan.shape.rank0_groups["pp"]],
        "microbatches": plan.shape.num_microbatches,
        "layers": plan.balance.layers_per_stage,
        "seconds": time.seconds,
        "about_seconds": error_band(time.seconds),
        "parts": time.parts,
        "mfu": time.mfu,
        "tokens_per_s": time.tokens_per_s,
        "peak": planned.peak,
        "fullest": planned.fullest,
        "memory": [{name: getattr(rank, field) for name, field in MEMORY_PARTS.items()} for rank in planned.memory],
    }
