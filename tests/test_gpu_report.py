"""tools/gpu_report.py without a card: its parts run, a bad one costs nothing but itself, its goals name what is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tools import gpu_report
from tools.bench import gpu_report_goals, gpu_report_parts, gpu_report_tests
from tools.bench.gpu_report_parts import Part, Setting
from tools.bench.kernel_case import Sizes
from tools.bench.kernel_cases import CASES
from tools.bench.kernels import SIZES

TOOLS = Path(__file__).resolve().parent.parent / "tools"
# What else a developer's machine has. Found when Python starts, so that it holds for every process of the report.
BLOCK = """
import sys
class Block:
    names = ("tyro", "rich", "tokenizers", "safetensors", "xxhash", "transformers", "hypothesis", "tensorboard", "wandb",
             "matplotlib", "xdist", "pytest_timeout", "tiktoken", "pyarrow", "zstandard", "moto", "boto3", "s3fs")
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named '{name}'")
sys.meta_path.insert(0, Block())
"""
KINDS = ["llama3-8b-4096", "kernels", "tests", "sanitizer"]  # each kind of part once


def call(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(folder), **variables}
    command = [sys.executable, str(TOOLS / "gpu_report.py"), "--out", str(folder / "out"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)


def test_a_dry_run_measures_every_kind_of_part_with_no_further_package(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    done = call(tmp_path, "--cpu", "--only", *KINDS, PATH="/usr/bin:/bin", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "out" / "report.json").read_text())
    told = (tmp_path / "out" / "report.md").read_text()
    states = {part["name"]: part["status"] for part in made["parts"]}
    assert states.pop("sanitizer") == "skipped: compute-sanitizer is not on the PATH"
    assert set(states.values()) == {"ok"} and len(states) == 3
    facts, results = made["facts"], made["results"]
    assert (facts["torch"], facts["device"]) == (torch.__version__, "CPU") and facts["date"] and facts["commit"]
    assert results["kernels"]["interpreted"] and results["kernels"]["complete"] and not results["kernels"]["errors"]
    assert {row["peer"] for row in results["kernels"]["rows"]} == {"megalite", "torch", "triton"}
    trained = results["train llama3-8b-4096"]
    assert sum(trained["parts"].values()) == pytest.approx(1)
    assert 0 < trained["overhead"] < 1 and trained["memory"] > 1 << 20 and trained["mfu"] > 0
    tests = results["tests"]
    assert tests["skipped"] > 200 and tests["passed"] == tests["failed"] == tests["did_not_end"] == 0
    assert tests["without_their_packages"] == []
    assert {figure["met"] for figure in made["figures"]} == {"not judged", "not measured"}
    assert "dry run" in told and "| rms_norm forward |" in told and f"| {facts['torch']} |" in told


def test_without_a_card_it_says_so_once(tmp_path: Path) -> None:
    done = call(tmp_path)
    assert done.returncode == 3 and done.stdout == ""
    assert done.stderr.splitlines() == [
        "gpu_report.py: torch sees no CUDA device; use a machine with one, or --cpu for a dry run"
    ]


def test_a_folder_that_cannot_be_made_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        gpu_report.main(["--cpu", "--out", "/dev/null/x"])
    assert stop.value.code == 2 and "--out /dev/null/x cannot be made" in capsys.readouterr().err


def test_a_crash_a_hang_and_lack_of_memory_cost_one_part_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what a killed part has written counts, and what it has started is gone."""
    monkeypatch.setattr(gpu_report, "LEAST_S", 0.5)

    def part(name: str, code: str, limit_s: float = 60, smaller: Part | None = None) -> Part:
        def command(folder: Path, seconds: float) -> list[str]:
            return [sys.executable, "-c", code, str(folder / "kernels.json")]

        return Part(name, limit_s, command, lambda f: gpu_report_parts.load(f / "kernels.json"), smaller=smaller)

    write = "import os, subprocess, sys, time; open(sys.argv[1], 'w').write('{\"rows\": []}'); "
    child = "print(subprocess.Popen(['sleep', '50']).pid, flush=True); time.sleep(50)"
    parts = [
        part("crash", "import os; print('last words', flush=True); os.abort()"),
        part("hang", write + child, limit_s=2.0),
        part("cut", "import sys; open(sys.argv[1], 'w').write('{\"rows\"')"),
        part("large", "print('CUDA out of memory'); exit(1)", smaller=part("large", write)),
        part("silent", ""),
    ]
    report = gpu_report.Report(tmp_path, {"device": "none"}, parts, cpu=False)
    gpu_report.run_all(parts, report, time.monotonic() + 60)
    late = part("late", write)
    report.parts.append(gpu_report.entry_of(late))
    gpu_report.run(late, report.parts[-1], report, seconds=0.4)
    made, told = report.write(), (tmp_path / "report.md").read_text()
    states = [entry["status"] for entry in made["parts"]]
    assert states[:2] == ["failed (exit code -6)", "out of time"] and "cannot be read" in states[2]
    assert states[3:] == ["failed (exit code 1)", "ok", "failed (no results)", "not run: no time was left"]
    assert made["results"]["hang"] == made["results"]["large"] == {"rows": []}
    assert "last words" in told and "out of time" in told
    orphan = int(made["parts"][1]["tail"][0])
    state = Path(f"/proc/{orphan}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_every_goal_of_a_kernel_names_a_row_that_is_measured() -> None:
    """With each row that a run on a card would make, no goal is left without a value."""
    base = Sizes(16384, 4096, torch.bfloat16, torch.device("cpu"))
    values = {name: sizes for name, (sizes, _) in SIZES.items()}
    figures = {"us": 1.0, "of_copy": 0.95, "gb_s": 4000.0, "tflops": 700.0, "extra_mib": 10.0}
    peers = ("megalite", "compile", "liger", "cudnn", "triton")
    rows = [
        {"kernel": case.name, "shape": case.shape(s), "peer": peer, **figures}
        for case in CASES
        for s in case.sizes(base, values)
        for peer in peers
        if peer in ("megalite", "compile", *case.peers)
    ]
    results = {"kernels": {"rows": rows}, "peers": {"rows": rows}}
    goals = list(gpu_report_goals.kernel_goals())
    assert len(goals) > 40
    for goal in goals:
        assert goal.figure(results, judge=True)["met"] == "yes", goal.what
        assert goal.figure({}, judge=True)["met"] == "not measured"
    ops = set(gpu_report_parts.ELEMENTWISE.split(","))
    assert {goal.what.split()[0] for goal in goals if "Liger" in goal.what} < ops <= {case.op for case in CASES}


def test_goals_are_judged_in_their_direction() -> None:
    trained = {"mfu": 0.61, "memory": 104.0, "estimate": 100.0, "overhead": 0.031, "tokens_per_s": 1.0}
    tests = {"passed": 3, "failed": 0, "did_not_end": 1}
    results = {"train llama3-8b-4096": trained, "train gpt-1.3b-2048": trained, "tests": tests}
    met = {goal.what: goal.figure(results, judge=True)["met"] for goal in gpu_report_goals.goals()}
    assert met["training llama3-8b-4096: MFU"] == "NO" and met["training gpt-1.3b-2048: MFU"] == "yes"
    assert met["training llama3-8b-4096: peak memory off the estimate"] == "yes"
    assert met["training llama3-8b-4096: step outside forward and backward"] == "NO"
    assert met["tests on the card that fail"] == "NO" and met["invalid accesses of memory"] == "not measured"


def test_of_tests_that_were_killed_the_last_one_is_known_and_missing_packages_are_named(tmp_path: Path) -> None:
    rows = [{"test": "a", "outcome": "began"}, {"test": "a", "outcome": "passed", "text": ""}]
    rows += [{"test": "b", "outcome": "began"}]
    rows += [{"test": "c.py", "outcome": "skipped", "text": "No module named 'hypothesis'"}]
    (tmp_path / "share0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = gpu_report_tests.read(tmp_path)
    assert (found["passed"], found["did_not_end"], found["failures"][0]["test"]) == (1, 1, "b")
    assert (found["skipped"], found["without_their_packages"]) == (1, ["c.py"])


def test_parts_fit_into_the_time_that_the_issue_gives() -> None:
    """Those of most worth all get theirs; the ones after them what is left."""
    parts = gpu_report_parts.parts_of(Setting(False, {}))
    assert [part.name for part in parts[:3]] == ["train llama3-8b-4096", "kernels", "tests"]
    assert sum(part.limit_s for part in parts[:3]) < 465


# Bytes alive at the peak of a step, counted by torch's own operations in Triton's interpreter. A cycle in the
# interpreter keeps arguments of launches alive, so garbage is collected before the peak is taken.
COUNT = """
import gc, json, sys, weakref
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tools.memory_estimate import estimate
from megalite.config import cli
from megalite.kernels import weight_grad
from megalite.models.families import PRESETS
from megalite.parallel.launch import Ranks
from megalite.train.setup import build_run
from megalite.train.step import train_step

class Live(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.seen = set()
    def gone(self, key, size):
        self.live -= size
        self.seen.discard(key)
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = lambda tree: [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
        given = {s._cdata for s in tensors((args, kwargs))}
        for storage in tensors(out):
            if storage._cdata not in self.seen | given:
                self.seen.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        if self.live > self.peak:
            gc.collect()
            self.peak = max(self.peak, self.live)
        return out

weight_grad.BLOCK_BYTES = 1  # of what a CPU needs for a weight's gradient, and a card does not
for flags in json.loads(sys.argv[1]):
    config, _ = cli.read(flags, PRESETS)
    run = build_run(config, Ranks(), torch.device("cpu"))
    gc.collect()
    gc.freeze()  # what is there by now need not be looked at again
    with Live() as mode:
        train_step(run)
    expected = estimate(config, config.data.vocab_size)
    print(mode.peak / (expected.activations + expected.transient))
    run.close()
"""


def test_the_estimate_of_memory_is_what_a_step_takes() -> None:
    shape = "--mock-data --train-iters 5 --lr 1e-4 --eval-iters 0 --hidden-size 64 --num-attention-heads 4 --bf16"
    shape += " --ffn-hidden-size 192 --seq-length 32 --global-batch-size 2 --micro-batch-size 2 --device cpu"
    shape += " --hidden-dropout 0 --attention-dropout 0"
    llama = f"{gpu_report_parts.TINY_LLAMA} --group-query-attention --num-query-groups 2"
    llama += " --untie-embeddings-and-output-weights"
    cases = [
        f"{shape} {llama} --num-layers 2 --vocab-size 512",
        f"{shape} --num-layers 2 --vocab-size 128 --seq-length 64",
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "MEGALITE_KERNELS": "triton"}
    environment["PYTHONPATH"] = str(TOOLS.parent)
    command = [sys.executable, "-c", COUNT, json.dumps([case.split() for case in cases])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    assert [float(line) for line in done.stdout.split()] == pytest.approx([1, 1], rel=0.03)
