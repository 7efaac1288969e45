"""The router: it selects k of E experts for each token, with the probabilities that weight their outputs.

    logits_NE = x W^T in fp32 (fp64)     scores = softmax | sigmoid | logits      selected = top k of scores + bias
    softmax    probs = softmax over the selected k; pre_softmax: the selected scores of the softmax over all E
    sigmoid    probs = selected scores / their sum (k > 1)                          all times the scaling factor
    sinkhorn   selected in training = top k of the logits, balanced over a micro-batch   arXiv:2102.03161, sec. 3.2

Every tp and cp rank routes its own tokens. The lower expert wins a tie, on every device. With groups (arXiv:2412.19437,
sec. 2.1.2) only experts of a token's best groups can be selected; a group is ranked by the scores of its best experts.

Auxiliary losses are weighted by the loss's weight times labels per token (ForwardContext.token_weight), so that they
are means over tokens for any number of labels and any layout. Padding is routed, but is not part of any count, loss or
balance.
With f_i the assignments of expert i over their mean, and P the softmax, or the sigmoid over its sum, of each token n:
    aux_loss          sum_n sum_i f_i P_ni      f: of a micro-batch, over all ranks of tp and cp       arXiv:2101.03961
    seq_aux_loss      the same                  f: of each sample                                      arXiv:2412.19437
    global_aux_loss   the same                  f: of the step's micro-batches so far, of all of dp    arXiv:2501.11873
    z-loss            sum_n log(sum_i exp(logits_ni))^2                                                arXiv:2202.08906
Only global_aux_loss (from Megatron-LM) depends on how a batch is split over dp and accumulation. Only f needs other
ranks. Gradients, sums and counts of assignments are computed in backward, which runs once for each micro-batch, so
neither recomputation nor evaluation counts. Logits are recomputed there, not saved.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megalite.config.layer_spec import ROUTER_LOSSES
from megalite.config.options import ModelConfig
from megalite.kernels.dispatch import accum_dtype
from megalite.kernels.dropout import fold_in, hash_coordinates
from megalite.kernels.weight_grad import accumulate_weight_grad_
from megalite.nn.micro_batch import RNG_SITE_ROUTER, Batch, ForwardContext
from megalite.nn.parameter import ParamFactory, main_grad_of, shapes
from megalite.parallel.comm import start_all_gather
from megalite.parallel.spec import Box, Constant, Normal, ParamSpec, TensorShard

EPS = 1e-20  # added to sums of sigmoids, which may all be 0
SINKHORN_MAX_ITERS, SINKHORN_TOL = 1000, 1e-4  # `sinkhorn` stops when the experts' factors change by less


def stable_topk(scores: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest in the last dim, in order; ties go to the lower index, unlike torch.topk."""
    # contiguous, so that only k indices are kept in memory, not all E
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def sinkhorn(logits_NE: Tensor) -> Tensor:
    """Return exp(logits), scaled by rows and columns until each token sums to 1/N and each expert to 1/E."""
    cost_NE = (logits_NE - logits_NE.amax(1, keepdim=True)).exp()
    factor_E, tiny = cost_NE.new_ones(cost_NE.shape[1]), 1e-8
    for _ in range(1 if cost_NE.is_meta else SINKHORN_MAX_ITERS):
        factor_N1 = 1 / len(cost_NE) / ((cost_NE * factor_E).sum(1, keepdim=True) + tiny)
        before, factor_E = factor_E, 1 / len(factor_E) / ((cost_NE * factor_N1).sum(0) + tiny)
        if cost_NE.is_meta or (factor_E - before).abs().mean() < SINKHORN_TOL:
            break
    return cost_NE * factor_E * factor_N1


def _softmax_backward(P: Tensor, dP: Tensor) -> Tensor:
    """Return the gradient of the logits of a softmax P."""
    return P * (dP - (dP * P).sum(-1, keepdim=True))


class _RouterFunction(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_sBD: Tensor,
        weight: Tensor,
        logit_bias: Tensor | None,
        router: "Router",
        batch: Batch,
        forward_ctx: ForwardContext,
    ) -> tuple[Tensor, Tensor]:
        ctx.router = router
        ctx.main_grad = main_grad_of(weight)
        ctx.forward_ctx = forward_ctx
        ctx.padding_N1 = padding_N1 = router.padding(x_sBD, batch)
        logits_NE = router.logits(x_sBD, weight)
        force_balance = router.model.moe_router_force_load_balancing
        scores_NE = router.scores(logits_NE)
        if force_balance:
            ids_NK = router.select_experts(router.random_scores(x_sBD, batch, forward_ctx.step), None)
        elif router.sinkhorn and router.training:
            ids_NK = router.select_experts(router.sinkhorn_scores(logits_NE, padding_N1), router.expert_bias)
        else:
            ids_NK = router.select_experts(scores_NE, router.expert_bias)
        ctx.save_for_backward(x_sBD, weight, ids_NK)
        ctx.has_bias = logit_bias is not None
        ctx.mark_non_differentiable(ids_NK)
        return router.probabilities(scores_NE, ids_NK), ids_NK

    @staticmethod
    def backward(ctx: Any, dprobs_NK: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_sBD, weight, ids_NK = ctx.saved_tensors
        logits_NE = ctx.router.logits(x_sBD, weight)
        dlogits_NE = ctx.router.logits_grad(logits_NE, ids_NK, dprobs_NK)
        counts_BE = ctx.router.count_assignments_(ids_NK, x_sBD.shape[1], ctx.padding_N1)
        if ctx.forward_ctx.loss_grad is not None:
            ctx.router.add_aux_loss_grads_(dlogits_NE, logits_NE, counts_BE, ctx.padding_N1, ctx.forward_ctx)
        dbias = dlogits_NE.sum(0).to(weight.dtype) if ctx.has_bias else None
        dx_sBD = (dlogits_NE @ weight.to(dlogits_NE.dtype)).to(x_sBD.dtype).view_as(x_sBD)
        if ctx.main_grad is None:
            dweight = (dlogits_NE.T @ x_sBD.flatten(0, 1).to(dlogits_NE.dtype)).to(weight.dtype)
        else:
            grad, overwrite = ctx.main_grad.accumulator()
            x_ND = x_sBD.flatten(0, 1).to(grad.dtype)
            accumulate_weight_grad_(grad, dlogits_NE.to(grad.dtype), x_ND, overwrite=overwrite)
            dweight = None
        return dx_sBD, dweight, dbias, None, None, None


class Router(nn.Module):
    """The router of one layer.

    loss_coeffs    coefficients of the active auxiliary losses
    logit_bias     [E] added to the logits, or None
    expert_bias    [E] added to the scores for the selection, or None; state without a gradient
                   (training/expert_balancer.py)
    expert_counts  [E] assignments of this rank's tokens to each expert
    global_counts  [E] assignments of the tokens of all tp, cp and dp ranks, with global_aux_loss

    Counts include all backwards since they were set to zero.
    """

    def __init__(self, make_param: ParamFactory, name: str, model: ModelConfig, layer: int):
        super().__init__()
        self.name = name
        self.model = model
        self.layer = layer
        self.seed = make_param.seed
        self.tp = make_param.mesh.tp
        self.cp = make_param.mesh.cp
        self.dp = make_param.mesh.dp
        self.num_experts = model.num_experts or 0
        self.topk = model.moe_router_topk
        self.sinkhorn = "sinkhorn" in model.moe_router_load_balancing_type
        self.sigmoid = self.topk == 1 if self.sinkhorn else model.moe_router_score_function == "sigmoid"
        self.pre_softmax = model.moe_router_pre_softmax or self.sinkhorn
        self.loss_coeffs = model.router_loss_coeffs
        E = self.num_experts
        device = torch.device("meta") if make_param.meta else make_param.mesh.device
        weight = ParamSpec(
            name,
            (E, model.hidden_size),
            partial_grad_axes=("tp",),
            init=Normal(model.init_method_std),
            width_role="output",
        )
        self.weight = make_param(weight)
        logit_bias = ParamSpec(
            f"{name}.logit_bias", (E,), partial_grad_axes=("tp",), init=Constant(0.0), weight_decay=False
        )
        self.logit_bias = make_param(logit_bias) if model.add_bias_linear else None
        self.expert_bias = None
        if model.moe_router_enable_expert_bias:
            self.expert_bias = torch.zeros(E, dtype=torch.float32, device=device)
        self.expert_counts = torch.zeros(E, dtype=torch.int64, device=device)
        self.global_counts = torch.zeros_like(self.expert_counts)

    def extra_repr(self) -> str:
        return shapes(self)

    def forward(self, x_sBD: Tensor, batch: Batch, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Return probs_NK in fp32 or fp64, and ids_NK, of this rank's N = s * B tokens.

        If ctx.loss_grad is None, there are no auxiliary losses.
        """
        return _RouterFunction.apply(x_sBD, self.weight, self.logit_bias, self, batch, ctx)  # type: ignore[return-value]

    def buffer_shards(self) -> list[TensorShard]:
        """Return the bias, which every rank has in full, as a shard of a checkpoint: a view that loading may write."""
        if self.expert_bias is None:
            return []
        bias_E = self.expert_bias
        shape = tuple(bias_E.shape)
        is_owner = self.tp.is_first and self.cp.is_first and self.dp.is_first
        return [TensorShard(f"state/{self.name}.bias", shape, Box((0,), shape), range(len(bias_E)), bias_E, is_owner)]

    def logits(self, x_sBD: Tensor, weight: Tensor) -> Tensor:
        """Return logits_NE in fp32 or fp64."""
        dtype = torch.float64 if self.model.moe_router_dtype == "fp64" else accum_dtype(x_sBD)
        logits_NE = x_sBD.flatten(0, 1).to(dtype) @ weight.to(dtype).T
        return logits_NE if self.logit_bias is None else logits_NE + self.logit_bias.to(dtype)

    def scores(self, logits_NE: Tensor) -> Tensor:
        """Return scores_NE: the sigmoid, the softmax over all experts, or the logits."""
        if self.sigmoid:
            return logits_NE.sigmoid()
        return logits_NE.softmax(-1) if self.pre_softmax else logits_NE

    def select_experts(self, scores_NE: Tensor, bias_E: Tensor | None) -> Tensor:
        """Return ids_NK, the best expert first."""
        if bias_E is not None:
            scores_NE = scores_NE + bias_E
        groups = self.model.moe_router_num_groups
        top_groups = self.model.moe_router_group_topk
        if groups is not None and top_groups is not None:
            by_group = scores_NE.unflatten(-1, (groups, -1))
            group_scores = by_group.topk(self.model.group_score_topk or 1, -1).values.sum(-1)
            excluded = stable_topk(group_scores, groups)[:, top_groups:]
            excluded = excluded[..., None].expand(-1, -1, by_group.shape[2])
            scores_NE = by_group.scatter(1, excluded, -torch.inf).flatten(1)
        return stable_topk(scores_NE, self.topk)

    def probabilities(self, scores_NE: Tensor, ids_NK: Tensor) -> Tensor:
        """Return probs_NK of the selected experts."""
        selected = scores_NE.gather(1, ids_NK)
        if self.sigmoid:
            selected = selected / (selected.sum(-1, keepdim=True) + EPS) if self.topk > 1 else selected
        elif not self.pre_softmax:
            selected = selected.softmax(-1)
        return selected * self.model.moe_router_topk_scaling_factor

    def logits_grad(self, logits_NE: Tensor, ids_NK: Tensor, dprobs_NK: Tensor) -> Tensor:
        """Return dlogits_NE."""
        scores_NE = self.scores(logits_NE)
        dselected = dprobs_NK * self.model.moe_router_topk_scaling_factor
        selected = scores_NE.gather(1, ids_NK)
        zeros = torch.zeros_like(logits_NE)
        if self.sigmoid:
            if self.topk > 1:
                total = selected.sum(-1, keepdim=True) + EPS
                dselected = (dselected - (dselected * selected).sum(-1, keepdim=True) / total) / total
            return zeros.scatter_(1, ids_NK, dselected * selected * (1 - selected))
        if not self.pre_softmax:
            return zeros.scatter_(1, ids_NK, _softmax_backward(selected.softmax(-1), dselected))
        return _softmax_backward(scores_NE, zeros.scatter_(1, ids_NK, dselected))

    def random_scores(self, x_sBD: Tensor, batch: Batch, step: int) -> Tensor:
        """Return a random number for each token and expert, [N, E], a function of the token's position in the run."""
        s, device = x_sBD.shape[0], x_sBD.device
        positions = batch.token_positions(self.tp, s)
        if not isinstance(positions, Tensor):
            positions = torch.arange(positions, positions + s, device=device)
        experts = torch.arange(self.num_experts, device=device)
        key = fold_in(self.seed, step, self.layer, RNG_SITE_ROUTER)
        return hash_coordinates(key, positions[:, None, None], batch.sample_ids_B[:, None], experts).flatten(0, 1)

    def padding(self, x_sBD: Tensor, batch: Batch) -> Tensor | None:
        """Return whether each of this rank's tokens is padding, [N, 1]; None if there is no padding."""
        if batch.padding_SB is None:
            return None
        return batch.padding_SB[self.tp.shard_slice(x_sBD.shape[0])].reshape(-1, 1)

    def sinkhorn_scores(self, logits_NE: Tensor, padding_N1: Tensor | None) -> Tensor:
        """Return the scores of this rank's tokens, balanced over the micro-batch's tokens of all tp and cp ranks.

        Padding is not part of the balance; its scores are its logits. Collective over tp and cp.
        """
        N = len(logits_NE)
        start = 0
        local_logits_NE = logits_NE
        if padding_N1 is not None:  # sent as one more column
            logits_NE = torch.cat((logits_NE, (~padding_N1).to(logits_NE.dtype)), 1)
        for axis in (self.tp, self.cp):
            start += axis.shard_start(len(logits_NE))
            logits_NE = start_all_gather(logits_NE, axis).wait()
        if padding_N1 is None:
            return sinkhorn(logits_NE)[start : start + N]
        tokens = logits_NE[:, -1].bool()
        logits_NE = logits_NE[:, :-1]
        balanced_NE = torch.zeros_like(logits_NE)
        balanced_NE[tokens] = sinkhorn(logits_NE[tokens])
        return balanced_NE[start : start + N].where(tokens[start : start + N, None], local_logits_NE)

    def count_assignments_(self, ids_NK: Tensor, samples: int, padding_N1: Tensor | None) -> Tensor:
        """Add the assignments to `expert_counts`, and return the counts of each sample, [B, E]."""
        E = self.num_experts
        sample_N = torch.arange(len(ids_NK), device=ids_NK.device) % samples
        bins_NK = sample_N[:, None] * E + ids_NK
        ones_NK = torch.ones_like(bins_NK)
        if padding_N1 is not None:
            ones_NK = ones_NK.masked_fill_(padding_N1, 0)
        counts = self.expert_counts.new_zeros(samples * E)
        counts_BE = counts.scatter_add_(0, bins_NK.flatten(), ones_NK.flatten()).view(samples, E)
        self.expert_counts += counts_BE.sum(0)
        return counts_BE

    def add_aux_loss_grads_(
        self, dlogits_NE: Tensor, logits_NE: Tensor, counts_BE: Tensor, padding_N1: Tensor | None, ctx: ForwardContext
    ) -> None:
        """Add the gradients of the auxiliary losses to `dlogits_NE`, and the losses without coefficients to their sums.

        Collective over tp and cp, and with global_aux_loss over dp.
        """
        sigmoid = self.sigmoid
        coeffs = self.loss_coeffs
        assert ctx.loss_grad is not None
        weight = ctx.loss_grad * ctx.token_weight

        def add_loss(kind: str, loss: Tensor) -> None:
            if ctx.loss_sums is not None:
                ctx.loss_sums.add_layer_loss(ROUTER_LOSSES[kind], self.layer, loss)

        def without_padding(values: Tensor) -> Tensor:
            return values if padding_N1 is None else values.masked_fill(padding_N1, 0)

        if balance_losses := [kind for kind in ROUTER_LOSSES if kind in coeffs and kind != "z_loss"]:
            for axis in (self.tp, self.cp):
                counts_BE = start_all_gather(counts_BE[None], axis).wait().sum(0)
            if "global_aux_loss" in coeffs:
                self.global_counts += start_all_gather(counts_BE.sum(0)[None], self.dp).wait().sum(0)
            scores_NE = logits_NE.sigmoid() if sigmoid else logits_NE.softmax(-1)
            total_N1 = scores_NE.sum(-1, keepdim=True) + EPS
            P_NE = scores_NE / total_N1 if sigmoid else scores_NE
            dP_BE = torch.zeros_like(counts_BE, dtype=P_NE.dtype)
            P_BE = without_padding(P_NE).view(-1, *counts_BE.shape).sum(0)
            for kind in balance_losses:
                counts = {
                    "aux_loss": counts_BE.sum(0),
                    "seq_aux_loss": counts_BE,
                    "global_aux_loss": self.global_counts,
                }[kind]
                f = counts / counts.to(P_BE.dtype).mean(-1, keepdim=True).clamp(min=EPS)  # factor of P
                add_loss(kind, (P_BE * f).sum())
                dP_BE += coeffs[kind] * weight * f
            dloss_NE = _softmax_backward(P_NE, dP_BE.repeat(len(P_NE) // len(P_BE), 1))
            dlogits_NE += without_padding(dloss_NE * (1 - scores_NE) if sigmoid else dloss_NE)
        if "z_loss" in coeffs:
            lse_N1 = logits_NE.logsumexp(-1, keepdim=True)
            counted_N1 = without_padding(lse_N1)
            add_loss("z_loss", counted_N1.square().sum())
            dlogits_NE += 2 * coeffs["z_loss"] * weight * counted_N1 * (logits_NE - lse_N1).exp()
