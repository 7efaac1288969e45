"""The run directory: run_config.toml, log.txt, metrics.jsonl, status.json; and the exit codes."""

from __future__ import annotations

import json
import os
from enum import IntEnum
from pathlib import Path
from typing import Any


class Exit(IntEnum):
    """Exit code of pretrain_gpt.py; its name in lower case is `outcome` in status.json."""

    DONE = 0
    CRASH = 1
    USAGE = 2
    PREFLIGHT = 3
    BAD_RESULT = 17
    REQUEUE = 75


def write_atomically(path: Path, text: str) -> None:
    """Write beside and rename: a reader sees the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_status(folder: Path, code: Exit, *, step: int, tokens: int, checkpoint: str | None, reason: str, rank: int) -> None:
    status = {
        "outcome": code.name.lower().replace("_", "-"),
        "step": step,
        "tokens": tokens,
        "checkpoint": checkpoint,
        "reason": reason,
        "rank": rank,
    }
    write_atomically(folder / "status.json", json.dumps(status) + "\n")


def keep_rows_until(path: Path, step: int) -> None:
    """Drop rows of metrics.jsonl beyond `step`, which a resumed run writes again, and a torn last row."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row.get("step", 0) <= step:
            kept.append(line)
    write_atomically(path, "".join(line + "\n" for line in kept))
