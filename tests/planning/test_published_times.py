"""Published step times: within 15 % of the prediction from the default profiles, or marked as a miss with a reason."""

from pathlib import Path

import pytest
from pairwise import nightly_except

from tools.planning.published_runs import PAPERS, TOLERANCE, PublishedRun, predict, published_runs, table

RUNS = published_runs()
QUICK = ("GPT-3 175B, 512 x H100", "Nemotron-4 15B, 16 x H100", "22B, 8 x A100", "MegaScale 175B, 3072 x A100")


@pytest.mark.parametrize("run", nightly_except(RUNS, [run for run in RUNS if run.name in QUICK], lambda run: run.name))
def test_published_time_holds_or_is_marked_as_a_miss(run: PublishedRun) -> None:
    row = predict(run)
    assert TOLERANCE == 0.15
    if run.why:  # a miss that holds by now must lose its mark
        assert not row.holds, f"{row.ratio:.3f}"
    else:
        assert row.ratio == pytest.approx(1.0, abs=0.15)


def test_published_runs_have_a_source_and_one_measured_value() -> None:
    assert len({run.name for run in RUNS}) == len(RUNS) and len(QUICK) == 4
    for run in RUNS:
        assert run.source in PAPERS and (run.seconds is None) != (run.mfu is None)
        assert set(run.profile) <= {"fused"}, "a run may not change anything else in the profile"
    misses = [run for run in RUNS if run.why]
    assert len(misses) < len(RUNS) / 4


@pytest.mark.nightly(guards=("tools/planning/published_runs.py",))
def test_accuracy_page_has_the_table_of_published_times() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "planning_accuracy.md").read_text("utf-8")
    _, _, section = page.partition("## Published steps")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    written = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:] if "| **" not in line]
    _, *rows = table()
    assert written == [[row[0], *row[2:5], row[5].partition(":")[0]] for row in rows]
    num_hits = len([row for row in rows if not row[5]])
    assert f"{num_hits} of {len(rows)} hold within 15 %" in page
