"""Best-fit packing: the bins of the textbook, no lost tokens, no needless cuts, and the samples of packed datasets."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import write_numbered

from megalite.data.datasets.batches import DocumentBoundaries
from megalite.data.datasets.epoch_order import build_epoch
from megalite.data.datasets.packed_dataset import PackedDataset, PackingPlan, expected_cut_documents, plan_packing
from megalite.data.errors import DataError

PAD = 10**6
LENGTHS = st.lists(st.integers(0, 45), min_size=1, max_size=60)


def cut_documents(lengths: list[int], capacity: int) -> list[tuple[int, int, int]]:
    """Return (document, start, length) of every piece, by definition: piece by piece."""
    pieces = []
    for document, length in enumerate(lengths):
        start = 0
        while start < length:
            end = min(start + capacity, length)
            pieces.append((document, start, end - start))
            start = end - 1 if end < length else end
    return pieces


def textbook(sizes: list[int], capacity: int) -> list[int]:
    """Pack by best-fit decreasing, piece by piece, and return the free space of each bin."""
    spaces: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [space for space in spaces if space >= size]
        if fitting:
            spaces[spaces.index(min(fitting))] -= size
        else:
            spaces.append(capacity - size)
    return spaces


def bins_of(plan: PackingPlan) -> list[list[tuple[int, int, int]]]:
    pieces = list(zip(*(part.tolist() for part in plan.pieces.lookup(plan.order)), strict=True))
    return [pieces[a:b] for a, b in zip(plan.starts[:-1].tolist(), plan.starts[1:].tolist(), strict=True)]


@settings(max_examples=150)
@given(lengths=LENGTHS, capacity=st.integers(2, 30))
def test_packing_is_best_fit_decreasing_without_loss(lengths: list[int], capacity: int) -> None:
    plan = plan_packing(np.array(lengths, np.int32), capacity)
    bins, pieces = bins_of(plan), cut_documents(lengths, capacity)
    assert sorted(piece for bin_pieces in bins for piece in bin_pieces) == pieces
    assert len(plan.pieces) == len(pieces)
    spaces = [capacity - sum(length for _, _, length in bin_pieces) for bin_pieces in bins]
    assert sorted(spaces) == sorted(textbook([length for _, _, length in pieces], capacity))  # the same bins
    assert plan.pieces.num_cut == sum(length > capacity for length in lengths)
    assert plan.padding == pytest.approx(sum(spaces) / (capacity * len(bins)) if bins else 0)


@pytest.mark.parametrize("capacity", [33, 2049, 70_000])  # the last one does not fit the 16-bit sort
def test_packing_of_more_documents_than_a_chunk(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.data.datasets.packed_dataset.CHUNK", 1000)
    lengths = np.random.default_rng(0).lognormal(5.0, 1.5, 5300).astype(np.int32)
    plan = plan_packing(lengths, capacity)
    bins = bins_of(plan)
    pieces = cut_documents(lengths.tolist(), capacity)
    assert sorted(piece for bin_pieces in bins for piece in bin_pieces) == pieces
    assert max(sum(piece[2] for piece in bin_pieces) for bin_pieces in bins) <= capacity
    if capacity == 2049:
        assert len(bins) == len(textbook([piece[2] for piece in pieces], capacity))


@settings(max_examples=50)
@given(lengths=LENGTHS, seq_length=st.integers(1, 20), seed=st.integers(0, 9), first=st.integers(0, 3))
def test_packing_counts_every_label_once_per_epoch(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int, seed: int, first: int
) -> None:
    lengths = [*lengths, 2]
    data = write_numbered(tmp_path_factory.mktemp("p") / "a", lengths)
    documents = range(min(first, len(lengths) - 1), len(lengths))
    dataset = PackedDataset(data, documents, seq_length, seed, PAD)
    bins = dataset.plan.num_bins
    starts = data.spans(np.arange(len(data)))[0].tolist()
    own_tokens = set(data.tokens[starts[documents.start] :].tolist())
    first_tokens = {starts[d] for d in documents if lengths[d]}  # the first token of a document is not a label
    for epoch in range(2):
        index = np.arange(epoch * bins, (epoch + 1) * bins)
        samples, layout = dataset.samples(index), dataset.piece_lengths(index)
        assert samples.shape == (bins, seq_length + 1) and len(layout) == bins
        assert set(samples.reshape(-1).tolist()) - {PAD} == own_tokens
        mask = DocumentBoundaries().of_samples(samples, layout)[0]
        assert mask is not None and mask.shape == (bins, seq_length) and mask.dtype == np.float32
        labels = Counter(samples[:, 1:][mask == 1].tolist())
        assert set(labels) == own_tokens - first_tokens and set(labels.values()) <= {1}
        assert (
            samples[:, 1:][mask == 1] == samples[:, :-1][mask == 1] + 1
        ).all()  # input and label are of one document
        for row, piece_lengths in zip(samples, layout, strict=True):
            assert piece_lengths.dtype == np.int32 and (piece_lengths > 0).all()
            assert (row[int(piece_lengths.sum()) :] == PAD).all()


def test_packing_epochs_differ_and_are_pure(tmp_path: Path) -> None:
    data = write_numbered(tmp_path / "a", np.random.default_rng(0).integers(1, 30, 400).tolist())
    dataset = PackedDataset(data, range(400), 64, 5, PAD)
    bins = dataset.plan.num_bins
    index = np.arange(2 * bins)
    samples, layout = dataset.samples(index), dataset.piece_lengths(index)
    for i in (2 * bins - 1, 0, bins):
        assert np.array_equal(PackedDataset(data, range(400), 64, 5, PAD).piece_lengths(np.array([i]))[0], layout[i])
    orders = {frozenset(row.tolist()): row.tolist() for row in samples[:bins]}
    for row in samples[bins:]:
        assert frozenset(row.tolist()) in orders  # the same bins again
    assert sum(orders[frozenset(row.tolist())] != row.tolist() for row in samples[bins:]) > bins // 2
    assert not np.array_equal(samples[:bins], samples[bins:])
    longest_first = sum(int(lengths[0]) == int(lengths.max()) for lengths in layout)
    by_chance = sum(float(np.mean(lengths == lengths.max())) for lengths in layout)
    assert abs(longest_first - by_chance) < 0.1 * len(layout)  # the position does not depend on the length
    assert dataset.piece_lengths(index[:0]) == [] and dataset.samples(index[:0]).shape == (0, 65)


def test_packed_samples_never_change(tmp_path: Path) -> None:
    """A run resumed with another version needs the same order, so these numbers are part of the format."""
    dataset = PackedDataset(write_numbered(tmp_path / "a", [3, 9, 0, 4, 2, 6, 1]), range(7), 9, 1234, 99)
    bins = ([*range(3, 12), 24], [0, 1, 2, 16, 17, *[99] * 5], [*range(18, 24), *range(12, 16)], [24, *range(3, 12)])
    expected = [bins[n] for n in (0, 1, 2, 2, 3, 1)]
    assert [row.tolist() for row in dataset.samples(np.arange(6))] == expected


def test_describe_reports_padding_and_cuts(tmp_path: Path) -> None:
    data = write_numbered(tmp_path / "a", [5, 5, 12])  # pieces 5, 5, 10, 3 in samples of 10
    text = PackedDataset(data, range(3), 9, 1, PAD).describe(6)
    packed = "packed into 3 samples, 23.33 % padding, 1 documents cut (end to end: about 2)"
    assert text == f"{data.prefix}: 3 documents, 22 tokens, 2.00 epochs; {packed}"


def test_cuts_of_plain_concatenation_match_the_formula() -> None:
    lengths = np.random.default_rng(2).integers(0, 90, 300).astype(np.int32)
    seq_length = 64
    num_cut = []
    for key in range(60):
        epoch = build_epoch(lengths, key)
        first, size = epoch.starts[:-1], lengths[epoch.order]
        inside = (
            first % seq_length + size - 1 <= seq_length
        )  # all of it is in the sample where its first token is an input
        num_cut.append(int((~inside & (size > 1)).sum()))
    assert np.mean(num_cut) == pytest.approx(expected_cut_documents(lengths, seq_length), rel=0.02)


def test_packing_refuses_too_little_data(tmp_path: Path) -> None:
    data = write_numbered(tmp_path / "a", [1, 0, 1, 5])
    for documents in (range(0), range(3)):
        with pytest.raises(DataError, match="no document of two tokens or more among"):
            PackedDataset(data, documents, 4, 1, PAD)
    with pytest.raises(DataError, match="capacity=1 tokens hold no label"):
        plan_packing(np.array([3], np.int32), 1)
