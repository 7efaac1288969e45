"""Attention of a sample whose tokens several context-parallel ranks hold (places.py); [S, ...] are the rank's own rows.

    allgather   k, v --gather--> [T, B, G, K] in the sample's order; each run of the rank's queries attends to the
                keys from the first that one of them sees up to its own end. Backward gathers them again and sums their
                gradients over the ranks that used them, in fp32
    a2a         q, k, v --all-to-all--> all T tokens of H / cp heads (arXiv:2309.14509); o back. Backward brings o
                to the heads once more, beside its gradient, so it is kept as the tokens have it alone

Bytes that a rank receives per layer and micro-batch in forward, e per element, f = (cp - 1) / cp:

    allgather   f 2 T B G K e                      in backward these and f 2 T B G K 4
    a2a         f S B K e (2 H + 2 max(G, cp))     in backward these and f S B K e H

In a window the gather is an all-to-all of the blocks that a query of the receiver sees. With fewer groups than ranks a
rank gets the group that its heads use; one that is no multiple of the other repeats keys, so only cp must divide H.
Rejected: a ring of messages. It moves the bytes of the gather and saves its memory, 2 T B G K e, which for Llama-3-8B
is 0.5 GB at 128k tokens; it needs equal work in every hop, which documents do not give.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from megalite.kernels.attention import Documents
from megalite.kernels.blocked_attention import AttentionDropout
from megalite.kernels.dispatch import accum_dtype
from megalite.nn.activation_offload import current_offload_hooks
from megalite.nn.sequence_sharding import SequenceSharding
from megalite.parallel.comm import start_all_gather, start_all_to_all, start_reduce_scatter
from megalite.parallel.mesh import Axis

AttentionFn = Callable[..., Tensor]


@dataclass(frozen=True)
class KVExchange:
    """The way of keys and values, both in kv [2, S, B, G, K]. Without a window all ranks get all blocks, in one
    all-gather; in a window each gets those that its queries see, in one all-to-all."""

    cp: Axis
    sharding: SequenceSharding
    window: int | None

    @cached_property
    def required_chunks(self) -> list[tuple[int, ...]]:
        """The blocks that each rank has in the end, in order."""
        if self.window is None:
            return [tuple(range(len(self.sharding.first_visible)))] * self.cp.size
        return [self.sharding.required_chunks(rank, self.window) for rank in range(self.cp.size)]

    def _chunks_to_send(self, giver: int, taker: int) -> list[int]:
        return (
            [b for b in self.sharding.seq_chunks_by_rank[giver] if b in self.required_chunks[taker]]
            if giver != taker
            else []
        )

    @cached_property
    def sent_chunks(self) -> list[list[int]]:
        """In a window, this rank's blocks that each rank gets from it."""
        return [self._chunks_to_send(self.cp.rank, taker) for taker in range(self.cp.size)]

    @cached_property
    def received_chunks(self) -> list[list[int]]:
        """In a window, the blocks that this rank gets from each rank."""
        return [self._chunks_to_send(giver, self.cp.rank) for giver in range(self.cp.size)]

    def _chunk_views(self, own: Tensor, others: Tensor) -> dict[int, Tensor]:
        """The part [2, size, B, G, K] of each block. others: kv of every rank, or in a window the parts that came
        from other ranks."""
        if self.window is not None:
            return self._split_chunks(own, self.cp.rank) | dict(zip(sum(self.received_chunks, []), others, strict=True))
        return {b: part for rank, kv in enumerate(others) for b, part in self._split_chunks(kv, rank).items()}

    def _split_chunks(self, kv: Tensor, rank: int) -> dict[int, Tensor]:
        parts = kv.unflatten(1, (-1, self.sharding.seq_chunk_size)).unbind(1)
        return dict(zip(self.sharding.seq_chunks_by_rank[rank], parts, strict=True))

    def _all_to_all(self, parts: Tensor, sent_chunks: list[list[int]], received_chunks: list[list[int]]) -> Tensor:
        """[blocks, ...], those of `given` in order, to those of `got`."""
        given_sizes, got_sizes = (
            [len(some) * parts.shape[1:].numel() for some in side] for side in (sent_chunks, received_chunks)
        )
        flat = start_all_to_all(parts.reshape(-1), given_sizes, got_sizes, self.cp).wait()
        return flat.view(-1, *parts.shape[1:])

    def all_gather(self, kv: Tensor) -> Tensor:
        """[2, T', B, G, K]: the needed blocks in order."""
        if self.window is None:
            others = start_all_gather(kv, self.cp).wait().unflatten(0, (self.cp.size, 2))
        else:
            own, nothing = (
                self._split_chunks(kv, self.cp.rank),
                kv.new_empty(0, 2, self.sharding.seq_chunk_size, *kv.shape[2:]),
            )
            parts = [own[b][None] for some in self.sent_chunks for b in some]
            others = self._all_to_all(torch.cat([nothing, *parts]), self.sent_chunks, self.received_chunks)
        found = self._chunk_views(kv, others)
        return torch.cat([found[b] for b in self.required_chunks[self.cp.rank]], 1)

    def slice_for(self, seen: range) -> slice:
        """Where these positions are in what `gather` returns."""
        block, size = seen.start // self.sharding.seq_chunk_size, self.sharding.seq_chunk_size
        begin = self.required_chunks[self.cp.rank].index(block) * size + seen.start - block * size
        return slice(begin, begin + len(seen))

    def reduce_scatter_grads(self, kv: Tensor, grads: Sequence[tuple[range, Tensor, Tensor]]) -> Tensor:
        """The gradient of kv, of which only the shape is read. grads: positions, and the gradients of their keys and of
        their values; they are summed, here and over the ranks, in at least fp32."""
        dtype, size = accum_dtype(kv), self.sharding.seq_chunk_size
        own = kv.new_zeros(kv.shape, dtype=dtype)
        shape = (
            (self.cp.size, *kv.shape)
            if self.window is None
            else (sum(map(len, self.received_chunks)), 2, size, *kv.shape[2:])
        )
        others = kv.new_zeros(shape, dtype=dtype)
        sums = self._chunk_views(own, others)
        for seen, *dkv in grads:
            for block in self.sharding.chunks_covering(seen):
                overlap = range(max(seen.start, block * size), min(seen.stop, (block + 1) * size))
                to, of = (slice(overlap.start - at, overlap.stop - at) for at in (block * size, seen.start))
                for n, x in enumerate(dkv):
                    sums[block][n, to].add_(x[of])
        if self.window is None:
            return start_reduce_scatter(others.flatten(0, 1), self.cp).wait().to(kv.dtype)
        inverse = self._all_to_all(others, self.received_chunks, self.sent_chunks)
        for block, part in zip(sum(self.sent_chunks, []), inverse, strict=True):
            sums[block].add_(part)
        return own.to(kv.dtype)


def shares_storage(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata


class _GatheredKV:
    """What attention saves for backward: of gathered keys and values, which backward gathers again, their place alone,
    and of the results of runs, which are joined, parts of the whole. All else is for the hooks around."""

    def __init__(self, exchange: KVExchange, kv: Tensor, recomputed: bool):
        self.gathered_kv: Tensor | None
        self.outer_pack, self.outer_unpack = current_offload_hooks()
        self.exchange, self.kv = exchange, None if recomputed else self.outer_pack(kv)
        self.gathered_kv = exchange.all_gather(kv)
        self.saved: list[list[Any]] = []

    def get(self) -> Tensor:
        if self.gathered_kv is None:
            self.gathered_kv = self.exchange.all_gather(self.outer_unpack(self.kv))
        return self.gathered_kv

    def pack(self, x: Tensor) -> Any:
        if shares_storage(x, self.get()):
            return x.shape, x.stride(), x.storage_offset()
        self.saved.append([x])
        return self.saved[-1]

    def unpack(self, kept: Any) -> Tensor:
        return self.outer_unpack(kept[0]) if isinstance(kept, list) else self.get().as_strided(*kept)

    def concat_outputs(self, outputs: list[Tensor]) -> Tensor:
        """The results of all runs in one tensor."""
        self.gathered_kv = None
        whole = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        for one, part in zip(outputs, whole.detach().split([len(one) for one in outputs]), strict=True):
            for kept in self.saved:
                if shares_storage(kept[0], one) and kept[0].shape == part.shape:
                    kept[0] = part
        for kept in self.saved:
            kept[0] = self.outer_pack(kept[0])
        self.saved = []
        return whole


class _AllGatherKV(Function):
    """kv -> keys and values of each range of positions; the gradients of all of them are summed at once."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, shelf: _GatheredKV, seen: list[range]) -> tuple[Tensor, ...]:
        ctx.shelf, ctx.seen, ctx.like = shelf, seen, kv.new_empty(()).expand(kv.shape)
        whole = shelf.get()
        return tuple(x[shelf.exchange.slice_for(some)] for some in seen for x in whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.shelf.gathered_kv = ctx.shelf.kv = None  # the graph lives on
        parts = zip(ctx.seen, grads[::2], grads[1::2], strict=True)
        return ctx.shelf.exchange.reduce_scatter_grads(ctx.like, list(parts)), None, None


class _SequenceToHeads(Function):
    """The rank's tokens of all heads -> all tokens, in order, of its share of the heads (dim 2); or, `back`, the
    inverse, which is also the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Axis, sharding: SequenceSharding, inverse: bool) -> Tensor:
        ctx.given = cp, sharding, not inverse
        size = sharding.seq_chunk_size
        order = [b for blocks in sharding.seq_chunks_by_rank for b in blocks]
        if inverse:
            by_block = x.unflatten(0, (-1, size)).unbind(0)
            sent = torch.stack([by_block[b] for b in order])
        else:
            sent = x.unflatten(2, (cp.size, -1)).permute(2, 0, 1, 3, 4).contiguous()
        each = [sent.numel() // cp.size] * cp.size
        received_chunks = start_all_to_all(sent.view(-1), each, each, cp).wait()
        if inverse:  # [cp, S, B, n, K]
            return received_chunks.view(cp.size, -1, *x.shape[1:]).permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()
        received_chunks = received_chunks.view(len(order), size, x.shape[1], -1, x.shape[3])
        return torch.cat([received_chunks[order.index(b)] for b in range(len(order))])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _SequenceToHeads.forward(ctx, dy, *ctx.given), None, None, None


class _SavedOutput:
    """What attention of some heads saves for backward: of its result o the place alone; all else is for the hooks
    around."""

    def __init__(self) -> None:
        self.outer_pack, self.outer_unpack = current_offload_hooks()
        self.saved: list[list[Any]] = []
        self.outputs: list[Tensor] = []  # one for each time that it is to be read
        self.num_reads = 0

    def pack(self, x: Tensor) -> list[Any]:
        self.saved.append([x])
        return self.saved[-1]

    def unpack(self, kept: list[Any]) -> Tensor:
        return self.outer_unpack(*kept) if len(kept) == 1 else self.outputs.pop().as_strided(*kept)

    def finish(self, outputs: Tensor) -> None:
        for kept in self.saved:
            x = kept[0]
            alone = shares_storage(x, outputs) and x.untyped_storage().nbytes() == outputs.nbytes
            kept[:] = (x.shape, x.stride(), x.storage_offset()) if alone else [self.outer_pack(x)]
            self.num_reads += alone
        self.saved = []


class _HeadsToSequence(_SequenceToHeads):
    """o of the rank's heads -> of its tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Axis, sharding: SequenceSharding, result: _SavedOutput) -> Tensor:  # type: ignore[override]
        o_SBHK = _SequenceToHeads.forward(ctx, x, cp, sharding, True)
        ctx.save_for_backward(o_SBHK)
        ctx.saved_output, ctx.strides, ctx.inverse_args = result, x.stride(), ctx.given
        return o_SBHK

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        o_TBHK, do_TBHK = (_SequenceToHeads.forward(ctx, x, *ctx.inverse_args) for x in (*ctx.saved_tensors, dy))
        if num_reads := ctx.saved_output.num_reads:
            o = o_TBHK.new_empty_strided(o_TBHK.shape, ctx.strides).copy_(o_TBHK)
            ctx.saved_output.outputs = [o] * num_reads
        return do_TBHK, None, None, None


@dataclass(frozen=True)
class ContextParallelAttention:
    """`attend` of whole samples, of which this rank has a part. again: the caller runs this again in backward, so that
    nothing needs to be gathered for it."""

    attention_fn: AttentionFn
    cp: Axis
    sharding: SequenceSharding
    recomputed: bool

    def kv_all_gather_attention(
        self, q_SBHK: Tensor, k_SBGK: Tensor, v_SBGK: Tensor, *, window: int | None, documents: Documents | None,
        **how: Any,
    ) -> Tensor:  # fmt: skip
        """This rank's queries, with the keys of all."""
        window = None if window is not None and window >= self.cp.size * q_SBHK.shape[0] else window
        kv, runs = torch.stack((k_SBGK, v_SBGK)), self.sharding.contiguous_ranges(self.cp.rank)
        seen = [self.sharding.visible_keys(run, window) for run in runs]
        shelf = _GatheredKV(KVExchange(self.cp, self.sharding, window), kv.detach(), self.recomputed)
        parts: Any = _AllGatherKV.apply(kv, shelf, seen)
        outputs: list[Tensor] = []
        with nullcontext() if self.recomputed else saved_tensors_hooks(shelf.pack, shelf.unpack):
            queries = q_SBHK.split([len(run) for run in runs])
            for run, keys, q, k, v in zip(runs, seen, queries, parts[::2], parts[1::2], strict=True):
                local_documents = documents and documents._replace(
                    document_start_BS=documents.document_start_BS[:, run.start : run.stop]
                )
                at = dict(q_start=run.start, k_start=keys.start)
                outputs.append(self.attention_fn(q, k, v, window=window, documents=local_documents, **at, **how))
        return shelf.concat_outputs(outputs)

    def all_to_all_attention(
        self,
        q_SBHK: Tensor,
        k_SBGK: Tensor,
        v_SBGK: Tensor,
        *,
        drop: AttentionDropout | None,
        sink_H: Tensor | None,
        **how: Any,
    ) -> Tensor:
        """All tokens, and some heads on each rank; cp divides H."""
        H, G, cp = q_SBHK.shape[2], k_SBGK.shape[2], self.cp
        local_documents = H // cp.size
        heads_per_kv_copy = gcd(local_documents, H // G)  # heads that share a group on every rank
        groups = torch.arange(0, H, heads_per_kv_copy, device=q_SBHK.device) // (H // G)
        k, v = (x if len(groups) == G else x.index_select(2, groups) for x in (k_SBGK, v_SBGK))
        by_rank = [x.unflatten(2, (cp.size, -1)) for x in (q_SBHK, k, v)]
        x_TBnK: Any = _SequenceToHeads.apply(torch.cat(by_rank, 3).flatten(2, 3), cp, self.sharding, False)
        local_dropout = drop and drop._replace(head_offset=drop.head_offset + cp.shard_start(local_documents))
        how["sink_H"] = None if sink_H is None else sink_H.narrow(0, cp.shard_start(local_documents), local_documents)
        result, qkv = _SavedOutput(), x_TBnK.split([x.shape[3] for x in by_rank], 2)
        with nullcontext() if self.recomputed else saved_tensors_hooks(result.pack, result.unpack):
            o_TBHK = self.attention_fn(*qkv, drop=local_dropout, **how)
        result.finish(o_TBHK)
        if self.recomputed:
            return _SequenceToHeads.apply(o_TBHK, cp, self.sharding, True)  # type: ignore[return-value]
        return _HeadsToSequence.apply(o_TBHK, cp, self.sharding, result)  # type: ignore[return-value]
