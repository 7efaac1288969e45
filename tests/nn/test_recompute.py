"""A part that is computed again in backward gives the same gradients, bit for bit, and is computed as often as it says."""

import pytest
import torch
from torch import Tensor
from train_cases import stage_from

from megalite.nn.micro_batch import Batch
from megalite.nn.recompute import without_keeping

S, B, V = 12, 2, 64
LINE = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {S} --micro-batch-size {B} --train-iters 1
 --lr 1 --mock-data --vocab-size {V} --init-method-std 0.2"""
STYLES = {
    "gpt": "--hidden-dropout 0.2 --attention-dropout 0.1",
    "llama": """--hidden-dropout 0 --attention-dropout 0 --swiglu --normalization RMSNorm --position-embedding-type rope
     --disable-bias-linear --qk-layernorm --apply-layernorm-1p""",
    "neox": "--hidden-dropout 0 --attention-dropout 0 --parallel-residual",
}
MODULES = ("core_attn", "layernorm", "mlp", "layernorm mlp", "core_attn layernorm mlp")


def gradients(flags: str, dtype: torch.dtype) -> dict[str, Tensor]:
    stage = stage_from(f"{LINE} {flags}", dtype)
    tokens = torch.randint(0, V, (S, B), generator=torch.Generator().manual_seed(1))
    stage(None, Batch(tokens, tokens, None, torch.arange(B), 1)).backward()
    found = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
    assert len(found) == len(list(stage.parameters()))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_gradients_keep_every_bit(style: str, dtype: torch.dtype) -> None:
    want = gradients(STYLES[style], dtype)
    for modules in MODULES:
        got = gradients(f"{STYLES[style]} --recompute-granularity selective --recompute-modules {modules}", dtype)
        assert [name for name in want if not torch.equal(got[name], want[name])] == [], modules


def test_what_is_not_kept_is_made_once_more_and_its_user_runs_once() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    made, used = [], []

    def make() -> Tensor:
        made.append(torch.is_grad_enabled())
        return x.exp()

    def use(y: Tensor) -> Tensor:
        used.append(y)
        return (y @ w).sum()

    without_keeping(make, use).backward()
    assert made == [True, False] and len(used) == 1
    torch.testing.assert_close(w.grad, x.detach().exp().T @ torch.ones(3, 4, dtype=torch.float64))
