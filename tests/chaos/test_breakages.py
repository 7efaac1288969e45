"""The tests that guard a run are red when what they guard is broken."""

import re
from pathlib import Path

import pytest
from breakages import BREAKAGES, ROOT, Breakage, planted, rarely, verdict


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda b: b.name)
def test_what_is_broken_is_still_there_to_be_broken(breakage: Breakage) -> None:
    assert planted(breakage)
    path, name = re.fullmatch(r"([\w/]+\.py)::(\w+).*", breakage.test).groups()  # type: ignore[union-attr]
    assert f"\ndef {name}(" in (ROOT / path).read_text("utf-8")


@pytest.mark.parametrize("breakage", [pytest.param(b, marks=rarely(b), id=b.name) for b in BREAKAGES])
def test_a_breakage_turns_its_test_red(breakage: Breakage, tmp_path: Path) -> None:
    assert verdict(breakage, tmp_path) == "red"
