"""Checkpoints of earlier releases still load completely, and their runs resume as they did then.

The values that are read must be equal to the bit on every processor. The losses after them cannot be, since the order of
a sum depends on the vector units. In fp64 each sum differs by 1e-16, and four steps of Adam with an epsilon of 1e-3 do
not enlarge this: 2.2e-16 relative over torch's three CPU capabilities and 1 and 2 threads. In fp16 a value may round the
other way. The fixtures are made by make_fixtures.py.
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
from checkpoint_loads import replace_manifest
from make_fixtures import CASES, FIXTURES, hashes, write_tokens
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

STORED = sorted(path.parent for path in FIXTURES.glob("*/*/expected.json"))


def test_current_release_has_fixtures() -> None:
    assert {path.name for path in STORED if path.parent.name == megalite.__version__} == set(CASES)


@pytest.mark.parametrize("stored_dir", STORED, ids=lambda path: f"{path.parent.name} {path.name}")
def test_stored_checkpoint_loads_and_resumes(stored_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process loads what two or four wrote."""
    expected = json.loads((stored_dir / "expected.json").read_text())
    assert hashes(stored_dir) == expected["tensors"]
    state = offline.open_checkpoint(stored_dir).manifest.state
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path)
    config = config_from(expected["flags"])
    run = run_from(config, dtype=getattr(torch, expected["dtype"]))
    resumed = resume(run, str(stored_dir), config, LoadOptions())
    assert resumed is not None and resumed[1] == []  # no notes: data and options are unchanged
    assert run.progress.to_json() == state["progress"] and run.loss_scaler.to_json() == state["loss_scaler"]
    assert run.optimizer.num_updates == state["updates"] == 2
    losses = [train_step(run).loss for _ in expected["losses"]]
    assert losses == pytest.approx(expected["losses"], rel=1e-11 if expected["dtype"] == "float64" else 2e-3)


# ---- valid hashes over a state or dtypes of wrong types: refused by name, and nothing is changed
NUMBERS: list[Any] = [None, True, -1, 2**63, 2**200, 1e308, 0.5, math.nan]
WRONG = [*NUMBERS, "", "NaN", "1", "\0", [], [1], {}, {"a": 1}]


def entry_paths(data: Any, *parents: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every entry of a JSON value, but only of the first and the last element of a list."""
    keys = data if isinstance(data, dict) else sorted({0, len(data) - 1}) if isinstance(data, list) and data else ()
    for key in keys:
        yield (*parents, key)
        yield from entry_paths(data[key], *parents, key)


def replaced(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    result = copy.deepcopy(data)
    container = result
    for key in path[:-1]:
        container = container[key]
    container[path[-1]] = value
    return result


Stored = tuple[Run, Path, Config]


def open_stored(case: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Stored:
    """Return a run, a checkpoint that fits it, and its configuration."""
    monkeypatch.chdir(directory)
    write_tokens(directory)
    shutil.copytree(FIXTURES / megalite.__version__ / case / "iter_0000002", directory / "run" / "iter_0000002")
    config = config_from([*CASES[case]["flags"].split(), "--load", str(directory / "run")])
    dtype = getattr(torch, CASES[case]["dtype"])
    return run_from(config, dtype=dtype), directory / "run" / "iter_0000002", config


def snapshot(run: Run) -> tuple[Any, ...]:
    values = torch.cat([piece.data.double().nan_to_num(7.0) for piece in run.optimizer.checkpoint_shards()])
    return run.progress.to_json(), run.optimizer.num_updates, replace(run.loss_scaler), values.tolist()


def test_wrong_types_in_run_state_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss scale is dynamic. Only numbers that could be in a checkpoint are not refused."""
    run, checkpoint_dir, config = open_stored("fp16", tmp_path, monkeypatch)
    good = json.loads((checkpoint_dir / "manifest.json").read_text())
    before, accepted, num_tried = snapshot(run), [], 0
    state = {name: value for name, value in good["state"].items() if name not in ("data", "tokenizer")}
    assert {"progress", "updates", "loss_scaler", "rates", "config", "vocab_size"} == state.keys()
    for path in entry_paths(state):
        for wrong in WRONG:
            replace_manifest(checkpoint_dir, {**good, "state": replaced(good["state"], path, wrong)})
            num_tried += 1
            try:
                resume(run, str(checkpoint_dir.parent), config, LoadOptions())
            except SetupError as error:
                assert path[0] == "rates" and "in the checkpoint" in str(error) and snapshot(run) == before
                continue
            except CheckpointError as error:
                assert "manifest.json" in str(error) or str(checkpoint_dir) in str(error)
                assert snapshot(run) == before
                continue
            accepted.append((path[-1], wrong))
            before = snapshot(run)
            assert math.isfinite(run.loss_scaler.scale) and type(run.loss_scaler.good_steps) is int
    numbers = [("scale", n) for n in (2**63, 2**200, 1e308, 0.5)]
    numbers += [(name, n) for name in ("clean_steps", "patience") for n in (2**63, 2**200)]
    numbers += [("patience", None), ("patience", -1), ("dynamic", True), ("decoupled", None)]
    no_effect = ("warm_up_init", "wsd", "start", "samples")  # of rates, which the options replace
    numbers += [(name, n) for name in no_effect for n in (2**63, 2**200, 1e308, 0.5)]
    assert sorted(map(str, accepted)) == sorted(map(str, numbers)) and num_tried > 150


def test_wrong_types_in_ledger_and_tokenizer_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, checkpoint_dir, config = open_stored("fp64", tmp_path, monkeypatch)
    good = json.loads((checkpoint_dir / "manifest.json").read_text())
    resume(run, str(checkpoint_dir.parent), config, LoadOptions())
    before, num_refused = snapshot(run), 0
    state = {name: good["state"][name] for name in ("data", "tokenizer")}
    for n, path in enumerate(entry_paths(state)):
        for wrong in WRONG[n % 6 :: 6]:
            replace_manifest(checkpoint_dir, {**good, "state": replaced(good["state"], path, wrong)})
            try:
                resume(run, str(checkpoint_dir.parent), config, LoadOptions())
            except (CheckpointError, DataError):
                num_refused += 1
            assert snapshot(run) == before
    assert num_refused > 20


def test_unknown_dtypes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer's state must have its dtype. Weights are converted from the file's dtype; a wrong one is refused."""
    run, checkpoint_dir, config = open_stored("fp16", tmp_path, monkeypatch)
    good = json.loads((checkpoint_dir / "manifest.json").read_text())
    before = snapshot(run)
    for name in (min(good["tensors"]), max(good["tensors"])):
        for wrong in [*WRONG, "float99", "__class__", "float64", "int8", "bool"]:
            replace_manifest(checkpoint_dir, replaced(good, ("tensors", name, "dtype"), wrong))
            with pytest.raises(CheckpointError):
                resume(run, str(checkpoint_dir.parent), config, LoadOptions())
            assert snapshot(run) == before
    resume(run, str(checkpoint_dir.parent), config, LoadOptions(reset_progress=True))
