"""What must be alike on all ranks is compared before the first step, and what differs is named with its nodes."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from program_runs import ROOT, status_of
from ranks import run_ranks
from train_cases import SMALL

from megalite.launch.rank_info import LaunchError
from megalite.parallel.mesh import world_axis
from megalite.training.monitoring import rank_consistency as fingerprint
from megalite.training.monitoring.rank_consistency import (
    MUST_MATCH,
    SHOULD_MATCH,
    compare_facts,
    describe,
    machine_facts,
)

CPU = torch.device("cpu")


def _each_fact_differs() -> dict[str, Any]:
    """Of rank 2, one after the other; and what the comparison costs."""
    world, mine, told = world_axis(), machine_facts(CPU), {}
    mine |= {"options": "lr=0.1\nbf16=True", "data": "wiki 0badcafe weight 1", "card": "H100", "driver": "570.1"}
    told["alike"] = compare_facts(mine, world, CPU)
    socket.gethostname = lambda: f"node{world.rank // 2}"  # of this process alone
    for name in (*MUST_MATCH, *SHOULD_MATCH):
        text = mine.get(name) or "one=1"
        facts = mine | {name: f"{text}\nanother=1" if world.rank == 2 else text}
        try:
            told[name] = compare_facts(facts, world, CPU)[1]
        except LaunchError as error:
            told[name] = str(error)
    return told


def test_rank_differences_are_named_with_their_nodes() -> None:
    answers = run_ranks(3, _each_fact_differs)
    assert answers[0]["alike"] == ([socket.gethostname()] * 3, [])
    for told in answers:  # the same everywhere
        for name in MUST_MATCH:
            assert told[name].startswith("the ranks of this run differ:\n")
            assert f"{name} differs: not on node0 (rank 0 and 1 more); 'another=1' on node1 (rank 2)" in told[name]
        for name in SHOULD_MATCH:
            assert told[name] == [f"{name} differs: not on node0 (rank 0 and 1 more); 'another=1' on node1 (rank 2)"]


def test_only_differing_lines_are_printed() -> None:
    texts = ["lr=0.1\nbf16=True\nseed=1"] * 3 + ["lr=0.2\nbf16=True\nseed=1"]
    said = "options differs: 'lr=0.1' on a, b (rank 0 and 2 more); 'lr=0.2' on b (rank 3)"
    assert describe("options", texts, ["a", "a", "b", "b"]) == said


def test_edited_source_file_changes_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rope.py").write_text("theta = 10_000")
    monkeypatch.setattr(fingerprint.megalite, "__file__", str(tmp_path / "__init__.py"))
    seen = set()
    for text in ("theta = 10_000", "theta = 10_001"):
        (tmp_path / "rope.py").write_text(text)
        seen.add(fingerprint.source_code_hash())
    (tmp_path / "rope.py").rename(tmp_path / "pore.py")
    seen.add(fingerprint.source_code_hash())
    assert len(seen) == 3


def _start(rank: int, port: int, folder: Path, *flags: str, **variables: str) -> subprocess.Popen[str]:
    """One of two nodes, as a launcher starts it."""
    where = dict(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    env = {**os.environ, **where, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", **variables}
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), *SMALL, "--train-iters", "2", "--run-dir", str(folder)]
    pipe = subprocess.PIPE
    return programs.Popen([*words, "--device", "cpu", *flags], env=env, text=True, stdout=pipe, stderr=pipe, cwd=ROOT)


def _both(folder: Path, flags: str = "", **variables: str) -> list[tuple[int, str]]:
    """Exit code and stderr; the second node alone has `flags` and `variables`."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    nodes = [_start(0, port, folder), _start(1, port, folder, *flags.split(), **variables)]
    try:
        texts = [node.communicate(timeout=150)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    return [(node.returncode, text) for node, text in zip(nodes, texts, strict=True)]


def test_other_option_on_a_node_ends_the_run(tmp_path: Path) -> None:
    for code, text in _both(tmp_path, "--lr 0.02 --hidden-dropout 0"):
        assert code == 3 and "Traceback" not in text
        assert "options differs: 'lr=0.01' on" in text and "'hidden_dropout=0.0, lr=0.02' on" in text
    status = status_of(tmp_path)
    assert status["outcome"] == "preflight" and "options differs" in status["reason"]


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_other_environment_is_a_warning(tmp_path: Path) -> None:
    (code, text), _ = _both(tmp_path, NCCL_ALGO="Ring")
    assert code == 0
    assert "WARNING: environment differs: not on" in text and "'NCCL_ALGO=Ring' on" in text
    assert "NCCL_ALGO=Ring" in (tmp_path / "log.txt").read_text()
    for code, text in _both(tmp_path, MEGALITE_FAULT="init.collectives:1:0:bitflip"):
        assert code == 3 and "Traceback" not in text
        assert "all_reduce over world (ranks [0, 1]): on rank 0 1 of 1024 values are wrong" in text
