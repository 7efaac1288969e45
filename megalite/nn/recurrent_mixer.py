"""The base of recurrent mixers: projections, a short convolution, a recurrence over tokens, a gated norm.

    x_sBD --gather--> convolved channels, gates, z -> convolution and SiLU -> recurrence -> o
    o, z -> gated norm @ W --scatter--> y_sBD

A mixer is a subclass with its parameters and the inputs of its recurrence (kernels/delta_rule.py). Context parallelism
exchanges affine maps of states (recurrent_context_parallel.py), or tokens for heads (recurrent_heads.py). Generation
keeps the state and the last W - 1 inputs of the convolution, whatever the number of tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megalite.config.layer_spec import LayerSpec
from megalite.config.options import ModelConfig
from megalite.kernels.delta_rule import Recurrence, RecurrenceInputs, delta_rule
from megalite.kernels.short_conv import short_conv
from megalite.nn.linear import column_parallel_linear, row_parallel_linear
from megalite.nn.micro_batch import Batch, ForwardContext, MixerCache
from megalite.nn.parameter import shapes
from megalite.nn.recompute import checkpoint_without_output, recompute
from megalite.nn.recurrent_context_parallel import context_parallel_delta_rule, documents_of_range, earlier_tokens
from megalite.nn.recurrent_heads import ALL_HEADS, HeadExchange, RecurrentShape, exchanges_heads
from megalite.nn.sequence_sharding import SequenceSharding
from megalite.parallel.mesh import Mesh

DECAY_RATES = (1.0, 16.0)  # the range of initial decay rates exp(A_log), as in Megatron-LM
TIME_STEPS = (0.001, 0.1)  # the range of initial time steps softplus(dt_bias), if they are drawn; also as there


def rows_of_heads(weight: Tensor, heads: slice, rows_per_head: int = 1) -> Tensor:
    """Return the rows of some heads. For all of them this is the weight itself, which may have a main_grad."""
    if heads == ALL_HEADS:
        return weight
    return weight[heads.start * rows_per_head : heads.stop * rows_per_head]


class RecurrentMixer(nn.Module):
    """A recurrence of one layer.

    shape           heads and channels on this tensor-parallel rank
    cp_comm_type    what context parallelism exchanges: "a2a" (heads), "allgather" (maps of states) or "auto"
    recurrence      scale of queries and their norm; its documents are not read
    recompute_core  recompute convolution, gates and recurrence in backward
    out             the row-parallel weight [D, f], which the subclass creates
    """

    out: nn.Parameter

    def __init__(
        self, mesh: Mesh, model: ModelConfig, layer: int, spec: LayerSpec, recurrence: Recurrence, recompute_core: bool
    ):
        super().__init__()
        self.tp, self.cp = mesh.tp, mesh.cp
        self.layer = layer
        self.shape = self.shape_of(model, self.tp.size)
        self.cp_comm_type = spec.cp_comm_type
        self.recurrence = recurrence
        self.recompute_core = recompute_core

    def extra_repr(self) -> str:
        return shapes(self)

    @staticmethod
    def shape_of(model: ModelConfig, tp_size: int) -> RecurrentShape:
        """Return heads and channels on a rank; the channels are in the order of `projections`."""
        raise NotImplementedError

    def projections(self) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        """Return the column-parallel weights: of the convolved channels, in their order, of z, and of the gates."""
        raise NotImplementedError

    def taps(self) -> tuple[Tensor, Tensor | None]:
        """Return the taps [C, W] of this rank's convolved channels and their biases [C]; None: they have none."""
        raise NotImplementedError

    def recurrence_inputs(
        self, convolved_SBf: Tensor, gates: tuple[Tensor, ...], heads: slice = ALL_HEADS
    ) -> RecurrenceInputs:
        """Return the inputs of the recurrence.

        Args:
            convolved_SBf: The channels of some heads after the convolution.
            gates: Their gates [S, B, f].
            heads: These value heads among those of this rank's parameters.
        """
        raise NotImplementedError

    def add_skip(self, o_SBhV: Tensor, convolved_SBf: Tensor, heads: slice = ALL_HEADS) -> Tensor:
        """Return the output of the recurrence plus what passes by it: nothing."""
        return o_SBhV

    def output_gate(self, z_SBf: Tensor) -> Tensor:
        """Return the gate [S, B, f] of the output, given the product of its projection: that itself."""
        return z_SBf

    def gated_norm(self, o_SBhV: Tensor, z_SBf: Tensor) -> Tensor:
        """Return the input [S, B, f] of the last projection."""
        raise NotImplementedError

    def forward(self, x_sBD: Tensor, batch: Batch, ctx: ForwardContext) -> Tensor:
        """Return y_sBD, the output of the layer before the residual is added."""
        conv_weights, z_weight, gate_weights = self.projections()
        weights = [*conv_weights, z_weight, *gate_weights]
        projected = column_parallel_linear(x_sBD, weights, self.tp, ctx.wgrad_store)
        num_convolved = len(conv_weights)
        conv_input_SBf = torch.cat(projected[:num_convolved], -1)
        z_SBf, *gates = projected[num_convolved:]
        exchange = self._head_exchange(batch, conv_input_SBf.dtype)
        if exchange is not None:
            conv_input_SBf, *gates = exchange.to_heads([conv_input_SBf, *gates])
        core = self._select_core(batch, ctx, exchange)
        is_recomputed = self.recompute_core and self.training
        o_SBhV = recompute(core, conv_input_SBf, *gates) if is_recomputed else core(conv_input_SBf, *gates)
        if exchange is not None:
            o_SBhV = exchange.to_tokens(o_SBhV)
        gated = partial(self.gated_norm, o_SBhV, self.output_gate(z_SBf))
        return checkpoint_without_output(
            gated, partial(row_parallel_linear, weight_Df=self.out, tp=self.tp, wgrad_store=ctx.wgrad_store)
        )

    def _head_exchange(self, batch: Batch, dtype: torch.dtype) -> HeadExchange | None:
        """Return the exchange of tokens for heads; None: there is none."""
        sharding = batch.cp_sharding
        if sharding is None or not exchanges_heads(self.cp_comm_type, self.shape, sharding, dtype):
            return None
        return HeadExchange(self.shape, self.cp, sharding)

    def _select_core(self, batch: Batch, ctx: ForwardContext, exchange: HeadExchange | None) -> Callable[..., Tensor]:
        """Return the function from the inputs of the convolution and the gates to o_SBhV."""
        if ctx.cache is not None:
            return partial(self._cached_core, cache=ctx.cache)
        if batch.cp_sharding is None or exchange is not None:
            return partial(self._core, batch=batch, exchange=exchange)
        return partial(self._core_of_ranges, batch=batch, sharding=batch.cp_sharding)

    def _core(self, conv_input_SBf: Tensor, *gates: Tensor, batch: Batch, exchange: HeadExchange | None) -> Tensor:
        """Return o_SBhV of complete samples; after an exchange, of some of the heads."""
        document_start = None if batch.documents is None else batch.documents.document_start_BS
        heads = ALL_HEADS
        taps, bias = self.taps()
        if exchange is not None:
            heads = exchange.value_heads
            taps, bias = exchange.own_rows(taps), None if bias is None else exchange.own_rows(bias)
        convolved_SBf = short_conv(conv_input_SBf, taps, document_start, bias_C=bias)
        recurrence = replace(self.recurrence, documents_BS=document_start)
        o_SBhV, _ = delta_rule(self.recurrence_inputs(convolved_SBf, gates, heads), recurrence)
        return self.add_skip(o_SBhV, convolved_SBf, heads)

    def _core_of_ranges(
        self, conv_input_SBf: Tensor, *gates: Tensor, batch: Batch, sharding: SequenceSharding
    ) -> Tensor:
        """Return o_SBhV of this rank's ranges of samples that are sharded over cp. Collective over cp."""
        document_start = None if batch.documents is None else batch.documents.document_start_BS
        taps, bias = self.taps()
        width = taps.shape[1] - 1
        ranges = sharding.contiguous_ranges(self.cp.rank)
        earlier = earlier_tokens(conv_input_SBf, width, self.cp, sharding)
        parts = conv_input_SBf.split([len(positions) for positions in ranges])
        outputs = [
            short_conv(part, taps, documents_of_range(document_start, positions, width), earlier_TBC, bias)
            for part, positions, earlier_TBC in zip(parts, ranges, earlier, strict=True)
        ]
        convolved_SBf = torch.cat(outputs)
        inputs = self.recurrence_inputs(convolved_SBf, gates)
        o_SBhV = context_parallel_delta_rule(inputs, self.recurrence, document_start, self.cp, sharding)
        return self.add_skip(o_SBhV, convolved_SBf)

    def _cached_core(self, conv_input_SBf: Tensor, *gates: Tensor, cache: MixerCache) -> Tensor:
        """Return o_SBhV of new tokens, and replace the layer's state and last inputs by those after them.

        Padding after the new tokens of a sample has no decay, no correction and no value, so it leaves the state as it
        is.
        """
        S, B, f = conv_input_SBf.shape
        taps, bias = self.taps()
        width = taps.shape[1] - 1
        if self.layer in cache.states:
            state, earlier = cache.states[self.layer]
        else:
            state, earlier = None, conv_input_SBf.new_zeros(width, B, f)
        convolved_SBf = short_conv(conv_input_SBf, taps, None, earlier, bias)
        inputs = self.recurrence_inputs(convolved_SBf, gates)
        is_new_SB = torch.arange(S, device=conv_input_SBf.device)[:, None] < cache.num_new_B

        def only_new(x: Tensor) -> Tensor:
            return x.where(is_new_SB.view(S, B, *[1] * (x.dim() - 2)), 0.0)

        inputs = inputs._replace(
            log_decay=only_new(inputs.log_decay),
            v=only_new(inputs.v),
            beta=None if inputs.beta is None else only_new(inputs.beta),
        )
        o_SBhV, state = delta_rule(inputs, self.recurrence, state)
        conv_inputs_TBf = torch.cat([earlier, conv_input_SBf])
        last_TB = cache.num_new_B + torch.arange(width, device=conv_input_SBf.device)[:, None]
        cache.states[self.layer] = state, conv_inputs_TBf[last_TB, torch.arange(B, device=conv_input_SBf.device)]
        return self.add_skip(o_SBhV, convolved_SBf)
