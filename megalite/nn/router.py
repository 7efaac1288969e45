"""Chooses k of E experts for each token, and with what probability their outputs count.

    logits_NE = x W^T in fp32 (fp64)     scores = softmax | sigmoid | logits      chosen = top k of scores + bias
    softmax    probs = softmax over the chosen k; pre_softmax: the chosen scores of the softmax over all E
    sigmoid    probs = chosen scores / their sum (k > 1)                            all times `scaling`
    sinkhorn   chosen while training = top k of the logits, balanced over a micro-batch   arXiv:2102.03161, sec. 3.2

Every tp and cp rank routes the tokens that it has. The lower expert wins a tie, on every device. With groups
(arXiv:2412.19437, sec. 2.1.2) only experts of a token's best groups can be chosen.

Auxiliary losses come with the loss's weight times labels per token (Batch.token_weight), so that they are means over
tokens, however many labels count, whatever the layout. Padding is routed, and in no count, loss or balance.
With f_i the choices of expert i over their mean, and P the softmax, or the sigmoid over its sum, of each token n:
    aux_loss          sum_n sum_i f_i P_ni      f: of a micro-batch, over all ranks of tp and cp       arXiv:2101.03961
    seq_aux_loss      the same                  f: of each sample                                      arXiv:2412.19437
    global_aux_loss   the same                  f: of the step's micro-batches so far, of all of dp    arXiv:2501.11873
    z-loss            sum_n log(sum_i exp(logits_ni))^2                                                arXiv:2202.08906
global_aux_loss, Megatron-LM's, alone depends on how dp and accumulation share out a batch. Only f needs other ranks.
Gradients, sums and counts of choices are made in backward, which runs once for each micro-batch, so neither
recomputation nor evaluation counts. Logits are computed again there, not saved.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megalite.config.options import ModelConfig
from megalite.kernels.dispatch import accum_dtype
from megalite.kernels.dropout import fold_in, hash_coordinates
from megalite.kernels.weight_grad import accumulate_weight_grad_
from megalite.nn.micro_batch import RNG_SITE_ROUTER, Batch
from megalite.nn.parameter import ParamFactory, main_grad_of, shapes
from megalite.parallel.comm import start_all_gather
from megalite.parallel.spec import Box, Constant, Normal, ParamSpec, TensorShard

AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")
EPS = 1e-20  # added to sums of sigmoids, which may all be 0
SINKHORN_MAX_ITERS, SINKHORN_TOL = 1000, 1e-4  # of `sinkhorn`: at most so many, until factors of experts move by less


def stable_topk(scores: Tensor, k: int) -> Tensor:
    """The places of the k largest in the last dim, in order; topk leaves open which of equal ones comes first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()  # which are kept, not all E


def sinkhorn(logits_NE: Tensor) -> Tensor:
    """exp(logits) with rows and columns scaled until the sum of each token is 1/N and that of each expert 1/E."""
    cost_NE = (logits_NE - logits_NE.amax(1, keepdim=True)).exp()
    factor_E, tiny = cost_NE.new_ones(cost_NE.shape[1]), 1e-8
    for _ in range(1 if cost_NE.is_meta else SINKHORN_MAX_ITERS):
        factor_N1 = 1 / len(cost_NE) / ((cost_NE * factor_E).sum(1, keepdim=True) + tiny)
        before, factor_E = factor_E, 1 / len(factor_E) / ((cost_NE * factor_N1).sum(0) + tiny)
        if cost_NE.is_meta or (factor_E - before).abs().mean() < SINKHORN_TOL:
            break
    return cost_NE * factor_E * factor_N1


def _softmax_backward(P: Tensor, dP: Tensor) -> Tensor:
    return P * (dP - (dP * P).sum(-1, keepdim=True))


class _RouterFunction(Function):
    @staticmethod
    def forward(
        ctx: Any, x_sBD: Tensor, weight: Tensor, logit_bias: Tensor | None, router: "Router", where: Batch
    ) -> tuple[Tensor, Tensor]:
        ctx.router, ctx.sink = router, main_grad_of(weight)
        ctx.loss_weight = None if where.loss_grad is None else where.loss_grad * where.token_weight
        ctx.padding_N1 = padding_N1 = router.padding(x_sBD, where)
        logits_NE, force_balance = router.logits(x_sBD, weight), router.model.moe_router_force_load_balancing
        scores_NE = router.scores(logits_NE)
        selection_scores_NE = (
            router.sinkhorn_scores(logits_NE, padding_N1) if router.sinkhorn and router.training else scores_NE
        )
        ids_NK = router.select_experts(
            router.random_scores(x_sBD, where) if force_balance else selection_scores_NE,
            None if force_balance else router.bias,
        )
        ctx.save_for_backward(x_sBD, weight, ids_NK)
        ctx.biased = logit_bias is not None
        ctx.mark_non_differentiable(ids_NK)
        return router.probabilities(scores_NE, ids_NK), ids_NK

    @staticmethod
    def backward(ctx: Any, dprobs_NK: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_sBD, weight, ids_NK = ctx.saved_tensors
        logits_NE = ctx.router.logits(x_sBD, weight)
        dlogits_NE = ctx.router.logits_grad(logits_NE, ids_NK, dprobs_NK)
        counts_BE = ctx.router.count_assignments_(ids_NK, x_sBD.shape[1], ctx.padding_N1)
        if ctx.loss_weight is not None:
            ctx.router.add_aux_loss_grads_(dlogits_NE, logits_NE, counts_BE, ctx.padding_N1, ctx.loss_weight)
        dbias = dlogits_NE.sum(0).to(weight.dtype) if ctx.biased else None
        dx_sBD = (dlogits_NE @ weight.to(dlogits_NE.dtype)).to(x_sBD.dtype).view_as(x_sBD)
        if ctx.sink is None:
            dweight = (dlogits_NE.T @ x_sBD.flatten(0, 1).to(dlogits_NE.dtype)).to(weight.dtype)
        else:
            grad, begin = ctx.sink.accumulator()
            wide = (given.to(grad.dtype) for given in (dlogits_NE, x_sBD.flatten(0, 1)))
            accumulate_weight_grad_(grad, *wide, overwrite=begin)
            dweight = None
        return dx_sBD, dweight, dbias, None, None


class Router(nn.Module):
    """`coefficients`: of the LOSSES that are on. logit_bias_E: added to logits. bias_E: added to what choices are made
    by, state that no gradient trains (training/expert_balancer.py). None: there is none.
    counts_E: choices of each expert among this rank's tokens, of_dp_E: among those of all ranks of tp, cp and dp, if
    global_aux_loss is on; losses_4: LOSSES without coefficients, as sums over tokens, 0 of those that are off; all
    since they were set to zero, of all backwards."""

    def __init__(self, make: ParamFactory, name: str, model: ModelConfig, layer: int):
        super().__init__()
        self.name, self.model, self.layer, self.seed = name, model, layer, make.seed
        self.tp, self.cp, self.dp = make.mesh.tp, make.mesh.cp, make.mesh.dp
        self.experts, self.topk = model.num_experts or 0, model.moe_router_topk
        self.sinkhorn, z_loss = "sinkhorn" in model.moe_router_load_balancing_type, model.moe_z_loss_coeff
        self.sigmoid = self.topk == 1 if self.sinkhorn else model.moe_router_score_function == "sigmoid"
        self.pre_softmax = model.moe_router_pre_softmax or self.sinkhorn
        self.loss_coeffs = model.aux_loss_coeffs | ({"z_loss": z_loss} if z_loss else {})
        E, device = self.experts, torch.device("meta") if make.meta else make.mesh.device
        self.weight = make(
            ParamSpec(name, (E, model.hidden_size), partial_grad_axes=("tp",), init=Normal(model.init_method_std))
        )
        expert_bias = ParamSpec(
            f"{name}.logit_bias", (E,), partial_grad_axes=("tp",), init=Constant(0.0), weight_decay=False
        )
        self.logit_bias = make(expert_bias) if model.add_bias_linear else None
        self.bias = torch.zeros(E, dtype=torch.float32, device=device) if model.moe_router_enable_expert_bias else None
        self.expert_counts = torch.zeros(E, dtype=torch.int64, device=device)
        self.global_counts = torch.zeros_like(self.expert_counts)
        self.loss_sums = torch.zeros(len(AUX_LOSSES), dtype=torch.float64, device=device)

    def extra_repr(self) -> str:
        return shapes(self)

    def forward(self, x_sBD: Tensor, where: Batch) -> tuple[Tensor, Tensor]:
        """(probs_NK in fp32 or fp64, ids_NK) of this rank's tokens N = s * B. where.loss_weight None: there are no
        auxiliary losses."""
        return _RouterFunction.apply(x_sBD, self.weight, self.logit_bias, self, where)  # type: ignore[return-value]

    def buffer_shards(self) -> list[TensorShard]:
        """The bias, which every rank has whole, as a checkpoint holds it: a view that loading may write."""
        if self.bias is None:
            return []
        shape, first = tuple(self.bias.shape), self.tp.is_first and self.cp.is_first and self.dp.is_first
        return [
            TensorShard(f"state/{self.name}.bias", shape, Box((0,), shape), range(len(self.bias)), self.bias, first)
        ]

    def logits(self, x_sBD: Tensor, weight: Tensor) -> Tensor:
        dtype = torch.float64 if self.model.moe_router_dtype == "fp64" else accum_dtype(x_sBD)
        logits_NE = x_sBD.flatten(0, 1).to(dtype) @ weight.to(dtype).T
        return logits_NE if self.logit_bias is None else logits_NE + self.logit_bias.to(dtype)

    def scores(self, logits_NE: Tensor) -> Tensor:
        """What choices are made by."""
        if self.sigmoid:
            return logits_NE.sigmoid()
        return logits_NE.softmax(-1) if self.pre_softmax else logits_NE

    def select_experts(self, scores_NE: Tensor, bias_E: Tensor | None) -> Tensor:
        """ids_NK, the best first."""
        if bias_E is not None:
            scores_NE = scores_NE + bias_E
        groups, top_groups = self.model.moe_router_num_groups, self.model.moe_router_group_topk
        if groups is not None and top_groups is not None:
            by_group = scores_NE.unflatten(-1, (groups, -1))
            of_groups = by_group.topk(self.topk // top_groups, -1).values.sum(-1)
            left_out = stable_topk(of_groups, groups)[:, top_groups:]
            left_out = left_out[..., None].expand(-1, -1, by_group.shape[2])
            scores_NE = by_group.scatter(1, left_out, -torch.inf).flatten(1)
        return stable_topk(scores_NE, self.topk)

    def probabilities(self, scores_NE: Tensor, ids_NK: Tensor) -> Tensor:
        chosen = scores_NE.gather(1, ids_NK)
        if self.sigmoid:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + EPS) if self.topk > 1 else chosen
        elif not self.pre_softmax:
            chosen = chosen.softmax(-1)
        return chosen * self.model.moe_router_topk_scaling_factor

    def logits_grad(self, logits_NE: Tensor, ids_NK: Tensor, dprobs_NK: Tensor) -> Tensor:
        """dlogits_NE."""
        scores_NE, given = self.scores(logits_NE), dprobs_NK * self.model.moe_router_topk_scaling_factor
        chosen, nothing = scores_NE.gather(1, ids_NK), torch.zeros_like(logits_NE)
        if self.sigmoid:
            if self.topk > 1:
                total = chosen.sum(-1, keepdim=True) + EPS
                given = (given - (given * chosen).sum(-1, keepdim=True) / total) / total
            return nothing.scatter_(1, ids_NK, given * chosen * (1 - chosen))
        if not self.pre_softmax:
            return nothing.scatter_(1, ids_NK, _softmax_backward(chosen.softmax(-1), given))
        return _softmax_backward(scores_NE, nothing.scatter_(1, ids_NK, given))

    def random_scores(self, x_sBD: Tensor, where: Batch) -> Tensor:
        """A number for each token and expert, by the token's place in the run alone: [N, E]."""
        s, device = x_sBD.shape[0], x_sBD.device
        at = where.token_positions(self.tp, s)
        at_s = at if isinstance(at, Tensor) else torch.arange(at, at + s, device=device)
        num_experts = torch.arange(self.experts, device=device)
        key = fold_in(self.seed, where.step, self.layer, RNG_SITE_ROUTER)
        return hash_coordinates(key, at_s[:, None, None], where.sample_ids_B[:, None], num_experts).flatten(0, 1)

    def padding(self, x_sBD: Tensor, where: Batch) -> Tensor | None:
        """Whether each of this rank's tokens is padding, [N, 1]; None: none is."""
        if where.padding_SB is None:
            return None
        return where.padding_SB[self.tp.shard_slice(x_sBD.shape[0])].reshape(-1, 1)

    def sinkhorn_scores(self, logits_NE: Tensor, padding_N1: Tensor | None) -> Tensor:
        """What this rank's tokens are chosen by, balanced over the micro-batch's tokens of all ranks of tp and cp. A
        token of padding, which has no part in that, is chosen for by its logits."""
        N, at, own_NE = len(logits_NE), 0, logits_NE
        if padding_N1 is not None:  # travels as one more column
            logits_NE = torch.cat((logits_NE, (~padding_N1).to(logits_NE.dtype)), 1)
        for axis in (self.tp, self.cp):
            at += axis.shard_start(len(logits_NE))
            logits_NE = start_all_gather(logits_NE, axis).wait()
        if padding_N1 is None:
            return sinkhorn(logits_NE)[at : at + N]
        tokens, logits_NE = logits_NE[:, -1].bool(), logits_NE[:, :-1]
        balanced_NE = torch.zeros_like(logits_NE)
        balanced_NE[tokens] = sinkhorn(logits_NE[tokens])
        return balanced_NE[at : at + N].where(tokens[at : at + N, None], own_NE)

    def count_assignments_(self, ids_NK: Tensor, samples: int, padding_N1: Tensor | None) -> Tensor:
        """Add to the counts; returns those of each sample, [B, E]."""
        E = self.experts
        sample_N = torch.arange(len(ids_NK), device=ids_NK.device) % samples
        choices_NK = sample_N[:, None] * E + ids_NK
        ones_NK = torch.ones_like(choices_NK)
        if padding_N1 is not None:
            ones_NK = ones_NK.masked_fill_(padding_N1, 0)
        expert_counts = self.expert_counts.new_zeros(samples * E).scatter_add_(
            0, choices_NK.flatten(), ones_NK.flatten()
        )
        self.expert_counts += (counts_BE := expert_counts.view(samples, E)).sum(0)
        return counts_BE

    def add_aux_loss_grads_(
        self,
        dlogits_NE: Tensor,
        logits_NE: Tensor,
        counts_BE: Tensor,
        padding_N1: Tensor | None,
        weight: float | Tensor,
    ) -> None:
        """Add the gradients of the auxiliary losses, times `weight`, to `dlogits`, and the losses to their sums."""
        sigmoid, on = self.sigmoid, self.loss_coeffs

        def without_padding(values: Tensor) -> Tensor:
            return values if padding_N1 is None else values.masked_fill(padding_N1, 0)

        if chosen := [kind for kind in AUX_LOSSES[:-1] if kind in on]:
            for axis in (self.tp, self.cp):
                counts_BE = start_all_gather(counts_BE[None], axis).wait().sum(0)
            if "global_aux_loss" in on:
                self.global_counts += start_all_gather(counts_BE.sum(0)[None], self.dp).wait().sum(0)
            scores_NE = logits_NE.sigmoid() if sigmoid else logits_NE.softmax(-1)
            total_N1 = scores_NE.sum(-1, keepdim=True) + EPS
            P_NE = scores_NE / total_N1 if sigmoid else scores_NE
            dP_BE = torch.zeros_like(counts_BE, dtype=P_NE.dtype)
            P_BE = without_padding(P_NE).view(-1, *counts_BE.shape).sum(0)
            for kind in chosen:
                counts = {
                    "aux_loss": counts_BE.sum(0),
                    "seq_aux_loss": counts_BE,
                    "global_aux_loss": self.global_counts,
                }[kind]
                f = counts / counts.to(P_BE.dtype).mean(-1, keepdim=True).clamp(min=EPS)  # a token's P counts with
                self.loss_sums[AUX_LOSSES.index(kind)] += (P_BE * f).sum()
                dP_BE += on[kind] * weight * f
            selection_scores_NE = _softmax_backward(P_NE, dP_BE.repeat(len(P_NE) // len(P_BE), 1))
            dlogits_NE += without_padding(selection_scores_NE * (1 - scores_NE) if sigmoid else selection_scores_NE)
        if "z_loss" in on:
            lse_N1 = logits_NE.logsumexp(-1, keepdim=True)
            counted_N1 = without_padding(lse_N1)
            self.loss_sums[-1] += counted_N1.square().sum()
            dlogits_NE += 2 * on["z_loss"] * weight * counted_N1 * (logits_NE - lse_N1).exp()
