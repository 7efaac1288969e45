"""What CUDA's branches do on a simulated card (branch_cases.py); and that there is none that no run passes."""

import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from train_cases import config_from

from card.branch_cases import CASES, tried, watched
from card.mentions import mentions
from card.simulator import cuda
from examples import quickstart
from megalite.config.check import check

ROOT = Path(__file__).resolve().parents[2]
# the parts of the report on a card: processes of their own, which its rehearsal starts (test_gpu_report_rehearsal.py)
REHEARSED = ("tools/bench/gpu_report_", "tools/bench/kernels.py")
WORLD = {"two_ranks": 2, "timeline": 2, "cluster": 2}


@functools.cache
def found(name: str) -> dict[str, Any]:
    """Of the first rank."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(WORLD.get(name, 1), tried, name, folder, timeout=110)[0]


def losses(said: str) -> list[str]:
    return re.findall(r"step +\d+/\d+  loss ([0-9.]+)", said)


def test_the_log_tells_the_memory_of_the_ranks_own_card() -> None:
    made = found("everything_on")
    assert made["code"] == 0
    line = r"\[Rank 0\] \(after \d iterations\) memory \(MB\) \| allocated: ([0-9.]+) \| max allocated: ([0-9.]+) \| "
    line += r"reserved: ([0-9.]+) \| max reserved: ([0-9.]+) \| total device memory used: ([0-9.]+)"
    rows = [[float(x) for x in row] for row in re.findall(line, made["said"])]
    assert len(rows) == 2
    for allocated, most, reserved, most_reserved, used in rows:
        assert 0 < allocated < most <= reserved <= most_reserved and used == reserved + 512
    assert [sorted(point) for point in made["memory"]] == [
        ["mem-allocated-bytes", "mem-allocated-count", "mem-max-allocated-bytes", "mem-reserved-bytes"]
    ] * 2
    assert all(value > 0 for point in made["memory"] for value in point.values())
    assert made["given_back"] == 2 * 2  # before and after each update


def test_profiler_history_timers_and_peak() -> None:
    made = found("everything_on")
    assert made["calls"] == ["cudaProfilerStart", "cudaProfilerStop"] and made["history"] == cuda.SNAPSHOT
    assert "peak              989 TFLOP/s (NVIDIA H100 80GB HBM3 bf16 dense)" in made["said"]
    for name in ("forward-backward", "all-grads-sync", "optimizer", "forward-compute", "backward-compute", "evaluate"):
        assert f"    {name} ..." in made["said"], name
    assert "scheduled an async checkpoint save at iteration       1" in made["said"]  # auto: in the background
    assert made["said"].count("committed iter_") == 2


def test_replayed_micro_batches_train_as_eager_ones() -> None:
    made, twin = found("graphs"), found("eager")
    assert made["code"] == 0 and made["replays"] == 3 * 4 - 1
    assert len(losses(made["said"])) == 3 and losses(made["said"]) == losses(twin["said"])
    assert made["trace"] == ["rank-000.json.gz"]
    assert made["kinds"] == ["ProfilerActivity.CPU", "ProfilerActivity.CUDA"]
    assert "saved iter_0000003" in made["said"]


def test_without_memory_for_a_copy_the_state_itself_is_saved() -> None:
    made = found("no_memory_for_a_copy")
    assert made["code"] == 0
    assert "rank 0 has no memory for a copy of what it saves (cudaHostAlloc: out of memory): the state" in made["said"]
    assert made["said"].count("committed iter_") == 2


def test_who_computes_is_chosen_by_the_card() -> None:
    made = found("who_computes")
    assert made["attention"] == made["attention without triton"] == ["flash", "cudnn", "cudnn"]
    assert made["processors"] == 132
    assert (made["apex"], made["with apex"]) == (False, True)
    assert made["without triton"] == "torch (triton is not installed)" and "pip install triton" in made["compile"]


def test_what_is_missing_at_the_start_is_told() -> None:
    made = found("refused")
    assert made["auto"] == ["cuda", "cpu"]
    assert made["local rank 1"].startswith("rank 1 of 4 cannot exchange data with all others")
    assert made["local rank 2"].startswith("local rank 2 has no card, 2 visible: use --nproc 2 or less")
    assert [line.partition(";")[0] for line in made["no card"]] == [
        "device=cuda but torch sees no card",
        "torch sees no CUDA device",
    ]


def test_the_clock_takes_events_and_the_probe_finds_the_card() -> None:
    made = found("clock_and_probe")
    assert not made["errors"] and all(rate > 0 for rate in made["rates"])
    assert made["row"].us > 0 and made["row"].extra_mib == pytest.approx(1 / 16, rel=0.1)  # x * 2, beside x
    assert (made["facts"]["device"], made["facts"]["memory"]) == ("NVIDIA H100 80GB HBM3", 80 << 30)


def test_the_benchmark_reports_the_card() -> None:
    made = found("benchmark")
    assert made["code"] == 0 and made["device"] == "NVIDIA H100 80GB HBM3" and made["peak_tflops"] == 66.9
    assert made["memory"] > 100_000 and len(made["losses"]) == 3


@pytest.mark.everything
def test_two_ranks_and_the_peer_run() -> None:
    assert len(found("two_ranks")["losses"]) == 2
    assert found("peer")["memory"] > 100_000
    assert found("timeline")["timeline"] == {"communication_s": 4.0, "hidden_s": 1.0}


@pytest.mark.parametrize("cards", [1, 2, 3, 4, 8])
def test_the_quickstart_has_a_layout_for_every_number_of_cards(cards: int) -> None:
    with cuda.installed([], cards=cards):
        file, flags, _ = quickstart.layout()
    world = int(flags[1]) if flags else 1
    config = config_from(["--config", str(ROOT / file), *flags])
    assert world == {1: 1, 2: 2, 3: 2}.get(cards, 4) <= cards and not check(config, world)


def test_links_of_cards_are_measured() -> None:
    made = found("cluster")
    assert made["code"] == 0
    kinds = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "message"}
    assert {row["kind"] for row in made["rows"]} == kinds


def test_a_card_is_calibrated_compared_verified_and_has_no_limit_of_a_cpu() -> None:
    made = found("planned")
    measured = made["measured"]
    assert (measured["kind"], made["told"], made["verified"]) == ("h100", "h100", "cuda")
    assert "H100" in measured["device"] and all(time > 0 for time in measured["blocks"]["layer"][:2])
    assert made["refused"] == ["memory_gib=4 is for a CPU; drop it, or use --device cpu"]


@pytest.mark.parametrize(("cards", "ranks"), [(0, 4), (1, 1), (2, 2), (4, 4)])
def test_the_quickstart_counts_its_ranks(
    cards: int, ranks: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The speed is of all ranks together; a pipeline of two stages need not be of four ranks."""
    log = {"train/loss": 1.0, "tokens": 5, "perf/mfu": None, "perf/tokens_per_s_per_gpu": 10.0}
    log |= {"perf/tflops_per_gpu": 2.0, "val/valid/loss": 1.5}
    monkeypatch.setattr(quickstart, "RUN", tmp_path)
    (tmp_path / "status.json").write_text(json.dumps({"outcome": "done"}))
    monkeypatch.setattr(quickstart, "rows", lambda folder: [log])
    for name, value in (("prepare_data", None), ("twin_difference", (0.0, 1)), ("command", "")):
        monkeypatch.setattr(quickstart, name, lambda *a, value=value, **k: value)
    monkeypatch.setattr("sys.argv", ["quickstart.py"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with cuda.installed([], cards=cards):
        assert quickstart.main() == 0
    said = capsys.readouterr().out
    assert f"{10 * ranks} tokens/s, {2 * ranks:.3f} TFLOP/s, MFU n/a ({ranks} ranks together)" in " ".join(said.split())


@pytest.mark.everything
@pytest.mark.timeout(900)
def test_no_place_of_the_source_that_speaks_of_cards_is_left_out(tmp_path: Path) -> None:
    seen = set()
    for name in CASES:
        (tmp_path / name).mkdir()
        for rank in run_ranks(WORLD.get(name, 1), watched, name, str(tmp_path / name), timeout=400):
            seen |= rank
    left = [str(place) for place in mentions() if place not in seen and not place.file.startswith(REHEARSED)]
    assert not left and len(seen) > 100
