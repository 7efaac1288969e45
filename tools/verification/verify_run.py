"""Train the layout and one process, compare them, and format the result, for tools/verify.py."""

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.common.console import ProgressBar
from megalite.config.options import Config
from megalite.config.pipeline_layout import explicit_stage_layers
from megalite.launch.local_launcher import TIMEOUT_EXIT_CODE, LaunchResult, launch_local
from megalite.training.logging.log_format import aligned_table
from tools.plots.curves import verification_plot
from tools.plots.style import save
from tools.verification.compare_ranks import (
    KINDS,
    QuantityDiff,
    Reference,
    Tolerance,
    compare,
    reference_loss_problems,
    step_label,
)
from tools.verification.first_difference import Finding, first_difference
from tools.verification.record import STEP, Recording, read_all, record_rank
from tools.verification.reference_sharding import Layout
from tools.verification.shrink import ShrunkConfig, single_process_config

KIND_TEXTS = {  # kind -> (heading of all quantities, one of them)
    "input": ("inputs of micro-batches", "the {} of a micro-batch"),
    "forward": ("hidden states and losses", "the output of {}"),
    "loss": ("loss", "the loss of a {}"),
    "gradient": ("gradients", "the gradient of {}"),
    "norm": ("gradient norm", "the gradient norm of the {}"),
    "router": ("router counts and losses", "the sums {}"),
    "weight": ("weights", "the weights {}"),
}
MAX_NAMED = 6  # quantities that are named


class RunFailed(Exception):
    """One of the runs ended with an error, which its ranks have printed."""


class RunStopped(Exception):
    """A run was stopped by a signal."""

    def __init__(self, code: int):
        self.code = code  # the exit code of this process


@dataclass(frozen=True)
class VerifyResult:
    """The comparison of one layout with one process.

    Attributes:
        reference_errors: lines about wrong losses in the one process.
    """

    shrunk: ShrunkConfig
    tolerance: Tolerance
    diffs: list[QuantityDiff]
    finding: Finding | None
    reference_errors: list[str]

    @property
    def agrees(self) -> bool:
        return self.finding is None and not self.reference_errors

    @property
    def worst(self) -> list[QuantityDiff]:
        """The quantity with the largest difference of each kind and step; those beyond the tolerance come first."""
        worst: dict[tuple[str, float], QuantityDiff] = {}
        for diff in self.diffs:
            current = worst.setdefault((diff.kind, diff.step), diff)
            if (diff.differs, diff.distance) > (current.differs, current.distance):
                worst[diff.kind, diff.step] = diff
        return sorted(worst.values(), key=lambda diff: (KINDS.index(diff.kind), diff.step))

    @property
    def notes(self) -> list[str]:
        notes = [*self.shrunk.notes]
        if not any(diff.step % 1 for diff in self.diffs):
            notes.append("evaluations are not verified: --eval-iters is 0, or there is no validation set")
        return notes


def train(config: Config, dtype: str, layout: Layout, timeout_s: float) -> list[Recording]:
    """Train on local ranks and return the recording of each.

    Raises:
        RunFailed: if a rank fails or `timeout_s` has passed.
        RunStopped: if a signal ended the run.
    """
    with tempfile.TemporaryDirectory(prefix="megalite-verify-") as directory:
        results: list[LaunchResult] = []
        args = (config, dtype, config.train.train_iters, directory)
        code = launch_local(
            layout.world_size, record_rank, args, timeout_s=timeout_s, keep_signals_blocked=True, on_exit=results.append
        )
        if results[-1].signals:
            raise RunStopped(code)
        if code:
            reason = f"{results[-1].cause}; its error is above"
            if code == TIMEOUT_EXIT_CODE:
                reason = f"it has not ended after {timeout_s:g} s; raise --timeout"
            ranks = "1 rank" if layout.world_size == 1 else f"{layout.world_size} ranks"
            raise RunFailed(f"the run on {ranks} failed: {reason}")
        return read_all(Path(directory), layout)


def verify(shrunk: ShrunkConfig, dtype: str, timeout_s: float) -> VerifyResult:
    """Train in one process and under the layout, and compare.

    Raises:
        RunFailed: if one of the runs fails.
        RunStopped: if a signal ended a run.
    """
    config, layout = shrunk.config, shrunk.layout
    model, train_config = config.model, config.train
    batch_size = train_config.global_batch_size or 1
    longest_sum = max(model.seq_length * batch_size, model.ffn_size, model.hidden_size)
    tolerance = Tolerance(dtype, longest_sum, model.num_layers)
    with ProgressBar("verify", 3, "parts") as bar:
        bar.update(0, "one process")
        (single_process,) = train(single_process_config(config), dtype, Layout(), timeout_s)
        bar.update(1, str(layout))
        ranks = train(config, dtype, layout, timeout_s)
        bar.update(2, "comparing")
        reference = Reference(single_process)
        diffs = compare(reference, ranks, layout, tolerance)
        num_depths = model.num_mtp_depths
        depth_weight = model.mtp_loss_scaling_factor / max(1, num_depths)
        reference_errors = list(
            reference_loss_problems(
                reference, tolerance, model.final_logit_softcapping, num_depths, depth_weight, model.logit_multiplier
            )
        )
        num_microbatches = batch_size // (train_config.micro_batch_size * layout.dp)
        finding = first_difference(diffs, layout, num_microbatches)
        return VerifyResult(shrunk, tolerance, diffs, finding, reference_errors)


def format_result(result: VerifyResult, dtype: str) -> str:
    """Return the report of one comparison as text."""
    shrunk = result.shrunk
    model, train_config = shrunk.config.model, shrunk.config.train
    steps = train_config.train_iters
    lines = [
        f"requested: {shrunk.requested}; verified: {shrunk.layout}{_num_chunks(shrunk)}, {dtype}, "
        f"{steps} step{'' if steps == 1 else 's'}",
        f"with {model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} heads in "
        f"{model.num_kv_groups} groups, feed-forward {model.ffn_size}, {model.seq_length} tokens, batch "
        f"{train_config.global_batch_size} in micro-batches of {train_config.micro_batch_size}",
    ]
    if model.has_experts:
        lines.append(
            f"{model.moe_router_topk} of {model.num_experts} experts for each token, {model.expert_ffn_size} wide"
        )
    lines += [f"note: {note}" for note in result.notes]
    lines += ["", _format_worst(result), ""]
    if result.reference_errors:
        lines.append("the losses of the one process are wrong:")
        lines += [f"  {line}" for line in result.reference_errors]
    if result.finding is not None:
        lines += _format_finding(result.finding)
    if result.agrees:
        num_params = len({diff.name for diff in result.diffs if diff.kind == "weight"})
        lines.append(
            f"agreed: {shrunk.layout} trains as one process does ({num_params} parameters, every copy of them)"
        )
    return "\n".join(lines)


def _format_worst(result: VerifyResult) -> str:
    """Return the table with the largest difference of each kind and step."""
    rows: list[tuple[str, ...]] = [("compared", "step", "largest in", "difference", "allowed", "differ")]
    for worst in result.worst:
        same_kind = [diff for diff in result.diffs if (diff.kind, diff.step) == (worst.kind, worst.step)]
        rows.append(
            (
                KIND_TEXTS[worst.kind][0],
                f"{worst.step:g}" if worst.step == int(worst.step) else f"eval {int(worst.step)}",
                worst.name if worst.distance or worst.differs else "equal",
                f"{worst.distance:.1e}",
                f"{worst.tolerance:.1e}",
                f"{sum(diff.differs for diff in same_kind)} of {len(same_kind)}",
            )
        )
    return aligned_table(rows)


def _num_chunks(shrunk: ShrunkConfig) -> str:
    parallel = shrunk.config.parallel
    num_chunks = parallel.num_virtual_stages_per_pipeline_rank or 1
    stages = explicit_stage_layers(shrunk.config.model, parallel)
    if stages is not None:
        num_chunks = len(stages) // parallel.pipeline_model_parallel_size
    return f", {num_chunks} chunks" if num_chunks > 1 else ""


def _format_finding(finding: Finding) -> list[str]:
    is_evaluation = finding.step % 1 > 0
    quantity = KIND_TEXTS[finding.kind][1].format(finding.name)
    if is_evaluation and (finding.kind, finding.name) == ("loss", STEP):
        quantity = "the validation loss"
    preposition = "at"
    if is_evaluation:
        preposition = "in"
    elif finding.kind == "weight":
        preposition = "after"
    time = f"{preposition} {step_label(finding.step)}" if finding.step else "before the first step"
    ranks = "; ".join(f"{axis} {' '.join(map(str, numbers))}" for axis, numbers in finding.ranks.items() if numbers)
    lines = [
        f"DIFFERS first {time}: {quantity}, by {finding.distance:.3g}; allowed: {finding.tolerance:.1e}",
        f"  on ranks: {ranks or 'none'}",
        f"  where: {finding.location}",
    ]
    if finding.ratio is not None:
        sizes = f" ({', '.join(finding.ratio_sizes)})" if finding.ratio_sizes else ""
        lines.append(f"  ratio: {finding.ratio:.6g} times the value of one process{sizes}")
    if len(finding.differing) > 1:
        names = ", ".join(finding.differing[:MAX_NAMED])
        if len(finding.differing) > MAX_NAMED:
            names += f" and {len(finding.differing) - MAX_NAMED} more"
        lines.append(f"  all that differ there: {names}")
    return lines


def to_json(results: Sequence[VerifyResult], dtype: str) -> dict[str, Any]:
    """Return the content of --json: the first run, with the second one below it under `second`."""
    first, *others = (_result_json(result, dtype) for result in results)
    findings = [run["first"] for run in (first, *others) if run["first"] is not None]
    return {
        **first,
        "agrees": all(result.agrees for result in results),
        "first": findings[0] if findings else None,
        "second": others[0] if others else None,
    }


def _result_json(result: VerifyResult, dtype: str) -> dict[str, Any]:
    shrunk = result.shrunk
    return {
        "agrees": result.agrees,
        "dtype": dtype,
        "steps": shrunk.config.train.train_iters,
        "wanted": dataclasses.asdict(shrunk.requested),
        "verified": dataclasses.asdict(shrunk.layout),
        "notes": result.notes,
        "first": None if result.finding is None else _finding_json(result.finding),
        "one_process": result.reference_errors,
        "rows": [
            {
                "step": diff.step,
                "kind": diff.kind,
                "name": diff.name,
                "distance": diff.distance,
                "tolerance": diff.tolerance,
                "differs": diff.differs,
                "missing": diff.problem,
            }
            for diff in result.diffs
        ],
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "step": finding.step,
        "kind": finding.kind,
        "name": finding.name,
        "layer": finding.layer,
        "distance": finding.distance,
        "tolerance": finding.tolerance,
        "ranks": finding.ranks,
        "where": finding.location,
        "ratio": finding.ratio,
        "ratio_sizes": finding.ratio_sizes,
        "others": finding.differing,
    }


def draw(result: VerifyResult, path: Path, dtype: str) -> None:
    """Write the plot of a result.

    Raises:
        OSError, ValueError: if the file cannot be written, or its format is unknown.
        MissingPackageError: if matplotlib is missing.
    """
    save(verification_plot(result.diffs, str(result.shrunk.layout), dtype), path)
