"""tools/benchmark_kernels.py without a card: what it would measure runs, its bytes are true, and it says that it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"

# In a process of its own, because the interpreter is chosen when Triton is imported. Of the first candidates the second is
# another tile than the table's.
TINY = """
import itertools, sys, torch
from kernel_case import Sizes, candidates, peers_of
from kernel_cases import CASES
size = Sizes(24, 128, torch.bfloat16, torch.device("cpu"))
for case in CASES:
    ran = {peer: call() for peer, call in peers_of(case, size, ["megalite", "torch"])}
    assert set(ran) == {"megalite", "torch"}, case.name
    tried = [(label, call()) for label, call in itertools.islice(candidates(case, size), 2)]
    assert "(table)" in tried[0][0] and "(table)" not in tried[1][0], tried
    if not case.graph and case.op != "dropout_add":
        flat = [list(x) if isinstance(x, tuple) else [x] for x in ran.values()]
        for a, b in zip(*flat, strict=True):
            torch.testing.assert_close(a, b.view_as(a), rtol=0.05, atol=0.1)
        moved = sum(t.nbytes for t in (*case.make(size), *flat[0]) if t.dtype == torch.bfloat16)
        assert abs(moved / case.bytes_moved(size) - 1) < 0.05, (case.name, moved, case.bytes_moved(size))
    print(case.name)
"""


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | variables | {"PYTHONPATH": f"{TOOLS.parent}:{TOOLS}"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=100, env=env)


def test_every_case_runs_and_moves_what_it_says() -> None:
    done = run("-c", TINY, TRITON_INTERPRET="1", MEGALITE_KERNELS="triton")
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.splitlines())) == 18


def test_list_needs_no_card() -> None:
    done = run(str(TOOLS / "benchmark_kernels.py"), "--list", "--tokens", "1000", "--hidden-sizes", "1024")
    assert done.returncode == 0 and "rms_norm forward             1024      4.1 MB  2 N D e" in done.stdout


@pytest.mark.parametrize(
    "words,text",
    [
        ("", "torch sees no CUDA device"),
        ("--only swiglu,nothing", "--only nothing is unknown; there are add_layer_norm"),
        ("--tokens 0 --list", "--tokens 0 is below 1"),
        ("--hidden-sizes 100 --list", "--hidden-sizes 100 is not a positive multiple of 128"),
    ],
)
def test_what_cannot_be_measured_is_one_line(words: str, text: str) -> None:
    done = run(str(TOOLS / "benchmark_kernels.py"), *words.split(), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
