"""The batch of a step, as a pure function: `Batches.at(consumed, n)` -> this data-parallel rank's micro-batches.

    samples consumed .. consumed + n - 1 are the step's. Micro-batch m of rank r holds, with B rows,
    consumed + m * (B * dp) + r * B + [0..B)          so dp and B may change during the run

There is no state to save: a resume needs `consumed`, one integer. `Prefetcher` reads the next step's in a thread.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from megalite.data.datasets.base_dataset import Dataset
from megalite.data.datasets.permutation import Ints
from megalite.data.errors import DataError

T = TypeVar("T")


class MicroBatch(NamedTuple):
    """tokens        [B, S + 1]
    sample_ids    [B], numbers in the global order
    loss_mask     [B, S], 1 where the label counts; None: all count
    first         [B, S], position of the first token of the document that each token is of; None: not asked for
    padding       [B, S], whether the token only fills its sample; None: no sample is filled
    """

    tokens: Ints
    sample_ids: Ints
    loss_mask: NDArray[np.float32] | None
    document_start: NDArray[np.int32] | None = None
    padding: NDArray[np.bool_] | None = None


class PlaceholderDataset(Dataset):
    """Zeros of the right shape, for a rank in the middle of the pipeline, which needs no tokens."""

    def __init__(self, seq_length: int):
        self.seq_length = seq_length

    def samples(self, index: Ints) -> Ints:
        return np.zeros((len(index), self.seq_length + 1), np.int64)

    def locate(self, i: int, position: int) -> str:
        return f"sample {i}, which this rank does not read"

    def describe(self, samples: int) -> str:
        return "not read by this rank"


class DocumentBoundaries(NamedTuple):
    """Treatment of the borders between documents.

    eod        id that ends a document; needed by the next two unless the samples are packed
    mask_loss  the label after an eod does not count, since an unrelated text follows
    documents  fill MicroBatch.first
    """

    eod: int | None = None
    mask_loss: bool = False
    documents: bool = False

    def mask_and_starts(
        self, tokens: Ints, layout: list[NDArray[np.int32]] | None
    ) -> tuple[NDArray[np.float32] | None, NDArray[np.int32] | None]:
        """(MicroBatch.loss_mask, MicroBatch.first) of all rows."""
        inputs = tokens[:, :-1]
        if layout is None and not (self.mask_loss or self.documents):
            return None, None
        begins = np.zeros(tokens.shape, bool)  # a document begins here
        if layout is None:
            begins[:, 1:] = inputs == self.eod
            counts = ~begins[:, 1:] if self.mask_loss else None
        else:
            counts = np.ones(inputs.shape, bool)
            for row, pieces in enumerate(layout):
                ends = np.cumsum(pieces)
                begins[row, ends[ends <= inputs.shape[1]]] = True
                counts[row, int(pieces.sum()) :] = False  # padding
            counts &= ~begins[:, 1:]
        begins[:, 0] = True
        first = None
        if self.documents:
            positions = np.where(begins[:, :-1], np.arange(inputs.shape[1], dtype=np.int32), np.int32(0))
            first = np.maximum.accumulate(positions, axis=1)
        return None if counts is None else counts.astype(np.float32, copy=False), first


class Batches:
    """Cuts the samples of one dataset into micro-batches. Ids outside [0, vocab_size) are refused with their place.
    `ignored_label`: an id that only fills samples and does not count as a label."""

    def __init__(
        self,
        dataset: Dataset,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        vocab_size: int,
        borders: DocumentBoundaries = DocumentBoundaries(),  # noqa: B008 (frozen)
        ignored_label: int | None = None,
    ):
        self.dataset, self.vocab_size = dataset, vocab_size
        self._micro, self._rank, self._dp = micro_batch_size, dp_rank, dp_size
        self._borders, self._ignored = borders, ignored_label

    def at(self, consumed: int, global_batch_size: int) -> list[MicroBatch]:
        """The micro-batches of the step after `consumed` samples."""
        per_micro = self._micro * self._dp
        if global_batch_size < 1 or global_batch_size % per_micro:
            step = f"micro_batch_size {self._micro} x data parallel {self._dp} = {per_micro}"
            raise ValueError(f"global_batch_size={global_batch_size} is not a multiple of {step}")
        ids_MB = consumed + np.arange(global_batch_size).reshape(-1, self._dp, self._micro)[:, self._rank]
        ids = ids_MB.reshape(-1)
        tokens = self.dataset.samples(ids)
        self._check(ids, tokens)
        layout = self.dataset.piece_lengths(ids)
        mask, first = self._borders.mask_and_starts(tokens, layout)
        padding = None
        if layout is not None:
            lengths = np.array([pieces.sum() for pieces in layout])
            padding = np.arange(tokens.shape[1] - 1) >= lengths[:, None]
        if self._ignored is not None:
            padding = tokens[:, :-1] == self._ignored
            if (filler := tokens[:, 1:] == self._ignored).any():
                mask = np.where(filler, np.float32(0), np.float32(1) if mask is None else mask)
        micros = []
        for m, ids_B in enumerate(ids_MB):
            rows = slice(m * self._micro, (m + 1) * self._micro)
            micro = MicroBatch(tokens[rows], ids_B, None if mask is None else mask[rows])
            if first is not None:
                micro = micro._replace(document_start=first[rows])
            if padding is not None:
                micro = micro._replace(padding=padding[rows])
            micros.append(micro)
        return micros

    def _check(self, ids: Ints, tokens: Ints) -> None:
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            row, position = (int(i) for i in np.argwhere((tokens < 0) | (tokens >= self.vocab_size))[0])
            where, token = self.dataset.locate(int(ids[row]), position), int(tokens[row, position])
            raise DataError(
                f"{where}: token id {token} is outside the vocabulary 0..{self.vocab_size - 1} "
                f"(sample {int(ids[row])}): use the tokenizer that made the data"
            )


class Prefetcher(Generic[T]):
    """`get(consumed, n)` -> (micro-batches, seconds waited), after which a thread reads the following step. Requests
    may come in any order; the next one in sequence costs no wait. `size_at(consumed)`: the size of the next batch,
    which may ramp up, 0 for the end. `prepare`: applied to each micro-batch in the thread (to pinned memory)."""

    def __init__(self, batches: Batches, prepare: Callable[[MicroBatch], T], size_at: Callable[[int], int]):
        self.batches, self._prepare, self._size_at = batches, prepare, size_at
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megalite-data")
        self._expected: tuple[int, int] | None = None
        self._future: Future[list[T]] | None = None

    def _read(self, consumed: int, global_batch_size: int) -> list[T]:
        return [self._prepare(micro) for micro in self.batches.at(consumed, global_batch_size)]

    def get(self, consumed: int, global_batch_size: int) -> tuple[list[T], float]:
        begin = time.perf_counter()
        wanted = (consumed, global_batch_size)
        if self._future is None or self._expected != wanted:
            if self._future is not None:
                self._future.cancel()
            self._future = self._thread.submit(self._read, *wanted)
        batches = self._future.result()  # raises the thread's error
        after = consumed + global_batch_size
        size = self._size_at(after)
        self._future = self._thread.submit(self._read, after, size) if size else None
        self._expected = after, size
        return batches, time.perf_counter() - begin

    def close(self) -> None:
        """Stop the thread after its current read."""
        self._thread.shutdown(wait=True, cancel_futures=True)
