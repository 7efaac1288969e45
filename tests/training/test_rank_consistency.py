"""Facts that must match on all ranks are compared before the first step; differences are named with their nodes."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from program_runs import ROOT, load_status
from ranks import run_ranks
from train_cases import SMALL_RUN

from megalite.launch.rank_info import LaunchError
from megalite.parallel.mesh import world_axis
from megalite.training.monitoring import rank_consistency
from megalite.training.monitoring.rank_consistency import (
    MUST_MATCH,
    SHOULD_MATCH,
    compare_facts,
    describe,
    machine_facts,
)

CPU = torch.device("cpu")


def _compare_with_each_fact_changed() -> dict[str, Any]:
    """Return the result of the comparison without a change, and with each fact of rank 2 changed in turn."""
    world, own_facts, results = world_axis(), machine_facts(CPU), {}
    own_facts |= {"options": "lr=0.1\nbf16=True", "data": "wiki 0badcafe weight 1", "gpu": "H100", "driver": "570.1"}
    results["unchanged"] = compare_facts(own_facts, world, CPU)
    socket.gethostname = lambda: f"node{world.rank // 2}"  # in this process alone
    for name in (*MUST_MATCH, *SHOULD_MATCH):
        text = own_facts.get(name) or "one=1"
        facts = own_facts | {name: f"{text}\nanother=1" if world.rank == 2 else text}
        try:
            results[name] = compare_facts(facts, world, CPU)[1]
        except LaunchError as error:
            results[name] = str(error)
    return results


def test_rank_differences_are_named_with_their_nodes() -> None:
    results_of_ranks = run_ranks(3, _compare_with_each_fact_changed)
    assert results_of_ranks[0]["unchanged"] == ([socket.gethostname()] * 3, [])
    for results in results_of_ranks:  # the same on all ranks
        for name in MUST_MATCH:
            assert results[name].startswith("the ranks of this run differ:\n")
            assert f"{name} differs: not on node0 (rank 0 and 1 more); 'another=1' on node1 (rank 2)" in results[name]
        for name in SHOULD_MATCH:
            assert results[name] == [f"{name} differs: not on node0 (rank 0 and 1 more); 'another=1' on node1 (rank 2)"]


def test_only_differing_lines_are_printed() -> None:
    texts = ["lr=0.1\nbf16=True\nseed=1"] * 3 + ["lr=0.2\nbf16=True\nseed=1"]
    expected = "options differs: 'lr=0.1' on a, b (rank 0 and 2 more); 'lr=0.2' on b (rank 3)"
    assert describe("options", texts, ["a", "a", "b", "b"]) == expected


def test_edited_source_file_changes_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rope.py").write_text("theta = 10_000")
    monkeypatch.setattr(rank_consistency.megalite, "__file__", str(tmp_path / "__init__.py"))
    hashes = set()
    for text in ("theta = 10_000", "theta = 10_001"):
        (tmp_path / "rope.py").write_text(text)
        hashes.add(rank_consistency.source_code_hash())
    (tmp_path / "rope.py").rename(tmp_path / "pore.py")
    hashes.add(rank_consistency.source_code_hash())
    assert len(hashes) == 3


def _start_node(rank: int, port: int, run_dir: Path, *flags: str, **variables: str) -> subprocess.Popen[str]:
    """Start one of two nodes, as a launcher does."""
    rank_variables = dict(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    env = {**os.environ, **rank_variables, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", **variables}
    argv = [sys.executable, str(ROOT / "pretrain_gpt.py"), *SMALL_RUN, "--train-iters", "2", "--run-dir", str(run_dir)]
    pipe = subprocess.PIPE
    return programs.Popen([*argv, "--device", "cpu", *flags], env=env, text=True, stdout=pipe, stderr=pipe, cwd=ROOT)


def _run_two_nodes(run_dir: Path, flags: str = "", **variables: str) -> list[tuple[int, str]]:
    """Return exit code and stderr of both nodes; only the second one has `flags` and `variables`."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    nodes = [_start_node(0, port, run_dir), _start_node(1, port, run_dir, *flags.split(), **variables)]
    try:
        texts = [node.communicate(timeout=150)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    return [(node.returncode, text) for node, text in zip(nodes, texts, strict=True)]


def test_other_option_on_a_node_ends_the_run(tmp_path: Path) -> None:
    for code, text in _run_two_nodes(tmp_path, "--lr 0.02 --hidden-dropout 0"):
        assert code == 3 and "Traceback" not in text
        assert "options differs: 'lr=0.01' on" in text and "'hidden_dropout=0.0, lr=0.02' on" in text
    status = load_status(tmp_path)
    assert status["outcome"] == "preflight" and "options differs" in status["reason"]


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_other_environment_is_a_warning(tmp_path: Path) -> None:
    (code, text), _ = _run_two_nodes(tmp_path, NCCL_ALGO="Ring")
    assert code == 0
    assert "WARNING: environment differs: not on" in text and "'NCCL_ALGO=Ring' on" in text
    assert "NCCL_ALGO=Ring" in (tmp_path / "log.txt").read_text()
    for code, text in _run_two_nodes(tmp_path, MEGALITE_FAULT="init.collectives:1:0:bitflip"):
        assert code == 3 and "Traceback" not in text
        assert "all_reduce over world (ranks [0, 1]): on rank 0 1 of 1024 values are wrong" in text
