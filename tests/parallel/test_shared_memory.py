"""Collectives through shared memory: any program of them against its definition; ranks that die or disagree."""

import datetime
import errno
import fcntl
import mmap
import os
import random
import resource
import signal
import socket
import threading
import time
from pathlib import Path

import programs
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, wait_for
from torch import Tensor
from train_cases import SMALL

from megalite.config.env_overrides import env_override
from megalite.parallel.cpu import shared_memory
from megalite.parallel.cpu.peer_sockets import PeerSockets, SharedMemoryError
from megalite.parallel.cpu.shared_memory import CollectiveMismatchError, SharedMemoryBackend
from megalite.parallel.mesh import build_mesh
from megalite.training.monitoring.watchdog import _TIMEOUT_ERROR, is_lost_peer_error

# and a unit of each: a sum of whole numbers that fp32 or fp64 would make is another
UNITS = {torch.float32: 1, torch.float64: 1, torch.bfloat16: 1, torch.int32: 2**25 + 1, torch.int64: 2**55 + 1}


def _open(slot_bytes: int) -> SharedMemoryBackend:
    return SharedMemoryBackend.open(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), slot_bytes)


def _value(seed: int, rank: int, n: int, dtype: torch.dtype) -> Tensor:
    values = torch.randint(-8, 8, (n,), generator=torch.Generator().manual_seed(100 * seed + rank))
    return (values * UNITS[dtype]).to(dtype)


def _programs(seeds: range) -> int:
    """Collectives of random kinds and sizes, several under way, waited for in any order; wrong elements."""
    wrong, memory = 0, _open(192)
    rank, size = memory.rank, memory.size
    for seed in seeds:
        dice = random.Random(seed)  # the same on all ranks
        under_way: list[tuple[object, Tensor, Tensor]] = []
        for step in range(dice.randint(1, 12)):
            n, dtype, number = dice.choice([0, 1, 7, 20, 300]), dice.choice([*UNITS]), 50 * seed + step
            kind = dice.random()
            if kind < 0.3:
                counts = [[dice.choice([0, 0, 1, 5, n]) for _ in range(size)] for _ in range(size)]  # [from][to]
                parts = [_value(number, q, sum(counts[q]), dtype).split(counts[q]) for q in range(size)]
                want = torch.cat([part[rank] for part in parts])
                out = torch.full((len(want),), 99, dtype=dtype)
                x, got = torch.cat(parts[rank]), [counts[q][rank] for q in range(size)]
                under_way.append((memory.start_all_to_all(out, x, got, counts[rank]), out, want))
            elif kind < 0.65:
                parts = [_value(number, q, n, dtype) for q in range(size)]
                out = torch.full((n * size,), 99, dtype=dtype)
                mine = out[rank * n : (rank + 1) * n] if dice.random() < 0.5 else torch.empty(n, dtype=dtype)
                mine.copy_(parts[rank])
                under_way.append((memory.start_all_gather(out, mine), out, torch.cat(parts)))
            else:
                parts = [_value(number, q, n * size, dtype) for q in range(size)]
                x = parts[rank].clone()
                block = slice(rank * n, (rank + 1) * n)
                out = x[block] if dice.random() < 0.5 else torch.full((n,), 99, dtype=dtype)
                under_way.append((memory.start_reduce_scatter(out, x), out, sum(parts)[block]))  # type: ignore[index]
            if dice.random() < 0.2:
                time.sleep(0.002 * random.random())  # not the same on all ranks
            while under_way and dice.random() < 0.4:
                transfer, out, want = under_way.pop(dice.randrange(len(under_way)))
                transfer.wait()  # type: ignore[attr-defined]
                wrong += int((out != want).sum())
        for transfer, out, want in under_way:
            transfer.wait()  # type: ignore[attr-defined]
            wrong += int((out != want).sum())
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_equal_their_definition(world: int) -> None:
    assert run_ranks(world, _programs, range(25)) == [0] * world


def _sums() -> tuple[Tensor, Tensor]:
    memory = _open(4096)
    torch.manual_seed(memory.rank)
    x = torch.randn(memory.size * 400).bfloat16()
    out = torch.empty(400, dtype=torch.bfloat16)
    memory.start_reduce_scatter(out, x).wait()
    return x, out


def test_half_precision_sums_are_fp32() -> None:
    found = run_ranks(3, _sums)
    whole = torch.stack([x.float() for x, _ in found]).sum(0)
    torch.testing.assert_close(torch.cat([out for _, out in found]), whole.bfloat16(), rtol=0, atol=0)


def _without_gloo() -> int:
    """Transfers of several pieces, with nothing of gloo left to call."""
    memory = _open(64)
    for name in ("all_reduce", "barrier", "all_gather", "send", "recv", "isend", "irecv"):
        setattr(dist, name, None)
    out = torch.empty(200 * memory.size)
    memory.start_all_gather(out, torch.full((200,), float(memory.rank))).wait()
    own = torch.empty(200)
    memory.start_reduce_scatter(own, out).wait()
    return int(own.sum()) - 200 * memory.rank * memory.size


def test_transfer_does_not_wait_for_gloo() -> None:
    assert run_ranks(3, _without_gloo) == [0, 0, 0]


def _disagree() -> str:
    memory = _open(256)
    x, whole = torch.zeros(4), torch.zeros(8)
    started = memory.start_all_gather(whole, x) if memory.rank else memory.start_reduce_scatter(x, whole)
    with pytest.raises(CollectiveMismatchError) as error:
        started.wait()
    return str(error.value)


def test_mismatched_collectives_are_reported() -> None:
    first, second = run_ranks(2, _disagree)
    assert first == second and "different collectives" in first


def _expects_more() -> str:
    """Rank 1 expects more of rank 0 than that gives it, and rank 2 less."""
    memory = _open(256)
    got = [[3, 3, 3], [5, 3, 3], [2, 3, 3]][memory.rank]
    started = memory.start_all_to_all(torch.zeros(sum(got)), torch.zeros(9), got, [3, 3, 3])
    try:
        started.wait()
    except CollectiveMismatchError as error:
        return str(error)
    return ""


def test_unexpected_sizes_are_an_error() -> None:
    none, more, less = run_ranks(3, _expects_more)
    assert not none and "between [3, 3, 4] and [3, 5, 4]" in more and "between [3, 2, 4] and [3, 3, 4]" in less


def _last_dies(path: Path, forks: bool) -> None:
    """Rank 0 waits for all; a rank between them is late until it has heard of the death."""
    memory = _open(256)
    last = memory.size - 1
    if memory.rank == last:
        if not forks or os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(1000):
            if not path.exists():
                time.sleep(0.01)
        os._exit(0)
    if memory.rank:
        wait_for(path)
        return
    with pytest.raises(RuntimeError) as error:
        memory.start_all_gather(torch.zeros(4 * memory.size), torch.zeros(4)).wait()
    assert is_lost_peer_error(error.value) and f"by rank {last}" in str(error.value)
    path.touch()


@pytest.mark.parametrize("world, forks", [(2, False), (3, False), (2, True)])
def test_dead_rank_is_an_error_on_the_others(tmp_path: Path, world: int, forks: bool) -> None:
    """That is before the launcher ends them, who gives them 3 seconds; also while another rank is late, and while a
    process lives that the dead one has forked."""
    with pytest.raises(AssertionError, match="exit code 137"):
        run_ranks(world, _last_dies, tmp_path / "heard of it", forks)
    assert (tmp_path / "heard of it").exists()


def test_timeout_names_all_late_ranks() -> None:
    pairs = {rank: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for rank in (1, 2, 3)}
    wires = PeerSockets(None, {rank: near for rank, (near, _) in pairs.items()})
    far, limit = {rank: end for rank, (_, end) in pairs.items()}, datetime.timedelta(seconds=1)
    begin, says = time.monotonic(), threading.Timer(0.8, far[1].send, [b"word"])
    says.start()
    with pytest.raises(RuntimeError, match="Timed out waiting 1000ms for rank 2 and rank 3$"):
        wires.receive(4, limit)
    assert time.monotonic() - begin < 1.6
    far[3].send(b"last")
    for end in (far[1], far[3]):
        end.close()
    with pytest.raises(RuntimeError, match="Connection closed by rank 1: it has ended$"):  # at once: 2 is still late
        wires.receive(4, datetime.timedelta(hours=1))


# what a rank calls in this order while it opens
CALLS = {"broadcast": dist, "mmap": mmap, "bind": socket.socket, "connect": socket.socket}


def _dies_as_it_opens(folder: str, call: str) -> None:
    shared_memory.SHM_DIR = Path(folder)
    dist.barrier()  # the group is made: its ranks connect one by one
    if dist.get_rank() == 1:
        setattr(CALLS[call], call, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError):
        SharedMemoryBackend.open(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        assert not list(Path(folder).iterdir())
        (Path(folder) / "nothing was left").touch()


@pytest.mark.parametrize("call", CALLS)
def test_rank_killed_during_setup_leaves_no_file(tmp_path: Path, call: str) -> None:
    with pytest.raises(AssertionError, match="exit code 137"):
        run_ranks(3, _dies_as_it_opens, str(tmp_path), call)
    assert [path.name for path in tmp_path.iterdir()] == ["nothing was left"]


def _refusal(slot_bytes: int = 64) -> str:
    """Why there is no shared memory; "" where there is."""
    try:
        _open(slot_bytes)
    except SharedMemoryError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def _without_room() -> tuple[list[str], str, bool]:
    disk = os.statvfs(shared_memory.SHM_DIR)
    slot = disk.f_frsize * disk.f_blocks // 128 * 64  # half of what the file system has
    found = [_refusal(slot)]
    for folder in ("/nowhere", "/proc/self/status"):
        shared_memory.SHM_DIR = Path(folder)
        found.append(_refusal())
    mesh = build_mesh(tp=2, pp=1, device=torch.device("cpu"))
    return found, mesh.shared_memory_error, mesh.tp.custom_backend is None


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_full_shared_memory_falls_back_to_gloo() -> None:
    assert run_ranks(2, _without_room) == [(["ENOSPC", "ENOENT", "ENOTDIR"], "Not a directory", True)] * 2


def test_run_without_shared_memory_reports_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\nfrom megalite.parallel.cpu import shared_memory\n"
        "shared_memory.SHM_DIR = Path('/proc/self/status')\n"
    )
    words = [*SMALL, *"--nproc 2 --tensor-model-parallel-size 2 --train-iters 1 --device cpu".split()]
    for more, count in ((["--plugin", "mine.py"], 2), (["--plugin", "mine.py", "--no-shared-memory"], 0), ([], 0)):
        done = programs.python("pretrain_gpt.py", *words, *more, cwd=tmp_path, ok=True)
        said = [line for line in done.stdout.splitlines() + done.stderr.splitlines() if "through gloo" in line]
        assert len(said) == count and all("Not a directory: ranks of one machine" in line for line in said), said
    log = (tmp_path / "runs/last/log.txt").read_text()
    assert log.count("through gloo") == 2


def _on_several_machines(folder: str) -> tuple[str, str]:
    (own := Path(folder, str(dist.get_rank()))).mkdir()
    shared_memory.SHM_DIR = own
    found = _refusal(), build_mesh(tp=2, pp=1, device=torch.device("cpu")).shared_memory_error
    dist.barrier()
    assert not list(own.iterdir())
    return found


def test_several_machines_use_gloo(tmp_path: Path) -> None:
    assert run_ranks(2, _on_several_machines, str(tmp_path)) == [("EREMOTE", "")] * 2


def _first_dies(folder: str, call: str) -> None:
    """Rank 0, with the only names of what is open; the next run's ranks find that."""
    shared_memory.SHM_DIR = Path(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        setattr(CALLS[call], call, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError):
        _open(64)


def _opens(folder: str) -> bool:
    shared_memory.SHM_DIR = Path(folder)
    return _refusal() == ""


@pytest.mark.parametrize("call", ["broadcast", "mmap", "bind"])
def test_leftovers_of_a_killed_rank_are_removed(tmp_path: Path, call: str) -> None:
    with pytest.raises(AssertionError, match="exit code 137"):
        run_ranks(2, _first_dies, str(tmp_path), call)
    (left,) = tmp_path.iterdir()
    assert (left / "slots").stat().st_size == 3 * 2 * 64
    assert run_ranks(2, _opens, str(tmp_path)) == [True, True]
    assert not list(tmp_path.iterdir())


def test_only_dead_leftovers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SHM_DIR", tmp_path)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    names = ("alive000", "other000", "young000", "dead0000", "old00000", "longer-000", "datasets", "numbered")
    alive, other, young, dead, old, longer, made, numbered = (tmp_path / f"megalite-{name}" for name in names)
    for folder in (alive, other, young, dead, old, longer, numbered):
        folder.mkdir(0o700)
    made.mkdir()  # by somebody's mkdir, and old
    (numbered / "0").write_text("of somebody")
    os.utime(made, (1, 1))
    for folder in (alive, other, dead, longer, theirs):
        (folder / "slots").write_text("x")
        (folder / "1").write_text("x")
    (other / "notes").write_text("of somebody")
    (tmp_path / "megalite-link0000").symlink_to(theirs)
    (dead / "0").symlink_to(theirs / "slots")
    os.utime(old, (1, 1))
    number = os.open(alive, os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX)
    shared_memory.sweep()
    assert {path.name for path in tmp_path.iterdir()} == {
        "theirs", "megalite-alive000", "megalite-other000", "megalite-young000", "megalite-longer-000",
        "megalite-link0000", "megalite-datasets", "megalite-numbered",
    }  # fmt: skip
    assert (numbered / "0").exists()
    assert all((folder / "slots").exists() for folder in (alive, other, longer, theirs))
    os.close(number)
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    shared_memory.sweep()
    assert alive.exists()


def _no_sockets(folder: str) -> bool:
    """Only the names of the sockets are too long, for the kernel."""
    shared_memory.SHM_DIR = Path(folder)
    found = _refusal() == "EINVAL"
    dist.barrier()
    return found and not list(Path(folder).iterdir())


def test_missing_sockets_fall_back_to_gloo(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    assert run_ranks(2, _no_sockets, str(folder)) == [True, True]


def _without_files(folder: str) -> list[str]:
    """Rank 0 may open none, one, ... more."""
    shared_memory.SHM_DIR, found, before = Path(folder), [], resource.getrlimit(resource.RLIMIT_NOFILE)
    for more in range(7):
        os.close(free := os.open(folder, os.O_RDONLY))
        if dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, before[1]))
        found.append(_refusal())
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return found


def test_file_limit_falls_back_to_gloo(tmp_path: Path) -> None:
    first, second = run_ranks(2, _without_files, str(tmp_path))
    assert first == second and first[0] == "EMFILE" and set(first) == {"EMFILE", ""} and not first[-1]
    assert not list(tmp_path.iterdir())


def _timeouts(path: str) -> float:
    limit = datetime.timedelta(seconds=1)
    mesh = build_mesh(tp=2, pp=1, device=torch.device("cpu"), timeout=limit)
    begin = time.monotonic()
    if mesh.tp.rank == 1:
        wait_for(Path(path))
        return 0.0
    with pytest.raises(RuntimeError) as error:
        mesh.tp.custom_backend.start_all_gather(torch.zeros(8), torch.zeros(4)).wait()
    assert _TIMEOUT_ERROR.search(str(error.value)) and "for rank 1" in str(error.value)
    took = time.monotonic() - begin
    Path(path).touch()
    return took


def test_hanging_rank_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    assert run_ranks(2, _timeouts, str(tmp_path / "over"))[0] > 0.9


def _long_timeouts() -> tuple[datetime.timedelta, float]:
    memory = _open(256)
    usual, memory.timeout = memory.timeout, datetime.timedelta(milliseconds=2**32 + 10)
    if memory.rank == 0:
        time.sleep(0.5)
    out = torch.empty(8)
    memory.start_all_gather(out, torch.full((4,), float(memory.rank))).wait()
    return usual, float(out.sum())


def test_timeout_default_equals_torchs() -> None:
    assert run_ranks(2, _long_timeouts) == [(datetime.timedelta(minutes=30), 4.0)] * 2


def test_shared_memory_variable_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, on in (("on", True), ("", True), ("off", False)):
        monkeypatch.setenv("MEGALITE_SHARED_MEMORY", value)
        assert env_override("shared_memory", True) is on
    monkeypatch.setenv("MEGALITE_SHARED_MEMORY", "no")
    with pytest.raises(ValueError, match="MEGALITE_SHARED_MEMORY=no is unknown; use on or off"):
        env_override("shared_memory", True)
