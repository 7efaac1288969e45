"""A user's description of a cluster, a TOML file such as this one.

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

A file's sections and keys are all optional. They are fields of dataclasses, read as the options of a run are: a number
whose default is None must be above 0.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from megalite.common.text_file import read_small_text
from megalite.config.option import convert_value, execution, option_spec
from megalite.planning.cluster import DEVICES, GB, GIB, US, Cluster, Device, Link, make_cluster

T = TypeVar("T")


@dataclass(frozen=True)
class PeakSection:
    """The table peak_tflops of a device of the user's own: dense rates in TFLOP/s."""

    bf16: float | None = execution(None, help="TFLOP/s in bf16")
    fp16: float | None = execution(None, help="TFLOP/s in fp16")
    fp32: float | None = execution(None, help="TFLOP/s in fp32")
    fp64: float | None = execution(None, help="TFLOP/s in fp64")


@dataclass(frozen=True)
class DeviceSection:
    """The section of a device of the user's own."""

    name: str = execution("", required=True, help="a name")
    memory_gib: float | None = execution(None, required=True, help="its memory in GiB")
    memory_gb_per_s: float | None = execution(None, required=True, help="the rate of its own memory, 10^9 bytes/s")
    price_per_hour: float | None = execution(None, help="US dollars")
    peak_tflops: PeakSection = field(default_factory=PeakSection)

    def device(self) -> Device:
        assert self.memory_gib is not None and self.memory_gb_per_s is not None
        peaks = {dtype: tflops for dtype, tflops in dataclasses.asdict(self.peak_tflops).items() if tflops is not None}
        return Device(
            name=self.name,
            vendor_name=self.name,
            memory_bytes=int(self.memory_gib * GIB),
            memory_bytes_per_s=self.memory_gb_per_s * GB,
            price_per_hour=self.price_per_hour or 0.0,
            peaks=peaks,
        )


@dataclass(frozen=True)
class LinkSection:
    """The section of a link."""

    gb_per_s: float | None = execution(None, help="10^9 bytes/s, per device, in one direction")
    latency_us: float | None = execution(None, help="microseconds of an empty message")

    def link(self, default: Link) -> Link:
        """Return the link, with missing values from `default`."""
        latency_s = default.latency_s if self.latency_us is None else self.latency_us * US
        if self.gb_per_s is None:
            return dataclasses.replace(default, latency_s=latency_s)
        bytes_per_s = self.gb_per_s * GB
        return Link(latency_s, bytes_per_s, bytes_per_s)


@dataclass(frozen=True)
class ClusterFile:
    """The keys of a file, without `device`, which is a name or a section."""

    nodes: int | None = execution(None, help="the number of nodes")
    per_node: int | None = execution(None, help="the number of devices of a node")
    inside: LinkSection = field(default_factory=LinkSection)
    between: LinkSection = field(default_factory=LinkSection)


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
    problems: list[str] = []
    device = tables.pop("device", "h100")
    name, own_device = "h100", None
    if isinstance(device, dict):
        own_device = _read_section(DeviceSection, device, "device", problems)
        name = own_device.name
    elif isinstance(device, str) and device in DEVICES:
        name = device
    else:
        problems.append(f"device={device!r} is not in the table; give one of {', '.join(DEVICES)}, or a table [device]")
    file = _read_section(ClusterFile, tables, "", problems)
    if problems:
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
    base_name = name if name in DEVICES else "h100"
    per_node = file.per_node or DEVICES[base_name].devices_per_node or 1
    base = make_cluster(base_name, per_node * (file.nodes or 1), per_node)
    return dataclasses.replace(
        base,
        device=base.device if own_device is None else own_device.device(),
        intra_node=file.inside.link(base.intra_node),
        inter_node=file.between.link(base.inter_node),
    )


def _read_section(cls: type[T], table: Mapping[str, Any], section: str, problems: list[str]) -> T:
    """Return a section of the file as a dataclass, and add what is wrong with it to `problems`.

    A field with a default factory is a section inside it.
    """
    prefix = f"{section}." if section else ""
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    keys = fields if section else ("device", *fields)
    problems += [f"{prefix}{key}: no such key; there are {', '.join(keys)}" for key in sorted(table.keys() - fields)]
    values = {}
    for name, f in fields.items():
        value = table.get(name)
        if f.default_factory is not MISSING:
            if value is None:
                continue
            if isinstance(value, dict):
                values[name] = _read_section(type(f.default_factory()), value, f"{prefix}{name}", problems)
            else:
                problems.append(f"{prefix}{name}={value!r} is not a table; write [{prefix}{name}]")
        elif value is None:
            if option_spec(f).required:
                problems.append(f"{prefix}{name} is missing; a device of your own needs {option_spec(f).help}")
        else:
            try:
                values[name] = convert_value(f, value)
                if reason := option_spec(f).range_error(values[name]):
                    problems.append(f"{prefix}{name}={value} {reason}")
            except ValueError as error:
                problems.append(f"{prefix}{error}")
    return cls(**values)
