"""A rank that dies, raises or exits at any point ends the others within seconds, and is named (P1, P10).

A save that is interrupted, or fails on a full disk, commits nothing. The restarted run is bit for bit equal to a run
without the fault.
"""

import os
import signal
from pathlib import Path
from typing import Any

import checkpoint_loads
import pytest
from checkpoint_loads import SINGLE_PROCESS
from fault_runs import drill
from pairwise import nightly_except

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.storage import storage as storage
from megalite.checkpoint.storage.local_storage import LocalStorage

FLAGS = "--train-iters 6 --save-interval 2".split()
COMMIT, FULL = "ckpt.before_commit:0:4:kill", "step.after_update:1:4:full"
UNLISTED = "killed in the background with its file written and not listed"
FAULTS = {
    "killed with its file written": "ckpt.shard_written:1:4:kill",
    UNLISTED: ":1",
    "rank 0 killed before the commit": COMMIT,
    "rank 0 killed in the background before the commit": COMMIT,
    "a full disk": FULL,
    "a full disk in the background": FULL,
}


def _kill_before_listing(base: Path, rank: int) -> None:
    write_text = LocalStorage.write_text

    def kill_or_write(self: Any, path: Path, *args: Any, **options: Any) -> None:
        if (path.parent.name, path.name) == (".iter_0000004.part", "rank-00001.json"):
            os.kill(os.getpid(), signal.SIGKILL)
        write_text(self, path, *args, **options)

    LocalStorage.write_text = kill_or_write  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> manifests.Manifest:
    """Return the manifest of the last checkpoint of a run without a fault."""
    base = tmp_path_factory.mktemp("unbroken")
    assert (end := drill(base, 2, FLAGS)).code == 0, end
    return manifests.load_manifest(base / "run/iter_0000006")


@pytest.mark.parametrize("name", nightly_except([*FAULTS], [*FAULTS][:2], str, guards=("megalite/checkpoint/manager",)))
def test_failed_save_commits_nothing_and_the_run_resumes(
    name: str, tmp_path: Path, expected: manifests.Manifest
) -> None:
    flags = [*FLAGS, "--async-save" if "background" in name else "--no-async-save"]
    run_dir = tmp_path / "run"
    options = {"before": _kill_before_listing} if name == UNLISTED else {"fault": FAULTS[name]}
    end = drill(tmp_path, 2, flags, **options)
    victim = int(FAULTS[name].split(":")[1])
    survivor, output = 1 - victim, end.outputs[1 - victim]
    assert end.exit_codes[survivor] == 1 and end.within_s < 25, end  # it exits by itself, not through the launcher
    if "killed" in name:
        assert end.code == 128 + signal.SIGKILL and f"rank {survivor}" in output and "step" in output
        assert "onnection" in output, output  # the reason, as the survivor sees it
    else:
        assert end.code == 1 and "rank 1" in end.outputs[1] and "File too large" in end.outputs[1], end
        assert "Traceback" not in "".join(end.outputs) and "rank 1" in end.status["reason"]
        assert not list(run_dir.glob(".iter_*"))
    assert storage.steps_in(run_dir) == [2]
    newest = checkpoint_loads.load_newest(run_dir, SINGLE_PROCESS)
    assert newest is not None and newest[1].state["progress"]["step"] == 2
    assert (restarted := drill(tmp_path, 2, flags)).code == 0, restarted
    last = manifests.load_manifest(run_dir / "iter_0000006")
    assert last.files == expected.files  # the hashes of weights, moments and everything else
    assert {**last.state, "config": ""} == {**expected.state, "config": ""}
    assert not list(run_dir.glob(".iter_*"))


LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
EVERYWHERE = [*LAYOUT, *FLAGS, "--eval-interval", "3", "--eval-iters", "1"]
SECONDS = 12.0  # under two on an idle machine; tests share it
# fault point, rank, step; each of the four ranks has a turn
PLACES = {
    "start": "init:1:0",
    "data": "data.get:2:3",
    "message": "pipeline.message:0:3",
    "backward": "step.after_forward_backward:3:3",
    "reduction": "step.after_reduce:2:3",
    "update": "step.after_update:1:3",
    "evaluation": "eval.begin:0:3",
}
QUICK = ("message", "update", "evaluation")


@pytest.mark.parametrize("point", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.nightly) for n in PLACES])
def test_killed_rank_ends_the_others_soon(point: str, tmp_path: Path) -> None:
    location = PLACES[point]
    victim = int(location.split(":")[1])
    end = drill(tmp_path, 4, EVERYWHERE, f"{location}:kill")
    assert end.code == 128 + 9 and end.within_s < SECONDS, end
    assert end.causes == [f"rank {victim} ended by signal SIGKILL"]
    codes = {1, 3} if point == "start" else {1}  # 3: a rank that is still in the rendezvous
    others = {*range(4)} - {victim}  # they exit before the launcher ends them
    assert end.exit_codes.keys() == others and {*end.exit_codes.values()} <= codes, end
    for rank, text in enumerate(end.outputs):
        assert "Traceback" not in text, text
        if rank != victim and point != "start":
            assert f"rank {rank}" in text and "step" in text and "lost another rank (" in text, text
    if point != "start":  # no status yet
        assert end.status["outcome"] == "crash" and end.status["reason"].startswith(end.causes[0]), end.status


@pytest.mark.parametrize("kind", ["raise", "exit0"])
def test_failing_rank_ends_the_others_soon(kind: str, tmp_path: Path) -> None:
    end = drill(tmp_path, 2, FLAGS, f"step.begin:1:3:{kind}")
    assert end.code == 1 and end.within_s < SECONDS, end
    assert "lost another rank (" in end.outputs[0] and "Traceback" not in end.outputs[0]
    assert ("Traceback" in end.outputs[1]) == (kind == "raise"), end.outputs[1]
    assert end.status["outcome"] == "crash" and "rank 1" in end.status["reason"], end
