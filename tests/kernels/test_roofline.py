"""No kernel moves more bytes than its formula (tools/bench/kernels.py) says, counted while it is interpreted; and its
machine code for compute capability 9.0 moves as many. The two counts know nothing of each other: the interpreter sees
each element that is loaded and stored (traffic.py); the machine code says how many bytes each instruction takes
(machine_code.py), times the turns of its loop, the threads and the programs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from compiling import build, cache_folder, recorded
from machine_code import code_of, per_element
from traffic import Traffic, of_case, prepared

from megalite.kernels import bias_gelu, dispatch

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
Call = Callable[..., Any]
TYPE_CHECKING = False
if TYPE_CHECKING:
    import triton.language as tl

SECOND_STAGE = ("partial_ptr",)  # sums per program of a weight's gradient: by the number of programs, not of rows
FLAT = {"tokens": 64, "hidden_size": 512, "vocab_size": 8192, "sequence": 64, "numel": 1 << 16}
ATTENTION = FLAT | {"tokens": 256, "sequence": 256, "hidden_size": 512}
LOSS = FLAT | {"tokens": 16}
ROPE = FLAT | {"tokens": 16, "hidden_size": 4096}  # a token's angles serve its 32 heads
# which inputs are small and shared, so that every program may ask for them: from the cache, after the first
SHARED = ("w_ptr", "b_ptr", "bias_ptr", "cos_ptr", "sin_ptr", "sample_ids_ptr")
CASES = [f"{op} {half}" for op in ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "rope", "swiglu",
         "bias_gelu", "bias_gelu_erf", "dropout_add", "cross_entropy") for half in ("forward", "backward")]  # fmt: skip
CASES += ["adamw forward", "adamw bf16 moments forward", "grad_norm forward"]
MATMULS = [f"{op} {half}" for op in ("attention", "grouped_matmul", "gated_matmul") for half in ("forward", "backward")]


def size_of(name: str) -> dict[str, int]:
    sizes = {"attention": ATTENTION, "cross_entropy": LOSS, "rope": ROPE}
    return sizes.get(name.split()[0], FLAT)


def main_stage(seen: list[list[Traffic]]) -> list[Traffic]:
    return [t for launch in seen for t in launch if t.kernel != "columns_sum" and t.tensor not in SECOND_STAGE]


def twice(seen: list[list[Traffic]]) -> list[Traffic]:
    """Tensors of which a kernel asks for bytes more often than once, and that are not small and shared. One byte in a
    hundred does not count: cross entropy reads a row's label once more."""
    stage = main_stage(seen)
    much = 0.01 * sum(t.once for t in stage)
    return [t for t in stage if t.asked - t.once > 0.01 * t.once and t.once > much and t.tensor not in SHARED]


# one number per row and a weight beside the streams; attention: the log-sum-exp and delta, and in backward q, k, v and do
# once for each of its two kernels
ALLOWED = {"attention forward": 1.05, "attention backward": 1.6}


@pytest.mark.parametrize("name", [*CASES, *MATMULS])
def test_kernel_bytes_equal_the_formula(interpreter: Call, name: str) -> None:
    seen = interpreter(of_case, name, size_of(name))
    (case, sizes), _ = prepared(name, size_of(name))
    ratio = sum(t.once for t in main_stage(seen)) / case.work.bytes(sizes)
    assert 0.99 < ratio <= ALLOWED.get(name, 1.05), f"{name}: {ratio:.3f} of the formula"
    if name in CASES:  # keys are read by each block of queries, from the cache, and operands by each tile
        assert twice(seen) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_machine_code_bytes_equal_the_interpreters(
    interpreter: Call, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache_folder()))
    asked = sum(t.asked for launch in interpreter(of_case, name, size_of(name)) for t in launch)
    made, static = list[Any](), 0.0
    recorded(lambda: made.append(prepared(name, size_of(name))[1]()))
    for launch in recorded(made[0]):  # whose loops turn equally often in all programs: not attention's
        built = build(launch, 90)
        static += code_of(built).moved * math.prod(launch.grid) * 32 * built.warps
    most = 2.0 if name.startswith("rope") else 1.5  # whose angles each thread loads for itself, from the cache
    assert 0.95 < static / asked < most, (static, asked)


# Instructions per element at usual sizes, forward and backward, for 9.0 with Triton 3.9, and a twentieth more: at the
# copy rate an H200 (4.24 TB/s, 132 x 128 lanes, 1.98 GHz) has time for 15.8 (2 bytes an element), 31.6 (4), 47 (6)
MOST = {"rms_norm": (11.2, 17.3), "add_rms_norm": (13.2, 21.2), "layer_norm": (16.9, 19.7), "add_layer_norm": (18.9, 23.4),
        "swiglu": (20.8, 33.5), "bias_gelu": (16.7, 26.2), "bias_gelu_erf": (19.9, 31.2), "dropout_add": (28.3, 25.4),
        "cross_entropy": (10.8, 13.0)}  # fmt: skip


def longest(name: str, monkeypatch: pytest.MonkeyPatch, **changed: int) -> float:
    """Of the kernels of a case the most instructions per element."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache_folder()))
    made = list[Any]()
    recorded(lambda: made.append(prepared(name, FLAT | {"hidden_size": 4096, "vocab_size": 128256})[1]()))
    main = [launch for launch in recorded(made[0]) if launch.name != "row_sum.sum_rows_kernel"]
    main = [dataclasses.replace(launch, constants=launch.constants | changed) for launch in main]
    return max(per_element(build(launch, 90)) for launch in main)


@pytest.mark.nightly(guards=("megalite/kernels",))
@pytest.mark.parametrize("op", MOST)
@pytest.mark.parametrize("half", ["forward", "backward"])
def test_kernel_instruction_counts_do_not_grow(op: str, half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert longest(f"{op} {half}", monkeypatch) <= MOST[op][half == "backward"]


@dispatch.kernel
def _divided(x, TANH: tl.constexpr):
    s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x * s, s


def test_division_instead_of_rsqrt_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bias_gelu, "_gelu", _divided)
    monkeypatch.setattr(bias_gelu, "_forward", dispatch.kernel(bias_gelu._forward.fn))
    assert longest("bias_gelu forward", monkeypatch) > MOST["bias_gelu"][0]


def test_three_stages_prefetch_rows_during_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their copies to shared memory take instructions, which a table that has stages pays for."""
    one, three = (longest("rms_norm backward", monkeypatch, NUM_STAGES=stages) for stages in (1, 3))
    assert one <= MOST["rms_norm"][1] < three
