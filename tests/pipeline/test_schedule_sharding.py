"""Unshard, reshard and reduce actions in a schedule: pure properties of its rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.pipeline.schedule import Action, Op, ShardingPolicy, SplitBackward, add_sharding_actions, build_schedule

SHARED = (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)
NAMES = st.sampled_from(["1f1b", "gpipe", "breadth-first"])


def rows_of(name: str, pp: int, m: int, vpp: int, split: bool, sharing: ShardingPolicy) -> list[tuple[Action, ...]]:
    rows = build_schedule(name, pp, m, vpp if pp > 1 else 1, None, SplitBackward() if split and pp > 1 else None)
    return [add_sharding_actions(row, sharing) for row in rows]


@given(NAMES, st.integers(1, 5), st.integers(1, 11), st.integers(1, 3), st.booleans(), st.booleans(), st.booleans())
def test_weights_are_unsharded_when_needed_and_gradients_reduced(
    name: str, pp: int, m: int, vpp: int, split: bool, every_pass: bool, by_chunk: bool
) -> None:
    plain = rows_of(name, pp, m, vpp, split, ShardingPolicy())
    for row, before in zip(rows_of(name, pp, m, vpp, split, ShardingPolicy(every_pass, by_chunk)), plain, strict=True):
        assert [a for a in row if a.op not in SHARED] == [a for a in before if a.op not in SHARED]
        grads = Op.W if any(a.op is Op.W for a in row) else Op.B
        unsharded: set[int] = set()
        unreduced: set[int] = set()
        for previous, action in zip([None, *row], row, strict=False):
            if action.op is Op.UNSHARD:
                assert action.stage not in unsharded
                unsharded.add(action.stage)
            elif action.op is Op.RESHARD:
                unsharded.remove(action.stage)
            elif action.op is Op.REDUCE_GRAD:
                unreduced.remove(action.stage)
                backwards = [a for a in row[: row.index(action)] if a.op is grads]
                assert (backwards[-1].stage, backwards[-1].microbatch) == action[1:] and previous is not None
            elif action.op in (Op.F, Op.B):
                assert not by_chunk or action.stage in unsharded
            if action.op is grads:
                assert not every_pass or unreduced <= {action.stage}, "gradients of one chunk are unsharded at a time"
                unreduced.add(action.stage)
            assert len(unsharded) <= 4
        assert not unsharded and not unreduced


@pytest.mark.parametrize(
    ("name", "pp", "m", "vpp", "reduces", "gathers"),
    [
        ("1f1b", 1, 6, 1, 6, 1),  # one chunk: its weights stay unsharded for the step
        ("1f1b", 4, 6, 1, 6, 1),
        ("1f1b", 2, 8, 2, 4, 8),
        ("1f1b", 4, 12, 3, 3, 6),
        ("gpipe", 4, 12, 2, 3, 6),
        ("breadth-first", 4, 12, 2, 1, 2),
    ],
)
def test_number_of_reductions_and_gathers(name: str, pp: int, m: int, vpp: int, reduces: int, gathers: int) -> None:
    """Each pass of backwards has a reduction; each pass of forwards or backwards has at most one gather."""
    for row in rows_of(name, pp, m, vpp, False, ShardingPolicy(True, True)):
        for stage in {a.stage for a in row}:
            counts = [
                sum(a.op is op and a.stage == stage for a in row) for op in (Op.REDUCE_GRAD, Op.UNSHARD, Op.RESHARD)
            ]
            assert counts[0] == reduces and counts[1] == counts[2] <= gathers
    for row in rows_of(name, pp, m, vpp, False, ShardingPolicy()):
        assert sum(a.op is Op.REDUCE_GRAD for a in row) == len({a.stage for a in row})


def test_printed_schedule_rows_with_sharding() -> None:
    _, last = rows_of("1f1b", 2, 4, 2, False, ShardingPolicy(True, True))
    text = " ".join(str(a) for a in last if a.op in (*SHARED, Op.F, Op.B))
    assert text == (
        "G1.0 F1.0 G3.0 F1.1 X1.1 F3.0 B3.0 F3.1 G1.2 B3.1 X3.1 R3.1 F1.2 B1.0 F1.3 G3.2 B1.1 X1.1 R1.1 F3.2 B3.2 F3.3 "
        "G1.2 B3.3 X3.3 R3.3 B1.2 B1.3 X1.3 R1.3"
    )
