"""The small tools refuse bad input with one line; the large ones refuse and print help without importing torch."""

import json
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from toml_tables import MESSAGES

ROOT = Path(__file__).resolve().parents[2]
BAD: dict[str, str] = MESSAGES["tools"]


@pytest.mark.parametrize("line,text", BAD.items(), ids=BAD)
def test_bad_input_is_one_line(tmp_path: Path, line: str, text: str) -> None:
    for name in ("damaged", "empty"):
        (tmp_path / name).mkdir()
        for file in ("timeline.json", "metrics.jsonl"):
            (tmp_path / name / file).write_text('{"a": ' if name == "damaged" else "")
    for name, action in (("mangled", "F.0"), ("waiting", "B0.0")):
        ranks = [{"pp_rank": 0, "spans": [{"action": action, "start_s": 0.0, "end_s": 1.0}]}]
        timeline = {"pp": 1, "vpp": 1, "schedule": "1f1b", "microbatches": 1, "ranks": ranks}
        (tmp_path / name).mkdir()
        (tmp_path / name / "timeline.json").write_text(json.dumps(timeline))
    (tmp_path / "file").write_text("")
    argv = line.format(*[tmp_path] * line.count("{}")).split()
    done = programs.run_python(f"tools/{argv[0]}", *argv[1:])
    assert done.returncode not in (0, -9) and text in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


WITHOUT_TORCH = """import contextlib, sys
from tools import doctor, plan, verify
assert verify.main(["--bogus", "1"]) == 2
with contextlib.suppress(SystemExit):
    plan.main(["--help"])
assert "torch" not in sys.modules"""


def test_help_and_refusals_do_not_import_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
