"""Devices, nodes and the links between them: those of devices.toml, or the user's own TOML file.

    device = "h100"              # a name of the table; for another device a section [device] in place of this line
    nodes = 16
    per_node = 8                 # default: the table's

    # [device]
    # name = "mine"
    # memory_gib = 96
    # memory_gb_per_s = 4000     # rate of its own memory
    # price_per_hour = 2.5       # US dollars; peak_tflops: default by `name`, megalite/plan/devices.toml
    # peak_tflops = { bf16 = 500, fp32 = 60 }

    [inside]                     # a link within a node; [between] nodes. Each default is the table's
    gb_per_s = 360               # 10^9 bytes, per device, in one direction, that large collectives reach
    latency_us = 8

A file's sections and keys are all optional.
"""

import dataclasses
import functools
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megalite.plan.peak_rates import SHORT, TABLE, measure_cpu_peak, peak_of

if TYPE_CHECKING:
    import torch

GB, GIB, US = 1e9, 2**30, 1e-6


@dataclass(frozen=True)
class Link:
    """A message of n bytes takes `latency_s` + n / `bytes_per_s`, the rate per device and direction that large
    collectives reach. `label`: the vendor's figure, bytes/s."""

    latency_s: float
    bytes_per_s: float
    label: float = 0.0

    def seconds(self, n: float) -> float:
        return self.latency_s + n / self.bytes_per_s


@dataclass(frozen=True)
class Device:
    """vendor_name    the name that torch reports; megalite/plan/peak_rates.py finds the peak by it
    memory_bytes      as the driver shows it
    price_per_hour    US dollars: an example, as rented by the hour in 2026; give your own
    peaks             dtype -> TFLOP/s, for devices that are not in the table of peaks
    local_ranks       number of processes that share a CPU
    """

    name: str
    vendor_name: str
    memory_bytes: int
    memory_bytes_per_s: float
    price_per_hour: float
    peaks: Mapping[str, float] = field(default_factory=dict)
    local_ranks: int = 1

    def peak_tflops(self, dtype: "torch.dtype") -> float:
        """Dense rate, accumulating in fp32. Raises ValueError if the device has no known peak for `dtype`."""
        if (given := self.peaks.get(SHORT[dtype])) is not None:
            return given
        if self.name == "cpu":
            return _cpu_peak(dtype, self.local_ranks)
        if (peak := peak_of(self.vendor_name, dtype).tflops) is None:
            names = [name for other, name in SHORT.items() if peak_of(self.vendor_name, other).tflops]
            remedy = f"train in {' or '.join(names)}" if names else "give peak_tflops in the cluster's file"
            raise ValueError(f"device={self.name} has no known {SHORT[dtype]} peak; {remedy}")
        return peak


@dataclass(frozen=True)
class Cluster:
    """`inside`: the link within a node; `between`: nodes, per device, because each has a network card or a share."""

    device: Device
    per_node: int
    nodes: int
    inside: Link
    between: Link

    @property
    def world(self) -> int:
        return self.per_node * self.nodes


@functools.cache
def _cpu_peak(dtype: "torch.dtype", local_ranks: int) -> float:
    measured = measure_cpu_peak(dtype, local_ranks=local_ranks).tflops
    assert measured is not None
    return measured


def _link(label_gb_per_s: float, reached: float, latency_us: float) -> Link:
    """`reached`: the share of the label that large messages reach."""
    return Link(latency_us * US, label_gb_per_s * reached * GB, label_gb_per_s * GB)


def _device(name: str, known: Mapping[str, Any]) -> Device:
    """One of the table; the memory of a CPU is this machine's."""
    mib, own = known.get("memory_mib"), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rate, price = known["memory_gb_per_s"] * GB, known["price_per_hour"]
    return Device(name, known.get("vendor_name", ""), mib * 2**20 if mib else own, rate, price)


# name -> device, devices per node (0: any number), links within and between nodes
DEVICES: Mapping[str, tuple[Device, int, Link, Link]] = MappingProxyType(
    {
        name: (_device(name, known), known["per_node"], _link(**known["inside"]), _link(**known["between"]))
        for name, known in TABLE["devices"].items()
    }
)


def cluster(device: str, num_devices: int, per_node: int | None = None) -> Cluster:
    """A cluster of `num_devices` devices of the table. Raises ValueError, `name=value breaks rule; remedy`.

    >>> h100s = cluster("h100", 16)
    >>> h100s.nodes, h100s.per_node, h100s.inside.bytes_per_s / 1e9, h100s.between.bytes_per_s / 1e9
    (2, 8, 360.0, 44.0)
    """
    if device not in DEVICES:
        raise ValueError(f"device={device} is not in the table; give one of {', '.join(DEVICES)}, or a TOML file")
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices} is not positive; a cluster has at least 1")
    model, default_size, inside, between = DEVICES[device]
    size = per_node if per_node is not None else min(default_size or num_devices, num_devices)
    if size < 1:
        raise ValueError(f"per_node={size} is not positive; a node has at least 1 device")
    if num_devices % size:
        raise ValueError(f"num_devices={num_devices} is not a multiple of per_node={size}; give whole nodes")
    if device == "cpu":
        model = dataclasses.replace(model, memory_bytes=model.memory_bytes // size, local_ranks=size)
    return Cluster(model, size, num_devices // size, inside, between)


def read_cluster(path: Path) -> Cluster:
    """Raises ValueError with everything that is wrong with the file, OSError if it cannot be read."""
    try:
        tables = tomllib.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    if problems := _problems(tables):
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
    device = tables.get("device", "h100")
    own = isinstance(device, dict)
    name = device["name"] if own else device
    name = name if name in DEVICES else "h100"
    per_node = tables.get("per_node") or DEVICES[name][1] or 1
    base = cluster(name, per_node * tables.get("nodes", 1), per_node)
    links = {side: _own_link(tables.get(side, {}), getattr(base, side)) for side in ("inside", "between")}
    return dataclasses.replace(base, device=_own_device(device) if own else base.device, **links)


NUMBERS = {
    "device": ("memory_gib", "memory_gb_per_s", "price_per_hour"),
    "inside": ("gb_per_s", "latency_us"),
    "between": ("gb_per_s", "latency_us"),
}


def _problems(tables: dict[str, Any]) -> list[str]:
    """Everything that is wrong with a file's tables."""
    problems = [
        f"{key}={tables[key]!r} is not a whole number above 0"
        for key in ("nodes", "per_node")
        if key in tables and (type(tables[key]) is not int or tables[key] < 1)
    ]
    if unknown := tables.keys() - (keys := ("device", "nodes", "per_node", "inside", "between")):
        problems.append(f"{', '.join(sorted(unknown))}: no such key; there are {', '.join(keys)}")
    device = tables.get("device", "h100")
    if not isinstance(device, dict) and (not isinstance(device, str) or device not in DEVICES):
        problems.append(f"device={device!r} is not in the table; give one of {', '.join(DEVICES)}, or a table [device]")
    for section, keys in NUMBERS.items():
        given = tables.get(section, {})
        if not isinstance(given, dict):
            problems += [f"{section}={given!r} is not a table; write [{section}]"] * (section != "device")
            continue
        other = {"name", "peak_tflops"} if section == "device" else set()
        problems += [
            f"{section}.{key}: no such key; there are {', '.join(keys)}" for key in given.keys() - other - {*keys}
        ]
        problems += [
            f"{section}.{key}={given[key]!r} is not a number above 0"
            for key in keys
            if key in given and not (type(given[key]) in (int, float) and 0 < given[key] < math.inf)
        ]
        if section == "device" and "device" in tables:
            problems += _device_problems(given)
    return problems


def _device_problems(given: dict[str, Any]) -> list[str]:
    """The problems of a table [device] beyond its numbers."""
    needed = ("name", "memory_gib", "memory_gb_per_s")
    problems = [f"device.{key} is missing; a device of your own needs it" for key in needed if key not in given]
    if not isinstance(given.get("name", ""), str):
        problems.append(f"device.name={given['name']!r} is not a string; write it in quotes")
    peaks = given.get("peak_tflops", {})
    if not isinstance(peaks, dict) or not all(type(v) in (int, float) and v > 0 for v in peaks.values()):
        problems.append(f"device.peak_tflops={peaks!r} is not a table of numbers above 0, as {{ bf16 = 500 }}")
    elif unknown := peaks.keys() - {*SHORT.values()}:
        problems.append(f"device.peak_tflops.{unknown.pop()}: no such dtype; there are {', '.join(SHORT.values())}")
    return problems


def _own_link(given: dict[str, Any], default: Link) -> Link:
    rate = given["gb_per_s"] * GB if "gb_per_s" in given else default.bytes_per_s
    latency = given["latency_us"] * US if "latency_us" in given else default.latency_s
    return Link(latency, rate, rate if "gb_per_s" in given else default.label)


def _own_device(given: dict[str, Any]) -> Device:
    memory, rate = int(given["memory_gib"] * GIB), given["memory_gb_per_s"] * GB
    price, peaks = given.get("price_per_hour", 0.0), given.get("peak_tflops", {})
    return Device(given["name"], given["name"], memory, rate, price, peaks)
