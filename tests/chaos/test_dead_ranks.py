"""A rank that dies, raises or leaves, wherever it is, ends the others within seconds, and is named (P1, P10). While a
checkpoint is saved, and where one disk is full: nothing is committed, and the run that is started again is, bit for
bit, the one that was never stopped."""

import os
import signal
from pathlib import Path
from typing import Any

import checkpoint_loads
import pytest
from checkpoint_loads import ALONE
from fault_runs import drill
from pairwise import rarely

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


def _dies_before_it_lists(base: Path, rank: int) -> None:
    put = LocalStorage.write_text

    def faulty(self: Any, path: Path, *args: Any, **options: Any) -> None:
        if (path.parent.name, path.name) == (".iter_0000004.part", "rank-00001.json"):
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, path, *args, **options)

    LocalStorage.write_text = faulty  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> manifests.Manifest:
    """The last checkpoint of a run that nothing happened to."""
    base = tmp_path_factory.mktemp("unbroken")
    assert (end := drill(base, 2, FLAGS)).code == 0, end
    return manifests.load_manifest(base / "run/iter_0000006")


@pytest.mark.parametrize("name", rarely([*FAULTS], [*FAULTS][:2], str, guards=("megalite/checkpoint/manager",)))
def test_failed_save_commits_nothing_and_the_run_resumes(
    name: str, tmp_path: Path, unbroken: manifests.Manifest
) -> None:
    flags = [*FLAGS, "--async-save" if "background" in name else "--no-async-save"]
    folder = tmp_path / "run"
    how = {"before": _dies_before_it_lists} if name == UNLISTED else {"fault": FAULTS[name]}
    end = drill(tmp_path, 2, flags, **how)
    victim = int(FAULTS[name].split(":")[1])
    other, said = 1 - victim, end.said[1 - victim]
    assert end.ends[other] == 1 and end.within_s < 25, end  # by itself, not by the launcher
    if "killed" in name:
        assert end.code == 128 + signal.SIGKILL and f"rank {other}" in said and "step" in said
        assert "onnection" in said, said  # the reason, of the other side
    else:
        assert end.code == 1 and "rank 1" in end.said[1] and "File too large" in end.said[1], end
        assert "Traceback" not in "".join(end.said) and "rank 1" in end.status["reason"]
        assert not list(folder.glob(".iter_*"))
    assert storage.steps_in(folder) == [2]
    found = checkpoint_loads.newest(folder, ALONE)
    assert found is not None and found[1].state["progress"]["step"] == 2
    assert (again := drill(tmp_path, 2, flags)).code == 0, again
    last = manifests.load_manifest(folder / "iter_0000006")
    assert last.files == unbroken.files  # the hashes of weights, moments and all else
    assert {**last.state, "config": ""} == {**unbroken.state, "config": ""}
    assert not list(folder.glob(".iter_*"))


LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
EVERYWHERE = [*LAYOUT, *FLAGS, "--eval-interval", "3", "--eval-iters", "1"]
SECONDS = 12.0  # under two on an idle machine; tests share it
# where, on which rank, in which step; all four ranks have their turn
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


@pytest.mark.parametrize("where", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.nightly) for n in PLACES])
def test_killed_rank_ends_the_others_soon(where: str, tmp_path: Path) -> None:
    place = PLACES[where]
    victim = int(place.split(":")[1])
    end = drill(tmp_path, 4, EVERYWHERE, f"{place}:kill")
    assert end.code == 128 + 9 and end.within_s < SECONDS, end
    assert end.told == [f"rank {victim} ended by signal SIGKILL"]
    codes = {1, 3} if where == "start" else {1}  # 3: who had not met all others yet
    others = {*range(4)} - {victim}  # which end before the launcher ends them
    assert end.ends.keys() == others and {*end.ends.values()} <= codes, end
    for rank, text in enumerate(end.said):
        assert "Traceback" not in text, text
        if rank != victim and where != "start":
            assert f"rank {rank}" in text and "step" in text and "lost another rank (" in text, text
    if where != "start":  # no status yet
        assert end.status["outcome"] == "crash" and end.status["reason"].startswith(end.told[0]), end.status


@pytest.mark.parametrize("kind", ["raise", "exit0"])
def test_failing_rank_ends_the_others_soon(kind: str, tmp_path: Path) -> None:
    end = drill(tmp_path, 2, FLAGS, f"step.begin:1:3:{kind}")
    assert end.code == 1 and end.within_s < SECONDS, end
    assert "lost another rank (" in end.said[0] and "Traceback" not in end.said[0]
    assert ("Traceback" in end.said[1]) == (kind == "raise"), end.said[1]
    assert end.status["outcome"] == "crash" and "rank 1" in end.status["reason"], end
