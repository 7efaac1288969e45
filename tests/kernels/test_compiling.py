"""Every kernel builds for a card of compute capability 9.0, in 16-byte accesses and, at usual sizes, within its registers.

No card is needed: Triton's compiler and assembler run on any machine with its package. What it costs to run is another
question, and tools/bench/kernels.py asks it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cases import OPS, results
from compiling import compile_ops, spilled

from megalite.kernels.blocked_attention import Drop
from megalite.kernels.flash_attention import flash_attention
from megalite.kernels.layer_norm import add_layer_norm
from megalite.kernels.rms_norm import add_rms_norm

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize("name", OPS)
def test_every_kernel_builds(name: str) -> None:
    inputs = [x.bfloat16() if x.is_floating_point() else x for x in OPS[name].cases[-1]()]
    assert compile_ops(lambda: results(OPS[name].run, inputs, "contiguous"))


@pytest.mark.parametrize("width", [128, 4096, 8192])
def test_norms_hold_their_rows_in_registers(width: int) -> None:
    def run() -> None:
        x, w = (torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((64, width), (width,)))
        for made in (add_rms_norm(x, x, w, 1e-5), add_layer_norm(x, x, w, w, 1e-5)):
            torch.autograd.grad(made, [x, w], made)

    built = compile_ops(run)
    assert len(built) >= 5
    for name, ptx in built.items():
        registers, bytes_spilled = spilled(ptx)
        assert bytes_spilled == 0, f"{name}: {registers} registers, {bytes_spilled} bytes spilled"
        narrow = re.findall(r"(?:ld|st)\.global\S*\.[bf]16 ", ptx)
        assert "columns" in name or not narrow, f"{name}: accesses of 2 bytes"


@pytest.mark.parametrize("head_size,dropout_p", [(64, 0.0), (128, 0.0), (64, 0.1), (128, 0.1)])
def test_attention_fits_into_registers_and_uses_the_tensor_cores(head_size: int, dropout_p: float) -> None:
    def run() -> None:
        q, k, v = (torch.zeros(256, 2, n, head_size, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2))
        first_BS, ids_B = torch.zeros(2, 256, dtype=torch.int64), torch.arange(2)
        drop = Drop(dropout_p, 0, ids_B)
        flash_attention(q, k, v, scale=0.1, first_BS=first_BS, drop=drop).sum().backward()

    built = compile_ops(run)
    assert len(built) == 3
    for name, ptx in built.items():
        assert "wgmma" in ptx and spilled(ptx)[1] == 0, f"{name}: {spilled(ptx)}"
