"""Published step times, compared with the planner's predictions from the same inputs and its default profiles.

All inputs of a run in published.toml are stated by its source, and none is tuned. The prediction is for megalite; if
the published program differs in a way that a flag or the profile can express, the run has that flag or value. A run
whose prediction misses stays in the table, with the reason.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megalite.common.tables import load_table
from megalite.config import cli
from megalite.models.families import PRESETS
from megalite.planning.cluster import default_profile, make_cluster
from megalite.planning.run_plan import make_run_plan
from megalite.planning.step_time import predict_step

TOLERANCE = 0.15  # relative error within which a prediction holds
DATA = load_table(__file__, "published")
PAPERS: dict[str, str] = DATA["papers"]
COMMON_FLAGS = "--bf16 --mock-data --train-iters 1 --lr 1 --vocab-size {vocab_size} "


@dataclass(frozen=True)
class PublishedRun:
    """A run with a published step time or MFU.

    Attributes:
        source: The key of its source in PAPERS.
        vocab_size: The vocabulary size before padding.
        flags: The model, the batch and the layout, as flags of pretrain_gpt.py.
        seconds: The published time of a step; None if only the MFU is published.
        mfu: The published MFU; None if the time is published.
        profile: Fields of the default profile that differ for the published program.
        why: The reason for a miss, as far as it is known; empty if the prediction holds.
    """

    name: str
    source: str
    device: str
    devices: int
    vocab_size: int
    flags: str
    seconds: float | None = None
    mfu: float | None = None
    profile: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True)
class PublishedRow:
    """A published run and its prediction; both are seconds of a step, or MFU if only that is published."""

    run: PublishedRun
    published: float
    predicted: float

    @property
    def ratio(self) -> float:
        """The predicted time divided by the published time."""
        return self.published / self.predicted if self.run.seconds is None else self.predicted / self.published

    @property
    def holds(self) -> bool:
        return abs(self.ratio - 1) <= TOLERANCE


def published_runs() -> list[PublishedRun]:
    """Return the runs of published.toml."""
    runs = []
    field_names = {f.name for f in dataclasses.fields(PublishedRun)}
    for group in DATA["group"]:
        for row in group["rows"]:
            entry = {**group, **row}
            values = {name: entry[name] for name in field_names & entry.keys()}
            values["name"] = entry["name"].format(**entry)
            values["flags"] = (COMMON_FLAGS + entry["flags"]).format(**entry)
            values["why"] = DATA["reasons"].get(entry.get("why"), "")
            if "tflops" in entry:
                values["seconds"] = _seconds_from_tflops(entry)
            runs.append(PublishedRun(**values))
    return runs


def _seconds_from_tflops(entry: Mapping[str, Any]) -> float:
    """Return the step time from TFLOP/s per GPU by Megatron-LM's formula, which counts the full square of scores."""
    hidden, layers, seq_length = entry["hidden"], entry["layers"], 4096
    flops_per_token = 6 * hidden * (12 * layers * hidden + entry["vocab_size"] + 2 * layers * seq_length)
    return flops_per_token * entry["batch"] * seq_length / (entry["devices"] * entry["tflops"] * 1e12)


def predict(run: PublishedRun) -> PublishedRow:
    """Predict the step of a published run."""
    config = cli.parse_config_or_exit(run.flags.split(), PRESETS).config
    plan = make_run_plan(config, run.devices, run.vocab_size)
    profile = dataclasses.replace(default_profile(run.device), **run.profile)
    step = predict_step(plan, make_cluster(run.device, run.devices), profile)
    if run.seconds is not None:
        return PublishedRow(run, run.seconds, step.seconds)
    assert run.mfu is not None
    return PublishedRow(run, run.mfu, step.mfu)


def table(runs: Iterable[PublishedRun] | None = None) -> list[tuple[str, ...]]:
    """Return rows of these runs, by default of all, below a header: run, source, published, predicted, ratio, miss."""
    rows: list[tuple[str, ...]] = [("case", "source", "published", "predicted", "time, predicted / published", "")]
    for row in map(predict, published_runs() if runs is None else runs):
        miss = "" if row.holds else f"misses: {row.run.why or 'not explained'}"
        source = PAPERS[row.run.source].split(";")[0]
        published, predicted = (_format(value, row.run) for value in (row.published, row.predicted))
        rows.append((row.run.name, source, published, predicted, f"{row.ratio:.2f}", miss))
    return rows


def _format(value: float, run: PublishedRun) -> str:
    return f"{value:.2f} s" if run.seconds is not None else f"MFU {value:.1%}"
