"""A plan as tables for people, as JSON, and as the command that would run it."""

import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalite.config.console import as_typed
from megalite.planning.cluster import Cluster
from megalite.planning.memory import RankMemory
from megalite.planning.run_plan import RunPlan
from megalite.training.logging.log_format import aligned_table
from megalite.training.logging.plan_summary import format_parameters
from tools.planning.plan_request import HOW, LAYOUT, Request, as_flags, without
from tools.planning.published_runs import TOLERANCE
from tools.planning.search import ROOM, Choice, Found, Layout, Planned, applied
from tools.planning.token_budget import Budget

GIB = 2**30
SLURM_SCRIPT = Path(__file__).resolve().parents[2] / "examples/launch/slurm.sh"
COMM = ("tp", "cp", "pp", "dp")
# as written in the table and in the plan's JSON -> field of RankMemory
PARTS = {name: name for name in ("weights", "gradients", "optimizer", "activations")} | {"buffers": "transient"}
WIDTH = 116  # of sentences
MOST_ROWS = 8  # pipeline ranks of the table of memory
REASONS = 6


def wrapped(line: str, indent: str = "") -> list[str]:
    """A sentence in lines of WIDTH, those after the first indented; flags and names stay whole."""
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def band(predicted: float) -> tuple[float, float]:
    """Return the range of seconds that would mostly be measured, by published steps (published_runs.py)."""
    return predicted / (1 + TOLERANCE), predicted / (1 - TOLERANCE)


def counts(found: Found, shown: int) -> list[str]:
    """Lines below the table: how many layouts there are, and which rows cannot be told from the fastest."""
    about = f"about: published steps were mostly within {TOLERANCE:.0%} of their prediction; shares are of what shows"
    if found.candidates == 1:
        return [about]
    choices, fastest = found.choices(), found.plans[0]
    equals = sum(one.best.time.seconds <= found.equal_s for one in choices)
    of_one = f"tp, pp, cp{', ep' if fastest.made.has_experts else ''} and sharding, here {shown} of {len(choices)}"
    lines = [
        f"{found.candidates:,} layouts: {found.impossible:,} cannot be built, {found.too_large:,} do not fit, "
        f"{found.simulated:,} of the others were simulated; a row is of one {of_one}",
        about,
        f"as close as that to the fastest ({fastest.layout}, {fastest.time.seconds:.3f} s): {equals} of the rows; of "
        "such layouts the one with the fewest moving parts stands first, or where it leaves less than "
        f"{ROOM:.0%} of the memory free, the plainest that leaves more and takes no longer",
    ]
    if found.left:
        lines.append(f"{found.left:,} more may be faster than the fastest, by their bounds; they were not simulated")
    return [part for line in lines for part in wrapped(line)]


def ranking(choices: Sequence[Choice]) -> str:
    """The table of layouts: seconds of a step, the shares of its parts, and the memory of the fullest rank."""
    comm = [axis for axis in COMM if axis != "cp" or any(choice.best.made.cp > 1 for choice in choices)]
    head = ("layout", "dp", "s/step", "about", "MFU", "tokens/s", "bubble", *comm, "update", "GiB")
    rows: list[tuple[str, ...]] = [head]
    for plan in (choice.best for choice in choices):
        share = {name: f"{max(0.0, part) / plan.time.seconds:.1%}" for name, part in plan.time.parts.items()}
        about = "{:.2f}-{:.2f}".format(*band(plan.time.seconds))
        speed = (f"{plan.time.seconds:.3f}", about, f"{plan.time.mfu:.1%}", f"{plan.time.tokens_per_s:,.0f}")
        parts = (share[name] for name in ("bubble", *comm, "optimizer"))
        rows.append((str(plan.layout), str(plan.made.dp), *speed, *parts, f"{plan.peak / GIB:.1f}"))
    return aligned_table(rows)


def memory_rows(memory: Sequence[RankMemory], made: RunPlan) -> list[tuple[str, ...]]:
    """GiB of a rank of each pipeline position; of many the first, the last, and the fullest."""
    ranks = range(len(memory))
    fullest = max(ranks, key=lambda rank: memory[rank].peak)
    shown = ranks if len(ranks) <= MOST_ROWS else sorted({0, 1, fullest, ranks[-2], ranks[-1]})
    rows: list[tuple[str, ...]] = [("GiB per rank", "layers", *PARTS, "peak")]
    for rank in shown:
        held, counts = memory[rank], made.layers_per_stage
        layers = sum(counts[s] for s in made.placement.stages_of_rank(rank))
        sizes = (f"{getattr(held, field) / GIB:.2f}" for field in PARTS.values())
        mark = "  <- most" if rank == fullest else ""
        rows.append((f"pipeline rank {rank}{mark}", str(layers), *sizes, f"{held.peak / GIB:.2f}"))
    return rows


def command_words(request: Request, layout: Layout, steps: int) -> list[str]:
    """The flags of the run. A layout that the request names stands in its own words already."""
    words = [*request.words]
    if not request.is_layout:
        words += as_flags(applied(layout, request.config), (*LAYOUT, *HOW))
    if request.config.train.train_samples is None:
        words = [*without(words, ["train_iters"]), "--train-iters", str(steps)]
    return words


def command(request: Request, layout: Layout, steps: int) -> str:
    """A SLURM script's head and its command, a flag with its values on a line."""
    c = request.cluster
    lines: list[list[str]] = []
    for word in command_words(request, layout, steps):
        if word.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    flags = " \\\n    ".join(" ".join(line) for line in lines)
    if c.device.name == "cpu":
        return as_typed(f"python pretrain_gpt.py --nproc {c.world} --device cpu \\\n    {flags}")
    if not SLURM_SCRIPT.is_file():  # a wheel has no examples
        header = [f"#SBATCH --nodes={c.num_nodes}", f"#SBATCH --ntasks-per-node={c.devices_per_node}"]
        header += [f"#SBATCH --gpus-per-node={c.devices_per_node}"]
        return "\n".join([*header, "", f"srun megalite train \\\n    {flags}"])
    header = [
        f"#SBATCH --nodes={c.num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={c.devices_per_node}",
    ]
    return "\n".join([*header, "", f"sbatch examples/launch/slurm.sh RUN_DIR \\\n    {flags}"])


def refusals(found: Found) -> list[str]:
    """The commonest first."""
    lines = [f"{count:>6} x {found.examples[kind]}" for kind, count in found.refused.most_common(REASONS)]
    if (rest := len(found.refused) - REASONS) > 0:
        lines.append(f"       and {rest} other reasons")
    if found.too_large and found.least is not None:
        size, layout = found.least
        text = f"take more than {found.limit / GIB:.2f} GiB; the leanest of them {size / GIB:.2f} GiB: {layout}"
        lines.append(f"{found.too_large:>6} x {text}")
    return lines


def budget_lines(
    budget: Budget,
    made: RunPlan,
    speed: float,
    cluster: Cluster,
    price: float | None,
    data_tokens: int | None,
    predicted: bool = False,
) -> list[str]:
    """`speed`: tokens/s, with its error where it is `predicted`. `price`: in place of an example of the device's."""
    devices, price = cluster.world, cluster.device.price_per_hour if price is None else price
    about = ""
    if predicted:
        low, high = map(_time, band(budget.days(speed)))
        about = f" ({low} to {high} by an error of {TOLERANCE:.0%})"
    hours = budget.device_hours(speed, devices)
    sizes, seq_length = made.batch_sizes, made.config.model.seq_length
    used = " that a token uses" if made.has_experts else ""
    grown = ", once the batch has grown" if len(sizes.milestones) > 1 else ""
    rows = [
        ("parameters", format_parameters(made)),
        ("tokens", f"{budget.tokens:,} ({_rounded(budget.tokens / budget.active, 1)} per parameter{used})"),
        ("FLOPs by 6 N D", f"{budget.rule_flops:.3e}"),
        ("FLOPs counted", f"{budget.exact_flops:.3e} ({budget.exact_flops / budget.rule_flops:.2f} of the rule's)"),
        ("steps", f"{budget.steps(sizes, seq_length):,} of {sizes.final * seq_length:,} tokens{grown}"),
        ("time", f"{_time(budget.days(speed))} at {speed:,.0f} tokens/s{about}"),
        ("device hours", f"{_rounded(hours)} on {devices:,} devices"),
        ("cost", f"{_rounded(hours * price)} $ at {price:g} $ per device hour (give your own: --price-per-gpu-hour)"),
    ]
    if data_tokens is not None:
        rows.append(("epochs", f"{budget.epochs(data_tokens):.2f} over {data_tokens:,} tokens"))
    return [f"{name:<15} {text}" for name, text in rows]


def _rounded(value: float, digits: int = 0) -> str:
    """A number as text, with two significant digits where it would be rounded to 0."""
    return f"{value:,.{digits}f}" if value >= 10 ** (1 - digits) or value == 0 else f"{value:.2g}"


def _time(days: float) -> str:
    hours, minutes = days * 24, days * 24 * 60
    if days >= 1:
        return f"{days:,.1f} days"
    return f"{hours:.1f} hours" if hours >= 1 else f"{minutes:.1f} minutes" if minutes >= 1 else f"{minutes * 60:.2g} s"


def as_json(plan: Planned) -> dict[str, Any]:
    """Bytes and seconds."""
    made, time = plan.made, plan.time
    told = {"layout": plan.layout._asdict(), "name": str(plan.layout), "world": made.world, "dp": made.dp}
    told |= {"cp": made.cp, "first_ranks": [*made.rank0_groups["pp"]], "microbatches": made.num_microbatches}
    told |= {
        "layers": made.layers_per_stage,
        "seconds": time.seconds,
        "about_seconds": band(time.seconds),
        "parts": time.parts,
    }
    told |= {"mfu": time.mfu, "tokens_per_s": time.tokens_per_s, "peak": plan.peak, "fullest": plan.fullest}
    return told | {"memory": [{part: getattr(held, field) for part, field in PARTS.items()} for held in plan.memory]}
