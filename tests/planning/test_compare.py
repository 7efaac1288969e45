"""Comparison of predicted with measured values: for a finished run, and for run directories that lack files."""

import json
import shutil
import statistics
from pathlib import Path

import programs
import pytest

from megalite.config.options import ConfigError
from megalite.planning.cluster import Cluster
from megalite.planning.cluster_file import read_cluster
from tools import plan
from tools.planning.compare import PredictionRow, cluster_of_run, compare, format_rows, plan_of_run
from tools.plots.run_data import read_run

L, D, V, S, B, M = 4, 32, 64, 16, 2, 4
FLAGS = f"""--num-layers {L} --hidden-size {D} --num-attention-heads 4 --seq-length {S} --max-position-embeddings {S}
 --micro-batch-size {B} --global-batch-size {M * B} --train-iters 6 --lr 0.01 --mock-data --vocab-size {V} --eval-iters 0
 --make-vocab-size-divisible-by 64 --swiglu --ffn-hidden-size 48 --normalization RMSNorm --position-embedding-type rope
 --disable-bias-linear --untie-embeddings-and-output-weights --log-interval 1 --device cpu --pp 2 --nproc 2
 --profile-pipeline 4"""


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "mine"
    programs.run_python("pretrain_gpt.py", *FLAGS.split(), "--run-dir", str(run_dir), timeout=120, check=True)
    return run_dir


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    """Write a cluster file with a peak, so that nothing is measured."""
    path = tmp_path / "cluster.toml"
    device = 'name = "mine"\nmemory_gib = 4\nmemory_gb_per_s = 10\npeak_tflops = { fp32 = 0.1 }\n'
    path.write_text(f"nodes = 1\nper_node = 2\n[device]\n{device}")
    return path


@pytest.fixture
def cluster(cluster_file: Path) -> Cluster:
    return read_cluster(cluster_file)


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "mine"))


def rows_by_part(rows: list[PredictionRow]) -> dict[str, PredictionRow]:
    by_part = {row.part.strip(): row for row in rows}
    assert len(by_part) == len(rows)
    return by_part


def test_measured_values_come_from_the_run_files(run: Path, cluster: Cluster) -> None:
    rows = rows_by_part(compare(run, cluster))
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["perf/step_s"] for row in logged if "perf/step_s" in row]
    assert len(steps) == 6 and rows["step"].measured == statistics.median(steps[1:])
    report = json.loads((run / "report.json").read_text())
    seconds, count = report["seconds"], report["steps"]
    assert rows["compute"].measured == pytest.approx((seconds["forward"] + seconds["backward"]) / count)
    assert rows["optimizer"].measured == pytest.approx(seconds["optimizer"] / count)
    assert rows["bubble and pp messages"].measured == pytest.approx(seconds["bubble"] / count)
    timeline = json.loads((run / "timeline.json").read_text())
    spans = [span for rank in timeline["ranks"] for span in rank["spans"] if span["action"][0] in "FB"]
    busy = [(span["end_s"], span["end_s"] - span["start_s"]) for span in spans]
    assert len(busy) == 2 * 2 * M
    waits = 1 - sum(length for _, length in busy) / (2 * max(end for end, _ in busy))
    assert rows["pipeline bubble"].measured == pytest.approx(waits)
    ranks = [row["mem/max_allocated_gib"] for row in logged if "mem/max_allocated_gib" in row]
    assert rows["peak of pipeline rank 0"].measured == pytest.approx(max(ranks) * 2**30, rel=0.01)


def test_predicted_values_equal_a_hand_count(run: Path, cluster: Cluster) -> None:
    rows = rows_by_part(compare(run, cluster))
    parts = ("compute", "bubble and pp messages", "exposed communication", "optimizer")
    assert rows["step"].predicted == pytest.approx(sum(rows[name].predicted or 0.0 for name in parts))
    assert rows["tokens/s"].predicted == pytest.approx(M * B * S / (rows["step"].predicted or 1))
    # elements of two layers, the head and its norm; all are multiples of 64, so none is padded
    layer = 4 * D * D + 3 * D * 48 + 2 * 64
    last = 2 * layer + V * D + 64
    assert rows["weights of pipeline rank 1"].predicted == 4 * last == rows["gradients of pipeline rank 1"].predicted
    assert rows["optimizer of pipeline rank 1"].predicted == 8 * last
    # FLOPs per token of two layers, forward: projections, feed-forward block, scores of half the square; and those of
    # the head with both gradients. The second stage has the head and waits only for the first forward and last backward
    two = 2 * (2 * D * 4 * D + 6 * D * 48 + 4 * D * S / 2)
    first, second = 3 * two, 3 * two + 3 * 2 * D * V
    bubble = 1 - M * (first + second) / (2 * (first + M * second))
    assert rows["pipeline bubble"].predicted == pytest.approx(bubble)
    assert rows["weights of pipeline rank 1"].measured is None and rows["data"].predicted is None
    assert rows["step"].ratio == pytest.approx((rows["step"].predicted or 0) / (rows["step"].measured or 1))


def test_comparison_table(run: Path, cluster_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert plan.main(["compare", str(run), "--json", str(tmp_path / "rows.json"), "--cluster", str(cluster_file)]) == 0
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert any(line.startswith("step ") and line.count(" s ") == 2 for line in lines)
    assert any(line.startswith("weights of pipeline rank 1") and "not recorded" in line for line in lines)
    assert any(line.startswith("data not predicted") for line in lines)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {"part", "unit", "predicted", "measured", "note", "ratio"} == rows[0].keys()
    assert (
        format_rows([PredictionRow("step", "s", 1.0, 2.0)]).split()
        == "predicted measured ratio step 1 s 2 s 0.50".split()
    )


def test_missing_run_files_are_reported(run: Path, cluster: Cluster) -> None:
    for file in ("report.json", "timeline.json", "metrics.jsonl"):
        (run / file).unlink()
    rows = rows_by_part(compare(run, cluster))
    times = ("step", "compute", "optimizer", "tokens/s", "MFU", "pipeline bubble")
    assert all(rows[name].measured is None and rows[name].predicted for name in times)
    assert "--profile-pipeline" in rows["pipeline bubble"].note
    (run / "timeline.json").write_text('{"ranks": [{"spans": 3}]}')
    assert "timeline.json is damaged" in rows_by_part(compare(run, cluster))["pipeline bubble"].note


def test_cluster_of_the_run_is_used(run: Path) -> None:
    run_data = read_run(run, "mine")
    run_plan = plan_of_run(run_data)
    actual = cluster_of_run(run_data, run_plan)
    assert (actual.device.name, actual.world, actual.devices_per_node) == ("cpu", 2, 2)
    run_data.run_info |= {"device": "cuda", "machine": {"gpu": "NVIDIA H100 80GB HBM3"}, "hosts": ["a", "b"]}
    actual = cluster_of_run(run_data, run_plan)
    assert (actual.device.name, actual.num_nodes, actual.devices_per_node) == ("h100", 2, 1)
    assert [list(layers) for layers in run_plan.balance.layer_ranges] == [
        list(range(*bounds)) for bounds in run_data.run_info["layers"]
    ]


def test_incomparable_runs_are_refused(run: Path, cluster: Cluster, tmp_path: Path, capsys) -> None:
    with pytest.raises(ConfigError, match="no files of a run"):
        compare(tmp_path / "nothing")
    events = run / "events.jsonl"
    events_text = events.read_text()
    events.write_text(events_text.replace('"device": "cpu"', '"device": "tpu"'))
    assert plan.main(["compare", str(run)]) == 2 and "device='tpu'" in capsys.readouterr().err
    events.write_text(events_text)
    config = run / "run_config.toml"
    options = config.read_text()
    pp = "pipeline_model_parallel_size = 2"
    config.write_text(options.replace(pp, f"{pp}\nnonsense = 1"))
    with pytest.raises(ConfigError, match="nonsense"):
        compare(run, cluster)
    config.unlink()
    with pytest.raises(ConfigError, match=r"run_config.toml is not there"):
        compare(run, cluster)
