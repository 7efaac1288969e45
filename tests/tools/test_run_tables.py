"""Runs to compare: --name, and the commands runs, diff and sweep."""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
from toml_tables import MESSAGES

from megalite.config.cli import read
from megalite.models.families import PRESETS
from megalite.training.logging.run_dir import name_conflict, run_dir
from tools import diff, logs, report, runs, sweep

ROOT = Path(__file__).resolve().parents[2]
TOML = """
[model]
num_layers = 2
hidden_size = 16
num_attention_heads = 2
seq_length = 8
max_position_embeddings = 8
[parallel]
device = "cpu"
[train]
micro_batch_size = 2
train_iters = 4
eval_iters = 1
[optim]
lr = 1e-3
[data]
mock_data = true
vocab_size = 64
"""


def run_program(program: str, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return programs.run_python(program, *argv, **options)


def write_run(directory: Path, outcome: str = "done", step: int = 4, **status: Any) -> Path:
    """Write the files of a run into its directory, as the run would leave them."""
    directory.mkdir(parents=True)
    contents = dict(outcome=outcome, step=step, time="2026-11-23T03:00:00+00:00", host="elsewhere", pid=1) | status
    (directory / "status.json").write_text(json.dumps(contents))
    rows = [
        {"step": 2, "train/loss": 4.0, "perf/tokens_per_s_per_gpu": 100.0},
        {"step": 3, "train/loss": 3.5, "perf/tokens_per_s_per_gpu": 300.0, "perf/x": None},
        {"step": 3, "val/valid/loss": 3.75, "val/valid/ppl": 42.5},
        {"step": 4, "train/loss": 3.25, "perf/tokens_per_s_per_gpu": 200.0},
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn')
    (directory / "run_config.toml").write_text(TOML)
    return directory


def config(*flags: str, toml: Path) -> Any:
    return read(["--config", str(toml), *flags], PRESETS)[0]


def test_run_name_is_a_unique_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    toml = tmp_path / "run.toml"
    toml.write_text(TOML)
    named = config("--name", "mine", toml=toml)
    assert run_dir(named) == Path("runs/mine") and name_conflict(named) == []
    write_run(Path("runs/mine"))
    write_run(Path("runs/mine-2"))
    [problem] = name_conflict(named)
    assert problem == "name='mine': runs/mine already holds a run; give --name mine-3, or remove it"
    saved = ("--name", "mine", "--save", "kept", "--save-interval", "2")
    assert "--load kept to continue it" in name_conflict(config(*saved, toml=toml))[0]
    assert name_conflict(config(*saved, "--load", "kept", toml=toml)) == []
    assert name_conflict(config(*saved, "--load", "other", toml=toml)) != []
    assert name_conflict(config("--name", "mine", "--dry-run", toml=toml)) == name_conflict(config(toml=toml)) == []
    write_run(Path("runs/a/b"))
    for argv, message in (
        (("--name", "mine"), "give --name mine-3"),
        (("--name", "a/b"), "name='a/b' cannot name a directory"),
        (("--name", "a" * 300), "cannot name a directory"),
        (("--name", ".."), "cannot name"),
        (("--name", "a", "--run-dir", "b"), "name and run_dir exclude each other"),
    ):
        done = run_program("pretrain_gpt.py", "--config", str(toml), *argv, cwd=tmp_path)
        assert done.returncode == 2 and message in done.stderr, done.stderr


def test_runs_table(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/b", time="2026-11-23T01:00:00+00:00")
    write_run(tmp_path / "runs/group/a", outcome="requeue", step=3)
    write_run(tmp_path / "runs/dead", outcome="running", host=os.uname().nodename, pid=2**22 + 1)
    write_run(tmp_path / "runs/far", outcome="running")
    (tmp_path / "runs/empty").mkdir()
    write_run(tmp_path / "runs/torn")
    (tmp_path / "runs/torn/status.json").write_text("{")
    done = run_program("tools/runs.py", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.startswith("runs.py: runs/torn: ")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["run", "outcome", "steps", "loss", "validation", "tokens/s", "when"]
    assert rows[1] == ["b", "done", "4", "of", "4", "3.2500", "3.7500", "at", "step", "3", "200", "2026-11-23", "01:00"]
    assert {row[0]: row[1] for row in rows[2:]} == {"group/a": "requeue", "dead": "killed", "far": "running"}
    [first, *_] = run_program("tools/runs.py", "runs", "--json", cwd=tmp_path).stdout.splitlines()
    assert json.loads(first) == dict(
        run="runs/b", outcome="done", step=4, steps=4, loss=3.25, validation={"valid": 3.75},
        validation_step={"valid": 3.0}, tokens_per_s=200.0, time="2026-11-23T01:00:00+00:00",
    )  # fmt: skip
    wrong = run_program("tools/runs.py", "nowhere", cwd=tmp_path)
    assert wrong.returncode == 3 and "nowhere: No such file or directory; give the directory" in wrong.stderr


def test_runs_table_counts_tokens_without_a_report(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "killed", outcome="running", host=os.uname().nodename, pid=2**22 + 1)
    started = {"event": "started", "step": 0, "run_info": {"mesh": {"world": 4, "pp": 2, "dp": 2, "cp": 1, "tp": 1}}}
    (directory / "events.jsonl").write_text(json.dumps(started) + "\n")
    row = runs.summarize_run(directory)
    assert (row["outcome"], row["tokens_per_s"], row["steps"]) == ("killed", 4 * 200.0, 4)


def test_runs_table_with_diverged_or_damaged_runs(tmp_path: Path) -> None:
    rows = [
        {"step": 9, "train/loss": None, "val/valid/loss": None},  # as nan and inf are written
        {"step": "x", "val/odd/loss": "y", "perf/tokens_per_s_per_gpu": math.nan},
    ]
    directory = write_run(tmp_path / "runs/diverged", step=5)
    with open(directory / "metrics.jsonl", "w") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    (write_run(tmp_path / "runs/odd") / "status.json").write_text("[1]")
    (write_run(tmp_path / "runs/killed", outcome="running", step=1, time="2026-11-24") / "report.json").write_text("[]")
    done = run_program("tools/runs.py", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "runs.py: runs/odd: status.json is damaged\n", done.stderr
    first, second = [line.split() for line in done.stdout.splitlines()[1:]]
    assert first[:9] == "diverged done 9 of 4 n/a valid n/a, odd".split()
    assert second[:5] == "killed running 4 of 4".split(), "further than status.json, which is written now and then"
    rows = [json.loads(line) for line in run_program("tools/runs.py", "--json", cwd=tmp_path).stdout.splitlines()]
    assert rows[0]["loss"] is None and rows[0]["validation"] == {"valid": None, "odd": None}


def test_runs_table_skips_foreign_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Test brackets deeper than Python's stack, and times without a zone, on no real day or past the year 9999."""
    directory, deep = write_run(tmp_path / "odd"), "[" * 200_000
    for name in ("metrics.jsonl", "events.jsonl", "report.json"):
        (directory / name).write_text(f"{deep}\n")
    times = ["2026-11-23T03:00:00", "2026-11-23T03:00:01+00:00", "2026-99-23", "9999-12-31T23:59:59.999+00:00"]
    with open(directory / "events.jsonl", "a") as file:
        file.writelines(json.dumps({"time": time, "event": "save", "rank": 0}) + "\n" for time in times)
    (directory / "ranks").mkdir()
    (directory / "ranks/rank-00001.log").write_text("2026-99-23T03:00:00+00:00 said\n2026-11-23T03:00:00Z and said\n")
    (directory / "ranks/rank-odd.log").write_text("")
    assert logs.main([str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" | ")[2] for line in lines[1:]].count("save") == 2 and "rank 1 | and said" in str(lines)
    (directory / "status.json").write_text(deep)
    assert logs.main([str(directory), "--short"]) == 0
    assert "not known (status.json is missing or damaged)" in capsys.readouterr().out
    assert report.main([str(directory), "--text"]) == 0 and runs.main([str(tmp_path)]) == 0
    assert capsys.readouterr().err.startswith(f"runs.py: {directory}: ")


def test_logs_first_failure_is_the_missing_rank(tmp_path: Path, capsys) -> None:
    """The launcher does not report it: torchrun, srun or mpirun."""
    directory = write_run(tmp_path / "lost")
    (directory / "ranks").mkdir()
    template = (
        "2026-11-23T03:00:0{0}+00:00 rank {0} (dp {0}), step 6: lost another rank (Connection closed): {1}; in x, y"
    )
    (directory / "ranks/rank-00002.log").write_text(template.format(2, "one of ranks 0-1 of dp") + "\n")
    assert logs.main([str(directory), "--short"]) == 0
    assert "  rank 2  rank 2 (dp 2), step 6: lost another rank (" in capsys.readouterr().out.splitlines()[0]
    (directory / "ranks/rank-00003.log").write_text(template.format(3, "rank 1 of dp has ended (process 7)") + "\n")
    assert logs.main([str(directory), "--short"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert re.search(
        r"^failure 1: \S+ \S+  rank 1  ended without a message; rank 3 \(dp 3\), step 6: lost another", first
    )


def test_logs_print_events_readably(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_run(tmp_path / "run")
    event = {"time": "2026-11-23T03:00:00+00:00", "event": "heartbeat", "rank": 0, "step": 7, "at": 1795878683.446961}
    event |= {
        "own": [0.123456789, None, 2],
        "hosts": [f"h{i}" for i in range(40)],
        "run_info": {"command": ["x"] * 900},
    }
    (directory / "events.jsonl").write_text(json.dumps(event | {"from_scratch": True}) + "\n")
    assert logs.main([str(directory)]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "heartbeat" in line]
    expected = "heartbeat  step 7  own 0.1235, n/a, 2  hosts " + ", ".join(f"h{i}" for i in range(8)) + " and 32 more"
    assert line.endswith(f" | {expected}  from_scratch yes  (run_info: in events.jsonl)")


def test_diff_shows_options_that_change_the_training(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    changes = {
        "lr = 1e-3": "lr = 3e-4",
        "hidden_size = 16": "hidden_size = 32",
        'device = "cpu"': "split_backward = true",
    }
    text = TOML + "[log]\nlog_interval = 7\n"
    for old, new in changes.items():
        text = text.replace(old, new)
    (tmp_path / "two.toml").write_text(text)
    rows = {row["option"]: row for row in diff.differences(*map(diff.read_config, (run, tmp_path / "two.toml")))}
    assert {name: row["changes"] for name, row in rows.items()} == {
        "hidden_size": "the model",
        "lr": "the training",
        "device": "how it is computed",
        "split_backward": "how it is computed",
        "log_interval": "neither",
    }
    assert (rows["lr"]["a"], rows["lr"]["b"]) == (1e-3, 3e-4)
    done = run_program("tools/diff.py", "one", "two.toml", cwd=tmp_path)
    assert done.returncode == 1 and re.search(r"^what changes the training\n  lr +0.001 +0.0003$", done.stdout, re.M)
    same = run_program("tools/diff.py", "one", "one", cwd=tmp_path)
    assert (same.returncode, same.stdout) == (0, "no option differs\n")
    assert json.loads(run_program("tools/diff.py", "one", "two.toml", "--json", cwd=tmp_path).stdout)
    wrong = run_program("tools/diff.py", "one", "three.toml", cwd=tmp_path)
    assert wrong.returncode == 2 and "config='three.toml' cannot be read" in wrong.stderr


def test_diff_ignores_equal_options_of_two_presets(tmp_path: Path) -> None:
    for name, preset in (("a", "tiny"), ("b", "small")):
        (tmp_path / f"{name}.toml").write_text(f'preset = "{preset}"\n[train]\nmicro_batch_size = 2\n')
    options = {row["option"] for row in diff.differences(*(diff.read_config(tmp_path / f"{x}.toml") for x in "ab"))}
    assert {"num_layers", "hidden_size"} <= options and not {"vocab_size", "lr", "activation"} & options


def test_sweep_combinations() -> None:
    combinations = sweep.combinations(sweep.parse_sweeps("--lr 1e-4,3e-4 --nproc 2 --bf16 --seed=1,2".split()))
    assert [name for name, _ in combinations] == [
        "lr=1e-4,seed=1",
        "lr=1e-4,seed=2",
        "lr=3e-4,seed=1",
        "lr=3e-4,seed=2",
    ]
    assert combinations[0][1] == ["--lr=1e-4", "--nproc=2", "--bf16", "--seed=1"]


BAD: dict[str, str] = MESSAGES["sweeps"]


@pytest.mark.parametrize("flags,message", BAD.items())
def test_impossible_sweep_starts_nothing(flags: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TOML)
    done = run_program("tools/sweep.py", "run.toml", *flags.split(), cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
    done = run_program("tools/sweep.py", "none.toml", *flags.split(), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "runs").exists()


def test_sweep_resumes_where_it_stopped(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TOML + "[checkpoint]\nsave_interval = 2\nsave = 'shared'\n")
    line = ("run.toml", "--lr", "1e-3,3e-3", "--eval-iters", "0", "--runs-dir", "out")
    done = run_program("tools/sweep.py", *line, cwd=tmp_path, check=True)
    directories = [tmp_path / "out" / name for name in ("lr=1e-3", "lr=3e-3")]
    assert all((directory / "iter_0000004/COMPLETE").is_file() for directory in directories)
    assert not (tmp_path / "shared").exists()
    rows = [line.split()[:2] for line in done.stdout.splitlines()[-2:]]
    assert rows == [["lr=1e-3", "done"], ["lr=3e-3", "done"]]
    (directories[1] / "iter_0000004").rename(tmp_path / "gone")  # as if it had been stopped after its first checkpoint
    (directories[1] / "latest_checkpointed_iteration.txt").write_text("2")
    status = json.loads((directories[1] / "status.json").read_text())
    (directories[1] / "status.json").write_text(json.dumps(status | {"outcome": "requeue", "step": 2}))
    resumed = run_program("tools/sweep.py", *line, cwd=tmp_path)
    assert "1 of 2: out/lr=1e-3 is done already" in resumed.stdout
    assert "resumed from out/lr=3e-3/iter_0000002 at step 2" in resumed.stdout, resumed.stdout + resumed.stderr
    assert runs.summarize_run(directories[1])["outcome"] == "done"
    changed = run_program("tools/sweep.py", *line, "--weight-decay", "0.5", cwd=tmp_path)
    # a different training, so its checkpoints stay
    assert "done already" not in changed.stdout and changed.returncode == 1
    [line] = [line for line in changed.stderr.splitlines() if line.startswith("sweep.py: ")]
    reason = "not done, and the runs there have another weight_decay; give another --runs-dir for a new sweep"
    assert line == f"sweep.py: out/lr=1e-3, out/lr=3e-3: {reason}"


def test_interrupted_sweep_waits_for_the_save(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TOML + "[log]\nlog_interval = 1\n")
    argv = ("run.toml", "--lr", "1e-3,3e-3", "--train-iters", "100000", "--runs-dir", "out", "--save", "x")
    env = {**os.environ, "MEGALITE_FAULT": "ckpt.shard_written:0:*:sleep=1.5"}  # a checkpoint takes its time
    line = [sys.executable, str(ROOT / "tools/sweep.py"), *argv]
    pipe = subprocess.PIPE
    process = programs.Popen(line, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        assert any("step     3/" in line for line in process.stdout)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, err = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its run too
    assert process.returncode == 130 and "interrupted; the same command resumes it" in err, err
    assert list((tmp_path / "out/lr=1e-3").glob("iter_*/COMPLETE")) and not (tmp_path / "out/lr=3e-3").exists()
    assert [line.split()[:2] for line in out.splitlines()[-1:]] == [["lr=1e-3", "requeue"]]


def test_sweep_exit_codes_with_ignored_sigchld(tmp_path: Path) -> None:
    """Ignore SIGCHLD as `trap '' CHLD` does: programs inherit that, and the kernel would drop the codes."""
    (tmp_path / "run.toml").write_text(TOML)
    env = {**os.environ, "MEGALITE_FAULT": "step.begin:0:*:raise"}
    argv = [sys.executable, str(ROOT / "tools/sweep.py"), "run.toml", "--lr", "1e-3", "--runs-dir", "out"]
    ignore = lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # noqa: E731
    done = subprocess.run(argv, cwd=tmp_path, env=env, preexec_fn=ignore, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    code = "import subprocess, sys; from megalite.common.exits import run_cli\n"
    code += "run_cli(lambda: print(subprocess.run([sys.executable, '-c', 'exit(7)']).returncode))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, preexec_fn=ignore, capture_output=True, text=True)
    assert done.stdout == "7\n", done.stdout + done.stderr


def test_run_texts_are_escaped_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank logs, events, the status and the configuration may contain external text, from documents or file names."""
    bad, stamp = "\x1b]0;mine\x07\x9b2J\u202eevil", "2026-11-23T03:00:00+00:00"
    directory = write_run(tmp_path / "a", reason=f"it said {bad}", outcome=bad)
    (directory / "ranks").mkdir()
    (directory / "ranks" / "rank-00000.log").write_text(f"{stamp} pretrain_gpt.py: {bad}\n")
    (directory / "events.jsonl").write_text(json.dumps({"time": stamp, "event": "restart", "cause": bad}) + "\n")
    lines = {logs.main: [str(directory)], runs.main: [str(tmp_path)], report.main: [str(directory), "--text"]}
    for start, argv in lines.items():
        start(argv)
        captured = capsys.readouterr()
        assert not re.search("[\x1b\x07\x9b\u202e]", captured.out + captured.err), (argv, captured)
        assert start is not logs.main or r"\x1b]0;mine\x07\x9b2J\u202eevil" in captured.out
