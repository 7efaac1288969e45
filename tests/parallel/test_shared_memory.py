"""Collectives through shared memory: random programs against their definition; ranks that die or disagree."""

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
from ranks import run_ranks, wait_for_file
from torch import Tensor
from train_cases import SMALL_RUN

from megalite.config.env_overrides import env_override
from megalite.parallel.cpu import shared_memory
from megalite.parallel.cpu.peer_sockets import PeerSockets, SharedMemoryError
from megalite.parallel.cpu.shared_memory import CollectiveMismatchError, SharedMemoryBackend
from megalite.parallel.mesh import build_mesh
from megalite.training.monitoring.watchdog import _TIMEOUT_ERROR, is_lost_peer_error

# dtype -> a unit: fp32 or fp64 would not sum multiples of the integer ones exactly
UNITS = {torch.float32: 1, torch.float64: 1, torch.bfloat16: 1, torch.int32: 2**25 + 1, torch.int64: 2**55 + 1}


def _open(slot_bytes: int) -> SharedMemoryBackend:
    return SharedMemoryBackend.open(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), slot_bytes)


def _value(seed: int, rank: int, n: int, dtype: torch.dtype) -> Tensor:
    values = torch.randint(-8, 8, (n,), generator=torch.Generator().manual_seed(100 * seed + rank))
    return (values * UNITS[dtype]).to(dtype)


def _count_wrong_elements(seeds: range) -> int:
    """Run random collectives of any size, wait for them in any order, and return the number of wrong elements."""
    wrong, memory = 0, _open(192)
    rank, size = memory.rank, memory.size
    for seed in seeds:
        rng = random.Random(seed)  # the same numbers on all ranks
        pending: list[tuple[object, Tensor, Tensor]] = []
        for step in range(rng.randint(1, 12)):
            numel, dtype, value_seed = rng.choice([0, 1, 7, 20, 300]), rng.choice([*UNITS]), 50 * seed + step
            kind_draw = rng.random()
            if kind_draw < 0.3:
                counts = [[rng.choice([0, 0, 1, 5, numel]) for _ in range(size)] for _ in range(size)]  # [from][to]
                parts = [_value(value_seed, peer, sum(counts[peer]), dtype).split(counts[peer]) for peer in range(size)]
                expected = torch.cat([part[rank] for part in parts])
                out = torch.full((len(expected),), 99, dtype=dtype)
                x, recv_counts = torch.cat(parts[rank]), [counts[peer][rank] for peer in range(size)]
                pending.append((memory.start_all_to_all(out, x, recv_counts, counts[rank]), out, expected))
            elif kind_draw < 0.65:
                parts = [_value(value_seed, peer, numel, dtype) for peer in range(size)]
                out = torch.full((numel * size,), 99, dtype=dtype)
                shard = (
                    out[rank * numel : (rank + 1) * numel] if rng.random() < 0.5 else torch.empty(numel, dtype=dtype)
                )
                shard.copy_(parts[rank])
                pending.append((memory.start_all_gather(out, shard), out, torch.cat(parts)))
            else:
                parts = [_value(value_seed, peer, numel * size, dtype) for peer in range(size)]
                x = parts[rank].clone()
                block = slice(rank * numel, (rank + 1) * numel)
                out = x[block] if rng.random() < 0.5 else torch.full((numel,), 99, dtype=dtype)
                pending.append((memory.start_reduce_scatter(out, x), out, sum(parts)[block]))  # type: ignore[index]
            if rng.random() < 0.2:
                time.sleep(0.002 * random.random())  # not the same on all ranks
            while pending and rng.random() < 0.4:
                transfer, out, expected = pending.pop(rng.randrange(len(pending)))
                transfer.wait()  # type: ignore[attr-defined]
                wrong += int((out != expected).sum())
        for transfer, out, expected in pending:
            transfer.wait()  # type: ignore[attr-defined]
            wrong += int((out != expected).sum())
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_equal_their_definition(world: int) -> None:
    assert run_ranks(world, _count_wrong_elements, range(25)) == [0] * world


def _sums() -> tuple[Tensor, Tensor]:
    memory = _open(4096)
    torch.manual_seed(memory.rank)
    x = torch.randn(memory.size * 400).bfloat16()
    out = torch.empty(400, dtype=torch.bfloat16)
    memory.start_reduce_scatter(out, x).wait()
    return x, out


def test_half_precision_sums_are_fp32() -> None:
    results = run_ranks(3, _sums)
    total = torch.stack([x.float() for x, _ in results]).sum(0)
    torch.testing.assert_close(torch.cat([out for _, out in results]), total.bfloat16(), rtol=0, atol=0)


def _difference_without_gloo() -> int:
    """Run transfers of several pieces after removing the functions of gloo."""
    memory = _open(64)
    for name in ("all_reduce", "barrier", "all_gather", "send", "recv", "isend", "irecv"):
        setattr(dist, name, None)
    out = torch.empty(200 * memory.size)
    memory.start_all_gather(out, torch.full((200,), float(memory.rank))).wait()
    own = torch.empty(200)
    memory.start_reduce_scatter(own, out).wait()
    return int(own.sum()) - 200 * memory.rank * memory.size


def test_transfer_does_not_wait_for_gloo() -> None:
    assert run_ranks(3, _difference_without_gloo) == [0, 0, 0]


def _mismatch_error() -> str:
    memory = _open(256)
    x, full = torch.zeros(4), torch.zeros(8)
    transfer = memory.start_all_gather(full, x) if memory.rank else memory.start_reduce_scatter(x, full)
    with pytest.raises(CollectiveMismatchError) as excinfo:
        transfer.wait()
    return str(excinfo.value)


def test_mismatched_collectives_are_reported() -> None:
    first, second = run_ranks(2, _mismatch_error)
    assert first == second and "different collectives" in first


def _size_error() -> str:
    """Let rank 1 expect more from rank 0 than that sends, and rank 2 less."""
    memory = _open(256)
    recv_counts = [[3, 3, 3], [5, 3, 3], [2, 3, 3]][memory.rank]
    transfer = memory.start_all_to_all(torch.zeros(sum(recv_counts)), torch.zeros(9), recv_counts, [3, 3, 3])
    try:
        transfer.wait()
    except CollectiveMismatchError as error:
        return str(error)
    return ""


def test_unexpected_sizes_are_an_error() -> None:
    none, more, less = run_ranks(3, _size_error)
    assert not none and "between [3, 3, 4] and [3, 5, 4]" in more and "between [3, 2, 4] and [3, 3, 4]" in less


def _kill_last_rank(path: Path, forks: bool) -> None:
    """Let rank 0 wait for all; a rank in between is late until rank 0 has noticed the death."""
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
        wait_for_file(path)
        return
    with pytest.raises(RuntimeError) as excinfo:
        memory.start_all_gather(torch.zeros(4 * memory.size), torch.zeros(4)).wait()
    assert is_lost_peer_error(excinfo.value) and f"by rank {last}" in str(excinfo.value)
    path.touch()


@pytest.mark.parametrize("world, forks", [(2, False), (3, False), (2, True)])
def test_dead_rank_is_an_error_on_the_others(tmp_path: Path, world: int, forks: bool) -> None:
    """The error comes before the launcher ends the ranks, after 3 seconds.

    It comes even while another rank is late, or while a process lives that the dead rank has forked.
    """
    with pytest.raises(AssertionError, match="exit code 137"):
        run_ranks(world, _kill_last_rank, tmp_path / "heard of it", forks)
    assert (tmp_path / "heard of it").exists()


def test_timeout_names_all_late_ranks() -> None:
    pairs = {rank: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for rank in (1, 2, 3)}
    sockets = PeerSockets(None, {rank: local for rank, (local, _) in pairs.items()})
    remote, limit = {rank: end for rank, (_, end) in pairs.items()}, datetime.timedelta(seconds=1)
    start, timer = time.monotonic(), threading.Timer(0.8, remote[1].send, [b"word"])
    timer.start()
    with pytest.raises(RuntimeError, match="Timed out waiting 1000ms for rank 2 and rank 3$"):
        sockets.receive(4, limit)
    assert time.monotonic() - start < 1.6
    remote[3].send(b"last")
    for end in (remote[1], remote[3]):
        end.close()
    with pytest.raises(RuntimeError, match="Connection closed by rank 1: it has ended$"):  # at once: 2 is still late
        sockets.receive(4, datetime.timedelta(hours=1))


# functions that a rank calls, in this order, while it opens shared memory
CALLS = {"broadcast": dist, "mmap": mmap, "bind": socket.socket, "connect": socket.socket}


def _die_while_opening(directory: str, call: str) -> None:
    shared_memory.SHM_DIR = Path(directory)
    dist.barrier()  # the group is complete: its ranks connect one by one
    if dist.get_rank() == 1:
        setattr(CALLS[call], call, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError):
        SharedMemoryBackend.open(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        assert not list(Path(directory).iterdir())
        (Path(directory) / "nothing was left").touch()


@pytest.mark.parametrize("call", CALLS)
def test_rank_killed_during_setup_leaves_no_file(tmp_path: Path, call: str) -> None:
    with pytest.raises(AssertionError, match="exit code 137"):
        run_ranks(3, _die_while_opening, str(tmp_path), call)
    assert [path.name for path in tmp_path.iterdir()] == ["nothing was left"]


def _open_error(slot_bytes: int = 64) -> str:
    """Return the name of the error with which shared memory cannot be opened, or ""."""
    try:
        _open(slot_bytes)
    except SharedMemoryError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def _errors_without_space() -> tuple[list[str], str, bool]:
    file_system = os.statvfs(shared_memory.SHM_DIR)
    slot_bytes = file_system.f_frsize * file_system.f_blocks // 128 * 64  # half of the file system's size
    errors = [_open_error(slot_bytes)]
    for directory in ("/nowhere", "/proc/self/status"):
        shared_memory.SHM_DIR = Path(directory)
        errors.append(_open_error())
    mesh = build_mesh(tp=2, pp=1, device=torch.device("cpu"))
    return errors, mesh.shared_memory_error, mesh.tp.custom_backend is None


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_full_shared_memory_falls_back_to_gloo() -> None:
    assert run_ranks(2, _errors_without_space) == [(["ENOSPC", "ENOENT", "ENOTDIR"], "Not a directory", True)] * 2


def test_run_without_shared_memory_reports_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\nfrom megalite.parallel.cpu import shared_memory\n"
        "shared_memory.SHM_DIR = Path('/proc/self/status')\n"
    )
    argv = [*SMALL_RUN, *"--nproc 2 --tensor-model-parallel-size 2 --train-iters 1 --device cpu".split()]
    for flags, count in ((["--plugin", "mine.py"], 2), (["--plugin", "mine.py", "--no-shared-memory"], 0), ([], 0)):
        result = programs.run_python("pretrain_gpt.py", *argv, *flags, cwd=tmp_path, check=True)
        notes = [line for line in result.stdout.splitlines() + result.stderr.splitlines() if "through gloo" in line]
        assert len(notes) == count and all("Not a directory: ranks of one machine" in line for line in notes), notes
    log = (tmp_path / "runs/last/log.txt").read_text()
    assert log.count("through gloo") == 2


def _errors_on_several_machines(directory: str) -> tuple[str, str]:
    (own := Path(directory, str(dist.get_rank()))).mkdir()
    shared_memory.SHM_DIR = own
    errors = _open_error(), build_mesh(tp=2, pp=1, device=torch.device("cpu")).shared_memory_error
    dist.barrier()
    assert not list(own.iterdir())
    return errors


def test_several_machines_use_gloo(tmp_path: Path) -> None:
    assert run_ranks(2, _errors_on_several_machines, str(tmp_path)) == [("EREMOTE", "")] * 2


def _kill_first_rank(directory: str, call: str) -> None:
    """Kill rank 0 while only it has named files; the ranks of the next run find them."""
    shared_memory.SHM_DIR = Path(directory)
    dist.barrier()
    if dist.get_rank() == 0:
        setattr(CALLS[call], call, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError):
        _open(64)


def _can_open(directory: str) -> bool:
    shared_memory.SHM_DIR = Path(directory)
    return _open_error() == ""


@pytest.mark.parametrize("call", ["broadcast", "mmap", "bind"])
def test_leftovers_of_a_killed_rank_are_removed(tmp_path: Path, call: str) -> None:
    with pytest.raises(AssertionError, match="exit code 137"):
        run_ranks(2, _kill_first_rank, str(tmp_path), call)
    (leftover,) = tmp_path.iterdir()
    assert (leftover / "slots").stat().st_size == 3 * 2 * 64
    assert run_ranks(2, _can_open, str(tmp_path)) == [True, True]
    assert not list(tmp_path.iterdir())


def test_only_dead_leftovers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SHM_DIR", tmp_path)
    target = tmp_path / "target"
    target.mkdir()
    names = ("alive000", "other000", "young000", "dead0000", "old00000", "longer-000", "datasets", "numbered")
    alive, other, young, dead, old, longer, by_mkdir, numbered = (tmp_path / f"megalite-{name}" for name in names)
    for directory in (alive, other, young, dead, old, longer, numbered):
        directory.mkdir(0o700)
    by_mkdir.mkdir()  # with the mode of a user's mkdir, and old
    (numbered / "0").write_text("of a user")
    os.utime(by_mkdir, (1, 1))
    for directory in (alive, other, dead, longer, target):
        (directory / "slots").write_text("x")
        (directory / "1").write_text("x")
    (other / "notes").write_text("of a user")
    (tmp_path / "megalite-link0000").symlink_to(target)
    (dead / "0").symlink_to(target / "slots")
    os.utime(old, (1, 1))
    fd = os.open(alive, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    shared_memory.sweep()
    assert {path.name for path in tmp_path.iterdir()} == {
        "target", "megalite-alive000", "megalite-other000", "megalite-young000", "megalite-longer-000",
        "megalite-link0000", "megalite-datasets", "megalite-numbered",
    }  # fmt: skip
    assert (numbered / "0").exists()
    assert all((directory / "slots").exists() for directory in (alive, other, longer, target))
    os.close(fd)
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    shared_memory.sweep()
    assert alive.exists()


def _fails_without_sockets(directory: str) -> bool:
    """Return whether opening fails and leaves nothing, where only the names of sockets are too long for the kernel."""
    shared_memory.SHM_DIR = Path(directory)
    has_failed = _open_error() == "EINVAL"
    dist.barrier()
    return has_failed and not list(Path(directory).iterdir())


def test_missing_sockets_fall_back_to_gloo(tmp_path: Path) -> None:
    directory = tmp_path / ("long" * 30)
    directory.mkdir()
    assert run_ranks(2, _fails_without_sockets, str(directory)) == [True, True]


def _errors_at_file_limits(directory: str) -> list[str]:
    """Return the errors of opening when rank 0 may open 0, 1, ... 6 more files."""
    shared_memory.SHM_DIR = Path(directory)
    errors = []
    old_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    for more in range(7):
        os.close(next_fd := os.open(directory, os.O_RDONLY))
        if dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd + more, old_limit[1]))
        errors.append(_open_error())
        resource.setrlimit(resource.RLIMIT_NOFILE, old_limit)
    return errors


def test_file_limit_falls_back_to_gloo(tmp_path: Path) -> None:
    first, second = run_ranks(2, _errors_at_file_limits, str(tmp_path))
    assert first == second and first[0] == "EMFILE" and set(first) == {"EMFILE", ""} and not first[-1]
    assert not list(tmp_path.iterdir())


def _timeout_seconds(path: str) -> float:
    limit = datetime.timedelta(seconds=1)
    mesh = build_mesh(tp=2, pp=1, device=torch.device("cpu"), timeout=limit)
    start = time.monotonic()
    if mesh.tp.rank == 1:
        wait_for_file(Path(path))
        return 0.0
    with pytest.raises(RuntimeError) as excinfo:
        mesh.tp.custom_backend.start_all_gather(torch.zeros(8), torch.zeros(4)).wait()
    assert _TIMEOUT_ERROR.search(str(excinfo.value)) and "for rank 1" in str(excinfo.value)
    elapsed = time.monotonic() - start
    Path(path).touch()
    return elapsed


def test_hanging_rank_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    assert run_ranks(2, _timeout_seconds, str(tmp_path / "over"))[0] > 0.9


def _sum_with_long_timeout() -> tuple[datetime.timedelta, float]:
    memory = _open(256)
    default = memory.timeout
    memory.timeout = datetime.timedelta(milliseconds=2**32 + 10)
    if memory.rank == 0:
        time.sleep(0.5)
    out = torch.empty(8)
    memory.start_all_gather(out, torch.full((4,), float(memory.rank))).wait()
    return default, float(out.sum())


def test_timeout_default_equals_torchs() -> None:
    assert run_ranks(2, _sum_with_long_timeout) == [(datetime.timedelta(minutes=30), 4.0)] * 2


def test_shared_memory_variable_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, enabled in (("on", True), ("", True), ("off", False)):
        monkeypatch.setenv("MEGALITE_SHARED_MEMORY", value)
        assert env_override("shared_memory", True) is enabled
    monkeypatch.setenv("MEGALITE_SHARED_MEMORY", "no")
    with pytest.raises(ValueError, match="MEGALITE_SHARED_MEMORY=no is unknown; use on or off"):
        env_override("shared_memory", True)
