"""tools/benchmark_comm.py: links fitted to times, every group of a layout."""

import csv
import json
from pathlib import Path

import documents
import programs
import pytest
from toml_tables import MESSAGES

from tools import benchmark_comm
from tools.bench.collectives import bandwidths, fit_link

TOOL = ("tools/benchmark_comm.py", "--device", "cpu")


def test_bandwidths_equal_nccl_tests() -> None:
    """Take the factors from nccl-tests' doc/PERFORMANCE.md; 16 MB in 2 ms are an algorithm bandwidth of 8 GB/s."""
    rows = [("all_reduce", 2, 8.0), ("all_reduce", 8, 14.0), ("all_gather", 4, 6.0), ("reduce_scatter", 8, 7.0)]
    for kind, ranks, bus in [*rows, ("all_to_all", 2, 4.0), ("broadcast", 8, 8.0), ("message", 2, 16.0)]:
        assert bandwidths(kind, 16_000_000, ranks, 0.002) == (8.0, pytest.approx(bus))


def test_fit_recovers_latency_and_bandwidth() -> None:
    sizes = [1 << n for n in range(10, 27, 2)]
    noise = [1.02, 0.97, 1.01, 1.03, 0.98, 1.0, 0.99, 1.02, 0.98]
    latency, rate = fit_link([(n, (2e-5 + n / 4e10) * f) for n, f in zip(sizes, noise, strict=True)])
    assert latency == pytest.approx(2e-5, rel=0.05) and rate == pytest.approx(4e10, rel=0.05)
    assert fit_link([(1000, 1e-3)]) == (1e-3, 1e6)  # a single size: its time is the latency, its speed the bandwidth
    latency, rate = fit_link([(1000, 1.0), (10_000_000, 0.5)])  # an impossible slope
    assert (latency, rate) == (1.0, 2e7)


def test_links_are_classified_by_rank_location() -> None:
    rows = [
        {"axis": axis, "size": 2, "kind": "message", "groups": groups, "bytes": n, "us": 2e6 * (latency + n / rate)}
        for axis, latency, rate in (("tp", 1e-6, 4e11), ("dp", 1e-5, 4e10), ("pp", 2e-5, 2e10), ("world", 1e-4, 1e9))
        for groups in ("all", "one")
        for n in (1024, 1 << 26)
    ]
    links = benchmark_comm.fit_links(rows, dict(tp=True, dp=False, pp=False, world=False))
    assert links["inside"]["bytes_per_s"] == pytest.approx(4e11)
    link = links["between"]
    assert (link["bytes_per_s"], link["latency_s"]) == (pytest.approx(2e10), pytest.approx(2e-5))


@pytest.mark.parametrize("flags", MESSAGES["collectives"])
def test_benchmark_comm_refuses_impossible_measurements(flags: str, monkeypatch, capsys) -> None:
    assert documents.run_script("tools/benchmark_comm.py", flags.split(), monkeypatch) == 2
    assert MESSAGES["collectives"][flags] in capsys.readouterr().err


def test_two_ranks_measure_every_collective(tmp_path: Path) -> None:
    files = [str(tmp_path / "found.json"), str(tmp_path / "found.csv")]
    sizes = ["--min-bytes", "1024", "--max-bytes", "20000", "--factor", "16", "--times", "2"]
    done = programs.run_python(*TOOL, "--nproc", "2", *sizes, "--json", files[0], "--csv", files[1], check=True)
    results = json.loads(Path(files[0]).read_text())
    assert results["complete"] and results["ranks"] == 2 and len(results["hosts"]) == 2
    kinds = [(row["axis"], row["kind"], row["bytes"]) for row in results["rows"]]
    assert kinds == [("dp", kind, size) for kind in benchmark_comm.FACTORS for size in (1024, 16384)]
    link = results["links"]["inside"]
    assert results["links"]["axes"]["dp"] == link and min(link.values()) > 0 and "between" not in results["links"]
    rows = list(csv.DictReader(Path(files[1]).read_text().splitlines()))
    assert [float(row["us"]) for row in rows] == [row["us"] for row in results["rows"]]
    assert done.stdout.count("all_to_all") == 2 and "[inside]\ngb_per_s = " in done.stdout


@pytest.mark.nightly
def test_groups_are_measured_together_and_alone() -> None:
    sizes = ["--min-bytes", "1024", "--max-bytes", "1024", "--times", "2", "--kinds", "all_reduce", "--alone"]
    done = programs.run_python(*TOOL, "--nproc", "4", *sizes, "--tensor-model-parallel-size", "2", check=True)
    lines = [line.split()[:4] for line in done.stdout.splitlines()[1:] if line]
    axes = [(axis, ranks, groups) for axis, ranks in (("tp", "2"), ("dp", "2")) for groups in ("all", "one")]
    assert lines == [[*fields, "all_reduce"] for fields in (*axes, ("world", "4", "all"))]
