"""tools/benchmark.py: what it cannot do is one line before anything runs; a run that hangs or fails costs itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools import benchmark
from tools.bench import contender, tables
from tools.bench.turns import Row

TINY = """--num-layers 1 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 --vocab-size 60 --seq-length 8
 --micro-batch-size 2 --device cpu --steps 2 --warmup 1""".split()


def test_parts_sum_up_and_an_interrupted_benchmark_keeps_what_it_has(tmp_path: Path, monkeypatch, capsys) -> None:
    file, real, calls = tmp_path / "out.json", contender.measure, []

    def measure(name: str, *rest: Any) -> dict[str, Any]:
        calls.append(name)
        saved = json.loads(file.read_text())
        assert len(saved["rows"][0]["runs"]) == len(calls) - 1 and not saved["complete"]
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(name, *rest)

    monkeypatch.setattr(contender, "measure", measure)
    assert benchmark.main(["--repeats", "3", "--json", str(file), *TINY]) == 130
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == "benchmark.py: interrupted"
    written = json.loads(file.read_text())
    [good], [figures] = written["rows"][0]["runs"], written["figures"]
    assert len(good["steps"]) == 2 and len(good["losses"]) == 3 and good["memory"] > 1 << 20
    breakdown = figures["breakdown"]
    assert sum(breakdown["shares"].values()) == pytest.approx(1) and f"bound: {breakdown['bound']['by']}: " in out


def test_a_run_that_is_late_says_so_and_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert benchmark.main(["--repeats", "2", "--timeout", "0.01", "--json", str(file), *TINY]) == 1
    _, late, *where = capsys.readouterr().err.splitlines()  # `where`, if it had begun
    assert late == "megalite: not done after 0.01 s; give more with --timeout"
    assert not where or where[0].startswith("Fatal Python error: Aborted")
    [row] = json.loads(file.read_text())["rows"]
    assert row["status"] == "out of time" and row["runs"] == []


def test_a_peer_is_compared_with_what_was_measured_beside_it() -> None:
    rows = [Row({}, name, ["--bf16"], 1, {}) for name in ("megalite", "transformers bf16")]
    for own, peer in ((2.0, 1.0), (1.0, 2.0), (1.0, 1.0)):
        rows[0].runs.append({"step_s": own, "memory": 4})
        rows[1].runs.append({"step_s": peer, "memory": 2})
    assert tables.compared(rows[1], rows[0]) == {"speed": 1.0, "memory": 0.5}
    assert tables.compared(rows[1], None) == tables.compared(rows[1], Row({}, "megalite", [], 1)) == {}
