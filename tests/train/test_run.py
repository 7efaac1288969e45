"""The program as a user starts it: stop and resume, other layouts, bad input, dead ranks."""

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import programs
import pytest
from cover import rarely
from train_cases import SMALL, TP2_PP2

from megalite.checkpoint.storage.file_system import Lock
from megalite.checkpoint.storage.location import CheckpointError
from megalite.parallel.launch import CUDA_VARIABLES, cuda_environment, prepare_cuda

ROOT = Path(__file__).resolve().parents[2]


def pretrain(*flags: str, timeout: float = 90, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags]
    return programs.run(
        words, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env={**os.environ, **(env or {})}
    )


def losses(folder: Path, of: str = "train/loss") -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r[of] for r in rows if of in r}


@pytest.mark.parametrize(
    "layout", [[], TP2_PP2, [*TP2_PP2, "--split-backward"]], ids=["one process", "tp2 pp2", "tp2 pp2 split"]
)
def test_a_stopped_and_resumed_run_is_the_same_run_bit_for_bit(tmp_path: Path, layout: list[str]) -> None:
    flags = [*SMALL, *layout, "--train-iters", "8", "--save-interval", "3", "--hidden-dropout", "0.1"]
    straight = pretrain(*flags, "--save", str(tmp_path / "a"))
    assert straight.returncode == 0, straight.stderr
    first = pretrain(*flags, "--save", str(tmp_path / "b"), "--load", str(tmp_path / "b"), "--exit-interval", "5")
    assert first.returncode == 75, first.stderr
    assert json.loads((tmp_path / "b/status.json").read_text())["outcome"] == "requeue"
    second = pretrain(*flags, "--save", str(tmp_path / "b"), "--load", str(tmp_path / "b"))
    assert second.returncode == 0 and "resumed from" in second.stdout, second.stderr
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and len(losses(tmp_path / "a")) == 8
    one, two = (json.loads((tmp_path / n / "iter_0000008/manifest.json").read_text()) for n in "ab")
    assert one["files"] == two["files"]  # sha256 of weights and optimizer
    status = json.loads((tmp_path / "b/status.json").read_text())
    assert {key: status[key] for key in ("outcome", "step", "tokens", "checkpoint", "reason", "rank")} == {
        "outcome": "done",
        "step": 8,
        "tokens": 8 * 8 * 16,
        "checkpoint": str(tmp_path / "b"),
        "reason": "reached the last step",
        "rank": 0,
    }


def test_a_checkpoint_goes_on_under_another_layout(tmp_path: Path) -> None:
    flags = [*SMALL, "--train-iters", "6", "--save-interval", "3", "--hidden-dropout", "0.1"]
    assert pretrain(*flags, "--save", str(tmp_path / "a")).returncode == 0
    half = pretrain(*flags, *TP2_PP2, "--save", str(tmp_path / "b"), "--exit-interval", "3")
    assert half.returncode == 75, half.stderr
    rest = pretrain(*flags, "--nproc", "2", "--save", str(tmp_path / "b"), "--load", str(tmp_path / "b"))
    assert rest.returncode == 0, rest.stderr
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), rel=1e-4)


def test_a_run_whose_backward_was_split_goes_on_with_it_whole(tmp_path: Path) -> None:
    """Bounds of pp in tests/test_layouts.py: sums over micro-batches are in another order."""
    pp2 = ["--nproc", "2", "--pipeline-model-parallel-size", "2"]
    flags = [*SMALL, *pp2, "--train-iters", "6", "--save-interval", "3", "--eval-interval", "3"]
    assert pretrain(*flags, "--save", str(tmp_path / "a")).returncode == 0
    half = pretrain(*flags, "--split-backward", "--save", str(tmp_path / "b"), "--exit-interval", "3")
    assert half.returncode == 75, half.stderr
    rest = pretrain(*flags, "--save", str(tmp_path / "b"), "--load", str(tmp_path / "b"))
    assert rest.returncode == 0 and "resumed from" in rest.stdout, rest.stderr
    for of, times in (("train/loss", 6), ("val/valid/loss", 2)):
        whole, both = (losses(tmp_path / name, of) for name in "ab")
        assert len(whole) == times and both == pytest.approx(whole, rel=1e-5)


# a thread of the group still needs the interpreter when that is taken down
BUSY = """
import atexit, runpy, sys, time, torch, torch.distributed as dist
def wait(done):
    while not sys.is_finalizing():
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


@pytest.mark.parametrize("name", rarely([*BUSY_RUNS], ["train"], str, guards=("megalite/parallel/launch.py",)))
def test_torchrun_starts_it_too(tmp_path: Path, name: str) -> None:
    (tmp_path / "busy.py").write_text(BUSY)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    flags = [*BUSY_RUNS[name], *(["--run-dir", str(tmp_path)] if name == "train" else [])]
    words += [str(tmp_path / "busy.py"), *flags]
    done = programs.run(words, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("closed") == 2
    if name == "train":
        assert sorted(losses(tmp_path)) == [1, 2]


def test_every_program_for_launchers_ends_its_ranks_alike() -> None:
    files = (*ROOT.glob("tools/**/*.py"), *ROOT.glob("megalite/train/life/*.py"))
    texts = {path.name: path.read_text() for path in files}
    having = lambda part: {name for name, text in texts.items() if part in text}  # noqa: E731
    starts = having("= read_environment(")  # on_ranks of collectives.py is what two programs start by
    programs = starts - {"collectives.py"} | {name for name in having("on_ranks(") if name != "collectives.py"}
    assert (
        programs == having(" leave(lambda: ") == {"command.py", "check_cluster.py", "benchmark_comm.py", "generate.py"}
    )
    assert starts == {"command.py", "generate.py", "collectives.py"}
    assert "as_program(main)" in (ROOT / "pretrain_gpt.py").read_text()


BAD = {
    "data missing": (["--data-path", "/no/such/prefix"], 3, "/no/such/prefix"),
    "world size": (["--mock-data", "--nproc", "3", "--tensor-model-parallel-size", "2"], 2, "world size 3"),
    "batch": (["--mock-data", "--nproc", "3"], 2, "global_batch_size=8 is not a multiple"),
    "layers": (["--mock-data", "--pipeline-model-parallel-size", "8", "--nproc", "8"], 2, "num_layers=4"),
    "no checkpoint": (["--mock-data", "--load", "/no/such", "--exit-on-missing-checkpoint"], 2, "holds no checkpoint"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input_is_one_clear_error(tmp_path: Path, name: str) -> None:
    flags, code, text = BAD[name]
    small = [f for f in SMALL if f != "--mock-data"]
    result = pretrain(*small, *flags, "--train-iters", "2", "--run-dir", str(tmp_path / "run"))
    assert result.returncode == code, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("pretrain_gpt.py:")]
    assert len(errors) == 1 and text in errors[0], result.stderr
    assert "Traceback" not in result.stderr


def test_ids_beyond_the_vocabulary_stop_every_rank(tmp_path: Path) -> None:
    import numpy as np

    from tools.preprocess.indexed_writer import IndexedWriter

    writer = IndexedWriter(tmp_path / "d", np.uint16)
    for _ in range(20):
        writer.add([1, 2, 3, 200, 4] * 20)
    writer.finish()
    small = [f for f in SMALL if f != "--mock-data"]
    flags = [
        "--data-path",
        str(tmp_path / "d"),
        "--split",
        "1,0,0",
        "--train-iters",
        "2",
        "--run-dir",
        str(tmp_path / "r"),
    ]
    result = pretrain(*small, *TP2_PP2, *flags)
    assert result.returncode == 3, result.stderr
    assert "token id 200" in result.stderr and "document" in result.stderr


def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), *SMALL, *TP2_PP2, "--train-iters", "100000"]
    process = programs.Popen(
        [*words, "--run-dir", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "step     3/" in line:
                break
        ranks = descendants(process.pid)
        found = listening(ranks)
        assert found and all(address.is_loopback for address in found), found  # no other machine can reach it
        os.kill(ranks[-1], signal.SIGKILL)  # the youngest process is the last rank
        process.communicate(timeout=60)  # their own limit is ten minutes
        assert process.returncode not in (0, None)
        assert not [p for p in descendants(process.pid)]
    finally:
        process.kill()


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            if parent == pid:
                found += [int(entry.name), *descendants(int(entry.name))]
    return sorted(set(found))


def listening(pids: list[int]) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Where these processes wait for connections over TCP."""
    inodes = set()
    for pid in pids:
        for number in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(number))
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                raw = bytes.fromhex(words[1].partition(":")[0])
                swapped = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))  # words of the host's order
                found.append(ipaddress.ip_address(swapped))
    return found


def test_a_killed_launcher_takes_its_ranks_along_and_the_directory_is_free(tmp_path: Path) -> None:
    flags = [*SMALL, "--nproc", "2", "--train-iters", "100000", "--save", str(tmp_path), "--save-interval", "50000"]
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags]
    process = programs.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "step     3/" in line:
                break
        ranks = descendants(process.pid)
        with pytest.raises(CheckpointError, match="is in use by process"):
            Lock(tmp_path)
        process.kill()  # the launcher alone: nobody is left to tell the others
        begin = time.monotonic()
        assert len(ranks) >= 2
        while any(alive(pid) for pid in ranks):
            assert time.monotonic() - begin < 60
            time.sleep(0.02)
        Lock(tmp_path).close()
    finally:
        process.kill()
        process.communicate()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_environment_of_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in cuda_environment(1, tmp_path, 9)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in cuda_environment(2, tmp_path, 10)
    assert cuda_environment(2, tmp_path, 9)["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 9.0\necho 9.0\n")
    tool.chmod(0o755)
    for name in CUDA_VARIABLES:
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    prepare_cuda(2, tmp_path)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"  # the user's


def test_sigterm_saves_and_says_requeue(tmp_path: Path) -> None:
    flags = [*SMALL, *TP2_PP2, "--train-iters", "100000", "--exit-signal-handler"]
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags, "--save", str(tmp_path), "--save-interval", "50000"]
    process = programs.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "step     3/" in line:
                break
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 75
        status = json.loads((tmp_path / "status.json").read_text())
        assert status["outcome"] == "requeue" and (tmp_path / f"iter_{status['step']:07d}" / "COMPLETE").is_file()
    finally:
        process.kill()


def test_fp16_overflow_skips_the_step_and_halves_the_scale(tmp_path: Path) -> None:
    flags = [*SMALL, "--train-iters", "4", "--fp16", "--hysteresis", "1", "--initial-loss-scale", str(2.0**40)]
    result = pretrain(*flags, "--run-dir", str(tmp_path))
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    train = [r for r in rows if "train/loss" in r]
    assert [r["train/skipped"] for r in train] == [1, 1, 1, 1]
    assert [r["train/loss_scale"] for r in train] == [2.0**39, 2.0**38, 2.0**37, 2.0**36]
    low = pretrain(*SMALL, "--train-iters", "4", "--fp16", "--loss-scale", "128", "--run-dir", str(tmp_path / "low"))
    assert low.returncode == 0 and losses(tmp_path / "low")[4] < losses(tmp_path / "low")[1]
