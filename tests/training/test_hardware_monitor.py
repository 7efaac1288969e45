"""Use of the GPU and of the network at log lines: read in a thread, from the driver and from sysfs."""

import functools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from network_namespaces import NamespaceError, two_nodes
from program_runs import load_json_lines
from train_cases import SMALL_RUN, config_from, pretrain

from megalite.common.exit_codes import ExitCode
from megalite.training.monitoring import hardware_monitor
from megalite.training.monitoring.hardware_monitor import ByteCounters, HardwareMonitor, Means, network_interfaces

CPU = torch.device("cpu")
LOOPBACK, ETHERNET = 772, 1  # if_arp.h
SENT_BYTES = 5_000_000

# The functions of NVIDIA's driver that the package calls for a GPU's use: 3/4 of the time busy, 30 of 80 GiB in use.
DRIVER = """
#include <string.h>
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned long long total, free, used; } Memory;
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **gpu) { *gpu = (void *)1; return strcmp(uuid, "GPU-0a1b") ? 6 : 0; }
int nvmlDeviceGetUtilizationRates(void *gpu, Utilization *rates) { rates->gpu = 75; rates->memory = 9; return 0; }
#ifdef VERSION_2
int nvmlDeviceGetMemoryInfo_v2(void *gpu, Memory2 *m) { m->total = 80ull << 30; m->used = 30ull << 30; return 0; }
#endif
int nvmlDeviceGetMemoryInfo(void *gpu, Memory *m) { m->total = 80ull << 30; m->used = 32ull << 30; return 0; }
"""
READ_USAGE = """
import json, types, torch
from megalite.training.monitoring.gpu_monitor import GpuMonitor, read_sensors
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid="0a1b")
print(json.dumps(read_sensors(GpuMonitor(torch.device("cuda", 0)).usage)))
"""


class FakeSysfs:
    """A tree like /sys, with counters that a test sets."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, path: str, value: object) -> None:
        (file := self.directory / "class" / path).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")

    def add_interface(self, name: str, kind: int = ETHERNET, physical: bool = True) -> None:
        self.write(f"net/{name}/type", kind)
        self.set_bytes(name, 0, 0)
        if physical:
            (self.directory / "class/net" / name / "device").mkdir()

    def set_bytes(self, name: str, received: int, sent: int) -> None:
        self.write(f"net/{name}/statistics/rx_bytes", received)
        self.write(f"net/{name}/statistics/tx_bytes", sent)

    def set_port(self, port: str, received: int, sent: int) -> None:
        self.write(f"infiniband/{port}/counters/port_rcv_data", received)
        self.write(f"infiniband/{port}/counters/port_xmit_data", sent)


@pytest.fixture
def sysfs(tmp_path: Path) -> FakeSysfs:
    return FakeSysfs(tmp_path / "sys")


def wait_until(condition: Callable[[], Any], limit_s: float = 20.0) -> Any:
    deadline = time.monotonic() + limit_s
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return result


# ---- counters
def test_bytes_are_counted_once(sysfs: FakeSysfs) -> None:
    """A bond's bytes are those of its interfaces; a container without a physical interface has a virtual one."""
    sysfs.add_interface("lo", LOOPBACK, physical=False)
    sysfs.add_interface("bond0", physical=False)
    assert [path.name for path in network_interfaces(sysfs.directory)] == ["bond0"]
    for name in ("eth0", "eth1"):
        sysfs.add_interface(name)
    assert [path.name for path in network_interfaces(sysfs.directory)] == ["eth0", "eth1"]
    assert network_interfaces(sysfs.directory / "none") == []


def test_rates_are_sums_over_interfaces_and_ports(sysfs: FakeSysfs) -> None:
    for name in ("eth0", "eth1"):
        sysfs.add_interface(name)
    for port in ("mlx5_0/ports/1", "mlx5_1/ports/1"):
        sysfs.set_port(port, 0, 0)
    counters, means = ByteCounters(sysfs.directory), Means()
    before = counters.read()
    sysfs.set_bytes("eth0", 100, 10)
    sysfs.set_bytes("eth1", 300, 30)
    sysfs.set_port("mlx5_0/ports/1", 1000, 2000)  # in units of 4 bytes
    means.add_bytes(before, counters.read(), 2.0)
    network = dict(network_received_bytes_per_s=200, network_sent_bytes_per_s=20)
    assert means.values() == network | dict(infiniband_received_bytes_per_s=2000, infiniband_sent_bytes_per_s=4000)


def test_counter_that_is_reset_or_gone_counts_nothing(sysfs: FakeSysfs) -> None:
    for name in ("eth0", "eth1", "eth2"):
        sysfs.add_interface(name)
        sysfs.set_bytes(name, 1000, 1000)
    counters, means = ByteCounters(sysfs.directory), Means()
    before = counters.read()
    sysfs.set_bytes("eth0", 1600, 1000)
    sysfs.set_bytes("eth1", 7, 7)  # its driver was loaded again
    shutil.rmtree(sysfs.directory / "class/net/eth2")
    means.add_bytes(before, counters.read(), 2.0)
    assert means.values() == dict(network_received_bytes_per_s=300, network_sent_bytes_per_s=0)


@pytest.mark.slow
def test_counters_of_a_real_interface_count_what_is_sent(tmp_path: Path) -> None:
    """Two machines that are namespaces: what one sends, the other's monitor sees."""
    report = f"""
import json, socket, subprocess, sys, threading, torch
from pathlib import Path
from megalite.training.monitoring.hardware_monitor import HardwareMonitor, network_interfaces
sysfs = Path({str(tmp_path / "sys")!r})
sysfs.mkdir()
subprocess.run(["mount", "-t", "sysfs", "sysfs", str(sysfs)], check=True)
server = socket.create_server(("10.77.0.2", 4000))
monitor = HardwareMonitor(torch.device("cpu"), interval_s=0.05, sysfs=sysfs)
monitor.start()
print("ready", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 16):
    pass
threading.Event().wait(0.2)
monitor.close()
values, seconds = monitor.totals(), monitor._total._seconds
received = values["network_received_bytes_per_s"] * seconds
sent = values["network_sent_bytes_per_s"] * seconds
print(json.dumps([[path.name for path in network_interfaces(sysfs)], received, sent]), flush=True)
"""
    send = f"import socket; socket.create_connection(('10.77.0.2', 4000)).sendall(bytes({SENT_BYTES}))"
    try:
        nodes = two_nodes(tmp_path)
        with nodes as (sender, receiver):
            program = receiver.start([sys.executable, "-c", report])
            assert wait_until(lambda: "ready" in program.output), program.output
            sender.start([sys.executable, "-c", send]).wait(30)
            program.wait(30)
    except NamespaceError as error:
        pytest.skip(f"no namespaces here: {error}")
    interfaces, received, sent = json.loads(program.output.splitlines()[-1])
    assert interfaces == ["wire0"]
    assert SENT_BYTES < received < 1.05 * SENT_BYTES  # with headers
    assert 0 < sent < 0.05 * SENT_BYTES  # acknowledgements


# ---- the thread
def test_log_line_gets_the_means_since_the_last_one(monkeypatch: pytest.MonkeyPatch, sysfs: FakeSysfs) -> None:
    values = iter([0.2, 0.4, 0.9])
    usage = {"gpu_busy": lambda: next(values), "gpu_memory": lambda: 1 / 0}  # the second is not supported
    monkeypatch.setattr(hardware_monitor, "GpuMonitor", lambda device: type("Gpu", (), {"usage": usage}))
    monitor = HardwareMonitor(CPU, sysfs=sysfs.directory)
    waits = iter([False, False, True, False, True])
    monkeypatch.setattr(monitor._closed, "wait", lambda timeout: next(waits))
    monitor._run()
    assert monitor.take_recent() == {"gpu_busy": pytest.approx(0.3)}
    assert monitor.take_recent() == {}
    monitor._run()
    assert monitor.take_recent() == {"gpu_busy": 0.9}
    assert monitor.totals() == {"gpu_busy": pytest.approx(0.5)}


def test_driver_that_never_answers_delays_nothing(monkeypatch: pytest.MonkeyPatch, sysfs: FakeSysfs) -> None:
    release, called = threading.Event(), threading.Event()

    def answer() -> float:
        called.set()
        release.wait(60)
        return 1.0

    gpu = type("Gpu", (), {"usage": {"gpu_busy": answer}})
    monkeypatch.setattr(hardware_monitor, "GpuMonitor", lambda device: gpu)
    monkeypatch.setattr(hardware_monitor, "CLOSE_TIMEOUT_S", 0.05)
    monitor = HardwareMonitor(CPU, interval_s=0.001, sysfs=sysfs.directory)
    monitor.start()
    assert called.wait(20)
    start = time.monotonic()
    assert monitor.take_recent() == {} == monitor.totals()
    monitor.close()
    assert time.monotonic() - start < 5 and monitor._thread is not None and monitor._thread.is_alive()
    release.set()


# ---- the driver
@pytest.mark.presubmit
@pytest.mark.parametrize(("options", "gpu_memory"), [(["-DVERSION_2"], 30 / 80), ([], 32 / 80)], ids=["new", "old"])
def test_use_of_a_gpu_is_read_through_the_package(tmp_path: Path, options: list[str], gpu_memory: float) -> None:
    """NVIDIA's package loads a library in place of the driver's; an old driver has only version 1 of the memory."""
    compiler = shutil.which("cc")
    if find_spec("pynvml") is None or compiler is None:
        pytest.skip("needs nvidia-ml-py and a C compiler")
    (source := tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", *options, "-o", library, source], check=True, timeout=60)
    env = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    result = programs.run_python("-c", READ_USAGE, timeout=100, check=True, env=env)
    assert json.loads(result.stdout) == {"gpu_busy": 0.75, "gpu_memory": gpu_memory}


# ---- whole runs
@pytest.mark.presubmit
def test_run_writes_the_use_of_its_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sysfs: FakeSysfs) -> None:
    """All places have the rate of a counter that grows by 1 MB/s, and without counters none has one."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sysfs.add_interface("eth0")
    start = time.monotonic()
    read = hardware_monitor._read_text

    def read_growing(path: Path) -> str:
        return str(int(1e6 * (time.monotonic() - start))) if path.name == "rx_bytes" else read(path)

    monkeypatch.setattr(hardware_monitor, "_read_text", read_growing)
    fast = functools.partial(HardwareMonitor, interval_s=0.001, sysfs=sysfs.directory)
    monkeypatch.setattr("megalite.training.monitoring.monitors.HardwareMonitor", fast)
    run_dir, board = tmp_path / "run", tmp_path / "board"
    flags = f"--train-iters 4 --log-interval 2 --run-dir {run_dir} --tensorboard-dir {board}"
    assert pretrain(config_from([*SMALL_RUN, *flags.split()])) == ExitCode.DONE
    received, sent = (f"hardware/network_{name}_bytes_per_s" for name in ("received", "sent"))
    rows = [row for row in load_json_lines(run_dir / "metrics.jsonl") if "train/loss" in row]
    assert all(0.2e6 < row[received] < 5e6 and row[sent] == 0 for row in rows)
    report = json.loads((run_dir / "report.json").read_text())
    assert 0.2e6 < report["hardware"]["network_received_bytes_per_s"] < 5e6
    assert "hardware    " in (log := (run_dir / "log.txt").read_text()) and " B/s received" in log
    (events := EventAccumulator(str(board))).Reload()
    assert [event.value for event in events.Scalars(received)] == pytest.approx([row[received] for row in rows])
    shutil.rmtree(sysfs.directory)
    assert pretrain(config_from([*SMALL_RUN, *f"--train-iters 2 --run-dir {tmp_path / 'none'}".split()])) == 0
    assert not any(
        key.startswith("hardware") for row in load_json_lines(tmp_path / "none/metrics.jsonl") for key in row
    )
    assert json.loads((tmp_path / "none/report.json").read_text())["hardware"] == {}
