"""Complete runs on the simulated GPU.

The host waits only where docs/testing.md says so ("Host synchronization"), and checkpoints and generated tokens equal
those of a CPU.
"""

import json
import os
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from pairwise import nightly_except
from train_cases import config_from, pretrain, read_metric, run_from

from megalite.generate.generation import Sampling, generate_tokens, load_model
from megalite.launch.rank_info import RankInfo
from megalite.parallel.mesh import Mesh
from megalite.training.noise_scale import NoiseScale
from megalite.training.train_step import train_step
from simulated_gpu.simulator.device import SimulatedGpu, simulated
from simulated_gpu.simulator.trace import Launch, WaitAt, count_marks, waits_of
from simulated_gpu.test_trainer import COMMON, LLAMA

START = {"build", ""}  # once in a run: the start, and everything outside the other marks


@pytest.fixture(autouse=True)
def _no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> NoReturn:  # a failing run exits its process
        raise AssertionError(f"the run ended with {code}")

    monkeypatch.setattr(os, "_exit", leave)


def train(directory: Path, flags: str, device: str = "cuda") -> SimulatedGpu:
    """Train two steps, or as many as `flags` say."""
    argv = f"{COMMON} --run-dir {directory / 'run'} --train-iters 2 --log-interval 1 --device {device} {flags}".split()
    config = config_from(argv)
    if device == "cpu":
        assert pretrain(config, RankInfo(0, 1)) == 0
        return SimulatedGpu([])
    with simulated() as gpu:
        assert pretrain(config, RankInfo(0, 1)) == 0
    assert not gpu.mixed
    return gpu


def by_mark(gpu: SimulatedGpu) -> dict[str, Counter[str]]:
    """Return the number of each wait by its innermost mark."""
    counts_by_mark: dict[str, Counter[str]] = {}
    for wait in waits_of(gpu.trace):
        counts_by_mark.setdefault(_mark(wait), Counter())[str(wait)] += 1
    return {mark: counts for mark, counts in counts_by_mark.items() if mark not in START}


def _mark(wait: WaitAt) -> str:
    return next((m for m in reversed(wait.within) if m in ("evaluation", "log", "replica check", "save", "step")), "")


EXPECTED = tomllib.loads(Path(__file__).with_name("runs.toml").read_text("utf-8"))


@pytest.mark.parametrize("name", EXPECTED)
def test_host_synchronizations_equal_the_documents(name: str, tmp_path: Path) -> None:
    expected = {mark: waits for mark, waits in EXPECTED[name].items() if mark != "flags"}
    gpu = train(tmp_path, EXPECTED[name]["flags"].format(directory=tmp_path))
    actual = by_mark(gpu)
    assert actual.pop("step") == Counter(expected.get("step", {})) + Counter(
        {"tolist megalite/training/train_step.py": 2}
    )
    num_sets = count_marks(gpu.trace, "evaluation")
    per_set = expected.get("evaluation", {"tolist megalite/training/evaluation.py": 1})
    assert actual.pop("evaluation") == {wait: num_sets * count for wait, count in per_set.items()}
    assert actual == {mark: counts for mark, counts in expected.items() if mark not in ("step", "evaluation")}
    assert not [wait for wait in waits_of(gpu.trace) if wait.phase]


@pytest.mark.parametrize("background", nightly_except(["on", "off"], ["on"], str, guards=("megalite/checkpoint",)))
def test_checkpoint_from_a_gpu_equals_a_cpus(background: str, tmp_path: Path) -> None:
    flags = f"{LLAMA} --save-interval 1 --async-save {background}"
    gpu = train(tmp_path / "gpu", f"{flags} --save {tmp_path}/gpu")
    train(tmp_path / "cpu", f"{flags} --save {tmp_path}/cpu", device="cpu")
    gpu_files, cpu_files = (
        json.loads((tmp_path / n / "iter_0000002/manifest.json").read_text())["files"] for n in ("gpu", "cpu")
    )
    assert gpu_files == cpu_files  # hashes of all weights and states
    saves = by_mark(gpu)["save"]
    copies = sum(n for wait, n in saves.items() if wait.startswith("copy to the host"))
    # in the background, copies go to pinned memory, and a thread waits for them
    assert (copies == 0) == (background == "on")
    pinned = [f for f in gpu.trace if isinstance(f, Launch) and "async_save" in f.where]
    assert bool(pinned) == (background == "on")
    resumed_flags = f"{flags} --train-iters 3 --lr-decay-iters 2"
    for name, device in (("gpu", "cuda"), ("cpu", "cpu")):
        train(tmp_path / name, f"{resumed_flags} --save {tmp_path}/{name} --load {tmp_path}/{name}", device=device)
    gpu_log, cpu_log = (read_metric(tmp_path / name / "run") for name in ("gpu", "cpu"))
    assert gpu_log == cpu_log and len(cpu_log) == 3


def test_generation_on_a_gpu_equals_a_cpu(tmp_path: Path) -> None:
    train(tmp_path, f"{LLAMA} --save {tmp_path} --save-interval 2", device="cpu")
    prompts, sampling, num_new = [[3, 4, 5], [7]], Sampling(temperature=1.0, seed=3), 6
    expected = generate_tokens(load_model(tmp_path, Mesh.single_process()), prompts, num_new, sampling)
    with simulated() as gpu:
        model = load_model(tmp_path, Mesh.single_process(gpu.device))
        before = len(waits_of(gpu.trace))
        assert generate_tokens(model, prompts, num_new, sampling) == expected
    waits = Counter(str(wait) for wait in waits_of(gpu.trace)[before:])
    assert not gpu.mixed
    # for each token: cache position, position, token and requested index go to the GPU; logits and the choice come back
    kinds = {"copy to the GPU": 4 * num_new, "copy to the host": num_new, "tolist": num_new}
    assert waits == {f"{kind} megalite/generate/generation.py": count for kind, count in kinds.items()}


def test_every_synchronization_is_documented() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/testing.md").read_text(encoding="utf-8")
    table = text.partition("## Host synchronization")[2].partition("\n## ")[0]
    assert {run["flags"].split()[0] for run in EXPECTED.values()} <= set(re.findall(r"--[a-z0-9-]+", table))


def test_noise_scale_adds_no_synchronization() -> None:
    """A step reads its sums with the others; one rank measures nothing useful, and does all of the work."""

    def waits(measures: bool) -> Counter[str]:
        with simulated() as gpu:
            run = run_from(f"{COMMON} --train-iters 2 --device cuda", device=torch.device("cuda", 0))
            if measures:
                run.noise_scale = NoiseScale(run.optimizer)
            for _ in range(2):
                train_step(run)
        launches = sum(isinstance(fact, Launch) for fact in gpu.trace)
        num_launches.append(launches)
        return Counter(map(str, waits_of(gpu.trace)))

    num_launches: list[int] = []
    assert waits(measures=True) == waits(measures=False)
    assert num_launches[0] > num_launches[1]
