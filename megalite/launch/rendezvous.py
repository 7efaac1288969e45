"""The rendezvous of ranks on several machines, and its diagnosis if it fails.

torchrun keeps one store over restarts, with the addresses of ranks that died. Its nodes count restarts separately, so
the counts differ after a node was replaced. Ranks therefore agree on a new store prefix at every rendezvous:

    rank r > 0   writes a new token under "hello r", waits for the answer, which is the prefix, and confirms it
    rank 0       answers every new token until each rank has confirmed

Rank 0 also answers the token of a rank that died, which does no harm. It knows which ranks have arrived and can name
the missing ones. Every rank that waits for more than a few seconds prints for which ranks it waits.
"""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, MutableMapping
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

from megalite.common.console import print_err
from megalite.common.wording import plural

T = TypeVar("T")
PAUSE_S = 0.02
PROBE_S = 3.0
NOTICE_S = 10.0  # until a waiting rank first prints for which ranks it waits; the interval then doubles
SIOCGIFADDR = 0x8915
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


class RendezvousError(Exception):
    """Not all ranks arrived. The text names the missing ranks and the likely cause."""


def rendezvous(
    rank: int,
    world: int,
    url: str,
    env: MutableMapping[str, str],
    timeout: timedelta,
    *,
    num_nodes: int,
    gloo: bool,
    serves: bool = True,
    report: Callable[[str], None] = print_err,
) -> Any:
    """Return a store at `url` in which only these ranks exchange their addresses. Collective.

    Args:
        rank: this rank.
        world: number of ranks.
        url: tcp://HOST:PORT, or file:// for the ranks of one machine.
        env: environment, in which the interface that gloo needs to reach other machines is set.
        timeout: limit for the rendezvous.
        num_nodes: number of machines.
        gloo: gloo will be used.
        serves: rank 0 starts the store at tcp://HOST:PORT, not its launcher.
        report: called with the ranks that this one waits for, if it waits long.

    Raises:
        RendezvousError: if not all ranks arrive in time.
    """
    from torch import distributed

    stores: Any = distributed  # TCPStore and others have no other public name, and are not declared there

    is_local = url.startswith("file:")
    serves = serves and rank == 0
    host, _, number = url.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    port = 0 if is_local else int(number)
    location = "on this machine" if is_local else f"at {host}:{port}"
    interface = "GLOO_SOCKET_IFNAME"
    if num_nodes > 1 and gloo and interface not in env and (name := interface_for_others(host, port)) is not None:
        env[interface] = name
    missing = set(range(1, world)) if rank == 0 else {0}
    connected = threading.Event()

    def connect() -> Any:
        if is_local:  # in a directory that no other ranks use
            store: Any = stores.FileStore(url.removeprefix("file://"), world)
            store.set_timeout(timeout)
        else:
            store = stores.TCPStore(
                host, port, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True
            )
        connected.set()
        return stores.PrefixStore(agree_on_prefix(store, rank, world, timeout, missing, is_local), store)

    def report_missing() -> None:
        if not connected.is_set():
            absent = f"the store {location}" if rank == 0 else f"1 of {world} ranks {location}: rank 0"
            report(f"waiting for {absent}; {likely_cause(host, port, serves, num_nodes, '')}")
        elif absent := sorted(missing.copy()):
            ranks = f"{plural('rank', len(absent))} {format_ranks(absent)}"
            report(f"waiting for {len(absent)} of {world} ranks {location}: {ranks}")

    try:
        return call_with_timeout(timeout.total_seconds() + PROBE_S, connect, report_missing)
    except (distributed.DistError, RuntimeError, ValueError, TimeoutError) as error:
        first = str(error).partition("\n")[0][:200]
        cause = "rank 0 does not answer" if is_local else likely_cause(host, port, serves, num_nodes, first)
        raise RendezvousError(
            f"rank {rank} of {world} on {socket.gethostname()} could not join the others {location} within "
            f"{timeout.total_seconds():.0f} s: {cause} ({first})"
        ) from error


def call_with_timeout(seconds: float, function: Callable[[], T], on_wait: Callable[[], None] = lambda: None) -> T:
    """Call `function` in a thread and return its result or raise its exception.

    After `seconds` a TimeoutError is raised and the thread is abandoned. torch's own timeout does not end a wait for a
    listener that accepts a connection and then sends nothing. `on_wait` is called after NOTICE_S, and again each time
    the interval has doubled.
    """
    outcome = Future[T]()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="megalite-rendezvous", daemon=True).start()
    start, notice = time.monotonic(), NOTICE_S
    while not futures.wait([outcome], max(0.0, min(start + notice, start + seconds) - time.monotonic())).done:
        if time.monotonic() >= start + seconds:
            raise TimeoutError(f"silent for {seconds:.0f} s")
        on_wait()
        notice *= 2
    return outcome.result()


def agree_on_prefix(
    store: Any, rank: int, world: int, timeout: timedelta, missing: set[int] | None = None, is_local: bool = False
) -> str:
    """Return a prefix that only the ranks of this rendezvous know.

    Ranks that have arrived are removed from `missing`. `is_local` (all ranks are on this machine) selects the remedy in
    the error. Raises RendezvousError on rank 0, and torch's errors on other ranks.
    """
    missing = {*range(1, world)} if missing is None else missing
    token = f"{socket.gethostname()} {rank} {os.getpid()} {time.time_ns()}"
    if rank:
        store.set(f"hello {rank}", token)
        prefix = store.get(f"answer {token}").decode()
        missing.clear()
        store.set(f"here {token}", prefix)
        return prefix
    end, tokens = time.monotonic() + timeout.total_seconds(), dict[int, str]()
    while missing:
        for other in [other for other in sorted(missing) if store.check([f"hello {other}"])]:
            if (hello := store.get(f"hello {other}").decode()) != tokens.get(other):
                store.set(f"answer {hello}", token)
                tokens[other] = hello
            elif store.check([f"here {hello}"]) and store.get(f"here {hello}").decode() == token:  # of this rendezvous
                missing.remove(other)
        if missing and time.monotonic() > end:
            arrived = [other for other in range(1, world) if other not in missing]
            hosts = {token.split()[0], *(tokens[other].split()[0] for other in arrived)}
            remedy = (
                "They were started on this machine, but have not reached this point: see ranks/ in the run directory"
                if is_local
                else "Are their nodes running, do they have the same address, and can they reach it (firewall)?"
            )
            present = format_ranks([0, *arrived])
            raise RendezvousError(
                f"only ranks {present} of {world} joined within {timeout.total_seconds():.0f} s, from "
                f"{', '.join(sorted(hosts))}; missing: {format_ranks(sorted(missing))}. {remedy}"
            )
        time.sleep(PAUSE_S if missing else 0)
    return token


def format_ranks(ranks: list[int], max_shown: int = 16) -> str:
    """Return a list of ranks as text.

    >>> format_ranks([0, 1, 5]), format_ranks([0, 1, 5], max_shown=2)
    ('0, 1, 5', '0, 1 and 1 more')
    """
    more = len(ranks) - max_shown
    return ", ".join(map(str, ranks[:max_shown])) + (f" and {more} more" if more > 0 else "")


def likely_cause(host: str, port: int, server: bool, num_nodes: int, error: str) -> str:
    """Return why a rank could not use the store at `host`:`port`, after another attempt to connect.

    `server`: this rank starts the store.
    """
    if server:
        in_use = "EADDRINUSE" in error or "in use" in error
        return f"port {port} is taken, by another job? Set MASTER_PORT" if in_use else "it cannot listen there"
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return f"this node cannot resolve the name {host}; is MASTER_ADDR right?"
    if num_nodes > 1 and all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return (
            f"{host} is {', '.join(sorted(addresses))} on this machine, which means itself; is MASTER_ADDR the first "
            "node's, and does /etc/hosts give it an address that others reach?"
        )
    try:
        socket.create_connection((host, port), PROBE_S).close()
    except ConnectionRefusedError:
        return "that machine answers, but nothing listens there: has rank 0 started, and with the same address?"
    except TimeoutError:
        return "nothing answers: a firewall, a wrong MASTER_ADDR, or the machine is down"
    except OSError as problem:
        return f"it cannot be reached ({problem.strerror})"
    return "it answers, but rank 0 does not: has it ended, or do others use that port?"


def interface_for_others(host: str, port: int) -> str | None:
    """Return the network interface that gloo needs to reach other machines, or None if the host name suffices.

    It is needed if this machine's name is a loopback address (127.0.1.1 in Debian's /etc/hosts), which no other machine
    can reach. Raises RendezvousError if there are several candidates.
    """
    with contextlib.suppress(OSError):
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
        if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
            return None
    names = {address: name for name, address in interfaces().items()}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        if (name := names.get(probe.getsockname()[0])) is not None:
            return name
    if len(names) != 1:
        raise RendezvousError(
            f"the name {socket.gethostname()} is a loopback address here, which no other machine can reach: set "
            f"GLOO_SOCKET_IFNAME (with CUDA NCCL_SOCKET_IFNAME) to one of {', '.join(sorted(names.values())) or 'none'}"
        )
    return next(iter(names.values()))


def interfaces() -> dict[str, str]:
    """Return name -> IPv4 address of the interfaces other than loopback."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                address = ipaddress.ip_address(answer[20:24])
                if not address.is_loopback:
                    addresses[name] = str(address)
    return addresses
