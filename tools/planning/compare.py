"""Predicted and measured values of a run, from the files that it has written.

python tools/plan.py compare RUN                          with the default rates of its device
python tools/plan.py compare RUN --profile profile.json   with the rates that tools/plan.py calibrate has measured

Predictions are for the run's own options and number of ranks: memory as at its start (megalite/planning/run_plan.py),
times by megalite/planning/step_time.py. Measured values:

    step              median of the lines of metrics.jsonl without the first
    parts of a step   means over ranks and over all steps of the last process (report.json)
    pipeline bubble   of the step that --profile-pipeline has timed (timeline.json)
    memory            largest value in heartbeats, or in the log lines of rank 0; on a GPU the memory that torch has
                      allocated, on a CPU the whole process with Python and its libraries
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from megalite.config.config_file import read_config_file
from megalite.config.options import ConfigError, apply_megatron_defaults, build
from megalite.data.errors import DataError
from megalite.parallel.mesh import rank_order
from megalite.planning.cluster import DEVICES, Cluster, DeviceProfile, make_cluster, read_profile
from megalite.planning.cluster_file import read_cluster
from megalite.planning.run_plan import RunPlan, make_run_plan
from megalite.planning.step_time import predict_step
from megalite.training.datasets import open_tokenizer, true_vocab_size
from megalite.training.logging.log_format import aligned_table
from megalite.training.logging.time_breakdown import COMPUTE
from tools.cli_common import find_unwritable, make_parser
from tools.plots.html_report import DAMAGE_ERRORS
from tools.plots.pipeline import read_timeline
from tools.plots.run_data import RunData, RunError, as_dict, as_list, finite_number, read_run

NOT_RECORDED, NOT_PREDICTED = "not recorded", "not predicted"
MAX_RANKS = 16  # with more pipeline ranks, only the fullest one has a row


@dataclass(frozen=True)
class PredictionRow:
    """One predicted and measured value.

    Attributes:
        unit: "s", "bytes", "share" or "tokens/s".
        predicted: None if nothing predicts it.
        measured: None if the run did not record it.
    """

    part: str
    unit: str
    predicted: float | None
    measured: float | None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Predicted divided by measured."""
        return None if self.predicted is None or not self.measured else self.predicted / self.measured


def compare(run_dir: Path, cluster: Cluster | None = None, profile: DeviceProfile | None = None) -> list[PredictionRow]:
    """Compare the predictions for a run with its measured values.

    Args:
        cluster: By default the one of the run's device and hosts.
        profile: The rates of a device; by default those of its kind.

    Raises:
        ConfigError: if the directory is not that of a run, or its options are unknown.
    """
    try:
        run = read_run(run_dir, run_dir.name)
    except RunError as error:
        raise ConfigError([str(error)]) from None
    plan = plan_of_run(run)
    return [
        *_times(run, plan, cluster or cluster_of_run(run, plan), profile),
        *_pipeline_waits(run, plan),
        *_memory(run, plan),
    ]


def plan_of_run(run: RunData) -> RunPlan:
    """Return the plan that a run had at its start. Raises ConfigError."""
    path = run.directory / "run_config.toml"
    if not path.is_file():
        raise ConfigError([f"{path} is not there: the run's options are not known; give the directory of a run"])
    try:
        config = build(apply_megatron_defaults(read_config_file(str(path))))
        return make_run_plan(config, run.devices, true_vocab_size(config.data, open_tokenizer(config.data)))
    except DataError as error:
        remedy = "compare on a machine that has its files"
        raise ConfigError([f"{path}: the tokenizer cannot be opened ({error}); {remedy}"]) from None
    except ValueError as error:
        raise ConfigError([f"{path}: {error}"]) from None


def cluster_of_run(run: RunData, plan: RunPlan) -> Cluster:
    """Return the cluster with the device and hosts that the run recorded. Raises ConfigError."""
    device, num_hosts = run.run_info.get("device"), len(as_list(run.run_info.get("hosts"))) or 1
    gpu_name = str(as_dict(run.run_info.get("machine")).get("gpu", ""))
    kinds: list[str] = []
    if device == "cuda":
        kinds = [kind for kind in DEVICES if kind.upper() in gpu_name.upper()]
    elif device == "cpu":
        kinds = ["cpu"]
    if not kinds:
        name = gpu_name or "no GPU recorded"
        raise ConfigError([f"device={device!r} ({name}) is not in the table; give --cluster FILE"])
    return make_cluster(
        kinds[0], plan.shape.world, plan.shape.world // num_hosts if plan.shape.world % num_hosts == 0 else None
    )


def _times(run: RunData, plan: RunPlan, cluster: Cluster, profile: DeviceProfile | None) -> list[PredictionRow]:
    predicted = predict_step(plan, cluster, profile)
    steps = finite_number(run.report.get("steps"))
    seconds: dict[str, float] = {}
    if steps:
        phases = as_dict(run.report.get("seconds"))
        seconds = {phase: finite_number(value) or 0.0 for phase, value in phases.items()}

    def measured_s(*phases: str) -> float | None:
        """Return the seconds of these phases per step; None without a report."""
        return sum(seconds.get(phase, 0.0) for phase in phases) / steps if seconds and steps else None

    def logged_median(key: str) -> float | None:
        values = [value for row in run.rows if (value := finite_number(row.get(key))) is not None]
        return median(values[1:] or values) if values else None

    parts = predicted.parts
    tokens_per_s = logged_median("perf/tokens_per_s_per_gpu")
    if tokens_per_s is not None:
        tokens_per_s *= plan.shape.world
    source = profile.source if profile else f"the defaults of {cluster.device.name}; --profile is more accurate"
    bubble_note = "" if plan.shape.pp > 1 else "no pipeline"
    communication = parts["tp"] + parts["cp"] + parts["dp"]
    return [
        PredictionRow("step", "s", predicted.seconds, logged_median("perf/step_s"), f"by {source}"),
        PredictionRow("  compute", "s", parts["compute"], measured_s(*COMPUTE)),
        PredictionRow(
            "  bubble and pp messages", "s", parts["bubble"] + parts["pp"], measured_s("bubble"), bubble_note
        ),
        PredictionRow("  exposed communication", "s", communication, measured_s("communication")),
        PredictionRow("  optimizer", "s", parts["optimizer"], measured_s("optimizer")),
        PredictionRow("  data", "s", None, measured_s("data")),
        PredictionRow("  other", "s", None, measured_s("other"), "includes the time between steps"),
        PredictionRow("tokens/s", "tokens/s", predicted.tokens_per_s, tokens_per_s),
        PredictionRow("MFU", "share", predicted.mfu, logged_median("perf/mfu")),
    ]


def _pipeline_waits(run: RunData, plan: RunPlan) -> list[PredictionRow]:
    """Return the bubble that FLOPs and schedule predict, and the timed one."""
    if plan.shape.pp == 1:
        return []
    measured, note = None, "needs --profile-pipeline STEP"
    if run.timeline is not None:
        try:
            spans, work_s, simulation = read_timeline(run.timeline)
            end_s = max(stop for *_, stop in spans)
            measured = 1 - work_s / (plan.shape.pp * end_s)
            note = f"of one step; {100 * simulation.bubble:.1f} % with the measured times of its stages"
        except DAMAGE_ERRORS as error:
            note = f"timeline.json is damaged: {error!r}"
    return [PredictionRow("pipeline bubble", "share", plan.balance.bubble, measured, note)]


def _memory(run: RunData, plan: RunPlan) -> list[PredictionRow]:
    shape = plan.shape
    fullest = plan.model_states.fullest_rank
    state = plan.model_states.by_rank[fullest]
    suffix = f" of pipeline rank {fullest}" if shape.pp > 1 else ""
    rows = [
        PredictionRow(f"weights{suffix}", "bytes", state.weights, None),
        PredictionRow(f"gradients{suffix}", "bytes", state.gradients, None),
        PredictionRow(f"optimizer{suffix}", "bytes", state.optimizer, None),
        PredictionRow(f"activations{suffix}", "bytes", plan.balance.activation_bytes[fullest], None),
    ]
    is_cpu = run.run_info.get("device") == "cpu"
    note = "measured is the whole process, with Python and libraries" if is_cpu else ""
    for position in range(shape.pp) if shape.pp <= MAX_RANKS else [fullest]:
        predicted = plan.model_states.by_rank[position].total + plan.balance.activation_bytes[position]
        measured = _measured_peak(run, plan, position)
        name = f"peak of pipeline rank {position}" if shape.pp > 1 else "peak"
        rows.append(PredictionRow(name, "bytes", predicted, measured, "" if measured is None else note))
    return rows


def _measured_peak(run: RunData, plan: RunPlan, position: int) -> float | None:
    """Return the largest peak of the ranks of a pipeline position, in bytes; None if it was not recorded."""
    ranks = rank_order(plan.shape.world, plan.shape.mesh_sizes).stage_ranks(position)
    if len(run.peaks_gib) == plan.shape.world:
        peaks = [run.peaks_gib[rank] for rank in ranks]
    elif 0 in ranks:
        peaks = [gib for _, _, gib in run.curve("mem/max_allocated_gib")]  # log lines have the memory of rank 0
    else:
        peaks = []
    return max(peaks) * 2**30 if peaks else None


def _format_value(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "bytes":
        return f"{value / 2**30:,.2f} GiB" if value >= 2**30 else f"{value / 2**20:,.2f} MiB"
    if unit == "share":
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if unit == "tokens/s" else f"{value:.4g} s"


def format_rows(rows: Sequence[PredictionRow]) -> str:
    """Return a table of the rows, and their notes."""
    table = [("", "predicted", "measured", "ratio")]
    parts_by_note: dict[str, list[str]] = {}
    for row in rows:
        predicted = _format_value(row.predicted, row.unit) or NOT_PREDICTED
        measured = _format_value(row.measured, row.unit) or NOT_RECORDED
        table.append((row.part, predicted, measured, "" if row.ratio is None else f"{row.ratio:.2f}"))
        if row.note:
            parts_by_note.setdefault(row.note, []).append(row.part.strip())
    notes = [f"{', '.join(parts)}: {note}" for note, parts in parts_by_note.items()]
    return "\n".join([aligned_table(table), *notes])


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="measured rates of a device, from plan.py calibrate"
    )
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="a TOML file, instead of what the run recorded")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to a file")
    return parser


def main(argv: list[str]) -> int:
    """Print the comparison and return the exit code. Raises ConfigError."""
    args = build_parser().parse_args(argv)
    try:
        if problems := list(find_unwritable(json=args.json)):
            raise ConfigError(problems)
        cluster = read_cluster(args.cluster) if args.cluster is not None else None
        profile = read_profile(args.profile) if args.profile is not None else None
        rows = compare(args.run_dir, cluster, profile)
        print(format_rows(rows))
        if args.json is not None:
            content = json.dumps([{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows], indent=1)
            args.json.write_text(content + "\n")
    except (ValueError, OSError) as error:
        raise ConfigError(str(error).splitlines()) from None
    return 0
