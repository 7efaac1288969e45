"""Whatever cannot be written of what a run tells, the run goes on: whole runs, everything broken at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from train_cases import SMALL, config_from, pretrain

from megalite.train.tell.run_dir import Events, settle_status

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_whose_every_file_is_something_else(tmp_path: Path) -> None:
    """A pipe that nobody reads, a link, a directory, a file where a directory belongs; and stdout is closed."""
    os.mkfifo(tmp_path / "log.txt")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    for name in ("status.json", "run_config.toml", "timeline.json"):
        (tmp_path / name / "inside").mkdir(parents=True)
    (tmp_path / "board").touch()
    flags = ["--train-iters", "3", "--run-dir", str(tmp_path), "--tensorboard-dir", str(tmp_path / "board")]
    words = [sys.executable, "pretrain_gpt.py", *SMALL, *flags, "--profile-pipeline", "2"]
    closed = ["sh", "-c", 'exec "$@" >&-', "sh"]
    done = subprocess.run([*closed, *words], stderr=subprocess.PIPE, text=True, timeout=120, cwd=ROOT)
    said = done.stderr
    assert done.returncode == 0 and "Traceback" not in said, said
    for name in ("log.txt", "metrics.jsonl", "status.json", "run_config.toml", "timeline.json"):
        assert str(tmp_path / name) in said, name
    assert "WARNING: TensorBoard: " in said
    assert [path.name for path in tmp_path.glob(".*")] == [".run.lock"]  # nothing half-written


SECRETS = {
    "FSSPEC_FTP_PASSWORD": "hunter2-of-a-store",
    "AWS_SECRET_ACCESS_KEY": "hunter2-of-a-bucket",
    "WANDB_API_KEY": "hunter2-of-a-log",
    "HF_TOKEN": "hunter2-of-a-hub",
}


def test_no_file_of_a_run_shows_what_the_environment_keeps(tmp_path: Path, monkeypatch, capfd) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    save = ["--save", str(tmp_path), "--log-style", "megatron", "--log-progress", "--train-iters", "3"]
    assert pretrain(config_from([*SMALL, *save, "--tensorboard-dir", str(tmp_path / "board")])) == 0
    assert "hunter2" not in "".join(capfd.readouterr())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    wanted = {"log.txt", "metrics.jsonl", "run_config.toml", "status.json", "manifest.json", "progress.txt"}
    assert wanted <= {path.name for path in files}
    assert [path.name for path in files if b"hunter2" in path.read_bytes()] == []


def test_events_and_the_launchers_word_never_wait_nor_raise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    os.mkfifo(tmp_path / "status.json")
    events = Events(tmp_path)
    for _ in range(3):
        events.add("something")
    settle_status(tmp_path, config_from([*SMALL, "--train-iters", "1"]), (1, "rank 1 died"), 0.0)
    assert capsys.readouterr().err.count(f"WARNING: {tmp_path / 'events.jsonl'}: ") == 1
    (tmp_path / "events.jsonl").unlink()
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    Events(tmp_path).add("something")
    said = "is a link to another file, and a run opens none; remove it; events are lost there"
    assert said in capsys.readouterr().err
    Events(Path("/proc/run")).add("something")
    assert "/proc/run/events.jsonl" in capsys.readouterr().err
