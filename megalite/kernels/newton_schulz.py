"""Newton-Schulz iteration: a matrix with the same singular vectors as the input, and singular values near 1.

    X_0 = G / |G|_F;    X <- a X + b (X X^T) X + c (X X^T)^2 X,   which maps each singular value
                                                                  s <- a s + b s^3 + c s^5 and keeps the vectors

`simple` (K. Jordan, Muon, 2024) has one set of coefficients; its singular values end between 0.7 and 1.2. `quintic` has
five steps that were tuned together (modded-nanogpt, train_gpt_medium.py). `polar_express` has the optimal coefficients
for each step after the previous ones (arXiv:2505.16932, algorithm 1, with its safety factor); it may have any number of
steps, with the last one repeated.

FLOPs of a step on [m, n], m <= n: 4 m^2 n + 2 m^3, all in matmuls, batched over matrices of the same shape. It may run
in bf16, as singular values only need to be near 1 and not accurate to the last bit. A CPU without instructions for bf16
computes all steps in fp32 (kernels/dispatch.py: upcasts).
"""

from typing import Literal

import torch
from torch import Tensor

from megalite.common.tables import load_table
from megalite.kernels.dispatch import upcasts

Coefficients = tuple[float, float, float]
CoefficientType = Literal["simple", "quintic", "polar_express"]
EPS = 1e-7  # min norm, so that the result for a zero gradient is zero
COEFFICIENTS: dict[str, tuple[Coefficients, ...]] = {
    kind: tuple((a, b, c) for a, b, c in steps) for kind, steps in load_table(__file__, "newton_schulz").items()
}


def coefficients(coefficient_type: CoefficientType, steps: int) -> list[Coefficients]:
    """Return the coefficients of each step.

    Raises:
        ValueError: if the coefficient type does not support this number of steps.

    >>> len(coefficients("quintic", 10)), coefficients("polar_express", 10)[-1]
    (10, (1.875, -1.25, 0.375))
    """
    schedule = COEFFICIENTS[coefficient_type]
    if coefficient_type != "quintic":
        repeated_last = [schedule[-1]] * steps
        return [*schedule, *repeated_last][:steps]
    if steps % len(schedule):
        raise ValueError(f"steps={steps} is not a multiple of {len(schedule)}, the length of quintic's schedule")
    return list(schedule) * (steps // len(schedule))


def newton_schulz(x_bmn: Tensor, steps: list[Coefficients]) -> Tensor:
    """Orthogonalize a batch of matrices [batch, m, n]; the result has the same shape and dtype.

    The norms are computed in fp32 or higher precision.
    """
    norm_dtype = torch.promote_types(x_bmn.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x_bmn, dim=(-2, -1), keepdim=True, dtype=norm_dtype).clamp_min(EPS)
    x = (x_bmn / norms).to(x_bmn.dtype)
    x = x.float() if upcasts(x) else x
    transposed = x.shape[-2] > x.shape[-1]
    x = x.mT if transposed else x
    for a, b, c in steps:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if transposed else x).to(x_bmn.dtype)


def newton_schulz_flops(m: int, n: int, steps: int) -> int:
    """Return the FLOPs of all steps for one matrix [m, n].

    >>> round(newton_schulz_flops(4096, 14336, 5) / 1e12, 1)
    5.5
    """
    short, long = sorted((m, n))
    return steps * (4 * short * short * long + 2 * short**3)
