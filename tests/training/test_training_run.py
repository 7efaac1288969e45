"""Whole runs of pretrain_gpt.py: stop and resume, layouts, bad input, dead ranks, and listening sockets."""

import ipaddress
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import programs
import pytest
from pairwise import nightly_except
from program_runs import ROOT, children_of, is_alive, load_losses, load_status, run_pretrain, running_program
from token_files import write_documents
from train_cases import SMALL_RUN, TP2_PP2

from megalite.checkpoint.storage.local_storage import DirectoryLock
from megalite.checkpoint.storage.location import CheckpointError
from megalite.launch.local_launcher import _remove_stale_scratch

LAYOUTS = {"one process": [], "tp2 pp2": TP2_PP2, "tp2 pp2 split": [*TP2_PP2, "--split-backward"]}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_resumed_run_is_bit_equal(tmp_path: Path, layout: list[str]) -> None:
    flags = [*SMALL_RUN, *layout, "--train-iters", "8", "--save-interval", "3", "--hidden-dropout", "0.1"]
    run_pretrain(*flags, "--save", tmp_path / "a", check=True)
    flags += ["--save", str(tmp_path / "b"), "--load", str(tmp_path / "b")]
    first = run_pretrain(*flags, "--exit-interval", "5")
    assert first.returncode == 75 and load_status(tmp_path / "b")["outcome"] == "requeue", first.stderr
    second = run_pretrain(*flags)
    assert second.returncode == 0 and "resumed from" in second.stdout, second.stderr
    assert load_losses(tmp_path / "a") == load_losses(tmp_path / "b") and len(load_losses(tmp_path / "a")) == 8
    one, two = (json.loads((tmp_path / n / "iter_0000008/manifest.json").read_text()) for n in "ab")
    assert one["files"] == two["files"]  # sha256 of weights and optimizer
    expected = {"outcome": "done", "step": 8, "tokens": 8 * 8 * 16, "checkpoint": str(tmp_path / "b"), "rank": 0}
    assert (expected | {"reason": "reached the last step"}).items() <= load_status(tmp_path / "b").items()


# a thread of the process group still needs the interpreter while it shuts down, at least on the rank that is first: on the
# other rank the sum may be ready at once, and the callback runs in the main thread
BUSY = """
import atexit, runpy, sys, threading, time, torch, torch.distributed as dist
def wait(done):
    while not sys.is_finalizing() and threading.current_thread() is not threading.main_thread():
        time.sleep(0.01)
def leave_busy():
    dist.all_reduce(torch.zeros(1), async_op=True).get_future().then(wait)
    leave()
leave, dist.destroy_process_group = dist.destroy_process_group, leave_busy
atexit.register(print, "closed")
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
BUSY_RUNS = {
    "train": ["pretrain_gpt.py", *SMALL_RUN, "--train-iters", "2", "--tensor-model-parallel-size", "2"],
    "check": ["tools/check_cluster.py", "--device", "cpu", "--sizes", "64", "--times", "1"],
    "comm": ["tools/benchmark_comm.py", "--device", "cpu", "--min-bytes", "64", "--max-bytes", "64", "--times", "1"],
}


GUARDS = ("megalite/launch/process_group.py", "megalite/launch/rank_info.py")


@pytest.mark.parametrize("name", nightly_except([*BUSY_RUNS], ["train"], str, guards=GUARDS))
def test_torchrun_starts_training(tmp_path: Path, name: str) -> None:
    (tmp_path / "busy.py").write_text(BUSY)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    flags = [*BUSY_RUNS[name], *(["--run-dir", str(tmp_path)] if name == "train" else [])]
    argv += [str(tmp_path / "busy.py"), *flags]
    result = programs.run(argv, capture_output=True, text=True, timeout=200, cwd=ROOT, check=True)
    assert result.stdout.count("closed") == 2
    if name == "train":
        assert sorted(load_losses(tmp_path)) == [1, 2]


def test_every_launched_program_ends_its_ranks() -> None:
    files = (*ROOT.glob("tools/**/*.py"), *ROOT.glob("megalite/training/job/*.py"))
    texts = {path.name: path.read_text() for path in files}
    files_with = lambda part: {name for name, text in texts.items() if part in text}  # noqa: E731
    starting = files_with("read_environment(")  # two programs start through on_ranks of collectives.py
    launched = starting - {"collectives.py"} | {name for name in files_with("on_ranks(") if name != "collectives.py"}
    leaving = {"command.py", "check_cluster.py", "benchmark_comm.py", "generate.py", "evaluate.py"}
    assert launched == files_with("exit_process(lambda: ") == leaving
    assert starting == {"command.py", "generate.py", "evaluate.py", "collectives.py"}
    assert "run_main(main)" in (ROOT / "pretrain_gpt.py").read_text()


def test_ids_outside_the_vocabulary_stop_every_rank(tmp_path: Path) -> None:
    write_documents(tmp_path / "d", [[1, 2, 3, 200, 4] * 20] * 20)
    small = [f for f in SMALL_RUN if f != "--mock-data"]
    data = ["--data-path", tmp_path / "d", "--split", "1,0,0"]
    result = run_pretrain(*small, *TP2_PP2, *data, "--train-iters", "2", "--run-dir", tmp_path / "r")
    assert result.returncode == 3, result.stderr
    assert "token id 200" in result.stderr and "document" in result.stderr


def test_killed_launcher_ends_its_ranks_and_frees_the_directory(tmp_path: Path) -> None:
    """Also check that the next launcher removes its temporary files."""
    flags = [*SMALL_RUN, "--nproc", "2", "--train-iters", "100000", "--save", tmp_path, "--save-interval", "50000"]
    short_dir = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # a socket's path must be short
    with running_program(*flags, env={**os.environ, "TMPDIR": str(short_dir)}) as process:
        child_pids = children_of(process.pid)
        ranks = [*child_pids, *(rank for server in child_pids for rank in children_of(server))]
        with pytest.raises(CheckpointError, match="is in use by process"):
            DirectoryLock(tmp_path)
        process.kill()  # the launcher alone: no process is left to stop the ranks
        start_s = time.monotonic()
        assert len(ranks) >= 2
        while any(is_alive(pid) for pid in ranks):
            assert time.monotonic() - start_s < 60
            time.sleep(0.02)
        DirectoryLock(tmp_path).close()
    leftovers = [*short_dir.iterdir()]
    assert len(leftovers) == 2 and all(path.name.startswith("megalite-ranks-") for path in leftovers)
    assert len([*short_dir.glob("*/pymp-*/listener-*")]) == 1
    for path in leftovers:
        os.utime(path, (0, 0))
        _remove_stale_scratch(path)
    short_dir.rmdir()


# ---- a run on one machine cannot be reached from other machines
LISTEN = "0A"


def address(text: str) -> str:
    """Return the IP address in a field of /proc/net/tcp: 32-bit words in native byte order."""
    packed = b"".join(bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8))
    ip = ipaddress.ip_address(packed)
    return str(getattr(ip, "ipv4_mapped", None) or ip)


def listeners(pid: int) -> Iterator[str]:
    """Yield the addresses on which a process listens."""
    own_sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            own_sockets |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(descriptor)))
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == LISTEN and fields[9] in own_sockets:
                yield address(fields[1].partition(":")[0])


def test_local_ranks_listen_only_on_loopback(tmp_path: Path) -> None:
    flags = ["--train-iters", "100000", "--run-dir", tmp_path, "--nproc", "2", "--device", "cpu", "--pp", "2"]
    with running_program(*SMALL_RUN, *flags) as process:
        child_pids = children_of(process.pid)
        pids = [process.pid, *child_pids, *(rank for server in child_pids for rank in children_of(server))]
        addresses = [ipaddress.ip_address(a) for pid in pids for a in listeners(pid)]
    assert len(addresses) >= 2 and all(ip.is_loopback for ip in addresses), addresses
