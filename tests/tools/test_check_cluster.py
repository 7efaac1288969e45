"""tools/check_cluster.py: what it measures, the ranks that it names, and its exit codes."""

import datetime
import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megalite.parallel.mesh import build_mesh
from tools import check_cluster


def check(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    argv = ("tools/check_cluster.py", "--device", "cpu", *flags)
    return programs.run_python(*argv, env=os.environ | variables, timeout=200)


def test_healthy_ranks_exit_with_0_and_a_flipped_bit_with_1(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    quick = ["--nproc", "2", "--times", "2", "--sizes", "1024", "65536", "--slow", "0", "--json", str(file)]
    done = check(*quick)
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())
    assert results["exit"] == 0 and results["ranks"] == 2 and results["hosts"] == [socket.gethostname()] * 2
    kinds = [(row["axis"], row["kind"], row["bytes"]) for row in results["rows"]]
    assert kinds == [("world", kind, size) for size in (1024, 65536) for kind in check_cluster.KINDS]
    for row in results["rows"]:  # with 2 ranks
        bus = row["bytes"] / row["us"] / 1e3 * dict(all_gather=0.5, reduce_scatter=0.5, message=2).get(row["kind"], 1.0)
        assert row["least"] == pytest.approx(bus, rel=0.9) and row["least"] <= row["median"]
    [(a, b, rate)] = results["pairs"]
    assert (a, b) == (0, 1) and rate > 0
    assert done.stdout.count("all_reduce") == 2 and "slowest pair: ranks 0" in done.stdout and "fine" in done.stdout
    done = check(*quick, MEGALITE_FAULT="init.collectives:1:0:bitflip")
    assert done.returncode == 1 and "all_reduce over world (ranks [0, 1]): on rank 0 1 of 1024" in done.stderr
    assert json.loads(file.read_text())["exit"] == 1 and "not fit for a run" in done.stdout


def test_failed_rendezvous_exits_with_3() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
        start = time.monotonic()
        variables = dict(RANK="1", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        done = check("--timeout-s", "2", **variables)
    assert done.returncode == 3 and "could not join the others at 127.0.0.1" in done.stderr
    assert time.monotonic() - start < 100
    assert check(RANK="0").returncode == 3  # WORLD_SIZE is missing


def _measure_with_a_slow_link() -> tuple[list[Any], dict[str, Any]]:
    """Check a cluster in which messages of rank 3 take longer; return its pairs and all results."""
    mesh = build_mesh(tp=1, pp=1, device=torch.device("cpu"), timeout=datetime.timedelta(seconds=60))
    real_send = dist.send

    def send(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.5)
        real_send(*args, **kwargs)

    if mesh.world.rank == 3:
        dist.send = send  # type: ignore[assignment]
    flags = ["--sizes", "1024", "--times", "1", "--slow", "0.3", "--expect", "1000"]
    args = check_cluster.build_parser().parse_args(flags)
    results = check_cluster.measure(mesh, mesh.device, args)
    return results["pairs"], results


def test_slow_link_and_slow_group_are_named() -> None:
    for pairs, results in run_ranks(4, _measure_with_a_slow_link):
        assert [(a, b) for a, b, _ in pairs] == [(0, 1), (2, 3), (1, 2)]
        assert min(pairs, key=lambda pair: pair[2])[:2] == (2, 3)
        assert any(line.startswith("ranks 2 and 3:") for line in results["slow"])
        assert results["slow"][-1].startswith("all_reduce over world with rank ") and "not 1000" in results["slow"][-1]
