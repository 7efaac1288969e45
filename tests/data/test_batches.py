"""The batch of a step is a pure function, the same for every data-parallel size; the prefetcher only reads ahead."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from megalite.data.datasets.batches import Batches, DocumentBoundaries, MicroBatch, PlaceholderDataset, Prefetcher
from megalite.data.datasets.blended_dataset import build_blend
from megalite.data.datasets.mock_dataset import MockDataset
from megalite.data.errors import DataError
from tools.preprocess.indexed_writer import IndexedWriter

S, V = 6, 40


def batches(dp_rank: int = 0, dp_size: int = 1, micro: int = 2, **options: object) -> Batches:
    return Batches(MockDataset(V, S, 1), micro, dp_rank, dp_size, V, DocumentBoundaries(**options))  # type: ignore[arg-type]


def in_order(parts: list[list[MicroBatch]]) -> tuple[list[int], NDArray[np.int64]]:
    """Return the sample ids of all ranks in order, and their rows."""
    ids = np.concatenate([m.sample_ids for part in parts for m in part])
    rows = np.concatenate([m.tokens for part in parts for m in part])
    order = np.argsort(ids)
    return ids[order].tolist(), rows[order]


def test_samples_are_independent_of_dp_and_micro_batch_size() -> None:
    expected_ids, expected_rows = in_order([batches().at(36, 24)])
    assert expected_ids == list(range(36, 60))
    for dp, micro in [(1, 1), (1, 24), (2, 3), (3, 4), (4, 2), (6, 4)]:
        ids, rows = in_order([batches(rank, dp, micro).at(36, 24) for rank in range(dp)])
        assert ids == expected_ids
        assert np.array_equal(rows, expected_rows)


def test_every_sample_has_one_position() -> None:
    micro_batches = batches(1, 2, 3).at(100, 12)
    assert [micro.sample_ids.tolist() for micro in micro_batches] == [[103, 104, 105], [109, 110, 111]]
    assert all(
        micro.tokens.shape == (3, S + 1) and micro.tokens.dtype == np.int64 and micro.loss_mask is None
        for micro in micro_batches
    )
    [unread] = Batches(PlaceholderDataset(S), 2, 1, 2, V).at(8, 4)  # a rank that needs no tokens has the ids
    assert unread.sample_ids.tolist() == [10, 11] and unread.tokens.shape == (2, S + 1)
    with pytest.raises(ValueError, match=r"global_batch_size=10 is not a multiple of .* 2 x data parallel 2 = 4"):
        batches(0, 2).at(0, 10)


def test_eod_mask_loss_masks_the_end_of_document() -> None:
    plain = batches().at(0, 4)[0]
    eod = int(plain.tokens[0, 2])
    masked = batches(eod=eod, mask_loss=True).at(0, 4)[0]
    assert masked.loss_mask is not None and masked.loss_mask.dtype == np.float32
    assert np.array_equal(masked.loss_mask, (plain.tokens[:, :-1] != eod).astype(np.float32))
    assert masked.loss_mask[0, 2] == 0


def test_document_starts() -> None:
    tokens = batches().at(0, 4)[0].tokens
    eod = int(tokens[0, 2])
    micro = batches(eod=eod, documents=True).at(0, 4)[0]
    assert micro.loss_mask is None and micro.document_start is not None
    for row, first in zip(tokens[:, :-1], micro.document_start, strict=True):
        start = 0
        for t, token in enumerate(row):
            assert first[t] == start
            start = t + 1 if token == eod else start
    assert micro.document_start[0, 3] == 3


class Packed(MockDataset):
    """A dataset of samples with pieces of 3 and 2 tokens, then padding; every second sample is one full piece."""

    def piece_lengths(self, index: NDArray[np.int64]) -> list[NDArray[np.int32]]:  # type: ignore[override]
        return [np.array([3, 2] if i % 2 == 0 else [S + 1], np.int32) for i in index.tolist()]


def test_packed_sample_pieces_are_documents_without_padding() -> None:
    micro = Batches(Packed(V, S, 1), 2, 0, 1, V, DocumentBoundaries(eod=0, documents=True)).at(0, 2)[0]
    assert micro.loss_mask.tolist() == [[1, 1, 0, 1, 0, 0], [1] * S]  # labels are one position ahead
    assert micro.document_start.tolist() == [[0, 0, 0, 3, 3, 5], [0] * S]
    assert micro.padding.tolist() == [[False] * 5 + [True], [False] * S]


def test_filled_sample_ends_in_padding() -> None:
    plain = batches().at(0, 4)[0]
    assert plain.padding is None
    filler = int(plain.tokens[0, S])
    micro = Batches(MockDataset(V, S, 1), 2, 0, 1, V, DocumentBoundaries(), ignored_label=filler).at(0, 4)[0]
    assert np.array_equal(micro.padding, plain.tokens[:, :-1] == filler)
    assert np.array_equal(micro.loss_mask, plain.tokens[:, 1:] != filler)


@pytest.mark.parametrize(("bad", "dtype"), [(V, np.uint16), (-3, np.int32)])
def test_ids_outside_the_vocabulary_name_file_and_document(tmp_path: Path, bad: int, dtype: type[np.generic]) -> None:
    with IndexedWriter(tmp_path / "a", dtype) as writer:
        for document in range(4):
            writer.add([1, 2, bad if document == 2 else 3, 4, 5])
        writer.finish()
    train = build_blend([str(tmp_path / "a")], S, 1, "train")
    with pytest.raises(DataError, match=rf"a.bin, document 2, token 2: token id {bad} is outside the vocabulary 0..39"):
        Batches(train, 4, 0, 1, V).at(0, 4)


def batches_equal(a: list[MicroBatch], b: list[MicroBatch]) -> bool:
    return all(np.array_equal(x.tokens, y.tokens) for x, y in zip(a, b, strict=True))


def test_prefetcher_serves_any_order() -> None:
    source = batches()
    prefetcher = Prefetcher(source, lambda micro: micro, size_at=lambda consumed: 4)
    try:
        for consumed, n in [(0, 4), (4, 4), (8, 8), (16, 8), (0, 4), (100, 2), (102, 2), (104, 6)]:
            batch, waited = prefetcher.get(consumed, n)
            assert batches_equal(batch, source.at(consumed, n)) and waited >= 0
    finally:
        prefetcher.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("megalite-data")]


class Slow(MockDataset):
    """A slow dataset that records the samples that it has read, and fails from sample 8 on."""

    def __init__(self) -> None:
        super().__init__(V, S, 1)
        self.read_samples: set[int] = set()

    def samples(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        time.sleep(0.1)
        if int(index[0]) >= 8:
            raise DataError("sample 8 is broken")
        samples = super().samples(index)
        self.read_samples.update(map(int, index))
        return samples

    def wait_for(self, sample: int) -> None:
        while sample not in self.read_samples:
            time.sleep(0.01)


def test_prefetcher_reads_ahead_and_raises_errors() -> None:
    dataset = Slow()
    slow = Batches(dataset, 2, 0, 1, V)
    prefetcher = Prefetcher(slow, lambda micro: micro, size_at=lambda consumed: 2 if consumed < 4 else 4)
    try:
        _, waited = prefetcher.get(0, 2)
        dataset.wait_for(3)  # not requested yet
        prefetcher.get(2, 2)
        dataset.wait_for(7)  # it reads ahead although the batch size grows, as size_at says
        prefetcher.get(4, 4)
        assert waited >= 0.1
        for _ in range(2):
            with pytest.raises(DataError, match="sample 8 is broken"):
                prefetcher.get(8, 4)
        assert len(prefetcher.get(0, 2)[0]) == 1  # it works after an error
    finally:
        prefetcher.close()
