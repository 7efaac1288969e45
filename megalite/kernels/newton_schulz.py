"""Newton-Schulz: a matrix with the singular vectors of the given one, and singular values near 1.

    X_0 = G / |G|_F;    X <- a X + b (X X^T) X + c (X X^T)^2 X,   which makes  s <- a s + b s^3 + c s^5  of each
                                                                  singular value, and leaves the vectors

`simple` (K. Jordan, Muon, 2024) has one set of coefficients and ends in 0.7 .. 1.2; `quintic` are five steps tuned
together (modded-nanogpt, train_gpt_medium.py); `polar_express` the best for each step after those before it, of which
any number may be taken (arXiv:2505.16932, algorithm 1, with its safety factor), the last repeated.

FLOPs of a step on [m, n], m <= n: 4 m^2 n + 2 m^3, all of it matmuls, of many matrices of one shape at once. In bf16
where asked: singular values near 1 are all that is wanted, not their last bits. A CPU without instructions for bf16
does all steps in fp32 (kernels/dispatch.py: upcasts).
"""

from typing import Literal

import torch
from torch import Tensor

from megalite.common.tables import load_table
from megalite.kernels.dispatch import upcasts

Coefficients = tuple[float, float, float]
CoefficientType = Literal["simple", "quintic", "polar_express"]
EPS = 1e-7  # of the norm: a gradient of zeros stays zeros
COEFFICIENTS: dict[str, tuple[Coefficients, ...]] = {
    kind: tuple((a, b, c) for a, b, c in steps) for kind, steps in load_table(__file__, "newton_schulz").items()
}


def coefficients(coefficient_type: CoefficientType, steps: int) -> list[Coefficients]:
    """Of each step. Raises ValueError where `steps` does not fit the kind.

    >>> len(coefficients("quintic", 10)), coefficients("polar_express", 10)[-1]
    (10, (1.875, -1.25, 0.375))
    """
    schedule = COEFFICIENTS[coefficient_type]
    if coefficient_type != "quintic":
        return [*schedule, *schedule[-1:] * steps][:steps]
    if steps % len(schedule):
        raise ValueError(f"quintic comes in {len(schedule)} steps that belong together, and {steps} is no multiple")
    return [*schedule] * (steps // len(schedule))


def newton_schulz(x_bmn: Tensor, steps: list[Coefficients]) -> Tensor:
    """[batch, m, n] -> the same, in the same dtype. The norms are taken in fp32 at least."""
    wide = torch.promote_types(x_bmn.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x_bmn, dim=(-2, -1), keepdim=True, dtype=wide).clamp_min(EPS)
    x = (x_bmn / norms).to(x_bmn.dtype)
    x = x.float() if upcasts(x) else x
    transposed = x.shape[-2] > x.shape[-1]
    x = x.mT if transposed else x
    for a, b, c in steps:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if transposed else x).to(x_bmn.dtype)


def newton_schulz_flops(m: int, n: int, steps: int) -> int:
    """Of one matrix.

    >>> round(newton_schulz_flops(4096, 14336, 5) / 1e12, 1)
    5.5
    """
    short, long = sorted((m, n))
    return steps * (4 * short * short * long + 2 * short**3)
