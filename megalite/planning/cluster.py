"""The devices, nodes and links of a cluster, from devices.toml or from a TOML file such as this one.

    device = "h100"              # a name of the table; for another device a section [device] in place of this line
    nodes = 16
    per_node = 8                 # default: the table's

    # [device]
    # name = "mine"
    # memory_gib = 96
    # memory_gb_per_s = 4000     # rate of its own memory
    # price_per_hour = 2.5       # US dollars; peak_tflops: default by `name`, megalite/planning/devices.toml
    # peak_tflops = { bf16 = 500, fp32 = 60 }

    [inside]                     # a link within a node; [between] nodes. Each default is the table's
    gb_per_s = 360               # 10^9 bytes, per device, in one direction, that large collectives reach
    latency_us = 8

A file's sections and keys are all optional.

Dense peak rates, the denominator of MFU, are from the vendors' data sheets. A CPU's is measured with a short matmul. An
unknown GPU has none (MFU n/a) unless --peak-tflops gives it, because a wrong one would give an MFU that looks right.
"""

import dataclasses
import functools
import json
import math
import os
import re
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megalite.common.tables import load_table
from megalite.common.text_file import read_small_text
from megalite.kernels.matmul import mm_
from megalite.launch.local_launcher import cpu_count

GB = 1e9
GIB = 2**30
US = 1e-6
REPETITIONS = 8  # matmuls of each size, because the system may interrupt some of them
TABLE = load_table(__file__, "devices")
PEAKS: Mapping[str, Mapping[str, float]] = TABLE["peaks"]  # phrase in a device's name -> dtype -> TFLOP/s
# phrases in the names of partitions of a GPU, or of GPUs at a lower clock, which contain the name of the full GPU
SLOWER_VARIANTS = ("MIG", "Laptop", "Max-Q")
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class PeakRate:
    """The peak rate of a device for one dtype.

    Attributes:
        tflops: None if it is unknown.
        source: The source of the figure, for the plan.
        too_low: The likely reason, with a remedy, if a run is faster than the peak.
    """

    tflops: float | None
    source: str
    too_low: str = "the table's figure is too low for this device; give --peak-tflops"


def lookup_peak(device_name: str, dtype: torch.dtype) -> PeakRate:
    """Return the table's peak of a device, by the name that torch reports.

    >>> peak = lookup_peak("NVIDIA A100-SXM4-80GB", torch.bfloat16)
    >>> peak.tflops, peak.source
    (312.0, 'NVIDIA A100-SXM4-80GB bf16 dense')
    """
    unknown = PeakRate(None, f"{device_name} is not in the table; give --peak-tflops")
    if any(_contains_phrase(device_name, phrase) for phrase in SLOWER_VARIANTS):
        return unknown
    for phrase, rates in PEAKS.items():
        if _contains_phrase(device_name, phrase):
            tflops = rates.get(DTYPE_NAMES[dtype])
            if tflops is None:
                return PeakRate(None, f"no {DTYPE_NAMES[dtype]} peak is known for {device_name}; give --peak-tflops")
            return PeakRate(tflops, f"{device_name} {DTYPE_NAMES[dtype]} dense")
    return unknown


def _contains_phrase(device_name: str, phrase: str) -> bool:
    """Return whether the name contains `phrase` as entire words: an RTX A4000 does not contain "A40"."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(phrase)}(?![A-Za-z0-9])", device_name, re.IGNORECASE) is not None


def measure_cpu_peak(
    dtype: torch.dtype, seconds: float = 0.25, local_ranks: int = 1, clock: Callable[[], float] = time.perf_counter
) -> PeakRate:
    """Measure the best rate of square matmuls on this process's threads, with the kernel of the layers.

    The size doubles while the next one fits into the time, since large matmuls are faster if the CPU has fast units for
    the dtype. If `local_ranks` processes have more threads than there are cores, each gets its share of the rate.

    Args:
        dtype: The dtype of the matrices.
        seconds: The approximate duration; at least REPETITIONS matmuls are run.
        local_ranks: The number of processes that share this machine.
        clock: Returns the current time in seconds.
    """
    best_rate = 0.0
    size = 128
    deadline = clock() + seconds
    while True:
        a = torch.ones(size, size, dtype=dtype)
        b = torch.ones(size, size, dtype=dtype)
        out = torch.empty_like(a)
        mm_(out, a, b)  # the first call compiles the kernel
        fastest = math.inf
        num_runs = 0
        now = clock()
        next_size_fits = False
        while num_runs < REPETITIONS or (not next_size_fits and now < deadline):
            start = clock()
            mm_(out, a, b)
            now = clock()
            fastest = min(fastest, now - start)
            num_runs += 1
            # twice the size takes 8 times the work, in REPETITIONS + 1 calls
            next_size_fits = size < 1024 and now + 8 * fastest * (REPETITIONS + 1) < deadline
        best_rate = max(best_rate, 2 * size**3 / fastest)
        if not next_size_fits:
            break
        size *= 2
    num_threads = torch.get_num_threads()
    core_share = min(1.0, cpu_count() / (local_ranks * num_threads))
    threads = f"{num_threads} thread{'s' if num_threads > 1 else ''}"
    if core_share < 1:
        threads += f" on {core_share:.2g} of their cores"
    too_low = "it was measured when the run started, while the machine was busier than now; give --peak-tflops"
    return PeakRate(best_rate * core_share / 1e12, f"cpu {DTYPE_NAMES[dtype]}, measured matmul, {threads}", too_low)


def find_peak(
    device: torch.device, dtype: torch.dtype, override_tflops: float | None = None, local_ranks: int = 1
) -> PeakRate:
    """Return the peak of one device, or of one of the `local_ranks` processes that share this machine's CPU."""
    if override_tflops is not None:
        return PeakRate(override_tflops, "given by --peak-tflops", "--peak-tflops is too low for this device")
    if device.type == "cuda":
        return lookup_peak(torch.cuda.get_device_name(device), dtype)
    return measure_cpu_peak(dtype, local_ranks=local_ranks)


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
        name: The name in the table, or in the user's file.
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
    """Return a device of devices.toml or of a user's file; without a memory size it has this machine's."""
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
        peaks=table.get("peak_tflops", {}),
    )


def _node_spec(name: str, table: Mapping[str, Any]) -> NodeSpec:
    return NodeSpec(
        device=_device_from_table(name, table),
        devices_per_node=table["per_node"],
        intra_node=_link_from_spec(**table["inside"]),
        inter_node=_link_from_spec(**table["between"]),
    )


DEVICES: Mapping[str, NodeSpec] = MappingProxyType(
    {name: _node_spec(name, table) for name, table in TABLE["devices"].items()}
)


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


def read_cluster(path: Path) -> Cluster:
    """Read the cluster of a user's TOML file.

    Raises:
        ValueError: The file is wrong; the message has a line for each problem.
        TextFileError: The file cannot be read.
    """
    text = read_small_text(path, "a TOML file")
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    if problems := _problems(tables):
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
    device = tables.get("device", "h100")
    is_custom = isinstance(device, dict)
    name = device["name"] if is_custom else device
    base_name = name if name in DEVICES else "h100"
    devices_per_node = tables.get("per_node") or DEVICES[base_name].devices_per_node or 1
    base = make_cluster(base_name, devices_per_node * tables.get("nodes", 1), devices_per_node)
    return dataclasses.replace(
        base,
        device=_device_from_table(name, device) if is_custom else base.device,
        intra_node=_link_from_table(tables.get("inside", {}), base.intra_node),
        inter_node=_link_from_table(tables.get("between", {}), base.inter_node),
    )


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_positive_int(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_rate_table(value: Any) -> bool:
    return (
        isinstance(value, dict) and value.keys() <= {*DTYPE_NAMES.values()} and all(map(_is_positive, value.values()))
    )


def _is_device(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, str) and value in DEVICES)


@dataclass(frozen=True)
class ValueRule:
    """A rule for a value of a user's file.

    Attributes:
        accepts: Returns whether the value is allowed.
        requirement: What the value has to be, with the remedy, to complete "NAME=VALUE is not ...".
    """

    accepts: Callable[[Any], bool]
    requirement: str


POSITIVE = ValueRule(_is_positive, "a number above 0")
POSITIVE_INT = ValueRule(_is_positive_int, "a whole number above 0")
STRING = ValueRule(lambda value: isinstance(value, str), "a string; write it in quotes")
SECTION = ValueRule(lambda value: isinstance(value, dict), "a table; write [inside] or [between]")
RATES = ValueRule(
    _is_rate_table, f"a table of numbers above 0 of {', '.join(DTYPE_NAMES.values())}, as {{ bf16 = 500 }}"
)
DEVICE = ValueRule(_is_device, f"in the table; give one of {', '.join(DEVICES)}, or a table [device]")
SCHEMA: Mapping[str, Mapping[str, ValueRule]] = {
    "": {"device": DEVICE, "nodes": POSITIVE_INT, "per_node": POSITIVE_INT, "inside": SECTION, "between": SECTION},
    "device": {
        "name": STRING,
        "memory_gib": POSITIVE,
        "memory_gb_per_s": POSITIVE,
        "price_per_hour": POSITIVE,
        "peak_tflops": RATES,
    },
    "inside": {"gb_per_s": POSITIVE, "latency_us": POSITIVE},
    "between": {"gb_per_s": POSITIVE, "latency_us": POSITIVE},
}
REQUIRED_DEVICE_KEYS = ("name", "memory_gib", "memory_gb_per_s")


def _problems(tables: dict[str, Any]) -> list[str]:
    """Return everything that is wrong with the tables of a user's file."""
    problems = []
    for section, rules in SCHEMA.items():
        table = tables.get(section, {}) if section else tables
        if not isinstance(table, dict):
            continue
        prefix = f"{section}." if section else ""
        for key in sorted(table.keys() - rules.keys()):
            problems.append(f"{prefix}{key}: no such key; there are {', '.join(rules)}")
        for key, rule in rules.items():
            if key in table and not rule.accepts(table[key]):
                problems.append(f"{prefix}{key}={table[key]!r} is not {rule.requirement}")
    device = tables.get("device")
    if isinstance(device, dict):
        for key in REQUIRED_DEVICE_KEYS:
            if key not in device:
                problems.append(f"device.{key} is missing; a device of your own needs it")
    return problems


def _link_from_table(table: dict[str, Any], default: Link) -> Link:
    """Return a link of a user's file, with missing values from `default`."""
    latency_s = table["latency_us"] * US if "latency_us" in table else default.latency_s
    if "gb_per_s" not in table:
        return Link(latency_s, default.bytes_per_s, default.nominal_bytes_per_s)
    bytes_per_s = table["gb_per_s"] * GB
    return Link(latency_s, bytes_per_s, bytes_per_s)


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
    {name: _profile_from_json({"blocks": {}, **table["profile"]}) for name, table in TABLE["devices"].items()}
)


def default_profile(device: str) -> DeviceProfile:
    """Return the default profile of a device of the table.

    A device that is not in the table has the H100's, since the fractions differ less than the peaks.
    """
    if device in DEFAULTS:
        return DEFAULTS[device]
    return dataclasses.replace(DEFAULTS["h100"], source=f"the H100's, since {device} is unknown")
