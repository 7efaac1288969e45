"""Recurrences over samples that are sharded over context-parallel ranks (sequence_sharding.py).

A rank has ranges of a sample's positions, in any order. A range maps the state before it to the state after it by an
affine map, S' = A S + U (kernels/delta_rule.py), which a rank computes before it knows S:

    positions   | range 0 | range 1 | range 2 | range 3 |      cp 2 in zigzag order: rank 0 has ranges 0 and 3
    forward     [A | U] of own ranges  --map_composition.py-->  S_1 = U_0, S_2 = A_1 S_1 + U_1, ..  -> o of own ranges
    backward    [A^T | dS] of own ranges, from their outputs alone  --the same in reverse-->  dS of later ranges
                -> gradients of own ranges

Nothing else is exchanged but the last W - 1 inputs of each chunk for the convolution. Maps are freed with the layer.
Saved are A and the initial state of the rank's own ranges, m B H K (K + V) 4 bytes with m ranges per rank. The matmuls
of the maps are about as many as those of the recurrence itself, once in forward and once in backward. Without a
correction (Mamba-2), A is diagonal, and has one column in place of K. Where the rank has few tokens, it is fewer bytes
to exchange these for heads (recurrent_heads.py).
"""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megalite.kernels.delta_rule import (
    Recurrence,
    RecurrenceInputs,
    map_columns,
    recurrence_backward,
    recurrence_forward,
    recurrence_map,
    recurrence_state_grad,
)
from megalite.nn.map_composition import states_before
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


def range_recurrence(recurrence: Recurrence, document_start_BT: Tensor | None, positions: range) -> Recurrence:
    """Return the recurrence of a range of positions, which the state before it may belong to."""
    if document_start_BT is None:
        return recurrence
    start, stop = positions.start, positions.stop
    previous_B = document_start_BT[:, start - 1] if start else None
    return Recurrence(
        recurrence.scale, recurrence.normalize_qk, document_start_BT[:, start:stop], previous_B, recurrence.chunk_size
    )


def _token_spans(ranges: list[range]) -> list[slice]:
    """Return the rank's tokens of each of its ranges."""
    stops = [*itertools.accumulate(map(len, ranges))]
    return [slice(stop - len(positions), stop) for positions, stop in zip(ranges, stops, strict=True)]


class _ContextParallelDeltaRule(Function):
    @staticmethod
    def forward(
        ctx: Any, recurrences: list[Recurrence], cp: Axis, sharding: SequenceSharding, *inputs: Tensor | None
    ) -> Tensor:
        spans = _token_spans(sharding.contiguous_ranges(cp.rank))
        parts = [RecurrenceInputs(*inputs).tokens(span) for span in spans]  # type: ignore[arg-type]
        maps = [recurrence_map(*part) for part in zip(parts, recurrences, strict=True)]
        columns = map_columns(parts[0])
        initial_states = states_before(maps, columns, sharding.range_ranks(), cp)
        own_products = torch.stack([x[..., :columns] for x in maps])
        del maps
        outputs, group_states = [], []
        for part, recurrence, state in zip(parts, recurrences, initial_states, strict=True):
            o, _, states = recurrence_forward(part, recurrence, state)
            outputs.append(o)
            group_states.append(states)
        ctx.recurrences, ctx.cp, ctx.sharding, ctx.spans = recurrences, cp, sharding, spans
        ctx.save_for_backward(own_products, *group_states, *inputs)
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx: Any, do_SBHV: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        spans, n = ctx.spans, len(ctx.spans)
        own_products, *saved = ctx.saved_tensors
        group_states, inputs = saved[:n], RecurrenceInputs(*saved[n:])
        parts = [(inputs.tokens(span), recurrence) for span, recurrence in zip(spans, ctx.recurrences, strict=True)]
        columns = own_products.shape[-1]
        # dS = A^T dS' + what comes from the outputs of the range, from the last range to the first
        transposed = own_products if columns == 1 else own_products.mT
        maps = [
            torch.cat([A, recurrence_state_grad(*part, do_SBHV[span])], -1)
            for A, part, span in zip(transposed, parts, spans, strict=True)
        ]
        dstates = states_before(maps[::-1], columns, ctx.sharding.range_ranks()[::-1], ctx.cp)[::-1]
        del maps
        grads = [
            recurrence_backward(*part, states, do_SBHV[span], dstate)[0]
            for part, states, span, dstate in zip(parts, group_states, spans, dstates, strict=True)
        ]
        return None, None, None, *(None if x[0] is None else torch.cat(x) for x in zip(*grads, strict=True))  # type: ignore[arg-type]


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
    ranges = sharding.contiguous_ranges(cp.rank)
    recurrences = [range_recurrence(recurrence, document_start_BT, positions) for positions in ranges]
    return _ContextParallelDeltaRule.apply(recurrences, cp, sharding, *inputs)  # type: ignore[return-value]
