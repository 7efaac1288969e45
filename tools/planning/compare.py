"""Predicted beside measured of a run, from what it has written.

python tools/plan.py compare RUN                          by the defaults of its device
python tools/plan.py compare RUN --profile profile.json   by what tools/plan.py calibrate has measured there

Predicted: memory as a start prints it (megalite/planning/run_plan.py), times by megalite/planning/step_time.py, of the
run's own options and ranks. Measured: a step is the median of metrics.jsonl, its first line left out; the parts of a
step are means over ranks and all steps of the last process (report.json); waits in the pipeline are of the one step
that --profile-pipeline has timed (timeline.json); memory is what heartbeats, or the log lines of rank 0, have seen: on
a card what torch has allocated, on a CPU the whole process, with Python and its libraries.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import NamedTuple

from megalite.config.config_file import read_config_file
from megalite.config.options import ConfigError, apply_megatron_defaults, build
from megalite.data.errors import DataError
from megalite.parallel.mesh import rank_grid
from megalite.planning.cluster import DEVICES, Cluster, DeviceProfile, make_cluster, read_cluster, read_profile
from megalite.planning.run_plan import RunPlan, make_run_plan
from megalite.planning.step_time import predict_step
from megalite.training.datasets import open_tokenizer, true_vocab_size
from megalite.training.logging.log_format import aligned_table
from megalite.training.logging.timers import COMPUTE
from tools.cli_common import parser_of, unwritable
from tools.plots.html_report import DAMAGE
from tools.plots.pipeline import read_timeline
from tools.plots.run_data import Run, RunError, listed, number, read_run, table

NOT_TOLD, NOT_PREDICTED = "the run did not tell", "not predicted"
MOST_RANKS = 16  # pipeline ranks that have a row each


class Row(NamedTuple):
    """One figure. unit: s, bytes, share, tokens/s. predicted None: nothing predicts it; measured None: the run did not
    tell."""

    part: str
    unit: str
    predicted: float | None
    measured: float | None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Predicted / measured."""
        return None if self.predicted is None or not self.measured else self.predicted / self.measured


def compare(run_dir: Path, cluster: Cluster | None = None, profile: DeviceProfile | None = None) -> list[Row]:
    """`cluster`, `profile`: in place of the table's by the run's device. Raises ConfigError."""
    try:
        run = read_run(run_dir, run_dir.name)
    except RunError as error:
        raise ConfigError([str(error)]) from None
    arrangement = arrangement_of(run)
    return [
        *_times(run, arrangement, cluster or cluster_of(run, arrangement), profile),
        *_waits(run, arrangement),
        *_memory(run, arrangement),
    ]


def arrangement_of(run: Run) -> RunPlan:
    """As the run had it. Raises ConfigError."""
    path = run.folder / "run_config.toml"
    if not path.is_file():
        raise ConfigError([f"{path} is not there: the run's options are not known; give the directory of a run"])
    try:
        config = build(apply_megatron_defaults(read_config_file(str(path))))
        return make_run_plan(config, run.devices, true_vocab_size(config.data, open_tokenizer(config.data)))
    except DataError as error:
        raise ConfigError([f"{path}: the tokenizer cannot be opened ({error}); compare where its files are"]) from None
    except ValueError as error:
        raise ConfigError([f"{path}: {error}"]) from None


def cluster_of(run: Run, made: RunPlan) -> Cluster:
    """The cluster of the table with the device and hosts that the run recorded. Raises ConfigError."""
    device, hosts = run.about.get("device"), len(listed(run.about.get("hosts"))) or 1
    card = str(table(run.about.get("machine")).get("card", ""))
    known = [name for name in DEVICES if name.upper() in card.upper()] if device == "cuda" else ["cpu"]
    known = known if device in ("cuda", "cpu") else []
    if not known:
        raise ConfigError([f"device={device!r} ({card or 'no card told'}) is not in the table; give --cluster FILE"])
    return make_cluster(known[0], made.world, made.world // hosts if made.world % hosts == 0 else None)


def _times(run: Run, made: RunPlan, cluster: Cluster, profile: DeviceProfile | None) -> list[Row]:
    predicted = predict_step(made, cluster, profile)
    steps = number(run.report.get("steps"))
    seconds = {phase: number(value) for phase, value in table(run.report.get("seconds")).items()} if steps else {}

    def spent(*phases: str) -> float | None:
        """Per step; None where there is no report."""
        return sum(seconds.get(phase) or 0.0 for phase in phases) / steps if seconds and steps else None

    def typical(key: str) -> float | None:
        values = [value for row in run.rows if (value := number(row.get(key))) is not None]
        return median(values[1:] or values) if values else None

    parts, rate = predicted.parts, typical("perf/tokens_per_s_per_gpu")
    waits, moved = parts["bubble"] + parts["pp"], parts["tp"] + parts["cp"] + parts["dp"]
    pairs = [
        Row("step", "s", predicted.seconds, typical("perf/step_s")),
        Row("  compute", "s", parts["compute"], spent(*COMPUTE)),
        Row("  bubble and messages", "s", waits, spent("bubble"), "" if made.pp > 1 else "no pipeline"),
        Row("  communication that shows", "s", moved, spent("communication")),
        Row("  optimizer", "s", parts["optimizer"], spent("optimizer")),
        Row("  data", "s", None, spent("data")),
        Row("  other", "s", None, spent("other"), "also what is between steps"),
        Row("tokens/s", "tokens/s", predicted.tokens_per_s, None if rate is None else rate * made.world),
        Row("MFU", "share", predicted.mfu, typical("perf/mfu")),
    ]
    source = f"by {profile.source if profile else f'the defaults of {cluster.device.name}; --profile is closer'}"
    return [pairs[0]._replace(note=source), *pairs[1:]]


def _waits(run: Run, made: RunPlan) -> list[Row]:
    """The pipeline's waits as FLOPs and the schedule predict them, and as they were timed."""
    if made.pp == 1:
        return []
    measured, note = None, "needs --profile-pipeline STEP"
    if run.timeline is not None:
        try:
            spans, work, ideal = read_timeline(run.timeline)
            measured = 1 - work / (made.pp * max(stop for *_, stop in spans))
            note = f"of one step; {100 * ideal.bubble:.1f} % with the times that stages took there"
        except DAMAGE as error:
            note = f"timeline.json is damaged: {error!r}"
    return [Row("bubble of the pipeline", "share", made.bubble, measured, note)]


def _memory(run: Run, made: RunPlan) -> list[Row]:
    dp_outermost = made.mesh_sizes.get("dp_outermost", False)
    grid = rank_grid(made.world, made.tp, made.pp, made.cp, dp_outermost=dp_outermost).tolist()
    peaks = run.peaks_gib if len(run.peaks_gib) == made.world else []
    of_first = [gib for _, _, gib in run.curve("mem/max_allocated_gib")]  # of rank 0
    worst, rows = made.fullest_rank, []
    held = made.model_states[worst]
    where = f" of pipeline rank {worst}" if made.pp > 1 else ""
    parts = {"weights": held.weights, "gradients": held.gradients, "optimizer": held.optimizer}
    for name, size in {**parts, "activations": made.activation_bytes[worst]}.items():
        rows.append(Row(f"{name}{where}", "bytes", size, None))
    chosen = range(made.pp) if made.pp <= MOST_RANKS else [worst]
    for position in chosen:
        ranks = [rank for replica in grid[position] for part in replica for rank in part]
        if peaks:
            told = [peaks[rank] for rank in ranks]
        else:
            told = of_first if 0 in ranks else []
        size = made.model_states[position].total + made.activation_bytes[position]
        name = f"peak of pipeline rank {position}" if made.pp > 1 else "peak"
        note = "measured is the whole process, with Python and libraries" if run.about.get("device") == "cpu" else ""
        measured = max(told) * 2**30 if told else None
        rows.append(Row(name, "bytes", size, measured, note if told else ""))
    return rows


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "bytes":
        return f"{value / 2**30:,.2f} GiB" if value >= 2**30 else f"{value / 2**20:,.2f} MiB"
    if unit == "share":
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if unit == "tokens/s" else f"{value:.4g} s"


def text(rows: list[Row]) -> str:
    """A table, and what is to be said of its rows."""
    table = [("", "predicted", "measured", "ratio")]
    for row in rows:
        predicted = _shown(row.predicted, row.unit) or NOT_PREDICTED
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.append((row.part, predicted, _shown(row.measured, row.unit) or NOT_TOLD, ratio))
    notes: dict[str, list[str]] = {}
    for row in rows:
        notes.setdefault(row.note, []).append(row.part.strip())
    return "\n".join([aligned_table(table), *(f"{', '.join(parts)}: {note}" for note, parts in notes.items() if note)])


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = parser_of(__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="measured rates of a device, from plan.py calibrate"
    )
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="a TOML file, instead of what the run recorded")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to a file")
    return parser


def main(argv: list[str]) -> int:
    """Raises ConfigError."""
    args = build_parser().parse_args(argv)
    try:
        if wrong := list(unwritable(json=args.json)):
            raise ConfigError(wrong)
        cluster = read_cluster(args.cluster) if args.cluster is not None else None
        profile = read_profile(args.profile) if args.profile is not None else None
        rows = compare(args.run_dir, cluster, profile)
        print(text(rows))
        if args.json is not None:
            content = json.dumps([row._asdict() | {"ratio": row.ratio} for row in rows], indent=1)
            args.json.write_text(content + "\n")
    except (ValueError, OSError) as error:
        raise ConfigError(str(error).splitlines()) from None
    return 0
