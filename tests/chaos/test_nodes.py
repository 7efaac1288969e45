"""Two nodes, a cable between them and torchrun on each: what a user sees when one is lost, comes back, or cannot be reached.

Tensor parallelism is inside a node, data or pipeline parallelism across. Runs share a folder, as on a cluster.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
from network_namespaces import ROOT, Node, Unpermitted, two_nodes
from train_cases import SMALL, logged

GUARDS = ("megalite/launch/process_group.py", "megalite/launch/rank_info.py")
pytestmark = [pytest.mark.nightly(guards=GUARDS), pytest.mark.timeout(400)]
QUICK = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
TIMEOUT_S = 5
FLAGS = [*SMALL, *"--device cpu --lr-decay-style constant --train-iters 100000 --hidden-dropout 0.1".split()]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    try:
        nodes = two_nodes(tmp_path)
        with nodes as made:
            yield made
    except Unpermitted as why:
        pytest.skip(f"no namespaces here: {why}")


def torchrun(node: Node, folder: Path, *flags: str, nodes: str = "2") -> programs.Talk:
    """As examples/launch/torchrun.sh does it, with shorter waits."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "2"]
    words += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node-a:29500", "--rdzv-id", "run"]
    words += ["--rdzv-conf", QUICK, str(ROOT / "pretrain_gpt.py"), *FLAGS, "--tp", "2", *flags]
    words += ["--save", str(folder), "--load", str(folder), "--save-interval", "4"]
    words += ["--distributed-timeout-seconds-after-init", str(TIMEOUT_S)]
    return node.start(words, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def ended(folder: Path, *runs: programs.Talk) -> dict[str, Any]:
    """The status after a stop that was asked for."""
    (folder / "stop").touch()
    for run in runs:
        run.end(60)
    status = json.loads((folder / "status.json").read_text())
    assert status["outcome"] == "requeue", runs[0].said
    return status


def check_losses(folder: Path, steps: int) -> None:
    """Against an undisturbed run of one rank: every step once, of the same samples."""
    alone = folder.with_name("alone")
    words = [*FLAGS, "--run-dir", str(alone), "--exit-interval", str(steps)]
    programs.python("pretrain_gpt.py", *words, timeout=200, ok=True)
    assert logged(alone, "step") == logged(folder, "step") == list(range(1, steps + 1))
    # rounding, of as many steps as fit in; other samples: 1e-2
    assert logged(folder) == pytest.approx(logged(alone), rel=1e-3)


def test_node_is_lost_and_returns(tmp_path: Path, pair: tuple[Node, Node]) -> None:
    """dp is 2, then 1, then 2 again; a step has 8 samples throughout, of the same order."""
    a, b = pair
    folder = tmp_path / "run"
    run, _ = (torchrun(node, folder, nodes="1:2") for node in pair)
    at = run.until("step     7/")
    b.kill()
    at = run.until("dp 1 x cp 1 x tp 2 = 2 ranks", after=at)
    assert any("lost another rank" in line for line in run.lines[:at]) and "Traceback" not in run.said
    run.until("4 micro-batches", after=at)
    at = run.until("resumed from", after=at)
    b.boot()
    back = torchrun(b, folder, nodes="1:2")
    at = run.until("requeue: SIGTERM", after=at)  # torchrun starts its ranks anew; none of the steps is lost
    at = run.until("dp 2 x cp 1 x tp 2 = 4 ranks", after=at)
    at = run.until("resumed from", after=at)
    run.until("  loss ", after=at + 3)
    check_losses(folder, ended(folder, run, back)["step"])


def test_cable_is_pulled_and_reconnected(tmp_path: Path, pair: tuple[Node, Node]) -> None:
    """The pipeline is across the nodes. Then the link becomes slow, which changes nothing but the time."""
    a, b = pair
    folder = tmp_path / "run"
    run, other = (torchrun(node, folder, "--pp", "2") for node in pair)
    at = run.until("step     7/")
    begin = time.monotonic()
    b.cable("down")
    at = run.until("outcome ", after=at, timeout_s=TIMEOUT_S + 20)  # of the ranks on the first node
    took, crash = time.monotonic() - begin, json.loads((folder / "status.json").read_text())
    assert took < TIMEOUT_S + 10 and crash["outcome"] in ("crash", "hang"), crash
    b.cable("up")
    at = run.until("resumed from", after=at)
    b.slow_down()
    at = run.until("  loss ", after=at + 3)
    check_losses(folder, ended(folder, run, other)["step"])
