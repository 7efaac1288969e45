"""The cases of tools/bench/kernels.py for cross entropy, AdamW and the gradient norm.

Cross entropy is measured alone and fused with the matmul of the head. AdamW and the norm work on flat tensors.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels import adamw, cross_entropy, grad_norm
from megalite.nn import loss
from megalite.parallel.mesh import Mesh
from tools.bench.kernel_case import (
    Candidates,
    Fn,
    KernelCase,
    ProblemSizes,
    TileCandidate,
    WorkModel,
    constant_candidates,
    current_first,
    liger,
)

# --- cross entropy

SOFTCAP = 30.0  # of Gemma 2
LOSS_TILE_VALUES = {"BLOCK_N": (1024, 2048, 4096, 8192, 16384), "NUM_WARPS": (2, 4, 8, 16, 32)}

# Liger's forward overwrites its input with the gradient. "sum", because it has no other reduction for a batch.
LIGER = liger("LigerCrossEntropyFunction", None, -100, 0.0, 0.0, "sum")
LIGER_WITH_HEAD = liger("LigerFusedLinearCrossEntropyFunction", None, None, -100, 0.0, 0.0, "sum")


def logits_and_labels(s: ProblemSizes) -> list[Tensor]:
    """Return logits and labels."""
    return [s.normal(s.tokens, s.vocab_size), s.labels()]


def loss_grad_inputs(s: ProblemSizes, softcap: float | None = None) -> list[Tensor]:
    """Return logits, lse, labels and the gradient of each token's loss."""
    logits_NV, labels_N = logits_and_labels(s)
    lse_N = cross_entropy.shard_stats(logits_NV, labels_N, 0, s.vocab_size, softcap)[0].clone()
    return [logits_NV, lse_N, labels_N, torch.ones_like(lse_N)]


def loss_and_grad_inputs(s: ProblemSizes) -> list[Tensor]:
    """Return logits, labels and the gradient of each token's loss."""
    return [*logits_and_labels(s), torch.ones(s.tokens, device=s.device)]


def head_inputs(s: ProblemSizes) -> list[Tensor]:
    """Return the head's input, its weight and labels."""
    scale = s.hidden_size**-0.5
    return [s.rows(), s.normal(s.vocab_size, s.hidden_size) * scale, s.labels()]


def torch_loss(logits_NV: Tensor, labels_N: Tensor, reduction: str = "none", softcap: float | None = None) -> Tensor:
    """Return the loss in fp32, like usual training code."""
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV.float() / softcap)
    return F.cross_entropy(logits_NV.float(), labels_N, reduction=reduction)


def torch_head_loss(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    return torch_loss(x_ND @ weight_VD.T, labels_N, "sum")


def loss_forward(logits_NV: Tensor, labels_N: Tensor, softcap: float | None = None) -> Tensor:
    stats_2N = cross_entropy.shard_stats(logits_NV, labels_N, 0, logits_NV.shape[1], softcap)
    return stats_2N[0] - stats_2N[1]


def loss_backward(
    logits_NV: Tensor, lse_N: Tensor, labels_N: Tensor, dloss_N: Tensor, softcap: float | None = None
) -> Tensor:
    """Overwrite the logits with the gradient. The next call finds other values, which stay finite."""
    return cross_entropy.shard_grad_(logits_NV, lse_N, labels_N, 0, dloss_N, logits_NV.shape[1], softcap=softcap)


def loss_both(logits_NV: Tensor, labels_N: Tensor, dloss_N: Tensor) -> Tensor:
    """Compute the loss and the gradient like a rank that has the full vocabulary."""
    lse_N, target_N = cross_entropy.stats_and_grad_(logits_NV, labels_N, dloss_N, logits_NV.shape[1])
    return lse_N - target_N


class FakeMainGrad:
    """The gradient accumulator of one weight, in fp32, as a training run has it."""

    def __init__(self, weight: Tensor):
        self.sum = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        self.empty = True

    def accumulator(self) -> tuple[Tensor, bool]:
        """Return the sum, and True if it is to be overwritten because nothing was added yet."""
        overwrite, self.empty = self.empty, False
        return self.sum, overwrite


def head_loss(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    """Compute the loss like the trainer, which adds the weight's gradient to an accumulator of its own."""
    if not hasattr(weight_VD, "main_grad"):  # main_grad_of reads this attribute
        weight_VD.main_grad = FakeMainGrad(weight_VD)  # type: ignore[attr-defined]
    x_SBD, labels_SB, tp = x_ND[:, None], labels_N[:, None], Mesh.single_process().tp
    return loss.linear_cross_entropy(x_SBD, weight_VD, labels_SB, None, tp, weight_VD.shape[0], loss_grad=1.0)[0]


def loss_tiles(s: ProblemSizes) -> Candidates:
    """Yield the tiles of cross entropy."""
    return constant_candidates(cross_entropy, LOSS_TILE_VALUES)


def logit_chunks(s: ProblemSizes) -> Candidates:
    """Yield sizes of a chunk of the head's logits."""
    table, device_type = cross_entropy.CHUNK_BYTES, s.device.type
    for size in current_first(table[device_type], [mib << 20 for mib in (128, 256, 512, 1024, 2048)]):
        yield TileCandidate({"chunk_mib": size >> 20}, table, {device_type: size})


def logit_passes(number: int) -> WorkModel:
    """Return the work of reading or writing the logits this number of times."""
    return WorkModel(f"{number} N V e", lambda s: number * s.tokens * s.vocab_size * s.dtype.itemsize)


HEAD_WORK = WorkModel(
    "6 N D V FLOPs; x, W, dx, dW once",
    lambda s: 2 * (s.tokens + s.vocab_size) * s.hidden_size * s.dtype.itemsize,
    lambda s: 6.0 * s.tokens * s.hidden_size * s.vocab_size,
)


def loss_cases() -> list[KernelCase]:
    """Return the cases of cross entropy. Liger's forward makes the gradient, too, so it is only a peer of both."""
    forward = KernelCase(
        "cross_entropy",
        "forward",
        logit_passes(1),
        logits_and_labels,
        loss_forward,
        torch_loss,
        loss_tiles,
        axis="vocab_size",
    )
    backward = replace(
        forward,
        direction="backward",
        work=logit_passes(2),
        megalite_fn=loss_backward,
        explicit_backward="megalite",
        peer_inputs={"megalite": loss_grad_inputs},
    )
    both = replace(
        backward,
        direction="both",
        work=logit_passes(3),
        megalite_fn=loss_both,
        peers={"liger": LIGER},
        peer_inputs={"megalite": loss_and_grad_inputs},
    )
    capped = {"op": "cross_entropy capped", "torch_fn": partial(torch_loss, softcap=SOFTCAP)}
    capped_forward = replace(forward, megalite_fn=partial(loss_forward, softcap=SOFTCAP), **capped)
    capped_backward = replace(
        backward,
        megalite_fn=partial(loss_backward, softcap=SOFTCAP),
        peer_inputs={"megalite": partial(loss_grad_inputs, softcap=SOFTCAP)},
        **capped,
    )
    with_head = KernelCase(
        "linear_cross_entropy",
        "both",
        HEAD_WORK,
        head_inputs,
        head_loss,
        torch_head_loss,
        logit_chunks,
        axis="vocab_size",
        peers={"liger": LIGER_WITH_HEAD},
    )
    return [forward, backward, both, capped_forward, capped_backward, with_head]


# --- AdamW and the gradient norm

ADAMW_OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 10}
ADAMW_TILE_VALUES = {"BLOCK_SIZE": (512, 1024, 2048, 4096), "NUM_WARPS": (2, 4, 8)}
NORM_TILE_VALUES = {"BLOCK_SIZE": (2048, 4096, 8192), "NUM_WARPS": (4, 8, 16), "PROGRAMS_PER_SM": (2, 4, 8)}


def adamw_inputs(s: ProblemSizes, moment_dtype: torch.dtype) -> list[Tensor]:
    """Return the main weight, its gradient, both moments and the bf16 copy of the weight."""
    weight, grad, m, v = (torch.randn(s.numel, device=s.device) for _ in range(4))
    m, v = m.mul_(0.1).to(moment_dtype), v.square_().mul_(0.01).to(moment_dtype)
    return [weight, grad.mul_(0.1), m, v, weight.bfloat16()]


def megalite_adamw(weight: Tensor, grad: Tensor, m: Tensor, v: Tensor, copy: Tensor) -> Tensor:
    adamw.adamw_(weight, grad, m, v, **ADAMW_OPTIONS, model_param=copy)
    return copy


def torch_adamw(weight: Tensor, grad: Tensor, m: Tensor, v: Tensor, copy: Tensor) -> Tensor:
    """Update like torch.optim.AdamW(fused=True), and copy the weight."""
    beta1, beta2 = ADAMW_OPTIONS["betas"]
    step = torch.full((), float(ADAMW_OPTIONS["step"]), device=weight.device)
    torch.ops.aten._fused_adamw_(
        [weight],
        [grad],
        [m],
        [v],
        [],
        [step],
        lr=ADAMW_OPTIONS["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=ADAMW_OPTIONS["weight_decay"],
        eps=ADAMW_OPTIONS["eps"],
        amsgrad=False,
        maximize=False,
    )
    return copy.copy_(weight)


def adamw_case(op: str, moment_dtype: torch.dtype, bytes_per_weight: int, torch_fn: Fn | None) -> KernelCase:
    """Return the case of AdamW with moments of this dtype."""
    return KernelCase(
        op,
        "forward",
        WorkModel(f"{bytes_per_weight} bytes per weight", lambda s: bytes_per_weight * s.numel),
        partial(adamw_inputs, moment_dtype=moment_dtype),
        megalite_adamw,
        torch_fn,
        lambda s: constant_candidates(adamw, ADAMW_TILE_VALUES),
        axis="numel",
        compiles=False,
    )


def update_cases() -> list[KernelCase]:
    """Return the cases of AdamW and of the gradient norm. torch has no fused AdamW with bf16 moments."""
    return [
        adamw_case("adamw", torch.float32, 30, torch_adamw),
        adamw_case("adamw bf16 moments", torch.bfloat16, 22, None),
        KernelCase(
            "grad_norm",
            "forward",
            WorkModel("4 bytes per element", lambda s: 4 * s.numel),
            lambda s: [torch.randn(s.numel, device=s.device)],
            grad_norm.sum_of_squares,
            lambda flat: torch.linalg.vector_norm(flat).square(),
            lambda s: constant_candidates(grad_norm, NORM_TILE_VALUES),
            axis="numel",
            compiles=False,
        ),
    ]
