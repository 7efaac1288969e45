"""megalite/plan/advice.py: every share that some program has is one that the adviser knows."""

from megalite.plan.advice import CAUSES, COMPUTING, limit_of
from megalite.train.tell.timers import COMPUTE, PHASES
from tools.bench.breakdown import LOST


def test_every_share_is_known_and_the_worst_for_its_kind_is_named() -> None:
    planned = {"compute", "bubble", "tp", "cp", "pp", "dp", "optimizer", "fixed costs"}  # StepTime.parts, and its fixed
    for names in (planned, LOST, {*PHASES} - {*COMPUTE, "profiler"}):
        assert {*names} <= {*CAUSES}
        for name in {*names} - {*COMPUTING}:
            others = dict.fromkeys({*names} - {name}, 0.04)
            assert limit_of(others | {name: 0.6}) == name
    assert limit_of({"recompute": 0.3, "kernels": 0.2, "tp": 0.1}) == "recompute"  # nothing is worth a word
