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


@pytest.mark.timeout(TIMEOUT_S + 10)
@pytest.mark.parametrize(
    "breakage",
    [pytest.param(one, marks=pytest.mark.nightly(guards=(one.file,)), id=one.name) for one in BREAKAGES.values()],
)
def test_breakage_fails_its_test(breakage: Breakage) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:xdist", "--timeout", str(TIMEOUT_S - 10), breakage.test]
    paths = os.pathsep.join(map(str, (CHAOS / "startup", CHAOS, CHAOS.parent / "support", ROOT)))
    env = {**os.environ, "PYTHONPATH": paths, "MEGALITE_BREAKAGE": breakage.name}
    with programs.group(command, env=env) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == pytest.ExitCode.TESTS_FAILED, output
    assert "sitecustomize" not in output and "ImportError" not in output, output  # it fails for another reason
