"""Peaks by device name, and the measured peak of this CPU."""

import pytest
import toml_tables
import torch

from megalite.launch import local_launcher as local_ranks
from megalite.launch.rank_info import RankInfo
from megalite.planning import device_peaks
from megalite.planning.device_peaks import DTYPE_NAMES, PEAKS, REPETITIONS, find_peak, lookup_peak, measure_cpu_peak
from megalite.training.job import preflight

CASES = toml_tables.read_table("training/cases")


def test_peak_comes_from_the_gpu_or_the_flag() -> None:
    for name, tflops in CASES["bf16_tflops"].items():
        peak = lookup_peak(name, torch.bfloat16)
        assert (peak.tflops, peak.source) == (tflops, f"{name} bf16 dense")
    for name in CASES["no_peak"]["names"]:
        peak = lookup_peak(name, torch.bfloat16)
        assert peak.tflops is None and name in peak.source and "--peak-tflops" in peak.source
    overridden = find_peak(torch.device("cuda"), torch.bfloat16, override_tflops=12.5)
    assert (overridden.tflops, overridden.source) == (12.5, "given by --peak-tflops")
    assert overridden.too_low == "--peak-tflops is too low for this device"


def test_peak_depends_on_the_dtype() -> None:
    assert [lookup_peak("NVIDIA A100-SXM4-40GB", d).tflops for d in (torch.float16, torch.float32)] == [312.0, 19.5]
    assert lookup_peak("Tesla V100-SXM2-16GB", torch.float16).tflops == 125.0
    for name, dtype in (("Tesla V100-SXM2-16GB", torch.bfloat16), ("NVIDIA H100 80GB HBM3", torch.float64)):
        peak = lookup_peak(name, dtype)
        assert peak.tflops is None and DTYPE_NAMES[dtype] in peak.source


def test_no_device_row_is_hidden_by_an_earlier_one() -> None:
    for name, rates in PEAKS.items():
        peaks = {DTYPE_NAMES[d]: lookup_peak(name, d).tflops for d in DTYPE_NAMES if DTYPE_NAMES[d] in rates}
        assert peaks == rates, name
        assert rates["fp16"] > rates["fp32"] and {*rates} - {"bf16"} == {"fp16", "fp32"}


@pytest.mark.parametrize("dtype", list(DTYPE_NAMES), ids=DTYPE_NAMES.values())
def test_cpu_peak_is_measured(dtype: torch.dtype) -> None:
    peak = measure_cpu_peak(dtype, seconds=0.05)
    assert peak.tflops is not None and 1e-5 < peak.tflops < 100
    assert DTYPE_NAMES[dtype] in peak.source and "thread" in peak.source and "busier than now" in peak.too_low


@pytest.mark.parametrize(("seconds_of_128", "largest"), [(1e-2, 128), (1e-7, 1024)])
def test_peak_measurement_respects_its_time_limit(seconds_of_128: float, largest: int, monkeypatch) -> None:
    """Measure with a slow fp16 unit, as many CPUs have: at a fixed size of 1024 it would take seconds."""
    now, sizes = 0.0, []

    def mm_(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        nonlocal now
        now += seconds_of_128 * (len(a) / 128) ** 3
        sizes.append(len(a))

    monkeypatch.setattr(device_peaks, "mm_", mm_)
    measure_cpu_peak(torch.float16, seconds=0.05, clock=lambda: now)
    assert max(sizes) == largest and now < 0.05 + (REPETITIONS + 1) * 1e-2


def test_peak_measurement_on_a_busy_machine() -> None:
    """Use a clock on which another process takes a second of all but every seventh interval."""
    calls = 0
    now = 0.0

    def clock() -> float:
        nonlocal calls, now
        calls += 1
        now += 1e-4 if calls % 7 == 0 else 1.0
        return now

    peak = measure_cpu_peak(torch.float32, seconds=0.25, clock=clock)
    assert peak.tflops == pytest.approx(2 * 128**3 / 1e-4 / 1e12)
    assert calls >= 2 * REPETITIONS


def test_ranks_on_shared_cores_share_the_peak() -> None:
    shared = measure_cpu_peak(torch.float32, seconds=0.05, local_ranks=10_000)
    exclusive = measure_cpu_peak(torch.float32, seconds=0.05)
    assert shared.tflops is not None and exclusive.tflops is not None
    assert shared.tflops < exclusive.tflops / 10  # 10,000 ranks on at most a few hundred cores
    assert "of their cores" in shared.source


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_gpu_matmul_is_faster_than_the_peak() -> None:
    device, size = torch.device("cuda"), 8192
    peak = find_peak(device, torch.bfloat16)
    if peak.tflops is None:
        assert "--peak-tflops" in peak.source
        return
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    torch.mm(a, a)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        torch.mm(a, a)
    stop.record()
    torch.cuda.synchronize()
    achieved_tflops = 10 * 2 * size**3 / (start.elapsed_time(stop) / 1000) / 1e12
    assert 0.2 * peak.tflops < achieved_tflops < peak.tflops


@pytest.mark.parametrize("files,quota", CASES["quotas"].values(), ids=CASES["quotas"])
def test_cpu_quota_is_the_minimum_of_all_cgroups(tmp_path, files: dict, quota: float) -> None:
    (tmp_path / "own").write_text("4:cpu:/else\n0::/pods/mine\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert local_ranks._quota(tmp_path, tmp_path / "own") == quota


def test_too_many_threads_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    [line] = preflight.thread_oversubscription_warning("cpu", RankInfo(world_size=8, local_world_size=4))
    assert line == "4 ranks x 3 threads on 8 cores are many times slower than one per core: set OMP_NUM_THREADS=2"
    assert not preflight.thread_oversubscription_warning("cpu", RankInfo(world_size=4, local_world_size=2))
    assert not preflight.thread_oversubscription_warning("cuda", RankInfo(world_size=8, local_world_size=8))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert not preflight.thread_oversubscription_warning(
        "cpu", RankInfo(world_size=64, local_world_size=64)
    )  # OMP_NUM_THREADS cannot go below 1
