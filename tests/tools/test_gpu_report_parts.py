"""tools/gpu_report.py from end to end on two simulated GPUs, at tiny sizes, with and without faults.

Each part runs its own commands, and kernels run in Triton's interpreter. torch.compile is the one way of training that
must fail, and the report names it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from simulated_gpu.simulator import everywhere

ROOT = Path(__file__).resolve().parents[2]
# the GPU tests that launch no Triton kernel
ADDOPTS = "-p no:cacheprovider -k 'test_replica_checks or test_cuda_graphs'"
# Injects one fault into the processes of each part, as a GPU or its driver would cause it.
FAULTS = """
command_line = " ".join(sys.orig_argv)
def raise_error(error):
    def call(*args, **kwargs):
        raise error
    return call
if "pretrain_gpt.py" in command_line and "--bf16" in command_line and "dropout 0 " in command_line:
    import megalite.nn.norm  # a kernel that scales wrong
    real = megalite.nn.norm.norm
    megalite.nn.norm.norm = lambda *a, **k: real(*a, **k) * 1.2
if "forkserver" in command_line:
    import megalite.parallel.comm, megalite.training.setup, os
    real_build = megalite.training.setup.build_run
    def build(config, ranks, *args, **kwargs):
        if ranks.rank == 1:
            os.abort()
        return real_build(config, ranks, *args, **kwargs)
    megalite.training.setup.build_run = build
    megalite.parallel.comm.start_all_gather_into = raise_error(RuntimeError("NCCL error: unhandled system error"))
if "benchmark_rank.py" in command_line:
    import torch, megalite.training.train_step
    megalite.training.train_step.train_step = raise_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
if "bench/kernels.py" in command_line:
    import torch
    torch.Tensor.zero_ = raise_error(RuntimeError("CUDA error: an illegal memory access was encountered"))
if "gpu_report_tests.py" in command_line and "--share" in command_line:
    import ctypes
    import pytest
    pytest.main = lambda *a, **k: ctypes.string_at(0)
"""
FAULT_MESSAGES = {
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


def run_report(directory: Path, faults: str = "", *only: str, code: int = 1) -> tuple[dict[str, Any], str]:
    (directory / "sitecustomize.py").write_text(everywhere.TEXT + faults)
    environment = {**os.environ, "PYTHONPATH": str(directory), everywhere.NUM_GPUS: "2", "PYTEST_ADDOPTS": ADDOPTS}
    command = [sys.executable, str(ROOT / "tools" / "gpu_report.py"), "--tiny", "--seconds", "3000"]
    command += ["--only", *only] if only else []
    done = subprocess.run([*command, "--out", str(directory / "out")], capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    report = json.loads((directory / "out" / "report.json").read_text())
    assert report["facts"]["device"].startswith("NVIDIA") and report["facts"]["gpus"] == 2
    return report, (directory / "out" / "report.md").read_text()


def test_training_part_runs_on_a_simulated_gpu(tmp_path: Path) -> None:
    """Run with each commit the part that starts the fewest processes and needs no kernel."""
    report, page = run_report(tmp_path, "", "llama3-8b-4096", code=0)
    assert 0 < report["results"]["train llama3-8b-4096"]["memory"] < 1 << 30, page  # the GPU's


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_every_part_runs_on_simulated_gpus(tmp_path: Path) -> None:
    report, page = run_report(tmp_path)
    states = {part["name"]: part["status"] for part in report["parts"]}
    assert states.pop("smoke") == "failed (exit code 1)"
    results = report["results"]
    rows = [row for name in ("ablations", "ablations-mb4", "ablations-moe") for row in results[name]["rows"]]
    lost = [row["status"] for row in rows if row["status"] != "ok"]
    assert len(rows) == 11 and all("compiled with cuBLASLt" in status for status in lost)  # depends on torch's build
    assert states.pop("ablations") == ("failed (exit code 1)" if lost else "ok"), page
    assert rows[0]["sides"][0]["attention"] == "cudnn" and all(row["ratio"] > 0 for row in rows if "sides" in row)
    assert set(states.values()) == {"ok"}, page
    cases = {case["name"]: case for case in results["smoke"]["cases"]}
    assert cases.pop("compiled")["status"] == "failed (exit code 1)"
    # depends on torch's build
    assert "Torch not compiled with CUDA enabled" in page or "Found no NVIDIA driver" in page
    assert len(cases) == 11 and {case["status"] for case in cases.values()} == {"ok"}
    assert {case["name"] for case in results["layouts"]["cases"]} == {"one GPU", "tp 2", "pp 2", "dp 2"}
    assert {row["kind"] for row in results["nccl"]["rows"]} == {"all_reduce", "all_gather", "reduce_scatter", "message"}
    assert all(results[name]["memory"] < 1 << 30 for name in results if name.startswith("train"))  # the GPU's
    assert all(row["extra_mib"] is not None for row in results["kernels"]["rows"])
    assert results["tests"]["passed"] > 0 and results["tests"]["failed"] == 0


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_failures_of_each_part_are_named(tmp_path: Path) -> None:
    report, page = run_report(tmp_path, FAULTS)
    parts = {part["name"]: part for part in report["parts"] if not part["status"].startswith("skipped")}
    assert set(parts) == set(FAULT_MESSAGES)
    for name, message in FAULT_MESSAGES.items():
        assert parts[name]["status"].startswith("failed"), (name, page)
        assert any(message in line for line in parts[name]["tail"]), (name, page)
        section = page[page.index(f"### {name}: failed") :]
        assert message in section
    assert "warnings" not in report["facts"] or not report["facts"]["warnings"]  # the GPU itself still responds
