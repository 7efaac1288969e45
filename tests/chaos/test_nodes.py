"""Two nodes with torchrun: one is lost and returns, or cannot be reached.

Tensor parallelism is inside a node, data or pipeline parallelism across. Runs share a directory, as on a cluster.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
from network_namespaces import ROOT, NamespaceError, Node, two_nodes
from train_cases import SMALL_RUN, read_metric

GUARDS = ("megalite/launch/process_group.py", "megalite/launch/rank_info.py")
pytestmark = [pytest.mark.nightly(guards=GUARDS), pytest.mark.timeout(400)]
QUICK = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
TIMEOUT_S = 5
FLAGS = [*SMALL_RUN, *"--device cpu --lr-decay-style constant --train-iters 100000 --hidden-dropout 0.1".split()]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    try:
        nodes = two_nodes(tmp_path)
        with nodes as pair_of_nodes:
            yield pair_of_nodes
    except NamespaceError as error:
        pytest.skip(f"no namespaces here: {error}")


def torchrun(node: Node, run_dir: Path, *flags: str, nodes: str = "2") -> programs.ProgramOutput:
    """Start torchrun as examples/launch/torchrun.sh does, with shorter waits."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "2"]
    argv += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node-a:29500", "--rdzv-id", "run"]
    argv += ["--rdzv-conf", QUICK, str(ROOT / "pretrain_gpt.py"), *FLAGS, "--tp", "2", *flags]
    argv += ["--save", str(run_dir), "--load", str(run_dir), "--save-interval", "4"]
    argv += ["--distributed-timeout-seconds-after-init", str(TIMEOUT_S)]
    return node.start(argv, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def stop_and_read_status(run_dir: Path, *runs: programs.ProgramOutput) -> dict[str, Any]:
    """Stop the run and return its status."""
    (run_dir / "stop").touch()
    for run in runs:
        run.wait(60)
    status = json.loads((run_dir / "status.json").read_text())
    assert status["outcome"] == "requeue", runs[0].output
    return status


def check_losses(run_dir: Path, steps: int) -> None:
    """Compare with an undisturbed run of one rank: every step once, with the same samples."""
    single_dir = run_dir.with_name("alone")
    flags = [*FLAGS, "--run-dir", str(single_dir), "--exit-interval", str(steps)]
    programs.run_python("pretrain_gpt.py", *flags, timeout=200, check=True)
    assert read_metric(single_dir, "step") == read_metric(run_dir, "step") == list(range(1, steps + 1))
    # the rounding of all these steps; other samples would differ by 1e-2
    assert read_metric(run_dir) == pytest.approx(read_metric(single_dir), rel=1e-3)


def test_node_is_lost_and_returns(tmp_path: Path, pair: tuple[Node, Node]) -> None:
    """Train with dp 2, 1 and 2. A step has 8 samples throughout, in the same order."""
    a, b = pair
    run_dir = tmp_path / "run"
    run, _ = (torchrun(node, run_dir, nodes="1:2") for node in pair)
    number = run.wait_for_line("step     7/")
    b.kill()
    number = run.wait_for_line("dp 1 x cp 1 x tp 2 = 2 ranks", from_line=number)
    assert any("lost another rank" in line for line in run.lines[:number]) and "Traceback" not in run.output
    run.wait_for_line("4 micro-batches", from_line=number)
    number = run.wait_for_line("resumed from", from_line=number)
    b.boot()
    rejoined = torchrun(b, run_dir, nodes="1:2")
    number = run.wait_for_line("requeue: SIGTERM", from_line=number)  # torchrun restarts its ranks; no step is lost
    number = run.wait_for_line("dp 2 x cp 1 x tp 2 = 4 ranks", from_line=number)
    number = run.wait_for_line("resumed from", from_line=number)
    run.wait_for_line("  loss ", from_line=number + 3)
    check_losses(run_dir, stop_and_read_status(run_dir, run, rejoined)["step"])


def test_cable_is_pulled_and_reconnected(tmp_path: Path, pair: tuple[Node, Node]) -> None:
    """Run a pipeline across the nodes. Later the link is slow, which changes only the time."""
    a, b = pair
    run_dir = tmp_path / "run"
    run, second = (torchrun(node, run_dir, "--pp", "2") for node in pair)
    number = run.wait_for_line("step     7/")
    start_s = time.monotonic()
    b.set_cable("down")
    number = run.wait_for_line(
        "outcome ", from_line=number, timeout_s=TIMEOUT_S + 20
    )  # from the ranks on the first node
    seconds, crash = time.monotonic() - start_s, json.loads((run_dir / "status.json").read_text())
    assert seconds < TIMEOUT_S + 10 and crash["outcome"] in ("crash", "hang"), crash
    b.set_cable("up")
    number = run.wait_for_line("resumed from", from_line=number)
    b.slow_down()
    number = run.wait_for_line("  loss ", from_line=number + 3)
    check_losses(run_dir, stop_and_read_status(run_dir, run, second)["step"])
