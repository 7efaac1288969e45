"""Convert numpy micro-batches to the model's batches.

`to_host_batch` runs in the loader's thread, `to_device` in the training step.
"""

import functools
import itertools
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
    num_mtp_depths: int = 0,
) -> Batch:
    """Return a micro-batch in host memory, with inputs and labels [S, B] cut from its tokens [B, T + 1].

    S is this rank's share of the T positions if cp > 1, otherwise T.

    Args:
        pin: Use pinned memory.
        positions: Count positions within each document; needs micro.document_start.
        documents: Restrict attention to the token's document; needs micro.document_start.
        windows: The attention window of every layer, as in ModelConfig; the sharding over cp depends on them.
        padding: Mark the tokens that only fill up their samples.
        num_mtp_depths: The number of depths of multi-token prediction on this rank.
    """
    sharding = local_positions = None
    if cp.size > 1:
        sharding = shard_sequence(
            micro.tokens.shape[1] - 1, cp.size, windows, micro.document_start if documents else None
        )
        local_positions = sharding.positions(cp.rank)

    def to_tensor(array: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory() if pin else tensor

    def shard(array_BT: NDArray[np.generic]) -> Tensor:
        """Select this rank's positions, the last dim, and move the samples, the first one, to the end: [S, B]."""
        local = array_BT if local_positions is None else array_BT[..., local_positions]
        return to_tensor(np.moveaxis(local, 0, -1))

    positions_SB = None
    if positions:
        assert micro.document_start is not None
        positions_SB = shard(np.arange(micro.document_start.shape[1], dtype=np.int64) - micro.document_start)
    batch_documents = None
    if documents and micro.document_start is not None:
        batch_documents = _documents(micro.document_start, to_tensor(micro.document_start))
    mask_SB = None if micro.loss_mask is None else shard(micro.loss_mask)
    tokens_SB = shard(micro.tokens[:, :-1])
    padding_SB = None if micro.padding is None else shard(micro.padding)
    mtp_arrays = _mtp_arrays(micro, num_mtp_depths, positions, padding)
    mtp_tensors = {name: shard(array_BJT) for name, array_BJT in mtp_arrays.items()}
    return Batch(
        tokens_SB=tokens_SB,
        labels_SB=shard(micro.tokens[:, 1:]),
        mask_SB=mask_SB,
        sample_ids_B=to_tensor(micro.sample_ids),
        positions_SB=positions_SB,
        documents=batch_documents,
        cp_sharding=sharding,
        cp_positions_S=None if local_positions is None else to_tensor(local_positions),
        num_targets=tokens_SB.numel() if mask_SB is None else int(mask_SB.sum(dtype=torch.float64)),
        num_unpadded=tokens_SB.numel() - (0 if padding_SB is None else int(padding_SB.sum())),
        padding_SB=padding_SB if padding else None,
        request_ids_SB=None if micro.request_ids is None else shard(micro.request_ids),
        **mtp_tensors,
    )


def _mtp_arrays(micro: MicroBatch, num_depths: int, positions: bool, padding: bool) -> dict[str, NDArray[np.generic]]:
    """Return the fields of Batch for the depths of multi-token prediction as arrays [B, n, T]; {} if there are none.

    At position i, depth k has the input t_(i+k) and the label t_(i+k+1). The label counts if position i + k is in the
    sample, the model's label of that position counts, and no document starts between i and the label. An input after
    the sample is its last token; no position whose label counts attends to one.
    """
    if not num_depths:
        return {}
    T = micro.tokens.shape[1] - 1
    ahead_JT = np.arange(1, num_depths + 1)[:, None] + np.arange(T)
    inside_JT = np.minimum(ahead_JT, T - 1)
    label_JT = np.minimum(ahead_JT + 1, T)
    is_inside_BJT = np.broadcast_to(ahead_JT < T, (len(micro.tokens), num_depths, T))
    mask_BJT = is_inside_BJT.astype(np.float32)
    if micro.loss_mask is not None:
        mask_BJT *= micro.loss_mask[:, inside_JT]
    if micro.document_ids is not None:
        mask_BJT *= micro.document_ids[:, label_JT] == micro.document_ids[:, None, :-1]
    positions_BJT = np.tile(inside_JT, (len(micro.tokens), 1, 1))  # torch warns of arrays that it may not write
    if positions:
        assert micro.document_start is not None
        positions_BJT = positions_BJT - micro.document_start[:, inside_JT]
    arrays: dict[str, NDArray[np.generic]] = {
        "mtp_tokens_JSB": micro.tokens[:, np.minimum(ahead_JT, T)],
        "mtp_positions_JSB": positions_BJT,
        "mtp_labels_JSB": micro.tokens[:, label_JT],
        "mtp_mask_JSB": mask_BJT,
    }
    if padding:
        arrays["mtp_padding_JSB"] = ~is_inside_BJT
        if micro.padding is not None:
            arrays["mtp_padding_JSB"] = ~is_inside_BJT | micro.padding[:, inside_JT]
    return arrays


def _documents(document_start_BT: NDArray[np.generic], document_start_BS: Tensor) -> Documents:
    """Return the documents as (sample, start, stop) spans, from the position at which each token's document starts."""
    spans = []
    for sample, document_start_T in enumerate(document_start_BT):
        length = len(document_start_T)
        bounds = [*np.flatnonzero(document_start_T == np.arange(length)).tolist(), length]
        spans += [(sample, start, stop) for start, stop in itertools.pairwise(bounds)]
    return Documents(tuple(spans), document_start_BS)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy the batch to the device; copies from pinned memory do not block the host."""
    to = functools.partial(Tensor.to, device=device, non_blocking=True)
    copies: dict[str, Any] = {name: to(value) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    if batch.documents is not None:
        copies["documents"] = batch.documents._replace(document_start_BS=to(batch.documents.document_start_BS))
    return replace(batch, **copies)
