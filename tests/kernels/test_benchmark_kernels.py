"""tools/bench/kernels.py without a GPU: its cases run, their stated bytes are correct, and it refuses to measure."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench import kernels
from tools.bench.kernel_bench import KernelTimer
from tools.bench.kernel_case import select_peers
from tools.bench.kernel_cases import TINY_SIZES, list_cases

# permitted differences from torch's functions in the same dtype, in units in the last place of the largest value
MAX_UNITS = {"float32": 32, "bfloat16": 4}


def agree_with_peers(dtype: str) -> int:
    """Compare each case with its peers, and the bytes of its tensors with its formula; return the number of cases."""
    compared = 0
    for case, sizes in list_cases(TINY_SIZES, getattr(torch, dtype), torch.device("cpu")):
        peers = ["megalite", "torch", "triton"]
        outputs = {peer: prepare()() for peer, prepare in select_peers(case, sizes, peers)}
        assert set(peers[: 2 if case.torch_fn else 1]) <= set(outputs), case.name
        # megalite's backward of cross entropy returns p - 1 of logits that another call has overwritten
        if case.op == "dropout_add" or (case.op.startswith("cross_entropy") and case.direction != "forward"):
            continue
        tensors = [list(x) if isinstance(x, tuple) else [x] for x in outputs.values()]
        is_dense = case.op == "gated_matmul" and sizes.expert_count == 1  # torch computes no gradient of probabilities
        for other in tensors[1:]:
            for a, b in zip(tensors[0], other, strict=not is_dense):
                unit = max(torch.finfo(sizes.dtype).eps, torch.finfo(a.dtype).eps) * b.float().abs().max()
                difference = (a.float() - b.view_as(a).float()).abs().max()
                assert difference <= MAX_UNITS[dtype] * unit, (case.name, sizes, difference / unit)
        is_bf16 = dtype == "bfloat16"  # tables in fp32, as of rope, are not in the formula
        if is_bf16 and case.axis == "hidden_size" and (case.direction == "forward" or case.explicit_backward):
            inputs = case.make_inputs(sizes)
            num_bytes = sum(t.nbytes for t in (*inputs, *tensors[0]) if t.dtype == sizes.dtype)
            assert abs(num_bytes / case.work.bytes(sizes) - 1) < 0.05, (case.name, num_bytes, case.work.bytes(sizes))
        compared += 1
    return compared


@pytest.mark.parametrize("dtype", MAX_UNITS)
def test_every_case_equals_its_peers_and_moves_its_stated_bytes(interpreter: Callable[..., Any], dtype: str) -> None:
    assert interpreter(agree_with_peers, dtype) == 34


@pytest.mark.parametrize(("call_ms", "min_calls", "num_measurements"), [(0.01, 30, 1), (75.0, 30, 2), (75.0, 1, 1)])
def test_timer_repeats_slow_calls(
    call_ms: float, min_calls: int, num_measurements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's timer chooses the number of calls by their time, and would time a slow call once."""
    budgets = []

    def do_bench(fn: Callable[[], Any], warmup: int, rep: int, return_mode: str) -> list[float]:
        budgets.append(rep)
        return [call_ms] * max(1, int(rep / (call_ms + 0.1)))

    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    times = KernelTimer(torch.device("cuda"), min_calls, tiny=False)(lambda: None)
    assert len(budgets) == num_measurements and {*times} == {1e3 * call_ms}
    assert min_calls <= len(times) and len(times) * call_ms < max(30, 1.2 * min_calls * call_ms)


def test_list_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main("--list --tokens 1000 --hidden-sizes 1024".split()) == 0
    assert "rms_norm forward           hidden_size 1024        4.1 MB  2 N D e" in capsys.readouterr().out


def test_sweep_times_other_tiles(interpreter: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    flags = "--device cpu --sweep --tiles 2 --repeats 1 --only attention,grad_norm"
    assert interpreter(kernels.main, [*flags.split(), "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["complete"] and report["interpreted"] and not report["errors"]
    by_kernel: dict[str, list[dict]] = {}
    for row in report["rows"]:
        by_kernel.setdefault(row["kernel"], []).append(row)
    assert len(by_kernel) == 3  # both directions of attention
    for table, other in by_kernel.values():
        assert table["table"] and not other["table"] and table["tile"] != other["tile"]
        assert table["tile"].keys() == other["tile"].keys()
        assert all(name.islower() for name in table["tile"])  # every kernel has the same names for the same sizes
    assert {row["kernel"] for row in report["best"]} == set(by_kernel)


@pytest.mark.parametrize(
    "flags,text",
    [
        ("", "torch sees no CUDA device"),
        ("--only swiglu,nothing", "--only nothing is unknown; there are adamw"),
        ("--tokens 0 --list", "--tokens 0 is below 1"),
        ("--sequences 0 4096 --list", "--sequences 0 is below 1"),
        ("--hidden-sizes 100 --list", "--hidden-sizes 100 is not a multiple of 128"),
    ],
)
def test_unmeasurable_kernel_is_one_line(
    flags: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.main(flags.split()) == 2
    stderr = capsys.readouterr().err
    assert text in stderr and len(stderr.splitlines()) == 1
