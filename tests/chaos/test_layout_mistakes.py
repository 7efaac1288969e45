"""tools/verify.py finds classical mistakes of distributed training, and says where they are."""

from pathlib import Path

import pytest
from breakages import planted, rarely
from layout_mistakes import MISTAKES, Mistake, missed, planted_in, verify

NAMES = [mistake.breakage.name for mistake in MISTAKES]


@pytest.mark.parametrize("mistake", MISTAKES, ids=NAMES)
def test_what_is_to_be_mistaken_is_still_there(mistake: Mistake) -> None:
    assert planted(mistake.breakage) and (mistake.first or mistake.odd)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("mistake", [pytest.param(m, marks=rarely(m.breakage), id=m.breakage.name) for m in MISTAKES])
def test_a_mistake_is_found_where_it_is(mistake: Mistake, tmp_path: Path) -> None:
    answer = verify(planted_in(mistake, tmp_path), mistake.flags)
    assert not missed(mistake, *answer), answer[2]
