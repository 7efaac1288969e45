"""The plan of a run predicts the memory of its ranks, and memory that they free is reused."""

import json
import re
import subprocess
import sys
import time

import pytest
from call_counts import count_calls
from train_cases import SMALL_RUN, config_from

import pretrain_gpt
from megalite.config.options import Config
from megalite.launch.rank_info import LaunchError, RankInfo
from megalite.planning.run_plan import make_run_plan
from megalite.training.job.preflight import check_machine
from megalite.training.logging.device_memory import (
    M_MMAP_THRESHOLD,
    M_TRIM_THRESHOLD,
    MALLOC_VARIABLES,
    keep_freed_heap,
)

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
VPP = "--num-virtual-stages-per-pipeline-rank"


def config_of(flags: str) -> Config:
    return config_from([*SMALL_RUN, "--train-iters", "1", *flags.split()])


def preset(flags: str) -> Config:
    line = f"--mock-data --lr 1 --train-iters 1 --micro-batch-size 1 --bf16 --preset {flags}"
    return config_from(line)


def test_first_rank_has_the_embedding_and_fewer_layers() -> None:
    """Use enough micro-batches for llama3-8b on 8 stages: with a single one all splits are equally fast."""
    plan = make_run_plan(preset(f"llama3-8b {PP} 8 --global-batch-size 32"), 8, 128256)
    layer, embedding = 218_112_000, 128_256 * 4096
    assert plan.model_states.num_parameters == 8_030_261_248
    assert [len(layers) for layers in plan.balance.layer_ranges] == [2, 4, 4, 5, 5, 5, 5, 2]
    state = plan.model_states.by_rank[0]
    assert plan.model_states.fullest_rank in range(3, 7) and state.local_numel == 2 * layer + embedding
    assert state.total == pytest.approx(18 * state.local_numel, rel=1e-4)
    muon = make_run_plan(
        preset(f"llama3-8b {PP} 8 --global-batch-size 32 --optimizer muon"), 8, 128256
    ).model_states.by_rank[0]
    assert muon.total == pytest.approx(18 * embedding + 14 * 2 * layer, rel=1e-4)  # matrices have no second moment
    message = r"weights and optimizer alone take 4\d\d\.\d GiB per rank on pipeline rank \d+"
    with pytest.raises(LaunchError, match=message):
        check_machine(make_run_plan(preset(f"llama3-405b {PP} 16"), 16, 128256), "cpu", RankInfo(0, 16, 0, 16))


DRY_RUN = "--dry-run --mock-data --tokenizer-type NullTokenizer --train-iters 1 --lr 1 --eval-iters 0 --bf16"


def test_plan_of_16384_ranks_needs_no_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"--preset llama3-405b --vocab-size 128255 --micro-batch-size 1 --global-batch-size 8192 {PP} 16 {VPP} 7"
    start_s = time.process_time()
    assert pretrain_gpt.main(f"{DRY_RUN} {flags} {TP} 8 --nproc 16384".split()) == 0
    text, seconds = capsys.readouterr().out, time.process_time() - start_s
    assert "pp 16 x dp 128 x cp 1 x tp 8 = 16384 ranks" in text and "warning" not in text
    assert "tp 0 1 .. 7 (node 0), dp 0 8 .. 1016 (128 nodes), pp 0 1024 .. 15360 (16 nodes)" in text
    assert len(re.findall(r"^pipeline rank", text, re.M)) == 16 and seconds < 10


@pytest.mark.parametrize("nproc", [64, 1024])
def test_tp_across_nodes_is_a_warning(nproc: int, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"--preset llama3-8b --vocab-size 128255 --micro-batch-size 1 {PP} 4 {TP} 16 --nproc {nproc}"
    assert pretrain_gpt.main(f"{DRY_RUN} {flags}".split()) == 0
    text = capsys.readouterr().out
    assert "tensor_model_parallel_size=16 crosses nodes of 8 ranks" in text and "use 8, or start 16" in text
    assert "1 micro-batch; bubble 75.0%" in text


def test_long_steps_are_extrapolated() -> None:
    """Count the function calls of a plan: they do not grow with the micro-batches. test_run_plan.py checks the values."""
    _, calls_100_000, calls_1_000_000 = (  # the first call fills the caches
        count_calls(
            lambda size=size: (
                make_run_plan(config_of(f"{PP} 4 --num-layers 8 --global-batch-size {size}"), 4, 93).balance.bubble
            )
        )
        for size in (10_000, 100_000, 1_000_000)
    )
    assert calls_1_000_000 < 1.1 * calls_100_000


def test_number_of_local_ranks_is_limited(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*SMALL_RUN, "--train-iters", "1", "--nproc", "80000", "--global-batch-size", "160000"]
    with pytest.raises(SystemExit, match="2"):
        pretrain_gpt.main(argv)
    assert "nproc=80000 is more than 8 x" in capsys.readouterr().err


# ---- freed memory is reused: the system has to provide few new pages
PROGRAM = """
import json, resource, sys
import torch
from megalite.training.logging.device_memory import keep_freed_heap

heap_is_kept = keep_freed_heap() if sys.argv[1] == "keep" else None
pages = []
for _ in range(30):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(10 << 20)
    pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps([heap_is_kept, pages]))
"""


def pages_of(mode: str) -> tuple[bool | None, list[int]]:
    argv = [sys.executable, "-c", PROGRAM, mode]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    heap_is_kept, pages = json.loads(result.stdout)
    return heap_is_kept, pages


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_freed_heap_memory_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MALLOC_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    heap_is_kept, pages = pages_of("keep")
    if not heap_is_kept:
        pytest.skip("not glibc")
    assert min(pages_of("leave")[1][-9:]) > 15  # 40 MiB, in pages of 4 KiB or 2 MiB
    assert max(pages[-9:]) < 5


@pytest.mark.parametrize("name", MALLOC_VARIABLES)
def test_user_malloc_settings_win(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "glibc.malloc.trim_threshold=1000")
    assert not keep_freed_heap()


@pytest.mark.parametrize("max_threshold,sizes_mib", [(64 << 20, [64]), (32 << 20, [64, 32]), (0, [64, 32])])
def test_refused_malloc_threshold_leaves_the_other(max_threshold: int, sizes_mib: list[int], monkeypatch) -> None:
    """Set the thresholds in glibc before 2.35, which takes at most 32 MiB: once one is set, none adapts any more."""
    settings: list[tuple[int, int]] = []

    class Library:
        @staticmethod
        def mallopt(number: int, value: int) -> int:
            settings.append((number, value))
            return int(number == M_TRIM_THRESHOLD or value <= max_threshold)

    monkeypatch.setattr("ctypes.CDLL", lambda name: Library)
    for name in MALLOC_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert keep_freed_heap() == (max_threshold > 0)
    assert settings[: len(sizes_mib)] == [(M_MMAP_THRESHOLD, size << 20) for size in sizes_mib]
    assert [number for number, _ in settings[len(sizes_mib) :]] == [M_TRIM_THRESHOLD] * (max_threshold > 0)
