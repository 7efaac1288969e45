"""The program as a user starts it: stop and resume, other layouts, bad input, dead ranks, and who can reach it."""

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
from pairwise import rarely
from program_runs import ROOT, alive, children, losses, pretrain, running, status_of
from token_files import write
from train_cases import SMALL, TP2_PP2

from megalite.checkpoint.storage.local_storage import DirectoryLock
from megalite.checkpoint.storage.location import CheckpointError
from megalite.launch.local_launcher import _remove_stale_scratch

LAYOUTS = {"one process": [], "tp2 pp2": TP2_PP2, "tp2 pp2 split": [*TP2_PP2, "--split-backward"]}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_resumed_run_is_bit_equal(tmp_path: Path, layout: list[str]) -> None:
    flags = [*SMALL, *layout, "--train-iters", "8", "--save-interval", "3", "--hidden-dropout", "0.1"]
    pretrain(*flags, "--save", tmp_path / "a", ok=True)
    flags += ["--save", str(tmp_path / "b"), "--load", str(tmp_path / "b")]
    first = pretrain(*flags, "--exit-interval", "5")
    assert first.returncode == 75 and status_of(tmp_path / "b")["outcome"] == "requeue", first.stderr
    second = pretrain(*flags)
    assert second.returncode == 0 and "resumed from" in second.stdout, second.stderr
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and len(losses(tmp_path / "a")) == 8
    one, two = (json.loads((tmp_path / n / "iter_0000008/manifest.json").read_text()) for n in "ab")
    assert one["files"] == two["files"]  # sha256 of weights and optimizer
    wanted = {"outcome": "done", "step": 8, "tokens": 8 * 8 * 16, "checkpoint": str(tmp_path / "b"), "rank": 0}
    assert (wanted | {"reason": "reached the last step"}).items() <= status_of(tmp_path / "b").items()


# a thread of the group still needs the interpreter when that is taken down; at least on the rank that is there first: on
# the other the sum may be ready at once, and its own thread is asked
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
    "train": ["pretrain_gpt.py", *SMALL, "--train-iters", "2", "--tensor-model-parallel-size", "2"],
    "check": ["tools/check_cluster.py", "--device", "cpu", "--sizes", "64", "--times", "1"],
    "comm": ["tools/benchmark_comm.py", "--device", "cpu", "--min-bytes", "64", "--max-bytes", "64", "--times", "1"],
}


GUARDS = ("megalite/launch/process_group.py", "megalite/launch/rank_info.py")


@pytest.mark.parametrize("name", rarely([*BUSY_RUNS], ["train"], str, guards=GUARDS))
def test_torchrun_starts_training(tmp_path: Path, name: str) -> None:
    (tmp_path / "busy.py").write_text(BUSY)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    flags = [*BUSY_RUNS[name], *(["--run-dir", str(tmp_path)] if name == "train" else [])]
    words += [str(tmp_path / "busy.py"), *flags]
    done = programs.run(words, capture_output=True, text=True, timeout=200, cwd=ROOT, ok=True)
    assert done.stdout.count("closed") == 2
    if name == "train":
        assert sorted(losses(tmp_path)) == [1, 2]


def test_every_launched_program_ends_its_ranks() -> None:
    files = (*ROOT.glob("tools/**/*.py"), *ROOT.glob("megalite/training/job/*.py"))
    texts = {path.name: path.read_text() for path in files}
    having = lambda part: {name for name, text in texts.items() if part in text}  # noqa: E731
    starts = having("read_environment(")  # on_ranks of collectives.py is what two programs start by
    programs = starts - {"collectives.py"} | {name for name in having("on_ranks(") if name != "collectives.py"}
    leaving = {"command.py", "check_cluster.py", "benchmark_comm.py", "generate.py"}
    assert programs == having("exit_process(lambda: ") == leaving
    assert starts == {"command.py", "generate.py", "collectives.py"}
    assert "run_main(main)" in (ROOT / "pretrain_gpt.py").read_text()


def test_ids_outside_the_vocabulary_stop_every_rank(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 2, 3, 200, 4] * 20] * 20)
    small = [f for f in SMALL if f != "--mock-data"]
    data = ["--data-path", tmp_path / "d", "--split", "1,0,0"]
    result = pretrain(*small, *TP2_PP2, *data, "--train-iters", "2", "--run-dir", tmp_path / "r")
    assert result.returncode == 3, result.stderr
    assert "token id 200" in result.stderr and "document" in result.stderr


def test_killed_launcher_ends_its_ranks_and_frees_the_directory(tmp_path: Path) -> None:
    """What it leaves where temporary files are, the next one removes."""
    flags = [*SMALL, "--nproc", "2", "--train-iters", "100000", "--save", tmp_path, "--save-interval", "50000"]
    short = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # as a socket's path has to be
    with running(*flags, env={**os.environ, "TMPDIR": str(short)}) as process:
        below = children(process.pid)
        ranks = [*below, *(rank for server in below for rank in children(server))]
        with pytest.raises(CheckpointError, match="is in use by process"):
            DirectoryLock(tmp_path)
        process.kill()  # the launcher alone: nobody is left to tell the others
        begin = time.monotonic()
        assert len(ranks) >= 2
        while any(alive(pid) for pid in ranks):
            assert time.monotonic() - begin < 60
            time.sleep(0.02)
        DirectoryLock(tmp_path).close()
    left = [*short.iterdir()]
    assert len(left) == 2 and all(path.name.startswith("megalite-ranks-") for path in left)
    assert len([*short.glob("*/pymp-*/listener-*")]) == 1
    for path in left:
        os.utime(path, (0, 0))
        _remove_stale_scratch(path)
    short.rmdir()


# ---- what a run of one machine lets other machines reach: nothing
LISTEN = "0A"


def address(text: str) -> str:
    """Of a field of /proc/net/tcp: words of 32 bits, in the machine's order."""
    raw = b"".join(bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8))
    found = ipaddress.ip_address(raw)
    return str(getattr(found, "ipv4_mapped", None) or found)


def listeners(pid: int) -> Iterator[str]:
    """Addresses at which a process waits for connections."""
    mine = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            mine |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(descriptor)))
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == LISTEN and fields[9] in mine:
                yield address(fields[1].partition(":")[0])


def test_local_ranks_listen_only_on_loopback(tmp_path: Path) -> None:
    flags = ["--train-iters", "100000", "--run-dir", tmp_path, "--nproc", "2", "--device", "cpu", "--pp", "2"]
    with running(*SMALL, *flags) as run:
        pids = [run.pid, *children(run.pid), *(rank for server in children(run.pid) for rank in children(server))]
        found = [ipaddress.ip_address(a) for pid in pids for a in listeners(pid)]
    assert len(found) >= 2 and all(one.is_loopback for one in found), found
