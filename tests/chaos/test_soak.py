"""A minute of random faults; half an hour of them: `python tests/chaos/soak.py 30 FOLDER`."""

from pathlib import Path

import pytest
from soak import KINDS, soak


@pytest.mark.everything
@pytest.mark.timeout(900)
def test_among_faults_of_every_kind_the_run_is_the_same_run(tmp_path: Path) -> None:
    table = soak(tmp_path / "out", seed=1, steps=240, number=len(KINDS))
    assert all(f"| {kind} |" in table for kind in KINDS) and "bit for bit the same" in table
