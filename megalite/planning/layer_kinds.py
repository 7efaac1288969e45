"""The kinds of layers of a model, the cost of each kind, and the costs of stages as sums over their layers."""

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from megalite.config.layer_spec import LayerSpec
from megalite.config.options import ModelConfig
from megalite.config.rope_spec import RopeSpec
from megalite.models.gpt import Block, LMHead, RecomputeConfig, build_mtp_layer
from megalite.models.mtp import MTPEmbedding
from megalite.nn.activation_offload import ActivationOffload
from megalite.nn.embedding import Embedding, vocab_spec
from megalite.nn.map_composition import heaviest_receiver
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.norm import Norm
from megalite.nn.parameter import ParamFactory, call_unit
from megalite.nn.recompute import recompute
from megalite.nn.sequence_sharding import SequenceSharding, shard_sequence
from megalite.nn.wgrad_store import WeightGradStore
from megalite.pipeline.schedule import ActionCosts, ActionMemory
from megalite.planning.layer_cost import CostRecorder, LayerCost
from megalite.planning.meta_mode import META

T = TypeVar("T")
P = ParamSpec("P")
COMPILER = "torch._dynamo"


@dataclass(frozen=True)
class LayerKind:
    """The properties of a layer that decide its shapes and costs, besides the setting of its rank.

    Attributes:
        model: The configuration of the model, without the options of single layers and their number.
        spec: The layer's spec.
    """

    model: ModelConfig
    spec: LayerSpec


@functools.lru_cache(maxsize=64)
def layer_kinds(model: ModelConfig) -> tuple[LayerKind, ...]:
    """Return the kind of every layer; layers of the same kind share one object."""
    same_for_all = replace(
        model,
        num_layers=1,
        hybrid_layer_pattern=None,
        window_size=None,
        window_attn_skip_freq=None,
        no_rope_freq=None,
        rotary_local_base=None,
        mtp_num_layers=None,
        moe_layer_freq="1",
        cp_comm_type=("auto",),
        experimental_attention_variant=None,
        linear_attention_freq=None,
    )
    kinds = {spec: LayerKind(same_for_all, spec) for spec in model.layers}
    return tuple(kinds[spec] for spec in model.layers)


@dataclass(frozen=True)
class LayerSetting:
    """The properties besides its kind that decide the cost of a layer.

    Attributes:
        tp: The size of tensor parallelism.
        micro_batch: The micro-batch size.
        dtype: The dtype of weights and activations.
        split_backward: Weight gradients are deferred.
        recompute_modules: The parts of a block that are recomputed in backward.
        cp_sharding: The sharding of the sequence over cp; None without context parallelism.
        ep: The size of expert parallelism. Tokens are balanced over the experts (nn/token_dispatch.py:
            balanced_routing).
        etp: The size of tensor parallelism of the experts.
    """

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

    def param_factory(self, recorder: CostRecorder, spec: LayerSpec | None = None) -> ParamFactory:
        """Return the factory of the cp rank that receives the most in a layer with this spec."""
        cp_rank = 0
        if self.cp_sharding is not None and spec is not None:
            if spec.is_recurrent:
                cp_rank = heaviest_receiver(self.cp_sharding.range_ranks())
            else:
                cp_rank = self.cp_sharding.heaviest_receiver(spec.window)
        mesh = recorder.mesh(self.tp, self.cp, self.ep, self.etp, cp_rank=cp_rank)
        return ParamFactory(mesh, self.dtype, 0, meta=True)

    def hidden_states(self, model: ModelConfig) -> Tensor:
        """Return x_sBD."""
        local_length = model.seq_length // self.cp // self.tp
        return torch.empty(local_length, self.micro_batch, model.hidden_size, dtype=self.dtype, device=META)

    def token_ids(self, model: ModelConfig) -> Tensor:
        """Return tokens_SB."""
        return torch.empty(model.seq_length // self.cp, self.micro_batch, dtype=torch.int64, device=META)


@functools.lru_cache(maxsize=64)
def single_document_sharding(model: ModelConfig, cp: int) -> SequenceSharding | None:
    """Return the sharding over cp of samples with one document; it depends on the windows of all layers."""
    return shard_sequence(model.seq_length, cp, model.attention_windows) if cp > 1 else None


def _repeat_after_import(measure: Callable[P, LayerCost]) -> Callable[P, LayerCost]:
    """Let a function that measures a cost measure it again if torch has imported its compiler meanwhile.

    The first call of torch's checkpoint imports it, and some mixers call checkpoint whatever is recomputed. The import
    leaves the frames of its callers in a cycle, and the tensors in these count as saved until a garbage collection.
    """

    @functools.wraps(measure)
    def run(*args: P.args, **kwargs: P.kwargs) -> LayerCost:
        has_imported = COMPILER in sys.modules
        cost = measure(*args, **kwargs)
        return cost if has_imported or COMPILER not in sys.modules else measure(*args, **kwargs)

    return run


def layers_cost(
    kinds: tuple[LayerKind, ...],
    setting: LayerSetting,
    full_recompute: bool = False,
    offload_min_numel: int | None = None,
    first_in_stage: bool = False,
) -> LayerCost:
    """Return the cost of consecutive layers.

    Args:
        kinds: The kinds of the layers.
        setting: The setting of the rank.
        full_recompute: Only the input of the first layer is saved, and backward recomputes all of the layers.
        offload_min_numel: A single layer offloads the storages with at least this number of elements; None: no offload.
        first_in_stage: The layer that offloads is the first of its stage, so its input stays on the device.
    """
    if not any(kind.spec.has_experts for kind in kinds):
        setting = replace(setting, ep=1, etp=1)  # other layers have no parameters and no collectives over these axes
    return _layers_cost(kinds, setting, full_recompute, offload_min_numel, first_in_stage)


@functools.lru_cache(maxsize=4096)
@_repeat_after_import
def _layers_cost(
    kinds: tuple[LayerKind, ...],
    setting: LayerSetting,
    full_recompute: bool,
    offload_min_numel: int | None,
    first_in_stage: bool,
) -> LayerCost:
    recorder = CostRecorder()
    first = kinds[0]
    mixers = [kind.spec for kind in kinds if kind.spec.mixer is not None]
    make_param = setting.param_factory(recorder, mixers[0] if mixers else None)
    blocks = [
        recorder.exclude_params(Block(make_param, kind.model, 0, kind.spec, setting.recompute_modules))
        for kind in kinds
    ]
    wgrad_store = WeightGradStore() if setting.split_backward else None
    batch = _batch_of_layers(kinds[0].model, setting)
    ctx = ForwardContext(
        loss_grad=1.0,
        wgrad_store=wgrad_store,
        rope=_rope_of_layers(kinds, len(batch.tokens_SB)),
        in_full_recompute=full_recompute,
    )
    has_offload = offload_min_numel is not None
    offload = ActivationOffload(1 if has_offload else 0, offload_min_numel or 0, META)

    def run(x: Tensor) -> Tensor:
        if has_offload:
            x = x.clone()  # the graph keeps its leaves
        resident = [*itertools.chain(*ctx.rope.values())]
        if first_in_stage:
            resident.append(x)
        run_unit = offload(call_unit, 1, resident)
        for block in blocks:
            x = run_unit(block, x, batch, ctx)
        return x

    def forward(x: Tensor) -> Tensor:
        return recompute(run, x) if full_recompute else run(x)

    with recorder:
        cost = recorder.measure(forward, [setting.hidden_states(first.model)], torch.empty_like, wgrad_store)
    if not has_offload:
        return cost
    without_offload = layers_cost(kinds, setting)
    clone_bytes = setting.hidden_states(first.model).nbytes
    return replace(
        without_offload,
        offloaded_bytes=without_offload.saved_bytes - cost.saved_bytes + clone_bytes,
        host_bytes=offload.bytes_offloaded,
    )


def _batch_of_layers(model: ModelConfig, setting: LayerSetting) -> Batch:
    """Return the micro-batch that layers get from their stage."""
    token_ids = setting.token_ids(model)
    return Batch(
        tokens_SB=token_ids,
        labels_SB=None,
        mask_SB=None,
        sample_ids_B=token_ids[0],
        cp_sharding=setting.cp_sharding,
        cp_positions_S=None if setting.cp_sharding is None else token_ids[:, 0],
    )


def _rope_of_layers(kinds: Sequence[LayerKind], length: int) -> dict[RopeSpec, tuple[Tensor, Tensor]]:
    """Return the cos and sin that layers get from their stage for `length` tokens, in fp32."""
    ropes = dict.fromkeys(kind.spec.rope for kind in kinds)
    shapes = {rope: (length, rope.dim // 2) for rope in ropes if rope is not None}
    return {rope: (torch.empty(shape, device=META), torch.empty(shape, device=META)) for rope, shape in shapes.items()}


@functools.lru_cache(maxsize=1024)
@_repeat_after_import
def head_cost(
    model: ModelConfig, setting: LayerSetting, vocab_size: int, padded_vocab_size: int, z_loss: float
) -> LayerCost:
    """Return the cost of the final norm, the output projection and the loss, whose gradients are computed in forward.

    With multi-token prediction the head has a loss for each depth, too. Hidden states of depths count as saved by them.

    Args:
        model: The model.
        setting: The setting of the rank.
        vocab_size: The vocabulary without padding.
        padded_vocab_size: The vocabulary with padding.
        z_loss: The coefficient of the z-loss.
    """
    recorder = CostRecorder()
    make_param = setting.param_factory(recorder)
    spec = vocab_spec("head", padded_vocab_size, vocab_size, model.hidden_size, 0.0, False)
    final_norm = recorder.exclude_params(Norm(make_param, "final_norm", model.hidden_size, model))
    head = recorder.exclude_params(LMHead(make_param, model, spec, None, z_loss))
    token_ids = setting.token_ids(model)
    num_depths = model.num_mtp_depths
    mtp_labels_JSB = token_ids.expand(num_depths, *token_ids.shape)
    batch = Batch(
        token_ids, token_ids, None, token_ids[0], mtp_labels_JSB=mtp_labels_JSB, mtp_mask_JSB=mtp_labels_JSB.float()
    )
    ctx = ForwardContext(loss_grad=1.0)

    def forward(x: Tensor, *depths: Tensor) -> Tensor:
        h = final_norm(x)
        assert isinstance(h, Tensor)
        return head(h, batch, ctx, depths)

    with recorder:
        hidden_states = [setting.hidden_states(model) for _ in range(1 + num_depths)]
        depth_bytes = sum(h.nbytes for h in hidden_states[1:])
        cost = recorder.measure(forward, hidden_states, torch.ones_like)
    return replace(cost, saved_bytes=cost.saved_bytes - depth_bytes)


@functools.lru_cache(maxsize=1024)
@_repeat_after_import
def mtp_layer_cost(model: ModelConfig, setting: LayerSetting, full_recompute: bool = False) -> LayerCost:
    """Return the cost of a depth of multi-token prediction, without its embedding and its loss.

    Args:
        model: The model.
        setting: The setting of the rank.
        full_recompute: Only the inputs of the depth are saved, and backward recomputes it.
    """
    recorder = CostRecorder()
    mixer = next((spec for spec in model.mtp_layers if spec.mixer is not None), None)
    make_param = setting.param_factory(recorder, mixer)
    numbers = model.mtp_layer_numbers[0]
    layer = recorder.exclude_params(build_mtp_layer(make_param, model, numbers, setting.recompute_modules))
    wgrad_store = WeightGradStore() if setting.split_backward else None
    batch = _batch_of_layers(model, setting)
    kinds = [LayerKind(model, spec) for spec in model.mtp_layers]
    ctx = ForwardContext(
        loss_grad=1.0,
        wgrad_store=wgrad_store,
        rope=_rope_of_layers(kinds, len(batch.tokens_SB)),
        in_full_recompute=full_recompute,
    )

    def run(h: Tensor, embedding: Tensor) -> Tensor:
        return layer(h, embedding, batch, ctx)

    def forward(h: Tensor, embedding: Tensor) -> Tensor:
        return recompute(run, h, embedding) if full_recompute else run(h, embedding)

    with recorder:
        inputs = [setting.hidden_states(model), setting.hidden_states(model)]
        return recorder.measure(forward, inputs, torch.empty_like, wgrad_store)


@functools.lru_cache(maxsize=256)
def embedding_cost(model: ModelConfig, setting: LayerSetting, vocab_size: int, padded_vocab_size: int) -> LayerCost:
    """Return the cost of the embedding."""
    recorder = CostRecorder()
    spec = vocab_spec("embedding.word", padded_vocab_size, vocab_size, model.hidden_size, 0.0, False)
    embedding = recorder.exclude_params(Embedding(setting.param_factory(recorder), spec, model))
    token_ids = setting.token_ids(model)
    batch = Batch(token_ids, None, None, token_ids[0])
    with recorder:
        return recorder.measure(lambda: embedding(batch, ForwardContext()), [], torch.empty_like)


@functools.lru_cache(maxsize=256)
def mtp_embedding_cost(model: ModelConfig, setting: LayerSetting, vocab_size: int, padded_vocab_size: int) -> LayerCost:
    """Return the cost of the embedding of the inputs of all depths of multi-token prediction."""
    recorder = CostRecorder()
    spec = vocab_spec("embedding.word", padded_vocab_size, vocab_size, model.hidden_size, 0.0, False)
    embedding = recorder.exclude_params(Embedding(setting.param_factory(recorder), spec, model))
    mtp_embedding = MTPEmbedding(embedding, model.num_mtp_depths)
    token_ids = setting.token_ids(model)
    ids_JSB = token_ids.expand(model.num_mtp_depths, *token_ids.shape)
    batch = Batch(token_ids, None, None, token_ids[0], mtp_tokens_JSB=ids_JSB, mtp_positions_JSB=ids_JSB)
    with recorder:
        return recorder.measure(lambda: mtp_embedding(batch, ForwardContext()), [], torch.empty_like)


@functools.lru_cache(maxsize=256)
def flops_per_token(model: ModelConfig, padded_vocab_size: int) -> float:
    """Return the FLOPs of forward and backward per token, with a multiply-add counted as 2.

    They are three times the forward of the layers on one rank without recomputation, those of multi-token prediction
    included, and the forward of the head, which includes its backward. Attention scores that the causal mask or a
    window hides do not count; those across documents do.
    """
    setting = LayerSetting(tp=1, micro_batch=1, dtype=torch.bfloat16)
    layers = sum(3 * layers_cost((kind,), setting).flops[0] for kind in layer_kinds(model))
    if model.num_mtp_depths:
        layers += 3 * model.num_mtp_depths * mtp_layer_cost(model, setting).flops[0]
    head = sum(head_cost(model, setting, padded_vocab_size, padded_vocab_size, 0.0).flops)
    return (layers + head) / model.seq_length


class PrefixSums:
    """Sums of values over any range of layers in O(1), also for arrays of ranges. Sums of integers are exact.

    Attributes:
        per_layer: The values of each layer, as [layers, values].
    """

    def __init__(
        self, values: Sequence[Any], recompute_values: Sequence[Any] | None = None, num_recomputed: int = 0
    ) -> None:
        """Compute the prefix sums.

        Args:
            values: [layers, values].
            recompute_values: [layers, values] that count instead for the first layers of a range.
            num_recomputed: The number of these first layers.
        """
        self.per_layer = np.array(values)
        self.num_recomputed = num_recomputed
        self._sums = _prefix_sums(self.per_layer)
        self._recompute_sums = None if recompute_values is None else _prefix_sums(np.array(recompute_values))

    def between(self, starts: Any, stops: Any) -> np.ndarray:
        """Return the sums [..., values] over the layers from start to stop, which are integers or arrays of them."""
        if self._recompute_sums is None:
            return self._sums[stops] - self._sums[starts]
        middles = np.minimum(np.asarray(starts) + self.num_recomputed, stops)
        recomputed = self._recompute_sums[middles] - self._recompute_sums[starts]
        return recomputed + self._sums[stops] - self._sums[middles]


def _prefix_sums(values: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros_like(values[:1]), values.cumsum(0)])


# Columns of StageCosts._layer_sums: the FLOPs of F, B and W, the bytes saved on the device from F to B, and the bytes
# kept from B to W.
FLOPS = slice(0, 3)
SAVED_BYTES = 3
WGRAD_BYTES = 4


@dataclass(frozen=True, eq=False)
class StageCosts:
    """The costs of stages on one rank, for any split of the layers (the number of layers of every stage).

    Costs are equal only to themselves, so that results can be shared by their costs; `cached_stage_costs` returns the
    same object for equal arguments.

    Attributes:
        model: The model.
        recompute: The recomputation of activations.
        setting: The setting of the rank.
        vocab_size: The vocabulary without padding.
        padded_vocab: The vocabulary with padding.
        z_loss: The coefficient of the z-loss.
        num_offloaded: The number of first layers of each stage that offload activations.
        offload_min_numel: The smallest number of elements of a storage that they offload.
    """

    model: ModelConfig
    recompute: RecomputeConfig
    setting: LayerSetting
    vocab_size: int
    padded_vocab: int
    z_loss: float
    num_offloaded: int = 0
    offload_min_numel: int = 0

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        return layer_kinds(self.model)

    @cached_property
    def distinct_kinds(self) -> tuple[LayerKind, ...]:
        """Each kind once, in the order of the layers."""
        return tuple({id(kind): kind for kind in self.kinds}.values())  # comparing kinds would compare their models

    @cached_property
    def without_offload(self) -> "StageCosts":
        """The costs without offload, which must not change the order in which gradients are added."""
        return replace(self, num_offloaded=0) if self.num_offloaded else self

    @cached_property
    def flops(self) -> tuple[int, ...]:
        """The FLOPs of each layer, forward and backward together."""
        return tuple(self._layer_sums.per_layer[:, FLOPS].sum(1).tolist())

    def layer_costs(self, layers: range) -> list[tuple[LayerCost, range]]:
        """Return the costs of a stage with these layers, in order, each with its layers.

        Layers that are recomputed together have one cost.
        """
        costs = []
        for group, full_recompute in self.recompute.layer_groups(len(layers)):
            group_layers = layers[group]
            parts = [group_layers] if full_recompute else [range(n, n + 1) for n in group_layers]
            for part in parts:
                is_first = part.start == layers.start
                has_offload = part.start - layers.start < self.num_offloaded
                cost = layers_cost(
                    self.kinds[part.start : part.stop],
                    self.setting,
                    full_recompute,
                    offload_min_numel=self.offload_min_numel if has_offload else None,
                    first_in_stage=is_first and has_offload,
                )
                costs.append((cost, part))
        return costs

    @cached_property
    def head(self) -> LayerCost:
        return head_cost(self.model, self._end_setting, self.vocab_size, self.padded_vocab, self.z_loss)

    @cached_property
    def mtp_layers(self) -> tuple[LayerCost, ...]:
        """The cost of each depth of multi-token prediction on the last stage, without its embedding and its loss."""
        if not self.model.num_mtp_depths:
            return ()
        cost = mtp_layer_cost(self.model, self.setting, self.recompute.recomputes_mtp)
        return (cost,) * self.model.num_mtp_depths

    @cached_property
    def embedding(self) -> LayerCost:
        return embedding_cost(self.model, self._end_setting, self.vocab_size, self.padded_vocab)

    @cached_property
    def mtp_embedding(self) -> LayerCost:
        return mtp_embedding_cost(self.model, self._end_setting, self.vocab_size, self.padded_vocab)

    @property
    def _end_setting(self) -> LayerSetting:
        """The setting of embedding and head, where no weight gradient is deferred and nothing is recomputed."""
        return replace(self.setting, split_backward=False, recompute_modules=())

    def prefix_sums(self, values_of: Callable[[LayerKind, bool], Any]) -> PrefixSums:
        """Return the sums over the layers of any stage of values_of(kind, full_recompute)."""
        is_full = self.recompute.granularity == "full"
        if not is_full or self.recompute.method == "uniform":
            return PrefixSums(self.per_layer(lambda kind: values_of(kind, is_full)))
        plain = self.per_layer(lambda kind: values_of(kind, False))
        recomputed = self.per_layer(lambda kind: values_of(kind, True))
        return PrefixSums(plain, recomputed, self.recompute.num_layers)

    def per_layer(self, value_of: Callable[[LayerKind], T]) -> list[T]:
        """Return value_of(kind) of every layer, computed once for each kind."""
        values = {id(kind): value_of(kind) for kind in self.distinct_kinds}
        return [values[id(kind)] for kind in self.kinds]

    @cached_property
    def _layer_sums(self) -> PrefixSums:
        """Sums of the columns FLOPS, SAVED_BYTES and WGRAD_BYTES."""

        def values_of(kind: LayerKind, full_recompute: bool, offload_min_numel: int | None = None) -> list[int]:
            cost = layers_cost((kind,), self.setting, full_recompute, offload_min_numel)
            values = (*cost.flops, cost.saved_bytes - cost.offloaded_bytes, cost.wgrad_bytes)
            return [round(value) for value in values]

        if not self.num_offloaded:
            return self.prefix_sums(values_of)
        # offload does not combine with full recomputation
        plain = self.per_layer(lambda kind: values_of(kind, False))
        offloaded = self.per_layer(lambda kind: values_of(kind, False, self.offload_min_numel))
        return PrefixSums(plain, offloaded, self.num_offloaded)

    @cached_property
    def _stage_input_bytes(self) -> np.ndarray:
        """The bytes of its input that each layer offloads unless it is the first of a stage; 0 after the last layer."""

        def input_bytes(kind: LayerKind) -> int:
            inside, first = (
                layers_cost((kind,), self.setting, False, self.offload_min_numel, first_in_stage)
                for first_in_stage in (False, True)
            )
            return inside.offloaded_bytes - first.offloaded_bytes

        return np.array([*self.per_layer(input_bytes), 0])

    def _stage_sums(self, split: Sequence[int]) -> list[list[int]]:
        stops = np.cumsum(split)
        return self._layer_sums.between(stops - np.array(split), stops).tolist()

    def flops_of_stages(self, split: Sequence[int]) -> tuple[ActionCosts, ...]:
        """Return the FLOPs of every stage for a micro-batch, as integers, so that equal times are exactly equal."""
        flops: list[ActionCosts] = []
        for sums in self._stage_sums(split):
            f, b, w = sums[FLOPS]
            flops.append((f, b, w))
        f, b, w = flops[-1]
        for cost in (*self.mtp_layers, self.head):
            cost_f, cost_b, cost_w = cost.flops
            f, b, w = f + round(cost_f), b + round(cost_b), w + round(cost_w)
        flops[-1] = (f, b, w)
        return tuple(flops)

    def memory_of_stages(self, split: Sequence[int]) -> tuple[ActionMemory, ...]:
        """Return the bytes that a forward saves on every stage, from F to B, and with a split backward from B to W."""
        saved_bytes = self.saved_bytes(np.array(split)).tolist()
        wgrad_bytes = [sums[WGRAD_BYTES] for sums in self._stage_sums(split)]
        wgrad_bytes[-1] += sum(cost.wgrad_bytes for cost in self.mtp_layers)
        return tuple(zip(saved_bytes, wgrad_bytes, strict=True))

    def saved_bytes(self, splits: np.ndarray) -> np.ndarray:
        """Return the bytes [..., stages] that are saved from F to B, for splits [..., stages] of the layers."""
        stops = splits.cumsum(-1)
        starts = stops - splits
        saved = self._layer_sums.between(starts, stops)[..., SAVED_BYTES]
        if self.recompute.granularity == "full" and self.recompute.method == "uniform":  # each group saves one input
            num_groups = -(-splits // self.recompute.num_layers)
            saved = saved // np.maximum(splits, 1) * num_groups
        if self.num_offloaded:
            saved = saved + self._stage_input_bytes[starts] * (splits > 0)
        saved[..., -1] += sum(cost.saved_bytes for cost in (*self.mtp_layers, self.head))
        return saved

    @cached_property
    def min_peaks(self) -> tuple[int, int]:
        """The smallest peak of a layer's backward, and the smallest peak of its last section (LayerCost.peaks)."""
        costs = [layers_cost((kind,), self.setting) for kind in self.distinct_kinds]
        if self.recompute.granularity == "full":
            costs += [layers_cost((kind,), self.setting, full_recompute=True) for kind in self.distinct_kinds]
        min_peak = min(cost.peak_bytes["B"] for cost in costs)
        min_last_peak = min(list(cost.peaks["B"].values())[-1] for cost in costs)
        return min_peak, min_last_peak


cached_stage_costs = functools.lru_cache(maxsize=4096)(StageCosts)  # shared by plans, because a search has thousands
