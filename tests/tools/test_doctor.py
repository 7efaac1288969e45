"""megalite doctor: its report on a healthy machine, and on machines with one fault each."""

import errno
import json
import os
import shutil
import socket
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.checkpoint.storage.local_storage import LocalStorage
from megalite.launch import system_checks as machine
from tools import doctor
from tools.bench import gpu_report_probe
from tools.preprocess.indexed_writer import IndexedWriter

GPU_FACTS = {
    "gpus": 1,
    "device": "NVIDIA H100",
    "memory": 80 << 30,
    "free": 80 << 30,
    "capability": "9.0",
    "cuda": "12.8",
}
GPU_STATUS = dict(zip(gpu_report_probe.QUERY, "H100 580.1 Default Disabled 3 0 0 40 700 700".split(), strict=True))


def run_doctor(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, list[tuple[str, str]]]:
    """Run the doctor and return the exit code and (mark, everything else) of each line."""
    code = doctor.main([*argv, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["exit"] == code
    return code, [(line["mark"], " ".join([line["about"], line["fact"], line["remedy"]])) for line in report["lines"]]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MAX_BYTES", 1 << 20)
    for name in [name for name in os.environ if name.startswith(("NCCL_", "GLOO_", "MASTER_"))]:
        monkeypatch.delenv(name)


def test_healthy_machine_exits_with_0(tmp_path: Path, capsys) -> None:
    with IndexedWriter(tmp_path / "mine", np.uint16) as writer:
        writer.add([1, 2, 3])
        writer.finish()
    before, start = sorted(tmp_path.iterdir()), time.monotonic()
    code, lines = run_doctor(capsys, "--save", str(tmp_path / "runs/new"), "--data-path", str(tmp_path / "mine"))
    assert code == 0 and time.monotonic() - start < 60 and sorted(tmp_path.iterdir()) == before
    assert "bad" not in dict(lines) and ("ok", f"data {tmp_path / 'mine'}: 1 documents, 3 tokens, 6e-09 GB ") in lines
    for about in ("python", "torch", "gpu", "clocks", "variables", "network", "memory", "storage", "costs"):
        assert any(text.startswith(about) for _, text in lines), about
    assert doctor.main(["--save", str(tmp_path)]) == 0 and capsys.readouterr().out.endswith("a run can start\n")


BROKEN: dict[str, tuple[dict[str, Any], str]] = {  # message -> (fault, severity)
    "NCCL_P2P_DISABLE=1: GPUs of a machine exchange data without NVLink": (dict(NCCL_P2P_DISABLE="1"), "warn"),
    "give --distributed-timeout-minutes": (dict(NCCL_TIMEOUT="60"), "warn"),
    "no GPU is visible": (dict(CUDA_VISIBLE_DEVICES=""), "warn"),
    "this run fails on purpose": (dict(MEGALITE_FAULT="init.collectives:1:0:bitflip"), "warn"),
    "MEGALITE_KERNELS=fast is unknown": (dict(MEGALITE_KERNELS="fast"), "bad"),
    "NCCL_SOCKET_IFNAME=nic7 is not an interface": (dict(NCCL_SOCKET_IFNAME="nic7"), "bad"),
    "set MASTER_PORT, or --rdzv-endpoint": (dict(MASTER_PORT="taken"), "warn"),
    "RANK=0 of WORLD_SIZE=2: a run here is that rank": (
        dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="taken"),
        "warn",
    ),
    "PMI_SIZE is not set although PMI_RANK is": (dict(PMI_RANK="0"), "bad"),
    "every run needs the package numpy": (dict(lacks="numpy"), "bad"),
    "wandb not installed": (dict(lacks="wandb"), "ok"),
    "or newer is needed: pip install --upgrade torch": (dict(old="torch"), "bad"),
    "--shm-size=1g": (dict(shm=64 << 20), "warn"),
    "sees none of 1 GPUs": (dict(gpu={}), "bad"),
    "GPU 0 has uncorrected memory errors (ECC)": (dict(gpu=GPU_FACTS), "bad"),
    "cannot be written": (dict(save="file"), "bad"),
    "Protocol not known: s4": (dict(url="s4://x/y"), "bad"),
    "does not take 1 MiB (No space left on device)": (dict(full=True), "bad"),
    "NCCL_DEBUG=info: each": (dict(NCCL_DEBUG="info"), "warn"),
    "nothing.idx: No such file": (dict(data="nothing"), "bad"),
}


@pytest.mark.parametrize("text", BROKEN)
def test_broken_parts_are_named_with_their_severity(text: str, tmp_path: Path, monkeypatch, capsys) -> None:
    fault, mark = dict(BROKEN[text][0]), BROKEN[text][1]
    argv = ["--data-path", str(tmp_path / fault.pop("data"))] if "data" in fault else []
    (tmp_path / "file").touch()
    argv += ["--save", fault.pop("url", None) or str(tmp_path / fault.pop("save", "."))]
    listener = socket.create_server(("", 0))
    version, disk_usage = metadata.version, shutil.disk_usage

    def version_of(name: str) -> str:
        if name == missing_package:
            raise metadata.PackageNotFoundError(name)
        return "0.1" if name == old_package else version(name)

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    missing_package, old_package, shm = (fault.pop(name, None) for name in ("lacks", "old", "shm"))
    monkeypatch.setattr(metadata, "version", version_of)
    if fault.pop("full", False):
        monkeypatch.setattr(LocalStorage, "open_new", no_space)
    if shm is not None:
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: disk_usage(path)._replace(free=shm))
    if "gpu" in fault:
        facts = {
            "torch": "2.13",
            "triton": "3.9",
            "gpus": 0,
            "memory": 1,
            "gpu_status": [GPU_STATUS],
            **fault.pop("gpu"),
        }
        monkeypatch.setattr(gpu_report_probe, "facts", lambda: facts)
        monkeypatch.setattr(gpu_report_probe, "query_gpus", lambda: [GPU_STATUS])
        monkeypatch.setattr(
            "megalite.training.monitoring.gpu_monitor.GpuMonitor", lambda device: type("None_", (), {"sensors": {}})
        )
    for name, value in fault.items():
        monkeypatch.setenv(name, str(listener.getsockname()[1]) if value == "taken" else value)
    code, lines = run_doctor(capsys, *argv)
    listener.close()
    assert any(line_mark == mark and text in line for line_mark, line in lines), lines
    assert code == (3 if mark == "bad" else 0)


def test_doctor_without_torch_reports_the_rest(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    code, lines = run_doctor(capsys)
    wrong = [line for mark, line in lines if mark == "bad"]
    assert code == 3 and wrong[0].startswith("gpu cannot be checked: ModuleNotFoundError") and len(wrong) == 1
    assert any(line.startswith("memory") for _, line in lines)
