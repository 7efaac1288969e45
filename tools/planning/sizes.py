"""What a model's state takes on a device, by rule: tables of the ZeRO stages and of sizes (arXiv:1910.02054, fig. 1).

              weights + gradients + optimizer     stage 1 divides the optimizer over dp, 2 the gradients too, 3 all
    fp32      4 + 4 + 8                           weights are their own main weights; two moments
    bf16      2 + 4 + 12                          gradients in fp32, main weights and two moments

The runtime has stages 0 (--no-use-distributed-optimizer) and 1; the others are shown to compare with other programs.
The bytes of an element are those of the runtime: plan/holding.py: element_bytes.

>>> [round(per_device(7_000_000_000, 4, stage, torch.float32) / 1e9) for stage in range(4)]
[112, 70, 49, 28]
>>> per_device(1, 8, 1, torch.bfloat16) == 6 + 12 / 8
True
"""

from __future__ import annotations

import torch

from megalite.plan.holding import element_bytes

STAGES = {0: "", 1: "", 2: "not in megalite", 3: "not in megalite"}
PARAMETERS_B = (1, 3, 7, 13, 30, 70, 100)  # of the table, 10^9


def per_device(parameters: int, dp: int, stage: int, dtype: torch.dtype) -> float:
    """Bytes of state on each of `dp` devices; AdamW in fp32."""
    weight, gradient, optimizer = element_bytes(dtype, ("fp32", "fp32"))
    parts = zip((weight, gradient, optimizer), (3, 2, 1), strict=True)
    return parameters * sum(size / (dp if stage >= first else 1) for size, first in parts)


def zero_rows(parameters: int, dp: int) -> list[tuple[str, ...]]:
    """A table of GB per device, its head first."""
    rows: list[tuple[str, ...]] = [("ZeRO stage", "divided over dp", "fp32", "bf16", "")]
    divided = ("nothing", "optimizer", "and gradients", "and weights")
    for stage, missing in STAGES.items():
        sizes = (per_device(parameters, dp, stage, dtype) / 1e9 for dtype in (torch.float32, torch.bfloat16))
        rows.append((str(stage), divided[stage], *(f"{size:,.1f}" for size in sizes), missing))
    return rows


def size_rows(dtype: torch.dtype) -> list[tuple[str, ...]]:
    """A table of GB of one device that holds all of the state."""
    weight, gradient, optimizer = element_bytes(dtype, ("fp32", "fp32"))
    rows: list[tuple[str, ...]] = [("parameters", "weights", "gradients", "optimizer", "all")]
    for n in PARAMETERS_B:
        sizes = (weight * n, gradient * n, optimizer * n, (weight + gradient + optimizer) * n)
        rows.append((f"{n}B", *(f"{size:,}" for size in sizes)))
    return rows
