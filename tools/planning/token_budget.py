"""What is known of a model by rules: how many tokens it is to be trained on and what that comes to (steps, days, device
hours, money), and what its state takes on a device, by ZeRO stage and by size (arXiv:1910.02054, fig. 1).

    tokens       20 per parameter unless they are given (arXiv:2203.15556, table 3: 20.2 at 400 M to 21.6 at 67 B)
    parameters   of experts those that a token uses
    FLOPs        6 N D, the rule (arXiv:2001.08361, sec. 2.1, N without embeddings; here with them, as mostly used),
                 and the exact count, scores and head included (megalite/planning/layer_kinds.py: model_flops)
    ZeRO stage   1 divides the optimizer over dp, 2 the gradients too, 3 all

>>> budget = Budget(active=70_000_000_000, tokens=1_400_000_000_000, flops_per_token=4.5e11)
>>> f"{budget.rule_flops:.3g} {budget.exact_flops:.3g}"  # Chinchilla: 5.88e23 in its table 1
'5.88e+23 6.3e+23'
>>> budget.steps(BatchSizes.constant(1024), 4096), round(budget.days(1e6), 1)
(333787, 16.2)
>>> [round(per_device(7_000_000_000, 4, stage, torch.float32) / 1e9) for stage in range(4)]
[112, 70, 49, 28]
>>> [per_device(7_000_000_000, 4, stage, torch.bfloat16) / 1e9 for stage in range(4)]
[126.0, 63.0, 42.0, 31.5]
>>> per_device(7_000_000_000, 8, 3, torch.float32) / 1e9
14.0
>>> per_device(1, 8, 1, torch.bfloat16) == 6 + 12 / 8  # weights 2, gradients 4, main weights and two moments 12
True
"""

import contextlib
import re
from dataclasses import replace
from typing import NamedTuple

import torch

from megalite.planning.batch_size import BatchSizeSchedule
from megalite.planning.memory import SHARDED_BY_STAGE
from megalite.planning.model_state import ShardCounts, bytes_per_element

TOKENS_PER_PARAMETER = 20
MOST_EPOCHS = 4  # up to which repeated tokens are worth about as much as new ones (arXiv:2305.16264, sec. 6)
DAY_S = 86_400


class Budget(NamedTuple):
    """active: parameters that a token uses, each once. flops_per_token: model FLOPs of forward and backward."""

    active: int
    tokens: int
    flops_per_token: float

    @property
    def rule_flops(self) -> float:
        return 6.0 * self.active * self.tokens

    @property
    def exact_flops(self) -> float:
        return self.flops_per_token * self.tokens

    def steps(self, sizes: BatchSizeSchedule, seq_length: int) -> int:
        """The steps that the budget takes in batches of `sizes`; the last batch may go beyond the budget."""
        return max(1, replace(sizes, keep_last_batch=True).num_steps_for(-(-self.tokens // seq_length)))

    def days(self, tokens_per_s: float) -> float:
        return self.tokens / tokens_per_s / DAY_S

    def device_hours(self, tokens_per_s: float, devices: int) -> float:
        return self.tokens / tokens_per_s / 3600 * devices

    def epochs(self, data_tokens: int) -> float:
        return self.tokens / data_tokens


def chinchilla(parameters: int) -> int:
    """
    >>> chinchilla(7_000_000_000)
    140000000000
    """
    return TOKENS_PER_PARAMETER * parameters


UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
UNITS |= {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
NUMBER = r"\d[\d,_]*(?:\.\d+)?(?:e\d+)?"


def quantity(text: str) -> int:
    """A number of tokens or parameters, mostly with K, M, B or T behind it. Raises ValueError.

    >>> quantity("15.6T"), quantity("300B"), quantity("1000"), quantity("1e12")
    (15600000000000, 300000000000, 1000, 1000000000000)
    >>> quantity("100 b tokens"), quantity("1.5 billion"), quantity("2,000,000")
    (100000000000, 1500000000, 2000000)
    """
    found = re.fullmatch(rf"({NUMBER})\s*([a-z]*?)(?:\s*(?:tokens|parameters))?", text.strip().lower())
    value = 0
    if found and found[2] in UNITS:
        with contextlib.suppress(ValueError, OverflowError):
            value = round(float(re.sub("[,_]", "", found[1])) * UNITS[found[2]])
    if value < 1:
        raise ValueError(f"{text!r} is not a number of tokens; write it as 300B or 15.6T")
    return value


PARAMETERS_B = (1, 3, 7, 13, 30, 70, 100)  # of the table, 10^9


def per_device(parameters: int, dp: int, stage: int, dtype: torch.dtype) -> float:
    """Bytes of state on each of `dp` devices; AdamW in fp32."""
    return parameters * ShardCounts.for_zero_stage(stage, dp).bytes_of(*bytes_per_element(dtype, (None, None)))


def zero_rows(parameters: int, dp: int) -> list[tuple[str, ...]]:
    """A table of GB per device, its head first."""
    rows: list[tuple[str, ...]] = [("ZeRO stage", "divided over dp", "fp32", "bf16")]
    for stage, divided in enumerate(SHARDED_BY_STAGE):
        sizes = (per_device(parameters, dp, stage, dtype) / 1e9 for dtype in (torch.float32, torch.bfloat16))
        rows.append((str(stage), divided, *(f"{size:,.1f}" for size in sizes)))
    return rows


def size_rows(dtype: torch.dtype) -> list[tuple[str, ...]]:
    """A table of GB of one device that holds all of the state."""
    weight, gradient, optimizer = bytes_per_element(dtype, (None, None))
    rows: list[tuple[str, ...]] = [("parameters", "weights", "gradients", "optimizer", "all")]
    for n in PARAMETERS_B:
        sizes = (weight * n, gradient * n, optimizer * n, (weight + gradient + optimizer) * n)
        rows.append((f"{n}B", *(f"{size:,}" for size in sizes)))
    return rows
