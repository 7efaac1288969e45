"""Attention over samples that are sharded over context-parallel ranks (sequence_sharding.py).

Tensors [S, ...] are this rank's tokens.

    allgather   k, v --gather--> [T, B, G, K] in the sample's order; each contiguous range of the rank's queries attends
                to the keys from the first that one of them sees to the end of the range. Backward gathers them again
                and sums their gradients over the ranks that used them, in fp32
    a2a         q, k, v --all-to-all--> all T tokens of H / cp heads (arXiv:2309.14509); o is sent back. Backward sends
                o to the heads again, with its gradient, so only the copy by tokens is saved

Bytes that a rank receives per layer and micro-batch in forward, e per element, f = (cp - 1) / cp:

    allgather   f 2 T B G K e                      in backward these and f 2 T B G K 4
    a2a         f S B K e (2 H + 2 max(G, cp))     in backward these and f S B K e H

In a window the gather is an all-to-all of the chunks that a query of the receiver sees. With fewer groups than ranks, a
rank gets the group that its heads use. If neither number divides the other, keys are repeated, so only cp must divide
H. Rejected: a ring of messages. It moves the bytes of the gather and saves its memory, 2 T B G K e, which for
Llama-3-8B is 0.5 GB at 128k tokens; it needs equal work in every hop, which documents do not give.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megalite.kernels.attention import Documents
from megalite.kernels.blocked_attention import AttentionDropout
from megalite.kernels.dispatch import accum_dtype
from megalite.nn.saved_tensors import current_hooks, nested_hooks
from megalite.nn.sequence_sharding import SequenceSharding
from megalite.nn.storage_identity import shares_storage
from megalite.parallel.comm import start_all_gather, start_all_to_all, start_reduce_scatter
from megalite.parallel.mesh import Axis

AttentionFn = Callable[..., Tensor]


@dataclass(frozen=True)
class KVExchange:
    """The exchange of keys and values, both in kv [2, S, B, G, K], or of latents, kv [1, S, B, C].

    Without a window all ranks get all chunks in one all-gather. In a window each rank gets the chunks that its queries
    see, in one all-to-all.
    """

    cp: Axis
    sharding: SequenceSharding
    window: int | None

    @cached_property
    def required_chunks(self) -> list[tuple[int, ...]]:
        """The chunks that each rank needs, in order."""
        if self.window is None:
            return [tuple(range(len(self.sharding.first_visible)))] * self.cp.size
        return [self.sharding.required_chunks(rank, self.window) for rank in range(self.cp.size)]

    def _chunks_to_send(self, sender: int, receiver: int) -> list[int]:
        """Return the chunks that one rank sends to another."""
        if sender == receiver:
            return []
        return [c for c in self.sharding.seq_chunks_by_rank[sender] if c in self.required_chunks[receiver]]

    @cached_property
    def sent_chunks(self) -> list[list[int]]:
        """The chunks that this rank sends to each rank, in a window."""
        return [self._chunks_to_send(self.cp.rank, receiver) for receiver in range(self.cp.size)]

    @cached_property
    def received_chunks(self) -> list[list[int]]:
        """The chunks that this rank receives from each rank, in a window."""
        return [self._chunks_to_send(sender, self.cp.rank) for sender in range(self.cp.size)]

    def _chunk_views(self, own: Tensor, others: Tensor) -> dict[int, Tensor]:
        """Return a view of each chunk, [2, chunk size, B, G, K].

        `others` is kv of every rank, or in a window the chunks received from other ranks.
        """
        if self.window is not None:
            received_chunks = itertools.chain.from_iterable(self.received_chunks)
            return self._split_chunks(own, self.cp.rank) | dict(zip(received_chunks, others, strict=True))
        return {c: part for rank, kv in enumerate(others) for c, part in self._split_chunks(kv, rank).items()}

    def _split_chunks(self, kv: Tensor, rank: int) -> dict[int, Tensor]:
        """Return a view of each chunk of a rank's kv."""
        parts = kv.unflatten(1, (-1, self.sharding.seq_chunk_size)).unbind(1)
        return dict(zip(self.sharding.seq_chunks_by_rank[rank], parts, strict=True))

    def _all_to_all(self, parts: Tensor, sent_chunks: list[list[int]], received_chunks: list[list[int]]) -> Tensor:
        """Exchange chunks [chunks, ...], given in the order of `sent_chunks`; return the received ones in order."""
        chunk_numel = parts.shape[1:].numel()
        input_splits = [len(chunks) * chunk_numel for chunks in sent_chunks]
        output_splits = [len(chunks) * chunk_numel for chunks in received_chunks]
        flat = start_all_to_all(parts.reshape(-1), input_splits, output_splits, self.cp).wait()
        return flat.view(-1, *parts.shape[1:])

    def all_gather(self, kv: Tensor) -> Tensor:
        """Return the required chunks in order, [2, T', B, G, K]. Collective over cp."""
        if self.window is None:
            others = start_all_gather(kv, self.cp).wait().unflatten(0, (self.cp.size, len(kv)))
        else:
            local = self._split_chunks(kv, self.cp.rank)
            empty = kv.new_empty(0, len(kv), self.sharding.seq_chunk_size, *kv.shape[2:])
            parts = [local[chunk][None] for chunks in self.sent_chunks for chunk in chunks]
            others = self._all_to_all(torch.cat([empty, *parts]), self.sent_chunks, self.received_chunks)
        views = self._chunk_views(kv, others)
        return torch.cat([views[chunk] for chunk in self.required_chunks[self.cp.rank]], 1)

    def slice_for(self, seen: range) -> slice:
        """Return the slice of these positions in the result of `all_gather`."""
        size = self.sharding.seq_chunk_size
        chunk = seen.start // size
        start = self.required_chunks[self.cp.rank].index(chunk) * size + seen.start - chunk * size
        return slice(start, start + len(seen))

    def reduce_scatter_grads(self, kv: Tensor, grads: Sequence[tuple[range, Sequence[Tensor]]]) -> Tensor:
        """Return the gradient of this rank's kv, whose shape alone is read. Collective over cp.

        `grads` has ranges of positions, each with the gradients of its keys and values, or of its latents. They are
        summed, on this rank and over ranks, in at least fp32.
        """
        dtype = accum_dtype(kv)
        size = self.sharding.seq_chunk_size
        local = kv.new_zeros(kv.shape, dtype=dtype)
        if self.window is None:
            shape = (self.cp.size, *kv.shape)
        else:
            shape = (sum(map(len, self.received_chunks)), len(kv), size, *kv.shape[2:])
        others = kv.new_zeros(shape, dtype=dtype)
        sums = self._chunk_views(local, others)
        for seen, dkv in grads:
            for chunk in self.sharding.chunks_covering(seen):
                overlap = range(max(seen.start, chunk * size), min(seen.stop, (chunk + 1) * size))
                target = slice(overlap.start - chunk * size, overlap.stop - chunk * size)
                source = slice(overlap.start - seen.start, overlap.stop - seen.start)
                for n, x in enumerate(dkv):
                    sums[chunk][n, target].add_(x[source])
        if self.window is None:
            return start_reduce_scatter(others.flatten(0, 1), self.cp).wait().to(kv.dtype)
        inverse = self._all_to_all(others, self.received_chunks, self.sent_chunks)
        for chunk, part in zip(itertools.chain.from_iterable(self.sent_chunks), inverse, strict=True):
            sums[chunk].add_(part)
        return local.to(kv.dtype)


class _GatheredKV:
    """The gathered keys and values, and the hooks for the tensors that attention saves for backward.

    Backward gathers keys and values again, so only the positions of their views are saved. The outputs of ranges are
    concatenated, so views of the concatenated output are saved in their place. Everything else goes to the outer hooks.
    """

    def __init__(self, exchange: KVExchange, kv: Tensor, recomputed: bool):
        self.gathered_kv: Tensor | None
        self.outer_pack, self.outer_unpack = current_hooks()
        self.exchange = exchange
        self.kv = None if recomputed else self.outer_pack(kv)
        self.gathered_kv = exchange.all_gather(kv)
        self.saved: list[list[Any]] = []

    def get(self) -> Tensor:
        if self.gathered_kv is None:
            self.gathered_kv = self.exchange.all_gather(self.outer_unpack(self.kv))
        return self.gathered_kv

    def position_of(self, x: Tensor) -> Any:
        """Return the position of a view of what is gathered, or None for any other tensor."""
        return (x.shape, x.stride(), x.storage_offset()) if shares_storage(x, self.get()) else None

    def at_position(self, position: Any) -> Tensor:
        """Return the view at a position, for which backward gathers again."""
        return self.get().as_strided(*position)

    def pack(self, x: Tensor) -> Any:
        if (position := self.position_of(x)) is not None:
            return position
        self.saved.append([x])
        return self.saved[-1]

    def unpack(self, entry: Any) -> Tensor:
        return self.outer_unpack(entry[0]) if isinstance(entry, list) else self.at_position(entry)

    def drop(self) -> None:
        """Free what is gathered; `get` gathers it again."""
        self.gathered_kv = None

    def free(self) -> None:
        """Free everything, at the end of backward."""
        self.drop()
        self.kv = None

    def concat_outputs(self, outputs: list[Tensor]) -> Tensor:
        """Return the outputs of all ranges in one tensor."""
        self.drop()
        joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        for output, part in zip(outputs, joined.detach().split([len(output) for output in outputs]), strict=True):
            for entry in self.saved:
                # the strides tell it from a transposed view, which torch's attention saves
                is_output = (entry[0].shape, entry[0].stride()) == (output.shape, output.stride())
                if is_output and shares_storage(entry[0], output):
                    entry[0] = part
        for entry in self.saved:
            entry[0] = self.outer_pack(entry[0])
        self.saved = []
        return joined


class _GatheredLatents(_GatheredKV):
    """The gathered latents, and the keys and values that are expanded from them. Neither is saved.

    Backward gathers the latents and expands them again.

    expand      the function from latents [T, B, L] to keys and values [T, B, H, K + V]
    key_ranges  the positions whose keys and values are expanded
    """

    def __init__(
        self, exchange: KVExchange, c_SBC: Tensor, recomputed: bool, expand: Callable[[Tensor], Tensor],
        latent_dim: int, key_ranges: Sequence[range],
    ):  # fmt: skip
        super().__init__(exchange, c_SBC[None], recomputed)
        self.expand = expand
        self.latent_dim = latent_dim
        self.key_ranges = key_ranges
        self.expanded_kv: dict[int, Tensor] = {}  # by number of the range

    def expand_range(self, i: int, c_TBC: Tensor) -> Tensor:
        """Return keys and values of a range, given its latents."""
        self.expanded_kv[i] = kv = self.expand(c_TBC[..., : self.latent_dim])
        return kv

    def _get_expanded(self, i: int) -> Tensor:
        if i not in self.expanded_kv:
            with torch.no_grad():
                self.expand_range(i, self.get()[0, self.exchange.slice_for(self.key_ranges[i])])
        return self.expanded_kv[i]

    def position_of(self, x: Tensor) -> Any:
        for i, kv in self.expanded_kv.items():
            if shares_storage(x, kv):
                return i, (x.shape, x.stride(), x.storage_offset())
        position = super().position_of(x)
        return position and (None, position)

    def at_position(self, position: Any) -> Tensor:
        i, view = position
        return super().at_position(view) if i is None else self._get_expanded(i).as_strided(*view)

    def drop(self) -> None:
        super().drop()
        self.expanded_kv = {}


def _merge_ranges(ranges: Sequence[range]) -> list[range]:
    """Return the union of ranges as the smallest number of ranges, in order.

    >>> _merge_ranges([range(8), range(4, 12), range(20, 24)])
    [range(0, 12), range(20, 24)]
    """
    merged: list[range] = []
    for positions in sorted(ranges, key=lambda positions: positions.start):
        if merged and positions.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, positions.stop))
        else:
            merged.append(positions)
    return merged


class _AllGatherKV(Function):
    """Keys and values (or latents) of ranges of positions, as a function of kv; their gradients are summed at once."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, gathered: _GatheredKV, ranges: list[range]) -> tuple[Tensor, ...]:
        ctx.gathered, ctx.ranges, ctx.kv_like = gathered, ranges, kv.new_empty(()).expand(kv.shape)
        full_kv = gathered.get()
        return tuple(x[gathered.exchange.slice_for(positions)] for positions in ranges for x in full_kv)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.gathered.free()  # here, because the graph may live longer
        n = len(ctx.kv_like)
        parts = [(positions, grads[i * n : (i + 1) * n]) for i, positions in enumerate(ctx.ranges)]
        return ctx.gathered.exchange.reduce_scatter_grads(ctx.kv_like, parts), None, None


class _SequenceToHeads(Function):
    """The all-to-all from this rank's tokens of all heads to all tokens, in order, of its heads (dim 2).

    With `inverse`, the opposite, which is also the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Axis, sharding: SequenceSharding, inverse: bool) -> Tensor:
        ctx.grad_args = cp, sharding, not inverse
        size = sharding.seq_chunk_size
        order = [chunk for chunks in sharding.seq_chunks_by_rank for chunk in chunks]
        if inverse:
            chunks = x.unflatten(0, (-1, size)).unbind(0)
            sent = torch.stack([chunks[c] for c in order])
        else:
            sent = x.unflatten(2, (cp.size, -1)).permute(2, 0, 1, 3, 4).contiguous()
        splits = [sent.numel() // cp.size] * cp.size
        received = start_all_to_all(sent.view(-1), splits, splits, cp).wait()
        if inverse:  # [cp, S, B, n, K]
            return received.view(cp.size, -1, *x.shape[1:]).permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()
        received = received.view(len(order), size, x.shape[1], -1, x.shape[3])
        return torch.cat([received[order.index(chunk)] for chunk in range(len(order))])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _SequenceToHeads.forward(ctx, dy, *ctx.grad_args), None, None, None


def sequence_to_heads(x_SBRc: Tensor, cp: Axis, sharding: SequenceSharding) -> Tensor:
    """Return all tokens, in order, of this rank's channels, [T, B, c]. Collective over cp.

    `x_SBRc` has the channels for each rank [S, B, cp, c] of this rank's tokens.
    """
    return _SequenceToHeads.apply(x_SBRc, cp, sharding, False).squeeze(2)  # type: ignore[attr-defined]


def heads_to_sequence(x_TBhV: Tensor, cp: Axis, sharding: SequenceSharding) -> Tensor:
    """Return this rank's tokens of all heads, [S, B, H, V], from all tokens of its heads. Collective over cp."""
    return _SequenceToHeads.apply(x_TBhV, cp, sharding, True)  # type: ignore[return-value]


class _SavedOutput:
    """The hooks for the tensors that attention of this rank's heads saves for backward.

    Of its output o only the position of the view is saved; everything else goes to the outer hooks.
    """

    def __init__(self) -> None:
        self.outer_pack, self.outer_unpack = current_hooks()
        self.saved: list[list[Any]] = []
        self.outputs: list[Tensor] = []  # o in backward, once for each read
        self.num_reads = 0

    def pack(self, x: Tensor) -> list[Any]:
        self.saved.append([x])
        return self.saved[-1]

    def unpack(self, entry: list[Any]) -> Tensor:
        return self.outer_unpack(*entry) if len(entry) == 1 else self.outputs.pop().as_strided(*entry)

    def finish(self, outputs: Tensor) -> None:
        """Replace saved views of the output by their positions, and pass other tensors to the outer hooks."""
        for entry in self.saved:
            x = entry[0]
            is_output = shares_storage(x, outputs) and x.untyped_storage().nbytes() == outputs.nbytes
            entry[:] = (x.shape, x.stride(), x.storage_offset()) if is_output else [self.outer_pack(x)]
            self.num_reads += is_output
        self.saved = []


class _HeadsToSequence(_SequenceToHeads):
    """The all-to-all of o from this rank's heads to its tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Axis, sharding: SequenceSharding, result: _SavedOutput) -> Tensor:  # type: ignore[override]
        o_SBHK = _SequenceToHeads.forward(ctx, x, cp, sharding, True)
        ctx.save_for_backward(o_SBHK)
        ctx.saved_output = result
        ctx.strides = x.stride()
        ctx.inverse_args = ctx.grad_args
        return o_SBHK

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        # `forward` sets ctx.grad_args again, so the arguments of the first call were saved
        o_TBHK, do_TBHK = (_SequenceToHeads.forward(ctx, x, *ctx.inverse_args) for x in (*ctx.saved_tensors, dy))
        if num_reads := ctx.saved_output.num_reads:
            o = o_TBHK.new_empty_strided(o_TBHK.shape, ctx.strides).copy_(o_TBHK)
            ctx.saved_output.outputs = [o] * num_reads
        return do_TBHK, None, None, None


@dataclass(frozen=True)
class ContextParallelAttention:
    """Attention over full samples that are sharded over cp.

    attention_fn  attention on one rank
    recomputed    the caller recomputes this in backward, so that nothing needs to be gathered for it
    """

    attention_fn: AttentionFn
    cp: Axis
    sharding: SequenceSharding
    recomputed: bool

    def kv_all_gather_attention(
        self, q_SBHK: Tensor, k_SBGK: Tensor, v_SBGK: Tensor, *, window: int | None, documents: Documents | None,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Return attention of this rank's queries over the keys of all ranks. Collective over cp."""
        window = None if window is not None and window >= self.cp.size * q_SBHK.shape[0] else window
        kv = torch.stack((k_SBGK, v_SBGK))
        ranges = self.sharding.contiguous_ranges(self.cp.rank)
        key_ranges = [self.sharding.visible_keys(queries, window) for queries in ranges]
        gathered = _GatheredKV(KVExchange(self.cp, self.sharding, window), kv.detach(), self.recomputed)
        parts: Any = _AllGatherKV.apply(kv, gathered, key_ranges)
        outputs: list[Tensor] = []
        with nullcontext() if self.recomputed else nested_hooks(gathered.pack, gathered.unpack):
            qs = q_SBHK.split([len(queries) for queries in ranges])
            for queries, keys, q, k, v in zip(ranges, key_ranges, qs, parts[::2], parts[1::2], strict=True):
                local_documents = documents and documents._replace(
                    document_start_BS=documents.document_start_BS[:, queries.start : queries.stop]
                )
                starts = dict(q_start=queries.start, k_start=keys.start)
                output = self.attention_fn(q, k, v, window=window, documents=local_documents, **starts, **kwargs)
                outputs.append(output)
        return gathered.concat_outputs(outputs)

    def latent_all_gather_attention(
        self, q_SBHK: Tensor, c_SBC: Tensor, *, expand: Callable[[Tensor], Tensor], v_dim: int,
        q_pe_SBHR: Tensor | None, window: int | None, documents: Documents | None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Return attention of this rank's queries over the keys of all ranks. Collective over cp.

        Args:
            q_SBHK: this rank's queries.
            c_SBC: the latents of this rank's tokens, and the rotated keys that all heads share.
            expand: the function from latents to keys and values, [T, B, L] to [T, B, H, K + V].
            v_dim: the width V of the values.
            q_pe_SBHR: the channels of the queries that meet the shared keys; None: there are none.
            window: the number of keys that a query sees, or None.
            documents: the documents of the full samples, or None.
            **kwargs: other arguments of attention.
        """
        window = None if window is not None and window >= self.cp.size * q_SBHK.shape[0] else window
        K, R = q_SBHK.shape[-1], 0 if q_pe_SBHR is None else q_pe_SBHR.shape[-1]
        L = c_SBC.shape[-1] - R
        ranges = self.sharding.contiguous_ranges(self.cp.rank)
        key_ranges = [self.sharding.visible_keys(queries, window) for queries in ranges]
        merged = _merge_ranges(key_ranges)
        exchange = KVExchange(self.cp, self.sharding, window)
        gathered = _GatheredLatents(exchange, c_SBC.detach(), self.recomputed, expand, L, merged)
        parts: Any = _AllGatherKV.apply(c_SBC[None], gathered, merged)
        outputs: list[Tensor] = []
        with nullcontext() if self.recomputed else nested_hooks(gathered.pack, gathered.unpack):
            expanded = [gathered.expand_range(i, c_TBC) for i, c_TBC in enumerate(parts)]
            start = 0
            for queries, keys in zip(ranges, key_ranges, strict=True):
                i = next(i for i, positions in enumerate(merged) if keys.start in positions)
                seen = slice(keys.start - merged[i].start, keys.stop - merged[i].start)
                k, v = expanded[i][seen].split([K, v_dim], -1)
                rows = slice(start, start + len(queries))
                start = rows.stop
                local_documents = documents and documents._replace(
                    document_start_BS=documents.document_start_BS[:, queries.start : queries.stop]
                )
                pe: dict[str, Any] = {}
                if q_pe_SBHR is not None:
                    pe = dict(q_pe_SBHR=q_pe_SBHR[rows], k_pe_TBR=parts[i][seen][..., L:])
                starts = dict(q_start=queries.start, k_start=keys.start)
                outputs.append(
                    self.attention_fn(
                        q_SBHK[rows], k, v, window=window, documents=local_documents, **pe, **starts, **kwargs
                    )
                )
        return gathered.concat_outputs(outputs)

    def latent_all_to_all_attention(
        self, q_SBHK: Tensor, c_SBC: Tensor, *, expand: Callable[[Tensor], Tensor], v_dim: int,
        q_pe_SBHR: Tensor | None, drop: AttentionDropout | None, sink_H: Tensor | None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Return attention with all tokens and H / cp heads on each rank; cp must divide H. Collective over cp.

        The latents are gathered as in `latent_all_gather_attention`, and only queries and o change hands by heads.
        `expand` returns the keys and values of this rank's H / cp heads.
        """
        cp, local_heads = self.cp, q_SBHK.shape[2] // self.cp.size
        K, R = q_SBHK.shape[-1], 0 if q_pe_SBHR is None else q_pe_SBHR.shape[-1]
        L = c_SBC.shape[-1] - R
        all_keys = [range(cp.size * c_SBC.shape[0])]
        exchange = KVExchange(cp, self.sharding, None)
        gathered = _GatheredLatents(exchange, c_SBC.detach(), self.recomputed, expand, L, all_keys)
        x_SBHK = q_SBHK if q_pe_SBHR is None else torch.cat([q_SBHK, q_pe_SBHR], -1)
        x_TBnK: Any = _SequenceToHeads.apply(x_SBHK, cp, self.sharding, False)
        q, q_pe = x_TBnK.split([K, R], -1)
        local_dropout = drop and drop._replace(head_offset=drop.head_offset + cp.shard_start(local_heads))
        kwargs["sink_H"] = None if sink_H is None else sink_H.narrow(0, cp.shard_start(local_heads), local_heads)
        result = _SavedOutput()

        def pack(x: Tensor) -> Any:
            position = gathered.position_of(x)
            return result.pack(x) if position is None else position

        def unpack(entry: Any) -> Tensor:
            return result.unpack(entry) if isinstance(entry, list) else gathered.at_position(entry)

        (c_TBC,) = _AllGatherKV.apply(c_SBC[None], gathered, all_keys)  # type: ignore[misc]
        with nullcontext() if self.recomputed else nested_hooks(pack, unpack):
            k, v = gathered.expand_range(0, c_TBC).split([K, v_dim], -1)
            pe = {} if q_pe_SBHR is None else dict(q_pe_SBHR=q_pe, k_pe_TBR=c_TBC[..., L:])
            o_TBHV = self.attention_fn(q, k, v, drop=local_dropout, **pe, **kwargs)
        result.finish(o_TBHV)
        gathered.drop()
        if self.recomputed:
            return _SequenceToHeads.apply(o_TBHV, cp, self.sharding, True)  # type: ignore[return-value]
        return _HeadsToSequence.apply(o_TBHV, cp, self.sharding, result)  # type: ignore[return-value]

    def all_to_all_attention(
        self,
        q_SBHK: Tensor,
        k_SBGK: Tensor,
        v_SBGK: Tensor,
        *,
        drop: AttentionDropout | None,
        sink_H: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        """Return attention with all tokens and H / cp heads on each rank; cp must divide H. Collective over cp."""
        H, G, cp = q_SBHK.shape[2], k_SBGK.shape[2], self.cp
        local_heads = H // cp.size
        heads_per_kv_copy = gcd(local_heads, H // G)  # heads that share a group on every rank
        groups = torch.arange(0, H, heads_per_kv_copy, device=q_SBHK.device) // (H // G)
        k, v = (x if len(groups) == G else x.index_select(2, groups) for x in (k_SBGK, v_SBGK))
        by_rank = [x.unflatten(2, (cp.size, -1)) for x in (q_SBHK, k, v)]
        x_TBnK: Any = _SequenceToHeads.apply(torch.cat(by_rank, 3).flatten(2, 3), cp, self.sharding, False)
        local_dropout = drop and drop._replace(head_offset=drop.head_offset + cp.shard_start(local_heads))
        kwargs["sink_H"] = None if sink_H is None else sink_H.narrow(0, cp.shard_start(local_heads), local_heads)
        result, qkv = _SavedOutput(), x_TBnK.split([x.shape[3] for x in by_rank], 2)
        with nullcontext() if self.recomputed else nested_hooks(result.pack, result.unpack):
            o_TBHK = self.attention_fn(*qkv, drop=local_dropout, **kwargs)
        result.finish(o_TBHK)
        if self.recomputed:
            return _SequenceToHeads.apply(o_TBHK, cp, self.sharding, True)  # type: ignore[return-value]
        return _HeadsToSequence.apply(o_TBHK, cp, self.sharding, result)  # type: ignore[return-value]
