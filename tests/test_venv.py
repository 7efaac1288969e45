"""tools/venv.sh, which the quickstart and the tests begin with: what it says before pip downloads gigabytes."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# stands for the new .venv's interpreter: it has no torch, and tells what it was asked to install
PYTHON = """#!/usr/bin/env bash
[ "$1" = -c ] && exit 1
echo "$*"
"""


@pytest.mark.parametrize("index", [None, CPU_INDEX])
def test_where_no_card_is_the_size_of_cudas_build_is_told_before_the_download(
    tmp_path: Path, index: str | None
) -> None:
    for name in ("tools/venv.sh", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_EXTRA_INDEX_URL": index} if index else {}
    words = ["bash", "-euc", "source tools/venv.sh dev"]
    for asked in (True, False):  # the second time all is there
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert ("-m pip install --quiet" in done.stdout) == asked
        told = asked and index is None and os.uname().sysname == "Linux" and not Path("/dev/nvidiactl").exists()
        assert (CPU_INDEX in done.stderr and "5 GB" in done.stderr) == told, done.stderr
