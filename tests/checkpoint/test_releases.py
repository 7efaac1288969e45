"""The checkpoints that earlier releases wrote still load, whole, and go on as they did then.

What is read must be equal to the bit, on every processor. The losses after it cannot be: sums are ordered as the vector
units like them. In fp64 that is worth 1e-16 each, and four steps of Adam with an epsilon of 1e-3 do not enlarge it:
2.2e-16 relative over torch's three CPU capabilities and 1 and 2 threads. In fp16 a rounding may fall to the other side.
The fixtures are made by make_fixtures.py.
"""

import json
from pathlib import Path

import pytest
import torch
from make_fixtures import CASES, FOLDER, hashes, write_tokens
from train_cases import config_from, run_from

import megalite
from megalite.checkpoint import offline
from megalite.train.start.resume import Start, resume
from megalite.train.step import train_step

STORED = sorted(path.parent for path in FOLDER.glob("*/*/expected.json"))


def test_this_release_has_its_fixtures() -> None:
    assert {path.name for path in STORED if path.parent.name == megalite.__version__} == set(CASES)


@pytest.mark.parametrize("folder", STORED, ids=lambda path: f"{path.parent.name} {path.name}")
def test_a_stored_checkpoint_loads_and_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one process, where two or four had written it."""
    expected = json.loads((folder / "expected.json").read_text())
    assert hashes(folder) == expected["tensors"]
    state = offline.open_checkpoint(folder).manifest.state
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path)
    config = config_from(expected["flags"])
    run = run_from(config, dtype=getattr(torch, expected["dtype"]))
    found = resume(run, str(folder), config, Start())
    assert found is not None and found[1] == []  # nothing to tell: data and options are those of then
    assert run.state.to_json() == state["progress"] and run.loss_scaler.to_json() == state["loss_scaler"]
    assert run.optimizer.updates == state["updates"] == 2
    losses = [train_step(run).loss for _ in expected["losses"]]
    assert losses == pytest.approx(expected["losses"], rel=1e-11 if expected["dtype"] == "float64" else 2e-3)
