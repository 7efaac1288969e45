"""The page of a run and its pictures, without a browser: what they show of each file, and of damaged files."""

import json
import math
import os
import random
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import programs
import pytest
from report_cases import STAGE_LAYERS, metric_rows, write_run

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


def texts_of(picture: Picture | None, width: float = WIDE) -> list[str]:
    """Return the texts of a picture."""
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
    run_dir = write_run(tmp_path / "run", 10)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "tokens": 3584, "train/loss": 99.0}) + "\n{torn")
    loss = read_run(run_dir, "run").curve("train/loss")
    assert [step for step, *_ in loss] == list(range(1, 11)) and loss[6][2] == 99.0


def test_resumes_and_anomalies_since_the_start(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 100)
    before = [{"event": "started", "step": 0, "from_scratch": True}, {"event": "spike", "step": 3}]
    text = (run_dir / "events.jsonl").read_text()
    (run_dir / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in before) + text)
    run = read_run(run_dir, "run")
    assert (run.resumed, run.anomalies) == ([50.0], [(25.0, "spike")])
    assert run.peaks_gib == [5.1, 5.2, 5.3, 5.4, 5.5, 5.6, 5.7, 5.8]
    assert {"resumed", "anomaly"} <= {*texts_of(curves.loss([run]))}


def test_run_without_its_process_is_shown_as_killed(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 10)
    process = programs.Popen(["true"])
    process.wait()
    for pid, outcome in ((os.getpid(), "running"), (process.pid, "killed")):
        status = {"outcome": "running", "pid": pid, "host": socket.gethostname(), "step": 2, "tokens": 1024}
        (run_dir / "status.json").write_text(json.dumps(status))
        run = read_run(run_dir, "run")
        assert run.outcome == outcome and re.search(rf"^outcome +{outcome} *$", report.report_text(run), re.M)
        assert dict(key_metrics(run))["steps"] == "10 of 1,000"  # status.json is older than the last line


def test_option_source_is_shown(tmp_path: Path) -> None:
    toml = tmp_path / "mine.toml"
    toml.write_text('preset = "tiny"\n[train]\nmicro_batch_size = 2\neval_iters = 7\n[optim]\nlr = 0.5\n')
    run_dir = write_run(tmp_path / "run", 10, command=["x", "--config", str(toml), "--lr", "1e-3", "--eval-iters", "7"])
    tiny = PRESETS["tiny"]["hidden_size"]
    config = f"[model]\nhidden_size = {tiny}\nnum_layers = 99\n[train]\nmicro_batch_size = 2\neval_iters = 7\n"
    config += "[optim]\nlr = 0.001\n"
    (run_dir / "run_config.toml").write_text(config)
    sources = {name: source for _, name, _, source in option_sources(read_run(run_dir, "run"), PRESETS)}
    assert sources["lr"] == sources["eval_iters"] == "flag" and sources["micro_batch_size"] == str(toml)
    assert sources["hidden_size"] == "--preset tiny" and sources["num_layers"] == "follows from others"


def test_equal_names_are_extended_by_their_path(tmp_path: Path) -> None:
    run_dirs = [write_run(tmp_path / name / "run", 5) for name in ("a", "b")]
    assert [run.name for run in read_runs(run_dirs)] == ["a/run", "b/run"]
    with pytest.raises(RunError, match="give a run directory"):
        read_runs([tmp_path])


# ---- what pictures show


def test_agreement_is_the_largest_difference(tmp_path: Path) -> None:
    first, second = (read_run(write_run(tmp_path / name, 50), name) for name in ("one", "two"))
    assert curves.describe_agreement(differences(first, second)) == "equal to the last bit over 50 common log lines"
    step, tokens, loss = second.curves["train/loss"][20]
    second.curves["train/loss"][20] = step, tokens, loss + 0.25
    del second.curves["train/loss"][30:]
    assert (
        curves.describe_agreement(differences(first, second))
        == "at most 2.50e-01, at step 21, over 30 common log lines"
    )
    assert "Points on the lower edge are equal." in curves.agreement([first, second]).caption
    figure = curves.agreement([first, second]).draw(WIDE)
    [line], edge = figure.axes[0].lines, figure.axes[0].get_ylim()[0]
    assert min(line.get_ydata()) == edge < 0.25 and not line.get_clip_on()
    assert "equal" in texts_of(curves.agreement([first, second])) and "equal" in texts_of(
        curves.agreement([first, first])
    )
    second.steps_in_line = dict.fromkeys(second.steps_in_line, 10.0)  # means of other steps
    assert not differences(first, second)


def test_exact_resume_is_not_marked(tmp_path: Path) -> None:
    """The first line after a resume is a mean of one step; merged with the next, it equals the uninterrupted run's."""
    run_dir = write_run(tmp_path / "run", 100)
    losses = [{"step": step, "train/loss": 0.05 * (step % 7) + 5.0} for step in range(1, 101)]

    def log_lines(*ends: int) -> list[dict[str, Any]]:
        lines, begin = [], 0
        for end in ends:
            mean = sum(row["train/loss"] for row in losses[begin:end]) / (end - begin)
            lines.append({"step": end, "train/loss": mean, "perf/steps": end - begin, "train/skipped": 0})
            begin = end
        return lines

    def read(*ends: int) -> Any:
        text = "".join(json.dumps(row) + "\n" for row in log_lines(*ends))
        (run_dir / "metrics.jsonl").write_text(text)
        return read_run(run_dir, "run")

    stopped, uninterrupted = read(1, 10, 20, 30, 40, 50, 51, 60, 70), read(1, 10, 20, 30, 40, 50, 60, 70)
    assert stopped.resumed == [50.0] and len(stopped.curve("train/loss")) == 9
    assert [point[0] for point in stopped.visible_points("train/loss")] == [
        point[0] for point in uninterrupted.visible_points("train/loss")
    ]
    values = zip(stopped.visible_points("train/loss"), uninterrupted.visible_points("train/loss"), strict=True)
    assert all(a[2] == pytest.approx(b[2], rel=1e-12) for a, b in values)
    assert "merged with the next" in curves.loss([stopped]).caption
    assert "merged with the next" not in curves.loss([uninterrupted]).caption
    assert (
        curves.describe_agreement(differences(stopped, uninterrupted))
        == "equal to the last bit over 7 common log lines"
    )
    assert [point[0] for point in read(1, 10, 50, 51).visible_points("train/loss")] == [1, 10, 50, 51]


def test_thinned_curve_keeps_extremes() -> None:
    random.seed(1)
    points = [(float(i), float(i), random.random()) for i in range(100_000)]
    points[31_007] = 31_007.0, 31_007.0, 1e3
    points[77_777] = 77_777.0, 77_777.0, -1e3
    curve = downsample(points)
    assert len(curve) <= 2 * MAX_COLUMNS + 2 and curve == sorted(curve) and {*curve} <= {*points}
    assert {points[0], points[-1], points[31_007], points[77_777]} <= {*curve}


def test_layout_picture_names_ranks_and_layers(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", 5), "run")
    texts = texts_of(shares.layout(run))
    assert {"ranks 0-1", "ranks 6-7", "E", "H", "0-4", "5-8", "9-12"} <= {*texts}
    assert [*STAGE_LAYERS[-1]] == [13, 13] and texts.count("H") == 1
    assert "pp 4 × dp 1 × cp 1 × tp 2 = 8 ranks" in shares.layout(run).caption  # type: ignore[union-attr]


def test_memory_picture_shows_measured_gpu_memory(tmp_path: Path) -> None:
    gpu, cpu = (read_run(write_run(tmp_path / device, 5, device=device), device) for device in ("cuda", "cpu"))
    assert "measured peak" in texts_of(shares.memory(gpu)) and "measured peak" not in texts_of(shares.memory(cpu))
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
    texts = texts_of(pipeline.timeline(run.timeline))
    assert any(text.startswith("planned: ") for text in texts) and {"forward", "backward"} <= {*texts}
    assert "seconds; numbers: micro-batches" in texts and "weight gradients" not in texts
    split = texts_of(pipeline.schedule("1f1b", 2, 2, 4, True))
    assert "weight gradients" in split and any("darker: a later chunk" in text for text in split)


def test_picture_colors_are_variables_and_text_is_text(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", 40), "<b>&$x_1$")
    figure = svg(curves.loss([run]), NARROW, "loss")
    assert "var(--blue)" in figure and "var(--ink)" in figure and "<text" in figure and "font-family" not in figure
    for light, _ in COLORS.values():
        assert light not in figure
    labels = texts_of(curves.loss([run, run]))
    assert "&lt;b&gt;&amp;$x_1$: training 2.903" in labels or any("&lt;b&gt;&amp;$x_1$" in t for t in labels)


def test_external_texts_are_one_printable_line() -> None:
    assert sanitize("a\nb\x1b[31m") == "a\ufffdb\ufffd[31m" and sanitize("\udcff") == "\ufffd"
    assert sanitize("x" * 200).endswith("…") and len(sanitize("x" * 200)) == 90


# ---- the page and the program


def test_page_escapes_texts_and_forbids_scripts(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>\"'&"
    run_dir = write_run(tmp_path / "run", 5, data=evil, hosts=[evil], command=[evil], machine={evil: evil})
    status = {"outcome": evil, "reason": evil, "host": evil, "time": evil}
    (run_dir / "status.json").write_text(json.dumps(status))
    (run_dir / "run_config.toml").write_text(f"[model]\n'<i>' = '''{evil}'''\n")
    with (run_dir / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": evil, "text": evil, "time": evil, "step": 3}) + "\n")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "tokens": 2560, f"val/{evil}/loss": 3.0}) + "\n")
    page = HtmlReport([read_run(run_dir, evil)]).text()
    assert "<img" not in page and "<i>" not in page and "&lt;img" in page
    assert "default-src 'none'" in page and "http" not in re.sub(r'(xmlns[:a-z]*|http-equiv)="[^"]*"', "", page)


def test_text_report_writes_nothing_and_the_page_has_pictures(tmp_path: Path, capsys) -> None:
    run_dir = write_run(tmp_path / "run", 5)
    before = sorted(run_dir.iterdir())
    assert report.main([str(run_dir), "--text"]) == 0 and sorted(run_dir.iterdir()) == before
    assert "time breakdown" in capsys.readouterr().out
    assert report.main([str(run_dir), "--out", str(tmp_path / "out")]) == 0
    assert f"page: {tmp_path / 'out' / 'index.html'}" in capsys.readouterr().out
    names = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert names == {"loss", "steps", "time", "timeline", "layout", "memory"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "out").glob("*.png"))


def write_scores(run_dir: Path, num_tasks: int, steps: Sequence[int] = (2, 4)) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step in steps:
            row: dict[str, float] = {"step": step, "tokens": 512 * step}
            for n in range(num_tasks):
                row |= {f"eval/task_{n}/acc": 0.1 * step + 0.01 * n, f"eval/task_{n}/bpb": 2.0 / step}
            file.write(json.dumps(row) + "\n")


def test_scores_have_a_line_per_task_and_a_mean_of_many(tmp_path: Path) -> None:
    few, many, other = (write_run(tmp_path / name, 5) for name in ("few", "many", "other"))
    for run_dir, num_tasks in ((few, 2), (many, 9)):
        write_scores(run_dir, num_tasks)
    picture = curves.scores(read_runs([few]))
    assert picture is not None and {"task_0", "task_1", "accuracy", "bits per byte of right answers"} <= {
        *texts_of(picture)
    }
    accuracy, bits = picture.draw(WIDE).axes
    assert [line.get_ydata().tolist() for line in accuracy.lines] == [[0.2, 0.4], pytest.approx([0.21, 0.41])]
    assert [line.get_xdata().tolist() for line in bits.lines] == [[2, 4]] * 2
    picture = curves.scores(read_runs([many]))
    assert picture is not None and "mean of 9 tasks" in texts_of(picture) and "task_0" not in texts_of(picture)
    assert picture.draw(WIDE).axes[0].lines[-1].get_ydata().tolist() == pytest.approx([0.24, 0.44])
    assert "few: task_1" in texts_of(curves.scores(read_runs([few, other])))
    assert curves.scores(read_runs([other])) is None
    assert "<h2>Scores</h2>" in HtmlReport(read_runs([few])).text()
    assert "<h2>Scores</h2>" not in HtmlReport(read_runs([other])).text()


def test_missing_scores_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plot.main(["scores", str(write_run(tmp_path / "run", 5)), "--out", str(tmp_path / "x.png")])
    assert "no scores in it; train with --eval-requests FILE" in capsys.readouterr().err
    run_dir = write_run(tmp_path / "scored", 5)
    write_scores(run_dir, 1)
    plot.main(["scores", str(run_dir), "--out", str(tmp_path / "x.svg")])
    assert "<svg" in (tmp_path / "x.svg").read_text()


@pytest.mark.parametrize("picture", ["pipeline", "loss", "steps", "time", "memory", "layout", "agreement"])
def test_each_picture_is_drawn_separately(tmp_path: Path, picture: str) -> None:
    run_dirs = [str(write_run(tmp_path / name, 20)) for name in ("one", "two")]
    args = run_dirs if plot.RUN_PLOTS[picture].takes_several else run_dirs[:1]
    plot.main([picture, *args, "--out", str(tmp_path / "made.svg"), "--narrow"])
    assert "<svg" in (tmp_path / "made.svg").read_text()


def test_run_without_steps_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "status.json").write_text('{"outcome": "usage", "step": 0}')
    assert report.main([str(tmp_path), "--text"]) == 0
    captured = capsys.readouterr()
    assert captured.out.split() == ["outcome", "usage,", "before", "its", "first", "step"] and not captured.err


def test_report_without_matplotlib_prints_text(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 5)
    prelude = "import sys, runpy; sys.modules['matplotlib'] = None; sys.argv = sys.argv[1:]; "
    start = [sys.executable, "-c", prelude + "runpy.run_path(sys.argv[0], run_name='__main__')", "tools/report.py"]
    needs = "a picture needs the package matplotlib; pip install matplotlib (or megalite[plots])"
    for options, code in (([], 0), (["--out", str(tmp_path / "out")], 3)):
        done = programs.run([*start, str(run_dir), *options], capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert done.returncode == code and "time breakdown" in done.stdout
        assert done.stderr.startswith(f"report.py: no page: {needs}; --text") and done.stderr.count("\n") == 1
    argv = ["loss", str(run_dir), "--out", str(tmp_path / "out")]
    done = programs.run([*start[:-1], "tools/plot.py", *argv], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stderr) == (3, f"plot.py: {needs}\n")
    assert not (tmp_path / "out").exists()


# ---- damage

ANYTHING: list[Any] = [None, True, -1, 0, 1e308, 10**400, "text", "", [], [[]], {}, {"a": {}}, [None, "x"], math.nan]


def mangle(value: Any, rng: random.Random) -> Any:
    """Return `value` with something else in one place."""
    if rng.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return rng.choice(ANYTHING)
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[key] = mangle(value[key], rng)
    return changed


def damage(run_dir: Path, rng: random.Random) -> str:
    file = run_dir / rng.choice(FILES)
    text = file.read_text()
    if rng.random() < 0.25 or file.suffix == ".toml":
        cut = rng.randrange(len(text))
        file.write_bytes(text.encode()[:cut] + rng.randbytes(rng.randrange(9)))
    elif file.suffix == ".json":
        file.write_text(json.dumps(mangle(json.loads(text), rng)))
    else:
        lines = text.splitlines()
        for i in rng.sample(range(len(lines)), min(len(lines), 3)):
            lines[i] = json.dumps(mangle(json.loads(lines[i]), rng))
        file.write_text("\n".join(lines))
    return file.name


def check_page_of_damaged_run(run_dir: Path, rng: random.Random, capsys: pytest.CaptureFixture[str]) -> None:
    file_name = damage(run_dir, rng)
    code = report.main([str(run_dir), "--out", str(run_dir / "page")])
    out, err = capsys.readouterr()
    page = (run_dir / "page/index.html").read_text()
    assert code in (0, 3) and "page: " in out and err.count("\n") <= 1, (file_name, err)
    assert page.count("<section>") >= 5 and page.endswith("</html>\n"), file_name


def test_damaged_run_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_page_of_damaged_run(write_run(tmp_path / "run", 8), random.Random(3), capsys)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_randomly_damaged_runs_have_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(20):
        check_page_of_damaged_run(write_run(tmp_path / str(seed), 8), random.Random(seed), capsys)


def test_damaged_section_leaves_the_others(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 8)
    timeline = json.loads((run_dir / "timeline.json").read_text())
    timeline["ranks"][0]["spans"][0]["action"] = "F.0"
    (run_dir / "timeline.json").write_text(json.dumps(timeline))
    (run_dir / "status.json").write_text('{"outcome": ')
    page = HtmlReport([read_run(run_dir, "run")])
    text = page.text()
    assert "Cannot be shown: ValueError: &#x27;F.0&#x27; is not an action" in text
    assert "Damaged files" in text and "status.json cannot be read" in text
    assert [picture.name for picture in page.pictures] == ["loss", "steps", "time", "layout", "memory"]


@pytest.mark.nightly
def test_long_run_has_a_small_page(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 10)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in metric_rows(100_000)))
    done = programs.run_python("tools/report.py", str(run_dir))
    assert done.returncode == 0 and (run_dir / "report/index.html").stat().st_size < 1_000_000
