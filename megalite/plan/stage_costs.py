"""What the stages of a model cost on a rank, summed over their layers by kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from megalite.config.options import ModelConfig
from megalite.models.gpt import Recompute
from megalite.pipeline.schedule import Cost, Held
from megalite.plan.bill import Bill
from megalite.plan.kinds import Kind, Setting, embedding_bill, head_bill, kinds_of, layers_bill
from megalite.plan.sums import Sums

T = TypeVar("T")


@dataclass(frozen=True)
class StageCosts:
    """`vocab_size`: the true one. A split says how many layers each stage has."""

    model: ModelConfig
    recompute: Recompute
    setting: Setting
    vocab_size: int
    padded_vocab: int
    z_loss: float

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        return kinds_of(self.model)

    @cached_property
    def flops(self) -> tuple[int, ...]:
        """Of each layer, forward and backward."""
        return tuple(self._layers.each[:, :3].sum(1).tolist())

    def bills(self, layers: range) -> list[Bill]:
        """Of a stage with these layers, in order; those that are recomputed as one have one."""
        kinds, n = self.kinds[layers.start : layers.stop], self.recompute.num_layers
        if self.recompute.granularity != "full":
            return [layers_bill((kind,), self.setting) for kind in kinds]
        if self.recompute.method == "uniform":
            return [layers_bill(kinds[i : i + n], self.setting, True) for i in range(0, len(kinds), n)]
        return [layers_bill((kind,), self.setting, i < n) for i, kind in enumerate(kinds)]

    @cached_property
    def head(self) -> Bill:
        return head_bill(self.model, self._plain, self.vocab_size, self.padded_vocab, self.z_loss)

    @cached_property
    def embedding(self) -> Bill:
        return embedding_bill(self.model, self._plain, self.vocab_size, self.padded_vocab)

    @property
    def _plain(self) -> Setting:
        """Of the ends of the model, which neither wait nor compute again."""
        return replace(self.setting, split=False, again=())

    def sums(self, of: Callable[..., Sequence[float]]) -> Sums:
        """Figures of(kind, whole) of a layer, `whole`: recomputed, over the layers of any stage."""
        full, recompute = self.recompute.granularity == "full", self.recompute
        if not full or recompute.method == "uniform":
            return Sums(self.each(lambda kind: of(kind, full)))
        plain, again = (self.each(functools.partial(of, whole=whole)) for whole in (False, True))
        return Sums(plain, again, recompute.num_layers)

    def each(self, of: Callable[[Kind], T]) -> list[T]:
        """Of every layer, asked once for each kind."""
        known = {id(kind): of(kind) for kind in {id(kind): kind for kind in self.kinds}.values()}
        return [known[id(kind)] for kind in self.kinds]

    @cached_property
    def _layers(self) -> Sums:
        """FLOPs of F, B and W; bytes that are saved and that wait."""

        def of(kind: Kind, whole: bool) -> list[int]:
            bill = layers_bill((kind,), self.setting, whole)
            return [round(n) for n in (*bill.flops, bill.saved, bill.waiting)]

        return self.sums(of)

    def _stage_sums(self, split: Sequence[int]) -> list[list[int]]:
        stops = np.cumsum(split)
        return self._layers.of(stops - np.array(split), stops).tolist()

    def costs_of(self, split: Sequence[int]) -> tuple[Cost, ...]:
        """Of every stage: FLOPs of a micro-batch, whole, so that times that are equal are so to the bit."""
        *others, last = (row[:3] for row in self._stage_sums(split))
        f, b, w = (round(more) + n for n, more in zip(last, self.head.flops, strict=True))
        return (*((f, b, w) for f, b, w in others), (f, b, w))

    def held_of(self, split: Sequence[int]) -> tuple[Held, ...]:
        """Bytes that a forward keeps of every stage, from F to B, and, if backward is split, from B to W."""
        saved, waiting = self.saved_of(np.array(split)), (row[4] for row in self._stage_sums(split))
        return tuple(zip(saved.tolist(), waiting, strict=True))

    def saved_of(self, splits: np.ndarray) -> np.ndarray:
        """[..., stages] bytes from F to B, of splits of the layers."""
        stops, recompute = splits.cumsum(-1), self.recompute
        saved = self._layers.of(stops - splits, stops)[..., 3]
        if recompute.granularity == "full" and recompute.method == "uniform":  # one input for each group
            groups = -(-splits // recompute.num_layers)
            saved = saved // np.maximum(splits, 1) * groups
        saved[..., -1] += self.head.saved
        return saved

    @cached_property
    def least_moment(self) -> int:
        """Bytes that any layer's backward takes at least, beside what forwards have kept."""
        full = self.recompute.granularity == "full"
        kinds = set(self.kinds)
        return min(layers_bill((kind,), self.setting, whole).moment["B"] for kind in kinds for whole in {False, full})


@functools.lru_cache(maxsize=4096)
def stage_costs(
    model: ModelConfig, recompute: Recompute, setting: Setting, vocab_size: int, padded_vocab: int, z_loss: float
) -> StageCosts:
    """The same of all arrangements that share these: a search has thousands."""
    return StageCosts(model, recompute, setting, vocab_size, padded_vocab, z_loss)
