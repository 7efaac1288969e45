"""The order of buckets, their picture, units, and that the two ends of a pipeline agree on the tied one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.config import cli
from megalite.models.families import PRESETS
from megalite.optim.buffer import lay_out_chunks
from megalite.optim.layout import Entry, lay_out
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import ParamSpec
from megalite.plan.arrangement import Arrangement, build_stages


def _entry(name: str, numel: int, chunk: int = 0, unit: str = "", **facts: object) -> Entry:
    return Entry(ParamSpec(name, (numel,), **facts), numel, chunk, unit)  # type: ignore[arg-type]


def test_the_picture_of_a_layout() -> None:
    layout = lay_out(
        [
            _entry("embedding.word", 300, unit="embedding", tied=True),
            _entry("layers.0.norm", 8, unit="layers.0", partial=("tp",), decay=False),
            _entry("layers.0.up", 200, unit="layers.0"),
            _entry("layers.0.up_bias", 20, unit="layers.0", decay=False),
            _entry("layers.1.norm", 8, unit="layers.1", partial=("tp",), decay=False),
            _entry("layers.1.up", 200, unit="layers.1"),
            _entry("layers.8.up", 130, chunk=1, unit="layers.8"),
        ],
        bucket_size=150,
        sizes={"data": 2, "tp": 2},
    )
    assert str(layout).splitlines() == [
        "bucket   0 chunk 0 whole   decay         256 elements  layers.1 .. layers.1",
        "bucket   1 chunk 0 whole   plain         128 elements  layers.0 .. layers.0",
        "bucket   2 chunk 0 whole   decay         256 elements  layers.0 .. layers.0",
        "bucket   3 chunk 0 partial plain         128 elements  layers.1 .. layers.0",
        "bucket   4 chunk 0 tied    decay         384 elements  embedding .. embedding",
        "bucket   5 chunk 1 whole   decay         256 elements  layers.8 .. layers.8",
    ]
    assert layout.size == 256 + 256 + 384 + 128 + 128 + 256


@pytest.mark.parametrize("flags", ["", "--untie-embeddings-and-output-weights"])
def test_a_parameter_is_laid_out_with_the_unit_that_it_was_made_for(flags: str) -> None:
    words = f"--num-layers 2 --hidden-size 16 --num-attention-heads 2 --mock-data --vocab-size 32 --lr 1 {flags}"
    config = cli.parse(f"{words} --train-iters 1 --micro-batch-size 1 --seq-length 8".split(), PRESETS)
    mesh = Mesh.alone()
    [stage] = build_stages(Arrangement(config, 1, 32), mesh, torch.float32, meta=True)
    _, layout = lay_out_chunks([stage], mesh)
    units = {e.spec.name: e.unit for e in layout.entries}
    assert set(units.values()) == {"embedding", "layers.0", "layers.1", "head"}
    for name, unit in units.items():
        assert name.startswith(f"{unit}.") or (
            unit == "head" and name in ("head", "final_norm.weight", "final_norm.bias")
        )


ROWS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2), st.booleans(), st.booleans()), max_size=20)


def _entries(rows: list[tuple[int, int, bool, bool]]) -> list[Entry]:
    return [
        _entry(f"p{i}", n, chunk, partial=("tp",) * partial, decay=decay)
        for i, (n, chunk, partial, decay) in enumerate(rows)
    ]


@given(ROWS, st.integers(1, 600), st.integers(1, 4))
def test_buckets_are_in_the_order_in_which_backward_fills_them(
    rows: list[tuple[int, int, bool, bool]], bucket_size: int, dp: int
) -> None:
    layout = lay_out(_entries(rows), bucket_size=bucket_size, sizes={"data": dp, "tp": 2})
    filled = [(b.chunk, -min(slot.entry for slot in b.slots)) for b in layout.buckets]
    assert filled == sorted(filled)
    for b in layout.buckets:  # and every bucket closes with the member that fills it
        sizes = [layout.entries[slot.entry].numel for slot in b.slots]
        assert sum(sizes[:-1]) < bucket_size


@given(ROWS, ROWS, st.integers(1, 2000), st.integers(1, 600), st.integers(1, 4))
def test_both_ends_of_the_pipeline_lay_the_tied_weight_out_alike(
    first: list[tuple[int, int, bool, bool]],
    last: list[tuple[int, int, bool, bool]],
    words: int,
    bucket_size: int,
    dp: int,
) -> None:
    word = _entry("embedding.word", words, tied=True)
    ends = [
        lay_out([word, *_entries(first)], bucket_size=bucket_size, sizes={"data": dp}),
        lay_out([*_entries(last), word], bucket_size=bucket_size, sizes={"data": dp}),
    ]
    seen = []
    for layout in ends:
        (bucket,) = [b for b in layout.buckets if b.kind.tied]
        (slot,) = bucket.slots
        seen.append((bucket.size, slot.start, slot.stop - slot.start))
    assert seen[0] == seen[1]
