"""Recurrences over samples that are sharded over context-parallel ranks (sequence_sharding.py).

A rank has ranges of a sample's positions, in any order. A range maps the state before it to the state after it by an
affine map, S' = A S + U (kernels/delta_rule.py), which a rank computes before it knows S:

    positions   | range 0 | range 1 | range 2 | range 3 |      cp 2 in zigzag order: rank 0 has ranges 0 and 3
    forward     [A | U] of own ranges  --all-gather-->  S_1 = U_0, S_2 = A_1 S_1 + U_1, ..  -> o of own ranges
    backward    [A | dS] of own ranges, from their outputs alone  --all-gather-->  dS of later ranges, composed in
                reverse  -> gradients of own ranges

Nothing else is exchanged but the last W - 1 inputs of each chunk for the convolution. Bytes that a rank receives per
layer and micro-batch, with m ranges per rank, in forward and again in backward: (cp - 1) m B H K (K + V) 4. They are
freed with the layer. Saved are A and the initial state of the rank's own ranges, m B H K (K + V) 4 bytes. Their matmuls
are about as many as those of the recurrence itself, once in forward and once in backward. Without a correction
(Mamba-2), A is diagonal, and has one column in place of K.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megalite.kernels.delta_rule import (
    Recurrence,
    RecurrenceInputs,
    apply_map,
    map_columns,
    recurrence_backward,
    recurrence_forward,
    recurrence_map,
    recurrence_state_grad,
)
from megalite.nn.sequence_sharding import SequenceSharding
from megalite.parallel.comm import start_all_gather, start_reduce_scatter
from megalite.parallel.mesh import Axis


class _EarlierTokens(Function):
    """The W - 1 tokens before each of the rank's ranges, [ranges, W - 1, B, C]; zeros before the first position."""

    @staticmethod
    def forward(ctx: Any, x_SBC: Tensor, width: int, cp: Axis, sharding: SequenceSharding) -> Tensor:
        ctx.args = width, cp, sharding, x_SBC.shape
        chunks = x_SBC.unflatten(0, (-1, sharding.seq_chunk_size))
        tails = start_all_gather(chunks[:, -width:], cp).wait()
        sources = _tail_sources(width, cp, sharding)
        earlier = x_SBC.new_zeros(len(sources), width, *x_SBC.shape[1:])
        for i, tokens in enumerate(sources):
            for t, (chunk, offset) in tokens.items():
                earlier[i, t] = tails[chunk, offset]
        return earlier

    @staticmethod
    def backward(ctx: Any, dearlier: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        width, cp, sharding, shape = ctx.args
        size = sharding.seq_chunk_size
        chunks_per_rank = shape[0] // size
        dtails = dearlier.new_zeros(cp.size * chunks_per_rank, min(width, size), *shape[1:])
        for i, tokens in enumerate(_tail_sources(width, cp, sharding)):
            for t, (chunk, offset) in tokens.items():
                dtails[chunk, offset] += dearlier[i, t]
        dx_SBC = dearlier.new_zeros(shape)
        dx_SBC.unflatten(0, (-1, size))[:, -width:] = start_reduce_scatter(dtails, cp).wait()
        return dx_SBC, None, None, None


def _tail_sources(width: int, cp: Axis, sharding: SequenceSharding) -> list[dict[int, tuple[int, int]]]:
    """Return where the `width` tokens before each of the rank's ranges are among the gathered tails of chunks.

    For each range: number of the token, counted from 0 for the earliest -> (chunk in the order of the ranks, offset in
    its tail). Tokens before the first position are missing.
    """
    size = sharding.seq_chunk_size
    gathered = [chunk for chunks in sharding.seq_chunks_by_rank for chunk in chunks]
    tail = min(width, size)
    sources = []
    for positions in sharding.contiguous_ranges(cp.rank):
        tokens = {}
        for t in range(width):
            position = positions.start - width + t
            if position >= 0:
                tokens[t] = gathered.index(position // size), position % size - (size - tail)
        sources.append(tokens)
    return sources


def earlier_tokens(x_SBC: Tensor, width: int, cp: Axis, sharding: SequenceSharding) -> tuple[Tensor, ...]:
    """Return the `width` tokens before each of the rank's ranges, [width, B, C]. Collective over cp.

    Tokens before the first position are zeros.
    """
    if not width:
        return tuple(x_SBC[:0] for _ in sharding.contiguous_ranges(cp.rank))
    return _EarlierTokens.apply(x_SBC, width, cp, sharding).unbind(0)  # type: ignore[attr-defined]


def documents_of_range(document_start_BT: Tensor | None, positions: range, width: int) -> Tensor | None:
    """Return the documents of `width` tokens before a range and of its own, [B, width + S]; -1 before position 0."""
    if document_start_BT is None:
        return None
    return F.pad(document_start_BT, (width, 0), value=-1)[:, positions.start : positions.stop + width]


def _range_recurrence(recurrence: Recurrence, document_start_BT: Tensor | None, positions: range) -> Recurrence:
    """Return the recurrence of a range of positions, which the state before it may belong to."""
    if document_start_BT is None:
        return recurrence
    start, stop = positions.start, positions.stop
    previous_B = document_start_BT[:, start - 1] if start else None
    return Recurrence(
        recurrence.scale, recurrence.normalize_qk, document_start_BT[:, start:stop], previous_B, recurrence.chunk_size
    )


class _Ranges:
    """The ranges of positions of all ranks, and the composition of their maps.

    own   the ranges of this rank
    all   every range in order: (its rank, its number on the rank)
    """

    def __init__(self, cp: Axis, sharding: SequenceSharding):
        self.cp = cp
        by_rank = [sharding.contiguous_ranges(rank) for rank in range(cp.size)]
        self.own = by_rank[cp.rank]
        self.max_per_rank = max(map(len, by_rank))
        owners = {r.start: (rank, i) for rank, ranges in enumerate(by_rank) for i, r in enumerate(ranges)}
        self.all = [owners[start] for start in sorted(owners)]

    def tokens(self) -> list[slice]:
        """Return the rank's tokens of each of its ranges."""
        spans, start = [], 0
        for positions in self.own:
            spans.append(slice(start, start + len(positions)))
            start += len(positions)
        return spans

    def all_gather(self, maps: list[Tensor]) -> Tensor:
        """Return the maps of all ranks, [cp, ranges, ...]; a rank with fewer ranges has zeros at the end."""
        padded = maps + [torch.zeros_like(maps[0])] * (self.max_per_rank - len(maps))
        return start_all_gather(torch.stack(padded), self.cp).wait().unflatten(0, (self.cp.size, -1))

    def compose(self, maps: list[Tensor], columns: int, inverse: bool) -> list[Tensor]:
        """Return the state before each of the rank's ranges, or with `inverse` the gradient of the state after it.

        `maps` are [A | U] with S' = A S + U, or with `inverse` [A | U] with dS = A^T dS' + U, where A has `columns`
        columns. One column is the diagonal of A. Collective over cp.
        """
        gathered = self.all_gather(maps)
        state = torch.zeros_like(maps[0][..., columns:])
        states: dict[int, Tensor] = {}
        for rank, i in reversed(self.all) if inverse else self.all:
            if rank == self.cp.rank:
                states[i] = state
                if len(states) == len(self.own):
                    break
            A, U = gathered[rank, i].split([columns, state.shape[-1]], -1)
            state = apply_map(A.mT if inverse and columns > 1 else A, U, state)
        return [states[i] for i in range(len(self.own))]


class _ContextParallelDeltaRule(Function):
    @staticmethod
    def forward(ctx: Any, recurrences: list[Recurrence], ranges: _Ranges, *inputs: Tensor | None) -> Tensor:
        parts = [RecurrenceInputs(*inputs).tokens(span) for span in ranges.tokens()]  # type: ignore[arg-type]
        maps = [recurrence_map(*part) for part in zip(parts, recurrences, strict=True)]
        columns = map_columns(parts[0])
        initial_states = ranges.compose(maps, columns, inverse=False)
        own_products = torch.stack([x[..., :columns] for x in maps])
        del maps
        outputs, group_states = [], []
        for part, recurrence, state in zip(parts, recurrences, initial_states, strict=True):
            o, _, states = recurrence_forward(part, recurrence, state)
            outputs.append(o)
            group_states.append(states)
        ctx.recurrences, ctx.ranges = recurrences, ranges
        ctx.save_for_backward(own_products, *group_states, *inputs)
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx: Any, do_SBHV: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ranges, n = ctx.ranges, len(ctx.ranges.own)
        own_products, *saved = ctx.saved_tensors
        group_states, inputs = saved[:n], RecurrenceInputs(*saved[n:])
        spans = ranges.tokens()
        parts = [(inputs.tokens(span), recurrence) for span, recurrence in zip(spans, ctx.recurrences, strict=True)]
        maps = [
            torch.cat([A, recurrence_state_grad(*part, do_SBHV[span])], -1)
            for A, part, span in zip(own_products, parts, spans, strict=True)
        ]
        dstates = ranges.compose(maps, own_products.shape[-1], inverse=True)
        del maps
        grads = [
            recurrence_backward(*part, states, do_SBHV[span], dstate)[0]
            for part, states, span, dstate in zip(parts, group_states, spans, dstates, strict=True)
        ]
        return None, None, *(None if x[0] is None else torch.cat(x) for x in zip(*grads, strict=True))  # type: ignore[arg-type]


def context_parallel_delta_rule(
    inputs: RecurrenceInputs,
    recurrence: Recurrence,
    document_start_BT: Tensor | None,
    cp: Axis,
    sharding: SequenceSharding,
) -> Tensor:
    """Return o_SBHV of this rank's tokens. Collective over cp.

    Args:
        inputs: The inputs of this rank's tokens.
        recurrence: The recurrence; its documents are not read.
        document_start_BT: The first position of the document of every token of the full samples; None: a sample is one.
        cp: The axis.
        sharding: The sharding of the samples.
    """
    ranges = _Ranges(cp, sharding)
    recurrences = [_range_recurrence(recurrence, document_start_BT, positions) for positions in ranges.own]
    return _ContextParallelDeltaRule.apply(recurrences, ranges, *inputs)  # type: ignore[return-value]
