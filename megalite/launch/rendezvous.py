"""Lets ranks of several machines find each other, and finds out why they did not.

torchrun keeps one store over restarts, with the addresses of ranks that died, and each of its nodes counts restarts by
itself, so the counts differ after a node was replaced. Ranks therefore give every meeting a name of its own:

    rank r > 0   writes a new word under "hello r", waits for the answer, which is the name, and confirms it
    rank 0       answers every new word until each rank has confirmed

It also answers the word of a rank that died, which does no harm. Rank 0 knows who has come, so it can name the others,
and every rank that waits says for which ones, from a few seconds on.
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

from megalite.config.console import print_err

T = TypeVar("T")
PAUSE_S = 0.02
PROBE_S = 3.0
NOTICE_S = 10.0  # how long a rank waits before it says for whom; then it says so after twice as long, and so on
SIOCGIFADDR = 0x8915
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


class RendezvousError(Exception):
    """Not all ranks came; the text says which, and the likely cause."""


def rendezvous(
    rank: int,
    world: int,
    url: str,
    env: MutableMapping[str, str],
    timeout: timedelta,
    *,
    nodes: int,
    gloo: bool,
    serves: bool = True,
    tell: Callable[[str], None] = print_err,
) -> Any:
    """The store at `url` in which these ranks, and no others, exchange their addresses; collective. `nodes`: the number
    of machines. Sets in `env` the interface that `gloo` needs to reach other machines. `serves`: rank 0 starts the
    store at tcp://HOST:PORT, not its launcher. `tell` is called with the ranks that this one waits for, if it waits
    long. Raises MeetingError."""
    from torch import distributed

    stores: Any = distributed  # TCPStore and others have no other public name, and are not declared there

    of_this_machine, serves = url.startswith("file:"), serves and rank == 0
    host, _, number = url.removeprefix("tcp://").rpartition(":")
    host, port = host.strip("[]"), 0 if of_this_machine else int(number)
    where = "on this machine" if of_this_machine else f"at {host}:{port}"
    interface = "GLOO_SOCKET_IFNAME"
    if nodes > 1 and gloo and interface not in env and (name := interface_for_others(host, port)) is not None:
        env[interface] = name
    missing = set(range(1, world)) if rank == 0 else {0}
    connected = threading.Event()

    def find() -> Any:
        if of_this_machine:  # in a folder that no other ranks know
            store: Any = stores.FileStore(url.removeprefix("file://"), world)
            store.set_timeout(timeout)
        else:
            store = stores.TCPStore(
                host, port, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True
            )
        connected.set()
        return stores.PrefixStore(agree_on_prefix(store, rank, world, timeout, missing, where), store)

    def waits() -> None:
        if not connected.is_set():
            absent = f"the store {where}" if rank == 0 else f"1 of {world} ranks {where}: rank 0"
            tell(f"waiting for {absent}; {likely_cause(host, port, serves, nodes, '')}")
        elif absent := sorted(missing.copy()):
            ranks = f"rank{'s' * (len(absent) > 1)} {format_ranks(absent)}"
            tell(f"waiting for {len(absent)} of {world} ranks {where}: {ranks}")

    try:
        return call_with_timeout(timeout.total_seconds() + PROBE_S, find, waits)
    except (distributed.DistError, RuntimeError, ValueError, TimeoutError) as error:
        first = str(error).partition("\n")[0][:200]
        cause = "rank 0 does not answer" if of_this_machine else likely_cause(host, port, serves, nodes, first)
        raise RendezvousError(
            f"rank {rank} of {world} on {socket.gethostname()} could not meet the others {where} within "
            f"{timeout.total_seconds():.0f} s: {cause} ({first})"
        ) from error


def call_with_timeout(seconds: float, do: Callable[[], T], waits: Callable[[], None] = lambda: None) -> T:
    """Return or raise what `do` does; raise TimeoutError after `seconds` and leave it behind in its thread. torch's own
    time-out does not end a wait for a listener that accepts a connection and then says nothing. `waits` is called
    after NOTICE_S, and again each time that has doubled."""
    outcome = Future[T]()

    def run() -> None:
        try:
            outcome.set_result(do())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="megalite-meeting", daemon=True).start()
    begin, notice = time.monotonic(), NOTICE_S
    while not futures.wait([outcome], max(0.0, min(begin + notice, begin + seconds) - time.monotonic())).done:
        if time.monotonic() >= begin + seconds:
            raise TimeoutError(f"silent for {seconds:.0f} s")
        waits()
        notice *= 2
    return outcome.result()


def agree_on_prefix(
    store: Any, rank: int, world: int, timeout: timedelta, missing: set[int] | None = None, where: str = ""
) -> str:
    """Agree on a name that only the ranks of this meeting know. Raises MeetingError on rank 0, else torch's errors.
    `missing`: loses the ranks that have come. `where`: for the error."""
    missing = {*range(1, world)} if missing is None else missing
    word = f"{socket.gethostname()} {rank} {os.getpid()} {time.time_ns()}"
    if rank:
        store.set(f"hello {rank}", word)
        name = store.get(f"answer {word}").decode()
        missing.clear()
        store.set(f"here {word}", name)
        return name
    end, heard = time.monotonic() + timeout.total_seconds(), dict[int, str]()
    while missing:
        for other in [other for other in sorted(missing) if store.check([f"hello {other}"])]:
            if (hello := store.get(f"hello {other}").decode()) != heard.get(other):
                store.set(f"answer {hello}", word)
                heard[other] = hello
            elif store.check([f"here {hello}"]) and store.get(f"here {hello}").decode() == word:  # of this meeting
                missing.remove(other)
        if missing and time.monotonic() > end:
            came = [other for other in range(1, world) if other not in missing]
            hosts = {word.split()[0], *(heard[other].split()[0] for other in came)}
            remedy = (
                "They were started here, and have not come as far: look for what they do in ranks/ of the run directory"
                if where == "on this machine"
                else "Are their nodes running, do they have the same address, and can they reach it (firewall)?"
            )
            raise RendezvousError(
                f"only ranks {format_ranks([0, *came])} of {world} came within {timeout.total_seconds():.0f} s, from "
                f"{', '.join(sorted(hosts))}; missing: {format_ranks(sorted(missing))}. {remedy}"
            )
        time.sleep(PAUSE_S if missing else 0)
    return word


def format_ranks(ranks: list[int], most: int = 16) -> str:
    """
    >>> listed([0, 1, 5]), listed([0, 1, 5], most=2)
    ('0, 1, 5', '0, 1 and 1 more')
    """
    return ", ".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")


def likely_cause(host: str, port: int, server: bool, nodes: int, error: str) -> str:
    """Try again to find out why a rank could not use the store at `host`:`port`. `server`: this rank starts it."""
    if server:
        taken = "EADDRINUSE" in error or "in use" in error
        return f"port {port} is taken, by another job? Set MASTER_PORT" if taken else "it cannot listen there"
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return f"this node cannot resolve the name {host}; is MASTER_ADDR right?"
    if nodes > 1 and all(ipaddress.ip_address(address).is_loopback for address in addresses):
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
    """The network interface that gloo needs if this machine's name is a loopback address (127.0.1.1 in Debian's
    /etc/hosts), which no other machine can reach; None if the name will do. Raises MeetingError if it cannot choose."""
    with contextlib.suppress(OSError):
        own = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
        if not all(ipaddress.ip_address(address).is_loopback for address in own):
            return None
    names = {address: name for name, address in interfaces().items()}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((host, port))  # sends nothing
        if (way := names.get(towards.getsockname()[0])) is not None:
            return way
    if len(names) != 1:
        raise RendezvousError(
            f"the name {socket.gethostname()} is a loopback address here, which no other machine can reach: set "
            f"GLOO_SOCKET_IFNAME (with CUDA NCCL_SOCKET_IFNAME) to one of {', '.join(sorted(names.values())) or 'none'}"
        )
    return next(iter(names.values()))


def interfaces() -> dict[str, str]:
    """Name -> IPv4 address of the interfaces that lead to other machines."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                address = ipaddress.ip_address(answer[20:24])
                if not address.is_loopback:
                    addresses[name] = str(address)
    return addresses
