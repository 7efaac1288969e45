"""Muon, LAMB and LARS on whole tensors in one process, as their papers have them; Newton-Schulz by singular values."""

import torch
from torch import Tensor

from megalite.kernels.newton_schulz import coefficients
from megalite.optim.lamb import Lamb, Lars
from megalite.optim.muon import Muon
from megalite.optim.rule import Rule

TWO_MOMENTS = ("exp_avg", "exp_avg_sq")
State = dict[str, Tensor]


def orthogonalised(u: Tensor, rule: Muon) -> Tensor:
    left, s, right = torch.linalg.svd(u, full_matrices=False)
    s = s / s.norm()
    for a, b, c in coefficients(rule.coefficient_type, rule.steps):
        s = a * s + b * s**3 + c * s**5
    m, n = u.shape
    scales = {"spectral": max(m, n), "shape_scaling": max(1, m / n), "unit_rms_norm": m / n}
    return left @ torch.diag(s) @ right * scales[rule.scale_mode] ** 0.5 * rule.extra_scale


def step_(rule: Rule, w: Tensor, g: Tensor, state: State, *, lr: float, decay: float, step: int) -> None:
    """Of one tensor; `state` is made by the first."""
    if isinstance(rule, Muon):
        m = state["momentum_buffer"] = rule.momentum * state.get("momentum_buffer", 0) + (1 - rule.momentum) * g
        u = (1 - rule.momentum) * g + rule.momentum * m if rule.nesterov else m
        w -= lr * decay * w + lr * orthogonalised(u, rule)
    elif isinstance(rule, Lars):
        norms = w.norm(), g.norm()
        ratio = rule.trust * norms[0] / (norms[1] + decay * norms[0]) if min(norms) > 0 else 1
        v = state["velocity"] = rule.momentum * state.get("velocity", 0) + lr * ratio * (g + decay * w)
        w -= v
    else:
        betas, powers = rule.betas, (g, g * g)  # type: ignore[attr-defined]
        for name, b, power in zip(TWO_MOMENTS, betas, powers, strict=True):
            state[name] = b * state.get(name, 0) + (1 - b) * power
        first, second = (state[name] / (1 - b**step) for name, b in zip(TWO_MOMENTS, betas, strict=True))
        u = first / (second.sqrt() + rule.eps) + decay * w  # type: ignore[attr-defined]
        norms = w.norm(), u.norm()
        w -= lr * u * (norms[0] / norms[1] if isinstance(rule, Lamb) and min(norms) > 0 else 1)
