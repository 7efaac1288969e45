"""The devices, nodes and links of a cluster, and the rates of devices, from devices.toml or calibrated."""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megalite.common.tables import load_table
from megalite.common.text_file import read_small_text
from megalite.planning.device_peaks import DTYPE_NAMES, lookup_peak, measure_cpu_peak

GB = 1e9
GIB = 2**30
US = 1e-6
TABLE = load_table(__file__, "devices")["devices"]
_cached_cpu_peak = functools.cache(measure_cpu_peak)


@dataclass(frozen=True)
class Link:
    """A link of a device in one direction, on which n bytes take `latency_s` + n / `bytes_per_s`.

    Attributes:
        latency_s: The time of an empty message.
        bytes_per_s: The bandwidth that large collectives reach.
        nominal_bytes_per_s: The bandwidth that the vendor states.
    """

    latency_s: float
    bytes_per_s: float
    nominal_bytes_per_s: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Device:
    """A GPU, or a process's share of a CPU.

    Attributes:
        name: The name in the table, or in the user's file (cluster_file.py).
        vendor_name: The name that torch reports, by which `lookup_peak` finds the peak.
        memory_bytes: The memory size that the driver reports.
        memory_bytes_per_s: The bandwidth of its memory.
        price_per_hour: US dollars; the table's prices are examples of what devices were rented for in 2026.
        peaks: dtype -> TFLOP/s, for devices that are not in the table of peaks.
        local_ranks: The number of processes that share a CPU.
    """

    name: str
    vendor_name: str
    memory_bytes: int
    memory_bytes_per_s: float
    price_per_hour: float
    peaks: Mapping[str, float] = field(default_factory=dict)
    local_ranks: int = 1

    def peak_tflops(self, dtype: torch.dtype) -> float:
        """Return the dense rate, accumulating in fp32.

        Raises:
            ValueError: The device has no known peak for `dtype`.
        """
        own_peak = self.peaks.get(DTYPE_NAMES[dtype])
        if own_peak is not None:
            return own_peak
        if self.name == "cpu":
            tflops = _cached_cpu_peak(dtype, local_ranks=self.local_ranks).tflops
        else:
            tflops = lookup_peak(self.vendor_name, dtype).tflops
        if tflops is None:
            names = [name for other, name in DTYPE_NAMES.items() if lookup_peak(self.vendor_name, other).tflops]
            remedy = f"train in {' or '.join(names)}" if names else "give peak_tflops in the cluster's file"
            raise ValueError(f"device={self.name} has no known {DTYPE_NAMES[dtype]} peak; {remedy}")
        return tflops


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices.

    Attributes:
        device: The device.
        devices_per_node: The number of devices of each node.
        num_nodes: The number of nodes.
        intra_node: The link of a device within its node.
        inter_node: The link of a device to other nodes: its NIC, or its share of one.
    """

    device: Device
    devices_per_node: int
    num_nodes: int
    intra_node: Link
    inter_node: Link

    @property
    def world(self) -> int:
        return self.devices_per_node * self.num_nodes


@dataclass(frozen=True)
class NodeSpec:
    """A device of the table in the nodes that it is usually installed in.

    Attributes:
        device: The device.
        devices_per_node: The usual number of devices of a node; 0 for any number.
        intra_node: The link of a device within its node.
        inter_node: The link of a device to other nodes.
    """

    device: Device
    devices_per_node: int
    intra_node: Link
    inter_node: Link


def _link_from_spec(nominal_gb_per_s: float, efficiency: float, latency_us: float) -> Link:
    """Return a link of the table. `efficiency` is the fraction of the nominal bandwidth that large messages reach."""
    return Link(latency_us * US, nominal_gb_per_s * efficiency * GB, nominal_gb_per_s * GB)


def _device_from_table(name: str, table: Mapping[str, Any]) -> Device:
    """Return a device of the table; without a memory size it has this machine's."""
    if "memory_gib" in table:
        memory_bytes = int(table["memory_gib"] * GIB)
    else:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device(
        name=name,
        vendor_name=table.get("vendor_name", name),
        memory_bytes=memory_bytes,
        memory_bytes_per_s=table["memory_gb_per_s"] * GB,
        price_per_hour=table.get("price_per_hour", 0.0),
    )


def _node_spec(name: str, table: Mapping[str, Any]) -> NodeSpec:
    return NodeSpec(
        device=_device_from_table(name, table),
        devices_per_node=table["per_node"],
        intra_node=_link_from_spec(**table["inside"]),
        inter_node=_link_from_spec(**table["between"]),
    )


DEVICES: Mapping[str, NodeSpec] = MappingProxyType({name: _node_spec(name, table) for name, table in TABLE.items()})


def make_cluster(device: str, num_devices: int, devices_per_node: int | None = None) -> Cluster:
    """Return a cluster of `num_devices` devices of the table.

    >>> h100s = make_cluster("h100", 16)
    >>> h100s.num_nodes, h100s.devices_per_node, h100s.intra_node.bytes_per_s / 1e9, h100s.inter_node.bytes_per_s / 1e9
    (2, 8, 360.0, 44.0)

    Raises:
        ValueError: A value is not possible, as `name=value breaks rule; remedy`.
    """
    if device not in DEVICES:
        raise ValueError(f"device={device} is not in the table; give one of {', '.join(DEVICES)}, or a TOML file")
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices} is not positive; a cluster has at least 1")
    spec = DEVICES[device]
    if devices_per_node is None:
        devices_per_node = min(spec.devices_per_node or num_devices, num_devices)
    if devices_per_node < 1:
        raise ValueError(f"per_node={devices_per_node} is not positive; a node has at least 1 device")
    if num_devices % devices_per_node:
        raise ValueError(
            f"num_devices={num_devices} is not a multiple of per_node={devices_per_node}; give whole nodes"
        )
    model = spec.device
    if device == "cpu":
        memory_bytes = model.memory_bytes // devices_per_node
        model = dataclasses.replace(model, memory_bytes=memory_bytes, local_ranks=devices_per_node)
    return Cluster(model, devices_per_node, num_devices // devices_per_node, spec.intra_node, spec.inter_node)


@dataclass(frozen=True)
class DeviceProfile:
    """The speed of each kind of work on a device, either the default of devices.toml or calibrated.

    The fields are the keys of a profile's file. Fractions are of the device's peak rates.

    Attributes:
        source: The source of the figures.
        matmul: The fraction that large matmuls sustain.
        head: The fraction that the output projection and the loss reach together.
        attention: The fractions that attention reaches for very long sequences, in forward and in backward.
        memory: The fraction of the memory bandwidth that elementwise kernels and the optimizer reach.
        attention_half: The sequence lengths at which half of `attention` is reached, in forward and in backward.
        fused: Attention keeps no scores in memory. Otherwise all S x S scores are written and read.
        tiles: The number of 128 x 128 tiles of a result that fill the device. A matmul with fewer tiles is
            proportionally slower.
        sums: The extra time of a weight gradient's matmul that adds to the gradient sums, as a fraction of the time
            that reading and writing these sums takes by itself.
        kernel_s: The time of any kernel on the device beyond its work.
        dispatch_s: The time of the host for each launch.
        contention: The fraction of a collective's time by which it slows down a matmul that overlaps with it.
        step_s: The time of any step beyond everything that is counted.
        shape: The calibration key of the run for which `blocks` were measured.
        device: The device of the table on which the profile was measured; "" for a default.
        blocks: Calibrated times of F, B and W of the parts of a stage.
        message: The calibrated link of messages; None for the cluster's.
        collective: The calibrated link of collectives; None for the cluster's.
    """

    source: str
    matmul: float
    head: float
    attention: tuple[float, float]
    memory: float
    attention_half: tuple[float, float] = (0.0, 0.0)
    fused: bool = True
    tiles: int = 0
    sums: float = 0.6
    kernel_s: float = 0.0
    dispatch_s: float = 0.0
    contention: float = 0.0
    step_s: float = 0.0
    shape: str = ""
    device: str = ""
    blocks: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    message: Link | None = None
    collective: Link | None = None

    def save(self, path: Path) -> None:
        values = dataclasses.asdict(self)
        for link in (values["message"], values["collective"]):
            if link is not None:
                link["label"] = link.pop("nominal_bytes_per_s")  # the key in the file
        path.write_text(json.dumps(values, indent=1) + "\n")


def read_profile(path: Path) -> DeviceProfile:
    """Read a calibrated profile.

    Raises:
        ValueError: The file is not a profile.
        TextFileError: The file cannot be read.
    """
    text = read_small_text(path, "a profile, as tools/plan.py calibrate --out makes one")
    try:
        return _profile_from_json(json.loads(text))
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
        remedy = f"make one with: tools/plan.py calibrate --out {path}"
        raise ValueError(f"{path} is not a profile ({error}); {remedy}") from error


def _link_from_json(latency_s: float, bytes_per_s: float, label: float = 0.0) -> Link:
    return Link(latency_s, bytes_per_s, label)


def _profile_from_json(values: dict[str, Any]) -> DeviceProfile:
    """Return the profile with these fields. Raises any of the errors that `read_profile` catches if they are wrong."""
    links = {key: _link_from_json(**values[key]) for key in ("message", "collective") if values.get(key)}
    pairs = {key: tuple(map(float, values[key])) for key in ("attention", "attention_half")}
    blocks = {name: tuple(map(float, times)) for name, times in values["blocks"].items()}
    if any(len(pair) != 2 for pair in pairs.values()) or any(len(times) != 3 for times in blocks.values()):
        raise ValueError("a list has the wrong length")
    profile = DeviceProfile(**{**values, **links, **pairs, "blocks": blocks})
    rates = [profile.matmul, profile.head, profile.memory, *profile.attention]
    rates += [link.bytes_per_s for link in links.values()]
    amounts = [profile.kernel_s, profile.dispatch_s, profile.contention, profile.step_s, profile.sums, profile.tiles]
    amounts += profile.attention_half
    for times in blocks.values():
        amounts += times
    if not all(0 < rate < math.inf for rate in rates) or not all(0 <= amount < math.inf for amount in amounts):
        raise ValueError("a share or rate is not above 0, or a time is below 0")
    return profile


DEFAULTS: Mapping[str, DeviceProfile] = MappingProxyType(
    {name: _profile_from_json({"blocks": {}, **table["profile"]}) for name, table in TABLE.items()}
)


def default_profile(device: str) -> DeviceProfile:
    """Return the default profile of a device of the table.

    A device that is not in the table has the H100's, since the fractions differ less than the peaks.
    """
    if device in DEFAULTS:
        return DEFAULTS[device]
    return dataclasses.replace(DEFAULTS["h100"], source=f"the H100's, since {device} is unknown")
