"""P1 and P10: a rank that dies, raises or leaves, wherever it is, ends the others within seconds, and is named."""

from pathlib import Path

import pytest
from drill import drill

LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
FLAGS = [*LAYOUT, *"--train-iters 6 --save-interval 2 --eval-interval 3 --eval-iters 1".split()]
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


@pytest.mark.parametrize("where", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.everything) for n in PLACES])
def test_kill_9_of_any_rank_ends_the_others_soon(where: str, tmp_path: Path) -> None:
    place = PLACES[where]
    victim = int(place.split(":")[1])
    end = drill(tmp_path, 4, FLAGS, f"{place}:kill")
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
def test_a_rank_that_raises_or_leaves_ends_the_others_soon(kind: str, tmp_path: Path) -> None:
    end = drill(tmp_path, 2, "--train-iters 6 --save-interval 2".split(), f"step.begin:1:3:{kind}")
    assert end.code == 1 and end.within_s < SECONDS, end
    assert "lost another rank (" in end.said[0] and "Traceback" not in end.said[0]
    assert ("Traceback" in end.said[1]) == (kind == "raise"), end.said[1]
    assert end.status["outcome"] == "crash" and "rank 1" in end.status["reason"], end
