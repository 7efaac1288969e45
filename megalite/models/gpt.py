"""A decoder-only transformer in pipeline stages; GPT-2/3, NeoX, Llama, Mistral, Qwen and Gemma are settings of it.

    tokens_SB -> Embedding -> Block * layers -> norm -> LMHead -> loss      a Stage is a range of this line
                                                     -> MTPLayer * depths -> LMHead   (models/mtp.py)

    Block:  x = x + dropout(mixer(norm(x)));  x = x + dropout(mlp(norm(x)))      parts in models/layers.py, or only one
    or, with a parallel residual:  x = x + dropout(mixer(norm(x))) + dropout(mlp(norm'(x)))
    or, with a sandwich norm:      x = x + dropout(norm'(mixer(norm(x)))), and the same for the MLP
    or, with norms of outputs:     x = x + dropout(norm'(mixer(x))), and the same for the MLP

A stage is an ordinary module: x_sBD in, x_sBD out (or the loss, on the last stage). It does not know the schedule.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config.layer_spec import LayerSpec
from megalite.config.options import ModelConfig
from megalite.config.rope_spec import RopeSpec
from megalite.kernels.dropout import dropout, fold_in
from megalite.kernels.rope import rope_tables
from megalite.kernels.softcap import soft_cap
from megalite.models.layers import MLPS, build_mixer, check_mixer
from megalite.models.mtp import MTPEmbedding, MTPLayer
from megalite.nn.embedding import Embedding, vocab_spec
from megalite.nn.linear import column_parallel_linear
from megalite.nn.loss import linear_cross_entropy, token_losses
from megalite.nn.loss_sums import head_losses
from megalite.nn.micro_batch import RNG_SITE_HIDDEN_1, RNG_SITE_HIDDEN_2, Batch, ForwardContext
from megalite.nn.norm import Norm
from megalite.nn.parameter import ParamFactory, RunUnit, call_unit, shapes
from megalite.nn.recompute import checkpoint_without_output, recompute
from megalite.parallel.spec import ParamSpec


@dataclass(frozen=True)
class RecomputeConfig:
    """The activations that are recomputed in backward.

    granularity  None, "selective" (the parts in `modules`), or "full" (entire layers)
    method       with "full": "uniform" (groups of `num_layers` layers) or "block" (the first `num_layers` of a stage)
    modules      of core_attn, layernorm, mlp, moe, shared_experts
    """

    granularity: str | None = None
    method: str = "uniform"
    num_layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)

    @property
    def selective_modules(self) -> tuple[str, ...]:
        """The parts of each block that are recomputed."""
        return self.modules if self.granularity == "selective" else ()

    def layer_groups(self, layers: int) -> list[tuple[slice, bool]]:
        """Return groups of consecutive layers of a stage of `layers`, and whether each is recomputed as a whole."""
        n = self.num_layers
        if self.granularity != "full":
            return [(slice(layers), False)]
        if self.method == "uniform":
            return [(slice(i, i + n), True) for i in range(0, layers, n)]
        return [(slice(i, i + 1), i < n) for i in range(layers)]

    @property
    def recomputes_mtp(self) -> bool:
        """True if each depth of multi-token prediction is recomputed as a whole; "block" is about other layers."""
        return self.granularity == "full" and self.method == "uniform"


class Block(nn.Module):
    """A layer: a mixer and an MLP, each after a norm and with a residual, or only one of the two.

    With a sandwich norm, the output of each part has a norm, too, before it is added to the residual. With norms of
    outputs (LayerSpec), each part has only this norm.

    layer       number of the layer in the model
    spec        its parts
    recomputed  the parts that are recomputed in backward (RecomputeConfig)
    """

    def __init__(
        self,
        make_param: ParamFactory,
        model: ModelConfig,
        layer: int,
        spec: LayerSpec,
        recomputed: tuple[str, ...] = (),
    ):
        super().__init__()
        make_param = make_param.for_unit(spec.unit_name(layer))
        self.layer = layer
        self.spec = spec
        self.seed = make_param.seed
        self.dropout_p = model.hidden_dropout
        self.tp = make_param.mesh.tp
        self.parallel_residual = model.parallel_residual
        self.recompute_norms = "layernorm" in recomputed
        self.recompute_mlp = spec.mlp in recomputed
        self.dropout: Callable[..., Tensor] = dropout  # or compiled (models/torch_compile.py)
        self.mixer_norm = self.mixer = self.mixer_post_norm = None
        self.mlp_norm = self.mlp = self.mlp_post_norm = None
        has_input_norms = not spec.normalizes_outputs
        has_output_norms = spec.normalizes_outputs or model.sandwich_norm
        if spec.mixer is not None:
            name = f"layers.{layer}.{spec.mixer}"
            if has_input_norms:
                self.mixer_norm = Norm(make_param, f"{name}.norm", model.hidden_size, model)
            self.mixer = build_mixer(make_param, name, model, layer, spec, recomputed)
            if has_output_norms:
                self.mixer_post_norm = Norm(make_param, f"{name}.post_norm", model.hidden_size, model)
            norms = [norm for norm in (self.mixer_norm, self.mixer_post_norm) if norm is not None]
            check_mixer(self.mixer, norms, name, spec.mixer)
        if spec.mlp is not None:
            name = f"layers.{layer}.mlp"
            if has_input_norms:
                self.mlp_norm = Norm(make_param, f"{name}.norm", model.hidden_size, model)
            self.mlp = MLPS[spec.mlp](make_param, name, model, layer, spec, recomputed)
            if has_output_norms:
                self.mlp_post_norm = Norm(make_param, f"{name}.post_norm", model.hidden_size, model)

    def forward(self, x_sBD: Tensor, batch: Batch, ctx: ForwardContext) -> Tensor:
        """Return x_sBD after this layer."""
        if self.mixer is None:
            return self._add_mlp(x_sBD, x_sBD, batch, ctx)
        if self.mixer_norm is None:
            a_sBD = self.mixer(x_sBD, batch, ctx)
        elif self.recompute_norms and self.training:
            mixer = partial(self.mixer, batch=batch, ctx=ctx)
            a_sBD = checkpoint_without_output(partial(self.mixer_norm, x_sBD), mixer)
        else:
            a_sBD = self.mixer(self.mixer_norm(x_sBD), batch, ctx)
        if self.mixer_post_norm is not None:
            a_sBD = self.mixer_post_norm(a_sBD)
        if self.mlp is None:
            return self._dropout_add(a_sBD, x_sBD, RNG_SITE_HIDDEN_1, batch, ctx)
        recomputes_norm_or_mlp = self.training and (self.recompute_norms or self.recompute_mlp)
        adds_separately = self.parallel_residual or self._dropout_active() or recomputes_norm_or_mlp
        if self.mlp_norm is None or adds_separately:
            h_sBD = self._dropout_add(a_sBD, x_sBD, RNG_SITE_HIDDEN_1, batch, ctx)
            return self._add_mlp(x_sBD if self.parallel_residual else h_sBD, h_sBD, batch, ctx)
        h_sBD, n_sBD = self.mlp_norm(a_sBD, x_sBD)  # one kernel for addition and norm
        return self._dropout_add(self._mlp_output(n_sBD, batch, ctx), h_sBD, RNG_SITE_HIDDEN_2, batch, ctx)

    def _mlp_output(self, n_sBD: Tensor, batch: Batch, ctx: ForwardContext) -> Tensor:
        """Return the output of the MLP, after its norm if it has one."""
        assert self.mlp is not None
        y_sBD = self.mlp(n_sBD, batch, ctx)
        return y_sBD if self.mlp_post_norm is None else self.mlp_post_norm(y_sBD)

    def _add_mlp(self, m_sBD: Tensor, h_sBD: Tensor, batch: Batch, ctx: ForwardContext) -> Tensor:
        """Return h_sBD + dropout(mlp(norm(m_sBD))); norm or MLP may save only their inputs for backward."""
        norm, mlp = self.mlp_norm, self._mlp_output
        recompute_norm = self.recompute_norms and self.training
        recompute_mlp = self.recompute_mlp and self.training
        if norm is None:
            y_sBD = recompute(mlp, m_sBD, batch, ctx) if recompute_mlp else mlp(m_sBD, batch, ctx)
        elif recompute_norm and recompute_mlp:
            y_sBD = recompute(lambda m_sBD: mlp(norm(m_sBD), batch, ctx), m_sBD)
        elif recompute_norm:
            y_sBD = checkpoint_without_output(partial(norm, m_sBD), partial(mlp, batch=batch, ctx=ctx))
        elif recompute_mlp:
            y_sBD = recompute(mlp, norm(m_sBD), batch, ctx)
        else:
            y_sBD = mlp(norm(m_sBD), batch, ctx)
        return self._dropout_add(y_sBD, h_sBD, RNG_SITE_HIDDEN_2, batch, ctx)

    def _dropout_active(self) -> bool:
        return bool(self.dropout_p and self.training)

    def _dropout_add(self, y_sBD: Tensor, x_sBD: Tensor, site: int, batch: Batch, ctx: ForwardContext) -> Tensor:
        if not self._dropout_active():
            return x_sBD + y_sBD
        key = fold_in(self.seed, ctx.step, self.layer, site)
        first = batch.token_positions(self.tp, x_sBD.shape[0])
        return self.dropout(y_sBD, self.dropout_p, key, batch.sample_ids_B, first, x_sBD)


def build_mtp_layer(
    make_param: ParamFactory, model: ModelConfig, numbers: range, recomputed: tuple[str, ...] = ()
) -> MTPLayer:
    """Return a depth of multi-token prediction.

    Args:
        make_param: creates its parameters.
        model: the model.
        numbers: the numbers of its layers.
        recomputed: the parts of its layers that are recomputed in backward (RecomputeConfig).
    """
    blocks: list[nn.Module] = [
        Block(make_param, model, number, spec, recomputed)
        for number, spec in zip(numbers, model.mtp_layers, strict=True)
    ]
    first = numbers[0]
    return MTPLayer(make_param, f"layers.{first}.mtp", model.mtp_layers[0].unit_name(first), model, blocks)


class LMHead(nn.Module):
    """Output projection and losses; without labels, the logits over this rank's part of the vocabulary.

    tied_weight  the word embedding if it is tied and on this stage, or None
    z_loss       coefficient of the z-loss
    multiplier   factor of the logits
    softcap      bound of the logits; None: no bound
    mtp_weight   weight of the loss of each depth of multi-token prediction
    """

    def __init__(
        self,
        make_param: ParamFactory,
        model: ModelConfig,
        spec: ParamSpec,
        tied_weight: nn.Parameter | None,
        z_loss: float,
    ):
        super().__init__()
        make_param = make_param.for_unit("head")
        self.tp = make_param.mesh.tp
        self.vocab_size = spec.stored_shape[0]
        self.z_loss = z_loss
        self.multiplier = model.logit_multiplier
        self.softcap = model.final_logit_softcapping
        self.mtp_weight = model.mtp_loss_scaling_factor / max(1, model.num_mtp_depths)
        self.weight = tied_weight if tied_weight is not None else make_param(spec)

    def extra_repr(self) -> str:
        return shapes(self)

    def forward(self, h_sBD: Tensor, batch: Batch, ctx: ForwardContext, depths: Sequence[Tensor] = ()) -> Tensor:
        """Return the summed loss, whose backward includes the z-loss, or logits_SBv without labels.

        With `ctx.request_sums`, the losses of the labels are added to those of their requests, without a backward.

        Args:
            h_sBD: the hidden states after the final norm.
            batch: the micro-batch.
            ctx: the context of the forward.
            depths: the hidden states of each depth of multi-token prediction. Their losses are added with their weight,
                without a z-loss.
        """
        if self.multiplier != 1:  # hidden states are fewer than logits
            h_sBD = h_sBD * self.multiplier
            depths = [depth_sBD * self.multiplier for depth_sBD in depths]
        if batch.labels_SB is None:
            return soft_cap(column_parallel_linear(h_sBD, [self.weight], self.tp)[0], self.softcap)
        if ctx.request_sums is not None:
            assert batch.request_ids_SB is not None
            loss_SB = token_losses(h_sBD, self.weight, batch.labels_SB, self.tp, self.vocab_size, softcap=self.softcap)
            ctx.request_sums.add(loss_SB, batch.request_ids_SB)
            return loss_SB.sum()
        loss, z_loss = self._losses(h_sBD, batch, ctx, z_loss=self.z_loss)
        if ctx.loss_sums is not None:
            for name, value in zip(head_losses(self.z_loss), (loss, z_loss), strict=False):
                ctx.loss_sums.add_head_loss(name, value)
        for depth, depth_sBD in enumerate(depths, 1):
            depth_batch = batch.mtp_batch(depth)
            depth_loss, _ = self._losses(depth_sBD, depth_batch, ctx, loss_weight=self.mtp_weight)
            if ctx.loss_sums is not None:
                assert depth_batch.mask_SB is not None
                ctx.loss_sums.add_depth_loss(depth, depth_loss / self.mtp_weight, depth_batch.mask_SB)
            loss = loss + depth_loss
        return loss

    def _losses(self, h_sBD: Tensor, batch: Batch, ctx: ForwardContext, **options: float) -> tuple[Tensor, Tensor]:
        """Return the sums of the loss and of the z-loss over the labels of `batch`."""
        assert batch.labels_SB is not None
        args = (batch.labels_SB, batch.mask_SB, self.tp, self.vocab_size)
        return linear_cross_entropy(h_sBD, self.weight, *args, softcap=self.softcap, loss_grad=ctx.loss_grad, **options)


class Stage(nn.Module):
    """A pipeline stage of the model: the first has the embedding, the last has the head and multi-token prediction.

    layer_ranges       the layers of each stage
    stage_index        number of this stage
    vocab_size         without padding
    padded_vocab_size  rows of embedding and head
    recompute          the activations to recompute
    z_loss             coefficient of the z-loss
    layers             the layers of all stages; default: the model's
    """

    def __init__(
        self,
        make_param: ParamFactory,
        model: ModelConfig,
        layer_ranges: Sequence[range],
        stage_index: int,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        recompute: RecomputeConfig | None = None,
        z_loss: float = 0.0,
        layers: Sequence[LayerSpec] | None = None,
    ):
        super().__init__()
        self.recompute = recompute or RecomputeConfig()
        self.run_unit: RunUnit = call_unit  # or BucketSync.run_unit, with sharded weights (optim/zero/sync.py)
        # or an ActivationOffload (nn/activation_offload.py)
        self.offload: Callable[..., RunUnit] = lambda run_unit, *_: run_unit
        make_param = make_param.for_width(model.width_mult)
        mesh = make_param.mesh
        numbers = model.layer_numbers if layers is None else range(len(layers))
        layers = model.layers if layers is None else layers
        tied = not model.untie_embeddings_and_output_weights
        has_depths = model.num_mtp_depths > 0
        sizes = (padded_vocab_size, vocab_size, model.hidden_size)
        std = model.init_method_std
        word_std = std if model.embedding_init_method_std is None else model.embedding_init_method_std
        has_copy = mesh.pp.size > 1 and (tied or has_depths)  # on the last stage
        tied_weight = vocab_spec("embedding.word", *sizes, word_std, tied=has_copy)
        self.embedding = Embedding(make_param, tied_weight, model) if stage_index == 0 else None
        self.blocks = nn.ModuleList(
            Block(make_param, model, numbers[layer], layers[layer], self.recompute.selective_modules)
            for layer in layer_ranges[stage_index]
        )
        self.final_norm = self.mtp_embedding = self.head = None
        depth_numbers: tuple[range, ...] = ()
        embedding = self.embedding
        rope_specs = [layers[layer].rope for layer in layer_ranges[stage_index]]
        is_last = stage_index == len(layer_ranges) - 1
        # modules are created in the order of use, which is that of their gradients' buckets (optim/zero/layout.py)
        if is_last:
            self.final_norm = Norm(make_param.for_unit("head"), "final_norm", model.hidden_size, model)
            if has_depths:
                embedding = embedding or Embedding(make_param, tied_weight, model)
                self.mtp_embedding = MTPEmbedding(embedding, model.num_mtp_depths)
                depth_numbers = model.mtp_layer_numbers
                rope_specs += [spec.rope for spec in model.mtp_layers]
        self.mtp_layers = nn.ModuleList(  # one of each depth, or a single one that all depths use
            build_mtp_layer(make_param, model, layer_numbers, self.recompute.selective_modules)
            for layer_numbers in depth_numbers
        )
        if is_last:
            spec = tied_weight if tied else vocab_spec("head", *sizes, std, tied=False)
            shared = embedding.word if tied and embedding is not None else None
            self.head = LMHead(make_param, model, spec, shared, z_loss)
        self.rope_tables: dict[RopeSpec, tuple[Tensor, Tensor]] = {}
        if not make_param.meta:
            dtype = torch.float64 if make_param.dtype == torch.float64 else torch.float32
            self.rope_tables = {
                rope: rope_tables(model.max_positions, rope, mesh.device, dtype)
                for rope in dict.fromkeys(rope_specs)
                if rope is not None
            }

    def forward(self, input_sBD: Tensor | None, batch: Batch, ctx: ForwardContext) -> Tensor:
        """Return x_sBD; on the last stage the summed loss, or logits without labels."""
        x_sBD = self.forward_hidden(input_sBD, batch, ctx)
        if self.head is None:
            return x_sBD
        assert self.final_norm is not None
        h_sBD = self.final_norm(x_sBD)
        depths = [] if batch.labels_SB is None else self._forward_mtp(h_sBD, batch, ctx)
        return self.run_unit(self.head, h_sBD, batch, ctx, depths)

    def _forward_mtp(self, h_sBD: Tensor, batch: Batch, ctx: ForwardContext) -> list[Tensor]:
        """Return the hidden states of each depth of multi-token prediction; the model's are `h_sBD`."""
        if self.mtp_embedding is None:
            return []
        recomputed = self.recompute.recomputes_mtp and self.training
        ctx = replace(ctx, rope=self.rope_of(batch), in_full_recompute=recomputed)
        num_depths = self.mtp_embedding.num_depths
        embeddings = self.run_unit(self.mtp_embedding, batch, ctx).chunk(num_depths)
        depths: list[Tensor] = []
        for depth, embedding_sBD in enumerate(embeddings, 1):
            layer = self.mtp_layers[min(depth, len(self.mtp_layers)) - 1]
            run = self._run_mtp_layer(layer, batch.mtp_batch(depth), ctx)
            h_sBD = recompute(run, h_sBD, embedding_sBD) if recomputed else run(h_sBD, embedding_sBD)
            depths.append(h_sBD)
        return depths

    def _run_mtp_layer(self, layer: nn.Module, batch: Batch, ctx: ForwardContext) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the forward of a depth, whose second call is in backward."""
        calls = itertools.count()

        def run(h_sBD: Tensor, embedding_sBD: Tensor) -> Tensor:
            return self.run_unit(layer, h_sBD, embedding_sBD, batch, ctx, recomputing=next(calls) > 0)

        return run

    @property
    def all_blocks(self) -> list[Block]:
        """The layers of this stage, including those of multi-token prediction."""
        depths: Any = self.mtp_layers
        blocks: list[Any] = [*self.blocks, *(block for layer in depths for block in layer.blocks)]
        return blocks

    @property
    def units(self) -> dict[nn.Module, bool]:
        """The units in order of use; True if backward reads their weights.

        It does not read those of embeddings, and the head computes its gradients in forward.
        """
        units: dict[nn.Module, bool] = {}
        if self.embedding is not None:
            units[self.embedding] = False
        units |= dict.fromkeys(self.blocks, True)
        if self.mtp_embedding is not None:
            units[self.mtp_embedding] = False
        units |= dict.fromkeys(self.mtp_layers, True)
        if self.head is not None:
            units[self.head] = False
        return units

    def forward_hidden(self, input_sBD: Tensor | None, batch: Batch, ctx: ForwardContext) -> Tensor:
        """Return x_sBD after the layers of this stage, before the head."""
        if self.embedding is not None:
            x_sBD = self.run_unit(self.embedding, batch, ctx)
        else:
            assert input_sBD is not None, "only the first stage starts from tokens"
            x_sBD = input_sBD
        ctx = replace(ctx, rope=self.rope_of(batch))
        blocks = list(self.blocks)
        run_unit = self.offload(self.run_unit, len(blocks), [x_sBD, *itertools.chain(*ctx.rope.values())])
        for group, recomputed in self.recompute.layer_groups(len(blocks)):
            calls = itertools.count()
            recomputed = recomputed and self.training
            group_ctx = replace(ctx, in_full_recompute=recomputed)

            def run(
                x_sBD: Tensor,
                blocks: list[nn.Module] = blocks[group],
                ctx: ForwardContext = group_ctx,
                calls: Iterator[int] = calls,
            ) -> Tensor:
                recomputing = next(calls) > 0  # the second call is in backward
                for block in blocks:
                    x_sBD = run_unit(block, x_sBD, batch, ctx, recomputing=recomputing)
                return x_sBD

            x_sBD = recompute(run, x_sBD) if recomputed else run(x_sBD)
        return x_sBD

    def rope_of(self, batch: Batch) -> dict[RopeSpec, tuple[Tensor, Tensor]]:
        """Return cos and sin of the batch's positions, for each kind of rotary positions of this stage."""
        positions: Any = batch.positions_SB
        if positions is None:
            positions = slice(batch.tokens_SB.shape[0]) if batch.cp_positions_S is None else batch.cp_positions_S
        return {rope: (cos[positions], sin[positions]) for rope, (cos, sin) in self.rope_tables.items()}
