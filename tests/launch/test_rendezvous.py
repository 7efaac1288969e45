"""The rendezvous of ranks: the prefix that they agree on, and the reported reason if they do not meet."""

import datetime
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from megalite.launch import rendezvous as rendezvous_module
from megalite.launch.rendezvous import RendezvousError, agree_on_prefix, interface_for_others, likely_cause, rendezvous

SHORT = datetime.timedelta(seconds=1)
LONG = datetime.timedelta(seconds=30)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


port = pytest.fixture(free_port, name="port")


@pytest.fixture
def store() -> HashStore:
    hash_store = HashStore()
    hash_store.set_timeout(LONG)
    return hash_store


def agree_on_all_ranks(world: int, store: Any) -> list[str]:
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: agree_on_prefix(store, rank, world, LONG), range(world)))


def test_prefixes_in_one_store_differ(store: HashStore) -> None:
    """They differ whatever attempt of torchrun each rank is in, and whatever dead ranks have left in the store."""
    store.set("hello 1", "a dead rank")
    names = [agree_on_all_ranks(world, store) for world in (4, 2, 3)]
    assert [len(set(name)) for name in names] == [1, 1, 1] and len({name[0] for name in names}) == 3


def test_rank_of_an_earlier_attempt_is_not_counted(store: HashStore) -> None:
    store.set("hello 1", "a dead rank")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(agree_on_prefix, store, 0, 2, LONG)
        store.wait(["answer a dead rank"])
        assert not first.done()
        assert agree_on_prefix(store, 1, 2, LONG) == first.result(30)


def test_rank_must_join_every_rendezvous(store: HashStore) -> None:
    """Rank 0 restarts before the others: the keys that they set in the last rendezvous are still in the store."""
    [last_prefix, _] = agree_on_all_ranks(2, store)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(agree_on_prefix, store, 0, 2, LONG)
        time.sleep(10 * rendezvous_module.PAUSE_S)
        assert not first.done()
        assert agree_on_prefix(store, 1, 2, LONG) == first.result(30) != last_prefix


def test_missing_ranks_are_named(store: HashStore) -> None:
    other = threading.Thread(target=agree_on_prefix, args=(store, 2, 4, LONG))
    other.start()
    with pytest.raises(RendezvousError) as excinfo:
        agree_on_prefix(store, 0, 4, SHORT)
    other.join(30)
    assert f"only ranks 0, 2 of 4 joined within 1 s, from {socket.gethostname()}; missing: 1, 3." in str(excinfo.value)


def failure_message(rank: int, host: str, port: int, serves: bool = True, num_nodes: int = 1) -> str:
    with pytest.raises(RendezvousError) as excinfo:
        rendezvous(rank, 2, f"tcp://{host}:{port}", {}, SHORT, num_nodes=num_nodes, gloo=False, serves=serves)
    message = f"rank {rank} of 2 on {socket.gethostname()} could not join the others at {host}:{port} within 1 s"
    assert message in str(excinfo.value)
    return str(excinfo.value)


def test_connection_failure_reason_is_reported(port: int) -> None:
    assert "that machine answers, but nothing listens there: has rank 0 started" in failure_message(
        1, "127.0.0.1", port
    )
    assert "nothing listens there" in failure_message(
        0, "127.0.0.1", port, serves=False
    )  # torchrun's store, which has ended
    assert re.search(
        "localhost is .*on this machine, which means itself", failure_message(1, "localhost", port, num_nodes=2)
    )
    with socket.create_server(("", port)):
        assert f"port {port} is taken, by another job? Set MASTER_PORT" in failure_message(0, "127.0.0.1", port)


def test_silent_listener_is_not_waited_for_longer(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout of torch would not end the wait."""
    monkeypatch.setattr(rendezvous_module, "PROBE_S", 0.5)
    with socket.create_server(("127.0.0.1", port)):
        assert re.search(r"it answers, but rank 0 does not.* \(silent for 2 s\)", failure_message(1, "127.0.0.1", port))


def test_server_of_another_program_is_named(port: int) -> None:
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert "it answers, but rank 0 does not" in failure_message(1, "127.0.0.1", port)
    del server


def test_unresolvable_and_local_host_names_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"here": "10.0.0.3"}  # host name -> address; other names cannot be resolved

    def look_up(host: str, *_: Any, **__: Any) -> list[Any]:
        if host not in addresses:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    assert likely_cause("gpu01", 1, False, 2, "") == "this node cannot resolve the name gpu01; is MASTER_ADDR right?"
    assert interface_for_others("there", 1) is None
    addresses["here"] = "127.0.1.1"
    monkeypatch.setattr(rendezvous_module, "interfaces", lambda: {"eth0": "10.0.0.3"})
    assert interface_for_others("there", 1) == "eth0"
    monkeypatch.setattr(rendezvous_module, "interfaces", lambda: {"eth0": "10.0.0.3", "ib0": "10.1.0.3"})
    with pytest.raises(RendezvousError, match="set GLOO_SOCKET_IFNAME .* to one of eth0, ib0"):
        interface_for_others("there", 1)


def waiting_message(rank: int, monkeypatch: pytest.MonkeyPatch, url: str, world: int = 3, **options: Any) -> str:
    """Return the message that a rank prints while it waits for the others."""
    monkeypatch.setattr(rendezvous_module, "NOTICE_S", 0.4)
    messages: list[str] = []
    with pytest.raises(RendezvousError):
        rendezvous(rank, world, url, {}, SHORT, num_nodes=1, gloo=False, report=messages.append, **options)
    assert 1 <= len(messages) <= 4 and len({*messages}) == 1, messages  # at 0.4 s, and each time that this has doubled
    return messages[0]


def test_waiting_rank_prints_missing_ranks_and_address(
    port: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, reason = f"127.0.0.1:{port}", "that machine answers, but nothing listens there"
    first = waiting_message(1, monkeypatch, f"tcp://{address}")
    assert first.startswith(f"waiting for 1 of 3 ranks at {address}: rank 0; {reason}")
    assert waiting_message(0, monkeypatch, f"tcp://{address}", serves=False).startswith(
        f"waiting for the store at {address}; {reason}"
    )
    assert waiting_message(0, monkeypatch, f"tcp://{address}") == f"waiting for 2 of 3 ranks at {address}: ranks 1, 2"
    for rank, others in ((0, "2 of 3 ranks on this machine: ranks 1, 2"), (1, "1 of 3 ranks on this machine: rank 0")):
        assert waiting_message(rank, monkeypatch, f"file://{tmp_path}/{rank}") == f"waiting for {others}"


def test_joined_rank_is_not_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "NOTICE_S", 0.6)
    messages: list[str] = []
    url, options = f"tcp://127.0.0.1:{port}", dict(num_nodes=1, gloo=False)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rendezvous, 0, 3, url, {}, datetime.timedelta(seconds=3), report=messages.append, **options)  # type: ignore[arg-type]
        second = pool.submit(rendezvous, 1, 3, url, {}, LONG, report=messages.append, **options)  # type: ignore[arg-type]
        second.result(30)
        with pytest.raises(RendezvousError, match="only ranks 0, 1 of 3 joined"):
            first.result(30)
    assert messages[-1] == f"waiting for 1 of 3 ranks at 127.0.0.1:{port}: rank 2"
