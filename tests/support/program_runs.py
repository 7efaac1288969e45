"""Complete runs of pretrain_gpt.py as processes, and the files that they write."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import programs

ROOT = programs.ROOT


def run_pretrain(*flags: object, fault: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run pretrain_gpt.py to its end. `fault` is the value of MEGALITE_FAULT."""
    env = {**os.environ, **options.pop("env", {}), **({"MEGALITE_FAULT": fault} if fault else {})}
    return programs.run_python("pretrain_gpt.py", *map(str, flags), env=env, **{"timeout": 120, **options})


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """Read standard output up to the first line that contains `text`, and return the lines."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines) + (process.stderr.read() if process.stderr else ""))


@contextmanager
def running_program(*flags: object, ready_text: str = "step     3/", **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a run, wait until it has printed `ready_text`, and kill it at the end of the block."""
    argv = [sys.executable, str(ROOT / "pretrain_gpt.py"), *map(str, flags)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = programs.Popen(argv, text=True, cwd=ROOT, **pipes | options)
    try:
        read_until(process, ready_text)
        yield process
    finally:
        process.kill()
        process.communicate()


def load_json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def load_status(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "status.json").read_text())


def load_losses(run_dir: Path, metric: str = "train/loss") -> dict[int, float]:
    """Return the logged values of a metric by step."""
    return {row["step"]: row[metric] for row in load_json_lines(run_dir / "metrics.jsonl") if metric in row}


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def rank_pids(run_dir: Path) -> tuple[int, int, int]:
    """Return the process ids of the fork server, rank 0 and rank 1."""
    first = load_status(run_dir)["pid"]
    server = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
    [other] = {*children_of(server)} - {first}
    return server, first, other
