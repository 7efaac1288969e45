"""Whatever cannot be written of what a run tells, the run goes on: whole runs, everything broken at once."""

import os
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from train_cases import SMALL, config_from

from megalite.train.tell.run_dir import Events, settle_status

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *flags: str, **how: object) -> tuple[int, str]:
    """Exit code and stderr of a run that tells all it can into `folder`, and has no stdout."""
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), *SMALL, "--train-iters", "3", "--run-dir", str(folder)]
    words += ["--tensorboard-dir", str(folder / "board"), *flags]
    done = programs.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *words], stderr=subprocess.PIPE, text=True, timeout=120, cwd=ROOT, **how
    )  # type: ignore[call-overload]
    return done.returncode, done.stderr


def test_a_run_whose_every_file_is_something_else(tmp_path: Path) -> None:
    """A pipe that nobody reads, a link, a directory, a file where a directory belongs; and stdout is closed."""
    os.mkfifo(tmp_path / "log.txt")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    for name in ("status.json", "run_config.toml"):
        (tmp_path / name / "inside").mkdir(parents=True)
    (tmp_path / "board").touch()
    code, said = run(tmp_path)
    assert code == 0 and "Traceback" not in said, said
    for name in ("log.txt", "metrics.jsonl", "status.json", "run_config.toml"):
        assert str(tmp_path / name) in said, name
    assert "WARNING: TensorBoard: " in said
    assert [path.name for path in tmp_path.glob(".*")] == [".run.lock"]  # nothing half-written


SECRETS = {
    "FSSPEC_FTP_PASSWORD": "hunter2-of-a-store",
    "AWS_SECRET_ACCESS_KEY": "hunter2-of-a-bucket",
    "WANDB_API_KEY": "hunter2-of-a-log",
    "HF_TOKEN": "hunter2-of-a-hub",
}


def test_no_file_of_a_run_shows_what_the_environment_keeps(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path), "--log-style", "megatron", "--log-progress"]
    code, said = run(tmp_path, *save, env={**os.environ, **SECRETS})
    assert code == 0 and "hunter2" not in said, said
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
