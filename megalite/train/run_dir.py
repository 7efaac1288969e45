"""The run directory and the exit codes: what is left of a run when its process is gone.

    run_config.toml   makes the same run again
    log.txt           what the console showed
    metrics.jsonl     one JSON object per log line and evaluation
    status.json       how it ended

torchrun turns every exit code but 0 into 1, so scripts that requeue a run read status.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    """Exit code of pretrain_gpt.py; its name in lower case is `outcome` in status.json."""

    DONE = 0
    CRASH = 1
    USAGE = 2
    PREFLIGHT = 3
    BAD_RESULT = 17
    REQUEUE = 75

    @property
    def outcome(self) -> str:
        return self.name.lower().replace("_", "-")


def write_atomically(path: Path, text: str | Iterable[str]) -> None:
    """Write beside and rename: a reader sees the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # there only if the disk is full or a row could not be read


def write_status(
    folder: Path, code: Exit, *, step: int, tokens: int, checkpoint: str | None, reason: str, rank: int
) -> None:
    """`tokens` and `step`: trained so far. `checkpoint`: the directory to resume from. `reason`: for people."""
    status = {
        "outcome": code.outcome,
        "step": step,
        "tokens": tokens,
        "checkpoint": checkpoint,
        "reason": reason,
        "rank": rank,
    }
    write_atomically(folder / "status.json", json.dumps(status) + "\n")


def keep_rows_until(path: Path, step: int) -> None:
    """Drop rows of metrics.jsonl beyond `step`, which a resumed run writes again, and rows torn by a crash."""
    if not path.exists():
        return

    def kept() -> Iterable[str]:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as lines:  # row by row: it may be large
            for line in lines:
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] <= step:
                    yield line.rstrip("\n") + "\n"

    write_atomically(path, kept())
