"""tools/verify.py finds classical mistakes of distributed training, and says where they are."""

from pathlib import Path

import pytest
from breakages import planted, rarely
from layout_mistakes import MISTAKES, Mistake, missed, verify


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_what_is_to_be_mistaken_is_still_there(mistake: Mistake) -> None:
    assert planted(mistake.breakage) and (mistake.first or mistake.odd)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("mistake", [pytest.param(m, marks=rarely(m.breakage), id=m.breakage.name) for m in MISTAKES])
def test_a_mistake_is_found_where_it_is(mistake: Mistake, tmp_path: Path) -> None:
    answer = verify(mistake, tmp_path)
    assert not missed(mistake, *answer), answer[2]
