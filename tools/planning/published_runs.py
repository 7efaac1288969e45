"""Step times that others published, beside what this planner predicts from the same inputs and its default profiles.

Of each case of published.toml all inputs are stated and none is tuned. What is predicted is megalite's program; where
the published one differs in what a flag or the profile can say, the case says it. One that misses stays in the table,
with the reason.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from megalite.common.tables import load_table
from megalite.config import cli
from megalite.models.families import PRESETS
from megalite.planning.cluster import default_profile, make_cluster
from megalite.planning.run_plan import make_run_plan
from megalite.planning.step_time import predict_step

TOLERANCE = 0.15
DATA = load_table(__file__, "published")
PAPERS: dict[str, str] = DATA["papers"]
COMMON = "--bf16 --mock-data --train-iters 1 --lr 1 --vocab-size {vocab_size} "


class Case(NamedTuple):
    """seconds   of a step, as published; or `mfu`, where only that is
    vocab_size   the true one
    profile      what of the default profile the published program had otherwise
    why          a miss: the reason, as far as it is known
    """

    name: str
    source: str
    device: str
    devices: int
    vocab_size: int
    flags: str
    seconds: float | None = None
    mfu: float | None = None
    profile: Mapping[str, Any] = {}
    why: str = ""


class Row(NamedTuple):
    case: Case
    published: float  # seconds of a step, or MFU
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted time over published time."""
        return self.published / self.predicted if self.case.seconds is None else self.predicted / self.published

    @property
    def holds(self) -> bool:
        return abs(self.ratio - 1) <= TOLERANCE


def cases() -> list[Case]:
    found, names = [], {*Case._fields}
    for row in (group | row for group in DATA["group"] for row in group["rows"]):
        made: dict[str, Any] = {"name": row["name"].format(**row), "flags": (COMMON + row["flags"]).format(**row)}
        made["why"] = DATA["reasons"].get(row.get("why"), "")
        if "tflops" in row:  # by Megatron-LM's own count of FLOPs, which has the whole square of scores
            hidden, layers, length = row["hidden"], row["layers"], 4096
            per_token = 6 * hidden * (12 * layers * hidden + row["vocab_size"] + 2 * layers * length)
            made["seconds"] = per_token * row["batch"] * length / (row["devices"] * row["tflops"] * 1e12)
        found.append(Case(**{name: row[name] for name in names & row.keys()} | made))
    return found


def predict(case: Case) -> Row:
    arrangement = make_run_plan(
        cli.parse_config_or_exit(case.flags.split(), PRESETS).config, case.devices, case.vocab_size
    )
    profile = dataclasses.replace(default_profile(case.device), **case.profile)
    step = predict_step(arrangement, make_cluster(case.device, case.devices), profile)
    if case.seconds is not None:
        return Row(case, case.seconds, step.seconds)
    assert case.mfu is not None
    return Row(case, case.mfu, step.mfu)


def table(of: Iterable[Case] | None = None) -> list[tuple[str, ...]]:
    """Rows of all cases, or of these, below a header: case, source, published, predicted, ratio, why it misses."""
    rows: list[tuple[str, ...]] = [("case", "source", "published", "predicted", "time, predicted / published", "")]
    for row in map(predict, cases() if of is None else of):
        text = (lambda x: f"{x:.2f} s") if row.case.seconds is not None else (lambda x: f"MFU {x:.1%}")
        miss = "" if row.holds else f"misses: {row.case.why or 'not explained'}"
        numbers = (text(row.published), text(row.predicted), f"{row.ratio:.2f}")
        rows.append((row.case.name, PAPERS[row.case.source].split(";")[0], *numbers, miss))
    return rows
