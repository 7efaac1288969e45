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
from megalite.models.gpt import Block, LMHead, RecomputeConfig
from megalite.nn.activation_offload import ActivationOffload
from megalite.nn.embedding import Embedding, vocab_spec
from megalite.nn.micro_batch import Batch
from megalite.nn.parameter import ParamFactory, call_unit
from megalite.nn.recompute import recompute
from megalite.nn.sequence_sharding import SequenceSharding, shard_sequence
from megalite.nn.wgrad_store import WeightGradStore
from megalite.pipeline.schedule import ActionCosts, ActionMemory
from megalite.planning.layer_cost import CostRecorder, LayerCost
from megalite.planning.meta_mode import META

LayerKind = ModelConfig  # a model of one layer; two layers are of one kind if theirs are equal


@functools.lru_cache(maxsize=64)
def layer_kinds(model: ModelConfig) -> tuple[LayerKind, ...]:
    """The kind of every layer; layers of one kind share one object."""

    @functools.cache
    def kind(window: int | None, rotary: bool, exchange: str, experts: bool) -> LayerKind:
        alike = dict(num_layers=1, window_attn_skip_freq=None, no_rope_freq=None, moe_layer_freq="1")
        positions, number = model.position_embedding_type if rotary else "none", model.num_experts if experts else None
        size = None if window is None else (window - 1, 0)
        kind = replace(model, **alike, window_size=size, position_embedding_type=positions, num_experts=number)
        return replace(kind, cp_comm_type=(exchange,))

    return tuple(map(kind, model.layer_windows, model.rope_layers, model.layer_cp_comm, model.moe_layers))


@dataclass(frozen=True)
class LayerSetting:
    """The facts of a rank that a bill depends on. `recompute_modules`: the parts of a block that are computed again in
    backward; `split_backward`: weight gradients wait. `cp_sharding`: how ranks share the tokens; None: they do not.
    `ep`, `etp`: of experts, which all tokens choose alike (nn/token_dispatch.py: balanced_routing)."""

    tp: int
    micro_batch: int
    dtype: torch.dtype
    split_backward: bool = False
    recompute_modules: tuple[str, ...] = ()
    cp_sharding: SequenceSharding | None = None
    ep: int = 1
    etp: int = 1

    @property
    def cp(self) -> int:
        return len(self.cp_sharding.seq_chunks_by_rank) if self.cp_sharding else 1

    def param_factory(self, recorder: CostRecorder, window: int | None = None) -> ParamFactory:
        """For the rank of cp that receives most in a layer with `window`."""
        busiest = self.cp_sharding.heaviest_receiver(window) if self.cp_sharding else 0
        return ParamFactory(
            recorder.mesh(self.tp, self.cp, self.ep, self.etp, cp_rank=busiest), self.dtype, 0, meta=True
        )

    def hidden_states(self, model: ModelConfig) -> Tensor:
        """x_sBD."""
        shape = model.seq_length // self.cp // self.tp, self.micro_batch, model.hidden_size
        return torch.empty(shape, dtype=self.dtype, device=META)

    def token_ids(self, model: ModelConfig) -> Tensor:
        """tokens_SB."""
        return torch.empty(model.seq_length // self.cp, self.micro_batch, dtype=torch.int64, device=META)


@functools.lru_cache(maxsize=64)
def single_document_sharding(model: ModelConfig, cp: int) -> SequenceSharding | None:
    """How samples of one document are cut over cp; it depends on the windows of all layers."""
    return shard_sequence(model.seq_length, cp, model.layer_windows) if cp > 1 else None


@functools.lru_cache(maxsize=4096)
def layers_cost(
    kinds: tuple[LayerKind, ...],
    setting: LayerSetting,
    full_recompute: bool = False,
    offload_min_numel: int | None = None,
    first_in_stage: bool = False,
) -> LayerCost:
    """The bill of consecutive layers. `full_recompute`: only the first one's input stays until backward, which computes
    all of them again. `offload_min_numel`: of one layer that offloads storages of so many elements or more; where it is
    `first_in_stage` its input stays."""
    recorder, (first, *_) = CostRecorder(), kinds
    make = setting.param_factory(recorder, first.layer_windows[0])
    blocks = [recorder.exclude_params(Block(make, kind, 0, setting.recompute_modules)) for kind in kinds]
    later = WeightGradStore() if setting.split_backward else None
    token_ids, rope = setting.token_ids(first), None
    if any(first.rope_layers):
        shape = len(token_ids), int(first.head_size * first.rotary_percent) // 2
        rope = torch.empty(shape, device=META), torch.empty(shape, device=META)
    where = Batch(
        token_ids,
        None,
        None,
        token_ids[0],
        0,
        wgrad_store=later,
        rope=rope,
        in_full_recompute=full_recompute,
        loss_grad=1.0,
    )
    if setting.cp_sharding is not None:
        where = replace(where, cp_sharding=setting.cp_sharding, cp_positions_S=token_ids[:, 0])

    offload = ActivationOffload(int(offload_min_numel is not None), offload_min_numel or 0, META)

    def run(x: Tensor) -> Tensor:
        x = x if offload_min_numel is None else x.clone()  # the graph keeps its leaves
        use = offload(call_unit, 1, [*(where.rope or ()), *[x] * first_in_stage])
        for block in blocks:
            x = use(block, x, where)
        return x

    with recorder:
        forward = (lambda x: recompute(run, x)) if full_recompute else run
        bill = recorder.measure(forward, [setting.hidden_states(first)], torch.empty_like, later)
    if offload_min_numel is None:
        return bill
    plain = layers_cost(kinds, setting)
    return replace(
        plain,
        offloaded_bytes=plain.saved_bytes - bill.saved_bytes + setting.hidden_states(first).nbytes,
        host_bytes=offload.bytes_offloaded,
    )


@functools.lru_cache(maxsize=256)
def head_cost(model: ModelConfig, setting: LayerSetting, vocab_size: int, padded: int, z_loss: float) -> LayerCost:
    """The bill of final norm, output projection and loss, whose gradients are computed in forward."""
    recorder = CostRecorder()
    spec = vocab_spec("head", padded, vocab_size, model.hidden_size, 0.0, False)
    head = recorder.exclude_params(LMHead(setting.param_factory(recorder), model, spec, None, z_loss))
    token_ids = setting.token_ids(model)
    batch = Batch(token_ids, token_ids, None, token_ids[0], 0, loss_grad=1.0)
    with recorder:
        return recorder.measure(lambda x: head(x, batch), [setting.hidden_states(model)], torch.ones_like)


@functools.lru_cache(maxsize=256)
def embedding_cost(model: ModelConfig, setting: LayerSetting, vocab_size: int, padded: int) -> LayerCost:
    recorder = CostRecorder()
    spec = vocab_spec("embedding.word", padded, vocab_size, model.hidden_size, 0.0, False)
    module = recorder.exclude_params(Embedding(setting.param_factory(recorder), spec, model))
    token_ids = setting.token_ids(model)
    with recorder:
        return recorder.measure(lambda: module(Batch(token_ids, None, None, token_ids[0], 0)), [], torch.empty_like)


@functools.lru_cache(maxsize=256)
def flops_per_token(model: ModelConfig, padded_vocab_size: int) -> float:
    """FLOPs of forward and backward per token, with a multiply-add counted as 2: three times the layers' forward on one
    rank without recompute, and the head's forward, which has its backward in it. Scores that the causal mask or a
    window hides do not count; scores across documents do."""
    alone = LayerSetting(1, 1, torch.bfloat16)
    layers = sum(3 * layers_cost((kind,), alone).flops[0] for kind in layer_kinds(model))
    head = sum(head_cost(model, alone, padded_vocab_size, padded_vocab_size, 0.0).flops)
    return (layers + head) / model.seq_length


T = TypeVar("T")


class PrefixSums:
    """Sums over any range of layers by prefix sums, in O(1), also for arrays of ranges. Sums of integers are exact.

    rows                 [layers, figures]
    recompute_rows       rows that count instead for the `num_recomputed` first layers of each stage
    """

    def __init__(self, rows: Sequence[Any], recompute_rows: Sequence[Any] | None = None, num_recomputed: int = 0):
        self.per_layer, self.num_recomputed = np.array(rows), num_recomputed
        self._plain, self._again = _prefix(rows), None if recompute_rows is None else _prefix(recompute_rows)

    def between(self, starts: Any, stops: Any) -> np.ndarray:
        """Sums [..., figures] over the layers from start to stop, which are numbers or arrays."""
        if self._again is None:
            return self._plain[stops] - self._plain[starts]
        middles = np.minimum(np.asarray(starts) + self.num_recomputed, stops)
        return self._again[middles] - self._again[starts] + self._plain[stops] - self._plain[middles]


def _prefix(rows: Sequence[Any]) -> np.ndarray:
    table = np.array(rows)
    return np.concatenate([np.zeros_like(table[:1]), table.cumsum(0)])


@dataclass(frozen=True)
class StageCosts:
    """`vocab_size`: without padding. `offload`: of how many first layers of a stage storages lie on the host, and the
    fewest elements of these. A split is the number of layers of each stage."""

    model: ModelConfig
    recompute: RecomputeConfig
    setting: LayerSetting
    vocab_size: int
    padded_vocab: int
    z_loss: float
    offload: tuple[int, int] = (0, 0)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        return layer_kinds(self.model)

    @cached_property
    def without_offload(self) -> "StageCosts":
        """As if nothing were offloaded, which must not decide in which order gradients are added up."""
        return replace(self, offload=(0, 0)) if self.offload[0] else self

    @cached_property
    def flops(self) -> tuple[int, ...]:
        """FLOPs of each layer, forward and backward together."""
        return tuple(self._layers.per_layer[:, :3].sum(1).tolist())

    def layer_costs(self, layers: range) -> list[tuple[LayerCost, range]]:
        """The bills of a stage with these layers, in order, each with its own; those recomputed together have one."""
        layer_costs = []
        for group, full_recompute in self.recompute.layer_groups(len(layers)):
            some = layers[group]
            parts = [some] if full_recompute else [range(n, n + 1) for n in some]
            for part in parts:
                at, (moved, offload_min_numel) = part.start - layers.start, self.offload
                offload = (offload_min_numel, at == 0) if at < moved else ()
                layer_costs.append(
                    (layers_cost(self.kinds[part.start : part.stop], self.setting, full_recompute, *offload), part)
                )
        return layer_costs

    @cached_property
    def head(self) -> LayerCost:
        return head_cost(self.model, self._plain, self.vocab_size, self.padded_vocab, self.z_loss)

    @cached_property
    def embedding(self) -> LayerCost:
        return embedding_cost(self.model, self._plain, self.vocab_size, self.padded_vocab)

    @property
    def _plain(self) -> LayerSetting:
        """The setting of embedding and head, where no weight gradient waits and nothing is recomputed."""
        return replace(self.setting, split_backward=False, recompute_modules=())

    def prefix_sums(self, of: Callable[..., Any]) -> PrefixSums:
        """Sums over the layers of any stage of the figures of(kind, full_recompute)."""
        full, recompute = self.recompute.granularity == "full", self.recompute
        if not full or recompute.method == "uniform":
            return PrefixSums(self.per_layer(lambda kind: of(kind, full)))
        plain = self.per_layer(lambda kind: of(kind, False))
        recomputed = self.per_layer(lambda kind: of(kind, True))
        return PrefixSums(plain, recomputed, recompute.num_layers)

    def per_layer(self, of: Callable[[LayerKind], T]) -> list[T]:
        """of(kind) of every layer, computed once for each kind."""
        results = {id(kind): of(kind) for kind in {id(kind): kind for kind in self.kinds}.values()}
        return [results[id(kind)] for kind in self.kinds]

    @cached_property
    def _layers(self) -> PrefixSums:
        """Sums of FLOPs of F, B and W, of saved bytes that stay on the device, and of waiting bytes."""

        def of(kind: LayerKind, full_recompute: bool = False, offload_min_numel: int | None = None) -> list[int]:
            bill = layers_cost((kind,), self.setting, full_recompute, offload_min_numel)
            return [round(n) for n in (*bill.flops, bill.saved_bytes - bill.offloaded_bytes, bill.wgrad_bytes)]

        layers, least = self.offload  # not with a layer that is recomputed as a whole
        return (
            PrefixSums(self.per_layer(of), self.per_layer(lambda kind: of(kind, False, least)), layers)
            if layers
            else self.prefix_sums(of)
        )

    @cached_property
    def _stage_input_bytes(self) -> np.ndarray:
        """Bytes that each layer would offload of its input, which stays where it begins a stage."""
        bill = lambda kind, begins: layers_cost((kind,), self.setting, False, self.offload[1], begins)  # noqa: E731
        return np.array(
            [*self.per_layer(lambda kind: bill(kind, False).offloaded_bytes - bill(kind, True).offloaded_bytes), 0]
        )

    def _stage_sums(self, split: Sequence[int]) -> list[list[int]]:
        stops = np.cumsum(split)
        return self._layers.between(stops - np.array(split), stops).tolist()

    def flops_of_stages(self, split: Sequence[int]) -> tuple[ActionCosts, ...]:
        """FLOPs of every stage for a micro-batch, as integers, so that equal times are equal to the bit."""
        *others, last = (row[:3] for row in self._stage_sums(split))
        f, b, w = (layers + round(head) for layers, head in zip(last, self.head.flops, strict=True))
        return (*((f, b, w) for f, b, w in others), (f, b, w))

    def memory_of_stages(self, split: Sequence[int]) -> tuple[ActionMemory, ...]:
        """Bytes that a forward keeps on every stage, from F to B, and, if backward is split, from B to W."""
        saved, waiting = self.saved_bytes(np.array(split)), (row[4] for row in self._stage_sums(split))
        return tuple(zip(saved.tolist(), waiting, strict=True))

    def saved_bytes(self, splits: np.ndarray) -> np.ndarray:
        """Bytes [..., stages] that are kept from F to B, for splits [..., stages] of the layers."""
        stops, recompute = splits.cumsum(-1), self.recompute
        saved = self._layers.between(stops - splits, stops)[..., 3]
        if recompute.granularity == "full" and recompute.method == "uniform":  # each group keeps one input
            groups = -(-splits // recompute.num_layers)
            saved = saved // np.maximum(splits, 1) * groups
        if self.offload[0]:
            saved = saved + self._stage_input_bytes[stops - splits] * (splits > 0)
        saved[..., -1] += self.head.saved_bytes
        return saved

    @cached_property
    def min_peaks(self) -> tuple[int, int]:
        """The fewest bytes that a layer's backward adds to what forwards kept; and with all gradients begun to land."""
        ways = {False, self.recompute.granularity == "full"}
        layer_costs = [
            layers_cost((kind,), self.setting, full_recompute) for kind in set(self.kinds) for full_recompute in ways
        ]
        return min(bill.peak_bytes["B"] for bill in layer_costs), min(
            [*bill.peaks["B"].values()][-1] for bill in layer_costs
        )


stage_costs = functools.lru_cache(maxsize=4096)(StageCosts)  # shared by all arrangements alike: a search has thousands
