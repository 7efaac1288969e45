"""The page of a run in a real browser: nothing overflows, overlaps, is cut off or is loaded, in light and in dark."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from browser import measure_layout, require_browser, take_screenshot
from report_cases import write_run
from train_cases import SMALL_RUN, TP2_PP2

from tools.plots import bars as shares
from tools.plots.run_data import read_run

ROOT = Path(__file__).resolve().parents[2]
ONE_RUN = {"Loss", "Training curves", "Time breakdown", "Pipeline", "Layers of each rank", "Memory", "Data"}
ONE_RUN |= {"Events", "Options that differ from the defaults", "Environment"}
HOSTILE = "<script>document.title='struck'</script>$x_1$\\1"

pytestmark = pytest.mark.nightly(guards=("tools/report.py", "tools/plots"))


def report(*args: str | Path) -> None:
    command = [sys.executable, "tools/report.py", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0 and "page: " in done.stdout, done.stderr


def check_page(page: Path, directory: Path) -> dict[int, dict]:
    views = {width: measure_layout(page, width, directory) for width in (375, 1000)}
    for width, view in views.items():
        faults = {
            name: view[name] for name in ("clipped_texts", "overlapping_texts", "small_texts", "console") if view[name]
        }
        assert view["overflow_px"] <= 0 and view["num_scripts"] == 0 and not faults, (
            width,
            view["overflow_px"],
            faults,
        )
    return views


def test_page_of_a_run_of_four_ranks(tmp_path: Path) -> None:
    require_browser()
    run, flags = tmp_path / "mine", [*SMALL_RUN, *TP2_PP2, "--train-iters", "12", "--profile-pipeline", "4"]
    argv = [sys.executable, "pretrain_gpt.py", *flags, "--run-dir", str(run)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=110, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    heartbeat = next(event for event in events if event["event"] == "heartbeat")
    run_data = read_run(run, "mine")
    assert shares.ranks_by_position(run_data) == [
        [r for r in range(4) if heartbeat["pp"][r] == position] for position in (0, 1)
    ]
    assert shares.stage_layers(run_data)[0][0] == 0 and shares.stage_layers(run_data)[-1][1] == 4
    report(run)
    for view in check_page(run / "report/index.html", tmp_path).values():
        assert set(view["titles"]) == ONE_RUN and view["headline"] == "mine: done" and view["num_pictures"] == 6
    assert {path.name for path in (run / "report").iterdir()} == {
        "index.html",
        *(f"{name}.png" for name in ("loss", "steps", "time", "timeline", "layout", "memory")),
    }


def test_page_of_runs_with_hostile_texts(tmp_path: Path) -> None:
    require_browser()
    name = HOSTILE.replace("/", "\\")
    first = write_run(tmp_path / name, data=HOSTILE, hosts=[HOSTILE] * 30, command=[HOSTILE, "--lr", HOSTILE])
    second = write_run(tmp_path / "a quite long name of a run that somebody gave it to know it by", loss_shift=0.5)
    report(first, second, "--out", tmp_path / "page")
    for view in check_page(tmp_path / "page/index.html", tmp_path).values():
        assert "Agreement" in view["titles"] and "Comparison" in view["titles"]
        assert any(title.startswith("Memory of <script>") for title in view["titles"])


def test_page_in_light_and_dark(tmp_path: Path) -> None:
    require_browser()
    page = write_run(tmp_path / "run") / "report/index.html"
    report(tmp_path / "run")
    light, dark = (take_screenshot(page, tmp_path, dark=dark) for dark in (False, True))
    assert light[..., :3].mean() > 0.85 and dark[..., :3].mean() < 0.25
    assert light[2, 2, :3].min() > 0.9 and dark[2, 2, :3].max() < 0.15
    for picture in (light, dark):  # both have a blue curve
        red, _, blue = (picture[400:, 100:, i] for i in range(3))
        assert (blue - red > 0.4).sum() > 200
