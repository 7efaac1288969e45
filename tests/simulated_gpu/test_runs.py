"""Whole runs on the simulated card: for what the host waits is what docs/testing.md says ("Host synchronization"),
and what they save, load and generate is what a CPU does."""

import json
import os
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import NoReturn

import pytest
from pairwise import rarely
from train_cases import config_from, logged, pretrain

from megalite.generate.generation import Sampling, generate_tokens, load_model
from megalite.launch.rank_info import RankInfo
from megalite.parallel.mesh import Mesh
from simulated_gpu.simulator.device import Card, simulated
from simulated_gpu.simulator.trace import Launch, WaitAt, times, waits_of
from simulated_gpu.test_trainer import COMMON, LLAMA

START = {"build", ""}  # and what comes around steps: it happens once


@pytest.fixture(autouse=True)
def _no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> NoReturn:  # a run that fails ends its process
        raise AssertionError(f"the run ended with {code}")

    monkeypatch.setattr(os, "_exit", leave)


def train(folder: Path, flags: str, device: str = "cuda") -> Card:
    """A run of two steps, and of as many more as `flags` say."""
    words = f"{COMMON} --run-dir {folder / 'run'} --train-iters 2 --log-interval 1 --device {device} {flags}".split()
    config = config_from(words)
    if device == "cpu":
        assert pretrain(config, RankInfo(0, 1)) == 0
        return Card([])
    with simulated() as card:
        assert pretrain(config, RankInfo(0, 1)) == 0
    assert not card.mixed
    return card


def by_mark(card: Card) -> dict[str, Counter[str]]:
    """Innermost mark -> waits."""
    found: dict[str, Counter[str]] = {}
    for wait in waits_of(card.trace):
        found.setdefault(_mark(wait), Counter())[str(wait)] += 1
    return {mark: counts for mark, counts in found.items() if mark not in START}


def _mark(wait: WaitAt) -> str:
    return next((m for m in reversed(wait.within) if m in ("evaluation", "log", "replica check", "save", "step")), "")


EXPECTED = tomllib.loads(Path(__file__).with_name("runs.toml").read_text("utf-8"))


@pytest.mark.parametrize("name", EXPECTED)
def test_host_synchronizations_equal_the_documents(name: str, tmp_path: Path) -> None:
    expected = {mark: waits for mark, waits in EXPECTED[name].items() if mark != "flags"}
    card = train(tmp_path, EXPECTED[name]["flags"].format(folder=tmp_path))
    found = by_mark(card)
    assert found.pop("step") == Counter(expected.get("step", {})) + Counter(
        {"tolist megalite/training/train_step.py": 2}
    )
    sets = times(card.trace, "evaluation")
    of_a_set = expected.get("evaluation", {"tolist megalite/training/trainer.py": 1})
    assert found.pop("evaluation") == {wait: sets * count for wait, count in of_a_set.items()}
    assert found == {mark: counts for mark, counts in expected.items() if mark not in ("step", "evaluation")}
    assert not [wait for wait in waits_of(card.trace) if wait.phase]


@pytest.mark.parametrize("background", rarely(["on", "off"], ["on"], str, guards=("megalite/checkpoint",)))
def test_checkpoint_from_a_gpu_equals_a_cpus(background: str, tmp_path: Path) -> None:
    flags = f"{LLAMA} --save-interval 1 --async-save {background}"
    card = train(tmp_path / "card", f"{flags} --save {tmp_path}/card")
    train(tmp_path / "cpu", f"{flags} --save {tmp_path}/cpu", device="cpu")
    one, two = (json.loads((tmp_path / n / "iter_0000002/manifest.json").read_text())["files"] for n in ("card", "cpu"))
    assert one == two  # hashes of all weights and states
    saves = by_mark(card)["save"]
    copies = sum(n for what, n in saves.items() if what.startswith("copy to the host"))
    assert (copies == 0) == (background == "on")  # else copies go into pinned memory, and a thread waits for them
    pinned = [f for f in card.trace if isinstance(f, Launch) and "async_save" in f.where]
    assert bool(pinned) == (background == "on")
    more = f"{flags} --train-iters 3 --lr-decay-iters 2"
    for name, device in (("card", "cuda"), ("cpu", "cpu")):
        train(tmp_path / name, f"{more} --save {tmp_path}/{name} --load {tmp_path}/{name}", device=device)
    card_s, cpu_s = (logged(tmp_path / name / "run") for name in ("card", "cpu"))
    assert card_s == cpu_s and len(cpu_s) == 3


def test_generation_on_a_gpu_equals_a_cpu(tmp_path: Path) -> None:
    train(tmp_path, f"{LLAMA} --save {tmp_path} --save-interval 2", device="cpu")
    prompts, sampling, new = [[3, 4, 5], [7]], Sampling(temperature=1.0, seed=3), 6
    there = generate_tokens(load_model(tmp_path, Mesh.single_process()), prompts, new, sampling)
    with simulated() as card:
        model = load_model(tmp_path, Mesh.single_process(card.device))
        before = len(waits_of(card.trace))
        assert generate_tokens(model, prompts, new, sampling) == there
    waits = Counter(str(wait) for wait in waits_of(card.trace)[before:])
    assert not card.mixed
    # for each token: its place for the cache, where it is, which it is, which is asked for; the logits; and the choice
    kinds = {"copy to the card": 4 * new, "copy to the host": new, "tolist": new}
    assert waits == {f"{kind} megalite/generate/generation.py": count for kind, count in kinds.items()}


def test_every_synchronization_is_documented() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/testing.md").read_text(encoding="utf-8")
    table = text.partition("## Host synchronization")[2].partition("\n## ")[0]
    assert {run["flags"].split()[0] for run in EXPECTED.values()} <= set(re.findall(r"--[a-z0-9-]+", table))
