"""The mixture-of-experts layer: each token goes to the k experts that the router selects; no token is dropped.

    x_ND -> router -> ids_NK, probs_NK
    x_RD      rows of the tokens with experts on this rank (token_dispatch.py); on a single rank R = N
    u_M2F     = x[rows] up[e]^T (+ bias)   M assignments in the order of experts, rows read inside the matmul
    a_MF      = probs * act(u)             so the gradient of a probability needs no output of an expert
    y_RD      = sum over a row's assignments of a down[e]^T (+ probs * bias), summed over ranks at the token's rank

Experts are split over ep and the width of each over etp: any ranks of the same stage, independent of dp, cp and tp
(arXiv:2504.14960). Saved: x, ids and probs of rows, u of assignments; backward recomputes `a`. The shared expert, which
all tokens use, runs while rows are being sent.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megalite.config.options import ModelConfig
from megalite.kernels.activation import Activation, get_activation
from megalite.kernels.dispatch import accum_dtype
from megalite.kernels.gated_matmul import down_gradients, up_matmul
from megalite.kernels.grouped_matmul import grouped_matmul, grouped_weight_grad_
from megalite.kernels.permute import expert_of_rows, inverse_permutation, sort_by_expert, unpermute
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.mlp import MLP
from megalite.nn.parameter import MainGrad, ParamFactory, main_grad_of, shapes
from megalite.nn.recompute import recompute
from megalite.nn.router import Router
from megalite.nn.token_dispatch import combine_tokens, start_dispatch
from megalite.nn.wgrad_store import WeightGradStore
from megalite.parallel.spec import Constant, Normal, ParamSpec


def _accumulate_grouped(main_grad: MainGrad, dy: Tensor, x: Tensor, **rows: Any) -> None:
    """Add dy[group]^T x[group] of each expert to the main gradient."""
    grad, overwrite = main_grad.accumulator()
    grouped_weight_grad_(grad.view(len(grad), -1, x.shape[-1]), dy, x, overwrite=overwrite, **rows)


def _weight_grad(
    weight: Tensor, main_grad: MainGrad | None, wgrad_store: WeightGradStore | None, dy: Tensor, x: Tensor, **rows: Any
) -> Tensor | None:
    """Add the weight's gradient to its main gradient, now or deferred; without one, return it for autograd."""
    if main_grad is None:
        grad = torch.empty(len(weight), dy.shape[-1], x.shape[-1], dtype=accum_dtype(x), device=x.device)
        grouped_weight_grad_(grad, dy, x, overwrite=True, **rows)
        return grad.to(weight.dtype).view_as(weight)
    if wgrad_store is None:
        _accumulate_grouped(main_grad, dy, x, **rows)
    else:
        wgrad_store.put(x, None, [(main_grad, dy)], partial(_accumulate_grouped, **rows))
    return None


class _ExpertMLP(Function):
    """The MLPs of this rank's experts.

    num_assignments  number M of assignments to experts of this rank, if the host knows it; None: all
    biases           biases of up and down, or none; of down this rank's columns, which start at `bias_start`
    """

    @staticmethod
    def forward(
        ctx: Any,
        up: Tensor,
        down: Tensor,
        activation: Activation,
        wgrad_store: WeightGradStore | None,
        x: Tensor,
        probs_RK: Tensor,
        ids_RK: Tensor,
        num_assignments: int | None,
        bias_start: int,
        *biases: Tensor,
    ) -> Tensor:
        ctx.activation = activation
        ctx.wgrad_store = wgrad_store
        ctx.main_grads = (main_grad_of(up), main_grad_of(down))
        R, K = ids_RK.shape
        E = len(up)
        x_RD = x.view(-1, x.shape[-1])
        order_M, offsets = sort_by_expert(ids_RK, E)
        order_M = order_M[:num_assignments]
        probs_M = probs_RK.flatten()[order_M]
        bias_EG = biases[0].flatten(1) if biases else None
        up_EGD = up.view(E, -1, up.shape[-1])
        u, a_MF = up_matmul(x_RD, up_EGD, offsets, order_M // K, probs_M, activation, bias_EG)
        y_MD = grouped_matmul(a_MF, down, offsets)
        if biases:
            bias_MW = biases[1][expert_of_rows(offsets, len(u))]
            y_MD[:, bias_start : bias_start + biases[1].shape[1]] += (probs_M[:, None] * bias_MW).to(u.dtype)
        ctx.bias_start = bias_start
        ctx.save_for_backward(x, probs_RK, order_M, offsets, u, up, down, *biases)
        return unpermute(y_MD, inverse_permutation(order_M, offsets, R, K)).view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, probs_RK, order_M, offsets, u, up, down, *biases = ctx.saved_tensors
        R, K = probs_RK.shape
        x_RD = x.view(-1, x.shape[-1])
        dy_RD = dy.reshape(-1, dy.shape[-1])
        rows_M = order_M // K
        probs_M = probs_RK.flatten()[order_M]
        a_MF, du, dprobs_M = down_gradients(dy_RD, down, offsets, rows_M, u, probs_M, ctx.activation)
        dbiases = list[Tensor | None]()
        if biases:
            dy_MW = dy_RD[rows_M, ctx.bias_start : ctx.bias_start + biases[1].shape[1]]
            dprobs_M += (dy_MW * biases[1][expert_of_rows(offsets, len(u))]).sum(-1, dtype=dprobs_M.dtype)
            sums = ((du, u.new_ones(len(u), 1)), (dy_MW.contiguous(), probs_M[:, None].to(u.dtype)))
            dbiases = [
                _weight_grad(bias, None, None, dy, ones, offsets=offsets)
                for bias, (dy, ones) in zip(biases, sums, strict=True)
            ]
        dprobs = torch.zeros_like(probs_RK).view(-1).index_copy_(0, order_M, dprobs_M.to(probs_RK.dtype))
        dx_MD = grouped_matmul(du, up.view(len(up), -1, up.shape[-1]).transpose(1, 2), offsets)
        dx = unpermute(dx_MD, inverse_permutation(order_M, offsets, R, K)).view_as(x)
        up_grad, down_grad = ctx.main_grads
        dup = _weight_grad(up, up_grad, ctx.wgrad_store, du, x_RD, offsets=offsets, rows=rows_M)
        ddown = _weight_grad(down, down_grad, ctx.wgrad_store, dy_RD, a_MF, offsets=offsets, dy_rows=rows_M)
        return dup, ddown, None, None, dx, dprobs.view_as(probs_RK), None, None, None, *dbiases


class MoELayer(nn.Module):
    """Router, experts and, if the model has one, the shared expert that all tokens use.

    The output of the shared expert may be scaled by a sigmoid of the token (Qwen2-MoE). `recompute_shared_expert`:
    recompute it in backward.
    """

    def __init__(
        self, make_param: ParamFactory, name: str, model: ModelConfig, layer: int, recompute_shared_expert: bool
    ):
        super().__init__()
        self.ep_etp = make_param.mesh.ep_etp
        self.etp = make_param.mesh.etp
        self.recompute_shared = recompute_shared_expert
        self.activation = get_activation(model.activation)  # or compiled (models/torch_compile.py)
        E = model.num_experts or 0
        D = model.hidden_size
        F = model.expert_ffn_size
        std = model.init_method_std
        self.num_local_experts = E // make_param.mesh.ep.size
        gated = self.activation.width == 2
        up, up_rows, ffn_dim = ("gate_up", (2, F), 2) if gated else ("up", (F,), 1)
        expert = partial(ParamSpec, mesh_view="expert", init_block=1)
        ep_shard = (0, "ep")
        normal = Normal(model.output_init_std)
        self.router = Router(make_param, f"{name}.router", model, layer)
        shards = (ep_shard, (ffn_dim, "etp"))
        self.up = make_param(
            expert(f"{name}.experts.{up}", (E, *up_rows, D), shards=shards, init=Normal(std), batch_dims=ffn_dim)
        )
        down_shards = (ep_shard, (2, "etp"))
        self.down = make_param(expert(f"{name}.experts.down", (E, D, F), shards=down_shards, init=normal, batch_dims=1))
        if model.add_bias_linear:  # down's bias is split over etp, so that each rank adds its part once
            bias = partial(expert, init=Constant(0.0), weight_decay=False, is_lookup=True)
            self.up_bias = make_param(
                bias(f"{name}.experts.{up}_bias", (E, *up_rows), shards=shards, batch_dims=ffn_dim)
            )
            down_shards = (ep_shard, (1, "etp"))
            self.down_bias = make_param(bias(f"{name}.experts.down_bias", (E, D), shards=down_shards, batch_dims=1))
        # they belong to this module, so that its call waits for their all-gather
        self.biases = (self.up_bias, self.down_bias) if model.add_bias_linear else ()
        self.shared_expert = self.shared_gate = None
        if (size := model.moe_shared_expert_intermediate_size) is not None:
            self.shared_expert = MLP(make_param, f"{name}.shared", model, size, bias=False)
        if model.moe_shared_expert_gate:
            shared_gate = ParamSpec(
                f"{name}.shared_gate", (D,), partial_grad_axes=("tp",), init=Normal(std), width_role="output"
            )
            self.shared_gate = make_param(shared_gate)

    def extra_repr(self) -> str:
        return shapes(self)

    def forward(self, x_sBD: Tensor, batch: Batch, ctx: ForwardContext) -> Tensor:
        """Return y_sBD, the output of the layer before the residual is added."""
        probs_NK, ids_NK = self.router(x_sBD, batch, ctx)
        compute = partial(_ExpertMLP.apply, self.up, self.down, self.activation, ctx.wgrad_store)
        biases = (self.etp.shard_start(self.biases[1].shape[1]) if self.biases else 0, *self.biases)
        if self.ep_etp.size == 1:
            y_sBD = compute(x_sBD, probs_NK, ids_NK, None, *biases)
            shared_sBD = self._run_shared_expert(x_sBD, batch, ctx)
        else:
            dispatched = start_dispatch(x_sBD, probs_NK, ids_NK, self.num_local_experts, self.etp.size, self.ep_etp)
            shared_sBD = self._run_shared_expert(x_sBD, batch, ctx)
            y_sBD = combine_tokens(compute(*dispatched.receive(x_sBD, probs_NK), *biases), dispatched).view_as(x_sBD)
        return y_sBD if shared_sBD is None else y_sBD + shared_sBD

    def _run_shared_expert(self, x_sBD: Tensor, batch: Batch, ctx: ForwardContext) -> Tensor | None:
        """Return the output of the shared expert; None if there is none."""
        if self.shared_expert is None:
            return None
        if self.recompute_shared and self.training:
            y_sBD = recompute(self.shared_expert, x_sBD, batch, ctx)
        else:
            y_sBD = self.shared_expert(x_sBD, batch, ctx)
        return y_sBD if self.shared_gate is None else y_sBD * (x_sBD @ self.shared_gate)[..., None].sigmoid()
