"""Converts numpy micro-batches to the model's batches: `host_batch` in the loader's thread, `on_device` in the step."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalite.data.samples.batches import MicroBatch
from megalite.kernels.attention import Documents
from megalite.models.gpt import Batch


@dataclass(frozen=True)
class HostBatch:
    """A batch in host memory (pinned where there is a card), and the number of its labels that count."""

    batch: Batch
    counted_tokens: int


def host_batch(micro: MicroBatch, *, pin: bool, positions: bool = False, documents: bool = False) -> HostBatch:
    """tokens [B, S + 1] -> inputs and labels [S, B]. `positions`: count them within each document; `documents`: let
    tokens attend to their own document only. Both need micro.first."""

    def tensor(rows_BS: NDArray[np.generic]) -> Tensor:
        columns_SB = torch.from_numpy(np.ascontiguousarray(rows_BS.T))
        return columns_SB.pin_memory() if pin else columns_SB

    positions_SB = None
    if positions:
        assert micro.first is not None
        positions_SB = tensor(np.arange(micro.first.shape[1], dtype=np.int64) - micro.first)
    batch = Batch(
        tokens_SB=tensor(micro.tokens[:, :-1]),
        labels_SB=tensor(micro.tokens[:, 1:]),
        mask_SB=None if micro.loss_mask is None else tensor(micro.loss_mask),
        sample_ids_B=tensor(micro.sample_ids),
        step=0,
        positions_SB=positions_SB,
        documents=_documents(micro, tensor(micro.first.T)) if documents and micro.first is not None else None,
    )
    return HostBatch(batch, micro.counted_tokens)


def _documents(micro: MicroBatch, first_BS: Tensor) -> Documents:
    assert micro.first is not None
    spans = []
    for row, first_S in enumerate(micro.first):
        begins = [*np.flatnonzero(first_S == np.arange(len(first_S))).tolist(), len(first_S)]
        spans += [(row, a, b) for a, b in zip(begins, begins[1:], strict=False)]
    return Documents(tuple(spans), first_BS)


def on_device(host: HostBatch, device: torch.device, step: int) -> Batch:
    """The batch on the device; copies from pinned memory do not block."""
    b, to = host.batch, functools.partial(Tensor.to, device=device, non_blocking=True)
    moved: dict[str, Any] = {name: to(x) for name, x in vars(b).items() if isinstance(x, Tensor)}
    if b.documents is not None:
        moved["documents"] = replace(b.documents, first_BS=to(b.documents.first_BS))
    return replace(b, step=step, **moved)
