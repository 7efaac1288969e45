"""Compares all ranks before the first step: hashes first, texts only where these differ.

    EQUAL   code, Python, torch, Triton, numpy, options, training data     else the run ends with exit code 3
    ALIKE   card, driver, NCCL, host's kernel, what a CPU multiplies in fp32, environment variables     else a warning

A rank with another option would issue other collectives than its neighbours; one with other data or another version of
the code would train another model, without a sign of it in the log.
"""

import contextlib
import hashlib
import platform
import socket
from collections import defaultdict
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

import megalite
from megalite.config import environment
from megalite.config.config_file import non_default_options
from megalite.config.options import Config
from megalite.config.plugins import plugin_hashes
from megalite.data.datasets.ledger import DataLedger
from megalite.kernels.dispatch import upcast_dtypes
from megalite.launch.rank_info import LaunchError
from megalite.parallel.comm import all_gather_strings
from megalite.parallel.mesh import Axis

MUST_MATCH = ("megalite", "python", "torch", "triton", "numpy", "options", "data")
SHOULD_MATCH = ("card", "driver", "nccl", "kernel", "in fp32", "environment")
MAX_LINES = 12  # lines of a fact
# reasons of a low clock that protect the card, not a setting of somebody (nvml.h, nvmlClocksEventReason*)
THROTTLED = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
HOST_NAME_BYTES = 64  # bytes of a host's name
Facts = dict[str, str]  # name -> text, of a line or more


def check_ranks_match(
    config: Config, ledger: DataLedger | None, world: Axis, device: torch.device
) -> tuple[list[str], list[str]]:
    """`compare` a run's machine, options and data; a single rank has nothing to compare."""
    if world.size == 1:
        return [socket.gethostname()], []
    chosen = [
        f"{name}={value!r}" for section in non_default_options(config).values() for name, value in section.items()
    ]
    chosen += [f"plugin {name}: sha256 {sha256[:16]}" for name, sha256 in plugin_hashes().items()]
    sources = [] if ledger is None else ledger.eras[-1].sources
    mine = {"options": "\n".join(chosen), "data": "\n".join(f"{s.name} {s.digest} {s.weight:g}" for s in sources)}
    return compare_facts(machine_facts(device) | mine, world, device)


def machine_facts(device: torch.device) -> Facts:
    return {
        "megalite": f"{megalite.__version__}, sources {source_code_hash()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _installed("triton", "pytorch-triton", "triton-rocm"),
        "numpy": np.__version__,
        "nccl": _installed("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
        "kernel": platform.release(),
        "in fp32": "\n".join(map(str, upcast_dtypes(device.type))),
        "environment": environment.library_variables(),
        **{name: str(fact) for name, fact in read_sensors(GpuMonitor(device).facts).items()},
    }


def source_code_hash() -> str:
    """A hash of the package's files, which also tells edited ones apart, unlike a revision."""
    root, total = Path(megalite.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


def _installed(*packages: str) -> str:
    versions = []
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return "\n".join(versions)


def compare_facts(facts: Facts, world: Axis, device: torch.device) -> tuple[list[str], list[str]]:
    """(hosts by rank, warnings); collective, one gather if all agree. Raises LaunchError if a fact of EQUAL differs."""
    names = (*MUST_MATCH, *SHOULD_MATCH)
    hashes = [hashlib.sha256(facts.get(name, "").encode()).hexdigest()[:16] for name in names]
    rows = all_gather_strings(
        "\n".join([*hashes, socket.gethostname()]), world, device, max_bytes=17 * len(names) + HOST_NAME_BYTES
    )
    *columns, hosts = (list(column) for column in zip(*(row.split("\n") for row in rows), strict=True))
    unlike: Facts = {}
    for name, column in zip(names, columns, strict=True):
        if len(set(column)) > 1:
            unlike[name] = describe(name, all_gather_strings(facts.get(name, ""), world, device), hosts)
    if wrong := [text for name, text in unlike.items() if name in MUST_MATCH]:
        raise LaunchError("\n".join(["the ranks of this run are not alike:", *wrong]))
    return hosts, list(unlike.values())


def describe(name: str, texts: list[str], hosts: list[str]) -> str:
    """The texts of all ranks, without the lines that all have.

    >>> describe("torch", ["2.13", "2.13", "2.12"], ["a", "a", "b"])
    "torch differs: '2.13' on a (rank 0 and 1 more); '2.12' on b (rank 2)"
    """
    common = set.intersection(*(set(text.splitlines()) for text in texts))
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, text in enumerate(texts):
        ranks[", ".join([line for line in text.splitlines() if line not in common][:MAX_LINES])].append(rank)
    parts = []
    for text, (first, *rest) in ranks.items():
        nodes = dict.fromkeys(hosts[rank] for rank in (first, *rest))
        who = f"{', '.join(nodes)} (rank {first}{f' and {len(rest)} more' if rest else ''})"
        parts.append(f"{repr(text) if text else 'not'} on {who}")
    return f"{name} differs: {'; '.join(parts)}"


class GpuMonitor:
    """Facts and figures of this rank's card, from NVIDIA's management library, where nvidia-ml-py is installed:
    `figures` and `facts`, a function for each. What a card does not have is absent; nothing raises or waits for it."""

    def __init__(self, device: torch.device):
        self.figures: dict[str, Callable[[], float]] = {}
        self.facts: dict[str, Callable[[], str]] = {}
        if device.type != "cuda":
            return
        uuid = f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', '')}"
        with contextlib.suppress(Exception):  # no package, no driver, or only a part of a card
            import pynvml as n  # type: ignore[import-not-found]

            n.nvmlInit()
            card, uncorrected = n.nvmlDeviceGetHandleByUUID(uuid), n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
            self.facts = {"card": lambda: n.nvmlDeviceGetName(card), "driver": n.nvmlSystemGetDriverVersion}
            self.figures = {
                "temperature_c": lambda: n.nvmlDeviceGetTemperature(card, n.NVML_TEMPERATURE_GPU),
                "power_w": lambda: n.nvmlDeviceGetPowerUsage(card) / 1000,
                "clock_mhz": lambda: n.nvmlDeviceGetClockInfo(card, n.NVML_CLOCK_SM),
                "ecc_errors": lambda: n.nvmlDeviceGetTotalEccErrors(card, uncorrected, n.NVML_VOLATILE_ECC),
                "throttled": lambda: n.nvmlDeviceGetCurrentClocksThrottleReasons(card) & sum(THROTTLED),
            }


def read_sensors(calls: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """The results of those calls that do not fail."""
    results = {}
    for name, call in calls.items():
        with contextlib.suppress(Exception):  # NVMLError: not supported by this card
            results[name] = call()
    return results
