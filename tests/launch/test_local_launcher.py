"""The launcher of local ranks: the first failure, restarts, and what a killed launcher leaves."""

import faulthandler
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.storage.location import CheckpointError, OtherRankError
from megalite.common.console import print_err
from megalite.launch import local_launcher
from megalite.launch.local_launcher import LaunchResult, launch_local
from megalite.launch.rank_info import FIRST_FAILURE, HANG_REPORT, RankInfo
from megalite.training.logging.rank_log import (
    claim_first_failure,
    crash_stack,
    first_failure_reason,
    log_to_rank_file,
    rank_log,
)


def _fail_once(ranks: RankInfo, directory: str) -> None:
    """Let rank 2 fail in the first attempt, where rank 0 notices it and ends earlier; succeed in the second one."""
    assert ranks.shared_dir is not None
    with open(Path(directory) / f"resumes-{ranks.is_restart}", "a") as file:
        file.write(f"{ranks.rank} {ranks.shared_dir}\n")
    if ranks.is_restart:
        return
    if ranks.rank == 2:
        assert claim_first_failure(ranks, 17, "ValueError: of rank 2") and not claim_first_failure(ranks, 17, "again")
        time.sleep(0.7)
        os._exit(17)
    while first_failure_reason(ranks) is None:
        time.sleep(0.01)
    assert first_failure_reason(ranks) == "rank 2: ValueError: of rank 2"
    os._exit(1)


def _report_late(ranks: RankInfo, console: str) -> None:
    """Fail on rank 1, whose disk is full, and end rank 0 before rank 1 has reported its error.

    stderr is replaced, since the fork server's stderr is that of the test which started it.
    """
    from megalite.training.job.job import report_failure

    sys.stderr = open(console, "a", buffering=1)  # noqa: SIM115 (until the process ends)
    if ranks.rank == 0:
        os._exit(int(report_failure(OtherRankError("rank 1 failed while saving"), ranks).exit_code))
    time.sleep(0.7)
    os._exit(int(report_failure(CheckpointError("rank 1: [Errno 27] File too large"), ranks).exit_code))


def test_failed_ranks_message_reaches_the_console(tmp_path: Path) -> None:
    """The launcher waits for the message, although the rank that only noticed the failure ends first."""
    console = tmp_path / "console"
    assert launch_local(2, _report_late, (str(console),), threads=1, timeout_s=60, grace_s=0.2) == 3
    assert console.read_text("utf-8").splitlines() == ["pretrain_gpt.py: rank 1: [Errno 27] File too large"]


def test_restart_starts_all_ranks_and_names_the_first_failure(tmp_path: Path) -> None:
    results: list[LaunchResult] = []

    def on_exit(result: LaunchResult) -> bool | None:
        results.append(result)
        return True if len(results) == 1 else None

    assert launch_local(3, _fail_once, (str(tmp_path),), threads=1, timeout_s=60, on_exit=on_exit) == 0
    assert results == [LaunchResult(17, "rank 2: ValueError: of rank 2", []), LaunchResult(0, "", [])]
    shared_dirs = []
    for name in ("resumes-False", "resumes-True"):
        rows = [line.split() for line in (tmp_path / name).read_text().splitlines()]
        assert sorted(rank for rank, _ in rows) == ["0", "1", "2"]
        shared_dirs += {shared_dir for _, shared_dir in rows}
    assert len(set(shared_dirs)) == 2 and not any(
        map(os.path.exists, shared_dirs)
    )  # each attempt had its own rendezvous


def _die(ranks: RankInfo, directory: str, case: str) -> None:
    with rank_log(Path(directory), ranks):
        if case == "early":
            os._exit(0)
        if ranks.rank == 1:
            print_err("first\nsecond")
            log_to_rank_file("not for the console")
            faulthandler._sigsegv()  # type: ignore[attr-defined]
        signal.pause()


def test_crash_in_c_code_leaves_a_stack(tmp_path: Path, capsys) -> None:
    results: list[LaunchResult] = []
    assert launch_local(2, _die, (str(tmp_path), "segv"), timeout_s=60, grace_s=0.1, on_exit=results.append) == 139
    assert results[0].cause == "rank 1 ended by signal SIGSEGV"
    assert f"{results[0].cause}; ending the others" in capsys.readouterr().err
    lines = (tmp_path / "ranks/rank-00001.log").read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines[1:4]] == ["first", "second", "not for the console"]
    assert f"rank 1 of 2 on {os.uname().nodename}, process " in lines[0] and lines[0].startswith("20")
    assert any("Fatal Python error: Segmentation fault" in line for line in lines)
    assert any("test_local_launcher.py" in line for line in lines)
    stack = crash_stack(tmp_path, results[0].cause, 0.0).splitlines()  # the part that the launcher prints
    assert stack[0] == "Fatal Python error: Segmentation fault" and any(
        "test_local_launcher.py" in line for line in stack
    )
    for cause, since in (
        (results[0].cause, time.time() + 9),
        ("rank 0 ended by signal SIGSEGV", 0.0),
        ("rank 1 raised", 0.0),
    ):
        assert crash_stack(tmp_path, cause, since) == ""


def test_rank_logs_exist_only_for_ranks_with_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with rank_log(tmp_path, RankInfo()):
        print_err("first\nsecond")
        log_to_rank_file("not for the console")
    log_to_rank_file("there is no file")
    assert capsys.readouterr().err == "first\nsecond\nthere is no file\n"
    text = (tmp_path / "ranks/rank-00000.log").read_text()
    assert [line.partition(" ")[2] for line in text.splitlines()[1:]] == ["first", "second", "not for the console"]
    (tmp_path / "file").touch()
    for directory in (tmp_path / "quiet", tmp_path / "file/x"):
        with rank_log(directory, RankInfo()):
            pass
        assert not (directory / "ranks").exists()
    assert claim_first_failure(RankInfo(), 1, "x") and first_failure_reason(RankInfo()) is None


def test_rank_that_ended_early_is_named(tmp_path: Path) -> None:
    """It ended with exit code 0, but before its function had returned."""
    results: list[LaunchResult] = []
    assert launch_local(2, _die, (str(tmp_path), "early"), timeout_s=60, on_exit=results.append) == 1
    assert re.fullmatch("rank [01] ended with exit code 0 before its work was done", results[0].cause)
    assert not (tmp_path / "ranks/rank-00000.log").read_text()


def _end_or_die(ranks: RankInfo) -> None:
    if ranks.rank:
        os.kill(os.getpid(), signal.SIGKILL)


def test_rank_that_dies_while_another_ends_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher hears of rank 0's normal end first, and rank 1 has been killed before it looks again."""
    wait = connection.wait

    def wait_for_all(sentinels: Sequence[Any], timeout: float | None = None) -> list[Any]:
        for sentinel in sentinels:
            assert wait([sentinel], 30.0)
        return [sentinels[0]]

    monkeypatch.setattr(local_launcher.connection, "wait", wait_for_all)
    assert launch_local(2, _end_or_die, threads=1) == 128 + signal.SIGKILL


def test_only_leftovers_of_dead_launchers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path /= "long" * 12  # too long for the socket of a fork server
    tmp_path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def scratch(name: str, *files: str, age_s: float = 3600) -> Path:
        directory = tmp_path / name
        (directory / "tmpabcdefgh").mkdir(parents=True)
        for file in files:
            (directory / file).touch()
        os.utime(directory, (time.time() - age_s, time.time() - age_s))
        return directory

    attempt = [f"tmpabcdefgh/{name}" for name in ("rendezvous", FIRST_FAILURE, HANG_REPORT)]
    dead = scratch("megalite-ranks-00000000", *attempt)
    others = [
        scratch("megalite-ranks-11111111", age_s=0),  # may be about to be locked
        live := scratch("megalite-ranks-22222222"),
        scratch("megalite-ranks-33333333", "letter.txt"),
        scratch("megalite-ranks-44444444", "tmpabcdefgh/letter.txt"),
        scratch("megalite-data-55555555"),
        scratch("megalite-ranks-666666666"),
    ]
    (tmp_path / "megalite-ranks-77777777").symlink_to(others[4])
    fd = os.open(live, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    lock_checks: list[bool] = []

    def on_exit(result: LaunchResult) -> None:
        [own] = [
            p for p in tmp_path.iterdir() if p.name.startswith("megalite-ranks-") and p not in (*others, dead, link)
        ]
        own_fd = os.open(own, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(own_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(own_fd)
        lock_checks.append(True)

    link = tmp_path / "megalite-ranks-77777777"
    try:
        assert launch_local(1, _do_nothing, timeout_s=60, on_exit=on_exit) == 0
    finally:
        os.close(fd)
    assert lock_checks and not dead.exists() and all(path.is_dir() for path in others) and link.is_symlink()
    assert (others[2] / "letter.txt").exists() and (others[3] / "tmpabcdefgh/letter.txt").exists()
    assert len(list(tmp_path.iterdir())) == len(others) + 1


def _do_nothing(ranks: RankInfo) -> None:
    pass


def test_torchrun_table_starts_with_the_first_failure(tmp_path: Path) -> None:
    """The table of torchrun compares whole seconds, and takes the lowest rank if they are equal."""
    (tmp_path / "1").mkdir()
    assert claim_first_failure(RankInfo(1, 2, 1, 2, shared_dir=str(tmp_path)), 1, "ValueError: x")
    error = json.loads((tmp_path / "1" / "error.json").read_text())["message"]
    assert error["message"] == "ValueError: x" and int(error["extraInfo"]["timestamp"]) < int(time.time())


_PRINTS_TO_A_FULL_DISK = """
import sys, contextlib
from pathlib import Path
from megalite.launch.local_launcher import launch_local
from megalite.training.logging.rank_log import rank_log

def print_all(ranks):
    with rank_log(Path("."), ranks):
        print("on stderr", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        print("on stdout", flush=True)
    with contextlib.suppress(OSError):
        print("on stderr", file=sys.stderr)

if __name__ == "__main__":
    with contextlib.suppress(OSError):
        print("of the launcher", file=sys.stderr)
    sys.exit(launch_local(2, print_all, (), timeout_s=60))
"""


def test_ranks_with_a_full_console_end_normally(tmp_path: Path) -> None:
    """Output of the ranks and of their libraries may be lost."""
    (tmp_path / "print_all.py").write_text(_PRINTS_TO_A_FULL_DISK)
    with open("/dev/full", "w") as full:
        argv = [sys.executable, str(tmp_path / "print_all.py")]
        result = subprocess.run(argv, cwd=tmp_path, stdout=full, stderr=full, timeout=120, env=os.environ)
    assert result.returncode == 0
    for rank in range(2):
        assert "on stderr" in (tmp_path / f"ranks/rank-0000{rank}.log").read_text()
