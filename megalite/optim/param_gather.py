"""After an update every rank gets the shards of the others, while the next forward is under way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from megalite.optim.flat_storage import FlatStorage
from megalite.parallel.comm import start_all_gather_into
from megalite.parallel.mesh import Axis

GATHERS_AHEAD = 2


class ParamGather:
    """Modules of `chunks`, whose parameters are views of `weights`, wait for them. overlap False: all at once."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], weights: FlatStorage, chunks: Sequence[nn.Module], overlap: bool
    ):
        self.weights, self.overlap = weights, overlap
        self._shards: dict[int, Axis] = {}  # buckets of which there is something to gather, over which axis
        self._to_gather: list[int] = []  # in the order in which every rank starts them
        self._gathering: dict[int, Any] = {}
        buckets = weights.layout.buckets
        for b, bucket in enumerate(buckets):
            if (rule := weights.rules[bucket.kind]).is_shared_out:
                self._shards[b] = rule.shard
        parts = {id(parameters[slot.entry]): b for b in self._shards for slot in buckets[b].slots}
        for module in (m for chunk in chunks for m in chunk.modules()):
            if needs := sorted({parts[id(p)] for p in module.parameters(recurse=False) if id(p) in parts}):
                module.register_forward_pre_hook(partial(self._finish_all, needs))

    def _finish_all(self, needs: list[int], *_: Any) -> None:
        for b in needs:
            self._finish(b)

    def gather(self) -> None:
        """In order of use. GATHERS_AHEAD are under way at a time, and one that is waited for starts the next: with a
        single hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) all at once would hold up every kernel behind them."""
        buckets = self.weights.layout.buckets
        self._to_gather = sorted(self._shards, key=lambda b: (buckets[b].chunk, -b))
        for _ in range(GATHERS_AHEAD):
            self._start_next()
        if not self.overlap:
            self.wait()

    def _start_next(self) -> None:
        if self._to_gather:
            b = self._to_gather.pop(0)
            bucket = self.weights.layout.buckets[b]
            whole, owned = self.weights.whole(bucket), self.weights.owned(bucket)
            self._gathering[b] = start_all_gather_into(whole, owned, self._shards[b])

    def _finish(self, b: int) -> None:
        while b in self._to_gather:
            self._start_next()
        pending = self._gathering.pop(b, None)
        if pending is not None:
            pending.wait()
            self._start_next()

    def wait(self) -> None:
        """All weights are whole."""
        while self._gathering:
            self._finish(next(iter(self._gathering)))
