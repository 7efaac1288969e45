"""Injected faults fire at the requested point, rank and step, and as often as requested."""

import os
import re
from pathlib import Path

import programs
import pytest
import torch

from megalite.common import environment
from megalite.common.fault_injection import FAULT_ONCE_VARIABLE, FAULT_VARIABLE, POINTS, FaultInjector, InjectedFault
from megalite.config.env_overrides import env_problems

ROOT = Path(__file__).resolve().parents[2]


def test_fault_fires_once_on_its_rank_and_step() -> None:
    fault = FaultInjector({FAULT_VARIABLE: "step.begin:1:3:raise,step.after_update:*:2:eio"})
    fault("step.begin", 0, 3)
    fault("step.begin", 1, 2)
    fault("data.get", 1, 3)
    with pytest.raises(InjectedFault, match=r"step.begin on rank 1, step 3"):
        fault("step.begin", 1, 3)
    fault("step.begin", 1, 3)
    with pytest.raises(OSError, match="Input/output error"):
        fault("step.after_update", 7, 2)
    fault = FaultInjector({FAULT_VARIABLE: "step.begin:0:*:raise"})  # without a step: every time
    for step in (1, 1, 2):
        with pytest.raises(InjectedFault):
            fault("step.begin", 0, step)


def test_fault_can_be_limited_to_once_per_run(tmp_path: Path) -> None:
    env = {FAULT_VARIABLE: "step.begin:*:*:raise", FAULT_ONCE_VARIABLE: str(tmp_path)}
    for process in range(2):
        fault = FaultInjector(env)
        for rank in (0, 1):
            if process == 0:
                with pytest.raises(InjectedFault):
                    fault("step.begin", rank, 4)
            fault("step.begin", rank, 5)


def test_nan_fault_changes_the_first_element_only() -> None:
    for kind in ("nan", "inf", "bitflip"):
        x = torch.arange(1.0, 7.0).view(2, 3)
        FaultInjector({FAULT_VARIABLE: f"init:0:1:{kind}"})("init", 0, 1, x)
        assert (x != torch.arange(1.0, 7.0).view(2, 3)).view(-1).tolist() == [True] + [False] * 5, kind
    with pytest.raises(ValueError, match="no tensor"):
        FaultInjector({FAULT_VARIABLE: "init:0:0:nan"})("init", 0, 0)


BAD = "init|init:0:1:explode|init:x:1:kill|init:0:1:kill=|:0:1:kill|init:0:1:kill=3|init:0:1:sleep=1.2.3"


@pytest.mark.parametrize("text", BAD.split("|"))
def test_invalid_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="POINT:RANK:STEP:KIND"):
        FaultInjector({FAULT_VARIABLE: text})


def test_malformed_fault_is_a_problem_and_a_valid_one_a_warning(tmp_path: Path) -> None:
    flags = "--mock-data --vocab-size 64 --preset tiny --train-iters 1 --micro-batch-size 1 --lr 0 --dry-run".split()
    for variables, message in (
        ({FAULT_VARIABLE: "rubbish"}, "POINT:RANK:STEP:KIND"),
        ({FAULT_ONCE_VARIABLE: "/nowhere"}, "is not a directory"),
    ):
        result = programs.run_python("pretrain_gpt.py", *flags, "--frob", env={**os.environ, **variables}, cwd=tmp_path)
        lines = result.stderr.splitlines()
        assert result.returncode == 2 and all(line.startswith("pretrain_gpt.py: ") for line in lines), result.stderr
        assert any(message in line for line in lines) and any("--frob" in line for line in lines)


def test_fault_is_logged_and_an_impossible_one_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAULT_VARIABLE, raising=False)
    assert environment.env_warnings() == []
    monkeypatch.setenv(FAULT_VARIABLE, "step.begin:0:5:kill")
    advice = "this run fails on purpose; unset it for a real run"
    assert environment.env_warnings() == [f"{FAULT_VARIABLE}=step.begin:0:5:kill: {advice}"]
    monkeypatch.setenv(FAULT_VARIABLE, "step.middle:0:1:kill")
    [problem] = env_problems()
    assert problem.startswith("MEGALITE_FAULT='step.middle:0:1:kill' names no known point: init.storage, init")


def test_every_fault_point_is_in_the_code_and_the_documents() -> None:
    text = "".join(path.read_text("utf-8") for path in sorted((ROOT / "megalite").rglob("*.py")))
    assert set(re.findall(r"\binject_fault\(\s*\"([a-z_.]+)\"", text)) == set(POINTS)
    table = (ROOT / "docs/testing.md").read_text("utf-8").partition("| point | when |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([a-z_.]+)` \| (.+) \|$", table, re.M) == list(POINTS.items())
