"""Ranks that look for each other: under which name they meet, and what they are told when they do not."""

import datetime
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from megalite.launch import rendezvous as meeting
from megalite.launch.rendezvous import RendezvousError, agree_on_prefix, interface_for_others, likely_cause, rendezvous

SHORT = datetime.timedelta(seconds=1)
LONG = datetime.timedelta(seconds=30)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


port = pytest.fixture(free_port, name="port")


@pytest.fixture
def store() -> HashStore:
    made = HashStore()
    made.set_timeout(LONG)
    return made


def together(world: int, store: Any) -> list[str]:
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: agree_on_prefix(store, rank, world, LONG), range(world)))


def test_prefixes_in_one_store_differ(store: HashStore) -> None:
    """Whatever attempt of a torchrun each rank is in, and whatever died ranks have left there."""
    store.set("hello 1", "somebody who died")
    names = [together(world, store) for world in (4, 2, 3)]
    assert [len(set(name)) for name in names] == [1, 1, 1] and len({name[0] for name in names}) == 3


def test_rank_of_an_earlier_attempt_is_not_counted(store: HashStore) -> None:
    store.set("hello 1", "somebody who died")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(agree_on_prefix, store, 0, 2, LONG)
        store.wait(["answer somebody who died"])
        assert not first.done()
        assert agree_on_prefix(store, 1, 2, LONG) == first.result(30)


def test_rank_must_join_every_rendezvous(store: HashStore) -> None:
    """Rank 0 is started again before the others are: all that they said in the last meeting is still there."""
    [last, _] = together(2, store)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(agree_on_prefix, store, 0, 2, LONG)
        time.sleep(10 * meeting.PAUSE_S)
        assert not first.done()
        assert agree_on_prefix(store, 1, 2, LONG) == first.result(30) != last


def test_missing_ranks_are_named(store: HashStore) -> None:
    other = threading.Thread(target=agree_on_prefix, args=(store, 2, 4, LONG))
    other.start()
    with pytest.raises(RendezvousError) as error:
        agree_on_prefix(store, 0, 4, SHORT)
    other.join(30)
    assert f"only ranks 0, 2 of 4 joined within 1 s, from {socket.gethostname()}; missing: 1, 3." in str(error.value)


def why(rank: int, host: str, port: int, serves: bool = True, num_nodes: int = 1) -> str:
    with pytest.raises(RendezvousError) as error:
        rendezvous(rank, 2, f"tcp://{host}:{port}", {}, SHORT, num_nodes=num_nodes, gloo=False, serves=serves)
    said = f"rank {rank} of 2 on {socket.gethostname()} could not join the others at {host}:{port} within 1 s"
    assert said in str(error.value)
    return str(error.value)


def test_connection_failure_reason_is_reported(port: int) -> None:
    assert "that machine answers, but nothing listens there: has rank 0 started" in why(1, "127.0.0.1", port)
    assert "nothing listens there" in why(0, "127.0.0.1", port, serves=False)  # torchrun's own, which has ended
    assert re.search("localhost is .*on this machine, which means itself", why(1, "localhost", port, num_nodes=2))
    with socket.create_server(("", port)):
        assert f"port {port} is taken, by another job? Set MASTER_PORT" in why(0, "127.0.0.1", port)


def test_silent_listener_is_not_waited_for_longer(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own time-out does not end that."""
    monkeypatch.setattr(meeting, "PROBE_S", 0.5)
    with socket.create_server(("127.0.0.1", port)):
        assert re.search(r"it answers, but rank 0 does not.* \(silent for 2 s\)", why(1, "127.0.0.1", port))


def test_server_of_another_program_is_named(port: int) -> None:
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert "it answers, but rank 0 does not" in why(1, "127.0.0.1", port)
    del server


def test_unresolvable_and_local_host_names_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"here": "10.0.0.3"}  # what they mean; others mean nothing

    def look_up(host: str, *_: Any, **__: Any) -> list[Any]:
        if host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (names[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    assert likely_cause("gpu01", 1, False, 2, "") == "this node cannot resolve the name gpu01; is MASTER_ADDR right?"
    assert interface_for_others("there", 1) is None
    names["here"] = "127.0.1.1"
    monkeypatch.setattr(meeting, "interfaces", lambda: {"eth0": "10.0.0.3"})
    assert interface_for_others("there", 1) == "eth0"
    monkeypatch.setattr(meeting, "interfaces", lambda: {"eth0": "10.0.0.3", "ib0": "10.1.0.3"})
    with pytest.raises(RendezvousError, match="set GLOO_SOCKET_IFNAME .* to one of eth0, ib0"):
        interface_for_others("there", 1)


def waits(rank: int, monkeypatch: pytest.MonkeyPatch, url: str, world: int = 3, **how: Any) -> str:
    """What a rank says while it waits for the others, once."""
    monkeypatch.setattr(meeting, "NOTICE_S", 0.4)
    told: list[str] = []
    with pytest.raises(RendezvousError):
        rendezvous(rank, world, url, {}, SHORT, num_nodes=1, gloo=False, report=told.append, **how)
    assert 1 <= len(told) <= 4 and len({*told}) == 1, told  # at 0.4 s, and again each time that has doubled
    return told[0]


def test_waiting_rank_prints_missing_ranks_and_address(
    port: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, nothing = f"127.0.0.1:{port}", "that machine answers, but nothing listens there"
    first = waits(1, monkeypatch, f"tcp://{at}")
    assert first.startswith(f"waiting for 1 of 3 ranks at {at}: rank 0; {nothing}")
    assert waits(0, monkeypatch, f"tcp://{at}", serves=False).startswith(f"waiting for the store at {at}; {nothing}")
    assert waits(0, monkeypatch, f"tcp://{at}") == f"waiting for 2 of 3 ranks at {at}: ranks 1, 2"
    for rank, others in ((0, "2 of 3 ranks on this machine: ranks 1, 2"), (1, "1 of 3 ranks on this machine: rank 0")):
        assert waits(rank, monkeypatch, f"file://{tmp_path}/{rank}") == f"waiting for {others}"


def test_joined_rank_is_not_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "NOTICE_S", 0.6)
    told: list[str] = []
    url, how = f"tcp://127.0.0.1:{port}", dict(num_nodes=1, gloo=False)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rendezvous, 0, 3, url, {}, datetime.timedelta(seconds=3), report=told.append, **how)  # type: ignore[arg-type]
        second = pool.submit(rendezvous, 1, 3, url, {}, LONG, report=told.append, **how)  # type: ignore[arg-type]
        second.result(30)
        with pytest.raises(RendezvousError, match="only ranks 0, 1 of 3 joined"):
            first.result(30)
    assert told[-1] == f"waiting for 1 of 3 ranks at 127.0.0.1:{port}: rank 2"
