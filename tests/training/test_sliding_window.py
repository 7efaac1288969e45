"""A sliding window as an option of the model: every path computes what the definition does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from train_cases import DOCUMENT_FLAGS, run_from

from megalite.kernels.attention import attention, attention_reference
from megalite.kernels.dispatch import kernel_option
from megalite.nn.attention import Attention
from megalite.training.train_step import train_step

S, STEPS = 16, 2
COMMON = f"""--num-layers 3 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2
 --seq-length {S} --micro-batch-size 2 --global-batch-size 4 --train-iters 9 --lr 0.01 --seed 7 --mock-data
 --tokenizer-type NullTokenizer --vocab-size 94 --make-vocab-size-divisible-by 8 --eval-iters 0 --init-method-std 0.2
 --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0"""
WINDOW = " --window-size 4,0 --window-attn-skip-freq 2"
DROP = " --attention-dropout 0.2"
PATHS = {
    "plain": "",
    "documents": DOCUMENT_FLAGS,
    "dropout": DROP,
    "dropout, documents": DROP + DOCUMENT_FLAGS,
    "selective recompute": " --recompute-granularity selective",
    "full recompute": DROP + " --recompute-granularity full --recompute-method uniform",
    "compiled": DROP + DOCUMENT_FLAGS + " --compile",
}


def train(flags: str, dtype: torch.dtype | None = torch.float64, change: Callable[[Any], None] = id) -> list[float]:
    """Return loss and gradient norm of each step, after a call of `change` on each attention."""
    torch.compiler.reset()
    run = run_from(f"{COMMON} {flags}", dtype=dtype, compile_backend="eager")
    for stage in run.pipeline.stages:
        for module in stage.modules():
            if isinstance(module, Attention):
                change(module)
    results = [train_step(run) for _ in range(STEPS)]
    return [x for r in results for x in (r.loss, r.grad_norm)]


def by_definition(flags: str) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalite.nn.attention.attention", attention_reference)
        return train(flags)


@pytest.mark.parametrize("path", PATHS)
def test_window_trains_like_the_definition(path: str) -> None:
    flags = PATHS[path]
    expected = by_definition(flags.replace("--compile", "") + WINDOW)
    assert train(flags + WINDOW) == pytest.approx(expected, rel=1e-10, abs=0)
    assert expected[0] != train(flags)[0]


def test_window_pattern_selects_the_layers() -> None:
    windows: list[int | None] = []
    train(WINDOW, change=lambda module: windows.append(module.window))
    assert windows == [5, None, 5]
    patterned = train(WINDOW)
    assert len({patterned[0], train(" --window-size 4,0")[0], train("")[0]}) == 3


@pytest.mark.parametrize("path", ["plain", "documents", "dropout"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_full_length_window_is_bit_equal_to_none(path: str, dtype: torch.dtype | None) -> None:
    flags = PATHS[path] + (" --bf16" if dtype is torch.bfloat16 else "")
    assert train(f"{flags} --window-size {S - 1},0", dtype) == train(flags, dtype)
    assert train(f"{flags} --window-size {S - 2},0", dtype) != train(flags, dtype)


def qkv(length: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(length, 2, n, 16, generator=generator).to(dtype) for n in (4, 2, 2)]


def test_window_needs_no_quadratic_memory() -> None:
    """Check the largest tensor of forward and backward, with every backend that can be forced on a CPU."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                self.elements = max(self.elements, out.numel())
            return out

    length = 2048
    for name in ("", "torch", "flash", "blocked"):
        kernel_option.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MEGALITE_ATTENTION", name)
            for dtype in (torch.float32, torch.bfloat16):
                leaves = [x[:, :1].requires_grad_() for x in qkv(length, dtype)]
                with Largest() as mode:
                    attention(*leaves, scale=0.25, window=64).sum().backward()
                assert mode.elements < length**2 / 8
        kernel_option.cache_clear()
