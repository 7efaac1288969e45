"""The costs of a model's stages on a rank, summed over their layers by kind."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from megalite.config.options import ModelConfig
from megalite.models.gpt import Recompute
from megalite.pipeline.schedule import Cost, Held
from megalite.plan.bill import Bill
from megalite.plan.kinds import Kind, Setting, embedding_bill, head_bill, kinds_of, layers_bill

T = TypeVar("T")


class Sums:
    """Sums over any range of layers by prefix sums, in O(1), also for arrays of ranges. Sums of integers are exact.

    rows           [layers, figures]
    again, first   rows that count instead for the `first` layers of each stage
    """

    def __init__(self, rows: Sequence[Any], again: Sequence[Any] | None = None, first: int = 0):
        self.each, self.first = np.array(rows), first
        self._plain, self._again = _prefix(rows), None if again is None else _prefix(again)

    def of(self, starts: Any, stops: Any) -> np.ndarray:
        """Sums [..., figures] over the layers from start to stop, which are numbers or arrays."""
        if self._again is None:
            return self._plain[stops] - self._plain[starts]
        middles = np.minimum(np.asarray(starts) + self.first, stops)
        return self._again[middles] - self._again[starts] + self._plain[stops] - self._plain[middles]


def _prefix(rows: Sequence[Any]) -> np.ndarray:
    table = np.array(rows)
    return np.concatenate([np.zeros_like(table[:1]), table.cumsum(0)])


@dataclass(frozen=True)
class StageCosts:
    """`vocab_size`: without padding. `offload`: of how many first layers of a stage storages lie on the host, and the
    fewest elements of these. A split is the number of layers of each stage."""

    model: ModelConfig
    recompute: Recompute
    setting: Setting
    vocab_size: int
    padded_vocab: int
    z_loss: float
    offload: tuple[int, int] = (0, 0)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        return kinds_of(self.model)

    @cached_property
    def staying(self) -> "StageCosts":
        """As if nothing were offloaded, which must not decide in which order gradients are added up."""
        return replace(self, offload=(0, 0)) if self.offload[0] else self

    @cached_property
    def flops(self) -> tuple[int, ...]:
        """FLOPs of each layer, forward and backward together."""
        return tuple(self._layers.each[:, :3].sum(1).tolist())

    def bills(self, layers: range) -> list[tuple[Bill, range]]:
        """The bills of a stage with these layers, in order, each with its own; layers that are recomputed together have
        one bill."""
        bills = []
        for group, again in self.recompute.groups(len(layers)):
            some = layers[group]
            parts = [some] if again else [range(n, n + 1) for n in some]
            for part in parts:
                at, (moved, least) = part.start - layers.start, self.offload
                offload = (least, at == 0) if at < moved else ()
                bills.append((layers_bill(self.kinds[part.start : part.stop], self.setting, again, *offload), part))
        return bills

    @cached_property
    def head(self) -> Bill:
        return head_bill(self.model, self._plain, self.vocab_size, self.padded_vocab, self.z_loss)

    @cached_property
    def embedding(self) -> Bill:
        return embedding_bill(self.model, self._plain, self.vocab_size, self.padded_vocab)

    @property
    def _plain(self) -> Setting:
        """The setting of embedding and head, where no weight gradient waits and nothing is recomputed."""
        return replace(self.setting, split=False, again=())

    def sums(self, of: Callable[..., Any]) -> Sums:
        """Sums over the layers of any stage of the figures of(kind, whole); `whole`: the layer is recomputed."""
        full, recompute = self.recompute.granularity == "full", self.recompute
        if not full or recompute.method == "uniform":
            return Sums(self.each(lambda kind: of(kind, full)))
        plain, again = (self.each(functools.partial(of, whole=whole)) for whole in (False, True))
        return Sums(plain, again, recompute.num_layers)

    def each(self, of: Callable[[Kind], T]) -> list[T]:
        """of(kind) of every layer, computed once for each kind."""
        results = {id(kind): of(kind) for kind in {id(kind): kind for kind in self.kinds}.values()}
        return [results[id(kind)] for kind in self.kinds]

    @cached_property
    def _layers(self) -> Sums:
        """Sums of FLOPs of F, B and W, of saved bytes that stay on the device, and of waiting bytes."""

        def of(kind: Kind, whole: bool = False, least: int | None = None) -> list[int]:
            bill = layers_bill((kind,), self.setting, whole, least)
            return [round(n) for n in (*bill.flops, bill.saved - bill.away, bill.waiting)]

        layers, least = self.offload  # not with a layer that is recomputed as a whole
        return Sums(self.each(of), self.each(lambda kind: of(kind, False, least)), layers) if layers else self.sums(of)

    @cached_property
    def _inputs(self) -> np.ndarray:
        """Bytes that each layer would offload of its input, which stays where it begins a stage."""
        bill = lambda kind, begins: layers_bill((kind,), self.setting, False, self.offload[1], begins)  # noqa: E731
        return np.array([*self.each(lambda kind: bill(kind, False).away - bill(kind, True).away), 0])

    def _stage_sums(self, split: Sequence[int]) -> list[list[int]]:
        stops = np.cumsum(split)
        return self._layers.of(stops - np.array(split), stops).tolist()

    def costs_of(self, split: Sequence[int]) -> tuple[Cost, ...]:
        """FLOPs of every stage for a micro-batch, as integers, so that equal times are equal to the bit."""
        *others, last = (row[:3] for row in self._stage_sums(split))
        f, b, w = (layers + round(head) for layers, head in zip(last, self.head.flops, strict=True))
        return (*((f, b, w) for f, b, w in others), (f, b, w))

    def held_of(self, split: Sequence[int]) -> tuple[Held, ...]:
        """Bytes that a forward keeps on every stage, from F to B, and, if backward is split, from B to W."""
        saved, waiting = self.saved_of(np.array(split)), (row[4] for row in self._stage_sums(split))
        return tuple(zip(saved.tolist(), waiting, strict=True))

    def saved_of(self, splits: np.ndarray) -> np.ndarray:
        """Bytes [..., stages] that are kept from F to B, for splits [..., stages] of the layers."""
        stops, recompute = splits.cumsum(-1), self.recompute
        saved = self._layers.of(stops - splits, stops)[..., 3]
        if recompute.granularity == "full" and recompute.method == "uniform":  # each group keeps one input
            groups = -(-splits // recompute.num_layers)
            saved = saved // np.maximum(splits, 1) * groups
        if self.offload[0]:
            saved = saved + self._inputs[stops - splits] * (splits > 0)
        saved[..., -1] += self.head.saved
        return saved

    @cached_property
    def least_moments(self) -> tuple[int, int]:
        """The fewest bytes that a layer's backward takes in addition to what forwards have kept, and that it takes when
        all gradients have begun to land."""
        ways = {False, self.recompute.granularity == "full"}
        bills = [layers_bill((kind,), self.setting, again) for kind in set(self.kinds) for again in ways]
        return min(bill.moment["B"] for bill in bills), min([*bill.parts["B"].values()][-1] for bill in bills)


stage_costs = functools.lru_cache(maxsize=4096)(StageCosts)  # shared by all arrangements alike: a search has thousands
