"""The page of a run in a real browser: nothing overflows, overlaps, is cut off or loads; light and dark are both."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from browser import look, need_browser, photograph
from report_cases import write_run
from train_cases import SMALL, TP2_PP2

from tools.plots import bars as shares
from tools.plots.run_data import read_run

ROOT = Path(__file__).resolve().parents[2]
ONE_RUN = {"Loss", "Training curves", "Time breakdown", "Pipeline", "Layers of each rank", "Memory", "Data"}
ONE_RUN |= {"Events", "Options that differ from the defaults", "Environment"}
HOSTILE = "<script>document.title='struck'</script>$x_1$\\1"

pytestmark = pytest.mark.nightly(guards=("tools/report.py", "tools/plots"))


def report(*words: str | Path) -> None:
    command = [sys.executable, "tools/report.py", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0 and "page: " in done.stdout, done.stderr


def faultless(page: Path, folder: Path) -> dict[int, dict]:
    found = {width: look(page, width, folder) for width in (375, 1000)}
    for width, seen in found.items():
        faults = {name: seen[name] for name in ("clipped", "overlap", "small", "console") if seen[name]}
        assert seen["overflow"] <= 0 and seen["scripts"] == 0 and not faults, (width, seen["overflow"], faults)
    return found


def test_page_of_a_run_of_four_ranks(tmp_path: Path) -> None:
    need_browser()
    run, flags = tmp_path / "mine", [*SMALL, *TP2_PP2, "--train-iters", "12", "--profile-pipeline", "4"]
    words = [sys.executable, "pretrain_gpt.py", *flags, "--run-dir", str(run)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    beat = next(event for event in events if event["event"] == "heartbeat")
    told = read_run(run, "mine")
    assert shares.ranks_by_position(told) == [[r for r in range(4) if beat["pp"][r] == position] for position in (0, 1)]
    assert shares.stage_layers(told)[0][0] == 0 and shares.stage_layers(told)[-1][1] == 4
    report(run)
    for seen in faultless(run / "report/index.html", tmp_path).values():
        assert set(seen["titles"]) == ONE_RUN and seen["headline"] == "mine: done" and seen["pictures"] == 6
    assert {path.name for path in (run / "report").iterdir()} == {
        "index.html",
        *(f"{name}.png" for name in ("loss", "steps", "time", "timeline", "layout", "memory")),
    }


def test_page_of_runs_with_hostile_texts(tmp_path: Path) -> None:
    need_browser()
    name = HOSTILE.replace("/", "\\")
    one = write_run(tmp_path / name, data=HOSTILE, hosts=[HOSTILE] * 30, command=[HOSTILE, "--lr", HOSTILE])
    two = write_run(tmp_path / "a quite long name of a run that somebody gave it to know it by", shift=0.5)
    report(one, two, "--out", tmp_path / "page")
    for seen in faultless(tmp_path / "page/index.html", tmp_path).values():
        assert "Agreement" in seen["titles"] and "Comparison" in seen["titles"]
        assert any(title.startswith("Memory of <script>") for title in seen["titles"])


def test_page_in_light_and_dark(tmp_path: Path) -> None:
    need_browser()
    page = write_run(tmp_path / "run") / "report/index.html"
    report(tmp_path / "run")
    light, dark = (photograph(page, tmp_path, dark=dark) for dark in (False, True))
    assert light[..., :3].mean() > 0.85 and dark[..., :3].mean() < 0.25
    assert light[2, 2, :3].min() > 0.9 and dark[2, 2, :3].max() < 0.15
    for picture in (light, dark):  # a curve in blue, which is there in both
        red, _, blue = (picture[400:, 100:, i] for i in range(3))
        assert (blue - red > 0.4).sum() > 200
