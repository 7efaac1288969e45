"""The batch of a step as a pure function: `Batches.at(consumed, n)` returns this data-parallel rank's micro-batches.

A step reads the samples consumed .. consumed + n - 1. Micro-batch m of rank r has B rows:

    consumed + m * (B * dp) + r * B + [0..B)          so dp and B may change during the run

There is no state to save: a resume needs `consumed`, one integer. `Prefetcher` reads the next step's batch in a thread.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from megalite.data.datasets.base_dataset import Dataset
from megalite.data.datasets.permutation import Ints
from megalite.data.errors import DataError

T = TypeVar("T")


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass.

    tokens          [B, S + 1]
    sample_ids      [B], numbers in the global order
    loss_mask       [B, S], 1 where the label counts; None: all count
    document_start  [B, S], position of the first token of each token's document; None: not requested
    document_ids    [B, S + 1], increasing numbers of the documents of all tokens; None: not requested, or not separated
    padding         [B, S], True where the token only fills its sample; None: no sample is padded
    request_ids     [B, S], the request whose continuation has the label, or -1 (requests.py); None: training data
    """

    tokens: Ints
    sample_ids: Ints
    loss_mask: NDArray[np.float32] | None
    document_start: NDArray[np.int32] | None = None
    padding: NDArray[np.bool_] | None = None
    document_ids: NDArray[np.int32] | None = None
    request_ids: Ints | None = None


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


@dataclass(frozen=True)
class DocumentBoundaries:
    """The treatment of boundaries between documents.

    eod        id that ends a document; the next two need it unless the samples are packed
    mask_loss  the label after an eod does not count, since an unrelated text follows
    documents  fill MicroBatch.document_start
    ids        fill MicroBatch.document_ids if one of the two above is set, or if the samples are packed
    """

    eod: int | None = None
    mask_loss: bool = False
    documents: bool = False
    ids: bool = False

    def of_samples(
        self, tokens: Ints, layout: list[NDArray[np.int32]] | None
    ) -> tuple[NDArray[np.float32] | None, NDArray[np.int32] | None, NDArray[np.int32] | None]:
        """Return (MicroBatch.loss_mask, MicroBatch.document_start, MicroBatch.document_ids) of all rows."""
        inputs = tokens[:, :-1]
        if layout is None and not (self.mask_loss or self.documents):
            return None, None, None
        is_start = np.zeros(tokens.shape, bool)  # True where a document starts
        if layout is None:
            is_start[:, 1:] = inputs == self.eod
            counts_in_loss = ~is_start[:, 1:] if self.mask_loss else None
        else:
            counts_in_loss = np.ones(inputs.shape, bool)
            for row, pieces in enumerate(layout):
                ends = np.cumsum(pieces)
                is_start[row, ends[ends <= inputs.shape[1]]] = True
                counts_in_loss[row, int(pieces.sum()) :] = False  # padding
            counts_in_loss &= ~is_start[:, 1:]
        is_start[:, 0] = True
        document_start = None
        if self.documents:
            positions = np.where(is_start[:, :-1], np.arange(inputs.shape[1], dtype=np.int32), np.int32(0))
            document_start = np.maximum.accumulate(positions, axis=1)
        document_ids = np.cumsum(is_start, axis=1, dtype=np.int32) if self.ids else None
        loss_mask = None if counts_in_loss is None else counts_in_loss.astype(np.float32, copy=False)
        return loss_mask, document_start, document_ids


class Batches:
    """The samples of one dataset, cut into micro-batches.

    An id outside [0, vocab_size) raises DataError with its file and document. `ignored_label` is an id that only fills
    samples and does not count as a label.
    """

    def __init__(
        self,
        dataset: Dataset,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        vocab_size: int,
        boundaries: DocumentBoundaries = DocumentBoundaries(),  # noqa: B008 (frozen)
        ignored_label: int | None = None,
    ):
        self.dataset, self.vocab_size = dataset, vocab_size
        self._micro_batch_size, self._dp_rank, self._dp_size = micro_batch_size, dp_rank, dp_size
        self._boundaries, self._ignored_label = boundaries, ignored_label

    def at(self, consumed: int, global_batch_size: int) -> list[MicroBatch]:
        """Return the micro-batches of the step after `consumed` samples.

        Raises ValueError if `global_batch_size` is not a multiple of micro-batch size times data-parallel size, and
        DataError for ids outside the vocabulary.
        """
        per_micro = self._micro_batch_size * self._dp_size
        if global_batch_size < 1 or global_batch_size % per_micro:
            requirement = f"micro_batch_size {self._micro_batch_size} x data parallel {self._dp_size} = {per_micro}"
            raise ValueError(f"global_batch_size={global_batch_size} is not a multiple of {requirement}")
        offsets = np.arange(global_batch_size).reshape(-1, self._dp_size, self._micro_batch_size)[:, self._dp_rank]
        ids_MB = consumed + offsets
        ids = ids_MB.reshape(-1)
        tokens = self.dataset.samples(ids)
        self._check(ids, tokens)
        layout = self.dataset.piece_lengths(ids)
        mask, document_start, document_ids = self._boundaries.of_samples(tokens, layout)
        padding = None
        if layout is not None:
            lengths = np.array([pieces.sum() for pieces in layout])
            padding = np.arange(tokens.shape[1] - 1) >= lengths[:, None]
        if self._ignored_label is not None:
            padding = tokens[:, :-1] == self._ignored_label
            is_ignored = tokens[:, 1:] == self._ignored_label
            if is_ignored.any():
                mask = np.where(is_ignored, np.float32(0), np.float32(1) if mask is None else mask)
        micro_batches = []
        for m, ids_B in enumerate(ids_MB):
            rows = slice(m * self._micro_batch_size, (m + 1) * self._micro_batch_size)
            micro_batch = MicroBatch(tokens[rows], ids_B, None if mask is None else mask[rows])
            if document_start is not None:
                micro_batch = replace(micro_batch, document_start=document_start[rows])
            if document_ids is not None:
                micro_batch = replace(micro_batch, document_ids=document_ids[rows])
            if padding is not None:
                micro_batch = replace(micro_batch, padding=padding[rows])
            micro_batches.append(micro_batch)
        return micro_batches

    def _check(self, ids: Ints, tokens: Ints) -> None:
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            row, position = (int(i) for i in np.argwhere((tokens < 0) | (tokens >= self.vocab_size))[0])
            location, token = self.dataset.locate(int(ids[row]), position), int(tokens[row, position])
            raise DataError(
                f"{location}: token id {token} is outside the vocabulary 0..{self.vocab_size - 1} "
                f"(sample {int(ids[row])}): use the tokenizer that made the data"
            )


class Prefetcher(Generic[T]):
    """A thread that reads the next batch while the current one is trained on.

    `get(consumed, n)` returns (micro-batches, seconds waited), after which the thread reads the following step.
    Requests may come in any order; the next one in sequence costs no wait.

    Args:
        prepare: applied to each micro-batch in the thread (a copy to pinned memory)
        size_at: returns the size of the batch after `consumed` samples, which may ramp up; 0 at the end of the run
    """

    def __init__(self, batches: Batches, prepare: Callable[[MicroBatch], T], size_at: Callable[[int], int]):
        self.batches, self._prepare, self._size_at = batches, prepare, size_at
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megalite-data")
        self._expected: tuple[int, int] | None = None
        self._future: Future[list[T]] | None = None

    def _read(self, consumed: int, global_batch_size: int) -> list[T]:
        return [self._prepare(micro) for micro in self.batches.at(consumed, global_batch_size)]

    def get(self, consumed: int, global_batch_size: int) -> tuple[list[T], float]:
        """Return (micro-batches, seconds waited); raises the error of the thread if its read failed."""
        started = time.perf_counter()
        requested = (consumed, global_batch_size)
        if self._future is None or self._expected != requested:
            if self._future is not None:
                self._future.cancel()
            self._future = self._thread.submit(self._read, *requested)
        batches = self._future.result()  # raises the thread's error
        next_consumed = consumed + global_batch_size
        next_size = self._size_at(next_consumed)
        self._future = self._thread.submit(self._read, next_consumed, next_size) if next_size else None
        self._expected = next_consumed, next_size
        return batches, time.perf_counter() - started

    def close(self) -> None:
        """Stop the thread after its current read."""
        self._thread.shutdown(wait=True, cancel_futures=True)
