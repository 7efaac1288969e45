"""The launcher of local ranks: who failed first, starting again, and what a killed launcher leaves."""

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
from pathlib import Path

import pytest

from megalite.checkpoint.storage.location import CheckpointError, OtherRankError
from megalite.common.console import print_err
from megalite.launch.local_launcher import LaunchResult, launch_local
from megalite.launch.rank_info import FIRST_FAILURE, HANG_REPORT, RankInfo
from megalite.training.logging.rank_log import (
    claim_first_failure,
    crash_stack,
    first_failure_reason,
    log_to_rank_file,
    rank_log,
)


def _twice(ranks: RankInfo, folder: str) -> None:
    """The first time rank 2 fails, which rank 0 notices and ends earlier; the second time all is well."""
    assert ranks.shared_dir is not None
    with open(Path(folder) / f"resumes-{ranks.is_restart}", "a") as file:
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


def _slow_to_say(ranks: RankInfo, console: str) -> None:
    """Rank 1's disk is full; rank 0 has heard of that before rank 1 has said it. The fork server's own stderr is that of
    the test which started it."""
    from megalite.training.job.job import report_failure

    sys.stderr = open(console, "a", buffering=1)  # noqa: SIM115 (until the process ends)
    if ranks.rank == 0:
        os._exit(int(report_failure(OtherRankError("rank 1 failed while saving"), ranks).exit_code))
    time.sleep(0.7)
    os._exit(int(report_failure(CheckpointError("rank 1: [Errno 27] File too large"), ranks).exit_code))


def test_failed_ranks_message_reaches_the_console(tmp_path: Path) -> None:
    """Not before them, but after them end those that only heard of it: then the launcher waits for nobody."""
    console = tmp_path / "console"
    assert launch_local(2, _slow_to_say, (str(console),), threads=1, timeout_s=60, grace_s=0.2) == 3
    assert console.read_text("utf-8").splitlines() == ["pretrain_gpt.py: rank 1: [Errno 27] File too large"]


def test_restart_starts_all_ranks_and_names_the_first_failure(tmp_path: Path) -> None:
    ends: list[LaunchResult] = []

    def ended(end: LaunchResult) -> bool | None:
        ends.append(end)
        return True if len(ends) == 1 else None

    assert launch_local(3, _twice, (str(tmp_path),), threads=1, timeout_s=60, on_exit=ended) == 0
    assert ends == [LaunchResult(17, "rank 2: ValueError: of rank 2", []), LaunchResult(0, "", [])]
    places = []
    for name in ("resumes-False", "resumes-True"):
        rows = [line.split() for line in (tmp_path / name).read_text().splitlines()]
        assert sorted(rank for rank, _ in rows) == ["0", "1", "2"]
        places += {place for _, place in rows}
    assert len(set(places)) == 2 and not any(map(os.path.exists, places))  # the second had a meeting place of its own


def _dies(ranks: RankInfo, folder: str, how: str) -> None:
    with rank_log(Path(folder), ranks):
        if how == "early":
            os._exit(0)
        if ranks.rank == 1:
            print_err("first\nsecond")
            log_to_rank_file("not for the console")
            faulthandler._sigsegv()  # type: ignore[attr-defined]
        signal.pause()


def test_crash_in_c_code_leaves_a_stack(tmp_path: Path, capsys) -> None:
    ends: list[LaunchResult] = []
    assert launch_local(2, _dies, (str(tmp_path), "segv"), timeout_s=60, grace_s=0.1, on_exit=ends.append) == 139
    assert ends[0].cause == "rank 1 ended by signal SIGSEGV"
    assert f"{ends[0].cause}; ending the others" in capsys.readouterr().err
    said = (tmp_path / "ranks/rank-00001.log").read_text().splitlines()
    assert [line.partition(" ")[2] for line in said[1:4]] == ["first", "second", "not for the console"]
    assert f"rank 1 of 2 on {os.uname().nodename}, process " in said[0] and said[0].startswith("20")
    assert any("Fatal Python error: Segmentation fault" in line for line in said)
    assert any("test_local_launcher.py" in line for line in said)
    told = crash_stack(tmp_path, ends[0].cause, 0.0).splitlines()  # what the launcher shows of it
    assert told[0] == "Fatal Python error: Segmentation fault" and any(
        "test_local_launcher.py" in line for line in told
    )
    for cause, since in (
        (ends[0].cause, time.time() + 9),
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
    said = (tmp_path / "ranks/rank-00000.log").read_text()
    assert [line.partition(" ")[2] for line in said.splitlines()[1:]] == ["first", "second", "not for the console"]
    (tmp_path / "file").touch()
    for folder in (tmp_path / "quiet", tmp_path / "file/x"):
        with rank_log(folder, RankInfo()):
            pass
        assert not (folder / "ranks").exists()
    assert claim_first_failure(RankInfo(), 1, "x") and first_failure_reason(RankInfo()) is None


def test_rank_that_ended_early_is_named(tmp_path: Path) -> None:
    """With exit code 0, but before its target had returned: it has done nothing."""
    ends: list[LaunchResult] = []
    assert launch_local(2, _dies, (str(tmp_path), "early"), timeout_s=60, on_exit=ends.append) == 1
    assert re.fullmatch("rank [01] ended with exit code 0 before its work was done", ends[0].cause)
    assert not (tmp_path / "ranks/rank-00000.log").read_text()


def test_only_leftovers_of_dead_launchers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path /= "long" * 12  # so that no fork server's socket is in it
    tmp_path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def scratch(name: str, *files: str, age_s: float = 3600) -> Path:
        folder = tmp_path / name
        (folder / "tmpabcdefgh").mkdir(parents=True)
        for file in files:
            (folder / file).touch()
        os.utime(folder, (time.time() - age_s, time.time() - age_s))
        return folder

    attempt = [f"tmpabcdefgh/{name}" for name in ("rendezvous", FIRST_FAILURE, HANG_REPORT)]
    dead = scratch("megalite-ranks-00000000", *attempt)
    kept = [
        scratch("megalite-ranks-11111111", age_s=0),  # may be about to be locked
        live := scratch("megalite-ranks-22222222"),
        scratch("megalite-ranks-33333333", "letter.txt"),
        scratch("megalite-ranks-44444444", "tmpabcdefgh/letter.txt"),
        scratch("megalite-data-55555555"),
        scratch("megalite-ranks-666666666"),
    ]
    (tmp_path / "megalite-ranks-77777777").symlink_to(kept[4])
    number = os.open(live, os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX)
    held: list[bool] = []

    def ended(end: LaunchResult) -> None:
        [own] = [p for p in tmp_path.iterdir() if p.name.startswith("megalite-ranks-") and p not in (*kept, dead, link)]
        other = os.open(own, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
        held.append(True)

    link = tmp_path / "megalite-ranks-77777777"
    try:
        assert launch_local(1, _nothing, timeout_s=60, on_exit=ended) == 0
    finally:
        os.close(number)
    assert held and not dead.exists() and all(folder.is_dir() for folder in kept) and link.is_symlink()
    assert (kept[2] / "letter.txt").exists() and (kept[3] / "tmpabcdefgh/letter.txt").exists()
    assert len(list(tmp_path.iterdir())) == len(kept) + 1


def _nothing(ranks: RankInfo) -> None:
    pass


def test_torchrun_table_starts_with_the_first_failure(tmp_path: Path) -> None:
    """It takes the earliest of whole seconds, and of equals the lowest rank."""
    (tmp_path / "1").mkdir()
    assert claim_first_failure(RankInfo(1, 2, 1, 2, shared_dir=str(tmp_path)), 1, "ValueError: x")
    told = json.loads((tmp_path / "1" / "error.json").read_text())["message"]
    assert told["message"] == "ValueError: x" and int(told["extraInfo"]["timestamp"]) < int(time.time())


_TELLS_A_FULL_DISK = """
import sys, contextlib
from pathlib import Path
from megalite.launch.local_launcher import launch_local
from megalite.training.logging.rank_log import rank_log

def tell(ranks):
    with rank_log(Path("."), ranks):
        print("on stderr", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        print("on stdout", flush=True)
    with contextlib.suppress(OSError):
        print("on stderr", file=sys.stderr)

if __name__ == "__main__":
    with contextlib.suppress(OSError):
        print("of the launcher", file=sys.stderr)
    sys.exit(launch_local(2, tell, (), timeout_s=60))
"""


def test_ranks_with_a_full_console_end_normally(tmp_path: Path) -> None:
    """Whatever they, or a library of theirs, had to say there."""
    (tmp_path / "tell.py").write_text(_TELLS_A_FULL_DISK)
    with open("/dev/full", "w") as full:
        words = [sys.executable, str(tmp_path / "tell.py")]
        done = subprocess.run(words, cwd=tmp_path, stdout=full, stderr=full, timeout=120, env=os.environ)
    assert done.returncode == 0
    for rank in range(2):
        assert "on stderr" in (tmp_path / f"ranks/rank-0000{rank}.log").read_text()
