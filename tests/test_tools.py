"""The small tools answer bad input with one line."""

import json
from pathlib import Path

import programs
import pytest

ROOT = Path(__file__).resolve().parent.parent
BAD = [
    ("plot.py schedule --out {}/x.unknown", "x.unknown"),
    ("plot.py schedule --out {}/no/x.png", "no/x.png"),
    ("plot.py pipeline {}", "--profile-pipeline"),
    ("plot.py pipeline {}/damaged", "damaged"),
    ("plot.py pipeline {}/mangled", "damaged ('F.0' is not an action)"),
    ("plot.py pipeline {}/waiting", "damaged (never runs: B0.0)"),
    ("plot.py loss {}/damaged", "damaged"),
    ("plot.py loss {}/empty", "no loss in it yet"),
    ("generate.py --load {} --top-k -1", "--top-k -1 is below 0"),
    ("generate.py --load {} --top-p 0", "--top-p 0.0 is not in (0, 1]"),
    ("generate.py --load {} --nproc 2", "2 processes for tp 1 x pp 1 = 1"),
    ("generate.py --load {} --prompts-file {}/file", "is empty"),
    ("generate.py --load {}", "holds no checkpoint"),
    ("python_corpus.py --out {}/file", "choose another --out"),
    ("python_corpus.py --out {}/c --valid-every 1", "leaves nothing to train on"),
]


@pytest.mark.parametrize("line,text", BAD, ids=[b[0] for b in BAD])
def test_bad_input_is_one_line(tmp_path: Path, line: str, text: str) -> None:
    for name in ("damaged", "empty"):
        (tmp_path / name).mkdir()
        for file in ("timeline.json", "metrics.jsonl"):
            (tmp_path / name / file).write_text('{"a": ' if name == "damaged" else "")
    for name, action in (("mangled", "F.0"), ("waiting", "B0.0")):
        ranks = [{"pp_rank": 0, "spans": [{"action": action, "start_s": 0.0, "end_s": 1.0}]}]
        told = {"pp": 1, "vpp": 1, "schedule": "1f1b", "microbatches": 1, "ranks": ranks}
        (tmp_path / name).mkdir()
        (tmp_path / name / "timeline.json").write_text(json.dumps(told))
    (tmp_path / "file").write_text("")
    words = line.format(*[tmp_path] * line.count("{}")).split()
    done = programs.python(f"tools/{words[0]}", *words[1:])
    assert done.returncode not in (0, -9) and text in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
