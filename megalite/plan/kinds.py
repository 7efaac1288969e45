"""The kinds of layers of a model; the bill of each, of one block, or of several that are recomputed together; and the
costs of the model's stages on a rank, summed over their layers by kind."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megalite.config.options import ModelConfig
from megalite.models.gpt import Block, Head, Recompute
from megalite.nn.activation_offload import Offload
from megalite.nn.embedding import Embedding, vocabulary_spec
from megalite.nn.later import Later
from megalite.nn.micro_batch import Batch
from megalite.nn.parameter import Maker, run_unit
from megalite.nn.places import Places, place
from megalite.nn.recompute import recompute
from megalite.pipeline.schedule import Cost, Held
from megalite.plan.bill import Bill, Recorder
from megalite.plan.meta import META

Kind = ModelConfig  # a model of one layer; two layers are of one kind if theirs are equal


@functools.lru_cache(maxsize=64)
def kinds_of(model: ModelConfig) -> tuple[Kind, ...]:
    """The kind of every layer; layers of one kind share one object."""

    @functools.cache
    def kind(window: int | None, rotary: bool, exchange: str, experts: bool) -> Kind:
        alike = dict(num_layers=1, window_attn_skip_freq=None, no_rope_freq=None, moe_layer_freq="1")
        positions, number = model.position_embedding_type if rotary else "none", model.num_experts if experts else None
        size = None if window is None else (window - 1, 0)
        kind = replace(model, **alike, window_size=size, position_embedding_type=positions, num_experts=number)
        return replace(kind, cp_comm_type=(exchange,))

    return tuple(map(kind, model.windows, model.rotary, model.exchanges, model.experts))


@dataclass(frozen=True)
class Setting:
    """The facts of a rank that a bill depends on. `again`: the parts of a block that are computed again in backward;
    `split`: weight gradients wait. `places`: how ranks share the tokens; None: they do not. `ep`, `etp`: of experts,
    which all tokens choose alike (nn/token_exchange.py: even_routing)."""

    tp: int
    micro_batch: int
    dtype: torch.dtype
    split: bool = False
    again: tuple[str, ...] = ()
    places: Places | None = None
    ep: int = 1
    etp: int = 1

    @property
    def cp(self) -> int:
        return len(self.places.blocks) if self.places else 1

    def maker(self, recorder: Recorder, window: int | None = None) -> Maker:
        """For the rank of cp that receives most in a layer with `window`."""
        busiest = self.places.busiest(window) if self.places else 0
        return Maker(recorder.mesh(self.tp, self.cp, self.ep, self.etp, cp_rank=busiest), self.dtype, 0, meta=True)

    def hidden(self, model: ModelConfig) -> Tensor:
        """x_sBD."""
        shape = model.seq_length // self.cp // self.tp, self.micro_batch, model.hidden_size
        return torch.empty(shape, dtype=self.dtype, device=META)

    def tokens(self, model: ModelConfig) -> Tensor:
        """tokens_SB."""
        return torch.empty(model.seq_length // self.cp, self.micro_batch, dtype=torch.int64, device=META)


@functools.lru_cache(maxsize=64)
def cut(model: ModelConfig, cp: int) -> Places | None:
    """How samples of one document are cut over cp; it depends on the windows of all layers."""
    return place(model.seq_length, cp, model.windows) if cp > 1 else None


@functools.lru_cache(maxsize=4096)
def layers_bill(
    kinds: tuple[Kind, ...], setting: Setting, whole: bool = False, least: int | None = None, begins: bool = False
) -> Bill:
    """The bill of consecutive layers. `whole`: only the first one's input stays until backward, which computes all of
    them again. `least`: of one layer that offloads storages of so many elements or more; where it `begins` a stage its
    input stays."""
    recorder, (first, *_) = Recorder(), kinds
    make = setting.maker(recorder, first.windows[0])
    blocks = [recorder.own(Block(make, kind, 0, setting.again)) for kind in kinds]
    later = Later() if setting.split else None
    tokens, rope = setting.tokens(first), None
    if any(first.rotary):
        shape = len(tokens), int(first.head_size * first.rotary_percent) // 2
        rope = torch.empty(shape, device=META), torch.empty(shape, device=META)
    where = Batch(tokens, None, None, tokens[0], 0, later=later, rope=rope, again=whole, loss_weight=1.0)
    if setting.places is not None:
        where = replace(where, places=setting.places, places_S=tokens[:, 0])

    offload = Offload(int(least is not None), least or 0, META)

    def run(x: Tensor) -> Tensor:
        x = x if least is None else x.clone()  # the graph keeps its leaves
        use = offload(run_unit, 1, [*(where.rope or ()), *[x] * begins])
        for block in blocks:
            x = use(block, x, where)
        return x

    with recorder:
        forward = (lambda x: recompute(run, x)) if whole else run
        bill = recorder.read(forward, [setting.hidden(first)], torch.empty_like, later)
    if least is None:
        return bill
    plain = layers_bill(kinds, setting)
    return replace(plain, away=plain.saved - bill.saved + setting.hidden(first).nbytes, sent=offload.sent)


@functools.lru_cache(maxsize=256)
def head_bill(model: ModelConfig, setting: Setting, vocab_size: int, padded: int, z_loss: float) -> Bill:
    """The bill of final norm, output projection and loss, whose gradients are computed in forward."""
    recorder = Recorder()
    spec = vocabulary_spec("head", padded, vocab_size, model.hidden_size, 0.0, False)
    head = recorder.own(Head(setting.maker(recorder), model, spec, None, z_loss))
    tokens = setting.tokens(model)
    batch = Batch(tokens, tokens, None, tokens[0], 0, loss_weight=1.0)
    with recorder:
        return recorder.read(lambda x: head(x, batch), [setting.hidden(model)], torch.ones_like)


@functools.lru_cache(maxsize=256)
def embedding_bill(model: ModelConfig, setting: Setting, vocab_size: int, padded: int) -> Bill:
    recorder = Recorder()
    spec = vocabulary_spec("embedding.word", padded, vocab_size, model.hidden_size, 0.0, False)
    module = recorder.own(Embedding(setting.maker(recorder), spec, model))
    tokens = setting.tokens(model)
    with recorder:
        return recorder.read(lambda: module(Batch(tokens, None, None, tokens[0], 0)), [], torch.empty_like)


@functools.lru_cache(maxsize=256)
def model_flops(model: ModelConfig, padded_vocab_size: int) -> float:
    """FLOPs of forward and backward per token, with a multiply-add counted as 2: three times the layers' forward on one
    rank without recompute, and the head's forward, which has its backward in it. Scores that the causal mask or a
    window hides do not count; scores across documents do."""
    alone = Setting(1, 1, torch.bfloat16)
    layers = sum(3 * layers_bill((kind,), alone).flops[0] for kind in kinds_of(model))
    head = sum(head_bill(model, alone, padded_vocab_size, padded_vocab_size, 0.0).flops)
    return (layers + head) / model.seq_length


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
        """The bills of a stage with these layers, in order, each with its own; those recomputed together have one."""
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
        """The fewest bytes that a layer's backward adds to what forwards kept; and with all gradients begun to land."""
        ways = {False, self.recompute.granularity == "full"}
        bills = [layers_bill((kind,), self.setting, again) for kind in set(self.kinds) for again in ways]
        return min(bill.moment["B"] for bill in bills), min([*bill.parts["B"].values()][-1] for bill in bills)


stage_costs = functools.lru_cache(maxsize=4096)(StageCosts)  # shared by all arrangements alike: a search has thousands
