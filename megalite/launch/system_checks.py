"""What of this machine lets a run start, or slows it down: packages, clocks, variables, network and memory, each a line
that is ok, a warning or bad, with the remedy. Needs nothing that a damaged installation may lack, and no group."""

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

from megalite.common.optional_packages import missing_package_message
from megalite.common.tables import load_table
from megalite.config import environment
from megalite.launch.local_launcher import cpu_count
from megalite.launch.rank_info import LaunchError, read_environment
from megalite.launch.rendezvous import RendezvousError, interface_for_others, interfaces

OK, WARN, BAD = "ok", "warn", "bad"
VARIABLES, PACKAGES = load_table(__file__, "system_checks").values()
GIB, MIB = 2**30, 2**20
SHM, FILES = GIB, 4096  # of shared memory and open files, below which NCCL or data in many files fails
_PUBLIC_ADDRESS = (
    "192.0.2.1",
    29500,
)  # an address of another machine (RFC 5737), to which nothing is sent; torchrun's port
TIME_ERROR = 5  # of adjtimex: nobody sets this clock


class CheckResult(NamedTuple):
    status: str
    subject: str
    message: str
    remedy: str = ""


def result_if(subject: str, good: bool, message: str, remedy: str, status: str = WARN) -> CheckResult:
    """`mark`: where it is not good."""
    return CheckResult(OK, subject, message) if good else CheckResult(status, subject, message, remedy)


def check_packages() -> Iterator[CheckResult]:
    yield CheckResult(OK, "python", f"{platform.python_version()} on {platform.platform()}")
    said = list[str]()
    with contextlib.suppress(metadata.PackageNotFoundError):  # in a clone nobody says which versions are needed
        said = metadata.requires("megalite") or []
    least = {found[1]: found[2] for one in said if (found := re.match(r"([\w-]+)\s*>=\s*([\d.]+)", one))}
    for name, (what, core) in PACKAGES.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield result_if(name, not core, f"not installed: {missing_package_message(what, name)}", "", BAD)
            continue
        had, wanted = ([int(n) for n in re.findall(r"\d+", text)[:3]] for text in (version, least.get(name, "0")))
        newer = f"{least.get(name)} or newer is needed: pip install --upgrade {name}"
        yield result_if(name, had >= wanted, version, newer, BAD if core else WARN)


def check_clock() -> Iterator[CheckResult]:
    busy, n = os.getloadavg()[0], cpu_count()
    yield result_if("clocks", busy <= n, f"load {busy:.1f} on {n} cores", "figures of this machine mean less now")
    remedy = "run an NTP client: the logs of several machines are put in order by their times"
    with contextlib.suppress(OSError, AttributeError):  # another C library
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
        known = f"the time is {'not ' * (state == TIME_ERROR)}synchronised"
        yield result_if("clocks", state != TIME_ERROR, known, remedy)


def check_variables() -> Iterator[CheckResult]:
    yield from (CheckResult(BAD, "variables", text) for text in environment.env_problems())
    yield from (CheckResult(WARN, "variables", text) for text in environment.env_warnings())
    for row in VARIABLES:
        for said in filter(None, (environment.format_set_variables([name]) for name in row["name"].split(", "))):
            if re.fullmatch(row.get("wrong", ".*"), said.partition("=")[2]):
                yield CheckResult(WARN, "variables", f"{said}: {row['does']}", row["do"])
    try:
        if (ranks := read_environment()) is not None and ranks.world_size > 1:
            waits = f"{ranks.said}: a run here is that rank, and waits for the others"
            yield CheckResult(WARN, "variables", waits, ranks.to_unset)
    except LaunchError as error:
        yield CheckResult(BAD, "variables", str(error))
    said = environment.library_variables().replace("\n", " ")
    yield CheckResult(OK, "variables", f"set: {said}" if said else "none of the libraries' is set")


def check_network() -> Iterator[CheckResult]:
    there, given = interfaces(), {}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        given[name] = wanted = environment.getenv(name)
        if wanted.isalnum() and not any(one.startswith(wanted) for one in ("lo", *there)):
            remedy = f"give one of {', '.join(there) or 'lo'}, or unset it"
            yield CheckResult(BAD, "network", f"{name}={wanted} is no interface of this machine", remedy)
    # as NCCL's guide has it: InfiniBand's first, a container's last
    first = min(there, key=lambda name: (not name.startswith("ib"), name.startswith("docker")), default="lo")
    try:
        gloo = interface_for_others(*_PUBLIC_ADDRESS) or f"that of the name {socket.gethostname()}"
        chosen = [name or own for name, own in zip(given.values(), (gloo, first), strict=True)]
        addresses = ", ".join(f"{name} {address}" for name, address in there.items()) or "lo alone"
        yield CheckResult(OK, "network", f"gloo would take {chosen[0]}, NCCL {chosen[1]}; there are {addresses}")
    except RendezvousError as error:
        yield CheckResult(WARN, "network", *str(error).split(": ", 1))
    port = environment.getenv("MASTER_PORT", str(_PUBLIC_ADDRESS[1]))
    try:
        # as a store does, which a connection that is ending does not stop
        socket.create_server(("", int(port))).close()
        yield CheckResult(OK, "network", f"port {port}, where ranks meet, is free")
    except (OSError, ValueError, OverflowError) as error:
        remedy = "set MASTER_PORT, or --rdzv-endpoint of torchrun, to a free one"
        yield CheckResult(WARN, "network", f"port {port}, where ranks meet, cannot be had ({error})", remedy)


def check_memory() -> Iterator[CheckResult]:
    subject = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text("ascii", "replace")))
    free, all_of_it = (int(subject[name]) / MIB for name in ("MemAvailable", "MemTotal"))
    yield result_if("memory", free > all_of_it / 4, f"{free:.1f} of {all_of_it:.1f} GiB are free", "end what takes it")
    shared, (files, _) = shutil.disk_usage("/dev/shm").free, resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = "give a container --shm-size=1g: NCCL, and ranks on a CPU, exchange there"
    yield result_if("memory", shared >= SHM, f"{shared / MIB:,.0f} MiB of /dev/shm are free", remedy)
    yield result_if("memory", files >= FILES, f"a process may open {files:,} files", f"ulimit -n {FILES}")
