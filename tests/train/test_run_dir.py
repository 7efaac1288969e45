"""Files of the run directory: replaced whole or not at all, and cut back to the step that a run resumes from."""

from __future__ import annotations

import datetime
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.train.run_dir import Exit, keep_rows_until, leave_status, settle_status, write_atomically


def test_exit_codes_and_outcomes_are_the_documented_ones() -> None:
    documented = {"done": 0, "crash": 1, "usage": 2, "preflight": 3, "bad-result": 17, "requeue": 75}
    documented |= {"rerun": 16, "hang": 70, "interrupted": 130}
    assert {e.outcome: int(e) for e in Exit} == documented


def test_status(tmp_path: Path) -> None:
    leave_status(tmp_path, "running", checkpoint=None, reason="")
    leave_status(tmp_path, "bad-result", step=7, tokens=56, checkpoint="ckpt", reason='loss "nan"')
    status = json.loads((tmp_path / "status.json").read_text())
    times = [datetime.datetime.fromisoformat(status.pop(name)) for name in ("started", "time")]
    assert times[0] <= times[1] and all(one.tzinfo is not None for one in times)
    assert status == {
        "outcome": "bad-result",
        "step": 7,
        "tokens": 56,
        "checkpoint": "ckpt",
        "reason": 'loss "nan"',
        "rank": 0,
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }
    assert os.listdir(tmp_path) == ["status.json"]


def test_the_launcher_settles_what_rank_0_could_not(tmp_path: Path) -> None:
    def settled(outcome: str, reason: str, code: int, cause: str, since: float = 0.0) -> tuple[str, str]:
        leave_status(tmp_path, outcome, checkpoint=None, reason=reason, step=3)
        settle_status(tmp_path, code, cause, since)
        status = json.loads((tmp_path / "status.json").read_text())
        assert status["step"] == 3 and status["pid"] == os.getpid()
        return status["outcome"], status["reason"]

    killed = "rank 1 ended by signal SIGKILL"
    assert settled("running", "", 137, killed) == ("crash", killed)
    assert settled("running", "", 130, "rank 0 ended with exit code 130")[0] == "interrupted"
    assert settled("crash", "lost another rank", 137, killed) == ("crash", f"{killed}; rank 0: lost another rank")
    said = "rank 2: DataError: x"  # which rank 0 may know already
    assert settled("crash", said, 3, said) == ("preflight", said)
    assert settled("crash", "lost another rank", 17, said) == ("bad-result", f"{said}; rank 0: lost another rank")
    of_rank_0 = "rank 0 ended with exit code 1"
    assert settled("crash", "ValueError: x", 1, of_rank_0) == ("crash", "ValueError: x")  # which knew best
    assert settled("requeue", "SIGTERM", 75, "rank 1 ended with exit code 75") == ("requeue", "SIGTERM")
    assert settled("running", "", 137, killed, time.time() + 60) == ("running", "")  # of another run
    (tmp_path / "status.json").write_text("{")
    settle_status(tmp_path, 1, killed, 0.0)
    settle_status(tmp_path / "none", 1, killed, 0.0)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("old\n")

    def broken() -> Iterator[str]:
        yield "new\n" * 10_000
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write_atomically(path, broken())
    assert path.read_text() == "old\n" and os.listdir(tmp_path) == ["metrics.jsonl"]


def test_rows_beyond_the_resumed_step_and_torn_rows_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = ['{"step": 1, "train/loss": 5.0}', '{"step": 2, "note": "\u2028 ü"}', '{"step": 2, "val/valid/loss": 4.0}']
    bad = ['{"step": 3}', "", "3", '{"tokens": 5}', '{"step": "2"}', '{"step": 1, "train/lo']
    torn = b'{"step": 2, "note": "\xff\x00'
    path.write_bytes("\n".join([good[0], bad[0], *good[1:], *bad[1:]]).encode() + b"\n" + torn)
    keep_rows_until(path, 2)
    assert path.read_text(encoding="utf-8").split("\n") == [*good, ""]
    keep_rows_until(path, 2, validated=False)  # the resumed run validates at this step (again)
    assert path.read_text(encoding="utf-8").split("\n") == [*good[:2], ""]
    keep_rows_until(path, 0)
    assert path.read_text() == ""
    keep_rows_until(tmp_path / "none.jsonl", 2)
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
