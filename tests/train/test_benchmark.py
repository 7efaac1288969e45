"""tools/benchmark.py: what it cannot do is one line before anything runs; a run that hangs or fails costs itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools import benchmark

TINY = """--num-layers 1 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 --vocab-size 60 --seq-length 8
 --micro-batch-size 2 --device cpu --steps 2 --warmup 1""".split()


def test_parts_sum_up_and_a_failure_costs_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, real, calls = tmp_path / "out.json", benchmark.measure, []

    def measure(name: str, more: dict[str, str], options: object, flags: list[str]) -> dict[str, object]:
        calls.append(name)
        if len(calls) == 1:
            options.timeout = 0.01  # type: ignore[attr-defined]
            return real(name, more, options, flags)  # type: ignore[arg-type]
        options.timeout = 60.0  # type: ignore[attr-defined]
        saved = json.loads(file.read_text())
        assert len(saved["runs"]["megalite"]) == len(calls) - 1 and not saved["complete"]
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(name, more, options, flags)  # type: ignore[arg-type]

    monkeypatch.setattr(benchmark, "measure", measure)
    assert benchmark.main(["--repeats", "3", "--json", str(file), *TINY]) == 130
    out, err = capsys.readouterr()
    first, *where, last = err.splitlines()  # between them, if it had begun, where the run was
    assert first == "megalite: not done after 0.01 s; give more with --timeout" and last == "benchmark.py: interrupted"
    assert not where or where[0].startswith("Fatal Python error: Aborted")
    late, good = json.loads(file.read_text())["runs"]["megalite"]
    assert "error" in late and len(good["steps"]) == 2 and len(good["losses"]) == 3 and good["memory"] > 1 << 20
    (line,) = [line for line in out.splitlines() if line.startswith("rank 0: ")]
    shares = [float(part.split()[-1].rstrip("%")) for part in line.removeprefix("rank 0: ").split(", ")]
    assert len(shares) == 7 and sum(shares) == pytest.approx(100, abs=0.4)
    found = json.loads(file.read_text())["breakdown"]
    assert sum(found["shares"].values()) == pytest.approx(1) and f"bound: {found['bound']['by']}: " in out


def test_a_limit_of_memory_is_of_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(benchmark, "measure", None)  # is not reached
    assert benchmark.main([*TINY, "--device", "cuda", "--memory-gib", "2"]) == 2
    assert "memory_gib=2 is of a CPU; drop it, or use --device cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words,text",
    [
        (["--no-such-flag"], "benchmark.py: unknown flag --no-such-flag; see --help"),
        (["--json", "/no/such/folder/x"], "benchmark.py: --json /no/such/folder/x cannot be written: No such file"),
        (["--device", "cuda"], "benchmark.py: device=cuda but torch sees no card; use --device cpu"),
        (["--nproc", "3"], "benchmark.py: global_batch_size=8 is not a multiple of"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    words: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(benchmark, "measure", None)  # is not reached
    assert benchmark.main([*TINY, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(text)


def test_a_row_whose_base_failed_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    run = {"device": "CPU", "torch": "0", "peak_tflops": None, "devices": 1, "step_s": 1.0, "memory": 1}
    run |= {"flops_per_step": 1.0, "tokens_per_step": 1, "parts": [{"forward": 1.0}]}
    benchmark.report({"megalite": [run], "megalite + allocator": [], "transformers bf16 + allocator": [run]})
    assert "transformers" not in capsys.readouterr().out
