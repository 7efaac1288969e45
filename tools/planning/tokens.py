"""How many tokens a model is to be trained on, and what that comes to: steps, days, device hours, money.

    tokens       20 per parameter unless they are given (arXiv:2203.15556, table 3: 20.2 at 400 M to 21.6 at 67 B)
    FLOPs        6 N D, the rule (arXiv:2001.08361, sec. 2.1, N without embeddings; here with them, as mostly used),
                 and the exact count, scores and head included (megalite/plan/kinds.py: model_flops)

>>> budget = Budget(parameters=70_000_000_000, tokens=1_400_000_000_000, flops_per_token=4.5e11)
>>> f"{budget.rule_flops:.3g} {budget.exact_flops:.3g}"  # Chinchilla: 5.88e23 in its table 1
'5.88e+23 6.3e+23'
>>> budget.steps(BatchSizes.constant(1024), 4096), round(budget.days(1e6), 1)
(333787, 16.2)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megalite.plan.batch_size import BatchSizes

TOKENS_PER_PARAMETER = 20
MOST_EPOCHS = 4  # up to which repeated tokens are worth about as much as new ones (arXiv:2305.16264, sec. 6)
DAY_S = 86_400


@dataclass(frozen=True)
class Budget:
    """parameters: of the whole model, each once. flops_per_token: model FLOPs of forward and backward."""

    parameters: int
    tokens: int
    flops_per_token: float

    @property
    def rule_flops(self) -> float:
        return 6.0 * self.parameters * self.tokens

    @property
    def exact_flops(self) -> float:
        return self.flops_per_token * self.tokens

    def steps(self, sizes: BatchSizes, seq_length: int) -> int:
        """Of batches that grow as `sizes` tells; the last one may go beyond the budget."""
        return max(1, replace(sizes, last_whole=True).steps_for(-(-self.tokens // seq_length)))

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


def quantity(text: str) -> int:
    """A number with K, M, B or T behind it. Raises ValueError.

    >>> quantity("15.6T"), quantity("300B"), quantity("1000")
    (15600000000000, 300000000000, 1000)
    """
    sizes = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    unit = sizes.get(text[-1:].upper(), 1)
    try:
        value = round(float(text[:-1] if unit > 1 else text) * unit)
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise ValueError(f"{text!r} is no number of tokens; write it as 300B or 15.6T")
    return value
