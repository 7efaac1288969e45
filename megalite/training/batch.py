"""Converts numpy micro-batches to the model's batches: `host_batch` in the loader's thread, `on_device` in the step."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalite.data.datasets.batches import MicroBatch
from megalite.kernels.attention import Documents
from megalite.nn.micro_batch import Batch
from megalite.nn.sequence_sharding import shard_sequence
from megalite.parallel.mesh import Axis


def to_host_batch(
    micro: MicroBatch,
    *,
    pin: bool,
    positions: bool,
    documents: bool,
    cp: Axis,
    windows: Sequence[int | None],
    padding: bool = False,
) -> Batch:
    """tokens [B, T + 1] -> inputs and labels [S, B], those that this rank of `cp` has, in host memory (pinned with
    `pin`). `positions`: count them within each document; `documents`: let tokens attend to their own document only.
    Both need micro.first. `windows`: of every layer, as of ModelConfig; the cut over cp depends on them. `padding`:
    mark the tokens that only fill their samples."""
    places = own = None
    if cp.size > 1:
        places = shard_sequence(
            micro.tokens.shape[1] - 1, cp.size, windows, micro.document_start if documents else None
        )
        own = places.positions(cp.rank)

    def ready(array: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory() if pin else tensor

    def tensor(rows_BT: NDArray[np.generic]) -> Tensor:
        return ready((rows_BT if own is None else rows_BT[:, own]).T)

    positions_SB = None
    if positions:
        assert micro.document_start is not None
        positions_SB = tensor(np.arange(micro.document_start.shape[1], dtype=np.int64) - micro.document_start)
    mask_SB = None if micro.loss_mask is None else tensor(micro.loss_mask)
    tokens_SB = tensor(micro.tokens[:, :-1])
    padding_SB = None if micro.padding is None else tensor(micro.padding)
    return Batch(
        tokens_SB=tokens_SB,
        labels_SB=tensor(micro.tokens[:, 1:]),
        mask_SB=mask_SB,
        sample_ids_B=ready(micro.sample_ids),
        step=0,
        positions_SB=positions_SB,
        documents=_documents(micro.document_start, ready(micro.document_start))
        if documents and micro.document_start is not None
        else None,
        cp_sharding=places,
        cp_positions_S=None if own is None else ready(own),
        num_targets=tokens_SB.numel() if mask_SB is None else int(mask_SB.sum(dtype=torch.float64)),
        unpadded=tokens_SB.numel() - (0 if padding_SB is None else int(padding_SB.sum())),
        padding_SB=padding_SB if padding else None,
    )


def _documents(first_BT: NDArray[np.generic], first_BS: Tensor) -> Documents:
    spans = []
    for row, first_S in enumerate(first_BT):
        begins = [*np.flatnonzero(first_S == np.arange(len(first_S))).tolist(), len(first_S)]
        spans += [(row, a, b) for a, b in zip(begins, begins[1:], strict=False)]
    return Documents(tuple(spans), first_BS)


def to_device(b: Batch, device: torch.device, step: int) -> Batch:
    """The batch on the device; copies from pinned memory do not block."""
    to = functools.partial(Tensor.to, device=device, non_blocking=True)
    moved: dict[str, Any] = {name: to(x) for name, x in vars(b).items() if isinstance(x, Tensor)}
    if b.documents is not None:
        moved["documents"] = b.documents._replace(document_start_BS=to(b.documents.document_start_BS))
    return replace(b, step=step, **moved)
