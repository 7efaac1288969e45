"""The checkpoints that earlier releases wrote still load, whole, and go on as they did then.

What is read must be equal to the bit, on every processor. The losses after it cannot be: sums are ordered as the vector
units like them. In fp64 that is worth 1e-16 each, and four steps of Adam with an epsilon of 1e-3 do not enlarge it:
2.2e-16 relative over torch's three CPU capabilities and 1 and 2 threads. In fp16 a rounding may fall to the other side.
The fixtures are made by make_fixtures.py.
"""

import copy
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_loads import reseal
from make_fixtures import CASES, FOLDER, hashes, write_tokens
from train_cases import config_from, run_from

import megalite
from megalite.checkpoint import offline
from megalite.checkpoint.storage.location import CheckpointError
from megalite.config.options import Config
from megalite.data.errors import DataError
from megalite.training.checkpointing.resume import LoadOptions, resume
from megalite.training.setup import SetupError
from megalite.training.state import Run
from megalite.training.train_step import train_step

STORED = sorted(path.parent for path in FOLDER.glob("*/*/expected.json"))


def test_current_release_has_fixtures() -> None:
    assert {path.name for path in STORED if path.parent.name == megalite.__version__} == set(CASES)


@pytest.mark.parametrize("folder", STORED, ids=lambda path: f"{path.parent.name} {path.name}")
def test_stored_checkpoint_loads_and_resumes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one process, where two or four had written it."""
    expected = json.loads((folder / "expected.json").read_text())
    assert hashes(folder) == expected["tensors"]
    state = offline.open_checkpoint(folder).manifest.state
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path)
    config = config_from(expected["flags"])
    run = run_from(config, dtype=getattr(torch, expected["dtype"]))
    found = resume(run, str(folder), config, LoadOptions())
    assert found is not None and found[1] == []  # nothing to tell: data and options are those of then
    assert run.progress.to_json() == state["progress"] and run.loss_scaler.to_json() == state["loss_scaler"]
    assert run.optimizer.num_updates == state["updates"] == 2
    losses = [train_step(run).loss for _ in expected["losses"]]
    assert losses == pytest.approx(expected["losses"], rel=1e-11 if expected["dtype"] == "float64" else 2e-3)


# ---- sealed, and the state or dtypes of wrong kinds: refused by name, and nothing is changed
NUMBERS: list[Any] = [None, True, -1, 2**63, 2**200, 1e308, 0.5, math.nan]
WRONG = [*NUMBERS, "", "NaN", "1", "\0", [], [1], {}, {"a": 1}]


def places(data: Any, *above: Any) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, but of lists the first and the last element only."""
    keys = data if isinstance(data, dict) else sorted({0, len(data) - 1}) if isinstance(data, list) and data else ()
    for key in keys:
        yield (*above, key)
        yield from places(data[key], *above, key)


def put(data: Any, place: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(data)
    spot = changed
    for key in place[:-1]:
        spot = spot[key]
    spot[place[-1]] = value
    return changed


Stored = tuple[Run, Path, Config]


def opened(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Stored:
    """A run, a checkpoint that fits it, and its configuration."""
    monkeypatch.chdir(folder)
    write_tokens(folder)
    shutil.copytree(FOLDER / megalite.__version__ / case / "iter_0000002", folder / "run" / "iter_0000002")
    config = config_from([*CASES[case]["flags"].split(), "--load", str(folder / "run")])
    dtype = getattr(torch, CASES[case]["dtype"])
    return run_from(config, dtype=dtype), folder / "run" / "iter_0000002", config


def facts(run: Run) -> tuple[Any, ...]:
    values = torch.cat([piece.data.double().nan_to_num(7.0) for piece in run.optimizer.checkpoint_shards()])
    return run.progress.to_json(), run.optimizer.num_updates, replace(run.loss_scaler), values.tolist()


def test_wrong_types_in_run_state_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a loss scale that moves. What is not refused is a number that might have been there."""
    run, folder, config = opened("fp16", tmp_path, monkeypatch)
    good = json.loads((folder / "manifest.json").read_text())
    before, accepted, tried = facts(run), [], 0
    state = {name: value for name, value in good["state"].items() if name not in ("data", "tokenizer")}
    assert {"progress", "updates", "loss_scaler", "rates", "config", "vocab_size"} == state.keys()
    for place in places(state):
        for wrong in WRONG:
            reseal(folder, {**good, "state": put(good["state"], place, wrong)})
            tried += 1
            try:
                resume(run, str(folder.parent), config, LoadOptions())
            except SetupError as error:
                assert place[0] == "rates" and "in the checkpoint" in str(error) and facts(run) == before
                continue
            except CheckpointError as error:
                assert "manifest.json" in str(error) or str(folder) in str(error)
                assert facts(run) == before
                continue
            accepted.append((place[-1], wrong))
            before = facts(run)
            assert math.isfinite(run.loss_scaler.scale) and type(run.loss_scaler.good_steps) is int
    numbers = [("scale", n) for n in (2**63, 2**200, 1e308, 0.5)]
    numbers += [(name, n) for name in ("clean_steps", "patience") for n in (2**63, 2**200)]
    numbers += [("patience", None), ("patience", -1), ("dynamic", True), ("decoupled", None)]
    no_effect = ("warm_up_init", "wsd", "start", "samples")  # of rates that are those of the options
    numbers += [(name, n) for name in no_effect for n in (2**63, 2**200, 1e308, 0.5)]
    assert sorted(map(str, accepted)) == sorted(map(str, numbers)) and tried > 150


def test_wrong_types_in_ledger_and_tokenizer_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, folder, config = opened("fp64", tmp_path, monkeypatch)
    good = json.loads((folder / "manifest.json").read_text())
    resume(run, str(folder.parent), config, LoadOptions())
    there, refused = facts(run), 0
    state = {name: good["state"][name] for name in ("data", "tokenizer")}
    for n, place in enumerate(places(state)):
        for wrong in WRONG[n % 6 :: 6]:
            reseal(folder, {**good, "state": put(good["state"], place, wrong)})
            try:
                resume(run, str(folder.parent), config, LoadOptions())
            except (CheckpointError, DataError):
                refused += 1
            assert facts(run) == there
    assert refused > 20


def test_unknown_dtypes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer's state must have its dtype. Weights are converted from what the file says; a wrong word is refused."""
    run, folder, config = opened("fp16", tmp_path, monkeypatch)
    good = json.loads((folder / "manifest.json").read_text())
    begin = facts(run)
    for name in (min(good["tensors"]), max(good["tensors"])):
        for wrong in [*WRONG, "float99", "__class__", "float64", "int8", "bool"]:
            reseal(folder, put(good, ("tensors", name, "dtype"), wrong))
            with pytest.raises(CheckpointError):
                resume(run, str(folder.parent), config, LoadOptions())
            assert facts(run) == begin
    resume(run, str(folder.parent), config, LoadOptions(reset_progress=True))
