"""tools/gpu_report.py from end to end on two simulated GPUs, at tiny sizes, with and without faults.

Each part runs its own commands, and kernels run in Triton's interpreter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from simulated_gpu.simulator import everywhere

from tools.bench.gpu_report_runs import LEVERS

ROOT = Path(__file__).resolve().parents[2]
# the GPU tests that launch no Triton kernel and that do not compile
ADDOPTS = "-p no:cacheprovider -k '(test_replica_checks or test_cuda_graphs or test_gpu_losses) and not compiled'"
# Injects one fault into the processes of each part, as a GPU or its driver would cause it.
FAULTS = """
command_line = " ".join(sys.orig_argv)
def raise_error(error):
    def call(*args, **kwargs):
        raise error
    return call
if "pretrain_gpt.py" in command_line:
    import megalite.training.train_step
    megalite.training.train_step.train_step = raise_error(RuntimeError("CUDA error: device-side assert triggered"))
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
    "tests": "Fatal Python error: Segmentation fault",
    "train llama3-8b-4096": "CUDA out of memory",
    **{f"lever {lever.name}": "CUDA out of memory" for lever in LEVERS},
    "layouts": "Aborted",
    "nccl": "NCCL error: unhandled system error",
    "gpt2": "device-side assert triggered",
    "kernels": "an illegal memory access",
    "peers": "an illegal memory access",
    "tiles": "an illegal memory access",
}


def run_report(directory: Path, faults: str = "", *only: str, code: int) -> tuple[dict[str, Any], str]:
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
    report, page = run_report(tmp_path, code=0)
    assert {part["status"] for part in report["parts"]} == {"ok"}, page
    results = report["results"]
    rows = {lever.name: results[f"lever {lever.name}"]["rows"] for lever in LEVERS}
    assert all(row["status"] == "ok" and row["mfu"] > 0 for lever_rows in rows.values() for row in lever_rows), page
    layouts = results["layouts"]["rows"]
    assert [row["status"] for row in layouts] == ["ok", "ok", "ok", "refused"]
    assert max(row["first_loss"] for row in layouts[:3]) == pytest.approx(layouts[0]["first_loss"], rel=1e-2)
    assert len(results["gpt2"]["samples"]) == 3
    assert {row["kind"] for row in results["nccl"]["rows"]} == {"all_reduce", "all_gather", "reduce_scatter", "message"}
    assert all(results[name]["memory"] < 1 << 30 for name in results if name.startswith("train"))  # the GPU's
    assert all(row["extra_mib"] is not None for row in results["kernels"]["rows"])
    assert results["tests"]["passed"] > 0 and results["tests"]["failed"] == 0


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_failures_of_each_part_are_named(tmp_path: Path) -> None:
    report, page = run_report(tmp_path, FAULTS, code=1)
    parts = {part["name"]: part for part in report["parts"] if not part["status"].startswith("skipped")}
    assert set(parts) == set(FAULT_MESSAGES)
    for name, message in FAULT_MESSAGES.items():
        assert parts[name]["status"].startswith("failed"), (name, page)
        assert any(message in line for line in parts[name]["tail"]), (name, page)
        section = page[page.index(f"### {name}: failed") :]
        assert message in section
    assert "warnings" not in report["facts"] or not report["facts"]["warnings"]  # the GPU itself still responds
