"""The page of a run and its pictures, without a browser: what is said of which files, and what damage does to it."""

import json
import math
import os
import random
import re
import socket
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
from report_cases import STAGES, rows, write_run

from megalite.models.families import PRESETS
from megalite.parallel.mesh import abstract_mesh
from tools import plot, report
from tools.plots import bars as shares
from tools.plots import curves, pipeline
from tools.plots.html_report import HtmlReport, key_metrics
from tools.plots.run_data import MAX_COLUMNS, RunError, differences, downsample, option_sources, read_run, read_runs
from tools.plots.style import COLORS, NARROW, WIDE, Picture, sanitize, svg

ROOT = Path(__file__).resolve().parents[2]
FILES = ("metrics.jsonl", "events.jsonl", "status.json", "report.json", "timeline.json", "run_config.toml")


def shown(picture: Picture | None, width: float = WIDE) -> list[str]:
    """The texts of a picture."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg(picture, width, picture.name))


# ---- what is read


def test_page_ranks_equal_the_mesh(tmp_path: Path) -> None:
    sizes = {"world": 24, "pp": 3, "dp": 2, "cp": 2, "tp": 2}
    for outermost in (False, True):
        run = read_run(write_run(tmp_path / str(outermost), 10, mesh=sizes, dp_outermost=outermost), "run")
        axes = {"tp": 2, "pp": 3, "cp": 2, "dp_outermost": outermost}
        by_mesh: list[list[int]] = [[], [], []]
        for rank in range(24):
            by_mesh[abstract_mesh(24, rank, **axes).pp.rank].append(rank)  # type: ignore[arg-type]
        assert shares.ranks_by_position(run) == by_mesh


def test_repeated_step_counts_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 10)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "tokens": 3584, "train/loss": 99.0}) + "\n{torn")
    loss = read_run(folder, "run").curve("train/loss")
    assert [step for step, *_ in loss] == list(range(1, 11)) and loss[6][2] == 99.0


def test_resumes_and_anomalies_since_the_start(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 100)
    before = [{"event": "started", "step": 0, "from_scratch": True}, {"event": "spike", "step": 3}]
    text = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in before) + text)
    run = read_run(folder, "run")
    assert (run.resumed, run.anomalies) == ([50.0], [(25.0, "spike")])
    assert run.peaks_gib == [5.1, 5.2, 5.3, 5.4, 5.5, 5.6, 5.7, 5.8]
    assert {"resumed", "anomaly"} <= {*shown(curves.loss([run]))}


def test_run_without_its_process_is_shown_as_killed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 10)
    ended = programs.Popen(["true"])
    ended.wait()
    for pid, outcome in ((os.getpid(), "running"), (ended.pid, "killed")):
        told = {"outcome": "running", "pid": pid, "host": socket.gethostname(), "step": 2, "tokens": 1024}
        (folder / "status.json").write_text(json.dumps(told))
        run = read_run(folder, "run")
        assert run.outcome == outcome and re.search(rf"^outcome +{outcome} *$", report.report_text(run), re.M)
        assert dict(key_metrics(run))["steps"] == "10 of 1,000"  # status.json is older than the last line


def test_option_source_is_shown(tmp_path: Path) -> None:
    toml = tmp_path / "mine.toml"
    toml.write_text('preset = "tiny"\n[train]\nmicro_batch_size = 2\neval_iters = 7\n[optim]\nlr = 0.5\n')
    folder = write_run(tmp_path / "run", 10, command=["x", "--config", str(toml), "--lr", "1e-3", "--eval-iters", "7"])
    tiny = PRESETS["tiny"]["hidden_size"]
    config = f"[model]\nhidden_size = {tiny}\nnum_layers = 99\n[train]\nmicro_batch_size = 2\neval_iters = 7\n"
    config += "[optim]\nlr = 0.001\n"
    (folder / "run_config.toml").write_text(config)
    said = {name: source for _, name, _, source in option_sources(read_run(folder, "run"), PRESETS)}
    assert said["lr"] == said["eval_iters"] == "flag" and said["micro_batch_size"] == str(toml)
    assert said["hidden_size"] == "--preset tiny" and said["num_layers"] == "follows from others"


def test_equal_names_are_extended_by_their_path(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name / "run", 5) for name in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run"]
    with pytest.raises(RunError, match="give a run directory"):
        read_runs([tmp_path])


# ---- what pictures show


def test_agreement_is_the_largest_difference(tmp_path: Path) -> None:
    one, two = (read_run(write_run(tmp_path / name, 50), name) for name in ("one", "two"))
    assert curves.describe_agreement(differences(one, two)) == "equal to the last bit over 50 common log lines"
    step, tokens, loss = two.curves["train/loss"][20]
    two.curves["train/loss"][20] = step, tokens, loss + 0.25
    del two.curves["train/loss"][30:]
    assert curves.describe_agreement(differences(one, two)) == "at most 2.50e-01, at step 21, over 30 common log lines"
    assert "Points on the lower edge are equal." in curves.agreement([one, two]).caption
    made = curves.agreement([one, two]).draw(WIDE)
    [line], edge = made.axes[0].lines, made.axes[0].get_ylim()[0]
    assert min(line.get_ydata()) == edge < 0.25 and not line.get_clip_on()
    assert "equal" in shown(curves.agreement([one, two])) and "equal" in shown(curves.agreement([one, one]))
    two.steps_in_line = dict.fromkeys(two.steps_in_line, 10.0)  # means of other steps
    assert not differences(one, two)


def test_exact_resume_is_not_marked(tmp_path: Path) -> None:
    """Its first line is a mean of one step; with the next it is what the run without a stop has there."""
    folder = write_run(tmp_path / "run", 100)
    losses = [{"step": step, "train/loss": 0.05 * (step % 7) + 5.0} for step in range(1, 101)]

    def told(*ends: int) -> list[dict[str, Any]]:
        made, begin = [], 0
        for end in ends:
            mean = sum(one["train/loss"] for one in losses[begin:end]) / (end - begin)
            made.append({"step": end, "train/loss": mean, "perf/steps": end - begin, "train/skipped": 0})
            begin = end
        return made

    def read(*ends: int) -> Any:
        text = "".join(json.dumps(row) + "\n" for row in told(*ends))
        (folder / "metrics.jsonl").write_text(text)
        return read_run(folder, "run")

    stopped, whole = read(1, 10, 20, 30, 40, 50, 51, 60, 70), read(1, 10, 20, 30, 40, 50, 60, 70)
    assert stopped.resumed == [50.0] and len(stopped.curve("train/loss")) == 9
    assert [point[0] for point in stopped.visible_points("train/loss")] == [
        point[0] for point in whole.visible_points("train/loss")
    ]
    values = zip(stopped.visible_points("train/loss"), whole.visible_points("train/loss"), strict=True)
    assert all(a[2] == pytest.approx(b[2], rel=1e-12) for a, b in values)
    assert "merged with the next" in curves.loss([stopped]).caption
    assert "merged with the next" not in curves.loss([whole]).caption
    assert curves.describe_agreement(differences(stopped, whole)) == "equal to the last bit over 7 common log lines"
    assert [point[0] for point in read(1, 10, 50, 51).visible_points("train/loss")] == [1, 10, 50, 51]


def test_thinned_curve_keeps_extremes() -> None:
    random.seed(1)
    points = [(float(i), float(i), random.random()) for i in range(100_000)]
    points[31_007] = 31_007.0, 31_007.0, 1e3
    points[77_777] = 77_777.0, 77_777.0, -1e3
    kept = downsample(points)
    assert len(kept) <= 2 * MAX_COLUMNS + 2 and kept == sorted(kept) and {*kept} <= {*points}
    assert {points[0], points[-1], points[31_007], points[77_777]} <= {*kept}


def test_layout_picture_names_ranks_and_layers(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", 5), "run")
    texts = shown(shares.layout(run))
    assert {"ranks 0-1", "ranks 6-7", "E", "H", "0-4", "5-8", "9-12"} <= {*texts}
    assert [*STAGES[-1]] == [13, 13] and texts.count("H") == 1
    assert "pp 4 × dp 1 × cp 1 × tp 2 = 8 ranks" in shares.layout(run).caption  # type: ignore[union-attr]


def test_memory_picture_shows_measured_gpu_memory(tmp_path: Path) -> None:
    card, cpu = (read_run(write_run(tmp_path / on, 5, device=on), on) for on in ("cuda", "cpu"))
    assert "measured peak" in shown(shares.memory(card)) and "measured peak" not in shown(shares.memory(cpu))
    assert "rank 7 had 5.80 GiB at its peak" in shares.memory(cpu).caption  # type: ignore[union-attr]


def test_timeline_has_planned_and_measured_times(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", 5), "run")
    spans, work, ideal = pipeline.read_timeline(run.timeline)
    assert len(spans) == 4 * 6 * 2 == len(ideal.spans) and work == pytest.approx(len(spans) * 0.01)
    head = [span for span in run.timeline["ranks"][3]["spans"] if span["action"].startswith("F3.")]
    for span in head:  # the head alone is four times as long as any other forward
        span["end_s"] = span["start_s"] + 0.04
    _, _, slow = pipeline.read_timeline(run.timeline)
    lengths = {s.action.stage: round(s.end - s.start, 9) for s in slow.spans if s.action.op.name == "F"}
    assert lengths == {0: 0.01, 1: 0.01, 2: 0.01, 3: 0.04}
    texts = shown(pipeline.timeline(run.timeline))
    assert any(text.startswith("planned: ") for text in texts) and {"forward", "backward"} <= {*texts}
    assert "seconds; numbers: micro-batches" in texts and "weight gradients" not in texts
    split = shown(pipeline.schedule("1f1b", 2, 2, 4, True))
    assert "weight gradients" in split and any("darker: a later chunk" in text for text in split)


def test_picture_colors_are_variables_and_text_is_text(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", 40), "<b>&$x_1$")
    made = svg(curves.loss([run]), NARROW, "loss")
    assert "var(--blue)" in made and "var(--ink)" in made and "<text" in made and "font-family" not in made
    for light, _ in COLORS.values():
        assert light not in made
    labels = shown(curves.loss([run, run]))
    assert "&lt;b&gt;&amp;$x_1$: training 2.903" in labels or any("&lt;b&gt;&amp;$x_1$" in t for t in labels)


def test_external_texts_are_one_printable_line() -> None:
    assert sanitize("a\nb\x1b[31m") == "a\ufffdb\ufffd[31m" and sanitize("\udcff") == "\ufffd"
    assert sanitize("x" * 200).endswith("…") and len(sanitize("x" * 200)) == 90


# ---- the page and the program


def test_page_escapes_texts_and_forbids_scripts(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>\"'&"
    folder = write_run(tmp_path / "run", 5, data=evil, hosts=[evil], command=[evil], machine={evil: evil})
    status = {"outcome": evil, "reason": evil, "host": evil, "time": evil}
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "run_config.toml").write_text(f"[model]\n'<i>' = '''{evil}'''\n")
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": evil, "text": evil, "time": evil, "step": 3}) + "\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "tokens": 2560, f"val/{evil}/loss": 3.0}) + "\n")
    page = HtmlReport([read_run(folder, evil)]).text()
    assert "<img" not in page and "<i>" not in page and "&lt;img" in page
    assert "default-src 'none'" in page and "http" not in re.sub(r'(xmlns[:a-z]*|http-equiv)="[^"]*"', "", page)


def test_text_report_writes_nothing_and_the_page_has_pictures(tmp_path: Path, capsys) -> None:
    folder = write_run(tmp_path / "run", 5)
    before = sorted(folder.iterdir())
    assert report.main([str(folder), "--text"]) == 0 and sorted(folder.iterdir()) == before
    assert "time breakdown" in capsys.readouterr().out
    assert report.main([str(folder), "--out", str(tmp_path / "out")]) == 0
    assert f"page: {tmp_path / 'out' / 'index.html'}" in capsys.readouterr().out
    names = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert names == {"loss", "steps", "time", "timeline", "layout", "memory"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "out").glob("*.png"))


@pytest.mark.parametrize("picture", ["pipeline", "loss", "steps", "time", "memory", "layout", "agreement"])
def test_each_picture_is_drawn_separately(tmp_path: Path, picture: str) -> None:
    folders = [str(write_run(tmp_path / name, 20)) for name in ("one", "two")]
    many = folders if plot.RUN_PLOTS[picture].takes_several else folders[:1]
    plot.main([picture, *many, "--out", str(tmp_path / "made.svg"), "--narrow"])
    assert "<svg" in (tmp_path / "made.svg").read_text()


def test_run_without_steps_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "status.json").write_text('{"outcome": "usage", "step": 0}')
    assert report.main([str(tmp_path), "--text"]) == 0
    told = capsys.readouterr()
    assert told.out.split() == ["outcome", "usage,", "before", "its", "first", "step"] and not told.err


def test_report_without_matplotlib_prints_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 5)
    hidden = "import sys, runpy; sys.modules['matplotlib'] = None; sys.argv = sys.argv[1:]; "
    start = [sys.executable, "-c", hidden + "runpy.run_path(sys.argv[0], run_name='__main__')", "tools/report.py"]
    needs = "a picture needs the package matplotlib; pip install matplotlib (or megalite[plots])"
    for more, code in (([], 0), (["--out", str(tmp_path / "out")], 3)):
        done = programs.run([*start, str(folder), *more], capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert done.returncode == code and "time breakdown" in done.stdout
        assert done.stderr.startswith(f"report.py: no page: {needs}; --text") and done.stderr.count("\n") == 1
    words = ["loss", str(folder), "--out", str(tmp_path / "out")]
    done = programs.run([*start[:-1], "tools/plot.py", *words], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stderr) == (3, f"plot.py: {needs}\n")
    assert not (tmp_path / "out").exists()


# ---- damage

ANYTHING: list[Any] = [None, True, -1, 0, 1e308, 10**400, "text", "", [], [[]], {}, {"a": {}}, [None, "x"], math.nan]


def mangle(value: Any, luck: random.Random) -> Any:
    """`value` with something else in one place."""
    if luck.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return luck.choice(ANYTHING)
    key = luck.choice(list(value)) if isinstance(value, dict) else luck.randrange(len(value))
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[key] = mangle(value[key], luck)
    return changed


def damage(folder: Path, luck: random.Random) -> str:
    file = folder / luck.choice(FILES)
    text = file.read_text()
    if luck.random() < 0.25 or file.suffix == ".toml":
        cut = luck.randrange(len(text))
        file.write_bytes(text.encode()[:cut] + luck.randbytes(luck.randrange(9)))
    elif file.suffix == ".json":
        file.write_text(json.dumps(mangle(json.loads(text), luck)))
    else:
        lines = text.splitlines()
        for i in luck.sample(range(len(lines)), min(len(lines), 3)):
            lines[i] = json.dumps(mangle(json.loads(lines[i]), luck))
        file.write_text("\n".join(lines))
    return file.name


def survives(folder: Path, luck: random.Random, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = damage(folder, luck)
    code = report.main([str(folder), "--out", str(folder / "page")])
    out, err = capsys.readouterr()
    page = (folder / "page/index.html").read_text()
    assert code in (0, 3) and "page: " in out and err.count("\n") <= 1, (damaged, err)
    assert page.count("<section>") >= 5 and page.endswith("</html>\n"), damaged


def test_damaged_run_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    survives(write_run(tmp_path / "run", 8), random.Random(3), capsys)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_randomly_damaged_runs_have_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(20):
        survives(write_run(tmp_path / str(seed), 8), random.Random(seed), capsys)


def test_damaged_section_leaves_the_others(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 8)
    told = json.loads((folder / "timeline.json").read_text())
    told["ranks"][0]["spans"][0]["action"] = "F.0"
    (folder / "timeline.json").write_text(json.dumps(told))
    (folder / "status.json").write_text('{"outcome": ')
    page = HtmlReport([read_run(folder, "run")])
    text = page.text()
    assert "Cannot be shown: ValueError: &#x27;F.0&#x27; is not an action" in text
    assert "Damaged files" in text and "status.json cannot be read" in text
    assert [picture.name for picture in page.pictures] == ["loss", "steps", "time", "layout", "memory"]


@pytest.mark.nightly
def test_long_run_has_a_small_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 10)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows(100_000)))
    done = programs.python("tools/report.py", str(folder))
    assert done.returncode == 0 and (folder / "report/index.html").stat().st_size < 1_000_000
