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
from megalite.kernels.blocked_attention import Drop
from megalite.kernels.dispatch import stat_dtype
from megalite.nn.activation_offload import hooks_around
from megalite.nn.places import Places
from megalite.parallel.comm import start_all_gather, start_all_to_all, start_reduce_scatter
from megalite.parallel.mesh import Axis

Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Route:
    """The way of keys and values, both in kv [2, S, B, G, K]. Without a window all ranks get all blocks, in one
    all-gather; in a window each gets those that its queries see, in one all-to-all."""

    cp: Axis
    places: Places
    window: int | None

    @cached_property
    def needed(self) -> list[tuple[int, ...]]:
        """The blocks that each rank has in the end, in order."""
        if self.window is None:
            return [tuple(range(len(self.places.first)))] * self.cp.size
        return [self.places.needed(rank, self.window) for rank in range(self.cp.size)]

    def _between(self, giver: int, taker: int) -> list[int]:
        return [b for b in self.places.blocks[giver] if b in self.needed[taker]] if giver != taker else []

    @cached_property
    def given(self) -> list[list[int]]:
        """In a window, this rank's blocks that each rank gets from it."""
        return [self._between(self.cp.rank, taker) for taker in range(self.cp.size)]

    @cached_property
    def got(self) -> list[list[int]]:
        """In a window, the blocks that this rank gets from each rank."""
        return [self._between(giver, self.cp.rank) for giver in range(self.cp.size)]

    def _views(self, own: Tensor, others: Tensor) -> dict[int, Tensor]:
        """The part [2, size, B, G, K] of each block. others: kv of every rank, or in a window the parts that came
        from other ranks."""
        if self.window is not None:
            return self._cut(own, self.cp.rank) | dict(zip(sum(self.got, []), others, strict=True))
        return {b: part for rank, kv in enumerate(others) for b, part in self._cut(kv, rank).items()}

    def _cut(self, kv: Tensor, rank: int) -> dict[int, Tensor]:
        parts = kv.unflatten(1, (-1, self.places.size)).unbind(1)
        return dict(zip(self.places.blocks[rank], parts, strict=True))

    def _exchange(self, parts: Tensor, given: list[list[int]], got: list[list[int]]) -> Tensor:
        """[blocks, ...], those of `given` in order, to those of `got`."""
        given_sizes, got_sizes = ([len(some) * parts.shape[1:].numel() for some in side] for side in (given, got))
        flat = start_all_to_all(parts.reshape(-1), given_sizes, got_sizes, self.cp).wait()
        return flat.view(-1, *parts.shape[1:])

    def gather(self, kv: Tensor) -> Tensor:
        """[2, T', B, G, K]: the needed blocks in order."""
        if self.window is None:
            others = start_all_gather(kv, self.cp).wait().unflatten(0, (self.cp.size, 2))
        else:
            own, nothing = self._cut(kv, self.cp.rank), kv.new_empty(0, 2, self.places.size, *kv.shape[2:])
            parts = [own[b][None] for some in self.given for b in some]
            others = self._exchange(torch.cat([nothing, *parts]), self.given, self.got)
        found = self._views(kv, others)
        return torch.cat([found[b] for b in self.needed[self.cp.rank]], 1)

    def slice_of(self, seen: range) -> slice:
        """Where these positions are in what `gather` returns."""
        block, size = seen.start // self.places.size, self.places.size
        begin = self.needed[self.cp.rank].index(block) * size + seen.start - block * size
        return slice(begin, begin + len(seen))

    def scatter(self, kv: Tensor, grads: Sequence[tuple[range, Tensor, Tensor]]) -> Tensor:
        """The gradient of kv, of which only the shape is read. grads: positions, and the gradients of their keys and of
        their values; they are summed, here and over the ranks, in at least fp32."""
        dtype, size = stat_dtype(kv), self.places.size
        own = kv.new_zeros(kv.shape, dtype=dtype)
        shape = (self.cp.size, *kv.shape) if self.window is None else (sum(map(len, self.got)), 2, size, *kv.shape[2:])
        others = kv.new_zeros(shape, dtype=dtype)
        sums = self._views(own, others)
        for seen, *dkv in grads:
            for block in self.places.blocks_of(seen):
                here = range(max(seen.start, block * size), min(seen.stop, (block + 1) * size))
                to, of = (slice(here.start - at, here.stop - at) for at in (block * size, seen.start))
                for n, x in enumerate(dkv):
                    sums[block][n, to].add_(x[of])
        if self.window is None:
            return start_reduce_scatter(others.flatten(0, 1), self.cp).wait().to(kv.dtype)
        back = self._exchange(others, self.got, self.given)
        for block, part in zip(sum(self.given, []), back, strict=True):
            sums[block].add_(part)
        return own.to(kv.dtype)


def _same_storage(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata


class _Shelf:
    """What attention saves for backward: of gathered keys and values, which backward gathers again, their place alone,
    and of the results of runs, which are joined, parts of the whole. All else is for the hooks around."""

    def __init__(self, route: Route, kv: Tensor, again: bool):
        self.gathered: Tensor | None
        self.pack, self.unpack = hooks_around()
        self.route, self.kv, self.gathered = route, None if again else self.pack(kv), route.gather(kv)
        self.saved: list[list[Any]] = []

    def take(self) -> Tensor:
        if self.gathered is None:
            self.gathered = self.route.gather(self.unpack(self.kv))
        return self.gathered

    def keep(self, x: Tensor) -> Any:
        if _same_storage(x, self.take()):
            return x.shape, x.stride(), x.storage_offset()
        self.saved.append([x])
        return self.saved[-1]

    def restore(self, kept: Any) -> Tensor:
        return self.unpack(kept[0]) if isinstance(kept, list) else self.take().as_strided(*kept)

    def join(self, outputs: list[Tensor]) -> Tensor:
        """The results of all runs in one tensor."""
        self.gathered = None
        whole = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        for one, part in zip(outputs, whole.detach().split([len(one) for one in outputs]), strict=True):
            for kept in self.saved:
                if _same_storage(kept[0], one) and kept[0].shape == part.shape:
                    kept[0] = part
        for kept in self.saved:
            kept[0] = self.pack(kept[0])
        self.saved = []
        return whole


class _Gather(Function):
    """kv -> keys and values of each range of positions; the gradients of all of them are summed at once."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, shelf: _Shelf, seen: list[range]) -> tuple[Tensor, ...]:
        ctx.shelf, ctx.seen, ctx.like = shelf, seen, kv.new_empty(()).expand(kv.shape)
        whole = shelf.take()
        return tuple(x[shelf.route.slice_of(some)] for some in seen for x in whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.shelf.gathered = ctx.shelf.kv = None  # the graph lives on
        parts = zip(ctx.seen, grads[::2], grads[1::2], strict=True)
        return ctx.shelf.route.scatter(ctx.like, list(parts)), None, None


class _Swap(Function):
    """The rank's tokens of all heads -> all tokens, in order, of its share of the heads (dim 2); or, `back`, the
    inverse, which is also the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Axis, places: Places, back: bool) -> Tensor:
        ctx.given = cp, places, not back
        size = places.size
        order = [b for blocks in places.blocks for b in blocks]
        if back:
            by_block = x.unflatten(0, (-1, size)).unbind(0)
            sent = torch.stack([by_block[b] for b in order])
        else:
            sent = x.unflatten(2, (cp.size, -1)).permute(2, 0, 1, 3, 4).contiguous()
        each = [sent.numel() // cp.size] * cp.size
        got = start_all_to_all(sent.view(-1), each, each, cp).wait()
        if back:  # [cp, S, B, n, K]
            return got.view(cp.size, -1, *x.shape[1:]).permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()
        got = got.view(len(order), size, x.shape[1], -1, x.shape[3])
        return torch.cat([got[order.index(b)] for b in range(len(order))])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _Swap.forward(ctx, dy, *ctx.given), None, None, None


class _Result:
    """What attention of some heads saves for backward: of its result o the place alone; all else is for the hooks
    around."""

    def __init__(self) -> None:
        self.pack, self.unpack = hooks_around()
        self.saved: list[list[Any]] = []
        self.o: list[Tensor] = []  # one for each time that it is to be read
        self.reads = 0

    def keep(self, x: Tensor) -> list[Any]:
        self.saved.append([x])
        return self.saved[-1]

    def restore(self, kept: list[Any]) -> Tensor:
        return self.unpack(*kept) if len(kept) == 1 else self.o.pop().as_strided(*kept)

    def close(self, o: Tensor) -> None:
        for kept in self.saved:
            x = kept[0]
            alone = _same_storage(x, o) and x.untyped_storage().nbytes() == o.nbytes
            kept[:] = (x.shape, x.stride(), x.storage_offset()) if alone else [self.pack(x)]
            self.reads += alone
        self.saved = []


class _Home(_Swap):
    """o of the rank's heads -> of its tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Axis, places: Places, result: _Result) -> Tensor:  # type: ignore[override]
        o_SBHK = _Swap.forward(ctx, x, cp, places, True)
        ctx.save_for_backward(o_SBHK)
        ctx.result, ctx.strides, ctx.way = result, x.stride(), ctx.given
        return o_SBHK

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        o_TBHK, do_TBHK = (_Swap.forward(ctx, x, *ctx.way) for x in (*ctx.saved_tensors, dy))
        if ctx.result.reads:
            ctx.result.o = [o_TBHK.new_empty_strided(o_TBHK.shape, ctx.strides).copy_(o_TBHK)] * ctx.result.reads
        return do_TBHK, None, None, None


@dataclass(frozen=True)
class Across:
    """`attend` of whole samples, of which this rank has a part. again: the caller runs this again in backward, so that
    nothing needs to be gathered for it."""

    attend: Attend
    cp: Axis
    places: Places
    again: bool

    def gathered(
        self, q_SBHK: Tensor, k_SBGK: Tensor, v_SBGK: Tensor, *, window: int | None, documents: Documents | None,
        **how: Any,
    ) -> Tensor:  # fmt: skip
        """This rank's queries, with the keys of all."""
        window = None if window is not None and window >= self.cp.size * q_SBHK.shape[0] else window
        kv, runs = torch.stack((k_SBGK, v_SBGK)), self.places.runs(self.cp.rank)
        seen = [self.places.seen(run, window) for run in runs]
        shelf = _Shelf(Route(self.cp, self.places, window), kv.detach(), self.again)
        parts: Any = _Gather.apply(kv, shelf, seen)
        outputs: list[Tensor] = []
        with nullcontext() if self.again else saved_tensors_hooks(shelf.keep, shelf.restore):
            queries = q_SBHK.split([len(run) for run in runs])
            for run, keys, q, k, v in zip(runs, seen, queries, parts[::2], parts[1::2], strict=True):
                mine = documents and documents._replace(first_BS=documents.first_BS[:, run.start : run.stop])
                at = dict(q_first=run.start, k_first=keys.start)
                outputs.append(self.attend(q, k, v, window=window, documents=mine, **at, **how))
        return shelf.join(outputs)

    def by_heads(
        self, q_SBHK: Tensor, k_SBGK: Tensor, v_SBGK: Tensor, *, drop: Drop | None, sink_H: Tensor | None, **how: Any
    ) -> Tensor:
        """All tokens, and some heads on each rank; cp divides H."""
        H, G, cp = q_SBHK.shape[2], k_SBGK.shape[2], self.cp
        mine = H // cp.size
        together = gcd(mine, H // G)  # heads that share a group on every rank
        groups = torch.arange(0, H, together, device=q_SBHK.device) // (H // G)
        k, v = (x if len(groups) == G else x.index_select(2, groups) for x in (k_SBGK, v_SBGK))
        by_rank = [x.unflatten(2, (cp.size, -1)) for x in (q_SBHK, k, v)]
        x_TBnK: Any = _Swap.apply(torch.cat(by_rank, 3).flatten(2, 3), cp, self.places, False)
        here = drop and drop._replace(head_offset=drop.head_offset + cp.start_of(mine))
        how["sink_H"] = None if sink_H is None else sink_H.narrow(0, cp.start_of(mine), mine)
        result, qkv = _Result(), x_TBnK.split([x.shape[3] for x in by_rank], 2)
        with nullcontext() if self.again else saved_tensors_hooks(result.keep, result.restore):
            o_TBHK = self.attend(*qkv, drop=here, **how)
        result.close(o_TBHK)
        if self.again:
            return _Swap.apply(o_TBHK, cp, self.places, True)  # type: ignore[return-value]
        return _Home.apply(o_TBHK, cp, self.places, result)  # type: ignore[return-value]
