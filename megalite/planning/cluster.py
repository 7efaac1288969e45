"""Devices, their peak rates and the shares that work reaches, nodes and links: of devices.toml, or of a TOML file.

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

Dense peak rates, the denominator of MFU, are from the vendors' data sheets. A CPU's is measured with a short matmul; an
unknown card has none (MFU n/a) unless --peak-tflops gives it, because a wrong one would give an MFU that looks right.
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

GB, GIB, US = 1e9, 2**30, 1e-6
REPETITIONS = 8  # of each size of a matmul, because the system may interrupt some
TABLE = load_table(__file__, "devices")
PEAKS: Mapping[str, Mapping[str, float]] = TABLE["peaks"]  # words of a device's name -> dtype -> TFLOP/s
# words in the names of parts of a card, or of cards at a lower clock, that contain the card's name
SLOWER_VARIANTS = ("MIG", "Laptop", "Max-Q")

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class PeakRate:
    """`tflops` None: unknown. `source`: where the figure is from, for the plan. `too_low`: why, if a run is faster."""

    tflops: float | None
    source: str
    too_low: str = "the table's figure is too low for this device; give --peak-tflops"


def lookup_peak(device_name: str, dtype: torch.dtype) -> PeakRate:
    """The table's entry for a device name as torch reports it.

    >>> peak = lookup_peak("NVIDIA A100-SXM4-80GB", torch.bfloat16)
    >>> peak.tflops, peak.source
    (312.0, 'NVIDIA A100-SXM4-80GB bf16 dense')
    """
    unknown = PeakRate(None, f"{device_name} is not in the table; give --peak-tflops")
    if any(_contains_words(device_name, words) for words in SLOWER_VARIANTS):
        return unknown
    for words, rates in PEAKS.items():
        if _contains_words(device_name, words):
            if (tflops := rates.get(DTYPE_NAMES[dtype])) is None:
                return PeakRate(None, f"no {DTYPE_NAMES[dtype]} peak is known for {device_name}; give --peak-tflops")
            return PeakRate(tflops, f"{device_name} {DTYPE_NAMES[dtype]} dense")
    return unknown


def _contains_words(device_name: str, words: str) -> bool:
    """Whether the name contains `words`, as whole words: an RTX A4000 is no A40."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(words)}(?![A-Za-z0-9])", device_name, re.IGNORECASE) is not None


def measure_cpu_peak(
    dtype: torch.dtype, seconds: float = 0.25, local_ranks: int = 1, clock: Callable[[], float] = time.perf_counter
) -> PeakRate:
    """The best rate of square matmuls, as layers do them (kernels/matmul.py), on this process's threads, in TFLOP/s. It
    takes about `seconds`, but always REPETITIONS matmuls.

    The size doubles while the next one fits into the time. Large ones are faster if the dtype has fast units. If
    `local_ranks` processes have more threads than cores, each gets its share of the rate.
    """
    best, size, end = 0.0, 128, clock() + seconds
    while True:
        a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
        out = torch.empty_like(a)
        mm_(out, a, b)  # the first call makes the kernel
        fastest, runs, now = math.inf, 0, clock()
        bigger = False
        while runs < REPETITIONS or (not bigger and now < end):
            start = clock()
            mm_(out, a, b)
            now = clock()
            fastest, runs = min(fastest, now - start), runs + 1
            # the next size is 8 times the work, REPETITIONS + 1 times
            bigger = size < 1024 and now + 8 * fastest * (REPETITIONS + 1) < end
        best = max(best, 2 * size**3 / fastest)
        if not bigger:
            break
        size *= 2
    threads = torch.get_num_threads()
    share = min(1.0, cpu_count() / (local_ranks * threads))
    where = f"{threads} thread{'s' * (threads > 1)}" + (f" on {share:.2g} of their cores" if share < 1 else "")
    too_low = "it was measured when the run started, while the machine was busier than now; give --peak-tflops"
    return PeakRate(best * share / 1e12, f"cpu {DTYPE_NAMES[dtype]}, measured matmul, {where}", too_low)


def find_peak(
    device: torch.device, dtype: torch.dtype, override_tflops: float | None = None, local_ranks: int = 1
) -> PeakRate:
    """The peak of one device, or of one of the `local_ranks` processes that share this machine's CPU."""
    if override_tflops is not None:
        return PeakRate(override_tflops, "given by --peak-tflops", "--peak-tflops is too low for this device")
    if device.type == "cuda":
        return lookup_peak(torch.cuda.get_device_name(device), dtype)
    return measure_cpu_peak(dtype, local_ranks=local_ranks)


_measured = functools.cache(measure_cpu_peak)


@dataclass(frozen=True)
class Link:
    """A message of n bytes takes `latency_s` + n / `bytes_per_s`, the rate per device and direction that large
    collectives reach. `nominal_bytes_per_s`: the vendor's figure."""

    latency_s: float
    bytes_per_s: float
    nominal_bytes_per_s: float = 0.0

    def seconds(self, n: float) -> float:
        return self.latency_s + n / self.bytes_per_s


@dataclass(frozen=True)
class Device:
    """vendor_name    the name that torch reports, by which `lookup_peak` finds the peak
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

    def peak_tflops(self, dtype: torch.dtype) -> float:
        """Dense rate, accumulating in fp32. Raises ValueError if the device has no known peak for `dtype`."""
        if (given := self.peaks.get(DTYPE_NAMES[dtype])) is not None:
            return given
        on_cpu = self.name == "cpu"
        known = _measured(dtype, local_ranks=self.local_ranks) if on_cpu else lookup_peak(self.vendor_name, dtype)
        if (peak := known.tflops) is None:
            names = [name for other, name in DTYPE_NAMES.items() if lookup_peak(self.vendor_name, other).tflops]
            remedy = f"train in {' or '.join(names)}" if names else "give peak_tflops in the cluster's file"
            raise ValueError(f"device={self.name} has no known {DTYPE_NAMES[dtype]} peak; {remedy}")
        return peak


@dataclass(frozen=True)
class Cluster:
    """`intra_node`: the link within a node; `inter_node`: between nodes, per device, because each has a network card or
    a share."""

    device: Device
    devices_per_node: int
    num_nodes: int
    intra_node: Link
    inter_node: Link

    @property
    def world(self) -> int:
        return self.devices_per_node * self.num_nodes


def _link(label_gb_per_s: float, reached: float, latency_us: float) -> Link:
    """`reached`: the share of the label that large messages reach."""
    return Link(latency_us * US, label_gb_per_s * reached * GB, label_gb_per_s * GB)


def _device(name: str, known: Mapping[str, Any]) -> Device:
    """One of the table, or of one's own. Where no memory is given, it is this machine's."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = int(known["memory_gib"] * GIB) if "memory_gib" in known else machine
    rate, price, peaks = known["memory_gb_per_s"] * GB, known.get("price_per_hour", 0.0), known.get("peak_tflops", {})
    return Device(name, known.get("vendor_name", name), memory, rate, price, peaks)


# name -> device, devices per node (0: any number), links within and between nodes
DEVICES: Mapping[str, tuple[Device, int, Link, Link]] = MappingProxyType(
    {
        name: (_device(name, known), known["per_node"], _link(**known["inside"]), _link(**known["between"]))
        for name, known in TABLE["devices"].items()
    }
)


def make_cluster(device: str, num_devices: int, devices_per_node: int | None = None) -> Cluster:
    """A cluster of `num_devices` devices of the table. Raises ValueError, `name=value breaks rule; remedy`.

    >>> h100s = make_cluster("h100", 16)
    >>> h100s.num_nodes, h100s.devices_per_node, h100s.intra_node.bytes_per_s / 1e9, h100s.inter_node.bytes_per_s / 1e9
    (2, 8, 360.0, 44.0)
    """
    if device not in DEVICES:
        raise ValueError(f"device={device} is not in the table; give one of {', '.join(DEVICES)}, or a TOML file")
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices} is not positive; a cluster has at least 1")
    model, default_size, intra_node, inter_node = DEVICES[device]
    size = devices_per_node if devices_per_node is not None else min(default_size or num_devices, num_devices)
    if size < 1:
        raise ValueError(f"per_node={size} is not positive; a node has at least 1 device")
    if num_devices % size:
        raise ValueError(f"num_devices={num_devices} is not a multiple of per_node={size}; give whole nodes")
    if device == "cpu":
        model = dataclasses.replace(model, memory_bytes=model.memory_bytes // size, local_ranks=size)
    return Cluster(model, size, num_devices // size, intra_node, inter_node)


def read_cluster(path: Path) -> Cluster:
    """Raises ValueError with everything that is wrong with the file; TextFileError if it cannot be read."""
    text = read_small_text(path, "a TOML file")
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    if problems := _problems(tables):
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
    device = tables.get("device", "h100")
    own = isinstance(device, dict)
    name = device["name"] if own else device
    name = name if name in DEVICES else "h100"
    devices_per_node = tables.get("per_node") or DEVICES[name][1] or 1
    base = make_cluster(name, devices_per_node * tables.get("nodes", 1), devices_per_node)
    return dataclasses.replace(
        base,
        device=_device(device["name"], device) if own else base.device,
        intra_node=_link_from_table(tables.get("inside", {}), base.intra_node),
        inter_node=_link_from_table(tables.get("between", {}), base.inter_node),
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


# kinds of values: the test of one, and what another one is not
POSITIVE, POSITIVE_INT = (
    (_is_number, "a number above 0"),
    (lambda x: type(x) is int and x > 0, "a whole number above 0"),
)
STRING = (lambda x: isinstance(x, str), "a string; write it in quotes")
SECTION = (lambda x: isinstance(x, dict), "a table; write [inside] or [between]")
RATES = (
    lambda x: isinstance(x, dict) and {*x} <= {*DTYPE_NAMES.values()} and all(map(_is_number, x.values())),
    f"a table of numbers above 0 of {', '.join(DTYPE_NAMES.values())}, as {{ bf16 = 500 }}",
)
DEVICE = (
    lambda x: isinstance(x, dict) or x in [*DEVICES],
    f"in the table; give one of {', '.join(DEVICES)}, or a table [device]",
)
LINK, SIZE = {"gb_per_s": POSITIVE, "latency_us": POSITIVE}, {"memory_gib": POSITIVE, "memory_gb_per_s": POSITIVE}
SCHEMA: Mapping[str, Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "": {"device": DEVICE, "nodes": POSITIVE_INT, "per_node": POSITIVE_INT, "inside": SECTION, "between": SECTION},
    "device": {"name": STRING, **SIZE, "price_per_hour": POSITIVE, "peak_tflops": RATES},
    "inside": LINK,
    "between": LINK,
}


def _problems(tables: dict[str, Any]) -> list[str]:
    """Everything that is wrong with a file's tables."""
    problems = []
    for section, keys in SCHEMA.items():
        given, place = tables.get(section, {}) if section else tables, f"{section}." * bool(section)
        if isinstance(given, dict):
            known = ((key, given[key], *keys[key]) for key in keys if key in given)
            problems += [
                f"{place}{key}: no such key; there are {', '.join(keys)}" for key in sorted(given.keys() - keys)
            ]
            problems += [f"{place}{key}={value!r} is not {what}" for key, value, fits, what in known if not fits(value)]
    if isinstance(own := tables.get("device"), dict):
        missing = (key for key in ("name", *SIZE) if key not in own)
        problems += [f"device.{key} is missing; a device of your own needs it" for key in missing]
    return problems


def _link_from_table(given: dict[str, Any], default: Link) -> Link:
    rate = given["gb_per_s"] * GB if "gb_per_s" in given else default.bytes_per_s
    latency = given["latency_us"] * US if "latency_us" in given else default.latency_s
    return Link(latency, rate, rate if "gb_per_s" in given else default.nominal_bytes_per_s)


@dataclass(frozen=True)
class DeviceProfile:
    """The speed of each kind of work on a device, by default (devices.toml) or calibrated. Shares are of its peaks.

    matmul         large matmuls, sustained; `head`: head and loss together
    tiles          number of 128 x 128 tiles of a result that fill the device; with fewer a matmul is slower by as much
    attention      forward and backward of very long sequences; `attention_half`: keys at which half of it is reached
    fused          whether attention keeps no scores in memory; otherwise all S x S are written and read
    memory         share of the memory's rate that elementwise kernels and the optimizer reach
    sums           share of the time of reading and writing the gradients' sums that shows in a weight gradient
    kernel_s       seconds of any kernel on the device beyond its work; `dispatch_s`: of the host, each launch
    contention     share of a collective's time by which it slows down a matmul that it hides behind
    step_s         seconds of any step beyond all that is counted
    device         the device of the table where it was measured; "": a default
    blocks         calibrated seconds of F, B and W of the parts of a stage, for layers of this `shape` and their ends
    message, collective    calibrated links; None: the cluster's
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
        for link in filter(None, (values["message"], values["collective"])):
            link["label"] = link.pop("nominal_bytes_per_s")  # the key in the file
        path.write_text(json.dumps(values, indent=1) + "\n")


def read_profile(path: Path) -> DeviceProfile:
    """Raises ValueError if the file is not a profile; TextFileError if it cannot be read."""
    text = read_small_text(path, "a profile, as tools/plan.py calibrate --out makes one")
    try:
        return _profile(json.loads(text))
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
        remedy = f"make one with: tools/plan.py calibrate --out {path}"
        raise ValueError(f"{path} is not a profile ({error}); {remedy}") from error


def _link_from_profile(latency_s: float, bytes_per_s: float, label: float = 0.0) -> Link:
    return Link(latency_s, bytes_per_s, label)


def _profile(values: dict[str, Any]) -> DeviceProfile:
    """Raises any of the errors above where these are no values of a profile."""
    links = {k: _link_from_profile(**values[k]) for k in ("message", "collective") if values.get(k)}
    pairs = {k: tuple(map(float, values[k])) for k in ("attention", "attention_half")}
    blocks = {name: tuple(map(float, times)) for name, times in values["blocks"].items()}
    if any(len(pair) != 2 for pair in pairs.values()) or any(len(times) != 3 for times in blocks.values()):
        raise ValueError("a list has the wrong length")
    profile = DeviceProfile(**{**values, **links, **pairs, "blocks": blocks})
    shares = (
        profile.matmul,
        profile.head,
        profile.memory,
        *profile.attention,
        *(link.bytes_per_s for link in links.values()),
    )
    amounts = (profile.kernel_s, profile.dispatch_s, profile.contention, profile.step_s, profile.sums, profile.tiles)
    times = (*amounts, *profile.attention_half, *(t for block in blocks.values() for t in block))
    if not all(0 < n < math.inf for n in shares) or not all(0 <= n < math.inf for n in times):
        raise ValueError("a share or rate is not above 0, or a time is below 0")
    return profile


DEFAULTS: Mapping[str, DeviceProfile] = MappingProxyType(
    {name: _profile({"blocks": {}, **known["profile"]}) for name, known in TABLE["devices"].items()}
)


def default_profile(device: str) -> DeviceProfile:
    """The default of a device; the H100's for any other device, since shares differ less than peaks."""
    other = dataclasses.replace(DEFAULTS["h100"], source=f"the H100's, since {device} is unknown")
    return DEFAULTS.get(device, other)
