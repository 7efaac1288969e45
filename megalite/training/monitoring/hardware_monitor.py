"""Use of the hardware: this rank's GPU as nvidia-smi shows it, and the bytes on the network of its machine.

A daemon thread reads them every second, because a driver or a counter may answer slowly. A log line takes the means
since the last one, without waiting for the thread. What cannot be read has no value.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch

from megalite.training.monitoring.gpu_monitor import GpuMonitor, read_sensors

SAMPLE_INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 1.0  # the wait for a read in progress at the end of a run
LOOPBACK = "772"  # ARPHRD_LOOPBACK (if_arp.h)
COUNTERS = {"network": ("rx_bytes", "tx_bytes"), "infiniband": ("port_rcv_data", "port_xmit_data")}
INFINIBAND_UNIT_BYTES = 4  # their counters are divided by 4 (Linux: sysfs-class-infiniband)
FORMATS = {
    "gpu_busy": "GPU busy {:.1%} of the time",
    "gpu_memory": "GPU memory {:.1%} in use",
    "network_received_bytes_per_s": "network {:.3g} B/s received",
    "network_sent_bytes_per_s": "{:.3g} B/s sent",
    "infiniband_received_bytes_per_s": "InfiniBand {:.3g} B/s received",
    "infiniband_sent_bytes_per_s": "{:.3g} B/s sent",
}


def network_interfaces(sysfs: Path) -> list[Path]:
    """Return the interfaces whose bytes count: the physical ones, or in a container without any, all but loopback.

    A bond, a bridge or a virtual interface of the host carries bytes that a physical one carries, too.

    Args:
        sysfs: /sys.
    """
    try:
        interfaces = sorted((sysfs / "class/net").iterdir())
    except OSError:
        return []
    physical = [interface for interface in interfaces if (interface / "device").exists()]
    return physical or [interface for interface in interfaces if _read_text(interface / "type") != LOOPBACK]


class ByteCounters:
    """The bytes that this machine has received and sent, over network interfaces and over InfiniBand.

    RDMA traffic is not counted by network interfaces, but by the ports of InfiniBand (RoCE included).
    """

    def __init__(self, sysfs: Path = Path("/sys")):
        self._files: list[tuple[str, Path, int]] = []  # (name, file, bytes per unit)
        directories = {
            "network": [interface / "statistics" for interface in network_interfaces(sysfs)],
            "infiniband": sorted((sysfs / "class/infiniband").glob("*/ports/*/counters")),
        }
        for network, (received, sent) in COUNTERS.items():
            unit_bytes = INFINIBAND_UNIT_BYTES if network == "infiniband" else 1
            for directory in directories[network]:
                self._files.append((f"{network}_received", directory / received, unit_bytes))
                self._files.append((f"{network}_sent", directory / sent, unit_bytes))

    def read(self) -> dict[str, int]:
        """Return the bytes since the machine started, by file; without files that cannot be read."""
        totals = {}
        for name, path, unit_bytes in self._files:
            with contextlib.suppress(ValueError):
                totals[f"{name} {path}"] = unit_bytes * int(_read_text(path))
        return totals


class Means:
    """Means over time: of sampled values, and of rates from counters."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._num_samples: dict[str, int] = defaultdict(int)
        self._bytes: dict[str, int] = defaultdict(int)
        self._seconds = 0.0

    def add_sample(self, values: Mapping[str, float]) -> None:
        """Add a sample of values by name."""
        for name, value in values.items():
            self._sums[name] += value
            self._num_samples[name] += 1

    def add_bytes(self, before: Mapping[str, int], now: Mapping[str, int], seconds: float) -> None:
        """Add what the counters have counted in `seconds`; one that has gone backwards was reset and adds nothing."""
        self._seconds += seconds
        for key in before.keys() & now.keys():
            self._bytes[key.partition(" ")[0]] += max(0, now[key] - before[key])

    def values(self) -> dict[str, float]:
        """Return the means by name; empty without a sample."""
        means = {name: self._sums[name] / count for name, count in self._num_samples.items()}
        if self._seconds:
            means |= {f"{name}_bytes_per_s": size / self._seconds for name, size in self._bytes.items()}
        return {name: means[name] for name in FORMATS if name in means}


class HardwareMonitor:
    """The monitor of this rank's GPU and of its machine's network, from `start` to `close`.

    Args:
        interval_s: Seconds between two reads.
        sysfs: /sys.
    """

    def __init__(self, device: torch.device, interval_s: float = SAMPLE_INTERVAL_S, sysfs: Path = Path("/sys")):
        self._device = device
        self._interval_s = interval_s
        self._sysfs = sysfs
        self._recent, self._total = Means(), Means()
        self._lock = threading.Lock()  # of the means; not held during a read
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to read."""
        self._thread = threading.Thread(target=self._run, name="hardware monitor", daemon=True)
        self._thread.start()

    def take_recent(self) -> dict[str, float]:
        """Return the means since the last call by name; empty if nothing was read since. Never waits for a read."""
        with self._lock:
            recent, self._recent = self._recent, Means()
        return recent.values()

    def totals(self) -> dict[str, float]:
        """Return the means since `start` by name; empty if nothing was read."""
        with self._lock:
            return self._total.values()

    def close(self) -> None:
        """Stop reading."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        gpu = GpuMonitor(self._device)
        counters = ByteCounters(self._sysfs)
        before, time_before = counters.read(), time.monotonic()
        while not self._closed.wait(self._interval_s):
            sample = read_sensors(gpu.usage)
            now, time_now = counters.read(), time.monotonic()
            with self._lock:
                for means in (self._recent, self._total):
                    means.add_sample(sample)
                    means.add_bytes(before, now, time_now - time_before)
            before, time_before = now, time_now


def describe_hardware(values: Mapping[str, float]) -> str:
    """Return the values of a hardware monitor as one line."""
    return ", ".join(text.format(values[name]) for name, text in FORMATS.items() if name in values)


def _read_text(path: Path) -> str:
    """Return the content of a file of sysfs, "" if it cannot be read, for example because the interface is gone."""
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeError):
        return ""
