"""The tests that guard a run fail if what they guard is broken."""

import os
import sys
from pathlib import Path

import programs
import pytest
from breakages import BREAKAGES, Breakage
from replacements import ROOT

CHAOS = Path(__file__).parent
TIMEOUT_S = 150


@pytest.mark.parametrize("test", sorted({breakage.test for breakage in BREAKAGES.values()}))
def test_test_of_a_breakage_exists(test: str) -> None:
    file, name = test.partition("[")[0].split("::")
    assert f"\ndef {name}(" in (ROOT / file).read_text("utf-8")


@pytest.mark.timeout(TIMEOUT_S + 10)
@pytest.mark.parametrize(
    "breakage",
    [
        pytest.param(breakage, marks=pytest.mark.nightly(guards=(breakage.file,)), id=breakage.name)
        for breakage in BREAKAGES.values()
    ],
)
def test_breakage_fails_its_test(breakage: Breakage) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:xdist", "--timeout", str(TIMEOUT_S - 10), breakage.test]
    paths = os.pathsep.join(map(str, (CHAOS / "startup", CHAOS, CHAOS.parent / "support", ROOT)))
    env = {**os.environ, "PYTHONPATH": paths, "MEGALITE_BREAKAGE": breakage.name}
    with programs.program_session(command, env=env) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == pytest.ExitCode.TESTS_FAILED, output
    for other_reason in ("sitecustomize", "ImportError", "TypeError"):  # the last: the original has other parameters
        assert other_reason not in output, output
