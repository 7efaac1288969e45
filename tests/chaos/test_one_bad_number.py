"""N1: one element of a reduced gradient that is NaN or infinite, on each rank in turn, changes nothing on any rank."""

import pytest
import torch.distributed as dist
from ranks import run_ranks
from train.test_step import build, kept, same

from megalite.config import faults
from megalite.train.step import train_step

Told = tuple[bool, bool, float, int]  # skipped, nothing changed, the next rate, samples


def bad(rank: int | None, kind: str) -> None:
    """From here on, also where a step is computed again."""
    asked = {} if rank is None else {faults.VARIABLE: f"step.after_reduce:{rank}:*:{kind}"}
    faults.fault.__init__(asked)  # type: ignore[misc]


def _each_rank_in_turn(flags: str) -> list[Told]:
    """Step 1 is good; in step r + 2 rank r has a bad number; the last step is good again."""
    world, told = dist.get_world_size(), list[Told]()
    kinds = ("nan", "inf")
    run = build(f"{flags} --no-check-for-nan-in-loss-and-grad")
    for step in range(1, world + 3):
        bad(step - 2 if 1 < step < world + 2 else None, kinds[step % 2])
        run.buffer.wait_gather()
        before = kept(run)
        result = train_step(run)
        run.buffer.wait_gather()
        told.append((result.skipped, same(kept(run), before), result.lr, run.state.consumed_samples))
    return told


@pytest.mark.parametrize(
    "flags",
    ["--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", "--global-batch-size 8"],
    ids=["tp2 pp2", "dp4"],
)
def test_all_ranks_skip_the_step_that_one_has_a_bad_number_in(flags: str) -> None:
    first, *others = run_ranks(4, _each_rank_in_turn, flags)
    assert all(other == first for other in others)
    assert [told[:2] for told in first] == [(False, False), *[(True, True)] * 4, (False, False)]
    assert [lr for *_, lr, _ in first] == [first[0][2]] * 5 + [2 * first[0][2]]  # the warm-up does not count them
    size = first[0][3]
    assert [samples for *_, samples in first] == [size * (i + 1) for i in range(6)]  # they are not given again
