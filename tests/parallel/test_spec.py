"""The boxes of a parameter in the full tensor, and the stored part of them."""

import math

from hypothesis import given
from hypothesis import strategies as st

from megalite.parallel.spec import ParamSpec


@given(tp=st.integers(1, 8), rows=st.integers(1, 40), columns=st.integers(1, 3), multiple=st.integers(1, 50))
def test_stored_boxes_cover_true_rows_without_padding(tp: int, rows: int, columns: int, multiple: int) -> None:
    step = math.lcm(multiple, tp)
    spec = ParamSpec("head", (-(-rows // step) * step, columns), shards=((0, "tp"),), vocab_rows=rows)
    stored: list[int] = []
    for rank in range(tp):
        box, part = (find({"tp": tp}, {"tp": rank}) for find in (spec.box, spec.stored_box))
        assert part.shape[1] == columns and 0 <= part.shape[0] <= box.shape[0]
        assert part.start[0] == box.start[0] or not part.numel  # a prefix of the rows that the rank holds
        stored += range(part.start[0], part.stop[0])
    assert stored == list(range(rows)) and spec.stored_shape == (rows, columns)


def test_stored_box_without_padding_is_everything() -> None:
    spec = ParamSpec("layers.0.mlp.up", (8, 2), shards=((0, "tp"),))
    assert spec.stored_shape == spec.shape
    assert spec.stored_box({"tp": 2}, {"tp": 1}) == spec.box({"tp": 2}, {"tp": 1})


def test_stacked_parts_are_sharded_and_initialized_by_rows() -> None:
    shards = ((1, "tp"),)
    for spec in (ParamSpec("gate_up", (2, 8, 3), shards, stacked=True), ParamSpec("kv", (2, 8, 3), stacked=True)):
        assert spec.init_dim == 1  # the same bits whether or not a layout splits them
    assert [ParamSpec("x", (8, 6), dims).init_dim for dims in ((), ((0, "tp"),), shards)] == [0, 0, 1]
