"""The layout of buckets: every element is owned once; the order and contents of buckets, and units."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_cases import stage_from

from megalite.optim.zero.layout import ALIGN, ParamEntry, build_layout, chunk_layout
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import ParamSpec


def _entry(name: str, numel: int, chunk: int = 0, unit: str = "", **facts: object) -> ParamEntry:
    return ParamEntry(ParamSpec(name, (numel,), **facts), numel, chunk, unit)  # type: ignore[arg-type]


def test_bucket_contents() -> None:
    layout = build_layout(
        [
            _entry("embedding.word", 300, unit="embedding", tied=True),
            _entry("layers.0.norm", 8, unit="layers.0", partial_grad_axes=("tp",), weight_decay=False),
            _entry("layers.0.up", 200, unit="layers.0"),
            _entry("layers.0.up_bias", 20, unit="layers.0", weight_decay=False),
            _entry("layers.1.norm", 8, unit="layers.1", partial_grad_axes=("tp",), weight_decay=False),
            _entry("layers.1.up", 200, unit="layers.1"),
            _entry("layers.8.up", 130, chunk=1, unit="layers.8"),
        ],
        bucket_size=150,
        sizes={"dp_cp": 2, "tp": 2},
    )
    names = [[layout.entries[slot.entry].spec.name for slot in bucket.slots] for bucket in layout.buckets]
    kinds = [
        (b.index, b.chunk, b.key.partial_grad_axes, b.key.tied, b.key.weight_decay, b.size) for b in layout.buckets
    ]
    assert list(zip(kinds, names, strict=True)) == [
        ((0, 0, (), False, True, 256), ["layers.1.up"]),
        ((1, 0, (), False, False, 128), ["layers.0.up_bias"]),
        ((2, 0, (), False, True, 256), ["layers.0.up"]),
        ((3, 0, ("tp",), False, False, 128), ["layers.1.norm", "layers.0.norm"]),
        ((4, 0, (), True, True, 384), ["embedding.word"]),
        ((5, 1, (), False, True, 256), ["layers.8.up"]),
    ]
    assert layout.size == 256 + 256 + 384 + 128 + 128 + 256


@pytest.mark.parametrize("flags", ["", "--untie-embeddings-and-output-weights"])
def test_parameter_is_laid_out_with_its_unit(flags: str) -> None:
    model_flags = f"--num-layers 2 --hidden-size 16 --num-attention-heads 2 --mock-data --vocab-size 32 --lr 1 {flags}"
    stage = stage_from(f"{model_flags} --train-iters 1 --micro-batch-size 1 --seq-length 8", torch.float32)
    _, layout = chunk_layout([stage], Mesh.single_process())
    units = {e.spec.name: e.unit for e in layout.entries}
    assert set(units.values()) == {"embedding", "layers.0", "layers.1", "head"}
    of_head = ("head", "final_norm.weight", "final_norm.bias")
    assert all(name in of_head if unit == "head" else name.startswith(f"{unit}.") for name, unit in units.items())


ROWS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2), st.booleans(), st.booleans()), max_size=20)


def _entries(rows: list[tuple[int, int, bool, bool]]) -> list[ParamEntry]:
    return [
        _entry(f"p{i}", n, chunk, partial_grad_axes=("tp",) * partial, weight_decay=decay)
        for i, (n, chunk, partial, decay) in enumerate(rows)
    ]


@given(ROWS, st.integers(1, 600), st.integers(1, 4))
def test_buckets_are_in_backward_order(rows: list[tuple[int, int, bool, bool]], bucket_size: int, dp: int) -> None:
    layout = build_layout(_entries(rows), bucket_size=bucket_size, sizes={"dp_cp": dp, "tp": 2})
    filled = [(b.chunk, -min(slot.entry for slot in b.slots)) for b in layout.buckets]
    assert filled == sorted(filled)
    for b in layout.buckets:  # every bucket closes with the member that fills it
        sizes = [layout.entries[slot.entry].numel for slot in b.slots]
        assert sum(sizes[:-1]) < bucket_size


@given(ROWS, st.integers(1, 800), st.integers(1, 5))
def test_every_element_is_owned_exactly_once(rows: list[tuple[int, int, bool, bool]], bucket: int, dp: int) -> None:
    entries = _entries(rows)
    layout = build_layout(entries, bucket_size=bucket, sizes={"dp_cp": dp, "tp": 2})
    slots = [(s, b) for b in layout.buckets for s in b.slots]
    assert sorted(s.entry for s, _ in slots) == list(range(len(entries)))
    assert [b.index for b in layout.buckets] == list(range(len(layout.buckets)))
    for b in layout.buckets:
        assert b.size % (dp * ALIGN) == 0
        assert [i for r in range(dp) for i in b.shard_range(dp, r)] == list(range(b.size))
        assert all(previous.stop <= following.start for previous, following in pairwise(b.slots))
    assert sum(b.size for b in layout.buckets) == layout.size
    for s, b in slots:
        entry = entries[s.entry]
        assert s.stop - s.start == entry.numel and s.start % ALIGN == 0 and s.stop <= b.size
        assert (entry.chunk, entry.spec.partial_grad_axes, entry.spec.weight_decay) == (
            b.chunk,
            b.key.partial_grad_axes,
            b.key.weight_decay,
        )
