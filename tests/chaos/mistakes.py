"""Classical mistakes of distributed training, made in megalite, with what tools/verify.py must report about each.

A mistake is a function that is called instead of one of megalite's (support/replacements.py). A plugin
(docs/plugins.md) plants it in every rank, before the run is built:

    from mistakes import MISTAKES
    MISTAKES["norm_gradients_are_not_summed_over_tp"].plant()

It is planted in the one process too, where axes have one rank. Most mistakes change nothing there.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from replacements import Replacement
from torch import Tensor

from megalite.data.datasets.batches import Batches, MicroBatch
from megalite.kernels.delta_rule import Recurrence
from megalite.models import gpt
from megalite.models.gpt import Stage
from megalite.nn import context_parallel, linear, map_composition, moe, recurrent_context_parallel, recurrent_mixer
from megalite.nn.attention import Attention
from megalite.nn.context_parallel import ContextParallelAttention
from megalite.nn.embedding import Embedding
from megalite.nn.gated_delta_net import GatedDeltaNet
from megalite.nn.kimi_delta_attention import KimiDeltaAttention
from megalite.nn.mamba2 import Mamba2
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.parameter import spec_of
from megalite.nn.recurrent_heads import HeadExchange
from megalite.nn.router import Router
from megalite.optim.distributed_optimizer import DistributedOptimizer, OptimizerBucket
from megalite.optim.zero import grad_bucket, param_bucket, sync
from megalite.optim.zero.grad_bucket import GradBucket
from megalite.optim.zero.layout import BucketLayout
from megalite.optim.zero.param_bucket import ParamBucket
from megalite.optim.zero.sharding import BucketSharding
from megalite.optim.zero.sync import BucketSync
from megalite.parallel.comm import Pending, all_reduce_
from megalite.parallel.mesh import Axis
from megalite.parallel.spec import ParamSpec
from megalite.pipeline.runtime import Pipeline
from megalite.pipeline.schedule import Action, Op
from megalite.training import batch as training_batch

RUN = (
    "--num-layers 2 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 2 "
    "--global-batch-size 32 --train-iters 1000 --lr 3e-4 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 50257 --hidden-dropout 0 --attention-dropout 0"
)
LLAMA = (
    f"{RUN} --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
EXPERTS = f"{LLAMA} --num-experts 8 --moe-ffn-hidden-size 512 --moe-aux-loss-coeff 0.01"
LATENT = f"""{LLAMA} --multi-latent-attention --q-lora-rank 192 --kv-lora-rank 128 --qk-head-dim 64
 --qk-pos-emb-head-dim 32 --v-head-dim 64 --qk-layernorm"""
DELTA = f"""{LLAMA} --experimental-attention-variant gated_delta_net --linear-attention-freq [1,0]
 --linear-num-key-heads 8 --linear-num-value-heads 16 --linear-key-head-dim 64 --linear-value-head-dim 64"""
KIMI = f"""{LLAMA} --experimental-attention-variant kda --linear-attention-freq [1,0] --linear-num-key-heads 16
 --linear-num-value-heads 16 --linear-key-head-dim 64 --linear-value-head-dim 64"""
MAPS = "--cp-comm-type allgather"
MAMBA = f"{LLAMA} --hybrid-layer-pattern M-*- --mamba-num-groups 4"
DEPTHS = "--mtp-num-layers 2"
LLAMA2_70B = "--preset llama2-70b --micro-batch-size 1 --global-batch-size 32 --train-iters 9 --lr 3e-4 --mock-data"
DROPOUT = "--hidden-dropout 0.1"
TP = "--tp 2 --nproc 2"
PP = "--pp 2 --nproc 2"
DP = "--dp 2 --nproc 2"
CP = "--cp 2 --nproc 2"
EP = "--dp 4 --ep 2"


@dataclass(frozen=True)
class Mistake(Replacement):
    """A mistake, a run in which it matters, and what verify.py must report.

    Attributes:
        flags: the flags of the run.
        first: fields of the first difference, as in --json; "ranks.tp" is the ranks of tp. `where` need only contain the
            text, and `ratio` need only be near.
        all_differing: a text that is in the names of all quantities that differ there.
        wrong_loss: a text about the loss of the one process, if the mistake is made there, too.
    """

    flags: str
    first: dict[str, Any] = field(default_factory=dict)
    all_differing: str = ""
    wrong_loss: str = ""


MISTAKES: dict[str, Mistake] = {}


def mistake(owner: Any, original: str, **expected: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds a function to MISTAKES. The arguments are the fields of Mistake."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        MISTAKES[function.__name__] = Mistake(function, owner, original, **expected)
        return function

    return add


# ---- tensor parallelism


@mistake(
    sync,
    "bucket_shardings",
    flags=f"{LLAMA} {TP}",
    first={"kind": "gradient", "step": 1, "name": "final_norm.weight"},
    all_differing="norm",
)
def norm_gradients_are_not_summed_over_tp(bucket_shardings: Any, *args: Any) -> Any:
    return {key: replace(sharding, sum_axes=()) for key, sharding in bucket_shardings(*args).items()}


@mistake(
    Attention,
    "forward",
    flags=f"{RUN} {TP}",
    first={"kind": "forward", "step": 1, "name": "layers.0.attention", "layer": 0},
)
def bias_is_added_by_every_tp_rank(forward: Any, attention: Attention, x_sBD: Tensor, *args: Any) -> Tensor:
    y_sBD = forward(attention, x_sBD, *args)
    return y_sBD if attention.out_bias is None else y_sBD + (attention.tp.size - 1) * attention.out_bias


@mistake(
    gpt,
    "dropout",
    flags=f"{RUN} {DROPOUT} {TP}",
    first={"kind": "forward", "step": 1, "name": "layers.0.attention_added", "ranks.tp": [1]},
)
def dropout_masks_are_those_of_tp_rank_0(
    dropout: Any, x: Tensor, p: float, key: Any, sample_ids: Tensor, _: Any, residual: Tensor
) -> Tensor:
    return dropout(x, p, key, sample_ids, 0, residual)


@mistake(
    Embedding,
    "forward",
    flags=f"{RUN} {TP}",
    first={"kind": "forward", "step": 1, "name": "embedding", "ranks.tp": [1]},
)
def positions_start_at_0_on_every_tp_rank(
    forward: Any, embedding: Embedding, batch: Batch, ctx: ForwardContext
) -> Tensor:
    tp = embedding.tp
    positions_s = torch.arange(len(batch.tokens_SB) // tp.size)
    return forward(embedding, replace(batch, positions_SB=positions_s.repeat(tp.size).unsqueeze(1)), ctx)


@mistake(gpt, "linear_cross_entropy", flags=f"{RUN} {TP}", first={"kind": "loss", "step": 1, "name": "micro-batch"})
def padding_of_the_vocabulary_has_probability(
    linear_cross_entropy: Any,
    x_sBD: Tensor,
    weight_vD: Tensor,
    labels: Tensor,
    mask: Any,
    tp: Axis,
    _: int,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    return linear_cross_entropy(x_sBD, weight_vD, labels, mask, tp, len(weight_vD) * tp.size, **kwargs)


@mistake(
    linear._RowParallelLinear,
    "backward",
    flags=f"{RUN} {TP}",
    first={"kind": "gradient", "step": 1, "name": "layers.1.mlp.up_bias", "layer": 1},
)
def backward_of_row_parallel_linear_is_multiplied_by_tp(backward: Any, ctx: Any, dy_sBD: Tensor) -> tuple[Any, ...]:
    du_SBf, *others = backward(ctx, dy_sBD)
    return du_SBf * ctx.tp.size, *others


@mistake(
    linear._ColumnParallelLinear,
    "backward",
    flags=f"{LATENT} {TP}",
    first={"kind": "gradient", "step": 1, "name": "layers.1.latent_attention.kv_down", "layer": 1},
)
def gradient_of_the_shared_rotary_key_is_not_summed_over_tp(backward: Any, ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
    """Leave out the part of the other ranks' heads (NVIDIA/Megatron-LM#6839)."""
    dx_sBC, *others = backward(ctx, *dys)
    if ctx.split_channels:
        dk_SBR = dys[-1]
        dx_sBC[..., dx_sBC.shape[-1] - dk_SBR.shape[-1] :] = dk_SBR[ctx.tp.shard_slice(len(dx_sBC))]
    return dx_sBC, *others


@mistake(
    Attention,
    "__init__",
    flags=f"{RUN} --num-layers 8 --tp 4 --pp 4 --dp 2 --group-query-attention --num-query-groups 2",
    first={"kind": "forward", "step": 1, "name": "layers.0.attention", "layer": 0},
)
def replicated_kv_groups_are_assigned_round_robin(init: Any, attention: Attention, *args: Any) -> None:
    init(attention, *args)
    attention.kv_group = attention.tp.rank % attention.model.num_kv_groups


@mistake(
    Attention,
    "__init__",
    flags=f"{LLAMA2_70B} --tp 16 --nproc 16",
    first={"kind": "forward", "step": 1, "name": "layers.0.attention", "layer": 0},
)
def replicated_kv_group_is_the_rank_over_the_number_of_groups(init: Any, attention: Attention, *args: Any) -> None:
    init(attention, *args)
    attention.kv_group = attention.tp.rank // attention.model.num_kv_groups


# ---- context parallelism


@mistake(
    Embedding,
    "forward",
    flags=f"{RUN} {CP}",
    first={"kind": "forward", "step": 1, "name": "embedding", "ranks.cp": [0]},
)
def positions_of_a_cp_rank_are_consecutive(
    forward: Any, embedding: Embedding, batch: Batch, ctx: ForwardContext
) -> Tensor:
    positions_S = batch.cp_positions_S
    if positions_S is not None:
        batch = replace(batch, cp_positions_S=positions_S[0] + torch.arange(len(positions_S)))
    return forward(embedding, batch, ctx)


@mistake(
    ContextParallelAttention,
    "kv_all_gather_attention",
    flags=f"{RUN} {CP}",
    first={"kind": "forward", "step": 1, "name": "layers.0.attention", "ranks.cp": [0]},
)
def queries_of_a_second_chunk_see_the_keys_of_the_first(
    kv_all_gather_attention: Any, attention: ContextParallelAttention, *args: Any, **kwargs: Any
) -> Tensor:
    starts: list[int] = []

    def attention_fn(*qkv: Tensor, q_start: int, **others: Any) -> Tensor:
        starts.append(q_start)
        return attention.attention_fn(*qkv, q_start=starts[0], **others)

    return kv_all_gather_attention(replace(attention, attention_fn=attention_fn), *args, **kwargs)


@mistake(
    context_parallel,
    "start_reduce_scatter",
    flags=f"{LLAMA} {CP}",
    first={"kind": "gradient", "step": 1, "name": "layers.1.attention.kv", "layer": 1},
)
def kv_gradients_are_not_summed_over_cp(_: Any, x: Tensor, cp: Axis) -> Pending:
    return Pending(x.chunk(cp.size)[cp.rank])


# ---- data parallelism and the optimizer


@mistake(Pipeline, "step", flags=f"{LLAMA} {DP} --eod-mask-loss", first={"kind": "gradient", "step": 1, "name": "head"})
def every_rank_divides_by_its_own_number_of_labels(
    step: Any, pipeline: Pipeline, batches: list[Batch], ctx: ForwardContext
) -> Tensor:
    counted = sum(batch.num_targets for batch in batches) / sum(batch.tokens_SB.numel() for batch in batches)
    assert ctx.loss_grad is not None
    return step(pipeline, batches, replace(ctx, loss_grad=ctx.loss_grad / counted))


@mistake(
    BucketSync,
    "finish_grad_sync",
    flags=f"{RUN} {DP}",
    first={"kind": "gradient", "step": 1, "ratio": 0.5, "ratio_sizes": "1/dp"},
)
def gradients_are_also_averaged_over_dp(finish_grad_sync: Any, sync: BucketSync) -> None:
    finish_grad_sync(sync)
    for bucket in sync.grad_buckets:
        bucket.owned.div_(bucket.sharding.shard_axis.size)


@mistake(
    grad_bucket,
    "start_all_reduce",
    flags=f"{LLAMA} {DP} --no-use-distributed-optimizer",
    first={"kind": "gradient", "step": 1},
)
def end_of_every_bucket_is_not_reduced(start_all_reduce: Any, grads: Tensor, axis: Axis) -> Pending:
    return start_all_reduce(grads[:-256], axis)


@mistake(
    param_bucket, "start_all_gather_into", flags=f"{RUN} {DP}", first={"kind": "weight", "step": 1, "ranks.dp": [1]}
)
def dp_rank_1_keeps_its_old_weights(start_all_gather_into: Any, full: Tensor, shard: Tensor, dp: Axis) -> Pending:
    return start_all_gather_into(full.clone() if dp.rank == 1 else full, shard, dp)


@mistake(gpt, "linear_cross_entropy", flags=f"{RUN} {DP} --eod-mask-loss", wrong_loss="labels count")
def masked_labels_count(
    linear_cross_entropy: Any, x_sBD: Tensor, weight_vD: Tensor, labels: Tensor, _: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    return linear_cross_entropy(x_sBD, weight_vD, labels, None, *args, **kwargs)


@mistake(
    Batches, "at", flags=f"{RUN} {DP}", first={"kind": "input", "step": 1, "name": "tokens", "where": "on no rank"}
)
def last_micro_batch_is_dropped(at: Any, batches: Batches, *args: Any) -> Any:
    micro_batches = at(batches, *args)
    return micro_batches[: len(micro_batches) - batches._dp_size + 1]


# ---- sharded gradients and weights (ZeRO)


@mistake(GradBucket, "finish_reduce", flags=f"{RUN} {DP} --zero-stage 2", first={"kind": "gradient", "step": 1})
def gradients_of_a_pass_overwrite_those_before_it(finish_reduce: Any, bucket: GradBucket) -> None:
    if not bucket.is_resident:
        bucket.shard.zero_()
    finish_reduce(bucket)


@mistake(BucketSharding, "shard_range", flags=f"{RUN} {DP} --zero-stage 3", first={"kind": "weight", "step": 0})
def every_rank_has_the_shard_of_the_next_rank(
    shard_range: Any, sharding: BucketSharding, bucket: BucketLayout
) -> range:
    axis = sharding.shard_axis
    next_rank = replace(axis, rank=(axis.rank + 1) % axis.size)
    return shard_range(replace(sharding, shard_axis=next_rank), bucket)


@mistake(BucketSync, "_unshard_unit", flags=f"{RUN} {DP} --zero-stage 3", first={"kind": "gradient", "step": 1})
def weights_are_not_unsharded_for_backward(unshard: Any, sync: BucketSync, unit: Any, direction: int) -> None:
    unshard(sync, unit, direction)
    if direction == -1:
        for bucket in sync._unit_buckets[unit]:
            bucket.full.zero_()


@mistake(
    ParamBucket,
    "unshard",
    flags=f"{RUN} {DP} --zero-stage 3 --optimizer-cpu-offload --param-cpu-offload",
    first={"kind": "forward", "step": 1.5, "name": "embedding"},
)
def offloaded_weights_are_those_of_the_first_step(unshard: Any, bucket: ParamBucket) -> None:
    if bucket.is_resident:
        unshard(bucket)
        return
    updated = bucket.shard.clone()
    bucket.shard.copy_(vars(bucket).setdefault("first_shard", updated))
    unshard(bucket)
    bucket.shard.copy_(updated)


# ---- pipeline parallelism


@mistake(
    BucketSync,
    "finish_grad_sync",
    flags=f"{RUN} {PP}",
    first={"kind": "gradient", "step": 1, "name": "embedding.word", "ratio": 2.0},
    all_differing="embedding.word",
)
def tied_embedding_is_summed_twice(finish_grad_sync: Any, sync: BucketSync) -> None:
    finish_grad_sync(sync)
    for bucket in sync.grad_buckets:
        tied_axis = bucket.sharding.tied_axis
        if tied_axis is not None:
            all_reduce_(bucket.owned, tied_axis)


@mistake(
    Pipeline,
    "_start_p2p",
    flags=f"{RUN} {PP}",
    first={"kind": "gradient", "step": 1, "name": "layers.0.mlp.down_bias", "ranks.pp": [0]},
)
def gradient_of_one_micro_batch_is_halved_before_it_is_sent(
    start_p2p: Any, pipeline: Pipeline, op: str, action: Action, tensor: Tensor
) -> Pending:
    if action.op is Op.SEND_B and action.microbatch == 0:
        tensor = tensor / 2
    return start_p2p(pipeline, op, action, tensor)


@mistake(Pipeline, "evaluate", flags=f"{RUN} {PP}", first={"kind": "loss", "step": 1.5, "name": "step"})
def evaluation_loss_is_halved_with_several_stages(
    evaluate: Any, pipeline: Pipeline, batches: Any, ctx: ForwardContext
) -> None:
    evaluate(pipeline, batches, ctx)
    assert ctx.loss_sums is not None
    ctx.loss_sums.values /= min(2, pipeline.mesh.pp.size)


@mistake(Stage, "__init__", flags=f"{RUN} {PP}", first={"kind": "weight", "step": 0, "layer": 1, "ranks.pp": [1]})
def every_stage_numbers_its_layers_from_0(
    init: Any, stage: Stage, make_param: Any, model: Any, layer_ranges: Any, *args: Any, **kwargs: Any
) -> None:
    init(stage, make_param, model, [range(len(layers)) for layers in layer_ranges], *args, **kwargs)


@mistake(
    Stage,
    "__init__",
    flags=f"{RUN} {DROPOUT} {PP}",
    first={"kind": "forward", "step": 1, "name": "layers.1.attention_added", "layer": 1, "ranks.pp": [1]},
)
def dropout_uses_the_number_of_the_layer_in_its_stage(init: Any, stage: Stage, *args: Any, **kwargs: Any) -> None:
    init(stage, *args, **kwargs)
    for i, block in enumerate(stage.blocks):
        block.layer = i  # type: ignore[assignment]


# ---- recurrent layers


@mistake(
    GatedDeltaNet,
    "__init__",
    flags=f"{DELTA} {TP}",
    first={"kind": "gradient", "step": 1, "name": "layers.0.gated_delta_net.out_norm", "layer": 0},
    all_differing="out_norm",
)
def gradient_of_the_gated_norm_is_not_summed_over_tp(init: Any, mixer: GatedDeltaNet, *args: Any) -> None:
    """Give the norm of each rank the gradient of its own heads alone (NVIDIA/Megatron-LM#7452)."""
    init(mixer, *args)
    mixer.out_norm.spec = replace(spec_of(mixer.out_norm), partial_grad_axes=())  # type: ignore[assignment]


@mistake(
    recurrent_context_parallel,
    "range_recurrence",
    flags=f"{DELTA} {CP} {MAPS} --reset-attention-mask",
    first={"kind": "forward", "step": 1, "name": "layers.0.gated_delta_net", "layer": 0},
)
def state_crosses_the_borders_of_documents(_: Any, recurrence: Recurrence, *args: Any) -> Recurrence:
    return recurrence


@mistake(
    recurrent_mixer,
    "earlier_tokens",
    flags=f"{DELTA} {CP} {MAPS}",
    first={"kind": "forward", "step": 1, "name": "layers.0.gated_delta_net", "layer": 0},
)
def convolution_starts_afresh_at_each_range(earlier_tokens: Any, *args: Any) -> tuple[Tensor, ...]:
    return tuple(0 * x for x in earlier_tokens(*args))


@mistake(
    recurrent_context_parallel,
    "states_before",
    flags=f"{DELTA} {CP} {MAPS}",
    first={"kind": "forward", "step": 1, "name": "layers.0.gated_delta_net", "layer": 0},
)
def state_passes_through_ranges_in_the_order_of_the_ranks(
    states_before: Any, maps: list[Tensor], columns: int, ranks: list[int], cp: Any
) -> list[Tensor]:
    return states_before(maps, columns, sorted(ranks), cp)


@mistake(
    HeadExchange,
    "own_rows",
    flags=f"{DELTA} {CP} --cp-comm-type a2a",
    first={"kind": "forward", "step": 1, "name": "layers.0.gated_delta_net", "layer": 0},
)
def convolution_of_another_ranks_heads(own_rows: Any, exchange: HeadExchange, weight: Tensor) -> Tensor:
    other = replace(exchange, cp=replace(exchange.cp, rank=0))
    return own_rows(other, weight)


@mistake(
    KimiDeltaAttention,
    "__init__",
    flags=f"{KIMI} {TP}",
    first={"kind": "gradient", "step": 1, "name": "layers.0.kda.f_down", "layer": 0},
    all_differing="f_down",
)
def gradient_of_the_first_matrix_of_the_decay_is_not_summed_over_tp(
    init: Any, mixer: KimiDeltaAttention, *args: Any
) -> None:
    init(mixer, *args)
    mixer.f_down.spec = replace(spec_of(mixer.f_down), partial_grad_axes=())  # type: ignore[assignment]


@mistake(
    Mamba2,
    "__init__",
    flags=f"{MAMBA} {TP}",
    first={"kind": "forward", "step": 1, "name": "layers.0.mamba2", "layer": 0},
)
def norm_of_a_group_spans_the_channels_of_the_rank(init: Any, mixer: Mamba2, *args: Any) -> None:
    init(mixer, *args)
    gated_norm = mixer.gated_norm

    def of_one_group(o_SBhV: Tensor, z_SBf: Tensor) -> Tensor:
        groups, mixer.num_groups = mixer.num_groups, 1
        try:
            return gated_norm(o_SBhV, z_SBf)
        finally:
            mixer.num_groups = groups

    mixer.gated_norm = of_one_group  # type: ignore[method-assign]


@mistake(
    map_composition,
    "apply_map",
    flags=f"{MAMBA} {CP} {MAPS}",
    first={"kind": "forward", "step": 1, "name": "layers.0.mamba2", "layer": 0},
)
def state_does_not_decay_across_a_range(_: Any, A: Tensor, U: Tensor, state: Tensor) -> Tensor:
    return state + U


# ---- multi-token prediction


@mistake(training_batch, "_mtp_arrays", flags=f"{LLAMA} {DEPTHS} {CP}", wrong_loss="are not the model's labels 1 ahead")
def labels_of_depths_are_off_by_one(mtp_arrays: Any, *args: Any) -> dict[str, Any]:
    arrays = mtp_arrays(*args)
    return {name: np.roll(array, name == "mtp_labels_JSB", -1) for name, array in arrays.items()}


@mistake(
    training_batch,
    "_mtp_arrays",
    flags=f"{LATENT} {DEPTHS} {DP} --eod-mask-loss",
    wrong_loss="labels count that the model's loss mask leaves out",
)
def depths_have_the_loss_mask_of_the_model(mtp_arrays: Any, micro: MicroBatch, *args: Any) -> dict[str, Any]:
    is_inside_BJT = mtp_arrays(replace(micro, loss_mask=None, document_ids=None), *args)["mtp_mask_JSB"]
    assert micro.loss_mask is not None
    return {**mtp_arrays(micro, *args), "mtp_mask_JSB": micro.loss_mask[:, None] * is_inside_BJT}


@mistake(
    sync,
    "bucket_shardings",
    flags=f"{LATENT} {DEPTHS} {PP}",
    first={"kind": "gradient", "step": 1, "name": "embedding.word"},
    all_differing="embedding.word",
)
def copy_of_the_embedding_drifts(bucket_shardings: Any, *args: Any) -> Any:
    """Update the copy beside the depths with their gradient alone, and the embedding with that of the model."""
    return {key: replace(sharding, tied_axis=None) for key, sharding in bucket_shardings(*args).items()}


# ---- expert parallelism


@mistake(
    BucketSync,
    "finish_grad_sync",
    flags=f"{EXPERTS} {EP}",
    first={"kind": "gradient", "step": 1, "ratio": 0.5, "ratio_sizes": "1/ep"},
    all_differing=".experts.",
)
def expert_gradients_are_averaged_over_ep(finish_grad_sync: Any, sync: BucketSync) -> None:
    finish_grad_sync(sync)
    max_size = max(bucket.sharding.shard_axis.size for bucket in sync.grad_buckets)
    for bucket in sync.grad_buckets:
        bucket.owned.div_(max_size / bucket.sharding.shard_axis.size)


@mistake(DistributedOptimizer, "_sum_once", flags=f"{EXPERTS} {EP}", first={"kind": "norm", "step": 1})
def gradient_norm_lacks_experts(sum_once: Any, optimizer: DistributedOptimizer, value: Any) -> Tensor:
    def counted(bucket: OptimizerBucket) -> Tensor:
        is_missing = bucket.layout.key.mesh_view == "expert" and optimizer.sync.mesh.ep.size > 1
        return torch.zeros_like(value(bucket)) if is_missing else value(bucket)

    return sum_once(optimizer, counted)


@mistake(
    Router,
    "forward",
    flags=(
        f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --dp 2 --ep 2 "
        "--recompute-granularity full --recompute-method uniform"
    ),
    first={"kind": "router", "step": 1, "name": "layers.0.mlp.router.counts", "ratio": 2.0},
)
def assignments_are_counted_again_in_recomputation(
    forward: Any, router: Router, x_sBD: Tensor, batch: Batch, ctx: ForwardContext
) -> tuple[Tensor, Tensor]:
    probs_NK, ids_NK = forward(router, x_sBD, batch, ctx)
    if ctx.in_full_recompute:
        micro_batch = ctx.step, int(batch.sample_ids_B[0])
        if vars(router).get("last_micro_batch") == micro_batch:  # the second forward is the recomputation
            router.count_assignments_(ids_NK, x_sBD.shape[1], router.padding(x_sBD, batch))
        vars(router)["last_micro_batch"] = micro_batch
    return probs_NK, ids_NK


@mistake(
    ParamSpec,
    "box",
    flags=f"{EXPERTS} {EP}",
    first={"kind": "weight", "step": 0, "name": "layers.0.mlp.experts.gate_up", "ranks.ep": [1]},
    all_differing=".experts.",
)
def every_rank_starts_with_the_experts_of_ep_rank_0(box: Any, spec: ParamSpec, sizes: Any, ranks: Any) -> Any:
    return box(spec, sizes, {**ranks, "ep": 0})


@mistake(
    moe,
    "start_dispatch",
    flags=f"{EXPERTS} {EP}",
    first={"kind": "forward", "step": 1, "name": "layers.0.mlp", "layer": 0},
)
def last_two_experts_of_a_rank_are_swapped(
    start_dispatch: Any, x_sBD: Tensor, probs_NK: Tensor, ids_NK: Tensor, num_local_experts: int, *args: Any
) -> Any:
    local_NK = ids_NK % num_local_experts
    swapped_NK = ids_NK - local_NK + (2 * num_local_experts - 3) - local_NK
    ids_NK = torch.where(local_NK >= num_local_experts - 2, swapped_NK, ids_NK)
    return start_dispatch(x_sBD, probs_NK, ids_NK, num_local_experts, *args)
