"""The tests that guard a run are red when what they guard is broken."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from breakages import BREAKAGES, Breakage, planted, rarely

HERE = Path(__file__).parent


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda b: b.name)
def test_what_is_broken_is_still_there_to_be_broken(breakage: Breakage) -> None:
    assert planted(breakage)
    path, name = re.fullmatch(r"([\w/]+\.py)::(\w+).*", breakage.test).groups()  # type: ignore[union-attr]
    assert f"\ndef {name}(" in (HERE.parents[1] / path).read_text("utf-8")


@pytest.mark.parametrize("breakage", [pytest.param(b, marks=rarely(b), id=b.name) for b in BREAKAGES])
def test_a_breakage_turns_its_test_red(breakage: Breakage) -> None:
    words = [sys.executable, str(HERE / "breakages.py"), breakage.name]
    done = subprocess.run(words, capture_output=True, text=True, timeout=250)
    assert json.loads(done.stdout) == {"breakage": breakage.name, "verdict": "red"}, done.stderr
