"""The budget of a run by rules: tokens to train on, steps, days, device hours, cost, and bytes of model state.

    tokens       20 per parameter by default (arXiv:2203.15556, table 3: 20.2 at 400 M to 21.6 at 67 B)
    parameters   of a mixture of experts, those that a token uses
    FLOPs        6 N D, the rule (arXiv:2001.08361, section 2.1, where N excludes embeddings; here, as is usual, it
                 includes them), and the exact count with attention scores and the head (planning/layer_kinds.py)
    state        by ZeRO stage (arXiv:1910.02054, figure 1): stage 1 shards the optimizer over dp, 2 also the
                 gradients, 3 also the weights

>>> budget = TokenBudget(active=70_000_000_000, tokens=1_400_000_000_000, flops_per_token=4.5e11)
>>> f"{budget.flops_6nd:.3g} {budget.exact_flops:.3g}"  # Chinchilla: 5.88e23 in its table 1
'5.88e+23 6.3e+23'
>>> budget.steps(BatchSizeSchedule.constant(1024), 4096), round(budget.days(1e6), 1)
(333787, 16.2)
>>> [round(state_bytes_per_device(7_000_000_000, 4, stage, torch.float32) / 1e9) for stage in range(4)]
[112, 70, 49, 28]
>>> [state_bytes_per_device(7_000_000_000, 4, stage, torch.bfloat16) / 1e9 for stage in range(4)]
[126.0, 63.0, 42.0, 31.5]
>>> state_bytes_per_device(7_000_000_000, 8, 3, torch.float32) / 1e9
14.0
>>> state_bytes_per_device(1, 8, 1, torch.bfloat16) == 6 + 12 / 8  # weights 2, gradients 4, main weights and moments 12
True
"""

import contextlib
import re
from dataclasses import dataclass, replace

import torch

from megalite.planning.batch_size import BatchSizeSchedule
from megalite.planning.memory import SHARDED_BY_STAGE
from megalite.planning.model_state import ShardCounts, bytes_per_element

TOKENS_PER_PARAMETER = 20
MAX_USEFUL_EPOCHS = 4  # up to this, repeated tokens are worth about as much as new ones (arXiv:2305.16264, section 6)
DAY_S = 86_400


@dataclass(frozen=True)
class TokenBudget:
    """The tokens of a run and the work that they cause.

    Attributes:
        active: The number of parameters that a token uses, each counted once.
        tokens: The number of tokens to train on.
        flops_per_token: Model FLOPs of forward and backward.
    """

    active: int
    tokens: int
    flops_per_token: float

    @property
    def flops_6nd(self) -> float:
        """The FLOPs of the run by the rule 6 N D."""
        return 6.0 * self.active * self.tokens

    @property
    def exact_flops(self) -> float:
        """The counted model FLOPs of the run."""
        return self.flops_per_token * self.tokens

    def steps(self, sizes: BatchSizeSchedule, seq_length: int) -> int:
        """Return the number of steps with batches of `sizes`; the last batch may exceed the budget."""
        samples = -(-self.tokens // seq_length)
        return max(1, replace(sizes, keep_last_batch=True).num_steps_for(samples))

    def days(self, tokens_per_s: float) -> float:
        return self.tokens / tokens_per_s / DAY_S

    def device_hours(self, tokens_per_s: float, devices: int) -> float:
        return self.tokens / tokens_per_s / 3600 * devices

    def epochs(self, data_tokens: int) -> float:
        return self.tokens / data_tokens


def chinchilla_tokens(parameters: int) -> int:
    """Return the number of tokens that is compute-optimal for a model of this size.

    >>> chinchilla_tokens(7_000_000_000)
    140000000000
    """
    return TOKENS_PER_PARAMETER * parameters


NUMBER = r"\d[\d,_]*(?:\.\d+)?(?:e\d+)?"  # the pattern of a number, like 1,024, 15.6 or 1e12
UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "b": 10**9,
    "t": 10**12,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}


def parse_quantity(text: str) -> int:
    """Return a number of tokens or parameters that may have a unit such as K, M, B or T. Raises ValueError.

    >>> parse_quantity("15.6T"), parse_quantity("300B"), parse_quantity("1000"), parse_quantity("1e12")
    (15600000000000, 300000000000, 1000, 1000000000000)
    >>> parse_quantity("100 b tokens"), parse_quantity("1.5 billion"), parse_quantity("2,000,000")
    (100000000000, 1500000000, 2000000)
    """
    match = re.fullmatch(rf"({NUMBER})\s*([a-z]*?)(?:\s*(?:tokens|parameters))?", text.strip().lower())
    value = 0
    if match and match[2] in UNITS:
        with contextlib.suppress(ValueError, OverflowError):
            value = round(float(re.sub("[,_]", "", match[1])) * UNITS[match[2]])
    if value < 1:
        raise ValueError(f"{text!r} is not a number of tokens; write it as 300B or 15.6T")
    return value


def state_bytes_per_device(parameters: int, dp: int, stage: int, dtype: torch.dtype) -> float:
    """Return the bytes of model state on each of `dp` devices at a ZeRO stage, with AdamW and its state in fp32."""
    return parameters * ShardCounts.for_zero_stage(stage, dp).bytes_of(*bytes_per_element(dtype, (None, None)))


def zero_rows(parameters: int, dp: int) -> list[tuple[str, ...]]:
    """Return a table of the GB of model state per device, by ZeRO stage; the first row is the header."""
    rows: list[tuple[str, ...]] = [("ZeRO stage", "sharded over dp", "fp32", "bf16")]
    for stage, sharded in enumerate(SHARDED_BY_STAGE):
        fp32, bf16 = (state_bytes_per_device(parameters, dp, stage, d) / 1e9 for d in (torch.float32, torch.bfloat16))
        rows.append((str(stage), sharded, f"{fp32:,.1f}", f"{bf16:,.1f}"))
    return rows


TABLE_SIZES_B = (1, 3, 7, 13, 30, 70, 100)  # billions of parameters


def size_rows(dtype: torch.dtype) -> list[tuple[str, ...]]:
    """Return a table of the GB of model state on one device, by model size; the first row is the header."""
    weight, gradient, optimizer = bytes_per_element(dtype, (None, None))
    rows: list[tuple[str, ...]] = [("parameters", "weights", "gradients", "optimizer", "all")]
    for n in TABLE_SIZES_B:
        sizes = (weight * n, gradient * n, optimizer * n, (weight + gradient + optimizer) * n)
        rows.append((f"{n}B", *(f"{size:,}" for size in sizes)))
    return rows
