"""Budgets and tables of sizes: published figures, exactly."""

import pytest
import torch
from test_search import request

from megalite.plan.arrangement import arrange
from megalite.plan.batch_size import BatchSizes
from megalite.plan.kinds import model_flops
from tools.planning import rules as sizes
from tools.planning.rules import Budget, chinchilla, quantity
from tools.planning.search import Layout, applied, arranged


@pytest.mark.parametrize("dp", [1, 2, 8, 64])
def test_bf16_takes_6_and_12_shared_bytes_per_parameter_as_the_run_does(dp: int) -> None:
    """What the layout of llama3-8b holds, to its padding, is the rule."""
    asked = request("--preset llama3-8b --global-batch-size 64", dp, gpus_per_node=min(dp, 8))
    made = arrange(applied(Layout(), asked.config), dp, asked.vocab_size)
    (held,) = made.holdings
    n = held.local
    assert n == made.parameters == 8_030_261_248
    assert sizes.per_device(n, dp, 1, torch.bfloat16) == n * (6 + 12 / dp)
    assert held.state == pytest.approx(n * (6 + 12 / dp), rel=1e-5)
    assert held.state >= n * (6 + 12 / dp)


def test_tokens_flops_steps_and_days() -> None:
    """GPT-3 175B on 300 B tokens: 3.14e23 FLOPs (arXiv:2005.14165, table D.1). Llama 3 405B: 3.8e25 on 15.6 T."""
    for preset, tokens, published in (("gpt3-175b", "300B", 3.14e23), ("llama3-405b", "15.6T", 3.8e25)):
        asked = request(f"--preset {preset} --global-batch-size 1024", 1024)
        one, m = arranged(Layout(), asked), asked.config.model
        budget = Budget(one.parameters, quantity(tokens), model_flops(m, one.padded_vocab))
        assert budget.rule_flops == pytest.approx(published, rel=0.02)
        assert 1 < budget.exact_flops / budget.rule_flops < 1.1
    assert budget.steps(BatchSizes.constant(2048), 8192) == -(-15_600_000_000_000 // 2**24)
    grows = BatchSizes(((0, 1024), (1_000_000, 2048)))  # 977 steps to grow
    assert budget.steps(grows, 8192) == 977 + -(-(-(-15_600_000_000_000 // 8192) - 977 * 1024) // 2048)
    speed = 16384 * 400e12 / (budget.exact_flops / budget.tokens)
    assert budget.days(speed) == pytest.approx(budget.exact_flops / (16384 * 400e12) / 86400)
    assert budget.device_hours(speed, 16384) == pytest.approx(budget.days(speed) * 24 * 16384)
    assert budget.epochs(10**12) == pytest.approx(15.6)
    assert chinchilla(67 * 10**9) == pytest.approx(1.5e12, rel=0.12)  # arXiv:2203.15556, table 3


@pytest.mark.parametrize("text", ["", "B", "-3B", "0", "nan", "inf", "1e400T", "3 apples"])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of tokens"):
        quantity(text)
