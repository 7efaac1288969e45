"""The tests that guard a run are red when what they guard is broken; and tools/verify.py finds classical mistakes of
distributed training, and says where they are."""

import re
from pathlib import Path

import pytest
from mutations import BREAKAGES, MISTAKES, ROOT, Breakage, missed, planted, rarely, verdict, verify


@pytest.mark.parametrize("breakage", BREAKAGES + MISTAKES, ids=lambda b: b.name)
def test_mutated_source_text_exists(breakage: Breakage) -> None:
    assert planted(breakage) and bool(breakage.test) != bool(breakage.first or breakage.odd)
    if breakage.test:
        path, name = re.fullmatch(r"([\w/]+\.py)::(\w+).*", breakage.test).groups()  # type: ignore[union-attr]
        assert f"\ndef {name}(" in (ROOT / path).read_text("utf-8")


@pytest.mark.parametrize("breakage", rarely(BREAKAGES))
def test_mutation_fails_its_test(breakage: Breakage, tmp_path: Path) -> None:
    assert verdict(breakage, tmp_path) == "red"


@pytest.mark.timeout(150)
@pytest.mark.parametrize("mistake", rarely(MISTAKES))
def test_verify_locates_a_mistake(mistake: Breakage, tmp_path: Path) -> None:
    answer = verify(mistake, tmp_path)
    assert not missed(mistake, *answer), answer[2]
