"""The tests that guard a run are red when what they guard is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from breakages import BREAKAGES

HERE = Path(__file__).parent


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_breakage_turns_its_test_red() -> None:
    words = [sys.executable, str(HERE / "breakages.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=880)
    found = {row["breakage"]: row["verdict"] for row in map(json.loads, done.stdout.splitlines())}
    assert found == {breakage.name: "red" for breakage in BREAKAGES}, done.stderr
