"""The batch of a step, as a pure function: `Batches.at(consumed, n)` -> this data-parallel rank's micro-batches.

    samples consumed .. consumed + n - 1 are the step's. Micro-batch m of rank r holds, with B rows,
    consumed + m * (B * dp) + r * B + [0..B)          so dp, B and the number of workers may change on the way

There is no iterator and no state to save: a resume needs `consumed`, one integer. `Prefetcher` reads the next step's
batches in a thread while this one computes, and measures what is still waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalite.data.datasets import Dataset
from megalite.data.indexed import DataError


@dataclass(frozen=True)
class MicroBatch:
    """tokens [B, S + 1]; sample_ids [B], numbers in the global order; loss_mask [B, S], 1 where the label counts."""

    tokens: NDArray[np.int64]
    sample_ids: NDArray[np.int64]
    loss_mask: NDArray[np.float32] | None


class Batches:
    """Cuts the samples of one dataset into micro-batches. Ids outside [0, vocab_size) are refused by name."""

    def __init__(
        self,
        dataset: Dataset,
        seq_length: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        vocab_size: int,
        eod: int | None = None,
        eod_mask_loss: bool = False,
    ):
        if dataset.seq_length != seq_length:
            raise ValueError(f"seq_length={seq_length} is not the dataset's {dataset.seq_length}")
        if eod_mask_loss and eod is None:
            raise ValueError("eod_mask_loss needs the id of the end-of-document token (eod)")
        self.dataset, self.vocab_size = dataset, vocab_size
        self._micro, self._rank, self._dp = micro_batch_size, dp_rank, dp_size
        self._mask_after = eod if eod_mask_loss else None

    def at(self, consumed: int, global_batch_size: int) -> list[MicroBatch]:
        """The micro-batches of the step that has `consumed` samples before it."""
        per_micro = self._micro * self._dp
        if global_batch_size < 1 or global_batch_size % per_micro:
            raise ValueError(
                f"global_batch_size={global_batch_size} is not a multiple of micro_batch_size {self._micro} "
                f"x data parallel {self._dp} = {per_micro}"
            )
        micro, row = np.meshgrid(np.arange(global_batch_size // per_micro), np.arange(self._micro), indexing="ij")
        ids_MB = consumed + micro * per_micro + self._rank * self._micro + row
        tokens = self.dataset.samples(ids_MB.reshape(-1))
        self._check(ids_MB.reshape(-1), tokens)
        tokens_MBS = tokens.reshape(*ids_MB.shape, -1)
        return [
            MicroBatch(tokens_BS, ids_B, self._loss_mask(tokens_BS))
            for tokens_BS, ids_B in zip(tokens_MBS, ids_MB, strict=True)
        ]

    def _loss_mask(self, tokens_BS: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """After an end of document the next token begins an unrelated text: its prediction does not count."""
        return None if self._mask_after is None else (tokens_BS[:, :-1] != self._mask_after).astype(np.float32)

    def _check(self, ids: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            row, position = (int(i) for i in np.argwhere((tokens < 0) | (tokens >= self.vocab_size))[0])
            raise DataError(
                f"{self.dataset.where(int(ids[row]), position)}: token id {int(tokens[row, position])} is outside the "
                f"vocabulary 0..{self.vocab_size - 1} (sample {int(ids[row])}): use the tokenizer that made the data"
            )


class Prefetcher:
    """`get(consumed, n)` -> (micro-batches, seconds waited); meanwhile the thread reads the step after it.

    Any request is answered rightly, in any order; the next one in sequence costs no wait. `size_at(consumed)` tells
    the size of the next batch when it changes (ramp-up); without it the same size is expected again.
    """

    def __init__(self, batches: Batches, size_at: Callable[[int], int] | None = None):
        self.batches, self._size_at = batches, size_at
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megalite-data")
        self._expected: tuple[int, int] | None = None
        self._future: Future[list[MicroBatch]] | None = None

    def get(self, consumed: int, global_batch_size: int) -> tuple[list[MicroBatch], float]:
        begin = time.perf_counter()
        wanted = (consumed, global_batch_size)
        if self._future is None or self._expected != wanted:
            if self._future is not None:
                self._future.cancel()
            self._future = self._thread.submit(self.batches.at, *wanted)
        batches = self._future.result()  # raises here what the thread met
        after = consumed + global_batch_size
        self._expected = (after, self._size_at(after) if self._size_at else global_batch_size)
        self._future = self._thread.submit(self.batches.at, *self._expected)
        return batches, time.perf_counter() - begin

    def close(self) -> None:
        """Stop the thread; it finishes what it is reading."""
        self._thread.shutdown(wait=True, cancel_futures=True)
