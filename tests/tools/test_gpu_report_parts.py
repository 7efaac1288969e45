"""tools/gpu_report.py from end to end on two simulated cards: each part's own commands, at tiny sizes, well and ill.
Kernels run in Triton's interpreter, and torch.compile is the one way of training that must fail, by its name."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from simulated_gpu.simulator import everywhere

ROOT = Path(__file__).resolve().parents[2]
# of tests for a card those that launch no kernel of Triton's
ADDOPTS = "-p no:cacheprovider -k 'test_replica_checks or test_cuda_graphs'"
# In a process of a part: what goes wrong there. One defect for each part, each as a card or its driver would have it.
ILL = """
words = " ".join(sys.orig_argv)
def raise_error(error):
    def call(*args, **kwargs):
        raise error
    return call
if "pretrain_gpt.py" in words and "--bf16" in words and "dropout 0 " in words:
    import megalite.nn.norm  # a kernel that scales wrong
    real = megalite.nn.norm.norm
    megalite.nn.norm.norm = lambda *a, **k: real(*a, **k) * 1.2
if "forkserver" in words:
    import megalite.parallel.comm, megalite.training.setup, os
    real_build = megalite.training.setup.build_run
    def build(config, ranks, *args, **kwargs):
        if ranks.rank == 1:
            os.abort()
        return real_build(config, ranks, *args, **kwargs)
    megalite.training.setup.build_run = build
    megalite.parallel.comm.start_all_gather_into = raise_error(RuntimeError("NCCL error: unhandled system error"))
if "benchmark_rank.py" in words:
    import torch, megalite.training.train_step
    megalite.training.train_step.train_step = raise_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
if "bench/kernels.py" in words:
    import torch
    torch.Tensor.zero_ = raise_error(RuntimeError("CUDA error: an illegal memory access was encountered"))
if "gpu_report_tests.py" in words and "--share" in words:
    import ctypes
    import pytest
    pytest.main = lambda *a, **k: ctypes.string_at(0)
"""
ILLNESS = {
    "smoke": "differs from cpu by",
    "layouts": "Fatal Python error: Aborted",
    "train llama3-8b-4096": "CUDA out of memory",
    "nccl": "NCCL error: unhandled system error",
    "train llama-2b-tensor": "Fatal Python error: Aborted",
    "train llama-2b-dp": "Fatal Python error: Aborted",
    "tests": "Fatal Python error: Segmentation fault",
    "kernels": "an illegal memory access",
    "peers": "an illegal memory access",
    "ablations": "CUDA out of memory",
    "ablations-mb4": "CUDA out of memory",
    "ablations-moe": "CUDA out of memory",
    "tiles": "an illegal memory access",
}


def rehearse(folder: Path, illness: str = "", *only: str, code: int = 1) -> tuple[dict[str, Any], str]:
    (folder / "sitecustomize.py").write_text(everywhere.TEXT + illness)
    environment = {**os.environ, "PYTHONPATH": str(folder), everywhere.CARDS: "2", "PYTEST_ADDOPTS": ADDOPTS}
    command = [sys.executable, str(ROOT / "tools" / "gpu_report.py"), "--tiny", "--seconds", "3000"]
    command += ["--only", *only] if only else []
    done = subprocess.run([*command, "--out", str(folder / "out")], capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    made = json.loads((folder / "out" / "report.json").read_text())
    assert made["facts"]["device"].startswith("NVIDIA") and made["facts"]["gpus"] == 2
    return made, (folder / "out" / "report.md").read_text()


def test_training_part_runs_on_a_simulated_gpu(tmp_path: Path) -> None:
    """With each commit the part that starts least, which needs no kernel."""
    made, told = rehearse(tmp_path, "", "llama3-8b-4096", code=0)
    assert 0 < made["results"]["train llama3-8b-4096"]["memory"] < 1 << 30, told  # the card's


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_every_part_runs_on_simulated_gpus(tmp_path: Path) -> None:
    made, told = rehearse(tmp_path)
    states = {part["name"]: part["status"] for part in made["parts"]}
    assert states.pop("smoke") == "failed (exit code 1)"
    results = made["results"]
    rows = [row for name in ("ablations", "ablations-mb4", "ablations-moe") for row in results[name]["rows"]]
    lost = [row["status"] for row in rows if row["status"] != "ok"]
    assert len(rows) == 11 and all("compiled with cuBLASLt" in status for status in lost)  # by torch's build
    assert states.pop("ablations") == ("failed (exit code 1)" if lost else "ok"), told
    assert rows[0]["sides"][0]["attention"] == "cudnn" and all(row["ratio"] > 0 for row in rows if "sides" in row)
    assert set(states.values()) == {"ok"}, told
    ways = {case["name"]: case for case in results["smoke"]["cases"]}
    assert ways.pop("compiled")["status"] == "failed (exit code 1)"
    assert "Torch not compiled with CUDA enabled" in told or "Found no NVIDIA driver" in told  # by torch's build
    assert len(ways) == 11 and {case["status"] for case in ways.values()} == {"ok"}
    assert {case["name"] for case in results["layouts"]["cases"]} == {"one GPU", "tp 2", "pp 2", "dp 2"}
    assert {row["kind"] for row in results["nccl"]["rows"]} == {"all_reduce", "all_gather", "reduce_scatter", "message"}
    assert all(results[name]["memory"] < 1 << 30 for name in results if name.startswith("train"))  # the card's
    assert all(row["extra_mib"] is not None for row in results["kernels"]["rows"])
    assert results["tests"]["passed"] > 0 and results["tests"]["failed"] == 0


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_failures_of_each_part_are_named(tmp_path: Path) -> None:
    made, told = rehearse(tmp_path, ILL)
    parts = {part["name"]: part for part in made["parts"] if not part["status"].startswith("skipped")}
    assert set(parts) == set(ILLNESS)
    for name, word in ILLNESS.items():
        assert parts[name]["status"].startswith("failed"), (name, told)
        assert any(word in line for line in parts[name]["tail"]), (name, told)
        section = told[told.index(f"### {name}: failed") :]
        assert word in section
    assert "warnings" not in made["facts"] or not made["facts"]["warnings"]  # the card itself still answers
