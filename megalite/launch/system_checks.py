"""Checks whether this machine can start a run, and what would slow it down.

Each check of packages, clocks, variables, network or memory gives a line that is ok, a warning or bad, with a remedy.
No check needs a process group, or anything that a damaged installation may lack.
"""

import contextlib
import ctypes
import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from megalite.common import environment
from megalite.common.optional_packages import missing_package_message
from megalite.common.tables import load_table
from megalite.config.env_overrides import env_problems
from megalite.launch.local_launcher import cpu_count
from megalite.launch.rank_info import LaunchError, read_environment
from megalite.launch.rendezvous import RendezvousError, interface_for_others, interfaces

OK, WARN, BAD = "ok", "warn", "bad"
_TABLE = load_table(__file__, "system_checks")
VARIABLES = _TABLE["variable"]
PACKAGES = _TABLE["packages"]
CPU_VARIABLES = ("GLOO_", "TORCH_DISTRIBUTED_")  # prefixes of variables that also matter without a GPU
GIB, MIB = 2**30, 2**20
MIN_SHM_BYTES = GIB  # NCCL needs this much shared memory
MIN_OPEN_FILES = 4096  # many data files need this many
# an address for documentation (RFC 5737), to which nothing is sent, and torchrun's port
_PUBLIC_ADDRESS = ("192.0.2.1", 29500)
TIME_ERROR = 5  # result of adjtimex: the clock is not synchronized


class CheckResult(NamedTuple):
    """The result of one check."""

    status: str
    subject: str
    message: str
    remedy: str = ""


def result_if(subject: str, good: bool, message: str, remedy: str, status: str = WARN) -> CheckResult:
    """Return an ok result if `good`, otherwise one with `status` and the remedy."""
    return CheckResult(OK, subject, message) if good else CheckResult(status, subject, message, remedy)


def check_packages() -> Iterator[CheckResult]:
    """Check the versions of Python and of the packages."""
    yield CheckResult(OK, "python", f"{platform.python_version()} on {platform.platform()}")
    requirements = list[str]()
    with contextlib.suppress(metadata.PackageNotFoundError):  # a clone has no metadata with the required versions
        requirements = metadata.requires("megalite") or []
    matches = [re.match(r"([\w-]+)\s*>=\s*([\d.]+)", text) for text in requirements]
    min_versions = {match[1]: match[2] for match in matches if match}
    for name, (purpose, is_core) in PACKAGES.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield result_if(name, not is_core, f"not installed: {missing_package_message(purpose, name)}", "", BAD)
            continue
        installed = _version_numbers(version)
        required = _version_numbers(min_versions.get(name, "0"))
        remedy = f"{min_versions.get(name)} or newer is needed: pip install --upgrade {name}"
        yield result_if(name, installed >= required, version, remedy, BAD if is_core else WARN)


def _version_numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def check_clock() -> Iterator[CheckResult]:
    """Check the load, and whether the clock is synchronized."""
    load, num_cores = os.getloadavg()[0], cpu_count()
    yield result_if(
        "clocks", load <= num_cores, f"load {load:.1f} on {num_cores} cores", "measurements are less reliable now"
    )
    remedy = "run an NTP client: the logs of several machines are put in order by their times"
    with contextlib.suppress(OSError, AttributeError):  # another C library
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
        message = "the time is not synchronized" if state == TIME_ERROR else "the time is synchronized"
        yield result_if("clocks", state != TIME_ERROR, message, remedy)


def variable_problems(has_gpus: bool = True, has_other_nodes: bool = True) -> Iterator[tuple[str, str]]:
    """Yield (setting and its effect, remedy) for each variable of VARIABLES whose value slows a run down or breaks it.

    Args:
        has_gpus: also for variables that matter only to GPUs.
        has_other_nodes: also for variables that matter only between machines.
    """
    for row in VARIABLES:
        if row.get("nodes") and not has_other_nodes:
            continue
        for name in row["name"].split(", "):
            if not (has_gpus or name.startswith(CPU_VARIABLES)):
                continue
            setting = environment.format_set_variables([name])
            if setting and re.fullmatch(row.get("wrong", ".*"), setting.partition("=")[2]):
                yield f"{setting}: {row['does']}", row["do"]


def check_variables() -> Iterator[CheckResult]:
    """Check the environment variables of megalite, its libraries and launchers."""
    yield from (CheckResult(BAD, "variables", text) for text in env_problems())
    yield from (CheckResult(WARN, "variables", text) for text in environment.env_warnings())
    yield from (CheckResult(WARN, "variables", *problem) for problem in variable_problems())
    try:
        if (ranks := read_environment()) is not None and ranks.world_size > 1:
            message = f"{ranks.variable_values}: a run here is that rank, and waits for the others"
            yield CheckResult(WARN, "variables", message, ranks.unset_remedy)
    except LaunchError as error:
        yield CheckResult(BAD, "variables", str(error))
    settings = environment.library_variables().replace("\n", " ")
    yield CheckResult(OK, "variables", f"set: {settings}" if settings else "no variables of libraries are set")


def check_network() -> Iterator[CheckResult]:
    """Check the network interfaces, and the port of the rendezvous."""
    available, requested = interfaces(), {}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        requested[name] = value = environment.getenv(name)
        if value.isalnum() and not any(interface.startswith(value) for interface in ("lo", *available)):
            remedy = f"give one of {', '.join(available) or 'lo'}, or unset it"
            yield CheckResult(BAD, "network", f"{name}={value} is not an interface of this machine", remedy)
    # NCCL prefers InfiniBand, and takes a container's interface last
    first = min(available, key=lambda name: (not name.startswith("ib"), name.startswith("docker")), default="lo")
    try:
        gloo = interface_for_others(*_PUBLIC_ADDRESS) or f"the interface of the name {socket.gethostname()}"
        chosen = [name or default for name, default in zip(requested.values(), (gloo, first), strict=True)]
        addresses = ", ".join(f"{name} {address}" for name, address in available.items()) or "only lo"
        yield CheckResult(OK, "network", f"gloo would take {chosen[0]}, NCCL {chosen[1]}; there are {addresses}")
    except RendezvousError as error:
        yield CheckResult(WARN, "network", *str(error).split(": ", 1))
    port = environment.getenv("MASTER_PORT", str(_PUBLIC_ADDRESS[1]))
    try:
        # with SO_REUSEADDR, as a store does: connections that are closing do not prevent it
        socket.create_server(("", int(port))).close()
        yield CheckResult(OK, "network", f"the rendezvous port {port} is free")
    except (OSError, ValueError, OverflowError) as error:
        remedy = "set MASTER_PORT, or --rdzv-endpoint of torchrun, to a free one"
        yield CheckResult(WARN, "network", f"the rendezvous port {port} cannot be opened ({error})", remedy)


def check_memory() -> Iterator[CheckResult]:
    """Check free memory, shared memory and the limit of open files."""
    meminfo = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text("ascii", "replace")))
    free, total = (int(meminfo[name]) / MIB for name in ("MemAvailable", "MemTotal"))
    yield result_if("memory", free > total / 4, f"{free:.1f} of {total:.1f} GiB are free", "end what uses it")
    shared = shutil.disk_usage("/dev/shm").free
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = "give a container --shm-size=1g: NCCL, and ranks on a CPU, communicate through it"
    yield result_if("memory", shared >= MIN_SHM_BYTES, f"{shared / MIB:,.0f} MiB of /dev/shm are free", remedy)
    yield result_if(
        "memory", files >= MIN_OPEN_FILES, f"a process may open {files:,} files", f"ulimit -n {MIN_OPEN_FILES}"
    )
