"""What .ci/range makes of texts: the range, the index's answer, the turn, the table. The run itself needs gigabytes."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch_range as tr

INDEX = """torch (2.15.0)
Available versions: 2.15.0, 2.14.1, 2.14.0, 2.13.0+cpu, 2.13.0, 2.11.0, 2.10.0, 2.9.1, 1.13.1
  INSTALLED: 2.13.0+cpu
"""
SERVED = ["2.11.0", "2.13.0", "2.14.0", "2.14.1", "2.15.0"]
OLD = tr.Row("2026-11-01", "2.11.0+cu130", "3.6.0", "3.12.1", "CUDA 13.0, no card", "quick", "9", "1", "0", "1:05")
NEW = dataclasses.replace(OLD, torch="2.15.0+cu132", date="2026-11-02")
PAGE = f"before\n{tr.BEGIN}{tr.END}after\n"


def test_the_range_is_that_of_the_package_and_its_releases_come_in_order() -> None:
    assert tr.key(tr.floor((tr.ROOT / "pyproject.toml").read_text())) >= (2, 11)
    with pytest.raises(ValueError):
        tr.floor('[project]\ndependencies = ["torch"]\n')
    assert tr.releases(INDEX, "2.11") == SERVED
    assert tr.releases("ERROR: No matching distribution found for torch", "2.11") == []


def test_a_row_takes_the_place_of_an_older_one_of_the_same() -> None:
    page = tr.with_row(tr.with_row(PAGE, OLD), NEW)
    again = dataclasses.replace(OLD, date="2026-12-01", failed="0")
    both = dataclasses.replace(OLD, tests="all")
    page = tr.with_row(tr.with_row(page, again), both)
    assert tr.read_rows(page) == [NEW, again, both]
    assert page.startswith("before\n") and page.endswith(tr.END + "after\n")
    assert tr.with_row(page, again) == page
    rows = tr.read_rows(tr.PAGE.read_text())
    assert rows and all(int(row.passed) and row.failed.isdigit() for row in rows)


def test_no_room_is_exit_code_3_and_it_starts_without_packages(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(tr.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tr, "DISK_BYTES", 1 << 60)
    assert tr.main(["lowest"]) == 3
    assert "set TMPDIR" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
    # with -S nothing but Python's own library is there
    words = [sys.executable, "-S", str(tr.ROOT / "tests" / "torch_range.py"), "--help"]
    assert "lowest" in subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout
    assert subprocess.run(["bash", "-n", str(tr.ROOT / ".ci" / "range")], timeout=30).returncode == 0
