""".ci/range reads the range and the index's answer and writes its table; tools/venv.sh prints what it installs.

The run of .ci/range itself needs gigabytes.
"""

import dataclasses
import os
import shutil
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
OLD = tr.Row("2026-11-01", "2.11.0+cu130", "3.6.0", "3.12.1", "CUDA 13.0, no GPU", "quick", "9", "1", "0", "1:05")
NEW = dataclasses.replace(OLD, torch="2.15.0+cu132", date="2026-11-02")
PAGE = f"before\n{tr.TABLE_BEGIN}{tr.TABLE_END}after\n"


def test_range_is_read_from_pyproject_and_releases_are_sorted() -> None:
    assert tr.version_key(tr.lowest_version((tr.ROOT / "pyproject.toml").read_text())) >= (2, 11)
    with pytest.raises(ValueError):
        tr.lowest_version('[project]\ndependencies = ["torch"]\n')
    assert tr.releases(INDEX, "2.11") == SERVED
    assert tr.releases("ERROR: No matching distribution found for torch", "2.11") == []


def test_row_replaces_an_older_row_of_the_same_version() -> None:
    page = tr.add_row(tr.add_row(PAGE, OLD), NEW)
    rerun = dataclasses.replace(OLD, date="2026-12-01", failed="0")
    all_tests = dataclasses.replace(OLD, tests="all")
    page = tr.add_row(tr.add_row(page, rerun), all_tests)
    assert tr.read_rows(page) == [NEW, rerun, all_tests]
    assert page.startswith("before\n") and page.endswith(tr.TABLE_END + "after\n")
    assert tr.add_row(page, rerun) == page
    rows = tr.read_rows(tr.PAGE.read_text())
    assert rows and all(int(row.passed) and row.failed.isdigit() for row in rows)


def test_full_disk_is_exit_code_3_without_packages(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(tr.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tr, "DISK_BYTES", 1 << 60)
    assert tr.main(["lowest"]) == 3
    assert "set TMPDIR" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
    # with -S only Python's own library can be imported
    argv = [sys.executable, "-S", str(tr.ROOT / "tests/support/torch_range.py"), "--help"]
    assert "lowest" in subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout
    assert subprocess.run(["bash", "-n", str(tr.ROOT / ".ci" / "range")], timeout=30).returncode == 0


# ---- tools/venv.sh: what it prints before pip downloads gigabytes
ROOT = Path(__file__).resolve().parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# stands for the new .venv's interpreter: it has no torch, and prints what it is asked to install
PYTHON = """#!/usr/bin/env bash
[ "$1" = -c ] && exit 1
echo "$*"
"""


@pytest.mark.parametrize("index", [None, CPU_INDEX])
def test_venv_script_announces_the_size_of_the_cuda_build(tmp_path: Path, index: str | None) -> None:
    for name in ("tools/venv.sh", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_EXTRA_INDEX_URL": index} if index else {}
    argv = ["bash", "-euc", "source tools/venv.sh dev"]
    for installs in (True, False):  # the second time, everything is installed
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert ("-m pip install --quiet" in done.stdout) == installs
        announces_size = (
            installs and index is None and os.uname().sysname == "Linux" and not Path("/dev/nvidiactl").exists()
        )
        assert (CPU_INDEX in done.stderr and "5 GB" in done.stderr) == announces_size, done.stderr
