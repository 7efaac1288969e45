"""The selection of kernels by variable, device, dtype and shape, and its description in the plan."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest
import torch

from megalite.common.optional_packages import MissingPackageError
from megalite.kernels import attention, dispatch
from megalite.kernels.dispatch import KernelError, describe_kernels, runs_triton, tile_for, use_triton

KERNELS_DIR = Path(dispatch.__file__).parent
Q = torch.zeros(4, 1, 2, 8)
CACHED = (dispatch.kernel_option, dispatch.triton_installed, dispatch.triton_interpreted, dispatch.runs_triton)


def clear_caches() -> None:
    dispatch.set_kernel_options("auto", "auto")  # a run of another test in this process may have chosen
    for fn in CACHED:
        fn.cache_clear()


@pytest.fixture(autouse=True)
def unread_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide a process that has not read its environment yet, and restore it afterwards."""
    for name in ("MEGALITE_KERNELS", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    clear_caches()
    yield
    monkeypatch.undo()
    clear_caches()


def test_auto_is_triton_on_gpu_and_torch_on_cpu() -> None:
    assert runs_triton("cuda") and not runs_triton("cpu") and not runs_triton("meta")


def test_torch_option_selects_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGALITE_KERNELS", "torch")
    assert not runs_triton("cuda") and describe_kernels("cuda") == "torch (MEGALITE_KERNELS=torch)"


def test_dispatch_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    assert not runs_triton("cuda") and describe_kernels("cuda") == "torch (triton is not installed)"
    runs_triton.cache_clear()
    dispatch.kernel_option.cache_clear()
    monkeypatch.setenv("MEGALITE_KERNELS", "triton")
    with pytest.raises(MissingPackageError, match="pip install triton"):
        runs_triton("cuda")


def test_unsupported_shapes_and_dtypes_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGALITE_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.zeros(2, 8)
    assert use_triton(x, 8) and use_triton(x.double(), 8) and use_triton(x, dispatch.MAX_TILE_COLUMNS)
    assert not use_triton(x, dispatch.MAX_TILE_COLUMNS + 1)
    assert not use_triton(x.long(), 8) and not use_triton(x[:0], 8) and not use_triton(x.to("meta"), 8)
    with pytest.raises(ValueError, match="columns=5000 is above the table's 4096"):
        tile_for(((128, 8, 4), (4096, 1, 8)), 5000)


def test_kernel_plan_names_existing_kernels() -> None:
    support_modules = {"dispatch", "row_sum", "flash_blocks", "softcap", "activation", "__init__"}
    kernels = {
        p.stem for p in KERNELS_DIR.rglob("*.py") if re.search(r"^@kernel", p.read_text(), re.M)
    } - support_modules
    assert kernels == set(dispatch.TRITON_KERNELS)
    line = describe_kernels("cuda")
    assert line.startswith("triton: ") and all(name in line for name in dispatch.TRITON_KERNELS)


RUN = """--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 4 --max-position-embeddings 4
 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 0.01 --lr-decay-style constant --mock-data
 --tokenizer-type NullTokenizer --vocab-size 31 --eval-iters 0 --log-interval 1 --device cpu"""


@pytest.mark.parametrize(
    "variables,code,text",
    [
        ({"MEGALITE_KERNELS": "triton", "TRITON_INTERPRET": "1"}, 0, "triton's interpreter: norms"),
        ({}, 0, "torch (kernels=auto) attention blocked, for dropout"),
        ({"MEGALITE_KERNELS": "triton"}, 2, "pretrain_gpt.py: MEGALITE_KERNELS=triton on CPU needs TRITON_INTERPRET=1"),
    ],
)
def test_run_reports_its_kernels(variables: dict[str, str], code: int, text: str, tmp_path: Path) -> None:
    result = programs.run_python("pretrain_gpt.py", *RUN.split(), cwd=tmp_path, env=os.environ | variables)
    assert result.returncode == code, result.stdout + result.stderr
    assert text in re.sub(r"\s+", " ", result.stdout + result.stderr)


def test_kernel_variable_overrides_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.set_kernel_options("torch", "flash")
    assert not runs_triton("cuda") and describe_kernels("cuda") == "torch (kernels=torch)"
    assert attention.select_backend(Q, Q, has_documents=False) == "flash"
    assert attention.describe_backend("cpu") == "flash (attention_kernel); in a window: blocked"
    monkeypatch.setenv("MEGALITE_ATTENTION", "blocked")
    dispatch.set_kernel_options("torch", "flash")
    assert attention.describe_backend("cpu") == "blocked (MEGALITE_ATTENTION)"
    dispatch.set_kernel_options("triton", "flash")
    with pytest.raises(KernelError, match="^kernels=triton on CPU needs TRITON_INTERPRET=1"):
        runs_triton("cpu")
    monkeypatch.setenv("MEGALITE_KERNELS", "fast")
    with pytest.raises(KernelError, match="^MEGALITE_KERNELS=fast is unknown; use auto, triton or torch$"):
        dispatch.set_kernel_options("auto", "auto")


@pytest.mark.parametrize("more_flags", ["--nproc 2 --global-batch-size 2", "--dry-run"])
def test_bad_kernel_variables_are_refused_together(more_flags: str, tmp_path: Path) -> None:
    wrong = {"MEGALITE_SHARED_MEMORY": "no", "MEGALITE_KERNELS": "fast", "MEGALITE_ATTENTION": "magic"}
    argv = [
        sys.executable,
        "-X",
        "importtime",
        str(programs.ROOT / "pretrain_gpt.py"),
        *RUN.split(),
        *more_flags.split(),
    ]
    result = programs.run(argv, cwd=tmp_path, env=os.environ | wrong, capture_output=True, text=True, timeout=100)
    messages = [line for line in result.stderr.splitlines() if line.startswith("pretrain_gpt.py: ")]
    assert result.returncode == 2 and len(messages) == 3 and not re.search(r"\| +torch$", result.stderr, re.M)
    assert all(
        sum(f"{name}={value} is unknown; use" in line for line in messages) == 1 for name, value in wrong.items()
    )


def test_attention_kernel_is_forced_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGALITE_ATTENTION", "magic")
    message = "MEGALITE_ATTENTION=magic is unknown; use auto, cudnn, flash, triton, blocked or"
    with pytest.raises(KernelError, match=message):
        attention.select_backend(Q, Q, has_documents=False)
    monkeypatch.setenv("MEGALITE_ATTENTION", "flash")
    assert attention.select_backend(Q, Q, has_documents=False) == "flash"
    torch.testing.assert_close(attention.attention(Q, Q, Q, scale=1.0), Q)
    assert attention.select_backend(Q, Q, has_documents=False, window=True) == "blocked"
    assert attention.describe_backend("cpu") == "flash (MEGALITE_ATTENTION); in a window: blocked"
    assert attention.describe_backend("cpu", needs_own_kernel=True) == "blocked"
    torch.testing.assert_close(attention.attention(Q, Q, Q, scale=1.0, softcap=1.0), Q)


def test_cpu_attention_is_chosen_by_dtype_mask_and_window() -> None:
    half = Q.bfloat16()
    assert (
        attention.select_backend(Q, Q, has_documents=False)
        == attention.select_backend(Q, Q, has_documents=True)
        == "torch"
    )
    assert (
        attention.select_backend(half, half, has_documents=False),
        attention.select_backend(half, half, has_documents=True),
    ) == ("blocked", "torch")
    assert {attention.select_backend(Q, Q, has_documents=m, window=True) for m in (False, True)} == {"blocked"}
    assert attention.describe_backend("cpu") == attention.describe_backend("cpu", dropout=True) == "blocked"
    assert attention.describe_backend("cpu", half=False) == "torch"
    assert attention.describe_backend("cpu", half=False, needs_own_kernel=True) == "blocked"
    assert attention.describe_backend("cpu", dropout=True, half=False, needs_own_kernel=True) == "blocked"
    windows = "blocked, for dropout; in evaluation torch; in a window blocked"
    assert attention.describe_backend("cpu", dropout=True, half=False, window=True) == windows


@pytest.mark.parametrize(
    "batch,head,value,dtype,fits",
    [
        *((1365, 8, 8, torch.bfloat16, True), (1366, 8, 8, torch.bfloat16, False)),  # limit of programs in a grid
        *((1, 256, 256, torch.bfloat16, True), (1, 192, 257, torch.float16, False), (1, 257, 8, torch.float16, False)),
        *((1, 128, 64, torch.float32, True), (1, 64, 129, torch.float32, False), (1, 8, 8, torch.float64, False)),
    ],
)
def test_triton_attention_supported_shapes(
    batch: int, head: int, value: int, dtype: torch.dtype, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGALITE_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, v = (torch.empty(1, dtype=dtype).expand(1, batch, 48, size) for size in (head, value))
    for options in (dict(window=True), dict(dropout=True), dict(has_documents=True, window=True)):
        assert attention.select_backend(q, v, **({"has_documents": False} | options)) == (
            "triton" if fits else "blocked"
        ), options
