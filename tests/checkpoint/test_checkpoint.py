"""Pieces as pure geometry; saving under one split and loading under another; refusal of anything damaged."""

from dataclasses import replace
from pathlib import Path

import checkpoint_loads
import numpy as np
import pytest
import torch
from checkpoint_loads import SINGLE_PROCESS, full_shard
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.format import reader
from megalite.checkpoint.format import safetensors_file as tensor_file
from megalite.checkpoint.format.manifest import CheckpointError, covers_exactly_once
from megalite.checkpoint.manager import loader, saver
from megalite.checkpoint.storage import storage as storage
from megalite.parallel.spec import Box, ParamSpec, TensorShard, rectangles, slices_within


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_box_rectangles_cover_the_span_in_order(shape: list[int], data: st.DataObject) -> None:
    origin = tuple(data.draw(st.integers(0, 3)) for _ in shape)
    box = Box(origin, tuple(o + n for o, n in zip(origin, shape, strict=True)))
    start = data.draw(st.integers(0, box.numel))
    stop = data.draw(st.integers(start, box.numel))
    full = np.arange(int(np.prod(box.stop))).reshape(box.stop)
    flat = full[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))].reshape(-1)
    parts = rectangles(box, range(start, stop))
    zero = Box((0,) * len(shape), box.stop)
    assert len(parts) <= 2 * len(shape) - 1
    assert [i for _, span in parts for i in span] == list(range(stop - start))
    pieces = [full[slices_within(part, zero)].reshape(-1) for part, _ in parts]
    np.testing.assert_array_equal(np.concatenate(pieces) if pieces else [], flat[start:stop])


@given(st.lists(st.integers(1, 3), max_size=3), st.data())
def test_boxes_cover_each_element_once(shape: list[int], data: st.DataObject) -> None:
    counts, boxes = np.zeros(shape, int), []
    for _ in range(data.draw(st.integers(1, 4))):
        start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        stop = tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True))
        boxes.append(Box(start, stop))
        counts[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] += 1
    rest = [Box(tuple(i), tuple(n + 1 for n in i)) for i in np.argwhere(counts == 0).tolist()]
    assert covers_exactly_once(tuple(shape), boxes) == bool((counts == 1).all())
    assert covers_exactly_once(tuple(shape), boxes + rest) == bool((counts <= 1).all())


def cut(values: torch.Tensor, name: str, dim: int, tp: int, dp: int) -> list[list[TensorShard]]:
    """Return the shards of every (tp, dp) rank of a tensor, split over tp along `dim` and over dp as ZeRO does."""
    spec = ParamSpec(name, tuple(values.shape), shards=((dim, "tp"),))
    ranks = []
    for t in range(tp):
        box = spec.box({"tp": tp}, {"tp": t})
        local = values[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))].reshape(-1)
        borders = [round(d * box.numel / dp) for d in range(dp + 1)]
        for d in range(dp):
            span = range(borders[d], borders[d + 1])
            data = local[span.start : span.stop].clone(memory_format=torch.contiguous_format)
            ranks.append([TensorShard(name, spec.shape, box, span, data)])
    return ranks


def save_all(directory: Path, ranks: list[list[TensorShard]], step: int, state: dict | None = None) -> Path:
    """Do what `saver.save` does on several ranks, one after the other."""
    part_dir = directory / f".iter_{step:07d}.part"
    part_dir.mkdir(parents=True)
    for rank, pieces in enumerate(ranks):
        rows, ordered = tensor_file.plan_write(pieces)
        manifests.write_rank_file(part_dir, rank, rows, (p.data for p in ordered))
    final = storage.checkpoint_dir(directory, step)
    manifests.commit(part_dir, final, state or {}, step, len(ranks))
    return final


LAYOUT = st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 5))  # tp, dp


@settings(max_examples=25)
@given(st.lists(st.sampled_from([4, 8]), min_size=1, max_size=3), LAYOUT, LAYOUT, st.data())
def test_load_under_another_layout(tmp_path_factory, shape, saved, other, data) -> None:
    directory = tmp_path_factory.mktemp("saved")
    dim = data.draw(st.integers(0, len(shape) - 1))
    values = torch.randn(shape)
    with pytest.MonkeyPatch.context() as patch:  # blocks that end anywhere, reads of any size straight into a target
        patch.setattr(tensor_file.write_safetensors, "__defaults__", (data.draw(st.sampled_from([8, 40, 1 << 22])),))
        patch.setattr(reader, "_MIN_DIRECT_BYTES", data.draw(st.sampled_from([1, 24, 1 << 16])))
        final = save_all(directory, cut(values, "w", dim, *saved), 7)
        manifest = manifests.load_manifest(final)
        assert covers_exactly_once(manifest.tensors["w"].shape, [p.box for p in manifest.tensors["w"].boxes])
        reader.verify_checkpoint(final, manifest)
        dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
        for rank in cut(values.to(dtype), "w", dim, *other):
            for fill in (
                lambda pieces: reader.CheckpointReader(final, manifest).fill(pieces),
                lambda pieces: loader.load_newest(directory, SINGLE_PROCESS, lambda *_: loader.LoadPlan(pieces)),
            ):
                target = replace(rank[0], data=torch.full_like(rank[0].data, torch.nan))
                fill([target])
                assert torch.equal(target.data, rank[0].data)


def test_load_lists_all_mismatches_before_changing_anything(tmp_path: Path) -> None:
    checkpoint_dir = saver.save(
        tmp_path, 1, [full_shard(torch.ones(4, 2), "a"), full_shard(torch.ones(3), "b")], {}, SINGLE_PROCESS
    )
    pieces = [full_shard(torch.zeros(4, 2), "a"), full_shard(torch.zeros(5), "b"), full_shard(torch.zeros(1), "c")]
    with pytest.raises(CheckpointError) as error:
        checkpoint_loads.load_shards(checkpoint_dir, manifests.load_manifest(checkpoint_dir), pieces, SINGLE_PROCESS)
    assert "b: shape (5,) here, (3,) in" in str(error.value) and "c: shape (1,) here, not in" in str(error.value)
    assert all(not p.data.any() for p in pieces)
