"""Cases of tools/bench/kernels.py: cross entropy, also with the head's matmul; and the update of the weights and the
gradient norm, over flat tensors."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels import adamw, cross_entropy, grad_norm
from megalite.nn import loss
from megalite.parallel.mesh import Mesh
from tools.bench.kernel_case import Case, Fn, Sizes, Swept, Work, constants, liger, own_first

TILE = {"COLUMNS": (1024, 2048, 4096, 8192, 16384), "WARPS": (2, 4, 8, 16, 32)}


def plain(logits_NV: Tensor, labels_N: Tensor, reduction: str = "none") -> Tensor:
    """As training code has it: in fp32."""
    return F.cross_entropy(logits_NV.float(), labels_N, reduction=reduction)


# its gradient is written over its input in forward; the sum, since it has no other for a batch
LIGER = liger("LigerCrossEntropyFunction", None, -100, 0.0, 0.0, "sum")
LIGER_WITH_HEAD = liger("LigerFusedLinearCrossEntropyFunction", None, None, -100, 0.0, 0.0, "sum")


def logits(s: Sizes) -> list[Tensor]:
    return [s.normal(s.tokens, s.vocab_size), s.labels()]


def with_head(s: Sizes) -> list[Tensor]:
    scale = s.hidden_size**-0.5
    return [s.rows(), s.normal(s.vocab_size, s.hidden_size) * scale, s.labels()]


def for_gradient(s: Sizes) -> list[Tensor]:
    """Logits, lse, labels and the gradient of each token's loss."""
    logits_NV, labels_N = logits(s)
    lse_N = cross_entropy.shard_stats(logits_NV, labels_N, 0, s.vocab_size)[0].clone()
    return [logits_NV, lse_N, labels_N, torch.ones_like(lse_N)]


def ours(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    stats_2N = cross_entropy.shard_stats(logits_NV, labels_N, 0, logits_NV.shape[1])
    return stats_2N[0] - stats_2N[1]


def ours_gradient(logits_NV: Tensor, lse_N: Tensor, labels_N: Tensor, dloss_N: Tensor) -> Tensor:
    """Over the logits, so that the next call finds other values; they stay finite."""
    return cross_entropy.shard_grad_(logits_NV, lse_N, labels_N, 0, dloss_N, logits_NV.shape[1])


def ours_both(logits_NV: Tensor, labels_N: Tensor, dloss_N: Tensor) -> Tensor:
    """As a rank that has the whole vocabulary calls it."""
    lse_N, target_N = cross_entropy.stats_and_grad_(logits_NV, labels_N, dloss_N, logits_NV.shape[1])
    return lse_N - target_N


class MainGrad:
    """A training run's gradient buffer for one weight: the sum over micro-batches, in fp32."""

    def __init__(self, weight: Tensor):
        self.sum = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        self.empty = True

    def accumulator(self) -> tuple[Tensor, bool]:
        empty, self.empty = self.empty, False
        return self.sum, empty


def ours_with_head(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    """As the trainer calls it: the weight's gradient is added to its buffer, which is not part of what this takes."""
    if not hasattr(weight_VD, "sink"):
        weight_VD.sink = MainGrad(weight_VD)  # type: ignore[attr-defined]
    x_SBD, labels_SB, tp = x_ND[:, None], labels_N[:, None], Mesh.single_process().tp
    return loss.linear_cross_entropy(x_SBD, weight_VD, labels_SB, None, tp, weight_VD.shape[0], loss_grad=1.0)


def tiles(s: Sizes) -> Swept:
    return constants(cross_entropy, TILE)


def chunks(s: Sizes) -> Swept:
    """The sizes of a chunk of the head's logits to try, in bytes."""
    sizes, kind = cross_entropy.CHUNK_BYTES, s.device.type
    for size in own_first(sizes[kind], (n << 20 for n in (128, 256, 512, 1024, 2048))):
        yield {"chunk_mib": size >> 20}, sizes, {kind: size}


def loss_cases() -> list[Case]:
    def passes(n: int) -> Work:
        return Work(f"{n} N V e", lambda s: n * s.tokens * s.vocab_size * s.dtype.itemsize)

    head = Work(
        "6 N D V FLOPs; x, W, dx, dW once",
        lambda s: 2 * (s.tokens + s.vocab_size) * s.hidden_size * s.dtype.itemsize,
        lambda s: 6.0 * s.tokens * s.hidden_size * s.vocab_size,
    )
    plain_with_head: Fn = lambda x, weight, labels: plain(x @ weight.T, labels, "sum")  # noqa: E731
    return [
        Case("cross_entropy", "forward", passes(1), logits, ours, plain, tiles, axis="vocab_size"),
        Case(
            *("cross_entropy", "backward", passes(2), logits, ours_gradient, plain, tiles),
            direct="ours",
            axis="vocab_size",
            own_inputs={"megalite": for_gradient},
        ),
        Case(  # Liger's forward makes the gradient too, so it can only stand beside both halves
            *("cross_entropy", "both", passes(3), logits, ours_both, plain, tiles),
            direct="ours",
            axis="vocab_size",
            peers={"liger": LIGER},
            own_inputs={"megalite": lambda s: [*logits(s), torch.ones(s.tokens, device=s.device)]},
        ),
        Case(
            *("linear_cross_entropy", "both", head, with_head, ours_with_head, plain_with_head, chunks),
            axis="vocab_size",
            peers={"liger": LIGER_WITH_HEAD},
        ),
    ]


HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 10}
ADAMW_TILE = {"ELEMENTS": (512, 1024, 2048, 4096), "WARPS": (2, 4, 8)}
NORM_TILE = {"ELEMENTS": (2048, 4096, 8192), "WARPS": (4, 8, 16), "PROGRAMS": (2, 4, 8)}


def for_adamw(s: Sizes, moments: torch.dtype) -> list[Tensor]:
    """Weight, gradient, moments and the bf16 copy."""
    w, g, m, v = (torch.randn(s.numel, device=s.device) for _ in range(4))
    return [w, g.mul_(0.1), m.mul_(0.1).to(moments), v.square_().mul_(0.01).to(moments), w.bfloat16()]


def ours_adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, copy: Tensor) -> Tensor:
    adamw.adamw_(w, g, m, v, **HYPER, model_param=copy)
    return copy


def plain_adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, copy: Tensor) -> Tensor:
    """torch.optim.AdamW(fused=True), and the copy."""
    torch.ops.aten._fused_adamw_(
        *([w], [g], [m], [v], [], [torch.full((), 10.0, device=w.device)]),
        **{"lr": HYPER["lr"], "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8},
        amsgrad=False,
        maximize=False,
    )
    return copy.copy_(w)


def adamw_case(name: str, moments: torch.dtype, per_weight: int, torchs: Fn | None) -> Case:
    make, tile = partial(for_adamw, moments=moments), lambda s: constants(adamw, ADAMW_TILE)
    work = Work(f"{per_weight} bytes per weight", lambda s: per_weight * s.numel)
    return Case(name, "forward", work, make, ours_adamw, torchs, tile, axis="numel", compiles=False)


def flat_cases() -> list[Case]:
    def gradient(s: Sizes) -> list[Tensor]:
        return [torch.randn(s.numel, device=s.device)]

    work = Work("4 bytes per element", lambda s: 4 * s.numel)
    return [
        adamw_case("adamw", torch.float32, 30, plain_adamw),
        adamw_case("adamw bf16 moments", torch.bfloat16, 22, None),  # torch has none
        Case(
            "grad_norm",
            "forward",
            work,
            gradient,
            grad_norm.sum_of_squares,
            lambda flat: torch.linalg.vector_norm(flat).square(),
            lambda s: constants(grad_norm, NORM_TILE),
            axis="numel",
            compiles=False,
        ),
    ]
