"""The error message for a kernel that does not fit on a GPU.

Triton's own compiler and check run for compute capability 12.0 (99 KiB of shared memory per block) with a stub of the
driver.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compiling import GPUS

from megalite.kernels import dispatch, flash_attention
from megalite.kernels.dispatch import KernelError

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@pytest.fixture(autouse=True)
def fake_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compiler
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiler.max_shared_mem.cache_clear()
    properties = {"max_shared_mem": GPUS[120].shared}
    utils = SimpleNamespace(get_device_properties=lambda device: properties)
    driver_stub = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 120, 32), get_current_device=lambda: 0,
        get_current_stream=lambda device: 0, launcher_cls=lambda source, metadata: None, utils=utils,
    )  # fmt: skip
    monkeypatch.setattr(driver, "_active", driver_stub)
    yield
    compiler.max_shared_mem.cache_clear()


def test_tile_too_large_for_the_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the tiles of the table, which fit (test_compiling.py), by one that does not."""
    monkeypatch.setattr(dispatch, "triton_interpreted", lambda: False)
    for family in flash_attention.FORWARD_TILES:
        monkeypatch.setitem(flash_attention.FORWARD_TILES, family, (128, 128, 8, 4))
    message = r"the kernel flash_attention_forward cannot run on this GPU \(out of resource: shared memory, Required: "
    q = torch.zeros(128, 1, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(KernelError, match=message + r"\d+, Hardware limit: 101376\.\); use --kernels torch$"):
        flash_attention.flash_attention(q, q, q, scale=1.0)
